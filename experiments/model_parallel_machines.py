"""Networks cut over virtual machines: who holds what, what crosses, how long a minibatch takes, and its numbers.

A cut tells the time, for which networks of any size are counted, and the numbers, which small ones are computed for.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyps.simulation.event import Scheduler

# A range of a layer's nodes in each dimension.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Network(ABC):
    """Layers of nodes, from 1 on; layer 0 is the input. States are (examples, *grid, and maps if a node has several).

    Each weight is multiplied once an example forward, once for its own gradient, and once for that of what it read.
    """

    minibatch: int = 128

    @property
    @abstractmethod
    def num_layers(self) -> int: ...

    @abstractmethod
    def grid(self, layer: int) -> tuple[int, ...]: ...

    @abstractmethod
    def maps(self, layer: int) -> tuple[int, ...]:
        """Return the shape of a node's state: () for one number."""

    @abstractmethod
    def reads(self, layer: int, box: Box) -> Box:
        """Return the nodes of the layer before that a box of nodes has edges from."""

    @abstractmethod
    def weights(self, layer: int, box: Box) -> tuple[int, ...]:
        """Return the shape of a box's weights."""

    @abstractmethod
    def place(self, box: Box) -> tuple[slice, ...]:
        """Return where a box's weights lie in those of the whole layer."""

    @abstractmethod
    def forward(self, layer: int, read: Tensor, weights: Tensor) -> Tensor: ...

    @abstractmethod
    def loss(self, outputs: Sequence[tuple[Box, Tensor]], labels: Tensor) -> Tensor: ...

    @abstractmethod
    def boxes(self, layer: int, num_parts: int) -> Sequence[Box]:
        """Return what each part holds of a layer."""

    def whole(self, layer: int) -> Box:
        return tuple((0, size) for size in self.grid(layer))


@dataclass(frozen=True, kw_only=True)
class Dense(Network):
    """Fully connected layers of sigmoids and a softmax, cut by columns."""

    widths: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.widths) - 1

    def grid(self, layer: int) -> tuple[int, ...]:
        return (self.widths[layer],)

    def maps(self, layer: int) -> tuple[int, ...]:
        return ()

    def reads(self, layer: int, box: Box) -> Box:
        return self.whole(layer - 1)

    def weights(self, layer: int, box: Box) -> tuple[int, ...]:
        return (self.widths[layer - 1], *_sizes(box))

    def place(self, box: Box) -> tuple[slice, ...]:
        return (slice(None), *_slices(box))

    def forward(self, layer: int, read: Tensor, weights: Tensor) -> Tensor:
        sums = read @ weights
        return sums if layer == self.num_layers else sums.sigmoid()

    def loss(self, outputs: Sequence[tuple[Box, Tensor]], labels: Tensor) -> Tensor:
        # All that a part needs of the others' outputs is their share of the softmax's divisor.
        total = torch.stack([logits.logsumexp(1) for _, logits in outputs]).logsumexp(0).sum()
        for ((start, stop),), logits in outputs:
            mine = (labels >= start) & (labels < stop)
            total = total - logits[mine, labels[mine] - start].sum()
        return total / self.minibatch

    def boxes(self, layer: int, num_parts: int) -> Sequence[Box]:
        return [(columns,) for columns in ranges(self.widths[layer], num_parts)]


@dataclass(frozen=True, kw_only=True)
class Local(Network):
    """Layers whose nodes read a window each, by weights that no other node shares, cut into patches of the image."""

    side: int
    channels: int
    maps_per_node: int
    layers: int
    window: int

    @property
    def num_layers(self) -> int:
        return self.layers

    def grid(self, layer: int) -> tuple[int, ...]:
        return (self.side - layer * (self.window - 1),) * 2

    def maps(self, layer: int) -> tuple[int, ...]:
        return (self.maps_per_node if layer else self.channels,)

    def reads(self, layer: int, box: Box) -> Box:
        return tuple((start, stop + self.window - 1) for start, stop in box)

    def weights(self, layer: int, box: Box) -> tuple[int, ...]:
        return (*_sizes(box), *self.maps(layer - 1), self.window, self.window, *self.maps(layer))

    def place(self, box: Box) -> tuple[slice, ...]:
        return _slices(box)

    def forward(self, layer: int, read: Tensor, weights: Tensor) -> Tensor:
        windows = read.unfold(1, self.window, 1).unfold(2, self.window, 1)
        return torch.einsum("erciuv,rciuvm->ercm", windows, weights).sigmoid()

    def loss(self, outputs: Sequence[tuple[Box, Tensor]], labels: Tensor) -> Tensor:
        wanted = labels[:, None, None, None] / self.grid(self.layers)[0]
        return torch.stack([(states - wanted).square().sum() for _, states in outputs]).sum() / self.minibatch

    def boxes(self, layer: int, num_parts: int) -> Sequence[Box]:
        # As square as the number allows: 8 parts are 2 by 4 patches.
        rows = max(rows for rows in range(1, num_parts + 1) if num_parts % rows == 0 and rows * rows <= num_parts)
        height, width = self.grid(layer)
        return list(itertools.product(ranges(height, rows), ranges(width, num_parts // rows)))


@dataclass(frozen=True)
class Cut:
    """What each part holds of each layer, from layer 1 on: None where it holds nothing of it. All have the inputs."""

    network: Network
    own: Sequence[Sequence[Box | None]]

    @classmethod
    def of_nodes(cls, network: Network, num_parts: int) -> Cut:
        return cls(network, [network.boxes(layer, num_parts) for layer in range(1, network.num_layers + 1)])

    @classmethod
    def of_layers(cls, network: Network, num_parts: int) -> Cut:
        parts = ranges(network.num_layers, num_parts)
        return cls(
            network,
            [
                [network.whole(layer + 1) if start <= layer < stop else None for start, stop in parts]
                for layer in range(network.num_layers)
            ],
        )

    @property
    def num_parts(self) -> int:
        return len(self.own[0])

    def crossing(self, layer: int, part: int) -> dict[int, Box]:
        """Return the nodes of a layer whose states a part reads for its nodes of the next, by their holders.

        Its own are among them. The same way back each holder gets one sum of gradients for each node.
        """
        mine = self.own[layer][part]
        if mine is None:
            return {}
        wanted = self.network.reads(layer + 1, mine)
        return {
            holder: both
            for holder, held in enumerate(self.own[layer - 1])
            if held is not None and (both := _both(held, wanted)) is not None
        }


# The time.


@dataclass(frozen=True)
class Work:
    multiplications: int


@dataclass(frozen=True)
class Send:
    """A message. The sender goes on at once; its line takes messages in their order."""

    to: int
    tag: Hashable
    num_bytes: int


@dataclass(frozen=True)
class Receive:
    source: int
    tag: Hashable


Steps = list[Work | Send | Receive]


def steps(cut: Cut) -> list[Steps]:
    """Return what each part does in a minibatch, if the parts hold nodes of all layers. States take four bytes."""
    network, parts = cut.network, range(cut.num_parts)
    layers = range(1, network.num_layers + 1)
    reads = {layer: [cut.crossing(layer, part) for part in parts] for layer in layers[:-1]}
    readers = {
        layer: [{part: of_part[holder] for part, of_part in enumerate(reads[layer]) if holder in of_part}
                for holder in parts]
        for layer in reads
    }  # fmt: skip

    def exchange(part: int, tag: Hashable, out: dict[int, int], sources: Sequence[int]) -> tuple[Steps, Steps]:
        # The next part first, so that no line in is every sender's first.
        others = sorted(out.keys() - {part}, key=lambda other: (other - part) % cut.num_parts)
        return [Send(to, tag, 4 * network.minibatch * out[to]) for to in others], [
            Receive(source, tag) for source in sources if source != part
        ]

    def numbers(layer: int, boxes: dict[int, Box]) -> dict[int, int]:
        return {other: math.prod((*_sizes(box), *network.maps(layer))) for other, box in boxes.items()}

    plans = []
    for part in parts:
        work = {}
        for layer in layers:
            own = cut.own[layer - 1][part]
            assert own is not None
            work[layer] = Work(network.minibatch * math.prod(network.weights(layer, own)))
        plan: Steps = []
        for layer in layers:
            if layer > 1:
                sent = numbers(layer - 1, readers[layer - 1][part])
                plan += itertools.chain(*exchange(part, (layer, "up"), sent, list(reads[layer - 1][part])))
            plan.append(work[layer])
        if isinstance(network, Dense):
            # Of the softmax each part's largest logit, and the sum of exponentials relative to it.
            plan += itertools.chain(*exchange(part, "softmax", dict.fromkeys(parts, 2), parts))
        for layer in reversed(layers):
            sends: Steps = []
            receives: Steps = []
            if layer > 1:
                plan.append(work[layer])
                back = numbers(layer - 1, reads[layer - 1][part])
                sends, receives = exchange(part, (layer, "down"), back, list(readers[layer - 1][part]))
            # The weights' own gradients do not wait for the wires.
            plan += [*sends, work[layer], *receives]
        plans.append(plan)
    return plans


@dataclass(frozen=True)
class Wires:
    """Each machine's line out and line in; a switch keeps what waits for a line in."""

    bytes_per_second: float
    # How long a message holds a line beside its bytes.
    message_seconds: float


class Minibatch:
    """Machines at work on one minibatch, in virtual time."""

    def __init__(self, plans: Sequence[Steps], work_seconds: Sequence[Sequence[float]], wires: Wires) -> None:
        """`work_seconds`: of each machine's work, in order."""
        self._left = [deque(plan) for plan in plans]
        self._work = [deque(seconds) for seconds in work_seconds]
        self._wires = wires
        self._clock = Scheduler()
        self._now, self._out_free, self._in_free = ([0.0] * len(plans) for _ in range(3))
        # When a message is there in full, by sender, receiver and tag; and who waits for one.
        self._there: dict[Hashable, float] = {}
        self._waits: dict[Hashable, int] = {}

    def seconds(self) -> float:
        """Return when the last machine is done: a minibatch is over once all are."""
        for machine in range(len(self._left)):
            self._advance(machine)
        while self._clock.step():
            pass
        assert not any(self._left), "a machine waits for a message that nobody sends"
        return max(self._now)

    def _advance(self, machine: int) -> None:
        left = self._left[machine]
        while left:
            step = left[0]
            if isinstance(step, Send):
                self._send(machine, step)
            elif isinstance(step, Work):
                self._now[machine] += self._work[machine].popleft()
            else:
                key = (step.source, machine, step.tag)
                if key not in self._there:
                    self._waits[key] = machine
                    return
                self._now[machine] = max(self._now[machine], self._there.pop(key))
            left.popleft()

    def _send(self, machine: int, message: Send) -> None:
        seconds = self._wires.message_seconds + message.num_bytes / self._wires.bytes_per_second
        begin = max(self._now[machine], self._out_free[machine])
        self._out_free[machine] = begin + seconds

        def arrive() -> None:
            # The switch passes a message on while it comes in: an idle line in adds nothing.
            self._in_free[message.to] = there = max(begin, self._in_free[message.to]) + seconds
            key = (machine, message.to, message.tag)
            self._there[key] = there
            if key in self._waits:
                self._advance(self._waits.pop(key))

        self._clock.at(begin, arrive)


# The numbers.


def gradients(cut: Cut, dtype: torch.dtype = torch.float64) -> list[list[tuple[int, Box, Tensor]]]:
    """Return each part's gradients of a minibatch: the layer, the box of its nodes, and the values.

    Between parts a state goes only where the cut says so, and its gradient the same way back.
    """
    network, random = cut.network, torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    inputs = drawn(network.minibatch, *network.grid(0), *network.maps(0))
    labels = torch.randint(network.grid(network.num_layers)[0], (network.minibatch,), generator=random)
    blocks: list[list[tuple[int, Box, Tensor]]] = [[] for _ in range(cut.num_parts)]
    states: dict[int, tuple[Box, Tensor]] = {}
    for layer in range(1, network.num_layers + 1):
        shape = network.weights(layer, network.whole(layer))
        edges_per_node = math.prod(shape) / math.prod((*network.grid(layer), *network.maps(layer)))
        weights = drawn(*shape) * 2 / math.sqrt(edges_per_node)
        before, states = states, {}
        for part, own in enumerate(cut.own[layer - 1]):
            if own is None:
                continue
            read = inputs
            if layer > 1:
                # What nobody sends stays NaN.
                read = torch.full((network.minibatch, *network.grid(layer - 1), *network.maps(layer - 1)), torch.nan)
                read = read.to(dtype)
                for holder, box in cut.crossing(layer - 1, part).items():
                    held, values = before[holder]
                    read[:, *_slices(box)] = values[:, *_slices(box, within=held)]
            block = weights[network.place(own)].clone().requires_grad_()
            blocks[part].append((layer, own, block))
            states[part] = own, network.forward(layer, read[:, *_slices(network.reads(layer, own))], block)
    network.loss(list(states.values()), labels).backward()  # type: ignore[no-untyped-call]
    return [[(layer, own, block.grad) for layer, own, block in of_part if block.grad is not None] for of_part in blocks]


def joined(cut: Cut, of_parts: Sequence[Sequence[tuple[int, Box, Tensor]]]) -> list[Tensor]:
    """Return the whole layers of all parts' blocks; ValueError where a number comes twice or from nobody."""
    network, wholes = cut.network, []
    for layer in range(1, network.num_layers + 1):
        blocks = [(own, values) for blocks in of_parts for of_layer, own, values in blocks if of_layer == layer]
        whole = torch.zeros(network.weights(layer, network.whole(layer)), dtype=blocks[0][1].dtype)
        counts = torch.zeros_like(whole)
        for own, values in blocks:
            whole[network.place(own)] += values
            counts[network.place(own)] += 1
        if not (counts == 1).all():
            raise ValueError(f"weights of layer {layer} lie in {counts.min():g} to {counts.max():g} parts, not in one")
        wholes.append(whole)
    return wholes


# Ranges and boxes.


def ranges(size: int, num_parts: int) -> list[tuple[int, int]]:
    """Return near-equal ranges, one a part; ValueError where a part would hold nothing."""
    if not 1 <= num_parts <= size:
        raise ValueError(f"{size} cannot be cut into {num_parts} parts that all hold something")
    borders = [part * size // num_parts for part in range(num_parts + 1)]
    return list(itertools.pairwise(borders))


def _both(a: Box, b: Box) -> Box | None:
    """Return where two boxes overlap."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _sizes(box: Box) -> list[int]:
    return [stop - start for start, stop in box]


def _slices(box: Box, within: Box | None = None) -> tuple[slice, ...]:
    """Return a box's place in an array of the whole layer, or of a box around it."""
    corner = [start for start, _ in within] if within else [0] * len(box)
    return tuple(slice(start - zero, stop - zero) for (start, stop), zero in zip(box, corner, strict=True))
