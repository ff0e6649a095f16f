"""The gate of steps: the protocol's pacer, and the calls that wait for its word.

A state machine without lock or thread, as a pacer is: its owner calls one method at a time and carries out what it
returns. A call that waits leaves nothing here but its wake function, never called here, and asks again once that is
among the effects of an event. Asking twice for one step is asking once, so a worker may repeat a call whose answer
was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pyps.core.effects import NONE, Effects, tell
from pyps.core.pacing import Pacer
from pyps.core.roster import not_joined

Wake = Callable[[], None]


class StepGate:
    """Lets workers begin their steps, and wakes those that it lets go on, nobody else."""

    def __init__(self, pacer: Pacer | None = None):
        # None under most protocols, whose pushes pass by here; may be read from any thread.
        self.pacer = pacer
        self._version = 0
        # Those of each worker's calls that wait.
        self._wakes: dict[str, list[Wake]] = {}
        # Of each worker, the call under way that asked last.
        self._asking: dict[str, Wake] = {}
        # Of each worker that is waited for, its step and since when it was seen to hold others up with it.
        self._since: dict[str, tuple[int | None, float]] = {}

    @property
    def asks(self) -> bool:
        """Whether workers must ask before a step. May be read from any thread."""
        pacer = self.pacer
        return pacer is not None and pacer.asks(self._version)

    def ask(self, worker_id: str, clock: int, wake: Wake) -> tuple[bool, Effects]:
        """Whether the worker may begin the step after `clock` steps; if not, `wake` says when to ask again."""
        if self.pacer is None or not self.asks:
            return True, NONE
        released = self.pacer.arrive(worker_id, clock)
        self._asking[worker_id] = wake
        effects = self._wake(other for other in released if other != worker_id)
        granted = worker_id in released
        if not granted:
            waiting = self._wakes.setdefault(worker_id, [])
            if wake not in waiting:
                waiting.append(wake)
        return granted, effects

    def forget(self, worker_id: str, wake: Wake, *, withdraw: bool = False) -> Effects:
        """Takes back a wake function: its call has ended. The worker stands where it stood.

        `withdraw` says that nobody takes the call's answer any more. The worker then gives up its place, unless it
        has asked again since: others would wait in vain for a step that it does not know it has.
        """
        left = [other for other in self._wakes.pop(worker_id, []) if other != wake]
        if left:
            self._wakes[worker_id] = left
        if self._asking.get(worker_id) != wake:
            return NONE
        del self._asking[worker_id]
        return self._wake(self.pacer.withdraw(worker_id)) if withdraw and self.pacer is not None else NONE

    def depart(self, worker_id: str) -> Effects:
        """Waits for that worker no longer; calls of its own that wait ask again."""
        if self.pacer is None:
            return NONE
        # Who goes without ever having asked is no longer expected to.
        return self._wake([*self.pacer.excuse([worker_id]), *self.pacer.depart(worker_id), worker_id])

    def excuse(self, worker_ids: Iterable[str]) -> Effects:
        """Waits no longer for those workers to ask before anybody may begin: they are gone, or at work already."""
        return self._wake(self.pacer.excuse(worker_ids)) if self.pacer is not None else NONE

    def expect(self, quorum: int, at_work: Iterable[str] = ()) -> Effects:
        """Lets nobody begin before so many workers have asked, gone or been at work; all waiting calls ask again."""
        if self.pacer is None or self.pacer.quorum == quorum:
            return self.excuse(at_work)
        self.pacer.quorum = quorum
        return self._wake(list(self._wakes)).and_then(self.excuse(at_work))

    def stall(self, *, now: float, stall_seconds: float) -> Effects:
        """Waits no longer for workers that have held others up with one step for so long.

        Pushes do not prolong the time, only the next step does. Until then such a worker may go on by itself.
        """
        since, effects = {}, NONE
        pacer = self.pacer
        if pacer is not None:
            # Those that wait themselves hold nobody up.
            for worker_id in sorted(pacer.waited_for(self._wakes) - self._wakes.keys()):
                step = pacer.step_of(worker_id)
                known, began = self._since.get(worker_id, (step, now))
                since[worker_id] = (step, began if known == step else now)
            for worker_id in [name for name, (_, began) in since.items() if now - began >= stall_seconds]:
                del since[worker_id]
                what = "worker is not waited for until it asks for its next step: others waited too long for it"
                told = tell("stalled", what, worker=worker_id, stall_seconds=stall_seconds, warning=True)
                effects = effects.and_then(told).and_then(self._wake(pacer.set_aside(worker_id)))
        self._since = since
        return effects

    def advanced(self, version: int) -> Effects:
        """Notes a shard's version; the highest counts."""
        self._version = max(self._version, version)
        if self.pacer is None:
            return NONE
        asked = self.asks
        released = self.pacer.advanced(self._version)
        # From where nobody needs to ask, everybody may go.
        return self._wake(released if asked else list(self._wakes))

    def replace(self, pacer: Pacer | None, *, quorum: int, at_work: Iterable[str], version: int) -> Effects:
        """Puts another pacer in place, which knows who waits and who computes; all waiting calls ask it again.

        It is told of the quorum, of those who are at work already, and of the version: without a pacer nobody is.
        """
        if pacer is not None:
            pacer.quorum = quorum
            if self.pacer is not None:
                pacer.take_over(self.pacer)
        self.pacer = pacer
        return self._wake(list(self._wakes)).and_then(self.excuse(at_work)).and_then(self.advanced(version))

    def waiting_for(self, worker_id: str) -> tuple[str, ...]:
        """Whom that worker waits for."""
        return self.pacer.waiting_for(worker_id) if self.pacer is not None else ()

    def awaited(self, alive: Iterable[str]) -> tuple[str, ...]:
        """Whom the gate waits for: the live workers that have not asked by name, those that never joined counted."""
        if self.pacer is None or not self.pacer.missing:
            return ()
        coming = sorted(self.pacer.not_seen(alive))
        return (*coming, *not_joined(self.pacer.missing - len(coming)))

    def holds_for(self, alive: Iterable[str]) -> tuple[str, ...]:
        """The same as long as a call waits for them; () while nobody does."""
        return self.awaited(alive) if self._wakes else ()

    def _wake(self, worker_ids: Iterable[str]) -> Effects:
        return Effects(wakes=tuple(wake for worker_id in worker_ids for wake in self._wakes.pop(worker_id, [])))
