"""A server in virtual time: the real shards, pacer and membership, told of everything in the order of its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient
from pyps.core.membership import Membership, WorkerState
from pyps.core.pacing import Pacer
from pyps.core.receipt import Receipt
from pyps.core.roster import Roster, not_joined
from pyps.core.shard import Shard
from pyps.core.whole_model import WholeModel
from pyps.simulation.event import Event, Kind
from pyps.simulation.scheduler import Scheduler

# Schedules an action of the caller's at a time.
At = Callable[[float, Callable[[], None]], None]
# One push: shards and their gradients, in the order in which they are sent.
Gradients = Sequence[tuple[int, Gradient]]
Answer = Callable[[Receipt], None]

WORKERS_MAX = 10_000


@dataclass(frozen=True)
class ServerPlan:
    """How a server is set up, and how quick it is. Times are in virtual seconds."""

    # How many workers the first update of a barrier waits for.
    expected_workers: int = 0
    # How long a worker may be silent before it stops counting.
    lease_seconds: float = 30.0
    # How long a live worker may keep others waiting before it stops counting until its next push.
    stall_seconds: float = float("inf")
    # How long a shard is busy with one push of it; pushes queue for a busy shard, pulls slip in between.
    service_seconds: float = 0.0
    # How long one shard's message is under way; a worker sends those of a push one after the other.
    transfer_seconds: float = 0.0


class VirtualServer:
    """What stands between workers and shards in a server, without threads and network."""

    def __init__(
        self,
        shards: Sequence[Shard],
        behaviour: Behaviour,
        plan: ServerPlan,
        *,
        scheduler: Scheduler,
        tell: Callable[[Event], None],
    ) -> None:
        self.shards = {shard.shard_id: shard for shard in shards}
        self.plan = plan
        self._scheduler, self._tell = scheduler, tell
        self._membership = Membership(
            lease_seconds=plan.lease_seconds, workers_max=WORKERS_MAX, expected_workers=plan.expected_workers
        )
        # When each shard will have done with the pushes it has, and when it goes on after a pause.
        self._free_at = dict.fromkeys(self.shards, 0.0)
        self._resumes_at = dict.fromkeys(self.shards, 0.0)
        # Workers that the pacer has still to grant their next step.
        self._waiting: dict[str, Callable[[], None]] = {}
        # When those that died were heard of for the last time.
        self._died_at: dict[str, float] = {}
        self._pacer: Pacer | None = None
        self._whole: WholeModel | None = None
        self._take_over(behaviour)

    @property
    def shard_ids(self) -> tuple[int, ...]:
        """The shards' numbers."""
        return tuple(self.shards)

    @property
    def epoch(self) -> int:
        """The epoch of all shards."""
        return next(iter(self.shards.values())).epoch

    @property
    def version(self) -> int:
        """The version that all shards have reached."""
        return min(shard.version for shard in self.shards.values())

    @property
    def roster(self) -> Roster:
        """The workers that protocols reckon with."""
        return self._membership.roster

    @property
    def asks(self) -> bool:
        """Whether workers have to ask before a step."""
        return self._pacer is not None and self._pacer.asks(self.version)

    # What workers ask for.

    def join(self, worker_id: str, incarnation: int) -> None:
        """Takes the worker among the living."""
        self._died_at.pop(worker_id, None)
        self._membership.join(worker_id, incarnation, now=self._scheduler.now)
        self._say(Kind.JOIN, worker_id)

    def arrive(self, worker_id: str, clock: int, then: Callable[[], None]) -> None:
        """Calls back as soon as the worker may begin its next step."""
        assert self._pacer is not None
        self._waiting[worker_id] = then
        self._grant(self._pacer.arrive(worker_id, clock))
        if worker_id in self._waiting:
            whom = self._gate_of(self._pacer) or self._pacer.waiting_for(worker_id)
            self._say(Kind.WAIT, worker_id, note=" ".join(["for", *whom]))
            self._watch(whom)

    def when_readable(self, worker_id: str, shard_id: int, min_version: int, then: Callable[[float], None]) -> None:
        """Calls back with the time at which the shard can be read, once it has the version."""
        shard = self.shards[shard_id]
        if shard.version < min_version and not shard.finished:
            whom = shard.waiting_for(self.roster)
            self._say(Kind.WAIT, worker_id, shard_id, min_version, note=" ".join(["for", *whom]))
            self._watch(whom)
        shard.when_version(min_version, lambda: then(self._resumes_at[shard_id]))

    def read(self, worker_id: str, shard_id: int) -> tuple[int, Floats]:
        """Returns the shard's version and a copy of its parameters."""
        shard = self.shards[shard_id]
        held = shard.read(lambda version, parameters: (version, parameters.copy()), worker_id=worker_id)
        self._say(Kind.PULL, worker_id, shard_id, held[0])
        return held

    def receive(self, gradients: Gradients, *, at: At, then: Answer) -> None:
        """Takes a push; its messages come one after the other, and each is answered when it has been handled."""
        seconds = self.plan.transfer_seconds
        if self._whole is not None:
            # The push is staged before the model is locked.
            handle = partial(self._handle_whole, gradients, then)
            self._after(len(gradients) * seconds, partial(self._queue, self.shard_ids, handle, at=at), at=at)
            return
        for count, (shard_id, gradient) in enumerate(gradients, start=1):
            handle = partial(self._handle, shard_id, gradient, then)
            self._after(count * seconds, partial(self._queue, (shard_id,), handle, at=at), at=at)

    # How workers go.

    def leave(self, worker_id: str, incarnation: int) -> None:
        """Takes the worker at its word that it has finished."""
        self._membership.leave(worker_id, incarnation, now=self._scheduler.now, state=WorkerState.FINISHED)
        self._say(Kind.LEAVE, worker_id)
        self._departed(worker_id)

    def lose(self, worker_id: str) -> None:
        """Notes that the worker died; what the server itself sees is that the lease runs out."""
        self._say(Kind.DIE, worker_id)
        self._died_at[worker_id] = self._scheduler.now
        # A moment later: a lease has run out when more than its time is over.
        self._scheduler.at(self._scheduler.now + self.plan.lease_seconds + MOMENT, self._expire)

    # What the operator does.

    def pause(self, shard_id: int, seconds: float) -> None:
        """Stops the shard for so long: pushes to it and pulls from it wait."""
        self._resumes_at[shard_id] = self._scheduler.now + seconds
        self._free_at[shard_id] = max(self._free_at[shard_id], self._resumes_at[shard_id])

    def configure(self, behaviour: Behaviour) -> None:
        """Replaces the behaviour; what the old one parked is settled first."""
        self._say(Kind.CONFIGURE, note=behaviour.aggregation.text)
        for shard in self.shards.values():
            if shard.configure(behaviour=behaviour, roster=self.roster):
                self._say(Kind.COMPLETE, shard_id=shard.shard_id, version=shard.version)
        old_pacer = self._take_over(behaviour)
        if self._pacer is not None and old_pacer is not None:
            self._grant(self._pacer.take_over(old_pacer))
        if not self.asks:
            self._grant(tuple(self._waiting))

    # Helpers.

    def _take_over(self, behaviour: Behaviour) -> Pacer | None:
        """Returns the pacer that goes."""
        old_pacer, self._pacer = self._pacer, behaviour.aggregation.pacer()
        if self._pacer is not None and self.roster.missing:
            self._pacer.quorum = self.plan.expected_workers
        self._whole = WholeModel(self.shards) if behaviour.aggregation.whole_model else None
        return old_pacer

    def _after(self, seconds: float, action: Callable[[], None], *, at: At) -> None:
        """Acts after a time; at once where that is no time at all."""
        if seconds > 0:
            at(self._scheduler.now + seconds, action)
        else:
            action()

    def _queue(self, shard_ids: Sequence[int], handle: Callable[[], None], *, at: At) -> None:
        """Handles a message when its shards have done with those before it."""
        now = self._scheduler.now
        ends = max(now, *(self._free_at[shard_id] for shard_id in shard_ids)) + self.plan.service_seconds
        self._free_at.update(dict.fromkeys(shard_ids, ends))
        self._after(ends - now, handle, at=at)

    def _handle(self, shard_id: int, gradient: Gradient, then: Answer) -> None:
        receipt = self.shards[shard_id].push(gradient, roster=self._pushed(gradient))
        self._answer(gradient, receipt, then)

    def _handle_whole(self, gradients: Gradients, then: Answer) -> None:
        assert self._whole is not None
        receipts = self._whole.push(gradients, roster=self._pushed(gradients[0][1]))
        for (_, gradient), receipt in zip(gradients, receipts, strict=True):
            self._answer(gradient, receipt, then)

    def _pushed(self, gradient: Gradient) -> Roster:
        return self._membership.pushed(
            gradient.worker_id, gradient.incarnation, now=self._scheduler.now, clock=gradient.clock
        )

    def _answer(self, gradient: Gradient, receipt: Receipt, then: Answer) -> None:
        self._tell(
            Event(self._scheduler.now, Kind.PUSH, gradient.worker_id, receipt.shard_id, gradient.base_version, receipt)
        )
        self._advanced()
        then(receipt)

    def _advanced(self) -> None:
        if self._pacer is not None:
            self._grant(self._pacer.advanced(self.version))

    def _grant(self, worker_ids: Sequence[str]) -> None:
        for worker_id in worker_ids:
            if worker_id in self._waiting:
                self._waiting.pop(worker_id)()

    def _expire(self) -> None:
        now = self._scheduler.now
        for member in self._membership.alive():
            if member.worker_id not in self._died_at:
                # The living send heartbeats.
                self._membership.renew(member.worker_id, member.incarnation, now=now)
        for member in self._membership.expire(now):
            self._say(Kind.EXPIRE, member.worker_id)
            self._departed(member.worker_id)

    def _watch(self, worker_ids: Sequence[str]) -> None:
        """Looks later whether those that are waited for now have moved."""
        if self.plan.stall_seconds < float("inf"):
            last_pushes = {worker_id: self._last_push(worker_id) for worker_id in worker_ids}
            self._scheduler.at(self._scheduler.now + self.plan.stall_seconds, partial(self._stall, last_pushes))

    def _last_push(self, worker_id: str) -> float | None:
        member = self._membership.get(worker_id)
        return None if member is None else member.pushed_at

    def _stall(self, last_pushes: Mapping[str, float | None]) -> None:
        """Stops counting those that are waited for still and have not pushed since then; expects no newcomers then."""
        gate = {*self.roster.awaited, *(self._gate_of(self._pacer) if self._pacer is not None else ())}
        if self._waited_for().intersection(gate, last_pushes):
            self._open_gate()
        for worker_id, last_push in last_pushes.items():
            if worker_id in self._waited_for() and self._last_push(worker_id) == last_push:
                self._membership.stall(worker_id)
                self._say(Kind.STALL, worker_id)
                self._departed(worker_id)

    def _gate_of(self, pacer: Pacer) -> tuple[str, ...]:
        """Returns the expected workers that have not asked the pacer yet."""
        coming = pacer.not_seen(member.worker_id for member in self._membership.alive()) if pacer.missing else []
        return (*sorted(coming), *not_joined(pacer.missing - len(coming)))

    def _open_gate(self) -> None:
        """Waits no longer for the expected workers that have not come."""
        self._say(Kind.STALL, note="the expected workers that have not come")
        self._membership.expect_no_more()
        self._complete_rounds()
        if self._pacer is not None:
            self._pacer.quorum = 0
        self._advanced()

    def _waited_for(self) -> set[str]:
        shards = [shard for shard in self.shards.values() if shard.num_pending]
        waited_for = {worker_id for shard in shards for worker_id in shard.waiting_for(self.roster)}
        if self._pacer is not None:
            waited_for.update(*(self._pacer.waiting_for(worker_id) for worker_id in self._pacer.waiting))
            waited_for.update(self._gate_of(self._pacer) if self._pacer.waiting else ())
        return waited_for

    def _departed(self, worker_id: str) -> None:
        """Completes what waited for the worker alone."""
        self._waiting.pop(worker_id, None)
        self._complete_rounds()
        if self._pacer is not None:
            self._grant(self._pacer.depart(worker_id))
        self._advanced()

    def _complete_rounds(self) -> None:
        for shard in self.shards.values():
            if shard.complete(self.roster):
                self._say(Kind.COMPLETE, shard_id=shard.shard_id, version=shard.version)

    def _say(self, kind: Kind, worker_id: str = "", shard_id: int = -1, version: int = 0, *, note: str = "") -> None:
        self._tell(Event(self._scheduler.now, kind, worker_id, shard_id, version, note=note))


# Shorter than any time that a plan names.
MOMENT = 1e-9
