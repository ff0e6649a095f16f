"""The workers of a queue: where each is, what it holds, how fast it is; and their calls that wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TypeAlias

from pyps.work.portions import Portion
from pyps_wire.errors import WaitTimedOut

# A speed is that over so many of a worker's last portions: one that has become slow is soon known to be.
PORTIONS_MEASURED = 4
# Calls end and are made again: who asks anew so soon has waited on.
PAUSE_SECONDS = 5.0

Wake: TypeAlias = Callable[[], None]


@dataclass(slots=True, eq=False)
class Lease:
    """One giving-out of a portion to a worker."""

    pass_: int
    # With the number of the lease.
    portion: Portion
    worker: WorkerProgress
    # In seconds of the run's clock.
    leased_at: float
    # Whether another worker had the portion then.
    copy: bool

    @property
    def lease_id(self) -> int:
        """Its number."""
        return self.portion.lease_id

    @property
    def portion_id(self) -> int:
        """The portion's number."""
        return self.portion.portion_id


@dataclass(slots=True, eq=False)
class WorkerProgress:
    """A worker as the queue sees it. Times are in seconds of the run's clock."""

    worker_id: str
    incarnation: int
    # What it holds, of all passes, by number of the lease.
    leases: dict[int, Lease] = field(default_factory=dict)
    # The pass of which it was given a portion last, and the portion after that one; None before its first.
    pass_: int = -1
    next_portion: int | None = None
    # The first example that it was given in that pass and in the pass before, to begin with the same data again.
    began: int | None = None
    began_before: int | None = None
    # When it last claimed or delivered anything.
    gave_at: float | None = None
    # Examples, and the seconds that they took, of its last portions.
    measured: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=PORTIONS_MEASURED))

    @property
    def speed(self) -> float:
        """Examples per second over its last portions; 0 while unknown."""
        seconds = sum(seconds for _, seconds in self.measured)
        return sum(examples for examples, _ in self.measured) / seconds if seconds > 0 else 0.0

    def enter(self, pass_: int) -> None:
        """Moves to where it began the pass before, unless it is in this one already."""
        if pass_ != self.pass_:
            self.began_before, self.began = self.began if self.began is not None else self.began_before, None
            self.pass_, self.next_portion = pass_, None

    def computed(self, leases: Sequence[Lease], *, now: float) -> None:
        """Measures how long it took for portions, which it may have been given while it was still at others."""
        leased_at = min(lease.leased_at for lease in leases)
        began = leased_at if self.gave_at is None else max(leased_at, self.gave_at)
        if now > began:
            self.measured.append((sum(lease.portion.num_examples for lease in leases), now - began))
        self.gave_at = now


class WaitingCalls:
    """A queue's lock, and the calls that wait: one a worker, and those of coordinators, by their wake functions."""

    def __init__(self, tell: Callable[..., None]) -> None:
        """`tell(kind, what, **facts)`: notes an event."""
        self.lock = Lock()
        self._tell = tell
        # Guarded by lock.
        # What is to be called once the lock is free.
        self._due: list[Callable[[], object]] = []
        self._wakes: dict[str, Wake] = {}
        # Of each worker, the call that asked last, while it goes on.
        self._asking: dict[str, Wake] = {}
        self._watching: list[Wake] = []
        # Since when workers have waited with hardly a pause, and until when.
        self._since = 0.0
        self._until: float | None = None

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Holds the lock; then, without it, wakes the calls and tells of the events that became due."""
        due: list[Callable[[], object]] = []
        try:
            with self.lock:
                try:
                    yield
                finally:
                    due, self._due = self._due, []
        finally:
            for call in due:
                call()

    def note(self, what: str, **facts: object) -> None:
        """Tells of an event."""
        self._due.append(partial(self._tell, "work", what, **facts))

    @property
    def names(self) -> set[str]:
        """The workers that wait."""
        return set(self._wakes)

    def announce(self, worker_id: str, call: Wake | None) -> None:
        """Records a worker's question, which ends an earlier one that still waits."""
        self._asking.pop(worker_id, None)
        if call is not None:
            self._asking[worker_id] = call
        self.wake(worker_id)

    def ask(self, worker_id: str, call: Wake | None) -> None:
        """Raises WaitTimedOut for an announced call that ended, or that its worker has asked anew since."""
        if call is None or self._asking.get(worker_id) != call:
            raise WaitTimedOut(f"worker {worker_id!r} has asked anew since: this call is waited for no longer")
        self._wakes.pop(worker_id, None)

    def wait(self, worker_id: str, wake: Wake | None, *, now: float) -> None:
        """Keeps the wake function of a worker that got nothing."""
        if self._until is None or now - self._until > PAUSE_SECONDS:
            self._since = now
        self._until = now
        if wake is not None:
            self._wakes[worker_id] = wake

    def since(self, now: float) -> float | None:
        """Since when workers have waited; None where none does."""
        if self._wakes:
            self._until = now
        if self._until is None or now - self._until > PAUSE_SECONDS:
            return None
        return self._since

    def watch(self, wake: Wake | None) -> None:
        """Keeps the wake function of a coordinator."""
        if wake is not None and wake not in self._watching:
            self._watching.append(wake)

    def forget(self, wake: Wake) -> None:
        """Drops a wake function."""
        self._wakes = {name: other for name, other in self._wakes.items() if other != wake}
        self._asking = {name: other for name, other in self._asking.items() if other != wake}
        self._watching = [other for other in self._watching if other != wake]

    def wake(self, worker_id: str) -> None:
        """Wakes a worker's call."""
        if wake := self._wakes.pop(worker_id, None):
            self._due.append(wake)

    def wake_workers(self) -> None:
        """Wakes the calls of all workers."""
        self._due += self._wakes.values()
        self._wakes = {}

    def wake_all(self) -> None:
        """Wakes the calls of all workers and coordinators."""
        self.wake_workers()
        self._due += self._watching
        self._watching = []
