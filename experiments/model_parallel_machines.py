"""Virtual machines that hold the parts of one network, and a network of wires between them.

What a part does in a minibatch is a generator: it yields work, messages and waits. `compute` makes all parts' numbers,
with real arrays in the messages, and measures the work; `replay` then tells how long the machines take with given
times of the work and given wires, without computing anything again.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
# A box of one layer's nodes: a range in each dimension.
Nodes = tuple[slice, ...]
# Up: a node's state goes from its part to those that have edges from it. Down: these return its gradient.
Direction = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class Work:
    """A call that keeps a machine's core busy. It changes nothing, so that it can be measured more than once."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    @property
    def kind(self) -> str:
        """What takes the same time: the function, and the sizes of what it is given."""
        return " ".join((self.function.__name__, *map(_size, self.arguments)))


@dataclass(frozen=True, slots=True)
class Send:
    """A message to another machine. The sender goes on at once; its line takes messages in their order."""

    destination: int
    # The layer whose nodes' states, or their gradients, it carries.
    layer: str
    direction: Direction
    nodes: Nodes
    values: Floats


@dataclass(frozen=True, slots=True)
class Receive:
    """A wait for a message, whose values are the answer."""

    source: int
    layer: str
    direction: Direction


@dataclass(frozen=True)
class Block:
    """The gradient of one block of a tensor, as a part returns it."""

    name: str
    offset: tuple[int, ...]
    whole_shape: tuple[int, ...]
    values: Floats


Step = Work | Send | Receive
Program = Generator[Step, Any, list[Block]]
# A stretch of a program; what it returns is an answer, too.
Exchange = Generator[Step, Any, Any]


@dataclass(frozen=True, slots=True)
class Crossing:
    """Nodes whose states, or gradients, went from one machine to another in one message."""

    layer: str
    direction: Direction
    nodes: Nodes
    source: int
    destination: int


# What is left of a step once it is computed.
@dataclass(frozen=True, slots=True)
class Worked:
    kind: str


@dataclass(frozen=True, slots=True)
class Sent:
    destination: int
    tag: Hashable
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Received:
    source: int
    tag: Hashable


Trace = list[Worked | Sent | Received]


@dataclass
class Stopwatch:
    """Measures each kind of work a few times: seconds of one core, so that other processes do not count."""

    # Samples of a kind that each call of `compute` brings it nearer to.
    samples_wanted: int = 1
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def run(self, work: Work) -> Any:
        """Computes, as often as samples are missing, at least once."""
        while True:
            began = time.thread_time()
            result = work.function(*work.arguments)
            seconds = time.thread_time() - began
            samples = self.samples[work.kind]
            if len(samples) < self.samples_wanted:
                samples.append(seconds)
            if len(samples) >= self.samples_wanted:
                return result

    def medians(self) -> dict[str, float]:
        """Seconds of each kind."""
        return {kind: median(samples) for kind, samples in self.samples.items()}


@dataclass(frozen=True)
class Minibatch:
    """What the machines made of one minibatch: gradients by part, what they did, and what crossed between them."""

    gradients: list[list[Block]]
    traces: list[Trace]
    crossings: list[Crossing]


def compute(programs: Sequence[Program], stopwatch: Stopwatch) -> Minibatch:
    """Runs all parts to their ends, each as far as the messages that are there allow."""
    machines = [_Machine(program) for program in programs]
    crossings: list[Crossing] = []
    posts: dict[tuple[int, int, Hashable], Floats] = {}
    while any(not machine.done for machine in machines):
        before = len(crossings), sum(len(machine.trace) for machine in machines)
        for index, machine in enumerate(machines):
            _advance(index, machine, posts, crossings, stopwatch)
        if (len(crossings), sum(len(machine.trace) for machine in machines)) == before:
            raise RuntimeError("every part waits for a message that nobody sends")
    return Minibatch([machine.gradients for machine in machines], [machine.trace for machine in machines], crossings)


@dataclass
class _Machine:
    program: Program
    step: Step | None = None
    trace: Trace = field(default_factory=list)
    gradients: list[Block] = field(default_factory=list)
    done: bool = False

    def go_on(self, answer: Any) -> None:
        try:
            self.step = self.program.send(answer)
        except StopIteration as end:
            self.gradients, self.done = end.value, True


def _advance(
    index: int,
    machine: _Machine,
    posts: dict[tuple[int, int, Hashable], Floats],
    crossings: list[Crossing],
    stopwatch: Stopwatch,
) -> None:
    if machine.step is None:
        machine.go_on(None)
    while not machine.done:
        step = machine.step
        answer: Any = None
        match step:
            case Work():
                answer = stopwatch.run(step)
                machine.trace.append(Worked(step.kind))
            case Send():
                tag = (step.layer, step.direction)
                posts[index, step.destination, tag] = step.values
                machine.trace.append(Sent(step.destination, tag, step.values.nbytes))
                crossings.append(Crossing(step.layer, step.direction, step.nodes, index, step.destination))
            case Receive():
                tag = (step.layer, step.direction)
                if (step.source, index, tag) not in posts:
                    return
                answer = posts.pop((step.source, index, tag))
                machine.trace.append(Received(step.source, tag))
        machine.go_on(answer)


@dataclass(frozen=True, slots=True)
class Wires:
    """What joins the machines: each has a line out and a line in, and a switch holds what waits for a line in."""

    bytes_per_second: float
    # How long a message holds a line beside its bytes.
    message_seconds: float

    def seconds(self, num_bytes: int) -> float:
        """How long a message holds each of its two lines."""
        return self.message_seconds + num_bytes / self.bytes_per_second


def replay(traces: Sequence[Trace], seconds_of: Mapping[str, float], wires: Wires) -> float:
    """Returns when the last machine is done: a minibatch is complete once all parts are."""
    return _Replay(traces, seconds_of, wires).run()


class _Replay:
    """Events in the order of their times; lines are first in, first out."""

    def __init__(self, traces: Sequence[Trace], seconds_of: Mapping[str, float], wires: Wires) -> None:
        self._left = [deque(trace) for trace in traces]
        self._seconds_of = seconds_of
        self._wires = wires
        self._now = [0.0] * len(traces)
        self._out_free = [0.0] * len(traces)
        self._in_free = [0.0] * len(traces)
        # When a message is there in full; and whose machine waits for it.
        self._there: dict[tuple[int, int, Hashable], float] = {}
        self._waits: dict[tuple[int, int, Hashable], int] = {}
        # Of one time the events come in the order of their making.
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def run(self) -> float:
        for machine in range(len(self._left)):
            self._advance(machine)
        while self._events:
            heapq.heappop(self._events)[2]()
        assert not any(self._left), "a machine waits for a message that nobody sends"
        return max(self._now)

    def _advance(self, machine: int) -> None:
        left = self._left[machine]
        while left:
            match left[0]:
                case Worked(kind):
                    self._now[machine] += self._seconds_of[kind]
                case Sent() as sent:
                    self._send(machine, sent)
                case Received(source, tag):
                    key = (source, machine, tag)
                    if key not in self._there:
                        self._waits[key] = machine
                        return
                    self._now[machine] = max(self._now[machine], self._there.pop(key))
            left.popleft()

    def _send(self, machine: int, sent: Sent) -> None:
        seconds = self._wires.seconds(sent.num_bytes)
        begin = max(self._now[machine], self._out_free[machine])
        self._out_free[machine] = begin + seconds

        def arrive() -> None:
            # The switch passes a message on while it comes in: an idle line in adds nothing.
            there = max(begin, self._in_free[sent.destination]) + seconds
            self._in_free[sent.destination] = there
            key = (machine, sent.destination, sent.tag)
            self._there[key] = there
            if key in self._waits:
                self._advance(self._waits.pop(key))

        heapq.heappush(self._events, (begin, next(self._numbers), arrive))


def work_seconds(traces: Sequence[Trace], seconds_of: Mapping[str, float]) -> float:
    """How long the busiest machine computes."""
    return max(sum(seconds_of[step.kind] for step in trace if isinstance(step, Worked)) for trace in traces)


def repeated_crossings(crossings: Sequence[Crossing], layer_shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many nodes went to one part more than once in one direction, each counted as often as that was too much.

    Downwards it is the part that the gradient comes from: a part with edges from a node returns one sum for it.
    """
    counts: dict[tuple[str, Direction, int], npt.NDArray[np.int64]] = {}
    for crossing in crossings:
        far = crossing.destination if crossing.direction == "up" else crossing.source
        key = (crossing.layer, crossing.direction, far)
        if key not in counts:
            counts[key] = np.zeros(layer_shapes[crossing.layer], np.int64)
        counts[key][crossing.nodes] += 1
    return sum(int(np.maximum(count - 1, 0).sum()) for count in counts.values())


def cut(size: int, num_parts: int) -> list[slice]:
    """Near-equal ranges, one a part; ValueError where a part would hold nothing."""
    if not 1 <= num_parts <= size:
        raise ValueError(f"{size} cannot be cut into {num_parts} parts that all hold something")
    borders = [part * size // num_parts for part in range(num_parts + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(borders)]


def join(gradients: Sequence[Sequence[Block]]) -> dict[str, Floats]:
    """The whole tensors of all parts' blocks; ValueError where a number comes twice or from nobody (P4)."""
    tensors: dict[str, Floats] = {}
    counts: dict[str, npt.NDArray[np.int64]] = {}
    for block in itertools.chain.from_iterable(gradients):
        if block.name not in tensors:
            tensors[block.name] = np.zeros(block.whole_shape, block.values.dtype)
            counts[block.name] = np.zeros(block.whole_shape, np.int64)
        where = tuple(slice(begin, begin + size) for begin, size in zip(block.offset, block.values.shape, strict=True))
        tensors[block.name][where] = block.values
        counts[block.name][where] += 1
    for name, count in counts.items():
        if not (count == 1).all():
            raise ValueError(f"numbers of {name} come from {count.min()} to {count.max()} parts, not from one each")
    return tensors


def _size(argument: Any) -> str:
    if isinstance(argument, np.ndarray):
        return "x".join(map(str, argument.shape)) + ("" if argument.flags.c_contiguous else " strided")
    if isinstance(argument, (list, tuple)):
        return f"[{' '.join(map(_size, argument))}]"
    if isinstance(argument, slice):
        return str(argument.stop - argument.start)
    return str(argument)
