"""A data set, its division into portions, and a set of portions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, fields

from pyps_wire.errors import InvalidArgument

# Every portion of a pass is kept until the pass ends.
PORTIONS_MAX = 1_000_000
NAME_LENGTH_MAX = 200


@dataclass(frozen=True, slots=True)
class DataSpec:
    """A data set, and its division. InvalidArgument for a value out of range."""

    # For users: "train".
    name: str = ""
    num_examples: int = 0
    # Examples in a portion; 0 leaves it to the queue.
    portion_examples: int = 0
    # Examples in a minibatch; 0 leaves it to the worker, or the server.
    batch_size: int = 0
    # Whether a portion is a range of places in each pass's permutation, and the permutations' seed.
    shuffle: bool = False
    seed: int = 0
    # Whether a coordinator begins the passes; otherwise each begins when the one before it is done.
    coordinated: bool = False

    def __post_init__(self) -> None:
        if len(self.name) > NAME_LENGTH_MAX:
            raise InvalidArgument(
                f"the data set's name has {len(self.name)} characters; expected {NAME_LENGTH_MAX} at most: shorten it"
            )
        if self.num_examples < 1:
            raise InvalidArgument(
                f"the data set {self.name!r} has {self.num_examples} examples; expected 1 at least:"
                " check how it is loaded"
            )
        for name in ("portion_examples", "batch_size", "seed"):
            if getattr(self, name) < 0:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; expected 0 or more")

    def require_same(self, other: DataSpec, *, worker_id: str) -> None:
        """Raise InvalidArgument, naming the first field in which `other`, which a worker gave, differs."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                raise InvalidArgument(
                    f"worker {worker_id!r} says {field.name} {theirs!r} of the data set, but the run's has {ours!r}:"
                    " give all workers one data set and the same settings, or start another run"
                )


@dataclass(frozen=True, slots=True)
class Portion:
    """The examples from `start` to before `stop`, and the lease of a worker that has them (0: none)."""

    portion_id: int
    start: int
    stop: int
    lease_id: int = 0

    @property
    def num_examples(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Division:
    """A data set divided into portions, which are numbered from 0."""

    num_examples: int
    num_portions: int
    # Examples in each but the last; 0 if all are equal but for one example.
    portion_examples: int = 0

    def __post_init__(self) -> None:
        if self.num_portions > PORTIONS_MAX:
            raise InvalidArgument(
                f"{self.num_examples} examples make {self.num_portions} portions; expected {PORTIONS_MAX} at most:"
                " take larger portions"
            )

    @classmethod
    def by_size(cls, num_examples: int, portion_examples: int) -> Division:
        """Return portions of that many examples; the last may have fewer."""
        return cls(num_examples, -(-num_examples // portion_examples), portion_examples)

    @classmethod
    def by_number(cls, num_examples: int, num_portions: int) -> Division:
        """Return that many portions, equal but for one example; at most as many as there are examples."""
        return cls(num_examples, min(num_examples, num_portions))

    def portion(self, portion_id: int, *, lease_id: int = 0) -> Portion:
        return Portion(portion_id, self._start(portion_id), self._start(portion_id + 1), lease_id)

    def containing(self, example: int) -> int:
        """Return the number of the portion that has an example."""
        if self.portion_examples:
            return example // self.portion_examples
        # Rounded down, the guess is right or one too small.
        guess = example * self.num_portions // self.num_examples
        return guess + (self._start(guess + 1) <= example)

    def _start(self, portion_id: int) -> int:
        if self.portion_examples:
            return min(portion_id * self.portion_examples, self.num_examples)
        return portion_id * self.num_examples // self.num_portions


class PendingPortions:
    """A set of portions as disjoint runs in order."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        # The first, and last + 1, of runs that do not touch.
        self.runs: list[tuple[int, int]] = []
        for start, stop in sorted(runs):
            if self.runs and start <= self.runs[-1][1]:
                self.runs[-1] = (self.runs[-1][0], max(stop, self.runs[-1][1]))
            elif start < stop:
                self.runs.append((start, stop))

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def __contains__(self, portion_id: int) -> bool:
        place = self._place(portion_id)
        return place >= 0 and portion_id < self.runs[place][1]

    def longest(self) -> tuple[int, int]:
        """Return the longest run, the first of several; ValueError for an empty set."""
        return max(self.runs, key=lambda run: run[1] - run[0])

    def add(self, portion_id: int) -> None:
        assert portion_id not in self
        self.runs = PendingPortions([*self.runs, (portion_id, portion_id + 1)]).runs

    def remove(self, portion_id: int) -> None:
        assert portion_id in self
        place = self._place(portion_id)
        start, stop = self.runs[place]
        left = (start, portion_id), (portion_id + 1, stop)
        self.runs[place : place + 1] = [(first, end) for first, end in left if first < end]

    def _place(self, portion_id: int) -> int:
        """Return the index of the last run that begins at or before the portion, -1 if none does."""
        return bisect_right(self.runs, portion_id, key=lambda run: run[0]) - 1
