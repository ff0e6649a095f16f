"""Workers that live, or were expected, and hold the others up for too long."""

from __future__ import annotations

from collections.abc import Iterable

from pyps.core.membership import Member, Membership

# Part of the stall time after which a worker that has not pushed is looked at.
IDLE_SHARE = 0.1


class Stalls:
    """How long each worker has been waited for. The caller guards it."""

    def __init__(self, *, stall_seconds: float):
        self.stall_seconds = stall_seconds
        # Since when each was waited for without a pause.
        self._since: dict[str, float] = {}
        # Since when somebody has waited for expected workers that have not come; None while nobody does.
        self._gate_since: float | None = None

    def idle(self, members: Iterable[Member], *, now: float) -> set[str]:
        """The workers of whom it is worth asking whether anybody waits for them."""
        shortest = IDLE_SHARE * self.stall_seconds
        last = {m.worker_id: m.joined_at if m.taken_at is None else m.taken_at for m in members}
        return {worker_id for worker_id, time in last.items() if now - time >= shortest}

    def look(self, waited_for: Iterable[str], membership: Membership, *, now: float) -> list[str]:
        """The workers that have been waited for, and have pushed nothing that was taken, for stall_seconds.

        A worker's own long steps hold nobody up as long as nobody waits, so the time counts from when the wait
        for it was first seen, or from its last push that was taken where that came later.
        """
        since = {}
        for worker_id in waited_for:
            member = membership.get(worker_id)
            taken_at = member.taken_at if member is not None else None
            since[worker_id] = max(self._since.get(worker_id, now), taken_at or 0.0)
        self._since = since
        return sorted(worker_id for worker_id, began in since.items() if now - began >= self.stall_seconds)

    def look_at_gate(self, *, holds: bool, now: float) -> bool:
        """Whether expected workers that have not come have been waited for, without a pause, for stall_seconds."""
        if not holds:
            self._gate_since = None
            return False
        if self._gate_since is None:
            self._gate_since = now
        return now - self._gate_since >= self.stall_seconds
