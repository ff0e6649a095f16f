"""Which worker may begin a step.

Some protocols limit when a worker may compute: one at a time, or no more than s clocks ahead of the slowest. The pacer
of server 0 alone grants steps. A worker that requests each step there keeps the rule on all servers.

A pacer is a state machine without lock, time or thread: its owner calls one method at a time and wakes the
workers that it returns. A worker is present from its first request until it departs. It holds a granted step until
it requests the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from pyps.core.effects import NONE, Effects, ParkedCalls, Wake
from pyps.core.roster import not_joined
from pyps_wire.errors import InvalidArgument


@dataclass(slots=True)
class WorkerClock:
    """A worker's clock, and whether it computes or waits."""

    worker_id: str
    # Finished steps, by its own report.
    count: int
    # The count at which its clock was 0.
    offset: int
    # Drawn when it joins and at the end of each step: the lowest ticket has waited longest.
    ticket: int
    # Whether it may compute now; otherwise it waits.
    granted: bool = False
    # Whether one of its calls still waits for the answer.
    requested: bool = True

    @property
    def clock(self) -> int:
        """Steps finished since it joined, or since the last `restart_clocks`, plus the clock at which it joined."""
        return self.count - self.offset


@dataclass(slots=True)
class PacerState:
    """The present workers, and the events that the owner has reported."""

    # In order of joining.
    present: dict[str, WorkerClock] = field(default_factory=dict)
    # Workers that count towards the quorum: they have requested a step, or need not.
    seen: set[str] = field(default_factory=set)
    # Workers that others stopped waiting for, and their count then.
    aside: dict[str, int] = field(default_factory=dict)
    version: int = 0
    tickets: int = 0

    def join(self, worker_id: str, count: int) -> None:
        """Add a worker at the clock of the slowest, whatever its own count is."""
        self.present[worker_id] = WorkerClock(worker_id, count, count - self.slowest(), self.draw())

    def draw(self) -> int:
        self.tickets += 1
        return self.tickets

    def slowest(self) -> int:
        """Return the lowest clock; 0 if no worker is present."""
        return min((worker.clock for worker in self.present.values()), default=0)

    def restart_clocks(self) -> None:
        """Set every worker's clock to 0."""
        for worker in self.present.values():
            worker.offset = worker.count


class Pacer(ABC):
    """Grants steps to workers. Guarded by its owner's lock.

    Each method that notes an event returns the workers that may proceed now and could not before.
    """

    def __init__(self) -> None:
        # No step is granted until so many workers have requested one.
        self.quorum = 0
        self._state = PacerState()

    def arrive(self, worker_id: str, clock: int) -> list[str]:
        """Note a worker's request for the step after `clock` finished ones, which ends its previous step.

        A worker that may proceed is also returned when it repeats a request. Raise InvalidArgument if its clock fell.
        """
        state = self._state
        worker = state.present.get(worker_id)
        if worker is not None and clock < worker.count:
            raise InvalidArgument(
                f"worker {worker_id!r} requests the step after {clock} steps, and has finished {worker.count} already:"
                " send a count that never falls, or say Hello as a new incarnation"
            )
        if worker is None:
            if clock <= state.aside.get(worker_id, -1):
                # It continues its step, which no worker waits for any more.
                return [worker_id]
            state.aside.pop(worker_id, None)
            state.join(worker_id, clock)
        elif worker.granted and worker.count == clock:
            return [worker_id]
        else:
            if worker.granted:
                worker.granted, worker.ticket = False, state.draw()
            worker.count, worker.requested = clock, True
        if self.missing:
            state.seen.add(worker_id)
        return self._grant()

    def withdraw(self, worker_id: str) -> list[str]:
        """Cancel a worker's request. Its clock stays; after its next request its turn comes behind the others."""
        worker = self._state.present.get(worker_id)
        if worker is not None:
            worker.granted, worker.requested, worker.ticket = False, False, self._state.draw()
        return self._grant()

    def set_aside(self, worker_id: str) -> list[str]:
        """Stop waiting for a worker until it requests a later step."""
        worker = self._state.present.get(worker_id)
        released = self.depart(worker_id)
        if worker is not None:
            self._state.aside[worker_id] = worker.count
        return released

    def depart(self, worker_id: str) -> list[str]:
        """Forget a worker that left or died."""
        self._state.present.pop(worker_id, None)
        self._state.aside.pop(worker_id, None)
        return self._grant()

    def excuse(self, worker_ids: Iterable[str]) -> list[str]:
        """Count workers towards the quorum without a request."""
        if not self.missing:
            return []
        self._state.seen.update(worker_ids)
        return self._grant()

    def advanced(self, version: int) -> list[str]:
        """Note a shard's version; the highest is in force."""
        self._state.version = max(self._state.version, version)
        return self._grant()

    def take_over(self, other: Pacer) -> list[str]:
        """Take over the workers of another pacer, which is not used again, and set their clocks to 0."""
        self._state = other._state
        self._state.seen.update(self._state.present)
        self._state.restart_clocks()
        return self._grant()

    def asks(self, version: int) -> bool:
        """Return whether workers must request each step at that version."""
        return True

    def waiting_for(self, worker_id: str) -> tuple[str, ...]:
        """Return the workers that this one waits for, ascending; () if it does not wait, or waits for the quorum."""
        return tuple(sorted(self.waited_for([worker_id])))

    def waited_for(self, worker_ids: Iterable[str]) -> set[str]:
        """Return the workers that any of these waits for, the quorum apart."""
        present = self._state.present
        workers = [present[worker_id] for worker_id in worker_ids if worker_id in present]
        waiting = [worker for worker in workers if not worker.granted]
        return set(self._ahead_of(waiting)) if waiting and not self.missing else set()

    def step_of(self, worker_id: str) -> int:
        """Return a number that changes with the step of a present worker."""
        return self._state.present[worker_id].ticket

    @property
    def missing(self) -> int:
        """The number of workers that the quorum still waits for."""
        return max(0, self.quorum - len(self._state.seen))

    def awaited(self, alive: Iterable[str]) -> tuple[str, ...]:
        """Return the workers that the quorum waits for: live ones by name, the others as a number in words."""
        if not self.missing:
            return ()
        coming = sorted(worker_id for worker_id in alive if worker_id not in self._state.seen)
        return (*coming, *not_joined(self.missing - len(coming)))

    # The rule of a pacer.

    @abstractmethod
    def _ready(self, waiting: list[WorkerClock]) -> list[WorkerClock]:
        """Return the waiting workers that may proceed now, in order, if the quorum is complete."""

    @abstractmethod
    def _ahead_of(self, waiting: list[WorkerClock]) -> Iterable[str]:
        """Return the workers that any of these waits for; `waiting` is not empty."""

    def _grant(self) -> list[str]:
        waiting = [worker for worker in self._state.present.values() if worker.requested and not worker.granted]
        ready = [] if self.missing else self._ready(waiting)
        for worker in ready:
            worker.granted = True
        return [worker.worker_id for worker in ready]


class TurnTaking(Pacer):
    """Lets one worker compute at a time, in turn (the STT chapter's "synchronous").

    Turns go round in order of joining. A worker keeps its turn until it requests the next or departs.
    """

    def _ready(self, waiting: list[WorkerClock]) -> list[WorkerClock]:
        taken = any(worker.granted for worker in self._state.present.values())
        return [] if taken or not waiting else [min(waiting, key=lambda worker: worker.ticket)]

    def _ahead_of(self, waiting: list[WorkerClock]) -> list[str]:
        return [other.worker_id for other in self._state.present.values() if other.granted]


class ClockBound(Pacer):
    """Lets a worker at clock c proceed while c - min_q c_q <= s (stale synchronous parallel, Ho et al. 2013)."""

    def __init__(self, clock_bound: int) -> None:
        super().__init__()
        self._clock_bound = clock_bound

    def _ready(self, waiting: list[WorkerClock]) -> list[WorkerClock]:
        slowest = self._state.slowest()
        return [worker for worker in waiting if worker.clock - slowest <= self._clock_bound]

    def _ahead_of(self, waiting: list[WorkerClock]) -> list[str]:
        enough = max(worker.clock for worker in waiting) - self._clock_bound
        return [other.worker_id for other in self._state.present.values() if other.clock < enough]


class Release(Pacer):
    """Admits the workers one after the other, in order of joining, after a warm start (Dean et al. 2012, section 4.1).

    At version t the first max(1, 1 + floor((t - start) / every)) workers may compute. The paper gives no intervals.
    """

    def __init__(self, start: int, every: int) -> None:
        super().__init__()
        self._start, self._every = start, every

    def asks(self, version: int) -> bool:
        # Until one more worker, if it joined now, would be admitted at once.
        return version < self._start + self._every * len(self._state.present)

    @property
    def all_free(self) -> bool:
        """True if every present worker may compute; False if none is present."""
        return 0 < len(self._state.present) <= self._places

    @property
    def _places(self) -> int:
        return max(1, 1 + (self._state.version - self._start) // self._every)

    def _ready(self, waiting: list[WorkerClock]) -> list[WorkerClock]:
        free = set(islice(self._state.present, self._places))
        return [worker for worker in waiting if worker.worker_id in free]

    def _ahead_of(self, waiting: list[WorkerClock]) -> list[str]:
        present, waiting_ids = list(self._state.present), {worker.worker_id for worker in waiting}
        return present[: max(rank for rank, worker_id in enumerate(present) if worker_id in waiting_ids)]


class Free(Pacer):
    """Lets every worker compute once the quorum is complete."""

    def asks(self, version: int) -> bool:
        return self.missing > 0

    def _ready(self, waiting: list[WorkerClock]) -> list[WorkerClock]:
        return waiting

    def _ahead_of(self, waiting: list[WorkerClock]) -> tuple[str, ...]:
        return ()


class StagedPacer(Pacer):
    """One pacer for the first `updates` versions, then another; None for a stage in which every worker may compute.

    With `release_every`, the workers are admitted one after the other, so many updates apart, before the second pacer's
    rule applies.
    """

    def __init__(self, warm_up: Pacer | None, main: Pacer | None, *, updates: int, release_every: int = 0) -> None:
        super().__init__()
        self._updates = updates
        self._release = Release(updates, release_every) if release_every else None
        # The present stage first.
        self._stages: list[Pacer] = [warm_up or Free(), *([self._release] if self._release else []), main or Free()]

    def asks(self, version: int) -> bool:
        # Also during a free warm-up: a later stage needs the order in which the workers came.
        return any(stage.asks(version) for stage in self._stages)

    def _grant(self) -> list[str]:
        for stage in self._stages:
            stage._state = self._state
        while len(self._stages) > 1 and self._is_over(self._stages[0]):
            del self._stages[0]
            self._state.restart_clocks()
        return super()._grant()

    def _is_over(self, stage: Pacer) -> bool:
        if stage is self._release:
            return self._release.all_free
        return self._state.version >= self._updates

    def _ready(self, waiting: list[WorkerClock]) -> list[WorkerClock]:
        return self._stages[0]._ready(waiting)

    def _ahead_of(self, waiting: list[WorkerClock]) -> Iterable[str]:
        return self._stages[0]._ahead_of(waiting)


class StepGate:
    """The protocol's pacer and the calls that wait for it. Wakes exactly the calls whose workers may proceed.

    Its owner calls one method at a time and carries out the effects. A waiting call parks its wake function here and
    requests its step again when an event's effects wake it.
    """

    def __init__(self, pacer: Pacer | None = None):
        # None under most protocols, whose workers request no steps; may be read from any thread.
        self.pacer = pacer
        # The worker whose step, or end, woke calls last; empty where none did.
        self.moved_by = ""
        self._version = 0
        # By worker.
        self._parked = ParkedCalls[str]()
        # The latest call of each worker, until it ends.
        self._latest: dict[str, Wake] = {}

    @property
    def asks(self) -> bool:
        """True if workers must request each step. May be read from any thread."""
        pacer = self.pacer
        return pacer is not None and pacer.asks(self._version)

    def ask(self, worker_id: str, clock: int, wake: Wake) -> tuple[bool, Effects]:
        """Return whether the worker may begin the step after `clock` steps; if not, `wake` says when to ask again."""
        if self.pacer is None or not self.asks:
            return True, NONE
        released = self.pacer.arrive(worker_id, clock)
        self._latest[worker_id] = wake
        effects = self._wake([other for other in released if other != worker_id], by=worker_id)
        granted = worker_id in released
        if not granted:
            self._parked.park(worker_id, wake)
        return granted, effects

    def forget(self, worker_id: str, wake: Wake, *, withdraw: bool = False) -> Effects:
        """Remove a wake function whose call has ended; the worker keeps its place.

        With `withdraw` the call was cancelled, and the worker gives up its place unless it has called again since:
        others would wait in vain for a step that it does not know it has.
        """
        self._parked.forget(worker_id, wake)
        if self._latest.get(worker_id) != wake:
            return NONE
        del self._latest[worker_id]
        return self._wake(self.pacer.withdraw(worker_id), by=worker_id) if withdraw and self.pacer is not None else NONE

    def depart(self, worker_id: str) -> Effects:
        """Forget a worker; wake its own calls too."""
        if self.pacer is None:
            return NONE
        # The quorum must not wait for a worker that never requested a step.
        return self._wake([*self.pacer.excuse([worker_id]), *self.pacer.depart(worker_id), worker_id], by=worker_id)

    def excuse(self, worker_ids: Iterable[str]) -> Effects:
        """Count workers that are gone, or compute already, towards the quorum."""
        return NONE if self.pacer is None else self._wake(self.pacer.excuse(worker_ids))

    def expect(self, quorum: int, at_work: Iterable[str] = ()) -> Effects:
        """Set the quorum, towards which the workers `at_work` count; wake all calls if it changes."""
        if self.pacer is None or self.pacer.quorum == quorum:
            return self.excuse(at_work)
        self.pacer.quorum = quorum
        return self._wake_all().and_then(self.excuse(at_work))

    def holding_up(self) -> dict[str, int]:
        """Return the workers whose steps others wait for, each with its `step_of`."""
        if self.pacer is None:
            return {}
        # A worker that waits itself holds no other up.
        waiting = self._parked.calls
        return {name: self.pacer.step_of(name) for name in self.pacer.waited_for(waiting) - waiting.keys()}

    def set_aside(self, worker_id: str) -> Effects:
        """Stop waiting for a worker until it requests its next step."""
        return NONE if self.pacer is None else self._wake(self.pacer.set_aside(worker_id), by=worker_id)

    def advanced(self, version: int) -> Effects:
        """Note a shard's version; the highest is in force."""
        self._version = max(self._version, version)
        if self.pacer is None:
            return NONE
        asked = self.asks
        released = self.pacer.advanced(self._version)
        # Where no worker must request steps, all may proceed.
        return self._wake(released) if asked else self._wake_all()

    def replace(self, pacer: Pacer | None, *, quorum: int, at_work: Iterable[str], version: int) -> Effects:
        """Replace the pacer by one that takes over its workers, and wake all calls.

        `quorum`, `at_work` and `version` are as in `expect` and `advanced`: without a pacer none of them is kept.
        """
        if pacer is not None:
            pacer.quorum = quorum
            if self.pacer is not None:
                pacer.take_over(self.pacer)
        self.pacer = pacer
        return self._wake_all().and_then(self.excuse(at_work)).and_then(self.advanced(version))

    def waiting_for(self, worker_id: str) -> tuple[str, ...]:
        """Return the workers that this one waits for."""
        return self.pacer.waiting_for(worker_id) if self.pacer is not None else ()

    def awaited(self, alive: Iterable[str]) -> tuple[str, ...]:
        """Return the workers that the quorum waits for: live ones by name, the others as a number in words."""
        return self.pacer.awaited(alive) if self.pacer is not None else ()

    def holds_for(self, alive: Iterable[str]) -> tuple[str, ...]:
        """Return the same as `awaited` if any call waits, else ()."""
        return self.awaited(alive) if self._parked.calls else ()

    def _wake(self, worker_ids: Iterable[str], *, by: str = "") -> Effects:
        if wakes := self._parked.take(worker_ids):
            self.moved_by = by
        return Effects(wakes=tuple(wakes))

    def _wake_all(self) -> Effects:
        return self._wake(list(self._parked.calls))
