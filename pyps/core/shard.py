"""A shard: a stretch of the model's parameters under one mutex, and all that happens to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from pyps import _kernels
from pyps.core import verdict
from pyps.core.aggregation import Acknowledge, Apply, Arrival, Contribution, Park, Part, Refuse
from pyps.core.arrays import Floats, aligned, aligned_copy, read_only
from pyps.core.behaviour import Behaviour
from pyps.core.finding import Finding, scan
from pyps.core.gradient import Gradient, require_rate
from pyps.core.ledger import FORGOTTEN, Ledger
from pyps.core.receipt import Receipt
from pyps.core.recorder import Recorder
from pyps.core.reply import Answer, Reply
from pyps.core.roster import Roster
from pyps.core.shard_state import ShardState, first_slots
from pyps.core.staleness import WeighingContext
from pyps.core.update import Target, Update, apply_update
from pyps.core.update_rules import UpdateRule, validate
from pyps.core.waiters import Waiter, Waiters, call_all
from pyps_wire.errors import BadRequest

__all__ = ["Shard", "ShardState"]

T = TypeVar("T")


class Shard:
    """Parameters, slots, version and ledger of one shard. Every method may be called from any thread.

    A push is judged in a fixed order: whether it fits (else an error is raised), whether it was answered
    before, finished, epoch, base version, finite numbers, protocol, staleness policy. Until the last has
    agreed no parameter and no slot changes.
    """

    def __init__(
        self,
        shard_id: int,
        parameters: Floats,
        *,
        rule: UpdateRule,
        hyperparameters: Mapping[str, float],
        behaviour: Behaviour,
        epoch: int = 0,
        version: int = 0,
        slots: Mapping[str, Floats] | None = None,
        ledger: Ledger | None = None,
        pending: tuple[Contribution, ...] = (),
        examples: int = 0,
        learning_rate: float | None = None,
        momentum: float | None = None,
        recorder: Recorder | None = None,
        take_over: bool = False,
    ) -> None:
        """Copies the parameters, and the slots where a restored shard brings them.

        With `take_over` they are the shard's own from now on, and copied only where they do not lie as it needs them.
        `learning_rate` and `momentum` are in force where they are no longer those of the hyperparameters.
        """
        take = aligned if take_over else aligned_copy
        self.shard_id = shard_id
        self.epoch = epoch
        self.length = parameters.size
        self.rule = rule
        # The newest version that a checkpoint holds: what a killed server comes back with.
        self.durable_version = version
        # Whether the schedule's owner, or whoever runs the servers, set the rate: provisional ones then hold no more.
        # Each shard's own, as the owner's first push does not reach all of them at once.
        self.rate_is_set = learning_rate is not None
        self._recorder = recorder
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._behaviour = behaviour
        moved = {} if momentum is None else {rule.momentum_name: momentum}
        self.hyperparameters: Mapping[str, float] = MappingProxyType(validate(rule, {**hyperparameters, **moved}))
        self._learning_rate = self.hyperparameters["learning_rate"] if learning_rate is None else learning_rate
        self._version = version
        self._examples = examples
        self._finished = False
        self._parameters = take(parameters)
        self._readable = read_only(self._parameters)
        self._slots = first_slots(rule, self.hyperparameters, slots, shard_id=shard_id, length=self.length, take=take)
        self._ledger = Ledger() if ledger is None else ledger
        self._pending = pending
        self._waiters = Waiters()

    def push(
        self, gradient: Gradient, *, roster: Roster, answer: Answer | None = None, finding: Finding | None = None
    ) -> Receipt:
        """Handles a gradient and returns its receipt; a push that was answered before gets the first answer.

        `answer` is given the parameters to go on with, whatever became of the push. `finding` is what `scan` said where
        it has run already, of this gradient or of another part of a push that is taken as a whole or not at all.

        Raises BadRequest (WrongSize where sizes differ) when the gradient could never be applied here. A push
        that is refused, either way, changes no parameter and no slot.
        """
        # The scans take as long as an update. The payload cannot change, or is looked at again when it is applied.
        if finding is None:
            finding = scan(gradient, shard_id=self.shard_id, shard_length=self.length)
        if gradient.momentum is not None and not self.rule.momentum_name:
            raise BadRequest(
                f"shard {self.shard_id}: worker {gradient.worker_id!r} sent a momentum, but {self.rule.name} has none:"
                " send the learning rate alone"
            )
        norm = self._behaviour.clipping.norm_of(gradient)
        with self._lock:
            receipt = self._answered(gradient, roster) or self._refused(gradient, roster, finding)
            if receipt is None:
                if gradient.provisional:
                    # Decided here, so that log, replay and checkpoints know of ordinary rates alone.
                    gradient = gradient.decided(holds=not self.rate_is_set and not self._behaviour.schedule.terms)
                elif gradient.schedules:
                    self.rate_is_set = True
                receipt = self._decide(gradient, roster, norm, answer)
            else:
                self._answer(answer, receipt, gradient.worker_id)
            reached = self._waiters.take_reached(self._version)
        call_all(reached)
        return receipt

    def complete(self, roster: Roster) -> int:
        """Makes the updates that are due now that other workers count, and returns how many.

        To be called when a worker stops counting: it may have been the one that the others waited for.
        """
        updates = 0
        with self._lock:
            while (decision := self._completed(roster)) is not None:
                if updates == 0 and self._recorder is not None:
                    self._recorder.completed(self.shard_id, roster, self._version)
                self._update(decision)
                updates += 1
            reached = self._waiters.take_reached(self._version)
        call_all(reached)
        return updates

    def configure(
        self, *, roster: Roster, behaviour: Behaviour | None = None, learning_rate: float | None = None
    ) -> int:
        """Replaces the behaviour or the base rate from the next push on; returns the updates made.

        Gradients that wait for a protocol that goes become one last update under the old behaviour (its
        `settle`); else they go on waiting, weighed as they were. Raises BadRequest, and changes nothing, for a
        rate that cannot be or a protocol that cannot work with the roster.
        """
        if learning_rate is not None:
            require_rate(learning_rate)
        if behaviour is not None:
            behaviour.aggregation.check(roster.num_expected)
        updates = 0
        with self._lock:
            if self._recorder is not None:
                self._recorder.configured(self.shard_id, behaviour, learning_rate, roster, self._version)
            if behaviour is not None:
                decision = self._settled(behaviour)
                if decision is not None:
                    self._update(decision)
                    updates = 1
                self._behaviour = behaviour
            if learning_rate is not None:
                self._learning_rate = learning_rate
                self.rate_is_set = True
            reached = self._waiters.take_reached(self._version)
        call_all(reached)
        return updates

    def read(self, reader: Callable[[int, Floats], T], *, worker_id: str | None = None) -> T:
        """Returns what `reader(version, parameters)` makes of the parameters, all of one version.

        It is called under the lock: it must copy what it wants and not keep the array, which is read-only.
        A pull names its worker and is recorded; an observer's look is not.
        """
        with self._lock:
            result = reader(self._version, self._readable)
            if worker_id is not None and self._recorder is not None:
                self._recorder.pulled(self.shard_id, worker_id, self._version)
            return result

    def rewrite(self, writer: Callable[[Floats], object]) -> None:
        """Lets `writer` write the parameters, all of them, as one update that no gradient brought about.

        It is called under the lock. No recorder is told: an update log cannot hold what it does.
        """
        with self._lock:
            writer(self._parameters)
            self._version += 1
            reached = self._waiters.take_reached(self._version)
        call_all(reached)

    @property
    def version(self) -> int:
        """The number of updates applied so far."""
        return self._version

    @property
    def examples(self) -> int:
        """The number of examples behind the applied gradients."""
        return self._examples

    @property
    def learning_rate(self) -> float:
        """The base rate: before schedule, batch growth and staleness."""
        return self._learning_rate

    def rate_after(self, version: int) -> float:
        """Returns the step size of the update that follows so many updates, before staleness."""
        return self._learning_rate * self._behaviour.rate_factor(version, self._examples)

    @property
    def behaviour(self) -> Behaviour:
        """What is in force now."""
        return self._behaviour

    @property
    def finished(self) -> bool:
        """Whether pushes are refused because the run has ended."""
        return self._finished

    @property
    def num_pending(self) -> int:
        """The number of gradients that wait."""
        return len(self._pending)

    @property
    def contributors(self) -> set[str]:
        """The workers whose gradients wait."""
        return {waiting.gradient.worker_id for waiting in self._pending}

    @property
    def pending_bytes(self) -> int:
        """The size of the gradients that wait."""
        return sum(memoryview(waiting.gradient.payload).nbytes for waiting in self._pending)

    @property
    def slots_bytes(self) -> int:
        """The size of the optimizer's arrays."""
        return sum(slot.nbytes for slot in self._slots.values())

    @property
    def num_receipts(self) -> int:
        """The number of receipts that the ledger holds."""
        with self._lock:
            return len(self._ledger)

    @property
    def ledger_bytes(self) -> int:
        """About what the ledger takes of the memory."""
        with self._lock:
            return self._ledger.num_bytes

    def waiting_for(self, roster: Roster) -> tuple[str, ...]:
        """Returns the workers for whose gradients the present round waits, ascending."""
        with self._lock:
            return self._behaviour.aggregation.at(self._version).waiting_for(self._pending, roster)

    def when_version(self, min_version: int, callback: Callable[[], None]) -> Callable[[], bool]:
        """Calls back once, as soon as the shard has that version, or is finished and never will.

        The call comes outside the lock: from the thread whose call brought it about, or at once from this one
        where it holds already. It must be quick and must not raise. Returns a function that cancels the wait;
        its result is False when the call was made already or is on its way.
        """
        waiter = Waiter(min_version, callback)
        with self._lock:
            waits = self._version < min_version and not self._finished
            if waits:
                self._waiters.add(waiter)
        if not waits:
            callback()

        def cancel() -> bool:
            with self._lock:
                return self._waiters.remove(waiter)

        return cancel

    def finish(self) -> None:
        """Refuses pushes from now on; answers to earlier pushes are still given. Reading goes on.

        Gradients that wait go on waiting: the run is over without them.
        """
        with self._lock:
            self._finished = True
            waiters = self._waiters.take_all()
        call_all(waiters)

    def state(self) -> ShardState:
        """Returns a copy of everything that a restored shard needs."""
        with self._lock:
            return ShardState(
                version=self._version,
                parameters=aligned_copy(self._parameters),
                slots={name: aligned_copy(slot) for name, slot in self._slots.items()},
                ledger=self._ledger.entries(),
                pending=self._pending,
                examples=self._examples,
                learning_rate=self._learning_rate,
                momentum=self.hyperparameters.get(self.rule.momentum_name),
            )

    # What follows is called under the lock.

    def _answered(self, gradient: Gradient, roster: Roster) -> Receipt | None:
        answer = self._ledger.lookup(gradient.worker_id, gradient.incarnation, gradient.sequence)
        if answer is FORGOTTEN:
            return self._rejected(verdict.forgotten(gradient, shard_id=self.shard_id), gradient, roster)
        return None if answer is None else answer._replace(duplicate=True)

    def _refused(self, gradient: Gradient, roster: Roster, finding: Finding) -> Receipt | None:
        """Returns the receipt of a push that cannot be used and leaves no trace, not even in the ledger."""
        of = {"shard_id": self.shard_id, "epoch": self.epoch, "version": self._version}
        refusal = verdict.unusable(gradient, finding, finished=self._finished, **of)
        return None if refusal is None else self._rejected(refusal, gradient, roster)

    def _decide(self, gradient: Gradient, roster: Roster, norm: float | None, answer: Answer | None) -> Receipt:
        aggregation = self._behaviour.aggregation.at(self._version)
        contribution = self._weigh(gradient, roster, aggregation.split(roster), norm)
        arrival = Arrival(contribution, self._pending, self._version, roster)
        decision = aggregation.decide(arrival)
        if not contribution.weighing.accept and isinstance(decision, Apply | Park):
            decision = verdict.too_stale(contribution, policy=self._behaviour.staleness.name, version=self._version)
        if gradient.volatile and isinstance(decision, Park):
            return self._decide_on_copy(gradient, roster, answer)
        learning_rate = self._learning_rate if gradient.learning_rate is None else gradient.learning_rate
        rate = self._rate(learning_rate)
        update_scale = self._update_scale(decision.parts) if isinstance(decision, Apply) else 1.0
        receipt = verdict.receipt_of(
            decision,
            arrival,
            shard_id=self.shard_id,
            epoch=self.epoch,
            rate=rate,
            update_scale=update_scale,
            waiting_for=verdict.waited_for(decision, arrival, aggregation),
        )
        reply = None if answer is None else answer.place(receipt, receipt.version_after)
        if self._recorder is not None:
            self._recorder.pushed(self.shard_id, gradient, receipt, roster)
        # Rate and momentum are the run's, not the gradient's: they hold even where the gradient is not needed.
        self._learning_rate = learning_rate
        if gradient.momentum is not None:
            self.hyperparameters = MappingProxyType(
                {**self.hyperparameters, self.rule.momentum_name: gradient.momentum}
            )
        if isinstance(decision, Apply):
            left_out = self._apply(decision.parts, rate=rate, update_scale=update_scale, reply=reply)
            receipt = verdict.telling(receipt, gradient, left_out=left_out)
        elif isinstance(decision, Park):
            self._pending = (*self._pending, contribution)
        elif isinstance(decision, Acknowledge):
            self._examples += gradient.example_count
        self._ledger.record(gradient.worker_id, gradient.incarnation, receipt)
        self._replied(reply, gradient.worker_id, written=isinstance(decision, Apply))
        return receipt

    def _decide_on_copy(self, gradient: Gradient, roster: Roster, answer: Answer | None) -> Receipt:
        """Decides on a gradient that has to wait, while its worker goes on writing where it lies."""
        private = gradient.private()
        finding = scan(private, shard_id=self.shard_id, shard_length=self.length)
        if finding.finite:
            return self._decide(private, roster, None, answer)
        receipt = self._rejected(verdict.not_finite(finding, private, shard_id=self.shard_id), private, roster)
        self._answer(answer, receipt, gradient.worker_id)
        return receipt

    def _answer(self, answer: Answer | None, receipt: Receipt, worker_id: str) -> None:
        """Gives the parameters that there are to whose push changed nothing."""
        if answer is not None:
            self._replied(answer.place(receipt, self._version), worker_id, written=False)

    def _replied(self, reply: Reply | None, worker_id: str, *, written: bool) -> None:
        if reply is None:
            return
        if not written:
            _kernels.encode_into(self._parameters, reply)
        if self._recorder is not None:
            self._recorder.pulled(self.shard_id, worker_id, self._version)

    def _weigh(self, gradient: Gradient, roster: Roster, split: float, norm: float | None) -> Contribution:
        behaviour = self._behaviour
        staleness = self._version - gradient.base_version
        context = WeighingContext(gradient.worker_id, roster.num_workers, self._version, split)
        weighing = behaviour.staleness.weigh(staleness, context)
        return Contribution(gradient, staleness, behaviour.clipping.clip(weighing, gradient, norm))

    def _rejected(self, refusal: Refuse, gradient: Gradient, roster: Roster) -> Receipt:
        return verdict.rejection(refusal, gradient, self._version, roster, shard_id=self.shard_id, epoch=self.epoch)

    def _completed(self, roster: Roster) -> Apply | None:
        if self._finished or not self._pending:
            return None
        return self._behaviour.aggregation.at(self._version).complete(self._pending, self._version, roster)

    def _settled(self, behaviour: Behaviour) -> Apply | None:
        aggregation = self._behaviour.aggregation
        if self._finished or not self._pending or behaviour.aggregation == aggregation:
            return None
        return aggregation.at(self._version).settle(self._pending)

    def _rate(self, learning_rate: float) -> float:
        return learning_rate * self._behaviour.rate_factor(self._version, self._examples)

    def _update_scale(self, parts: Sequence[Part]) -> float:
        return self._behaviour.staleness.update_scale([part.contribution.staleness for part in parts])

    def _update(self, decision: Apply) -> None:
        """Makes an update that no push brought about."""
        rate, update_scale = self._rate(self._learning_rate), self._update_scale(decision.parts)
        self._apply(decision.parts, rate=rate, update_scale=update_scale)

    def _apply(self, parts: Sequence[Part], *, rate: float, update_scale: float, reply: Reply | None = None) -> int:
        """Makes an update; returns how many numbers were left out, as they were finite no more."""
        target = Target(self._parameters, self._slots, self.rule, self.hyperparameters, rate, self._version)
        left_out = apply_update(target, parts, update_scale=update_scale, reply=reply)
        self._version += 1
        for part in parts:
            self._examples += part.contribution.gradient.example_count
        if self._pending:
            applied = {id(part.contribution) for part in parts}
            self._pending = tuple(waiting for waiting in self._pending if id(waiting) not in applied)
        if self._recorder is not None:
            update = Update(self._version, rate, update_scale, tuple(parts))
            self._recorder.updated(self.shard_id, update, self._readable)
        return left_out
