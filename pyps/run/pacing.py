"""Who may begin a step: the protocol's pacer, and the calls that wait for its word."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock

from pyps.core.pacing import Pacer
from pyps.core.roster import not_joined

Wake = Callable[[], None]


class Pacing:
    """Guards a pacer and wakes those that it lets go on, nobody else. May be used from any thread.

    A call that waits leaves nothing here but a wake function, and asks again when that was called. Asking twice
    for one step is asking once, so a worker may repeat a call whose answer was lost.
    """

    def __init__(self, pacer: Pacer | None):
        self._lock = Lock()
        # Guarded by _lock.
        self._pacer = pacer
        self._version = 0
        # Those of each worker's calls that wait.
        self._wakes: dict[str, list[Wake]] = {}

    @property
    def asks(self) -> bool:
        """Whether workers must ask before a step."""
        pacer = self._pacer
        return pacer is not None and pacer.asks(self._version)

    def may_proceed(self, worker_id: str, *, clock: int, wake: Wake) -> bool:
        """Whether the worker may begin the step after `clock` steps; if not, `wake` says when to ask again."""
        with self._lock:
            if self._pacer is None or not self._pacer.asks(self._version):
                return True
            released = self._pacer.arrive(worker_id, clock)
            wakes = self._wakes_of(other for other in released if other != worker_id)
            granted = worker_id in released
            if not granted:
                waiting = self._wakes.setdefault(worker_id, [])
                if wake not in waiting:
                    waiting.append(wake)
        _call(wakes)
        return granted

    def forget(self, worker_id: str, wake: Wake) -> None:
        """Takes back a wake function: its call has ended. The worker stands where it stood."""
        with self._lock:
            left = [other for other in self._wakes.pop(worker_id, []) if other != wake]
            if left:
                self._wakes[worker_id] = left

    def depart(self, worker_id: str) -> None:
        """Waits for that worker no longer; calls of its own that wait ask again."""
        with self._lock:
            if self._pacer is None:
                return
            # Who goes without ever having asked is no longer expected to.
            released = self._pacer.arrive(worker_id, 0) if self._pacer.missing else []
            wakes = self._wakes_of([*released, *self._pacer.depart(worker_id), worker_id])
        _call(wakes)

    def advanced(self, version: int) -> None:
        """Notes a shard's version; the highest counts."""
        if self._pacer is None and version <= self._version:
            return
        with self._lock:
            self._version = max(self._version, version)
            if self._pacer is None:
                return
            asked = self._pacer.asks(self._version)
            released = self._pacer.advanced(self._version)
            # From where nobody needs to ask, everybody may go.
            wakes = self._wakes_of(released) if asked else self._wakes_of(list(self._wakes))
        _call(wakes)

    def open_gate(self) -> None:
        """Waits for no expected worker any longer; all waiting calls ask again."""
        with self._lock:
            if self._pacer is None or not self._pacer.missing:
                return
            self._pacer.quorum = 0
            wakes = self._wakes_of(list(self._wakes))
        _call(wakes)

    def replace(self, pacer: Pacer | None) -> None:
        """Puts another pacer in place, which knows who waits and who computes; all waiting calls ask it again."""
        with self._lock:
            if pacer is not None and self._pacer is not None:
                pacer.take_over(self._pacer)
            if pacer is not None:
                pacer.advanced(self._version)
            self._pacer = pacer
            wakes = self._wakes_of(list(self._wakes))
        _call(wakes)

    def waiting_for(self, worker_id: str) -> tuple[str, ...]:
        """Whom that worker waits for."""
        with self._lock:
            return self._pacer.waiting_for(worker_id) if self._pacer is not None else ()

    def awaited(self, alive: Iterable[str]) -> tuple[str, ...]:
        """Whom the gate waits for: the live workers that have not asked by name, those that never joined counted."""
        with self._lock:
            if self._pacer is None or not self._pacer.missing:
                return ()
            coming = sorted(self._pacer.not_seen(alive))
            return (*coming, *not_joined(self._pacer.missing - len(coming)))

    @property
    def gate_holds(self) -> bool:
        """Whether a call waits for expected workers that have not asked yet."""
        with self._lock:
            return self._pacer is not None and self._pacer.missing > 0 and bool(self._wakes)

    def waited_for(self) -> set[str]:
        """All whom a waiting call waits for."""
        with self._lock:
            if self._pacer is None:
                return set()
            return {other for worker_id in self._wakes for other in self._pacer.waiting_for(worker_id)}

    def _wakes_of(self, worker_ids: Iterable[str]) -> list[Wake]:
        return [wake for worker_id in worker_ids for wake in self._wakes.pop(worker_id, [])]


def _call(wakes: Iterable[Wake]) -> None:
    for wake in wakes:
        wake()
