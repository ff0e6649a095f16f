"""A run's workers: they come, give heartbeats and go, and each change says what is to be done about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from pyps.core.effects import NONE, Effects, tell
from pyps.core.member import Member, WorkerInfo, WorkerState, failure_in_words, was_interrupted
from pyps.core.membership import Membership
from pyps.core.roster import Roster
from pyps_wire.errors import WaitTimedOut


class WorkerRegistry:
    """Membership, with what each change brings about. Every method may be called from any thread."""

    def __init__(self, membership: Membership, *, stall_seconds: float):
        self.membership = membership
        self.stalls = Stalls(stall_seconds=stall_seconds)

    def join(
        self,
        worker_id: str,
        incarnation: int,
        *,
        now: float,
        info: WorkerInfo,
        replica: str = "",
        parts: tuple[int, ...] = (),
        secret: bytes = b"",
    ) -> Effects:
        """Makes the worker that greets a live one; an earlier life of its name or replica departs. Raises as `join`."""
        before = self.membership.get(worker_id)
        earlier = self.membership.of_replica(replica) if replica else []
        member = self.membership.join(
            worker_id, incarnation, now=now, info=info, replica=replica, parts=parts, secret=secret
        )
        renewed = before is not None and before.incarnation != member.incarnation
        effects = NONE
        if before is None or renewed or not before.alive:
            effects = tell("joined", "worker joined", worker=member.worker_id, host=info.host, pid=info.process_id)
        if renewed:
            effects = effects.and_then(Effects(gone=((member.worker_id, True),)))
        ended = [each.worker_id for each in earlier if each.incarnation != member.incarnation]
        if ended:
            what = f"replica {replica} is out: a later life of it has begun"
            effects = effects.and_then(tell("replica", what, taken_along=", ".join(ended)))
            effects = effects.and_then(Effects(gone=tuple((worker_id, True) for worker_id in ended)))
        departs = bool(ended) if replica else renewed
        return effects._replace(departed=(replica or worker_id,)) if departs else effects

    def is_member(self, worker_id: str, incarnation: int) -> bool:
        """Whether this very process has joined before."""
        member = self.membership.get(worker_id)
        return member is not None and member.incarnation == incarnation

    def heard(
        self,
        worker_id: str,
        incarnation: int,
        *,
        now: float,
        clock: int | None = None,
        scalars: Mapping[str, float] | None = None,
        secret: bytes = b"",
    ) -> Effects:
        """Notes a heartbeat; UnknownWorker, Superseded or NotAllowed where it is none of a member."""
        back = self.membership.renew(worker_id, incarnation, now=now, clock=clock, scalars=scalars, secret=secret)
        return tell("back", "worker is back", worker=worker_id) if back else NONE

    def require_alive(self, worker_id: str, incarnation: int) -> None:
        """Raises WaitTimedOut for a worker that was heard of once and is gone; it has to give a heartbeat anew."""
        member = self.membership.get(worker_id)
        if member is None or member.incarnation != incarnation or not member.alive:
            raise WaitTimedOut(f"worker {worker_id!r} was silent for longer than its lease while it waited: ask again")

    def pushed(
        self, worker_id: str, incarnation: int, *, now: float, clock: int | None, secret: bytes = b""
    ) -> tuple[Roster, Effects]:
        """Notes a push and returns who counts now; raises as `heard`."""
        before = self.membership.get(worker_id)
        roster = self.membership.pushed(worker_id, incarnation, now=now, clock=clock, secret=secret)
        if before is None or before.counts or not roster.counts(worker_id):
            return roster, NONE
        kind, what = ("counts", "worker counts") if before.alive else ("back", "worker is back")
        return roster, tell(kind, what, worker=worker_id, workers=roster.num_workers)

    def counts_again(self, worker_id: str) -> Effects:
        """Tells of a worker whose push was taken, and that others had waited too long for."""
        return tell("counts", "worker counts", worker=worker_id, workers=self.membership.roster.num_workers)

    def leave(
        self, worker_id: str, incarnation: int, *, now: float, failed: bool, message: str, secret: bytes = b""
    ) -> Effects:
        """Ends a membership at the worker's own word, and that of its replica where it failed."""
        state = WorkerState.FAILED if failed else WorkerState.FINISHED
        before = self.membership.get(worker_id)
        gone = self.membership.leave(worker_id, incarnation, now=now, state=state, message=message, secret=secret)
        effects = NONE
        if gone and (before is None or before.state is not state):
            effects = tell("left", "worker left", worker=worker_id, state=state.value, message=message)
        was_alive = before is not None and before.alive
        return effects.and_then(self._without(gone, lost=failed, was_alive=was_alive))

    def expire(self, now: float) -> Effects:
        """Forgets workers that were silent for longer than their lease, with their replicas."""
        expired = self.membership.expire(now)
        effects = NONE
        for member in expired:
            silent = now - member.heard_at
            if silent > self.membership.lease_seconds:
                facts = {"worker": member.worker_id, "silent_seconds": round(silent, 1)}
                effects = effects.and_then(tell("expired", "worker's lease ran out", warning=True, **facts))
        for _, of_name in groupby(expired, key=lambda member: member.name):
            effects = effects.and_then(self._without(list(of_name), lost=True, was_alive=True))
        return effects

    def look(
        self, waited_for: set[str], *, idle: set[str], awaited: Sequence[str], at_gate: Sequence[str], now: float
    ) -> Effects:
        """Goes on without those that hold the others up for stall_seconds, after a look at whom rounds wait for.

        An idle worker that lives does not count until its next push. Expected workers that have not come count from
        their first push, as any other does: rounds wait for those `awaited`, calls for a step for those `at_gate`.
        """
        not_come = at_gate or ([] if waited_for.isdisjoint(awaited) else awaited)
        effects, seconds = NONE, self.stalls.stall_seconds
        if self.stalls.look_at_gate(holds=bool(not_come), now=now):
            what = "expected workers are waited for no longer, as they came too late; each counts from its first push"
            facts = {"waited_for": ", ".join(not_come), "stall_seconds": seconds}
            effects = tell("stalled", what, warning=True, **facts).and_then(self.expect_no_more())
        for worker_id in self.stalls.look(waited_for.difference(awaited) & idle, self.membership, now=now):
            if not self.membership.stall(worker_id):
                # It went meanwhile, or with another process of its replica.
                continue
            what = "worker does not count until its next push: others waited too long for it"
            effects = effects.and_then(tell("stalled", what, worker=worker_id, stall_seconds=seconds, warning=True))
            effects = effects.and_then(Effects(departed=(self.membership.name_of(worker_id),)))
        return effects

    def look_at_restored(self, *, missing: bool, ready_at: float, now: float) -> Effects:
        """Waits no longer for a restored run's workers that have not come: those that live have said so in a lease."""
        return self.expect_no_more() if missing and now - ready_at > self.membership.lease_seconds else NONE

    def expect_no_more(self) -> Effects:
        """Waits for nobody who has not come."""
        self.membership.expect_no_more()
        return Effects(opens_gate=True)

    @property
    def quorum(self) -> int:
        """How many workers are to have come before any begins a step; 0 once they have."""
        return self.membership.expected_workers if self.membership.roster.missing else 0

    def stood_still(self, seconds: float, *, now: float) -> Effects:
        """Prolongs all leases by a time in which the server could hear nobody."""
        self.membership.stood_still(seconds, now=now)
        if not self.membership.num_alive:
            return NONE
        what = "the server stood still; its workers' leases are prolonged by that time"
        return tell("standstill", what, seconds=round(seconds, 1), warning=True)

    def done(self, *, expected_workers: int) -> bool:
        """True when as many workers as expected (at least one) have joined, and none of them is left."""
        joined = len(self.membership.names())
        return joined >= max(1, expected_workers) and self.membership.num_alive == 0

    def finished(self, *, expected_workers: int) -> bool:
        """True when, beyond that, each of them left as one that had finished."""
        done = self.done(expected_workers=expected_workers)
        return done and all(member.state is WorkerState.FINISHED for member in self.membership.all())

    def _without(self, gone: Sequence[Member], *, lost: bool, was_alive: bool) -> Effects:
        """Says what to do without a worker that is gone, the first, and those that its replica takes along with it."""
        effects = Effects(gone=tuple((member.worker_id, lost) for member in gone))
        if lost and was_alive and gone and gone[0].replica:
            first = gone[0]
            failed = first.state is WorkerState.FAILED
            how = failure_in_words(first.message) if failed else "was lost"
            effects = effects.and_then(
                tell(
                    "replica",
                    f"replica {first.replica} is out: its process {first.worker_id} {how}",
                    warning=not (failed and was_interrupted(first.message)),
                    taken_along=", ".join(member.worker_id for member in gone[1:]),
                )
            )
        if gone and not self.membership.lives(gone[0].name):
            effects = effects.and_then(Effects(departed=(gone[0].name,)))
        return effects


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
