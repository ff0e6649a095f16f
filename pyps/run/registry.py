"""A run's workers: they come, give signs of life and go, and each change is an event of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from pyps.core.member import Member, WorkerInfo, WorkerState, failure_in_words, was_interrupted
from pyps.core.membership import Membership
from pyps.core.roster import Roster
from pyps.run.handshake import Greeting
from pyps.run.observers import Events
from pyps_wire.errors import WaitTimedOut


class WorkerRegistry:
    """Membership with events. Every method may be called from any thread."""

    def __init__(self, membership: Membership, events: Events):
        self.membership = membership
        self._events = events
        # Told of each worker that is gone, and whether it was lost rather than left by itself.
        self.on_gone: Callable[[str, bool], None] = lambda worker_id, lost: None

    def join(self, greeting: Greeting, *, now: float) -> bool:
        """Makes the worker that greets a live one; True where that ended an earlier life of its name or replica."""
        before = self.membership.get(greeting.worker_id)
        replica = greeting.replica
        earlier = self.membership.of_replica(replica) if replica else []
        info = WorkerInfo(greeting.host, greeting.process_id, greeting.device, greeting.software)
        member = self.membership.join(
            greeting.worker_id, greeting.incarnation, now=now, info=info, replica=replica, parts=greeting.parts
        )
        renewed = before is not None and before.incarnation != member.incarnation
        if before is None or renewed or not before.alive:
            self._events.add("joined", "worker joined", worker=member.worker_id, host=info.host, pid=info.process_id)
        if renewed:
            self.on_gone(member.worker_id, True)
        ended = [each.worker_id for each in earlier if each.incarnation != member.incarnation]
        if ended:
            what = f"replica {replica} is out: a later life of it has begun"
            self._events.add("replica", what, taken_along=", ".join(ended))
        for worker_id in ended:
            self.on_gone(worker_id, True)
        return bool(ended) if replica else renewed

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
        if self.membership.renew(worker_id, incarnation, now=now, clock=clock, scalars=scalars):
            self._events.add("back", "worker is back", worker=worker_id)

    def require_alive(self, worker_id: str, incarnation: int) -> None:
        """Raises WaitTimedOut for a worker that was heard of once and is gone; it has to give a sign of life anew."""
        member = self.membership.get(worker_id)
        if member is None or member.incarnation != incarnation or not member.alive:
            raise WaitTimedOut(f"worker {worker_id!r} was silent for longer than its lease while it waited: ask again")

    def pushed(self, worker_id: str, incarnation: int, *, now: float, clock: int | None) -> Roster:
        """Notes a push and returns who counts now; raises as `heard`."""
        # Whoever counts already, as nearly always, has nothing to tell.
        before = None if self.membership.roster.counts(worker_id) else self.membership.get(worker_id)
        roster = self.membership.pushed(worker_id, incarnation, now=now, clock=clock)
        if before is not None and not before.counts and roster.counts(worker_id):
            what = "worker counts" if before.alive else "worker is back"
            self._events.add("counts" if before.alive else "back", what, worker=worker_id, workers=roster.num_workers)
        return roster

    def counts_again(self, worker_id: str) -> None:
        """Tells of a worker whose push was taken, and that others had waited too long for."""
        self._events.add("counts", "worker counts", worker=worker_id, workers=self.membership.roster.num_workers)

    def leave(self, worker_id: str, incarnation: int, *, now: float, failed: bool, message: str) -> list[str]:
        """Ends a membership at the worker's own word, and that of its replica where it failed.

        Returns the worker by the name that the run has for it, if that is gone now.
        """
        state = WorkerState.FAILED if failed else WorkerState.FINISHED
        before = self.membership.get(worker_id)
        gone = self.membership.leave(worker_id, incarnation, now=now, state=state, message=message)
        if gone and (before is None or before.state is not state):
            self._events.add("left", "worker left", worker=worker_id, state=state.value, message=message)
        return self._note_gone(gone, lost=failed, was_alive=before is not None and before.alive)

    def expire(self, now: float) -> list[str]:
        """Forgets workers that were silent for longer than their lease, with their replicas.

        Returns those that are gone now, by the names that the run has for them.
        """
        expired = self.membership.expire(now)
        for member in expired:
            silent = now - member.heard_at
            if silent > self.membership.lease_seconds:
                facts = {"worker": member.worker_id, "silent_seconds": round(silent, 1)}
                self._events.add("expired", "worker's lease ran out", warning=True, **facts)
        names: list[str] = []
        for _, of_name in groupby(expired, key=lambda member: member.name):
            names += self._note_gone(list(of_name), lost=True, was_alive=True)
        return names

    def stood_still(self, seconds: float, *, now: float) -> None:
        """Prolongs all leases by a time in which the server could hear nobody."""
        self.membership.stood_still(seconds, now=now)
        if self.membership.num_alive:
            what = "the server stood still; its workers' leases are prolonged by that time"
            self._events.add("standstill", what, seconds=round(seconds, 1), warning=True)

    def done(self, *, expected_workers: int) -> bool:
        """True when as many workers as expected (at least one) have joined, and none of them is left."""
        joined = len(self.membership.names())
        return joined >= max(1, expected_workers) and self.membership.num_alive == 0

    def _note_gone(self, gone: Sequence[Member], *, lost: bool, was_alive: bool) -> list[str]:
        """Tells of a worker that is gone, the first, and of those that its replica takes along with it."""
        for member in gone:
            self.on_gone(member.worker_id, lost)
        if lost and was_alive and gone and gone[0].replica:
            first = gone[0]
            failed = first.state is WorkerState.FAILED
            how = failure_in_words(first.message) if failed else "was lost"
            self._events.add(
                "replica",
                f"replica {first.replica} is out: its process {first.worker_id} {how}",
                warning=not (failed and was_interrupted(first.message)),
                taken_along=", ".join(member.worker_id for member in gone[1:]),
            )
        return [gone[0].name] if gone and not self.membership.lives(gone[0].name) else []
