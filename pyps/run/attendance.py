"""A run's workers: they come, give signs of life and go, and each change is a line in the log."""

from __future__ import annotations

from collections.abc import Mapping

from pyps import logs
from pyps.core.membership import Membership, WorkerInfo, WorkerState
from pyps.run.handshake import Greeting

log = logs.get("pyps.run")


class Attendance:
    """Membership with a log. Every method may be called from any thread."""

    def __init__(self, *, lease_seconds: float, workers_max: int):
        self.membership = Membership(lease_seconds=lease_seconds, workers_max=workers_max)

    def join(self, greeting: Greeting, *, now: float) -> None:
        """Makes the worker that greets a live one."""
        before = self.membership.get(greeting.worker_id)
        info = WorkerInfo(greeting.host, greeting.process_id, greeting.device, greeting.software)
        member = self.membership.join(greeting.worker_id, greeting.incarnation, now=now, info=info)
        if before is None or before.incarnation != member.incarnation or not before.alive:
            log.info("worker joined", worker=member.worker_id, host=info.host, pid=info.process_id)

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
            log.info("worker is back", worker=worker_id)

    def leave(self, worker_id: str, incarnation: int, *, now: float, failed: bool, message: str) -> None:
        """Ends a membership at the worker's own word."""
        state = WorkerState.FAILED if failed else WorkerState.FINISHED
        member = self.membership.leave(worker_id, incarnation, now=now, state=state, message=message)
        if member is not None:
            log.info("worker left", worker=worker_id, state=state.value, message=message)

    def expire(self, now: float) -> None:
        """Forgets workers that were silent for longer than their lease."""
        for member in self.membership.expire(now):
            silent = round(now - member.heard_at, 1)
            log.warning("worker's lease ran out", worker=member.worker_id, silent_seconds=silent)

    def done(self, *, expected_workers: int) -> bool:
        """True when as many workers as expected (at least one) have joined, and none of them is left."""
        joined = len(self.membership.all())
        return joined >= max(1, expected_workers) and self.membership.num_alive == 0
