"""The workers of a run: which have joined, are alive, are active in rounds, or delay others."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hmac import compare_digest
from itertools import groupby

from pyps.core.effects import NONE, Effects, notify
from pyps.core.replicas import Lives, failure_in_words, parts_in_words, was_interrupted
from pyps.core.roster import Entry, Expectation, Roster, roster_of_part, whole_roster
from pyps_wire.errors import (
    InvalidArgument,
    LimitExceeded,
    NameHeld,
    NotAllowed,
    Superseded,
    UnknownWorker,
    WaitTimedOut,
)

# Workers known, gone ones included, are at most this many times workers_max.
GONE_FACTOR = 4
# At workers_max workers, one that has called only Hello keeps its place for this part of a lease.
UNHEARD_SHARE = 1 / 3
# A slow worker's first push after a stall usually comes too late, so others have to wait for its second.
STALLS_MAX = 2
# Part of the stall time after which others may wait for a worker that has not pushed.
IDLE_SHARE = 0.1


class WorkerState(StrEnum):
    """A worker's state: alive, or how it ended."""

    ALIVE = "alive"
    EXPIRED = "expired"
    FINISHED = "finished"
    FAILED = "failed"


_ALIVE = WorkerState.ALIVE
# Of a replica whose processes differ, the first of them counts.
_OF_REPLICA = (_ALIVE, WorkerState.FAILED, WorkerState.EXPIRED, WorkerState.FINISHED)
_ENDED = (WorkerState.FINISHED, WorkerState.FAILED)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's description of its process, for people."""

    host: str = ""
    process_id: int = 0
    device: str = ""
    software: str = ""
    # The names of the codecs of its gradients and parameters.
    gradient_codec: str = ""
    parameter_codec: str = ""
    # Its place among the run's workers.
    index: int | None = None


@dataclass(slots=True)
class Member:
    """One worker, or one process of a replica. Times are in seconds of the caller's clock."""

    worker_id: str
    incarnation: int
    state: WorkerState
    info: WorkerInfo
    joined_at: float
    heard_at: float
    # Whether it has called again after its first Hello. If not, it is forgotten once it is gone.
    was_heard: bool = False
    # When it last pushed in this life; None before its first push.
    pushed_at: float | None = None
    # When its push was last applied, parked, or dropped by the protocol.
    taken_at: float | None = None
    # How often others have stopped waiting for it since then.
    stalls: int = 0
    # Whether it is active in the protocol's rounds: from its first push until it is gone or stalls.
    active: bool = False
    # The worker's own count of steps.
    clock: int = 0
    # The worker's own figures, by name.
    scalars: Mapping[str, float] = field(default_factory=dict)
    # How it ended, in its own words.
    message: str = ""
    # Its replica; empty for a worker of one process.
    replica: str = ""
    # The parts of the model that it holds, ascending; () for all of them.
    parts: tuple[int, ...] = ()
    # Every call of it must show this.
    secret: bytes = field(default=b"", repr=False)

    @property
    def alive(self) -> bool:
        return self.state is _ALIVE

    @property
    def name(self) -> str:
        """The worker's name in the run: its replica's, or its own."""
        return self.replica or self.worker_id

    def holds(self, part: int) -> bool:
        return not self.parts or part in self.parts


class Membership:
    """The workers of a run. Every method may be called from any thread.

    A worker_id belongs to one live process at a time, which shows its secret with each call. A later process (a larger
    incarnation) with the same secret takes the name over at once; any other must wait until the live one is gone.

    The processes of a replica share one incarnation, the life of the replica. It ends for all of them when one of them
    is lost or a later life begins.
    """

    def __init__(
        self,
        *,
        lease_seconds: float,
        workers_max: int,
        expected_workers: int = 0,
        stall_seconds: float = float("inf"),
    ) -> None:
        self.lease_seconds = lease_seconds
        self.workers_max = workers_max
        self.stall_seconds = stall_seconds
        self._lock = threading.Lock()
        # Guarded by _lock, the members too: callers get copies. In order of joining.
        self._members: dict[str, Member] = {}
        self.num_alive = 0
        # The lives that have ended, over all workers.
        self.num_ended = 0
        # By name, how the workers stood at the server whose place this one took; those that join again are members.
        self._former: dict[str, WorkerState] = {}
        # When those of them that lived, and have not joined again, are gone.
        self._former_until = 0.0
        # How many workers the job has; 0 for not known.
        self.expected_workers = expected_workers
        self._expectation = Expectation(expected_workers)
        self._lives = Lives()
        # Whether a worker was ever a process of a replica, or held only a part of the model.
        self.parted = False
        # None after each change, until it is needed.
        self._roster: Roster | None = None
        # Since when others wait for a worker: ('round', worker, 0), ('again', worker, 0), ('step', worker, its step),
        # or ('expected', '', 0) for the workers that have not come.
        self._since: dict[tuple[str, str, int], float] = {}

    @property
    def roster(self) -> Roster:
        """The workers that are active in the protocol's rounds; the same object as long as nothing changes."""
        roster = self._roster
        if roster is not None:
            return roster
        with self._lock:
            return self._present_roster()

    @property
    def quorum(self) -> int:
        """How many workers must have pushed before any begins a step; 0 once they have."""
        return self.expected_workers if self.roster.missing else 0

    # Joining, calls, leaving.

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
    ) -> Effects:
        """Make the worker alive. The first process of a replica's later life ends the earlier one.

        Raises:
            Superseded: A later process holds the name of the worker or its replica.
            ReplicaLost: The life of its replica is over.
            InvalidArgument: Another process has its parts or its name.
            LimitExceeded: There are workers_max already.
            NameHeld: A live process with another secret holds its name, or is of its replica.
            NotAllowed: The same, where that process is of this life.
        """
        info = info or WorkerInfo()
        member = Member(worker_id, incarnation, _ALIVE, info, now, now, replica=replica, parts=parts, secret=secret)
        with self._lock:
            known = self._members.get(worker_id)
            processes = self._alive_of(replica)
            self._require_may_join(member, known, [m for m in processes if m is not known], now=now)
            ended = [m for m in processes if m.incarnation < incarnation]
            earlier = [m for m in ended if m is not known]
            is_full = not (known and known.alive) and self.num_alive - len(earlier) >= self.workers_max
            if is_full and not self._forget_unheard(now):
                raise LimitExceeded(
                    f"worker {worker_id!r} cannot join: {self.num_alive} workers are alive and the limit is"
                    f" {self.workers_max}; raise --max-workers on the server"
                )
            before = _GONE if known is None else _roster_key(known)
            is_later = known is not None and known.incarnation != incarnation
            if known is not None and not is_later:
                # It says Hello again, and keeps its figures.
                member = replace(known, state=_ALIVE, info=info, heard_at=now, was_heard=True, message="")
                member.replica, member.parts = replica, parts
            else:
                self._members.pop(worker_id, None)
                self.num_ended += before[0]
            self._members[worker_id] = member
            self._moved(member, before=before)
            if replica or parts:
                self._begin_parted(member)
            for other in earlier:
                self._out(other, WorkerState.EXPIRED)
            self._forget_gone()
        effects = NONE
        ended_ids = [m.worker_id for m in ended]
        if is_later or not before[0]:
            effects = notify("joined", "worker joined", worker=worker_id, host=info.host, pid=info.process_id)
        if ended:
            what = f"replica {replica} is out: a later life of it has begun"
            effects = effects.and_then(notify("replica", what, taken_along=", ".join(ended_ids)))
        gone = dict.fromkeys([worker_id, *ended_ids] if is_later else ended_ids)
        departed = (member.name,) if (ended if replica else is_later) else ()
        return effects.and_then(Effects(gone=tuple((each, True) for each in gone), departed=departed))

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
        """Note a heartbeat. A worker whose lease had run out is alive again.

        Raises:
            UnknownWorker: It has to say Hello first.
            Superseded: A later process holds its name.
            ReplicaLost: Another process of its replica is lost.
            NotAllowed: The secret is not the worker's.
        """
        with self._lock:
            member = self._require(worker_id, incarnation, secret)
            was_alive = member.alive
            self._heard(member, now=now, clock=clock, pushed_at=member.pushed_at, active=member.active)
            if scalars is not None:
                member.scalars = dict(scalars)
        return NONE if was_alive else notify("back", "worker is back", worker=worker_id)

    def pushed_again(
        self, worker_id: str, incarnation: int, *, now: float, clock: int, secret: bytes = b""
    ) -> Roster | None:
        """Note a push of an active worker and return the roster; None for any other, which needs `pushed`.

        Most pushes pass here, and change no more than times and the clock. A clock of 0 is ignored.
        """
        with self._lock:
            member = self._members.get(worker_id)
            # An active worker is alive.
            if member is None or not member.active or member.incarnation != incarnation or member.pushed_at is None:
                return None
            if not compare_digest(member.secret, secret):
                return None
            member.heard_at = member.pushed_at = max(now, member.heard_at)
            if clock:
                member.clock = clock
            return self._roster

    def pushed(
        self, worker_id: str, incarnation: int, *, now: float, clock: int | None = None, secret: bytes = b""
    ) -> tuple[Roster, Effects]:
        """Note a push and return the roster, with the worker unless it has stalled too often; raise as `heard`."""
        with self._lock:
            member = self._require(worker_id, incarnation, secret)
            was_alive, was_active = member.alive, member.active
            active = was_active or member.stalls < STALLS_MAX
            self._heard(member, now=now, clock=clock, pushed_at=now, active=active)
            roster = self._present_roster()
        if was_active or not active:
            return roster, NONE
        kind, what = ("counts", "worker is active") if was_alive else ("back", "worker is back")
        return roster, notify(kind, what, worker=worker_id, workers=roster.num_workers)

    def taken(self, worker_id: str, incarnation: int, *, now: float) -> Effects:
        """Note that a push was applied, parked or dropped, which makes a stalled worker active again."""
        with self._lock:
            member = self._members.get(worker_id)
            if member is None or member.incarnation != incarnation or member.state is not _ALIVE:
                return NONE
            member.taken_at, member.stalls = now, 0
            if member.active:
                return NONE
            before, member.active = _roster_key(member), True
            self._moved(member, before=before)
        return notify("counts", "worker is active", worker=worker_id, workers=self.roster.num_workers)

    def leave(
        self, worker_id: str, incarnation: int, *, now: float, failed: bool, message: str = "", secret: bytes = b""
    ) -> Effects:
        """End the membership of a worker that leaves, and of its whole replica if it failed."""
        state = WorkerState.FAILED if failed else WorkerState.FINISHED
        with self._lock:
            member = self._members.get(worker_id)
            if member is None or member.incarnation != incarnation:
                return NONE
            require_own(member, incarnation, secret)
            was_alive, before = member.alive, member.state
            member.heard_at, member.message = now, message
            self._out(member, state)
            gone = [member, *(self._lose_replica(member, failure_in_words(message)) if failed else [])]
            effects = self._without(gone, lost=failed, was_alive=was_alive)
        if before is state:
            return effects
        return notify("left", "worker left", worker=worker_id, state=state.value, message=message).and_then(effects)

    def expire(self, now: float) -> Effects:
        """End the membership of workers that were silent for longer than the lease, and of their replicas.

        Workers that called no more than Hello are forgotten.
        """
        effects = NONE
        with self._lock:
            if now > self._former_until and _ALIVE in self._former.values():
                former = self._former.items()
                self._former = {n: WorkerState.EXPIRED if state is _ALIVE else state for n, state in former}
                self._roster = None
            gone: list[Member] = []
            for member in list(self._members.values()):
                silent = now - member.heard_at
                if member.alive and silent > self.lease_seconds:
                    self._out(member, WorkerState.EXPIRED)
                    gone += [member, *self._lose_replica(member, "was silent for longer than its lease")]
            for member in gone:
                silent = now - member.heard_at
                if silent > self.lease_seconds:
                    facts = {"worker": member.worker_id, "silent_seconds": round(silent, 1)}
                    effects = effects.and_then(notify("expired", "worker's lease ran out", warning=True, **facts))
                if not member.was_heard and not member.replica:
                    # Its answer to Hello may have been lost.
                    del self._members[member.worker_id]
            for _, of_name in groupby(gone, key=lambda member: member.name):
                effects = effects.and_then(self._without(list(of_name), lost=True, was_alive=True))
        return effects

    def stood_still(self, seconds: float, *, now: float) -> Effects:
        """Prolong all leases by the time in which the server was suspended and received nothing."""
        with self._lock:
            self._former_until += seconds
            for member in self._members.values():
                if member.alive:
                    member.heard_at = max(member.heard_at, min(now, member.heard_at + seconds))
        if not self.num_alive:
            return NONE
        what = "the server stood still; its workers' leases are prolonged by that time"
        return notify("standstill", what, seconds=round(seconds, 1), warning=True)

    # Stalls, and how many workers are expected.

    def idle(self, now: float) -> set[str]:
        """Return the live workers whose last push is so old that others may be waiting for the next."""
        latest = now - IDLE_SHARE * self.stall_seconds
        with self._lock:
            last = [
                (m.worker_id, m.joined_at if m.taken_at is None else m.taken_at)
                for m in self._members.values()
                if m.alive
            ]
        return {worker_id for worker_id, time in last if time <= latest}

    def end_stalls(
        self,
        *,
        now: float,
        idle: set[str],
        in_rounds: set[str],
        made_again: Collection[str] = (),
        awaited: Sequence[str] = (),
        at_gate: Sequence[str] = (),
        at_steps: Mapping[str, int] | None = None,
    ) -> Effects:
        """Stop waiting for workers that others have waited for during stall_seconds. Called at each tick.

        The time starts at the tick that first saw others wait for the worker, or at its last push that was taken, if
        that was later.

        Args:
            now: The time.
            idle: The result of `idle`: only these stall in rounds.
            in_rounds: The workers whose gradients rounds wait for. One that stalls is not active until it pushes.
            made_again: Those of them for which a gradient waits that was sent again: its worker may be rounds behind
                on this server, and so may wait for one that waits for it on another. These stall after lease_seconds.
            awaited: The expected workers that have not come, in words; each is active from its first push.
            at_gate: The same, if calls for a first step wait for them.
            at_steps: The workers whose steps others wait for, each with a number that its next step changes.
        """
        not_come = at_gate or ([] if in_rounds.isdisjoint(awaited) else awaited)
        holders: list[tuple[str, str, int]] = [("expected", "", 0)] if not_come else []
        holders += [("round", worker_id, 0) for worker_id in sorted(in_rounds.difference(awaited) & idle)]
        holders += [("again", worker_id, 0) for worker_id in sorted(set(made_again).difference(awaited))]
        holders += [("step", *step) for step in sorted((at_steps or {}).items())]
        with self._lock:
            self._since = {holder: max(self._since.get(holder, now), self._taken_at(*holder[:2])) for holder in holders}
            seconds_of = dict.fromkeys(_STALLED, self.stall_seconds) | {"again": self.lease_seconds}
            overdue = [holder for holder, began in self._since.items() if now - began >= seconds_of[holder[0]]]
        effects = NONE
        for kind, worker_id, _ in overdue:
            in_round = kind in ("round", "again")
            if worker_id in effects.departed or (in_round and not self.stall(worker_id)):
                # It left meanwhile, or with another process of its replica.
                continue
            facts = {"worker": worker_id} if worker_id else {"waited_for": ", ".join(not_come)}
            notice = notify("stalled", _STALLED[kind], **facts, stall_seconds=seconds_of[kind], warning=True)
            if kind == "expected":
                follows = self.expect_no_more()
            elif in_round:
                follows = Effects(departed=(self.name_of(worker_id),))
            else:
                follows = Effects(set_aside=(worker_id,))
            effects = effects.and_then(notice).and_then(follows)
        return effects

    def stall(self, worker_id: str) -> bool:
        """Make a worker and its whole replica inactive until the next push; return False if it was not active.

        After STALLS_MAX stalls in a row that push must not be refused, or others could wait for the worker for ever.
        """
        with self._lock:
            member = self._members.get(worker_id)
            if member is None or not member.active:
                return False
            for each in self._alive_of(member.replica) if member.replica else [member]:
                if each.active:
                    before, each.active = _roster_key(each), False
                    each.stalls += 1
                    self._moved(each, before=before)
            return True

    def expect(self, num_workers: int, *, said: bool = True) -> None:
        """Wait for so many workers, with those that pushed or left already; `said` is True if people set the number."""
        with self._lock:
            if said:
                self.expected_workers = num_workers
            self._expectation, self._roster = Expectation(num_workers), None

    def expect_no_more(self) -> Effects:
        """Stop waiting for workers that have not come."""
        self.expect(0, said=False)
        return Effects(opens_gate=True)

    # Queries and checks.

    def is_over(self, name: str, incarnation: int) -> bool:
        """Return whether that life of a worker or replica has ended by leaving, failing or a later life."""
        with self._lock:
            if self._lives.is_over(name, incarnation):
                return True
            member = self._members.get(name)
            return member is not None and member.incarnation == incarnation and member.state in _ENDED

    def get(self, worker_id: str) -> Member | None:
        """Return the worker, alive or gone."""
        with self._lock:
            member = self._members.get(worker_id)
            return None if member is None else replace(member)

    def alive(self) -> list[Member]:
        """Return the live workers, in the order in which they joined."""
        return [member for member in self.all() if member.alive]

    def all(self) -> list[Member]:
        """Return all known workers, including those that are gone."""
        with self._lock:
            return [replace(member) for member in self._members.values()]

    def name_of(self, worker_id: str) -> str:
        """Return the worker's name in the run: its replica's, or its own."""
        member = self._members.get(worker_id) if self.parted else None
        return worker_id if member is None else member.name

    def names(self, *, alive: bool = False) -> list[str]:
        """Return the names of the known, or live, workers in the order of joining, each replica once."""
        with self._lock:
            return list(dict.fromkeys(m.name for m in self._members.values() if m.alive or not alive))

    def arrived(self) -> list[str]:
        """Return the names of the workers that have pushed or are gone, each replica once."""
        with self._lock:
            return list(dict.fromkeys(entry.name for entry in self._entries() if entry.arrived))

    def states(self) -> dict[str, WorkerState]:
        """Return by name how the workers stand, each replica once, also those that have not joined since a takeover."""
        with self._lock:
            of_name: dict[str, list[WorkerState]] = {}
            for member in self._members.values():
                of_name.setdefault(member.name, []).append(member.state)
            return self._former | {name: min(states, key=_OF_REPLICA.index) for name, states in of_name.items()}

    def restore(self, states: Mapping[str, str], *, expected_workers: int, now: float) -> None:
        """Count the workers of the server whose place is taken, by name with their states, as it did."""
        with self._lock:
            self._former = {name: WorkerState(state) for name, state in states.items()}
            self._former_until = now + self.lease_seconds
        self.expect(expected_workers)

    def done(self, *, expected_workers: int) -> bool:
        """Return whether at least one worker, and as many as expected, have joined, and all are gone."""
        states = self.states()
        return len(states) >= max(1, expected_workers) and _ALIVE not in states.values()

    def finished(self, *, expected_workers: int) -> bool:
        """Return whether the run is `done` and each worker finished rather than failed."""
        done = self.done(expected_workers=expected_workers)
        return done and set(self.states().values()) == {WorkerState.FINISHED}

    def require_own(self, worker_id: str, incarnation: int, secret: bytes, *, replica: str = "") -> None:
        """Raise NotAllowed for a call that names a known worker or replica without its secret.

        Raises Superseded for a worker's earlier life while a later one is alive. An unknown worker passes.
        """
        with self._lock:
            known = self._members.get(worker_id)
            for each in [*([] if known is None else [known]), *self._alive_of(replica)]:
                if each.alive or each.incarnation == incarnation:
                    require_own(each, incarnation, secret)
            _require_latest(known, incarnation)

    def require_alive(self, worker_id: str, incarnation: int) -> None:
        """Raise WaitTimedOut for a worker whose lease has run out."""
        member = self._members.get(worker_id)
        if member is None or member.incarnation != incarnation or not member.alive:
            raise WaitTimedOut(f"worker {worker_id!r} was silent for longer than its lease while it waited: ask again")

    def require_replica(self, replica: str, incarnation: int) -> None:
        """Raise ReplicaLost where a process of that life of the replica is lost."""
        with self._lock:
            self._lives.require(replica, incarnation)

    def require_part(self, worker_id: str, shard_id: int, part: int) -> None:
        """Raise InvalidArgument for a worker that did not declare the part of the model that a shard belongs to."""
        with self._lock:
            member = self._members.get(worker_id)
            if member is not None and not member.holds(part):
                raise InvalidArgument(
                    f"shard {shard_id} belongs to part {part} of the model, and worker {worker_id!r} declared"
                    f" {parts_in_words(member.parts)} in Hello: push and pull the shards of what it declares alone"
                )

    # What follows is called under the lock.

    def _alive_of(self, replica: str) -> list[Member]:
        """Return the live processes of a replica; none for a worker of one process, whose replica is empty."""
        return [m for m in self._members.values() if m.replica == replica and m.alive] if replica else []

    def _taken_at(self, kind: str, worker_id: str) -> float:
        # Pushes do not prolong the time of a step: only the next step ends it.
        member = self._members.get(worker_id) if kind != "step" else None
        return 0.0 if member is None or member.taken_at is None else member.taken_at

    def _require_may_join(self, new: Member, known: Member | None, others: Sequence[Member], *, now: float) -> None:
        """Check a Hello's name, secret, life and parts; `others` are the other live processes of its replica."""
        worker_id, incarnation, replica, parts = new.worker_id, new.incarnation, new.replica, new.parts
        _require_latest(known, incarnation)
        for holder in others if known is None else [known, *others]:
            if holder.incarnation == incarnation:
                require_own(holder, incarnation, new.secret)
            elif holder.alive and not compare_digest(holder.secret, new.secret):
                info = holder.info
                raise NameHeld(
                    f"worker {worker_id!r} cannot join yet: {holder.worker_id!r} is a live process (pid"
                    f" {info.process_id} on {info.host or 'an unnamed host'}), heard of {now - holder.heard_at:.1f} s"
                    f" ago. The name is free once that leaves or is silent for {self.lease_seconds:g} s, and at once"
                    " for who shows the same PYPS_WORKER_KEY; else give this worker another name (worker_id,"
                    " PYPS_WORKER_ID)"
                )
        if replica or self.parted:
            _require_name_free(worker_id, replica, self._members.values())
        if replica:
            self._lives.require(replica, incarnation)
        for other in others:
            if other.incarnation == incarnation and (not parts or any(other.holds(part) for part in parts)):
                raise InvalidArgument(
                    f"worker {worker_id!r} declares {parts_in_words(parts)} of the model, and {other.worker_id!r} of"
                    f" the same replica {parts_in_words(other.parts)}: give each part to one process of a replica"
                )

    def _require(self, worker_id: str, incarnation: int, secret: bytes) -> Member:
        """Return the member that a call is from; raise as `heard`."""
        known = self._members.get(worker_id)
        _require_latest(known, incarnation)
        if known is not None and known.incarnation == incarnation:
            require_own(known, incarnation, secret)
            # A process of a replica that is out cannot come back.
            if known.state not in _ENDED and (known.alive or not known.replica):
                return known
            if known.replica:
                self._lives.require(known.replica, incarnation)
        raise UnknownWorker(
            f"worker {worker_id!r} of incarnation {incarnation} is not a member of this run;"
            " say Hello, then send the same again"
        )

    def _begin_parted(self, member: Member) -> None:
        if not self.parted and not self._present_roster().missing:
            # All expected workers have come: do not wait for parts of them now.
            self._expectation = Expectation(0)
        self.parted, self._roster = True, None
        if member.replica:
            self._lives.begin(member.replica, member.incarnation)

    def _lose_replica(self, member: Member, how: str) -> list[Member]:
        """End the life of a replica that has lost a process; return the processes that were alive."""
        self._lives.lose(member.replica, member.incarnation, f"its process {member.worker_id!r} {how}")
        others = [each for each in self._alive_of(member.replica) if each.incarnation == member.incarnation]
        for each in others:
            self._out(each, WorkerState.EXPIRED)
        return others

    def _without(self, gone: Sequence[Member], *, lost: bool, was_alive: bool) -> Effects:
        """Return the effects of the end of `gone`: one worker, then the other processes of its replica."""
        first, *others = gone
        effects = Effects(gone=tuple((member.worker_id, lost) for member in gone))
        if lost and was_alive and first.replica:
            failed = first.state is WorkerState.FAILED
            how = failure_in_words(first.message) if failed else "was lost"
            what = f"replica {first.replica} is out: its process {first.worker_id} {how}"
            warning = not (failed and was_interrupted(first.message))
            taken_along = ", ".join(member.worker_id for member in others)
            effects = effects.and_then(notify("replica", what, warning=warning, taken_along=taken_along))
        if not any(member.alive and member.name == first.name for member in self._members.values()):
            effects = effects.and_then(Effects(departed=(first.name,)))
        return effects

    def _out(self, member: Member, state: WorkerState) -> None:
        before, member.state, member.active = _roster_key(member), state, False
        self._moved(member, before=before)

    def _present_roster(self) -> Roster:
        if self._roster is None:
            make = whole_roster if self.parted else roster_of_part
            self._roster = make(self._entries(), self._expectation)
        return self._roster

    def _entries(self) -> list[Entry]:
        """Return the entries of a roster, without processes of a replica's earlier lives."""
        members = self._members.values()
        known = {m.name for m in members} if self._former else set()
        gone = (n for n, state in self._former.items() if state is not _ALIVE and n not in known)
        return [
            Entry(m.worker_id, m.name, m.parts, m.active, m.pushed_at is not None or not m.alive)
            for m in members
            if not m.replica or self._lives.is_latest(m.replica, m.incarnation)
        ] + [Entry(name, name, (), active=False, arrived=True) for name in gone]

    def _heard(self, member: Member, *, now: float, clock: int | None, pushed_at: float | None, active: bool) -> None:
        before = _roster_key(member)
        member.state, member.was_heard, member.heard_at = _ALIVE, True, max(now, member.heard_at)
        member.pushed_at, member.active = pushed_at, active
        if clock is not None:
            member.clock = clock
        self._moved(member, before=before)

    def _moved(self, member: Member, *, before: RosterKey) -> None:
        """Note a change of a member: change the roster, or drop it where that takes more than one worker's entry."""
        now = _roster_key(member)
        if now != before:
            is_first_push = (before, now) == (_JOINED, _PUSHED) and not self.parted
            if self._roster is not None:
                self._roster = self._roster.with_pushed(member.worker_id, self._expectation) if is_first_push else None
            self.num_alive += now[0] - before[0]
            self.num_ended += before[0] > now[0]

    def _forget_unheard(self, now: float) -> bool:
        """Forget one worker that called only Hello and has been silent since; return False if there is none."""
        latest = now - UNHEARD_SHARE * self.lease_seconds
        for member in self._members.values():
            if member.heard_at < latest and member.alive and not member.was_heard and not member.replica:
                self._out(member, WorkerState.EXPIRED)
                del self._members[member.worker_id]
                return True
        return False

    def _forget_gone(self) -> None:
        """Forget the workers that have been gone longest, to bound memory."""
        excess = len(self._members) - GONE_FACTOR * self.workers_max
        if excess > 0:
            gone = sorted((m for m in self._members.values() if not m.alive), key=lambda m: m.heard_at)
            for member in gone[:excess]:
                del self._members[member.worker_id]
            self._lives.keep({member.replica for member in self._members.values()})


_STALLED = {
    "expected": "the run goes on without expected workers that have not come; each is active from its first push",
    "round": "worker is not active until its next push: others waited too long for it",
    "again": "worker is not active until its next push: a round that is made again waited too long for it",
    "step": "no worker waits for this one until it requests its next step: others waited too long for it",
}

# What a roster depends on: whether a worker is alive, is active, and has yet to push.
RosterKey = tuple[bool, bool, bool]
_GONE: RosterKey = (False, False, False)
_JOINED: RosterKey = (True, False, True)
_PUSHED: RosterKey = (True, True, False)


def _roster_key(member: Member) -> RosterKey:
    return member.state is _ALIVE, member.active, member.pushed_at is None


def require_own(known: Member, incarnation: int, secret: bytes) -> None:
    """Raise NotAllowed for a call in that worker's name without its secret."""
    if not compare_digest(known.secret, secret):
        raise NotAllowed(
            f"the call is in the name of worker {known.worker_id!r} (incarnation {incarnation}) without its secret:"
            " send the secret of HelloReply in the Sender of every call, another Hello too"
        )


def _require_latest(known: Member | None, incarnation: int) -> None:
    """Raise Superseded for a process whose name a later one holds."""
    if known is not None and known.alive and incarnation < known.incarnation:
        raise Superseded(
            f"worker {known.worker_id!r} is held by a later process (incarnation {known.incarnation}, this one is"
            f" {incarnation}); give this process another worker id"
        )


def _require_name_free(worker_id: str, replica: str, members: Iterable[Member]) -> None:
    """Raise InvalidArgument if a worker of one process has the name of a replica, or of a process of a replica."""
    name = replica or worker_id
    for other in members:
        if other.alive and other.replica != replica and (other.name == name or other.worker_id == worker_id):
            taken = name if other.name == name else worker_id
            raise InvalidArgument(
                f"{taken!r} is the name of a worker of one process and of a replica, or of a process of it: give one"
                " of them another name (worker_id, PYPS_WORKER_ID)"
            )
