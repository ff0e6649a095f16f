"""Which workers live: a worker is alive while it is heard of, and forgotten by lease when it falls silent."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from hmac import compare_digest

from pyps.core.member import (
    Lives,
    Member,
    WorkerInfo,
    WorkerState,
    failure_in_words,
    parts_in_words,
    require_name_free,
    require_name_given,
    require_own,
    require_parts_free,
    superseded,
)
from pyps.core.roster import Entry, Expectation, Roster, whole_roster
from pyps_wire.errors import BadRequest, LimitExceeded, UnknownWorker

__all__ = ["GONE_FACTOR", "STALLS_MAX", "Member", "Membership", "WorkerInfo", "WorkerState"]

_ALIVE = WorkerState.ALIVE


class Membership:
    """The workers of a run. Every method may be called from any thread.

    A worker_id belongs to one live process at a time, which alone shows its secret. A later process (a larger
    incarnation) with the same secret takes it over, any other once that is gone; an earlier one gets it back only when
    the later is gone.

    The processes of a replica share one incarnation, the life of the replica, and go together: where one is lost, or
    a later life begins, all that are alive are out at once.
    """

    def __init__(self, *, lease_seconds: float, workers_max: int, expected_workers: int = 0) -> None:
        self.lease_seconds = lease_seconds
        self.workers_max = workers_max
        self._lock = threading.Lock()
        # Guarded by _lock, the members too: they change with every push, and copies of them are given away. The one
        # that joined longest ago comes first.
        self._members: dict[str, Member] = {}
        self._num_alive = 0
        # How many workers the job has, as far as people have said.
        self.expected_workers = expected_workers
        self._expectation = Expectation(expected_workers)
        self._lives = Lives()
        # Whether any worker was ever a process of a replica, or held a part of the model only.
        self.parted = False
        # Made when it is asked for; None since the last change.
        self._roster: Roster | None = None

    @property
    def num_alive(self) -> int:
        """The number of live workers."""
        return self._num_alive

    @property
    def roster(self) -> Roster:
        """The workers that are active in the protocol's rounds; the same object as long as nothing changes."""
        roster = self._roster
        if roster is not None:
            return roster
        with self._lock:
            if self._roster is None:
                self._roster = self._make_roster()
            return self._roster

    def join(
        self,
        worker_id: str,
        incarnation: int,
        *,
        now: float,
        info: WorkerInfo | None = None,
        replica: str = "",
        parts: tuple[int, ...] = (),
        secret: bytes = b"",
    ) -> Member:
        """Makes the worker alive; a process of a later life of its replica ends the earlier one.

        Raises Superseded where a later process holds its name or its replica's, ReplicaLost where the life that it
        belongs to is over, BadRequest where another process has its parts or its name, LimitExceeded at workers_max,
        NameHeld where a process with another secret lives by its name or in its replica, NotAllowed in that one's life.
        """
        with self._lock:
            known = self._members.get(worker_id)
            if known is not None and known.alive and incarnation < known.incarnation:
                raise superseded(known, incarnation)
            others = [m for m in self._alive_of(replica) if m.worker_id != worker_id] if replica else []
            for holder in others if known is None else [known, *others]:
                terms = {"now": now, "lease_seconds": self.lease_seconds}
                require_name_given(holder, worker_id, incarnation, secret, **terms)
            if replica or self.parted:
                require_name_free(worker_id, replica, self._members.values())
            if replica:
                self._lives.require(replica, incarnation)
            require_parts_free(worker_id, parts, (m for m in others if m.incarnation == incarnation))
            earlier = [m for m in others if m.incarnation < incarnation]
            is_full = not (known and known.alive) and self._num_alive - len(earlier) >= self.workers_max
            if is_full and not self._forget_unheard(now):
                raise LimitExceeded(
                    f"worker {worker_id!r} cannot join: {self._num_alive} workers are alive and the limit is"
                    f" {self.workers_max}; raise --max-workers on the server"
                )
            info = info or WorkerInfo()
            if known is not None and known.incarnation == incarnation:
                member = known.greets_again(now=now, info=info, replica=replica, parts=parts)
            else:
                member = Member(
                    *(worker_id, incarnation, _ALIVE, info, now, now), replica=replica, parts=parts, secret=secret
                )
            if known is not None and known.incarnation != incarnation:
                del self._members[worker_id]
            self._members[worker_id] = member
            self._moved(member, before=_GONE if known is None else _standing(known))
            if replica or parts:
                self._begin_parted(member)
            for other in earlier:
                self._out(other, WorkerState.EXPIRED)
            self._forget_gone()
            return replace(member)

    def renew(
        self,
        worker_id: str,
        incarnation: int,
        *,
        now: float,
        clock: int | None = None,
        scalars: Mapping[str, float] | None = None,
        secret: bytes = b"",
    ) -> bool:
        """Notes a heartbeat; True where the worker's lease had run out, and it is alive again.

        Raises UnknownWorker when it has to say Hello (first), Superseded when a later process holds its name,
        ReplicaLost when another process of its replica is lost, NotAllowed for another secret than the worker's.
        """
        with self._lock:
            member = self._require(worker_id, incarnation, secret)
            was_gone = not member.alive
            self._heard(member, now=now, clock=clock, pushed_at=member.pushed_at, counts=member.counts)
            if scalars is not None:
                member.scalars = dict(scalars)
            return was_gone

    def pushed_again(
        self, worker_id: str, incarnation: int, *, now: float, clock: int, secret: bytes = b""
    ) -> Roster | None:
        """Notes a push of a worker that counts already and returns the workers that count; None of any other.

        That is nearly every push: nothing changes by it but when the worker was heard of. A clock of 0 says nothing.
        """
        with self._lock:
            member = self._members.get(worker_id)
            # Who counts is alive.
            if member is None or not member.counts or member.incarnation != incarnation or member.pushed_at is None:
                return None
            if not compare_digest(member.secret, secret):
                return None
            member.heard_at = member.pushed_at = max(now, member.heard_at)
            if clock:
                member.clock = clock
            return self._roster

    def pushed(
        self, worker_id: str, incarnation: int, *, now: float, clock: int | None = None, secret: bytes = b""
    ) -> Roster:
        """Notes a push, which makes the worker count, and returns the workers that count now; raises as `renew`."""
        with self._lock:
            member = self._require(worker_id, incarnation, secret)
            self._heard(member, now=now, clock=clock, pushed_at=now, counts=member.counts or member.stalls < STALLS_MAX)
            if self._roster is None:
                self._roster = self._make_roster()
            return self._roster

    def taken(self, worker_id: str, incarnation: int, *, now: float) -> bool:
        """Notes that a push of the worker was taken; True where that makes it count again."""
        with self._lock:
            member = self._members.get(worker_id)
            if member is None or member.incarnation != incarnation or member.state is not _ALIVE:
                return False
            member.taken_at, member.stalls = now, 0
            if member.counts:
                return False
            before, member.counts = _standing(member), True
            self._moved(member, before=before)
            return True

    def stall(self, worker_id: str) -> bool:
        """Stops counting a worker, or all processes of its replica, which stay members; False where it did not count.

        It counts again from its next push, and after STALLS_MAX times in a row from the next that is taken: one
        whose pushes are all refused would hold the others up for ever.
        """
        with self._lock:
            member = self._members.get(worker_id)
            if member is None or not member.counts:
                return False
            for each in self._alive_of(member.replica) if member.replica else [member]:
                if each.counts:
                    before, each.counts = _standing(each), False
                    each.stalls += 1
                    self._moved(each, before=before)
            return True

    def expect(self, num_workers: int) -> None:
        """Waits for so many workers, those that pushed or went already included; 0 when unknown."""
        with self._lock:
            self.expected_workers = num_workers
            self._expectation, self._roster = Expectation(num_workers), None

    def await_workers(self, num_workers: int) -> None:
        """Waits for so many workers, whatever people have said."""
        with self._lock:
            self._expectation, self._roster = Expectation(num_workers), None

    def expect_no_more(self) -> None:
        """Waits for no expected worker any longer."""
        with self._lock:
            self._expectation, self._roster = Expectation(0), None

    def leave(
        self,
        worker_id: str,
        incarnation: int,
        *,
        now: float,
        state: WorkerState,
        message: str = "",
        secret: bytes = b"",
    ) -> list[Member]:
        """Ends the worker's membership as FINISHED or FAILED; [] where that process is no member.

        Returns it, and after it those that a process which failed takes along: the others of its replica.
        """
        assert state in _ENDED, state
        with self._lock:
            member = self._members.get(worker_id)
            if member is None or member.incarnation != incarnation:
                return []
            require_own(member, incarnation, secret)
            member.heard_at, member.message = now, message
            self._out(member, state)
            gone = [member]
            if state is WorkerState.FAILED:
                gone += self._lose_replica(member, failure_in_words(message))
            return [replace(each) for each in gone]

    def expire(self, now: float) -> list[Member]:
        """Marks the workers that were silent for longer than the lease, with all processes of their replicas.

        Those that said no more than one Hello it forgets. Returns them all; after each process of a replica those that
        it takes along.
        """
        with self._lock:
            gone: list[Member] = []
            for member in list(self._members.values()):
                if member.alive and now - member.heard_at > self.lease_seconds:
                    self._out(member, WorkerState.EXPIRED)
                    gone += [member, *self._lose_replica(member, "was silent for longer than its lease")]
            for member in gone:
                if not member.was_heard and not member.replica:
                    # It never came, for all that anybody knows.
                    del self._members[member.worker_id]
            return [replace(member) for member in gone]

    def stood_still(self, seconds: float, *, now: float) -> None:
        """Adds that time to all leases: the caller could hear nobody."""
        with self._lock:
            for member in self._members.values():
                if member.alive:
                    member.heard_at = max(member.heard_at, min(now, member.heard_at + seconds))

    def is_over(self, name: str, incarnation: int) -> bool:
        """Whether that life of a worker or replica is known to have ended, otherwise than by its silence alone."""
        with self._lock:
            if self._lives.is_over(name, incarnation):
                return True
            member = self._members.get(name)
            return member is not None and member.incarnation == incarnation and member.state in _ENDED

    def get(self, worker_id: str) -> Member | None:
        """Returns the worker, alive or gone."""
        with self._lock:
            member = self._members.get(worker_id)
            return None if member is None else replace(member)

    def alive(self) -> list[Member]:
        """Returns the live workers, in the order in which they joined."""
        return [member for member in self.all() if member.alive]

    def all(self) -> list[Member]:
        """Returns all workers known, gone ones too."""
        with self._lock:
            return [replace(member) for member in self._members.values()]

    def of_replica(self, replica: str) -> list[Member]:
        """Returns the live processes of a replica."""
        with self._lock:
            return [replace(member) for member in self._alive_of(replica)]

    def name_of(self, worker_id: str) -> str:
        """Whom the run takes a worker for: its replica, or itself."""
        member = self._members.get(worker_id) if self.parted else None
        return worker_id if member is None else member.name

    def lives(self, name: str) -> bool:
        """Whether any process of the worker of that name is alive."""
        return name in self.names(alive=True)

    def names(self, *, alive: bool = False) -> list[str]:
        """The workers known, or alive, each replica once; in the order in which they joined."""
        with self._lock:
            return list(dict.fromkeys(m.name for m in self._members.values() if m.alive or not alive))

    def arrived(self) -> list[str]:
        """The workers, each replica once, that need not come any more: they have pushed, or are gone."""
        with self._lock:
            return list(dict.fromkeys(entry.name for entry in self._entries() if entry.arrived))

    def require_own(self, worker_id: str, incarnation: int, secret: bytes, *, replica: str = "") -> None:
        """Refuses (NotAllowed) who names a worker, or the replica of one, that is known here, without its secret.

        Refuses (Superseded) a worker's earlier life beside a later one that is alive. Whom the run does not know yet,
        or not any more, other calls refuse.
        """
        with self._lock:
            known = self._members.get(worker_id)
            for each in [*([known] if known is not None else []), *(self._alive_of(replica) if replica else [])]:
                if each.alive or each.incarnation == incarnation:
                    require_own(each, incarnation, secret)
            if known is not None and known.alive and incarnation < known.incarnation:
                raise superseded(known, incarnation)

    def require_replica(self, replica: str, incarnation: int) -> None:
        """Raises ReplicaLost where a process of that life of the replica is lost."""
        with self._lock:
            self._lives.require(replica, incarnation)

    def require_part(self, worker_id: str, shard_id: int, part: int) -> None:
        """Refuses a worker that did not declare the part of the model that a shard belongs to."""
        with self._lock:
            member = self._members.get(worker_id)
            if member is not None and not member.holds(part):
                raise BadRequest(
                    f"shard {shard_id} belongs to part {part} of the model, and worker {worker_id!r} declared"
                    f" {parts_in_words(member.parts)} in Hello: push and pull the shards of what it declares alone"
                )

    # What follows is called under the lock.

    def _alive_of(self, replica: str) -> list[Member]:
        return [member for member in self._members.values() if member.replica == replica and member.alive]

    def _begin_parted(self, member: Member) -> None:
        if not self.parted and not self._make_roster().missing:
            # Whom the others waited for so far has come: nobody waits for parts of it.
            self._expectation = Expectation(0)
        self.parted, self._roster = True, None
        if member.replica:
            self._lives.begin(member.replica, member.incarnation)

    def _lose_replica(self, member: Member, how: str) -> list[Member]:
        """Ends the life of a replica that has lost a process; returns those that were alive."""
        if not member.replica:
            return []
        self._lives.lose(member.replica, member.incarnation, f"its process {member.worker_id!r} {how}")
        others = [each for each in self._alive_of(member.replica) if each.incarnation == member.incarnation]
        for each in others:
            self._out(each, WorkerState.EXPIRED)
        return others

    def _out(self, member: Member, state: WorkerState) -> None:
        before, member.state, member.counts = _standing(member), state, False
        self._moved(member, before=before)

    def _require(self, worker_id: str, incarnation: int, secret: bytes) -> Member:
        known = self._members.get(worker_id)
        if known is not None and incarnation < known.incarnation and known.alive:
            raise superseded(known, incarnation)
        if known is not None and known.incarnation == incarnation:
            require_own(known, incarnation, secret)
        if known is None or known.incarnation != incarnation or known.state in _ENDED or _is_out(known):
            if known is not None and known.replica and known.incarnation == incarnation:
                self._lives.require(known.replica, incarnation)
            raise UnknownWorker(
                f"worker {worker_id!r} of incarnation {incarnation} is not a member of this run;"
                " say Hello, then send the same again"
            )
        return known

    def _make_roster(self) -> Roster:
        if self.parted:
            return whole_roster(self._entries(), self._expectation)
        members = self._members.values()
        missing = self._expectation.missing(sum(m.pushed_at is not None or not m.alive for m in members))
        coming = [m.worker_id for m in members if missing and m.alive and m.pushed_at is None]
        return Roster(tuple(sorted(m.worker_id for m in members if m.counts)), missing, tuple(sorted(coming)))

    def _entries(self) -> list[Entry]:
        """The workers as a roster is made from them; those of a replica's earlier lives are none of them."""
        return [
            Entry(m.worker_id, m.name, m.parts, m.counts, m.pushed_at is not None or not m.alive)
            for m in self._members.values()
            if not m.replica or self._lives.is_latest(m.replica, m.incarnation)
        ]

    def _heard(self, member: Member, *, now: float, clock: int | None, pushed_at: float | None, counts: bool) -> None:
        """Notes a heartbeat, which most of the time changes nothing of the roster."""
        before = _standing(member)
        member.state, member.was_heard = _ALIVE, True
        member.heard_at = max(now, member.heard_at)
        member.pushed_at = pushed_at
        member.counts = counts
        if clock is not None:
            member.clock = clock
        self._moved(member, before=before)

    def _moved(self, member: Member, *, before: Standing) -> None:
        """Forgets the roster where a worker stands otherwise than before."""
        now = _standing(member)
        if now != before:
            self._roster = None
            self._num_alive += now[0] - before[0]

    def _forget_unheard(self, now: float) -> bool:
        """Lets go of a worker that has said no more than one Hello, and that a while ago; False where there is none."""
        for member in self._members.values():
            silent = now - member.heard_at > UNHEARD_SHARE * self.lease_seconds
            if silent and member.alive and not member.was_heard and not member.replica:
                self._out(member, WorkerState.EXPIRED)
                del self._members[member.worker_id]
                return True
        return False

    def _forget_gone(self) -> None:
        """Lets go of the longest gone, so that workers that come and go do not fill the memory."""
        excess = len(self._members) - GONE_FACTOR * self.workers_max
        if excess > 0:
            gone = sorted((m for m in self._members.values() if not m.alive), key=lambda m: m.heard_at)
            for member in gone[:excess]:
                del self._members[member.worker_id]
            self._lives.keep({member.replica for member in self._members.values()})


# Workers known, gone ones included, are at most this many times workers_max.
GONE_FACTOR = 4

# Where all places are taken, a name that said no more than one Hello keeps its place for that part of a lease.
UNHEARD_SHARE = 1 / 3

# A slow worker's first push after it was left out comes too late as a rule, and its next needs the others to wait.
STALLS_MAX = 2

_ENDED = (WorkerState.FINISHED, WorkerState.FAILED)


# What a roster is made from: whether a worker is alive, counts, and has yet to push.
Standing = tuple[bool, bool, bool]
_GONE: Standing = (False, False, False)


def _standing(member: Member) -> Standing:
    return member.state is _ALIVE, member.counts, member.pushed_at is None


def _is_out(member: Member) -> bool:
    """Whether it went with its replica, for which no process comes back by itself."""
    return bool(member.replica) and not member.alive
