"""A locally connected network, cut into patches over virtual machines (Dean et al. 2012, section 3).

A node reads a window of the layer before it, through weights that it shares with no other (Le et al. 2012). Part p
holds the nodes of one rectangle of the image in every layer, with their weights: upwards it sends the states on its rim
to the parts whose windows reach them, downwards these return the gradients: a halo exchange, nothing else crosses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from experiments.model_parallel_dense import sigmoid
from experiments.model_parallel_machines import Block, Exchange, Floats, Program, Receive, Send, Work, cut

# Rows and columns of the image.
Rectangle = tuple[slice, slice]
# Windows that are computed together. As many columns as a machine of 64 holds: with whole rows, in the first run, one
# machine's windows fitted no cache, and two were 2.6 times as quick as one.
COLUMNS_AT_ONCE = 4


@dataclass(frozen=True)
class Patches:
    """Sizes of a locally connected network, and a minibatch to compute. States are (rows, columns, examples, maps)."""

    image: tuple[int, int]
    # Nodes at each place of a layer; the image has one value at each.
    maps: int
    num_layers: int
    # Odd: a window reaches as far to each side.
    window: int
    minibatch: int
    dtype: npt.DTypeLike = np.float32
    seed: int = 0

    @property
    def reach(self) -> int:
        return self.window // 2

    @property
    def num_parameters(self) -> int:
        return sum(weights.size + bias.size for weights, bias in self.parameters)

    @property
    def operations(self) -> int:
        """Multiplications and additions of a minibatch, forward and backward; no gradient of the inputs is needed."""
        products = [weights.size for weights, _ in self.parameters]
        return 2 * self.minibatch * (3 * sum(products) - products[0])

    @cached_property
    def parameters(self) -> list[tuple[Floats, Floats]]:
        """Each layer's weights, (rows, columns, inputs of a window, maps), and bias, (rows, columns, maps)."""
        random = np.random.default_rng(self.seed)
        inputs = [self.window**2, *[self.window**2 * self.maps] * (self.num_layers - 1)]
        return [
            (
                (random.standard_normal((*self.image, size, self.maps)) * 2 / np.sqrt(size)).astype(self.dtype),
                (random.standard_normal((*self.image, self.maps)) / 10).astype(self.dtype),
            )
            for size in inputs
        ]

    @cached_property
    def examples(self) -> tuple[Floats, Floats]:
        """Images, and the states that the last layer should have."""
        random = np.random.default_rng([self.seed, 1])
        images = random.standard_normal((*self.image, self.minibatch, 1)).astype(self.dtype)
        return images, random.random((*self.image, self.minibatch, self.maps)).astype(self.dtype)

    def layer_shapes(self, num_parts: int) -> dict[str, tuple[int, ...]]:
        """Places of each layer; the maps at a place cross together."""
        return {_layer(index): self.image for index in range(self.num_layers)}

    def parts(self, num_parts: int) -> list[Program]:
        """What each machine does."""
        own = rectangles(self.image, num_parts)
        return [_patch(self, part, own) for part in range(num_parts)]


def rectangles(image: tuple[int, int], num_parts: int) -> list[Rectangle]:
    """Near-equal patches in rows of patches, as square as the number of parts allows: 8 are 2 by 4."""
    rows = max(rows for rows in range(1, num_parts + 1) if num_parts % rows == 0 and rows * rows <= num_parts)
    return list(itertools.product(cut(image[0], rows), cut(image[1], num_parts // rows)))


def _layer(index: int) -> str:
    return f"layer {index + 1}"


def _patch(net: Patches, part: int, own: Sequence[Rectangle]) -> Program:
    mine, halo = own[part], [_around(rectangle, net) for rectangle in own]
    # Of which others this part reads states, and which read this part's.
    sources = {other: both for other, theirs in enumerate(own) if other != part and (both := _both(theirs, halo[part]))}
    readers = {other: both for other, theirs in enumerate(halo) if other != part and (both := _both(mine, theirs))}
    held = [(weights[mine].copy(), bias[mine].copy()) for weights, bias in net.parameters]
    images, targets = net.examples
    read = [place([images[halo[part]]], [_inside(halo[part], mine, net.reach)], _padded(mine, net.reach))]
    states = yield Work(local_layer, (read[0], *held[0], net.window))
    for index in range(1, net.num_layers):
        layer = _layer(index - 1)
        yield from _send_rim(layer, states, mine, readers, part, len(own))
        received = [states]
        for source in sources:
            received.append((yield Receive(source, layer, "up")))
        where = [_inside(rectangle, mine, net.reach) for rectangle in (mine, *sources.values())]
        read.append((yield Work(place, (received, where, _padded(mine, net.reach)))))
        states = yield Work(local_layer, (read[index], *held[index], net.window))
    gradient = yield Work(square_gradient, (states, targets[mine]))
    blocks: list[Block] = []
    for index in reversed(range(net.num_layers)):
        layer = _layer(index - 1)
        if index:
            # Sent before the weights' own gradients are computed: those do not wait for the wires.
            around = yield Work(input_gradient, (gradient, held[index][0], net.window))
            for source in _in_turn(sources, part, len(own)):
                share = yield Work(cut_out, (around, _inside(sources[source], mine, net.reach)))
                yield Send(source, layer, "down", sources[source], share)
        weights, bias = yield Work(local_parameter_gradients, (read[index], gradient, net.window))
        blocks += _blocks(index, weights, bias, mine, net)
        if index:
            shares = [(yield Work(cut_out, (around, _inside(mine, mine, net.reach))))]
            for reader in readers:
                shares.append((yield Receive(reader, layer, "down")))
            where = [_inside(rectangle, mine, 0) for rectangle in (mine, *readers.values())]
            below = _inside(mine, mine, net.reach)
            gradient = yield Work(add_through_sigmoid, (shares, where, read[index][below]))
    return blocks


def _send_rim(
    layer: str, states: Floats, mine: Rectangle, readers: dict[int, Rectangle], part: int, num_parts: int
) -> Exchange:
    for reader in _in_turn(readers, part, num_parts):
        rim = yield Work(cut_out, (states, _inside(readers[reader], mine, 0)))
        yield Send(reader, layer, "up", readers[reader], rim)


def _in_turn(others: dict[int, Rectangle], part: int, num_parts: int) -> list[int]:
    """The next part first, so that no line in is every sender's first."""
    return sorted(others, key=lambda other: (other - part) % num_parts)


def _blocks(index: int, weights: Floats, bias: Floats, mine: Rectangle, net: Patches) -> list[Block]:
    corner = (mine[0].start, mine[1].start)
    return [
        Block(f"{_layer(index)} weights", (*corner, 0, 0), (*net.image, *weights.shape[2:]), weights),
        Block(f"{_layer(index)} bias", (*corner, 0), (*net.image, net.maps), bias),
    ]


# Rectangles.


def _around(rectangle: Rectangle, net: Patches) -> Rectangle:
    """What the windows of a rectangle's nodes reach, within the image."""
    rows, columns = (
        slice(max(0, side.start - net.reach), min(size, side.stop + net.reach))
        for side, size in zip(rectangle, net.image, strict=True)
    )
    return rows, columns


def _both(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """Where two rectangles overlap."""
    rows, columns = (slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return (rows, columns) if rows.start < rows.stop and columns.start < columns.stop else None


def _inside(rectangle: Rectangle, mine: Rectangle, padding: int) -> Rectangle:
    """A rectangle's place in an array that begins so much before a part's own rectangle."""
    rows, columns = (
        slice(side.start - own.start + padding, side.stop - own.start + padding)
        for side, own in zip(rectangle, mine, strict=True)
    )
    return rows, columns


def _padded(mine: Rectangle, reach: int) -> tuple[int, int]:
    rows, columns = (side.stop - side.start + 2 * reach for side in mine)
    return rows, columns


# The work: functions of arrays.


def place(pieces: Sequence[Floats], where: Sequence[Rectangle], size: tuple[int, int]) -> Floats:
    """One array of several pieces; what none of them covers lies beyond the image and is zero."""
    whole = np.zeros((*size, *pieces[0].shape[2:]), pieces[0].dtype)
    for piece, rectangle in zip(pieces, where, strict=True):
        whole[rectangle] = piece
    return whole


def cut_out(states: Floats, where: Rectangle) -> Floats:
    return np.ascontiguousarray(states[where])


def local_layer(read: Floats, weights: Floats, bias: Floats, window: int) -> Floats:
    """States of a rectangle's nodes, from those that their windows reach."""
    rows, columns, _, maps = weights.shape
    states = np.empty((rows, columns, read.shape[2], maps), read.dtype)
    for row, strip in _strips(rows, columns):
        sums = _windows(read, row, strip, window) @ weights[row, strip] + bias[row, strip, None]
        states[row, strip] = sigmoid(sums)
    return states


def square_gradient(states: Floats, targets: Floats) -> Floats:
    """The gradient of half the squared error, summed over nodes and averaged over examples, before the sigmoid."""
    gradient: Floats = (states - targets) * states * (1 - states) / states.shape[2]
    return gradient


def input_gradient(gradient: Floats, weights: Floats, window: int) -> Floats:
    """The gradient of all states that the windows of a rectangle's nodes reach."""
    rows, columns, examples, _ = gradient.shape
    maps = weights.shape[2] // window**2
    around = np.zeros((rows + window - 1, columns + window - 1, examples, maps), gradient.dtype)
    for row, strip in _strips(rows, columns):
        of_windows = gradient[row, strip] @ weights[row, strip].transpose(0, 2, 1)
        of_windows = of_windows.reshape(-1, examples, window, window, maps)
        for down in range(window):
            for right in range(window):
                around[row + down, strip.start + right : strip.stop + right] += of_windows[:, :, down, right]
    return around


def local_parameter_gradients(read: Floats, gradient: Floats, window: int) -> tuple[Floats, Floats]:
    rows, columns, _, maps = gradient.shape
    weights = np.empty((rows, columns, window**2 * read.shape[3], maps), read.dtype)
    for row, strip in _strips(rows, columns):
        weights[row, strip] = _windows(read, row, strip, window).transpose(0, 2, 1) @ gradient[row, strip]
    return weights, gradient.sum(axis=2)


def add_through_sigmoid(shares: Sequence[Floats], where: Sequence[Rectangle], states: Floats) -> Floats:
    """The gradients that all parts have of a rectangle's states, through the sigmoid that made those."""
    total = shares[0].copy()
    for share, rectangle in zip(shares[1:], where[1:], strict=True):
        total[rectangle] += share
    return total * states * (1 - states)


def _strips(rows: int, columns: int) -> Iterator[tuple[int, slice]]:
    """A few columns of each row, one after another."""
    for row in range(rows):
        for begin in range(0, columns, COLUMNS_AT_ONCE):
            yield row, slice(begin, min(columns, begin + COLUMNS_AT_ONCE))


def _windows(read: Floats, row: int, strip: slice, window: int) -> Floats:
    """What each node of a strip reads: (columns, examples, inputs of a window)."""
    band = read[row : row + window, strip.start : strip.stop + window - 1]
    views = np.lib.stride_tricks.sliding_window_view(band, window, axis=1)
    columns, examples = views.shape[1], views.shape[2]
    return np.ascontiguousarray(views.transpose(1, 2, 0, 4, 3)).reshape(columns, examples, -1)
