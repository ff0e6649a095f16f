"""Which workers live: a worker is alive while it is heard of, and forgotten by lease when it falls silent."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pyps.core.roster import Roster
from pyps_wire.errors import LimitExceeded, Superseded, UnknownWorker


class WorkerState(StrEnum):
    """How it stands with a worker."""

    ALIVE = "alive"
    EXPIRED = "expired"
    FINISHED = "finished"
    FAILED = "failed"


_ALIVE = WorkerState.ALIVE


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself, for people."""

    host: str = ""
    process_id: int = 0
    device: str = ""
    software: str = ""


@dataclass(slots=True)
class Member:
    """One worker as the server knew it when it was asked for. Times are in seconds of the caller's clock."""

    worker_id: str
    incarnation: int
    state: WorkerState
    info: WorkerInfo
    joined_at: float
    heard_at: float
    # When it pushed last in this life; None before its first push.
    pushed_at: float | None = None
    # When it last pushed what was taken: applied, parked, or dropped as the protocol foresees.
    taken_at: float | None = None
    # How often it was left out since then, as others waited too long for it.
    stalls: int = 0
    # Whether protocols reckon with it: from its first push until it goes, or holds the others up for too long.
    counts: bool = False
    # The worker's own count of steps.
    clock: int = 0
    # The worker's own figures, by name.
    scalars: Mapping[str, float] = field(default_factory=dict)
    # How it ended, in its own words.
    message: str = ""

    @property
    def alive(self) -> bool:
        """Whether it counts among the run's workers."""
        return self.state is _ALIVE


class Membership:
    """The workers of a run. Every method may be called from any thread.

    A worker_id belongs to one live process at a time. A later process (a larger incarnation) takes it over;
    an earlier one gets it back only when the later is gone.
    """

    def __init__(self, *, lease_seconds: float, workers_max: int, expected_workers: int = 0) -> None:
        self.lease_seconds = lease_seconds
        self.workers_max = workers_max
        self._lock = threading.Lock()
        # Guarded by _lock, the members too: they change with every push, and copies of them are given away. The one
        # that joined longest ago comes first.
        self._members: dict[str, Member] = {}
        self._num_alive = 0
        # How many workers the job has, as far as people have said.
        self.expected_workers = expected_workers
        # How many workers must have pushed or gone before anybody is done without; 0 for good once they have.
        self._expected_workers = expected_workers
        # Made when it is asked for; None since the last change.
        self._roster: Roster | None = None

    @property
    def num_alive(self) -> int:
        """The number of live workers."""
        return self._num_alive

    @property
    def roster(self) -> Roster:
        """The workers that protocols reckon with; the same object as long as nothing changes."""
        roster = self._roster
        if roster is not None:
            return roster
        with self._lock:
            if self._roster is None:
                self._roster = self._make_roster()
            return self._roster

    def join(self, worker_id: str, incarnation: int, *, now: float, info: WorkerInfo | None = None) -> Member:
        """Makes the worker alive.

        Raises Superseded where a later process holds its name, LimitExceeded at workers_max.
        """
        with self._lock:
            known = self._members.get(worker_id)
            if known is not None and known.alive and incarnation < known.incarnation:
                raise _superseded(known, incarnation)
            if not (known and known.alive) and self._num_alive >= self.workers_max:
                raise LimitExceeded(
                    f"worker {worker_id!r} cannot join: {self._num_alive} workers are alive and the limit is"
                    f" {self.workers_max}; raise --max-workers on the server"
                )
            # A repeated Hello keeps the worker's own figures.
            same = known is not None and known.incarnation == incarnation
            member = Member(
                worker_id,
                incarnation,
                WorkerState.ALIVE,
                info or WorkerInfo(),
                joined_at=known.joined_at if known and same else now,
                heard_at=now,
                pushed_at=known.pushed_at if known and same else None,
                taken_at=known.taken_at if known and same else None,
                stalls=known.stalls if known and same else 0,
                counts=known.counts if known and same else False,
                clock=known.clock if known and same else 0,
                scalars=known.scalars if known and same else {},
            )
            if known is not None and known.incarnation != incarnation:
                del self._members[worker_id]
            self._members[worker_id] = member
            self._moved(member, before=_GONE if known is None else _standing(known))
            self._forget_gone()
            return replace(member)

    def renew(
        self,
        worker_id: str,
        incarnation: int,
        *,
        now: float,
        clock: int | None = None,
        scalars: Mapping[str, float] | None = None,
    ) -> Member:
        """Notes a sign of life and returns the worker; one whose lease had run out is alive again.

        Raises UnknownWorker when it has to say Hello (first), Superseded when a later process holds its name.
        """
        with self._lock:
            member = self._require(worker_id, incarnation)
            self._heard(member, now=now, clock=clock, pushed_at=member.pushed_at, counts=member.counts)
            if scalars is not None:
                member.scalars = dict(scalars)
            return replace(member)

    def pushed(self, worker_id: str, incarnation: int, *, now: float, clock: int | None = None) -> Roster:
        """Notes a push, which makes the worker count, and returns the workers that count now; raises as `renew`."""
        with self._lock:
            member = self._require(worker_id, incarnation)
            self._heard(member, now=now, clock=clock, pushed_at=now, counts=member.counts or member.stalls < STALLS_MAX)
            if self._roster is None:
                self._roster = self._make_roster()
            return self._roster

    def taken(self, worker_id: str, incarnation: int, *, now: float) -> bool:
        """Notes that a push of the worker was taken; True where that makes it count again."""
        with self._lock:
            member = self._members.get(worker_id)
            if member is None or member.incarnation != incarnation or member.state is not _ALIVE:
                return False
            member.taken_at, member.stalls = now, 0
            if member.counts:
                return False
            before, member.counts = _standing(member), True
            self._moved(member, before=before)
            return True

    def stall(self, worker_id: str) -> bool:
        """Stops counting a worker, which stays a member; False where it did not count.

        It counts again from its next push, and after STALLS_MAX times in a row from the next that is taken: one
        whose pushes are all refused would hold the others up for ever.
        """
        with self._lock:
            member = self._members.get(worker_id)
            if member is None or not member.counts:
                return False
            before, member.counts = _standing(member), False
            member.stalls += 1
            self._moved(member, before=before)
            return True

    def expect(self, num_workers: int) -> None:
        """Waits for so many workers, those that pushed or went already included; 0 when unknown."""
        with self._lock:
            self.expected_workers = self._expected_workers = num_workers
            self._roster = None

    def await_workers(self, num_workers: int) -> None:
        """Waits for so many workers, whatever people have said."""
        with self._lock:
            self._expected_workers = num_workers
            self._roster = None

    def expect_no_more(self) -> None:
        """Waits for no expected worker any longer."""
        with self._lock:
            self._expected_workers = 0
            self._roster = None

    def leave(
        self, worker_id: str, incarnation: int, *, now: float, state: WorkerState, message: str = ""
    ) -> Member | None:
        """Ends the worker's membership as FINISHED or FAILED; None where that process is no member."""
        assert state in _ENDED, state
        with self._lock:
            member = self._members.get(worker_id)
            if member is None or member.incarnation != incarnation:
                return None
            before, member.state, member.counts = _standing(member), state, False
            member.heard_at, member.message = now, message
            self._moved(member, before=before)
            return replace(member)

    def expire(self, now: float) -> list[Member]:
        """Marks the workers that were silent for longer than the lease, and returns them."""
        with self._lock:
            silent = [
                member
                for member in self._members.values()
                if member.alive and now - member.heard_at > self.lease_seconds
            ]
            for member in silent:
                before, member.state, member.counts = _standing(member), WorkerState.EXPIRED, False
                self._moved(member, before=before)
            return [replace(member) for member in silent]

    def get(self, worker_id: str) -> Member | None:
        """Returns the worker, alive or gone."""
        with self._lock:
            member = self._members.get(worker_id)
            return None if member is None else replace(member)

    def alive(self) -> list[Member]:
        """Returns the live workers, in the order in which they joined."""
        return [member for member in self.all() if member.alive]

    def all(self) -> list[Member]:
        """Returns all workers known, gone ones too."""
        with self._lock:
            return [replace(member) for member in self._members.values()]

    # What follows is called under the lock.

    def _require(self, worker_id: str, incarnation: int) -> Member:
        known = self._members.get(worker_id)
        if known is not None and incarnation < known.incarnation and known.alive:
            raise _superseded(known, incarnation)
        if known is None or known.incarnation != incarnation or known.state in _ENDED:
            raise UnknownWorker(
                f"worker {worker_id!r} of incarnation {incarnation} is not a member of this run;"
                " say Hello, then send the same again"
            )
        return known

    def _make_roster(self) -> Roster:
        members = self._members.values()
        missing = self._expected_workers - sum(m.pushed_at is not None or not m.alive for m in members)
        if missing <= 0:
            missing = self._expected_workers = 0
        coming = [m.worker_id for m in members if missing and m.alive and m.pushed_at is None]
        return Roster(tuple(sorted(m.worker_id for m in members if m.counts)), missing, tuple(sorted(coming)))

    def _heard(self, member: Member, *, now: float, clock: int | None, pushed_at: float | None, counts: bool) -> None:
        """Notes a sign of life, which most of the time changes nothing of the roster."""
        before = _standing(member)
        member.state = _ALIVE
        member.heard_at = max(now, member.heard_at)
        member.pushed_at = pushed_at
        member.counts = counts
        if clock is not None:
            member.clock = clock
        self._moved(member, before=before)

    def _moved(self, member: Member, *, before: Standing) -> None:
        """Forgets the roster where a worker stands otherwise than before."""
        now = _standing(member)
        if now != before:
            self._roster = None
            self._num_alive += now[0] - before[0]

    def _forget_gone(self) -> None:
        """Lets go of the longest gone, so that workers that come and go do not fill the memory."""
        excess = len(self._members) - GONE_FACTOR * self.workers_max
        if excess > 0:
            gone = sorted((m for m in self._members.values() if not m.alive), key=lambda m: m.heard_at)
            for member in gone[:excess]:
                del self._members[member.worker_id]


# Workers known, gone ones included, are at most this many times workers_max.
GONE_FACTOR = 4

# A slow worker's first push after it was left out comes too late as a rule, and its next needs the others to wait.
STALLS_MAX = 2

_ENDED = (WorkerState.FINISHED, WorkerState.FAILED)


# What a roster is made from: whether a worker is alive, counts, and has yet to push.
Standing = tuple[bool, bool, bool]
_GONE: Standing = (False, False, False)


def _standing(member: Member) -> Standing:
    return member.state is _ALIVE, member.counts, member.pushed_at is None


def _superseded(known: Member, incarnation: int) -> Superseded:
    return Superseded(
        f"worker {known.worker_id!r} is held by a later process (incarnation {known.incarnation}, this one is"
        f" {incarnation}); give this process another worker id"
    )
