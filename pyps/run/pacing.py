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

    def __init__(self, pacer: Pacer | None = None):
        self._lock = Lock()
        # Guarded by _lock.
        self._pacer = pacer
        # Whether there is a pacer. Read without the lock: most protocols have none, and their pushes pass by here.
        self.paces = pacer is not None
        self._version = 0
        # Those of each worker's calls that wait.
        self._wakes: dict[str, list[Wake]] = {}
        # Of each worker, the call under way that asked last.
        self._asking: dict[str, Wake] = {}
        # Of each worker that is waited for, its step and since when it was seen to hold others up with it.
        self._since: dict[str, tuple[int | None, float]] = {}

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
            self._asking[worker_id] = wake
            wakes = self._wakes_of(other for other in released if other != worker_id)
            granted = worker_id in released
            if not granted:
                waiting = self._wakes.setdefault(worker_id, [])
                if wake not in waiting:
                    waiting.append(wake)
        _call(wakes)
        return granted

    def forget(self, worker_id: str, wake: Wake, *, withdraw: bool = False) -> None:
        """Takes back a wake function: its call has ended. The worker stands where it stood.

        `withdraw` says that nobody takes the call's answer any more. The worker then gives up its place, unless it
        has asked again since: others would wait in vain for a step that it does not know it has.
        """
        wakes: list[Wake] = []
        with self._lock:
            left = [other for other in self._wakes.pop(worker_id, []) if other != wake]
            if left:
                self._wakes[worker_id] = left
            if self._asking.get(worker_id) == wake:
                del self._asking[worker_id]
                if withdraw and self._pacer is not None:
                    wakes = self._wakes_of(self._pacer.withdraw(worker_id))
        _call(wakes)

    def depart(self, worker_id: str) -> None:
        """Waits for that worker no longer; calls of its own that wait ask again."""
        with self._lock:
            if self._pacer is None:
                return
            # Who goes without ever having asked is no longer expected to.
            released = self._pacer.excuse([worker_id])
            wakes = self._wakes_of([*released, *self._pacer.depart(worker_id), worker_id])
        _call(wakes)

    def excuse(self, worker_ids: Iterable[str]) -> None:
        """Waits no longer for those workers to ask before anybody may begin: they are gone, or at work already."""
        with self._lock:
            wakes = self._wakes_of(self._pacer.excuse(worker_ids)) if self._pacer is not None else []
        _call(wakes)

    def expect(self, quorum: int) -> None:
        """Lets nobody begin before so many workers have asked, gone or been excused; all waiting calls ask again."""
        with self._lock:
            if self._pacer is None or self._pacer.quorum == quorum:
                return
            self._pacer.quorum = quorum
            wakes = self._wakes_of(list(self._wakes))
        _call(wakes)

    def set_aside(self, *, now: float, stall_seconds: float) -> list[str]:
        """Waits no longer for workers that have held others up with one step for so long; returns them.

        Pushes do not prolong the time, only the next step does. Until then such a worker may go on by itself.
        """
        with self._lock:
            pacer = self._pacer
            if pacer is None:
                self._since.clear()
                return []
            since = {}
            # Those that wait themselves hold nobody up.
            for worker_id in pacer.waited_for(self._wakes) - self._wakes.keys():
                step = pacer.step_of(worker_id)
                known, began = self._since.get(worker_id, (step, now))
                since[worker_id] = (step, began if known == step else now)
            slow = sorted(worker_id for worker_id, (_, began) in since.items() if now - began >= stall_seconds)
            self._since = {worker_id: value for worker_id, value in since.items() if worker_id not in slow}
            wakes = self._wakes_of([other for worker_id in slow for other in pacer.set_aside(worker_id)])
        _call(wakes)
        return slow

    def advanced(self, version: int) -> None:
        """Notes a shard's version; the highest counts."""
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
        self.expect(0)

    def replace(self, pacer: Pacer | None) -> None:
        """Puts another pacer in place, which knows who waits and who computes; all waiting calls ask it again.

        It is to be told of the version next: while there was no pacer nobody may have.
        """
        with self._lock:
            self.paces = pacer is not None
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
            return self._pacer.waited_for(self._wakes) if self._pacer is not None else set()

    def _wakes_of(self, worker_ids: Iterable[str]) -> list[Wake]:
        return [wake for worker_id in worker_ids for wake in self._wakes.pop(worker_id, [])]


def _call(wakes: Iterable[Wake]) -> None:
    for wake in wakes:
        wake()
