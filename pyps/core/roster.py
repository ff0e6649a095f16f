"""Which workers are active for a shard's next update."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

# In place of a part's number: the whole run, and all parts that no worker declared by number.
WHOLE = -1
REST = -2


@dataclass(frozen=True, slots=True)
class Roster:
    """The workers that are active in the protocol's round (the papers' lambda is their number).

    A worker is active from its first push until it leaves, its lease runs out, or it delays others for too long. Where
    workers hold parts of the model, each part has a roster of the processes that hold it; the run's own roster lists
    replicas, each as one worker.
    """

    # Ascending by worker_id.
    workers: tuple[str, ...] = ()
    # How many of the expected workers have not pushed yet; 0 for good once all have.
    missing: int = 0
    # The missing workers that have joined, ascending.
    coming: tuple[str, ...] = ()
    # The rosters of the model's parts; None where every worker is one process that holds all of them.
    parted: Parted | None = field(default=None, compare=False, repr=False)

    @property
    def num_workers(self) -> int:
        """L, the number of active workers."""
        return len(self.workers)

    @property
    def num_expected(self) -> int:
        """L with the missing workers."""
        return len(self.workers) + self.missing

    @property
    def awaited(self) -> tuple[str, ...]:
        """The missing workers: by name if they have joined, the others as a number in words."""
        return (*self.coming, *not_joined(self.missing - len(self.coming)))

    def of_part(self, part: int) -> Roster:
        """Return the roster of a part of the model; the same object as long as nothing changes."""
        return self if self.parted is None else self.parted.rosters.get(part, self.parted.rosters[REST])

    def is_active(self, worker_id: str) -> bool:
        """Return whether that process is active for some part."""
        if self.parted is not None:
            return worker_id in self.parted.active
        # Called at every push: with a linear search a round's cost would grow with the square of its workers.
        index = bisect_left(self.workers, worker_id)
        return index < len(self.workers) and self.workers[index] == worker_id

    def with_pushed(self, worker_id: str, expectation: Expectation) -> Roster:
        """Return the roster with a worker that has joined, alone with its name, and has pushed for the first time now.

        To make it of all entries would cost the square of the workers while they come.
        """
        at = bisect_left(self.workers, worker_id)
        workers = (*self.workers[:at], worker_id, *self.workers[at:])
        missing = expectation.missing(expectation.num_workers - self.missing + 1) if self.missing else 0
        came = bisect_left(self.coming, worker_id)
        return Roster(workers, missing, (*self.coming[:came], *self.coming[came + 1 :]) if missing else ())


@dataclass(frozen=True, slots=True)
class Parted:
    """The rosters of single parts of the model."""

    # By part, and under REST.
    rosters: Mapping[int, Roster]
    # The active processes.
    active: frozenset[str]


class Entry(NamedTuple):
    """A worker, or one process of a replica, in a roster."""

    worker_id: str
    # The replica's name, or its own.
    name: str
    # The parts that it holds; () for all.
    parts: tuple[int, ...]
    active: bool
    # Whether it has pushed or is gone.
    arrived: bool


class Expectation:
    """The number of workers that must have pushed or left before rounds proceed, for each part of the model."""

    def __init__(self, num_workers: int):
        self.num_workers = num_workers
        # The parts, or WHOLE, with enough workers. No worker is missing there from then on.
        self._gathered = set[int]()

    def missing(self, num_arrived: int, *, part: int = WHOLE) -> int:
        """Return how many workers are still missing; 0 for good once all have come."""
        if part in self._gathered:
            return 0
        missing = self.num_workers - num_arrived
        if missing <= 0:
            self._gathered.add(part)
        return max(0, missing)


def whole_roster(entries: Iterable[Entry], expectation: Expectation) -> Roster:
    """Return the run's roster, with the rosters of the parts of the model."""
    entries = list(entries)
    by_part: dict[int, list[Entry]] = {REST: []}
    for entry in entries:
        for part in entry.parts or (REST,):
            by_part.setdefault(part, []).append(entry)
    rosters = {
        part: roster_of_part([*by_part[REST], *(holders if part != REST else ())], expectation, part)
        for part, holders in by_part.items()
    }
    active = frozenset(entry.worker_id for entry in entries if entry.active)
    names = [entry._replace(worker_id=entry.name) for entry in entries]
    run = roster_of_part(names, expectation, WHOLE)
    return Roster(run.workers, run.missing, run.coming, Parted(rosters, active))


def not_joined(count: int) -> tuple[str, ...]:
    """Return a number of unknown workers in words, as one item for a list of names; () for none."""
    if count <= 0:
        return ()
    return (f"{count} more worker{'s' if count > 1 else ''} that ha{'ve' if count > 1 else 's'} not joined",)


def roster_of_part(entries: Iterable[Entry], expectation: Expectation, part: int = WHOLE) -> Roster:
    """Return the roster of a part of the model, of the processes that hold it."""
    entries = list(entries)
    arrived = {entry.name for entry in entries if entry.arrived}
    missing = expectation.missing(len(arrived), part=part)
    coming = {entry.worker_id for entry in entries if entry.name not in arrived} if missing else set()
    workers = {entry.worker_id for entry in entries if entry.active}
    return Roster(tuple(sorted(workers)), missing, tuple(sorted(coming)))
