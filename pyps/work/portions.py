"""Portions of a data set: how it is cut into them, and which of them nobody has."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from pyps.work.data_spec import PORTIONS_MAX
from pyps_wire.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Portion:
    """The examples from `start` up to but without `stop`, and under which lease they were given out (0: none)."""

    portion_id: int
    start: int
    stop: int
    lease_id: int = 0

    @property
    def num_examples(self) -> int:
        """How many examples it has."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Cut:
    """A data set cut into portions, numbered from 0."""

    num_examples: int
    num_portions: int
    # Examples in each but the last; 0 where all are equal but for one example.
    portion_examples: int = 0

    def __post_init__(self) -> None:
        if self.num_portions > PORTIONS_MAX:
            raise BadRequest(
                f"{self.num_examples} examples were to be cut into {self.num_portions} portions; expected"
                f" {PORTIONS_MAX} at most: take larger portions"
            )

    @classmethod
    def by_size(cls, num_examples: int, portion_examples: int) -> Cut:
        """Portions of that many examples; the last may have fewer."""
        return cls(num_examples, -(-num_examples // portion_examples), portion_examples)

    @classmethod
    def by_number(cls, num_examples: int, num_portions: int) -> Cut:
        """That many portions, equal but for one example; as many as there are examples at most."""
        return cls(num_examples, min(num_examples, num_portions))

    def portion(self, portion_id: int, *, lease_id: int = 0) -> Portion:
        """A portion by its number."""
        return Portion(portion_id, self._start(portion_id), self._start(portion_id + 1), lease_id)

    def containing(self, example: int) -> int:
        """The number of the portion that has an example."""
        if self.portion_examples:
            return example // self.portion_examples
        # Rounded down it is the right one, or the one before it.
        guess = example * self.num_portions // self.num_examples
        return guess + (self._start(guess + 1) <= example)

    def _start(self, portion_id: int) -> int:
        if self.portion_examples:
            return min(portion_id * self.portion_examples, self.num_examples)
        return portion_id * self.num_examples // self.num_portions


class PendingPortions:
    """Numbers of portions as disjoint runs in order: so that a worker's next stays next to its last."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        # Firsts, and lasts + 1, of runs that do not touch.
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in sorted(runs):
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(stop, self._stops[-1])
            elif start < stop:
                self._starts.append(start)
                self._stops.append(stop)
        self._count = sum(stop - start for start, stop in self.runs)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, portion_id: int) -> bool:
        place = self._place(portion_id)
        return place >= 0 and portion_id < self._stops[place]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The runs in order, (first, last + 1) each."""
        return list(zip(self._starts, self._stops, strict=True))

    def longest(self) -> tuple[int, int]:
        """The longest run, the first of several; ValueError where there is none."""
        return max(zip(self._starts, self._stops, strict=True), key=lambda run: run[1] - run[0])

    def add(self, portion_id: int) -> None:
        """Adds one that is not there."""
        assert portion_id not in self
        place = self._place(portion_id)
        follows = place >= 0 and self._stops[place] == portion_id
        precedes = place + 1 < len(self._starts) and self._starts[place + 1] == portion_id + 1
        if follows and precedes:
            self._stops[place] = self._stops.pop(place + 1)
            del self._starts[place + 1]
        elif follows:
            self._stops[place] += 1
        elif precedes:
            self._starts[place + 1] -= 1
        else:
            self._starts.insert(place + 1, portion_id)
            self._stops.insert(place + 1, portion_id + 1)
        self._count += 1

    def remove(self, portion_id: int) -> None:
        """Removes one that is there."""
        assert portion_id in self
        place = self._place(portion_id)
        start, stop = self._starts[place], self._stops[place]
        del self._starts[place], self._stops[place]
        for left, right in ((portion_id + 1, stop), (start, portion_id)):
            if left < right:
                self._starts.insert(place, left)
                self._stops.insert(place, right)
        self._count -= 1

    def _place(self, portion_id: int) -> int:
        """The index of the last run that begins at or before the portion, -1 where none does."""
        return bisect_right(self._starts, portion_id) - 1
