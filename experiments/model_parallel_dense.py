"""A fully connected network, cut by columns or by layers over virtual machines (Dean et al. 2012, section 3).

Sigmoid layers and a softmax, as in the paper's speech network. Cut by columns, part p holds `W[:, J_p]` and `b[J_p]` of
every layer: upwards each part sends the states of its nodes to all others, downwards each returns its share of the
nodes' gradients to their part. Cut by layers (stages), only the states of a stage's last layer cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from experiments.model_parallel_machines import Block, Direction, Exchange, Floats, Program, Receive, Send, Work, cut

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Dense:
    """Sizes of the layers, the input's first and the classes' last, and a minibatch to compute."""

    widths: tuple[int, ...]
    minibatch: int
    dtype: npt.DTypeLike = np.float32
    seed: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.widths) - 1

    @property
    def num_parameters(self) -> int:
        return sum((before + 1) * after for before, after in pairwise(self.widths))

    @property
    def operations(self) -> int:
        """Multiplications and additions of a minibatch, forward and backward; no gradient of the inputs is needed."""
        products = [before * after for before, after in pairwise(self.widths)]
        return 2 * self.minibatch * (3 * sum(products) - products[0])

    @cached_property
    def parameters(self) -> list[tuple[Floats, Floats]]:
        """Each layer's matrix and bias."""
        random = np.random.default_rng(self.seed)
        return [
            (
                (random.standard_normal((before, after)) * 2 / np.sqrt(before)).astype(self.dtype),
                (random.standard_normal(after) / 10).astype(self.dtype),
            )
            for before, after in pairwise(self.widths)
        ]

    @cached_property
    def examples(self) -> tuple[Floats, Labels]:
        """Inputs, one a row, and the class of each."""
        random = np.random.default_rng([self.seed, 1])
        inputs = random.standard_normal((self.minibatch, self.widths[0])).astype(self.dtype)
        return inputs, random.integers(self.widths[-1], size=self.minibatch)

    def layer_shapes(self, num_parts: int) -> dict[str, tuple[int, ...]]:
        """How many nodes each layer has whose states may cross; the softmax has one a part, which adds its columns."""
        shapes: dict[str, tuple[int, ...]] = {_layer(index): (width,) for index, width in enumerate(self.widths[1:])}
        return shapes | {"softmax": (num_parts,)}

    def parts(self, num_parts: int) -> list[Program]:
        """What each machine does, where the layers are cut by columns."""
        columns = [cut(width, num_parts) for width in self.widths[1:]]
        return [_column_part(self, part, columns) for part in range(num_parts)]

    def stages(self, num_stages: int) -> list[Program]:
        """What each machine does, where each holds some of the layers."""
        layers = cut(self.num_layers, num_stages)
        return [_stage(self, stage, layers) for stage in range(num_stages)]


def _layer(index: int) -> str:
    return f"layer {index + 1}"


# Cut by columns.


def _column_part(net: Dense, part: int, columns: Sequence[Sequence[slice]]) -> Program:
    own = [of_layer[part] for of_layer in columns]
    held = [(w[:, mine].copy(), b[mine].copy()) for (w, b), mine in zip(net.parameters, own, strict=True)]
    inputs, labels = net.examples
    # What each layer reads is all of the layer before it.
    read = [inputs]
    for index, (matrix, bias) in enumerate(held[:-1]):
        states = yield Work(sigmoid_layer, (read[-1], matrix, bias))
        read.append((yield from _gather(_layer(index), states, part, columns[index])))
    logits = yield Work(linear_layer, (read[-1], *held[-1]))
    scale = yield Work(row_scale, (logits,))
    everybody = [slice(other, other + 1) for other in range(len(columns[0]))]
    scales = yield from _exchange("softmax", "up", [scale] * len(everybody), part, everybody)
    gradient = yield Work(softmax_gradient, (logits, scales, labels - own[-1].start))
    blocks: list[Block] = []
    for index in reversed(range(net.num_layers)):
        shares: list[Floats] = []
        if index:
            # Sent before the layer's own gradients are computed: those do not wait for the wires.
            shares = yield Work(input_gradient_by_part, (gradient, held[index][0], columns[index - 1]))
            yield from _send_all(_layer(index - 1), "down", shares, part, columns[index - 1])
        matrix, bias = yield Work(parameter_gradients, (read[index], gradient))
        blocks += _blocks(index, matrix, bias, net.widths[index + 1], own[index].start)
        if index:
            shares = yield from _receive_all(_layer(index - 1), "down", shares[part], part, len(shares))
            gradient = yield Work(sigmoid_gradient, (shares, read[index][:, own[index - 1]].copy()))
    return blocks


def _gather(layer: str, states: Floats, part: int, columns: Sequence[slice]) -> Exchange:
    if len(columns) == 1:
        return states
    gathered = yield from _exchange(layer, "up", [states] * len(columns), part, columns)
    return (yield Work(join_columns, (gathered,)))


def _exchange(
    layer: str, direction: Direction, values: Sequence[Floats], part: int, nodes: Sequence[slice]
) -> Exchange:
    yield from _send_all(layer, direction, values, part, nodes)
    return (yield from _receive_all(layer, direction, values[part], part, len(values)))


def _send_all(
    layer: str, direction: Direction, values: Sequence[Floats], part: int, nodes: Sequence[slice]
) -> Exchange:
    """Sends each other part its values: the next one's first, so that no line in is every sender's first."""
    num_parts = len(values)
    for distance in range(1, num_parts):
        to = (part + distance) % num_parts
        owner = part if direction == "up" else to
        yield Send(to, layer, direction, (nodes[owner],), values[to])


def _receive_all(layer: str, direction: Direction, mine: Floats, part: int, num_parts: int) -> Exchange:
    """The values of all parts in their order, this one's among them."""
    received = []
    for source in range(num_parts):
        received.append(mine if source == part else (yield Receive(source, layer, direction)))
    return received


# Cut by layers.


def _stage(net: Dense, stage: int, layers: Sequence[slice]) -> Program:
    own = range(layers[stage].start, layers[stage].stop)
    last = stage == len(layers) - 1
    states, labels = net.examples
    if stage:
        states = yield Receive(stage - 1, _layer(own[0] - 1), "up")
    read = [states]
    for index in own:
        if index < net.num_layers - 1:
            read.append((yield Work(sigmoid_layer, (read[-1], *net.parameters[index]))))
    if last:
        logits = yield Work(linear_layer, (read[-1], *net.parameters[-1]))
        scale = yield Work(row_scale, (logits,))
        gradient = yield Work(softmax_gradient, (logits, [scale], labels))
    else:
        yield Send(stage + 1, _layer(own[-1]), "up", (slice(None),), read[-1])
        shares = [(yield Receive(stage + 1, _layer(own[-1]), "down"))]
        gradient = yield Work(sigmoid_gradient, (shares, read[-1]))
    blocks: list[Block] = []
    for index in reversed(own):
        before = read[index - own[0]]
        if index:
            shares = yield Work(
                input_gradient_by_part, (gradient, net.parameters[index][0], [slice(0, net.widths[index])])
            )
            if index == own[0]:
                yield Send(stage - 1, _layer(index - 1), "down", (slice(None),), shares[0])
        matrix, bias = yield Work(parameter_gradients, (before, gradient))
        blocks += _blocks(index, matrix, bias, net.widths[index + 1], 0)
        if index > own[0]:
            gradient = yield Work(sigmoid_gradient, (shares, before))
    return blocks


def _blocks(index: int, matrix: Floats, bias: Floats, width: int, start: int) -> list[Block]:
    return [
        Block(f"{_layer(index)} matrix", (0, start), (matrix.shape[0], width), matrix),
        Block(f"{_layer(index)} bias", (start,), (width,), bias),
    ]


# The work: functions of arrays.


def linear_layer(states: Floats, matrix: Floats, bias: Floats) -> Floats:
    return states @ matrix + bias


def sigmoid_layer(states: Floats, matrix: Floats, bias: Floats) -> Floats:
    return sigmoid(states @ matrix + bias)


def sigmoid(values: Floats) -> Floats:
    return 1 / (1 + np.exp(-values))


def join_columns(blocks: Sequence[Floats]) -> Floats:
    return np.concatenate(blocks, axis=1)


def row_scale(logits: Floats) -> Floats:
    """Each row's largest logit, and the sum of exponentials relative to it: what one part knows of a softmax."""
    largest = logits.max(axis=1)
    return np.stack([largest, np.exp(logits - largest[:, None]).sum(axis=1)], axis=1)


def softmax_gradient(logits: Floats, scales: Sequence[Floats], labels: Labels) -> Floats:
    """The gradient of the mean cross-entropy by a part's logits; labels count from the part's first column."""
    of_parts = np.stack(scales)
    largest = of_parts[:, :, 0].max(axis=0)
    total = (of_parts[:, :, 1] * np.exp(of_parts[:, :, 0] - largest)).sum(axis=0)
    gradient = np.exp(logits - largest[:, None]) / total[:, None]
    rows = np.flatnonzero((labels >= 0) & (labels < logits.shape[1]))
    gradient[rows, labels[rows]] -= 1
    averaged: Floats = gradient / len(logits)
    return averaged


def input_gradient_by_part(gradient: Floats, matrix: Floats, columns: Sequence[slice]) -> list[Floats]:
    """What a part adds to the gradient of the states that it read, for each part that they came from."""
    whole = gradient @ matrix.T
    return [np.ascontiguousarray(whole[:, of_part]) for of_part in columns]


def parameter_gradients(states: Floats, gradient: Floats) -> tuple[Floats, Floats]:
    return states.T @ gradient, gradient.sum(axis=0)


def sigmoid_gradient(shares: Sequence[Floats], states: Floats) -> Floats:
    """The shares of all parts, added in their order, through the sigmoid that made the states."""
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    return total * states * (1 - states)
