"""A run's workers: they come, give signs of life and go, and each change is an event of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyps.core.membership import Membership, WorkerInfo, WorkerState
from pyps.core.roster import Roster
from pyps.run.events import Events
from pyps.run.handshake import Greeting
from pyps_wire.errors import WaitTimedOut


class Attendance:
    """Membership with events. Every method may be called from any thread."""

    def __init__(self, membership: Membership, events: Events):
        self.membership = membership
        self._events = events
        # Told of each worker that is gone, and whether it was lost rather than left by itself.
        self.on_gone: Callable[[str, bool], None] = lambda worker_id, lost: None

    def join(self, greeting: Greeting, *, now: float) -> bool:
        """Makes the worker that greets a live one; True where that ended an earlier process of its name."""
        before = self.membership.get(greeting.worker_id)
        info = WorkerInfo(greeting.host, greeting.process_id, greeting.device, greeting.software)
        member = self.membership.join(greeting.worker_id, greeting.incarnation, now=now, info=info)
        renewed = before is not None and before.incarnation != member.incarnation
        if before is None or renewed or not before.alive:
            self._events.add("joined", "worker joined", worker=member.worker_id, host=info.host, pid=info.process_id)
        if renewed:
            self.on_gone(member.worker_id, True)
        return renewed

    def is_member(self, greeting: Greeting) -> bool:
        """Whether this very process has joined before."""
        member = self.membership.get(greeting.worker_id)
        return member is not None and member.incarnation == greeting.incarnation

    def heard(
        self,
        worker_id: str,
        incarnation: int,
        *,
        now: float,
        clock: int | None = None,
        scalars: Mapping[str, float] | None = None,
    ) -> None:
        """Notes a sign of life; UnknownWorker or Superseded where it is none of a member."""
        before = self.membership.get(worker_id)
        self.membership.renew(worker_id, incarnation, now=now, clock=clock, scalars=scalars)
        if before is not None and not before.alive:
            self._events.add("back", "worker is back", worker=worker_id)

    def require_alive(self, worker_id: str, incarnation: int) -> None:
        """Raises WaitTimedOut for a worker that was heard of once and is gone; it has to give a sign of life anew."""
        member = self.membership.get(worker_id)
        if member is None or member.incarnation != incarnation or not member.alive:
            raise WaitTimedOut(f"worker {worker_id!r} was silent for longer than its lease while it waited: ask again")

    def pushed(self, worker_id: str, incarnation: int, *, now: float, clock: int | None) -> Roster:
        """Notes a push and returns who counts now; raises as `heard`."""
        # Whoever counts already, as nearly always, has nothing to tell.
        before = None if worker_id in self.membership.roster.workers else self.membership.get(worker_id)
        roster = self.membership.pushed(worker_id, incarnation, now=now, clock=clock)
        if before is not None and not before.counts and worker_id in roster.workers:
            what = "worker counts" if before.alive else "worker is back"
            self._events.add("counts" if before.alive else "back", what, worker=worker_id, workers=roster.num_workers)
        return roster

    def taken(self, worker_id: str, incarnation: int, *, now: float) -> None:
        """Notes that a push was taken, which lets one count again that others had waited too long for."""
        if self.membership.taken(worker_id, incarnation, now=now):
            workers = self.membership.roster.num_workers
            self._events.add("counts", "worker counts", worker=worker_id, workers=workers)

    def leave(self, worker_id: str, incarnation: int, *, now: float, failed: bool, message: str) -> bool:
        """Ends a membership at the worker's own word; False where it was none."""
        state = WorkerState.FAILED if failed else WorkerState.FINISHED
        before = self.membership.get(worker_id)
        member = self.membership.leave(worker_id, incarnation, now=now, state=state, message=message)
        if member is None:
            return False
        if before is None or before.state is not state:
            self._events.add("left", "worker left", worker=worker_id, state=state.value, message=message)
        self.on_gone(worker_id, failed)
        return True

    def expire(self, now: float) -> list[str]:
        """Forgets workers that were silent for longer than their lease, and returns them."""
        expired = self.membership.expire(now)
        for member in expired:
            silent = round(now - member.heard_at, 1)
            self._events.add(
                "expired", "worker's lease ran out", worker=member.worker_id, silent_seconds=silent, warning=True
            )
            self.on_gone(member.worker_id, True)
        return [member.worker_id for member in expired]

    def done(self, *, expected_workers: int) -> bool:
        """True when as many workers as expected (at least one) have joined, and none of them is left."""
        joined = len(self.membership.all())
        return joined >= max(1, expected_workers) and self.membership.num_alive == 0
