"""A shard: a range of the model's parameters under one mutex, its pushes, pulls and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock, RLock
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pyps.core import recorder as events
from pyps.core import verdict
from pyps.core.arrays import Floats, aligned, aligned_copy, read_only
from pyps.core.behaviour import Behaviour
from pyps.core.effects import ParkedCalls, Wake, wake_all
from pyps.core.gradient import (
    FINITE,
    FLOAT32_MAX,
    Finding,
    Gradient,
    PayloadKind,
    PublishedReply,
    Reply,
    SharedMemory,
    norm_of,
    require_kind,
    require_possible_version,
    require_rate,
    scan,
)
from pyps.core.ledger import FORGOTTEN, Forgotten, Ledger
from pyps.core.protocols.base import Acknowledge, Apply, Arrival, Contribution, Decision, Park, Part, Pending, Refuse
from pyps.core.published import Published
from pyps.core.receipt import Receipt
from pyps.core.recorder import Both, Listener, Recorder
from pyps.core.roster import Roster
from pyps.core.rules import Slots, UpdateRule, validate
from pyps.core.store import Follower, PendingBudget, Pushed, ShardState
from pyps.core.update import Update, apply_update, clipped
from pyps_wire.codecs import Codec
from pyps_wire.errors import InvalidArgument, WrongSize

T = TypeVar("T")


class Shard:
    """Parameters, slots, version and ledger of one shard. Every method may be called from any thread.

    A push passes these checks in order: its size (an error is raised), answered before, run finished, epoch, base
    version, finite numbers, protocol, staleness policy. Only a push that passes all changes parameters and slots.
    """

    # Whether pushes hold ids and rows; see `TableShard`.
    has_rows = False
    _apply_update: ClassVar[Callable[..., int]] = staticmethod(apply_update)

    def __init__(
        self,
        shard_id: int,
        parameters: Floats,
        *,
        rule: UpdateRule,
        hyperparameters: Mapping[str, float],
        behaviour: Behaviour,
        kind: PayloadKind = PayloadKind.GRADIENT,
        epoch: int = 0,
        version: int = 0,
        slots: Mapping[str, Floats] | None = None,
        ledger: Ledger | None = None,
        pending: Iterable[Contribution] = (),
        examples: int = 0,
        learning_rate: float | None = None,
        momentum: float | None = None,
        recorder: Recorder | None = None,
        budget: PendingBudget | None = None,
        take_over: bool = False,
    ) -> None:
        """Copy the parameters, and the slots of a restored shard.

        `learning_rate` and `momentum` replace those of the hyperparameters. Pending gradients count against `budget`.
        With `take_over` the arrays become the shard's own, and are copied only if they are not aligned.
        """
        take = aligned if take_over else aligned_copy
        self.shard_id = shard_id
        self.epoch = epoch
        self.length = parameters.size
        self.rule = rule
        self.kind = kind
        # The newest version that a checkpoint holds: a killed server restarts from it.
        self.durable_version = version
        # Whether the schedule's owner or an operator set the rate: provisional rates are then ignored. Each shard has
        # its own, as the owner's first push does not reach all shards at once.
        self.rate_is_set = learning_rate is not None
        self._recorder: Listener | None = recorder
        self._own_recorder = recorder
        self._lock = Lock()
        # Guarded by _lock.
        self.behaviour = behaviour
        moved = {} if momentum is None else {rule.momentum_name: momentum}
        self.hyperparameters: Mapping[str, float] = MappingProxyType(validate(rule, {**hyperparameters, **moved}))
        self.learning_rate = self.hyperparameters["learning_rate"] if learning_rate is None else learning_rate
        self.version, self.updated_by = version, ""
        self.examples = examples
        # How often something changed that no version says: the ledger, gradients that wait, rates.
        self.moves = self.durable_moves = 0
        self.finished = False
        self._parameters = take(parameters)
        self._readable = read_only(self._parameters)
        self._slots = _first_slots(rule, self.hyperparameters, slots, shard_id=shard_id, length=self.length, take=take)
        self._bind()
        self._ledger = Ledger() if ledger is None else ledger
        self._pending = Pending(pending)
        # How many gradients wait, and their size. Read without the lock.
        self.num_pending, self.pending_bytes = len(self._pending), self._pending.num_bytes
        self._budget = PendingBudget() if budget is None else budget
        self._budget.restore(self.pending_bytes)
        # By the codec of the workers that hold them.
        self._published: dict[Codec, Published] = {}
        # By the version that each call waits for.
        self._parked = ParkedCalls[int]()

    def push(
        self,
        gradient: Gradient,
        *,
        roster: Roster,
        reply: Reply | PublishedReply | None = None,
        held_version: int = -1,
        memory: SharedMemory | None = None,
        finding: Finding | None = None,
    ) -> Pushed:
        """Handle a gradient; a push that was answered before gets the first answer.

        Parameters newer than `held_version` are written to `reply`, also when the push is refused. They are not if its
        worker has to wait for its round: the pull that follows brings them. `memory` is the worker's shared memory that
        holds the gradient or the reply. `finding` is the result of an earlier `scan`, of this gradient or of another
        part of a push that is taken as a whole or not at all.

        Raise InvalidArgument (WrongSize where sizes differ) when the gradient could never be applied here,
        ServerUnavailable where `memory` is detached, LimitExceeded where the gradient would wait and there is no room.
        A refused push changes no parameter, no slot and no rate.
        """
        # Without the lock, as a scan takes as long as an update. A volatile payload is checked again when applied.
        if finding is None:
            finding = scan(gradient, shard_id=self.shard_id, shard_length=self.length)
        if (gradient.num_rows > 0) != self.has_rows and gradient.kind != PayloadKind.NOTHING:
            raise InvalidArgument(f"shard {self.shard_id} takes {'ids and rows' if self.has_rows else 'no rows'}")
        if gradient.kind != self.kind:
            require_kind(gradient, shard_id=self.shard_id, kind=self.kind)
        if gradient.momentum is not None and not self.rule.momentum_name:
            raise InvalidArgument(
                f"shard {self.shard_id}: worker {gradient.worker_id!r} sent a momentum, but {self.rule.name} has none:"
                " send the learning rate alone"
            )
        norm = norm_of(gradient, self.length) if self.behaviour.clip_norm else None
        with self._lock:
            if memory is not None:
                memory.require_attached()
            receipt = self._ledger.lookup(gradient.worker_id, gradient.incarnation, gradient.sequence)
            if gradient.resent_staleness is not None:
                gradient = gradient.based_at(self.version)
            refusal = self._refusal(gradient, receipt, finding)
            if refusal is not None:
                receipt = self._rejected(refusal, gradient, roster)
            if receipt is not None:
                assert receipt is not FORGOTTEN, "what is forgotten is refused"
                if refusal is None:
                    receipt = receipt._replace(duplicate=True)
                return Pushed(receipt, self._bring(reply, held_version, receipt, gradient.worker_id))
            pushed = self._decide(gradient, roster, norm, reply, held_version)
            if not self._parked.calls:
                return pushed
            reached = self._reached()
        wake_all(reached)
        return pushed

    def complete(self, roster: Roster, *, version: int | None = None) -> list[Update]:
        """Make the updates that are due since the roster has changed, and return them; none at another `version`."""
        updates: list[Update] = []
        with self._lock:
            while self._pending and not self.finished and version in (None, self.version):
                decision = self.behaviour.aggregation.at(self.version).complete(self._pending, self.version, roster)
                if decision is None:
                    break
                if not updates and self._recorder is not None:
                    self._recorder.record(events.Completed(self.shard_id, roster, self.version))
                updates.append(self._update(decision))
            reached = self._reached()
        wake_all(reached)
        return updates

    def configure(
        self, *, roster: Roster, behaviour: Behaviour | None = None, learning_rate: float | None = None
    ) -> list[Update]:
        """Replace the behaviour or the base rate from the next push on; return the updates made.

        If the protocol changes, pending gradients become one last update under the old one (its `settle`). Raise
        InvalidArgument, and change nothing, for an impossible rate.
        """
        if learning_rate is not None:
            require_rate(learning_rate)
        updates: list[Update] = []
        with self._lock:
            if self._recorder is not None:
                self._recorder.record(
                    events.Configured(
                        self.shard_id, behaviour, learning_rate, roster, self.version, finished=self.finished
                    )
                )
            if behaviour is not None:
                before = self.behaviour.aggregation
                if self._pending and not self.finished and behaviour.aggregation != before:
                    updates.append(self._update(before.at(self.version).settle(self._pending)))
                self.behaviour = behaviour
            if learning_rate is not None:
                self.learning_rate = learning_rate
                self.rate_is_set = True
                self.moves += 1
            reached = self._reached()
        wake_all(reached)
        return updates

    def pull(
        self,
        reply: Reply | PublishedReply,
        *,
        held_version: int = -1,
        memory: SharedMemory | None = None,
        worker_id: str | None = None,
    ) -> int | None:
        """Write parameters newer than `held_version` to `reply`; return their version, or None.

        The pull of a worker is recorded, that of an observer (`worker_id` None) is not. Raise ServerUnavailable if
        `memory`, which holds the reply, is detached.
        """
        with self._lock:
            if memory is not None:
                memory.require_attached()
            newest = self.version
            if isinstance(reply, PublishedReply):
                published = self._publish(reply, held_version)
                newest = held_version if published is None else published
            if worker_id is not None and self._recorder is not None:
                # Also when the worker holds the newest version already.
                self._recorder.record(events.Pulled(self.shard_id, worker_id, newest))
            if newest <= held_version:
                return None
            if not isinstance(reply, PublishedReply):
                self._rule.write(reply)
            return newest

    def note_pull(self, version: int, *, worker_id: str | None) -> bool:
        """Record the pull of a version that was read before; return False if the version has changed since."""
        with self._lock:
            if self.version != version:
                return False
            if worker_id is not None and self._recorder is not None:
                self._recorder.record(events.Pulled(self.shard_id, worker_id, version))
            return True

    def read(self, reader: Callable[[int, Floats], T]) -> T:
        """Return the result of `reader(version, parameters)`, called under the lock: it must not keep the array."""
        with self._lock:
            return reader(self.version, self._readable)

    def rewrite(self, writer: Callable[[Floats], object]) -> None:
        """Let `writer` overwrite all parameters under the lock: one update without gradients, which is not recorded."""
        with self._lock:
            writer(self._parameters)
            self.version, self.updated_by = self.version + 1, ""
            reached = self._reached()
        wake_all(reached)

    @property
    def next_rate(self) -> float:
        """The step size of the next update, before staleness."""
        return self._rate(self.learning_rate)

    def contributors(self) -> set[str]:
        """Return the workers whose gradients wait for an update."""
        with self._lock:
            return set(self._pending.workers)

    def workers_of_round(self) -> set[str]:
        """Return the workers that pushed to the present round or to the one before."""
        with self._lock:
            return self._ledger.workers_since(self.version - 1)

    @property
    def slots_bytes(self) -> int:
        """The size of the optimizer's arrays."""
        return sum(slot.nbytes for slot in self._slots.values())

    @property
    def published_bytes(self) -> int:
        """The size of the published copies and their differences."""
        return sum(published.num_bytes for published in list(self._published.values()))

    @property
    def num_receipts(self) -> int:
        return self._ledger.num_receipts

    @property
    def ledger_bytes(self) -> int:
        """An estimate of the ledger's memory."""
        return self._ledger.num_bytes

    def newest_sequence(self, worker_id: str, incarnation: int) -> int:
        """Return the largest sequence that was answered of a worker's life; -1 for none."""
        with self._lock:
            return self._ledger.newest_sequence(worker_id, incarnation)

    def waiting_for(self, roster: Roster) -> tuple[str, ...]:
        """Return the workers whose gradients the present round waits for, ascending."""
        with self._lock:
            return self.behaviour.aggregation.at(self.version).waiting_for(self._pending, roster)

    def when_version(self, min_version: int, callback: Wake) -> Callable[[], bool]:
        """Call back once, when the shard has that version or is finished; return a function that cancels this.

        `callback` is called without the lock, at once or from the thread whose call makes the version. It must be quick
        and must not raise. The returned function returns False if the callback was called or is about to be.
        """
        with self._lock:
            waits = self.version < min_version and not self.finished
            if waits:
                self._parked.park(min_version, callback)
        if not waits:
            callback()

        def cancel() -> bool:
            with self._lock:
                return self._parked.forget(min_version, callback)

        return cancel

    def finish(self) -> None:
        """Refuse new pushes from now on; pending gradients are never applied. Pulls and retries are still answered."""
        with self._lock:
            self.finished = True
            parked = self._parked.take_all()
        wake_all(parked)

    def state(self, *, rows_after: int = 0) -> ShardState:
        """Return a copy of everything that a restored shard needs; of rows, those updated after this version."""
        with self._lock:
            return self._state(aligned_copy, rows_after)

    def given_up(self) -> ShardState:
        """Return the same without a copy, for another shard that takes the arrays over: this one ends with it."""
        return self._state(lambda values: values)

    def follow(self, follower: Follower | None) -> None:
        """Tell a follower, in place of any before it, of the present state, and of all that happens from then on."""
        with self._lock:
            if follower is not None:
                follower.begin(self, self._state(aligned_copy))
            own = self._own_recorder
            self._recorder = Both(own, follower) if own is not None and follower is not None else follower or own

    # What follows is called under the lock.

    def _state(self, take: Callable[[Floats], Floats], rows_after: int = 0) -> ShardState:
        return ShardState(
            version=self.version,
            parameters=take(self._parameters),
            slots={name: take(slot) for name, slot in self._slots.items()},
            ledger=self._ledger.entries(),
            pending=tuple(self._pending),
            examples=self.examples,
            learning_rate=self.learning_rate,
            momentum=self.hyperparameters.get(self.rule.momentum_name),
        )

    def _reached(self) -> list[Wake]:
        return self._parked.take([version for version in self._parked.calls if version <= self.version])

    def _refusal(self, gradient: Gradient, known: Receipt | Forgotten | None, finding: Finding) -> Refuse | None:
        """Return why a push is refused before the protocol decides on it, or None; raise InvalidArgument as `push`."""
        shard_id, version = self.shard_id, self.version
        if known is FORGOTTEN:
            return verdict.forgotten(gradient, shard_id=shard_id)
        if known is not None:
            return None
        if self.finished:
            return verdict.finished(shard_id=shard_id, version=version)
        if gradient.epoch != self.epoch:
            return verdict.other_epoch(gradient, shard_id=shard_id, epoch=self.epoch)
        if not 0 <= gradient.base_version <= version or (gradient.newest_base_version or 0) > version:
            require_possible_version(gradient, shard_id=shard_id, version=version)
        return None if finding is FINITE else verdict.not_finite(finding, gradient, shard_id=shard_id)

    def _decide(
        self,
        gradient: Gradient,
        roster: Roster,
        norm: float | None,
        reply: Reply | PublishedReply | None,
        held_version: int,
    ) -> Pushed:
        behaviour, version = self.behaviour, self.version
        arrived = gradient
        if gradient.provisional:
            # Decided here, so that logs, replays and checkpoints hold ordinary rates only.
            gradient = gradient.decided(holds=not self.rate_is_set and not behaviour.schedule.terms)
        aggregation = behaviour.aggregation.at(version)
        staleness = version - gradient.base_version
        weighing = behaviour.staleness.weigh(staleness, aggregation.split(roster))
        if behaviour.clip_norm:
            weighing = behaviour.clip(weighing, gradient, norm, self.length)
        if gradient.scale != 1.0:
            weighing = weighing._replace(weight=weighing.weight * gradient.scale)
        contribution = Contribution(gradient, staleness, weighing)
        arrival = Arrival(contribution, self._pending, version, roster)
        decision = aggregation.decide(arrival)
        if not weighing.accept and isinstance(decision, Apply | Park):
            decision = verdict.too_stale(contribution, policy=behaviour.staleness.name, version=version)
        if isinstance(decision, Apply) and len(decision.parts) > 1 and aggregation.clip == "median":
            decision = Apply(clipped(decision.parts, self.length))
        if gradient.volatile and isinstance(decision, Park):
            return self._decide_on_copy(arrived, roster, reply, held_version)
        learning_rate = self.learning_rate if gradient.learning_rate is None else gradient.learning_rate
        rate = self._rate(learning_rate)
        update_scale = 1.0
        if behaviour.staleness.scales_updates and isinstance(decision, Apply):
            update_scale = self._update_scale(decision.parts)
        receipt = verdict.receipt_of(
            decision, arrival, shard_id=self.shard_id, epoch=self.epoch, rate=rate, update_scale=update_scale
        )
        waits_bytes = len(gradient.payload) if isinstance(decision, Park) else 0
        if waits_bytes:
            self._budget.take(waits_bytes)
        if self._recorder is not None:
            try:
                self._recorder.record(events.Pushed(self.shard_id, gradient, receipt, roster))
            except BaseException:
                self._budget.give_back(waits_bytes)
                raise
        if gradient.learning_rate is not None or gradient.momentum is not None:
            self._take_rates(gradient, decision, provisional=arrived.provisional)
        update = None
        if isinstance(decision, Apply):
            brings = reply if receipt.version_after > held_version and isinstance(reply, Reply) else None
            update, left_out = self._apply(decision.parts, rate=rate, update_scale=update_scale, reply=brings)
            self.updated_by = gradient.worker_id
            if left_out:
                receipt = verdict.with_left_out(receipt, gradient, count=left_out)
        elif isinstance(decision, Park):
            self._pending.add(contribution)
            self.num_pending, self.pending_bytes = len(self._pending), self._pending.num_bytes
        elif isinstance(decision, Acknowledge):
            self.examples += gradient.example_count
        self._ledger.record(gradient.worker_id, gradient.incarnation, receipt, roster=roster)
        self.moves += 1
        brought = None
        if reply is not None:
            brought = self._bring(reply, held_version, receipt, gradient.worker_id, written=update is not None)
        return Pushed(receipt, brought, update)

    def _take_rates(self, gradient: Gradient, decision: Decision, *, provisional: bool) -> None:
        """Put a push's learning rate and momentum in force, also where its gradient is dropped or parked."""
        if isinstance(decision, Refuse):
            return
        if gradient.learning_rate is not None:
            self.learning_rate = gradient.learning_rate
        if gradient.momentum is not None:
            momentum = {self.rule.momentum_name: gradient.momentum}
            self.hyperparameters = MappingProxyType({**self.hyperparameters, **momentum})
            self._bind()
        if not provisional:
            self.rate_is_set = True

    def _decide_on_copy(
        self, gradient: Gradient, roster: Roster, reply: Reply | PublishedReply | None, held_version: int
    ) -> Pushed:
        """Copy, scan and decide on a gradient that must wait but lies in memory that its worker may overwrite."""
        private = gradient.private()
        finding = scan(private, shard_id=self.shard_id, shard_length=self.length)
        if finding.finite:
            return self._decide(private, roster, None, reply, held_version)
        receipt = self._rejected(verdict.not_finite(finding, private, shard_id=self.shard_id), private, roster)
        return Pushed(receipt, self._bring(reply, held_version, receipt, gradient.worker_id))

    def _bring(
        self,
        reply: Reply | PublishedReply | None,
        held_version: int,
        receipt: Receipt,
        worker_id: str,
        *,
        written: bool = False,
    ) -> int | None:
        """Write newer parameters to a push's reply, if its update has not; return their version, or None."""
        version: int | None = self.version
        if reply is None or self.version <= held_version or receipt.min_version > self.version:
            return None
        if isinstance(reply, PublishedReply):
            version = self._publish(reply, held_version)
        elif not written:
            self._rule.write(reply)
        if self._recorder is not None and version is not None:
            self._recorder.record(events.Pulled(self.shard_id, worker_id, version))
        return version

    def _publish(self, reply: PublishedReply, held_version: int) -> int | None:
        """Fill in the reply with published parameters newer than the caller's; return their version, or None."""
        version, parameters = self.version, self._rule.handed_out
        if self.kind is PayloadKind.BUFFER:
            # A count beside a mean needs every bit, and buffers are small.
            reply.in_full(parameters)
            return version if version > held_version else None
        published = self._published.get(reply.codec)
        if published is None:
            published = self._published[reply.codec] = Published(reply.codec, parameters, version=version)
        return published.bring(reply, parameters, version=version, held_version=held_version, is_last=self.finished)

    def _rejected(self, refusal: Refuse, gradient: Gradient, roster: Roster) -> Receipt:
        return verdict.rejection(refusal, gradient, self.version, roster, shard_id=self.shard_id, epoch=self.epoch)

    def _bind(self) -> None:
        numbers = {**self.hyperparameters, "learning_rate": self._rate(self.learning_rate)}
        self._rule = self.rule.bind(self._parameters, self._slots, numbers, kind=self.kind)

    def _rate(self, learning_rate: float) -> float:
        behaviour = self.behaviour
        if behaviour.constant_rate:
            return learning_rate
        # Larger minibatches may have larger rates; kernels take no infinity.
        return min(learning_rate * behaviour.rate_factor(self.version, self.examples), FLOAT32_MAX)

    def _update_scale(self, parts: Sequence[Part]) -> float:
        return self.behaviour.staleness.update_scale([part.contribution.staleness for part in parts])

    def _update(self, decision: Apply) -> Update:
        """Make an update outside of a push."""
        rate, update_scale, parts = self._rate(self.learning_rate), self._update_scale(decision.parts), decision.parts
        if self.behaviour.aggregation.at(self.version).clip == "median":
            parts = clipped(parts, self.length)
        self.updated_by = ""
        return self._apply(parts, rate=rate, update_scale=update_scale)[0]

    def _apply(
        self, parts: Sequence[Part], *, rate: float, update_scale: float, reply: Reply | None = None
    ) -> tuple[Update, int]:
        """Make an update; return it, and how many numbers were left out because they were no longer finite."""
        # One gradient alone is sent by all.
        merge = self.behaviour.aggregation.at(self.version).merge if len(parts) > 1 else ""
        left_out = self._apply_update(
            self._rule, parts, rate=rate, version=self.version, update_scale=update_scale, reply=reply, merge=merge
        )
        self.version += 1
        for part in parts:
            self.examples += part.contribution.gradient.example_count
        if self._pending.waiting:
            applied = {id(part.contribution) for part in parts}
            self._pending = Pending(waiting for waiting in self._pending if id(waiting) not in applied)
            before, self.pending_bytes = self.pending_bytes, self._pending.num_bytes
            self.num_pending = len(self._pending)
            self._budget.give_back(before - self.pending_bytes)
        update = Update(self.version, rate, update_scale, tuple(parts))
        if self._recorder is not None:
            self._recorder.record(events.Updated(self.shard_id, update, self._readable))
        return update, left_out


class LoggedShard(Shard):
    """A shard whose recorder writes before a call returns, but not under the lock: reads go on meanwhile.

    Calls that record take turns: the log has the order of the updates, and the parameters stay until it is written.
    """

    def __init__(self, shard_id: int, parameters: Floats, *, recorder: Recorder, **options: Any) -> None:
        super().__init__(shard_id, parameters, recorder=recorder, **options)
        self._log = recorder
        # Taken before _lock. Callbacks of `when_version` are called within it: they may call this shard, and no other.
        self._turn = RLock()

    def push(self, gradient: Gradient, **options: Any) -> Pushed:
        with self._turn, self._written():
            return super().push(gradient, **options)

    def complete(self, roster: Roster, *, version: int | None = None) -> list[Update]:
        with self._turn, self._written():
            return super().complete(roster, version=version)

    def configure(self, **options: Any) -> list[Update]:
        with self._turn, self._written():
            return super().configure(**options)

    def pull(self, reply: Reply | PublishedReply, *, worker_id: str | None = None, **options: Any) -> int | None:
        if worker_id is None:
            # An observer's pull is not recorded: it need not wait for the log.
            return super().pull(reply, **options)
        with self._turn, self._written():
            return super().pull(reply, worker_id=worker_id, **options)

    def note_pull(self, version: int, *, worker_id: str | None) -> bool:
        if worker_id is None:
            return super().note_pull(version, worker_id=None)
        with self._turn, self._written():
            return super().note_pull(version, worker_id=worker_id)

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._log.write(self.shard_id)


def _first_slots(
    rule: UpdateRule,
    hyperparameters: Mapping[str, float],
    restored: Mapping[str, Floats] | None,
    *,
    shard_id: int,
    length: int,
    take: Callable[[Floats], Floats],
) -> Slots:
    """Return the slots of a new shard, or restored ones, copied by `take`; refuse those of another rule or length."""
    if restored is None:
        return rule.make_slots(length, hyperparameters)
    if set(restored) != set(rule.slot_names):
        raise InvalidArgument(
            f"shard {shard_id} is restored with the slots {sorted(restored)}; {rule.name} has {sorted(rule.slot_names)}"
        )
    for name, slot in restored.items():
        if slot.size != length:
            raise WrongSize(f"shard {shard_id}: the slot {name!r} has {slot.size} values for {length} parameters")
    return {name: take(slot) for name, slot in restored.items()}
