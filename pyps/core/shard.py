"""A shard: a stretch of the model's parameters under one mutex, and all that happens to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

from pyps import _kernels
from pyps.core.aggregation import Aggregation, Apply, Arrival, Contribution, Decision, Drop, Park, Refuse
from pyps.core.arrays import Floats, aligned_copy, read_only
from pyps.core.gradient import Gradient, require_fitting
from pyps.core.ledger import FORGOTTEN, Ledger, LedgerState
from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.recorder import Recorder
from pyps.core.staleness import StalenessPolicy, WeighingContext
from pyps.core.update import Target, apply_update, rate_of
from pyps.core.update_rules import Slots, UpdateRule, validate
from pyps_wire.errors import BadRequest, WrongSize

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardState:
    """A copy of all that a shard is, taken at one version."""

    version: int
    parameters: Floats
    slots: Slots
    ledger: LedgerState
    # Gradients with a PENDING receipt, in order of arrival.
    pending: tuple[Contribution, ...] = ()


class Shard:
    """Parameters, slots, version and ledger of one shard. Every method may be called from any thread.

    A push is judged in a fixed order: whether it fits (else an error is raised), whether it was answered
    before, finished, epoch, base version, finite numbers, protocol, staleness policy. Until the last has
    agreed nothing changes.
    """

    def __init__(
        self,
        shard_id: int,
        parameters: Floats,
        *,
        rule: UpdateRule,
        hyperparameters: Mapping[str, float],
        aggregation: Aggregation,
        staleness: StalenessPolicy,
        epoch: int = 0,
        version: int = 0,
        slots: Mapping[str, Floats] | None = None,
        ledger: Ledger | None = None,
        pending: tuple[Contribution, ...] = (),
        recorder: Recorder | None = None,
    ) -> None:
        """Copies the parameters, and the slots where a restored shard brings them."""
        self.shard_id = shard_id
        self.epoch = epoch
        self.length = parameters.size
        self.rule = rule
        self.hyperparameters: Mapping[str, float] = MappingProxyType(validate(rule, hyperparameters))
        self._aggregation = aggregation
        self._staleness = staleness
        self._recorder = recorder
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._version = version
        self._finished = False
        self._parameters = aligned_copy(parameters)
        self._readable = read_only(self._parameters)
        self._slots = self._first_slots(slots)
        self._ledger = Ledger() if ledger is None else ledger
        self._pending = pending
        self._waiters: list[_Waiter] = []

    def push(self, gradient: Gradient, *, num_workers: int) -> Receipt:
        """Handles a gradient and returns its receipt; a push that was answered before gets the first answer.

        Raises BadRequest (WrongSize where sizes differ) when the gradient could never be applied here. A push
        that is refused, either way, changes nothing.
        """
        require_fitting(gradient, shard_id=self.shard_id, shard_length=self.length)
        # The scan takes as long as an update; the payload cannot change, so it needs no lock.
        non_finite_index = _kernels.first_non_finite(gradient.payload, gradient.codec)
        with self._lock:
            receipt = self._answered(gradient, num_workers)
            if receipt is None:
                receipt = self._refusal(gradient, num_workers, non_finite_index)
            if receipt is None:
                receipt = self._decide(gradient, num_workers)
            reached = self._take_reached()
        for waiter in reached:
            waiter.callback()
        return receipt

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

    @property
    def version(self) -> int:
        """The number of updates applied so far."""
        return self._version

    @property
    def finished(self) -> bool:
        """Whether pushes are refused because the run has ended."""
        return self._finished

    @property
    def slots_bytes(self) -> int:
        """The size of the optimizer's arrays."""
        return sum(slot.nbytes for slot in self._slots.values())

    @property
    def num_receipts(self) -> int:
        """The number of receipts that the ledger holds."""
        with self._lock:
            return len(self._ledger)

    def when_version(self, min_version: int, callback: Callable[[], None]) -> Callable[[], bool]:
        """Calls back once, as soon as the shard has that version, or is finished and never will.

        The call comes outside the lock: from the thread whose push (or `finish`) brought it about, or at
        once from this one where it holds already. It must be quick and must not raise. Returns a function
        that cancels the wait; its result is False when the call was made already or is on its way.
        """
        waiter = _Waiter(min_version, callback)
        with self._lock:
            waits = self._version < min_version and not self._finished
            if waits:
                self._waiters.append(waiter)
        if not waits:
            callback()

        def cancel() -> bool:
            with self._lock:
                still_waiting = waiter in self._waiters
                if still_waiting:
                    self._waiters.remove(waiter)
                return still_waiting

        return cancel

    def finish(self) -> None:
        """Refuses pushes from now on; answers to earlier pushes are still given. Reading goes on."""
        with self._lock:
            self._finished = True
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.callback()

    def state(self) -> ShardState:
        """Returns a copy of everything that a restored shard needs."""
        with self._lock:
            return ShardState(
                version=self._version,
                parameters=aligned_copy(self._parameters),
                slots={name: aligned_copy(slot) for name, slot in self._slots.items()},
                ledger=self._ledger.entries(),
                pending=self._pending,
            )

    # What follows is called under the lock.

    def _answered(self, gradient: Gradient, num_workers: int) -> Receipt | None:
        answer = self._ledger.lookup(gradient.worker_id, gradient.incarnation, gradient.sequence)
        if answer is FORGOTTEN:
            message = (
                f"shard {self.shard_id} no longer remembers push {gradient.sequence} of worker"
                f" {gradient.worker_id!r}, so it may have been applied; go on with a new push"
            )
            return self._rejected(gradient, num_workers, Reason.FORGOTTEN, message)
        return None if answer is None else replace(answer, duplicate=True)

    def _refusal(self, gradient: Gradient, num_workers: int, non_finite_index: int) -> Receipt | None:
        """Returns the receipt of a push that cannot be used and leaves no trace, not even in the ledger."""
        if self._finished:
            message = f"the run is finished; shard {self.shard_id} stays at version {self._version}"
            return self._rejected(gradient, num_workers, Reason.FINISHED, message)
        if gradient.epoch != self.epoch:
            message = (
                f"the gradient is of epoch {gradient.epoch}, shard {self.shard_id} of epoch {self.epoch}"
                " since the server was restored; pull again, then go on"
            )
            return self._rejected(gradient, num_workers, Reason.EPOCH, message)
        self._require_possible_version(gradient)
        if non_finite_index >= 0:
            message = (
                f"worker {gradient.worker_id!r} pushed NaN or infinity for parameter"
                f" {gradient.parameter_index(non_finite_index)} of shard {self.shard_id}; nothing of this"
                " gradient was applied to the shard"
            )
            return self._rejected(gradient, num_workers, Reason.NOT_FINITE, message)
        return None

    def _require_possible_version(self, gradient: Gradient) -> None:
        newest = max(gradient.base_version, gradient.newest_base_version or 0)
        if gradient.base_version < 0 or newest > self._version:
            wrong = gradient.base_version if gradient.base_version < 0 else newest
            raise BadRequest(
                f"worker {gradient.worker_id!r} pushed a gradient computed at version {wrong} of shard"
                f" {self.shard_id}, which is at version {self._version} of the same epoch; base_version is"
                " the version that came with the pulled parameters"
            )

    def _decide(self, gradient: Gradient, num_workers: int) -> Receipt:
        staleness = self._version - gradient.base_version
        context = WeighingContext(gradient.worker_id, num_workers, self._version)
        contribution = Contribution(gradient, staleness, self._staleness.weigh(staleness, context))
        decision = self._aggregation.decide(Arrival(contribution, self._pending, self._version, num_workers))
        if isinstance(decision, Apply | Park) and not contribution.weighing.accept:
            message = f"the policy {self._staleness.name!r} takes no gradient that is {staleness} updates old"
            decision = Refuse(Reason.STALE, message)
        receipt = self._receipt_of(decision, contribution, num_workers)
        if self._recorder is not None:
            self._recorder.pushed(self.shard_id, gradient, receipt)
        if isinstance(decision, Apply):
            self._apply(decision)
        elif isinstance(decision, Park):
            self._pending = (*self._pending, contribution)
        self._ledger.record(gradient.worker_id, gradient.incarnation, receipt)
        return receipt

    def _receipt_of(self, decision: Decision, contribution: Contribution, num_workers: int) -> Receipt:
        gradient, staleness = contribution.gradient, contribution.staleness
        if isinstance(decision, Refuse):
            return self._rejected(gradient, num_workers, decision.reason, decision.message, staleness)
        if isinstance(decision, Drop):
            return self._rejected(gradient, num_workers, Reason.DROPPED, decision.message, staleness)
        applied = isinstance(decision, Apply)
        share = decision.share_of(contribution) if isinstance(decision, Apply) else 1.0
        return Receipt(
            shard_id=self.shard_id,
            sequence=gradient.sequence,
            outcome=Outcome.APPLIED if applied else Outcome.PENDING,
            version_before=self._version,
            version_after=self._version + applied,
            staleness=staleness,
            rate=rate_of(contribution, rate=self.hyperparameters["learning_rate"]),
            rate_scale=contribution.weighing.rate_scale,
            weight=share * contribution.weighing.weight,
            num_workers=num_workers,
            epoch=self.epoch,
        )

    def _apply(self, decision: Apply) -> None:
        target = Target(
            self._parameters,
            self._slots,
            self.rule,
            self.hyperparameters,
            rate=self.hyperparameters["learning_rate"],
            version=self._version,
        )
        apply_update(target, decision.parts)
        self._version += 1
        applied = {id(part.contribution) for part in decision.parts}
        self._pending = tuple(waiting for waiting in self._pending if id(waiting) not in applied)

    def _rejected(
        self, gradient: Gradient, num_workers: int, reason: Reason, message: str, staleness: int = 0
    ) -> Receipt:
        return Receipt(
            shard_id=self.shard_id,
            sequence=gradient.sequence,
            outcome=Outcome.REJECTED,
            reason=reason,
            message=message,
            version_before=self._version,
            version_after=self._version,
            staleness=staleness,
            num_workers=num_workers,
            epoch=self.epoch,
        )

    def _take_reached(self) -> list[_Waiter]:
        if not self._waiters:
            return []
        reached = [waiter for waiter in self._waiters if waiter.min_version <= self._version]
        self._waiters = [waiter for waiter in self._waiters if waiter.min_version > self._version]
        return reached

    def _first_slots(self, restored: Mapping[str, Floats] | None) -> Slots:
        if restored is None:
            return self.rule.make_slots(self.length, self.hyperparameters)
        if set(restored) != set(self.rule.slot_names):
            raise BadRequest(
                f"shard {self.shard_id} was given the slots {sorted(restored)}; {self.rule.name} has"
                f" {sorted(self.rule.slot_names)}"
            )
        for name, slot in restored.items():
            if slot.size != self.length:
                raise WrongSize(
                    f"shard {self.shard_id}: the slot {name!r} has {slot.size} values for {self.length} parameters"
                )
        return {name: aligned_copy(slot) for name, slot in restored.items()}


# Compared by identity: two waits for one version are two waits.
@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    min_version: int
    callback: Callable[[], None]
