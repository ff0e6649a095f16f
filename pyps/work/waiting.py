"""The lock of a work queue, and the calls that wait: one a worker, and those of coordinators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock

from pyps.core.effects import ParkedCalls, Wake
from pyps_wire.errors import WaitTimedOut

# Calls end and are repeated. A worker that calls again within this time has not stopped waiting.
PAUSE_SECONDS = 5.0

# Under this name the calls of coordinators are parked; no worker has it.
_COORDINATORS = ""


class WaitingCalls:
    """A queue's lock, and the calls that wait."""

    def __init__(self, on_event: Callable[..., object]) -> None:
        """`on_event(kind, what, **facts)` records an event."""
        self.lock = Lock()
        self._on_event = on_event
        # Guarded by lock.
        # To be called once the lock is free.
        self._due: list[Callable[[], object]] = []
        # By worker.
        self._parked = ParkedCalls[str]()
        # By worker, its latest call, until that ends.
        self._latest: dict[str, Wake] = {}
        # Since when workers have waited without a longer pause, and until when.
        self._since = 0.0
        self._until: float | None = None

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Hold the lock; then, without it, wake calls and record events."""
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
        """Record an event, once the lock is free."""
        self._due.append(partial(self._on_event, "work", what, **facts))

    @property
    def names(self) -> set[str]:
        return self._parked.calls.keys() - {_COORDINATORS}

    def announce(self, worker_id: str, call: Wake | None) -> None:
        """Make a call the worker's latest, and wake an earlier one that still waits."""
        self._latest.pop(worker_id, None)
        if call is not None:
            self._latest[worker_id] = call
        self.wake(worker_id)

    def require_latest(self, worker_id: str, call: Wake) -> None:
        """Raise WaitTimedOut for an announced call that ended, or was replaced by another of its worker."""
        if self._latest.get(worker_id) != call:
            raise WaitTimedOut(f"worker {worker_id!r} has made another call since: this one has ended")
        self._parked.take([worker_id])

    def wait(self, worker_id: str, wake: Wake | None, *, now: float) -> None:
        """Keep the wake function of a worker that got nothing."""
        if self._until is None or now - self._until > PAUSE_SECONDS:
            self._since = now
        self._until = now
        if wake is not None:
            self._parked.park(worker_id, wake)

    def since(self, now: float) -> float | None:
        """Return since when workers have waited; None if none does."""
        if self.names:
            self._until = now
        if self._until is None or now - self._until > PAUSE_SECONDS:
            return None
        return self._since

    def watch(self, wake: Wake) -> None:
        """Keep the wake function of a coordinator."""
        self._parked.park(_COORDINATORS, wake)

    def forget(self, wake: Wake) -> None:
        for name in list(self._parked.calls):
            self._parked.forget(name, wake)
        self._latest = {name: other for name, other in self._latest.items() if other != wake}

    def wake(self, *worker_ids: str) -> None:
        self._due += self._parked.take(worker_ids)

    def wake_all(self) -> None:
        self._due += self._parked.take_all()
