"""Who waits for a portion or for the end of a pass, and is woken when that may have come."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pyps_wire.errors import WaitTimedOut

Wake: TypeAlias = Callable[[], None]

# Calls end and are made again: who asks anew so soon has waited on.
PAUSE_SECONDS = 5.0


class Waiting:
    """The wake functions of calls that wait: one a worker, and those of coordinators. Guarded by its queue's lock.

    Every method returns wake functions instead of calling them: they are for after the lock.
    """

    def __init__(self) -> None:
        self._wakes: dict[str, Wake] = {}
        # Of each worker, the call that asked last, while it goes on.
        self._asking: dict[str, Wake] = {}
        self._watching: list[Wake] = []
        # Since when workers have waited with hardly a pause, and until when.
        self._since = 0.0
        self._until: float | None = None

    @property
    def names(self) -> set[str]:
        """The workers that wait."""
        return set(self._wakes)

    def ask(self, worker_id: str, wake: Wake | None, *, again: bool) -> list[Wake]:
        """Takes note of a worker's question, which ends an earlier one that still waits.

        WaitTimedOut for one that asks again and is not the worker's last: nobody may take its answer any more.
        """
        if again:
            self.require_last(worker_id, wake)
            self._wakes.pop(worker_id, None)
            return []
        if wake is None:
            self._asking.pop(worker_id, None)
            return self.leave(worker_id)
        return self.announce(worker_id, wake)

    def announce(self, worker_id: str, call: Wake) -> list[Wake]:
        """Takes note of a question that will be asked only later, maybe after the worker's next."""
        self._asking[worker_id] = call
        return self.leave(worker_id)

    def require_last(self, worker_id: str, call: Wake | None) -> None:
        """Raises WaitTimedOut for a call that ended, or that its worker has asked anew since."""
        if call is None or self._asking.get(worker_id) != call:
            raise WaitTimedOut(f"worker {worker_id!r} has asked anew since: this call is waited for no longer")

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

    def watch(self, wake: Wake) -> None:
        """Keeps the wake function of a coordinator."""
        if wake not in self._watching:
            self._watching.append(wake)

    def leave(self, worker_id: str) -> list[Wake]:
        """Lets a worker's call look once more: it is taken to be gone."""
        wake = self._wakes.pop(worker_id, None)
        return [wake] if wake is not None else []

    def forget(self, wake: Wake) -> None:
        """Drops a wake function."""
        self._wakes = {name: other for name, other in self._wakes.items() if other != wake}
        self._asking = {name: other for name, other in self._asking.items() if other != wake}
        self._watching = [other for other in self._watching if other != wake]

    def workers(self) -> list[Wake]:
        """Takes the wake functions of all waiting workers."""
        wakes, self._wakes = list(self._wakes.values()), {}
        return wakes

    def all(self) -> list[Wake]:
        """Takes all wake functions."""
        watching, self._watching = self._watching, []
        return [*self.workers(), *watching]
