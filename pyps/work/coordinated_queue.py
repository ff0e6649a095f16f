"""Coordinated work (Sandblaster, Dean et al. 2012, section 4.2): a coordinator begins each pass.

Near the end of a pass several workers get the same portion. A result must be claimed before it counts, and of several
copies the first to be claimed wins; the paper has portions and backup copies, the claim is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pyps.work.answers import Ended, LeaseAnswer, NothingNow, PassOutcome, Verdict
from pyps.work.pass_queue import PassQueue, WorkPass
from pyps.work.portions import Cut
from pyps.work.workers import Lease, WaitingCalls, Wake, WorkerProgress
from pyps_wire.errors import BadRequest, StateLost, Superseded


class StagedPass(WorkPass):
    """A pass whose portions are claimed, and staged before they are delivered. Guarded by its queue's lock."""

    def __init__(self, number: int, cut: Cut, *, copies_max: int, portions_per_stage: int) -> None:
        super().__init__(number, cut)
        self.portions_per_stage = portions_per_stage
        self._copies_max = copies_max
        # By portion, whose result counts.
        self.claimed: dict[int, Lease] = {}
        # By delivered portion, its stage; and by first portion of a stage, the sum of its losses.
        self.stage_of: dict[int, int] = {}
        self._losses: dict[int, float] = {}

    def held(self) -> Iterator[Lease]:
        return (lease for lease in super().held() if self.claimed.get(lease.portion_id, lease) is lease)

    def copy_for(self, worker: WorkerProgress) -> int | None:
        """The portion that a worker had best compute once more beside others; None where there is none.

        Of those that are with the fewest workers it is the one that was given out the longest ago.
        """
        candidates = [
            (len(leases), min(lease.leased_at for lease in leases), portion_id)
            for portion_id, leases in self.running.items()
            if portion_id not in self.claimed
            and len(leases) < self._copies_max
            and all(lease.worker is not worker for lease in leases)
        ]
        return min(candidates)[2] if candidates else None

    def give_back(self, lease: Lease) -> None:
        if self.claimed.get(lease.portion_id) is lease:
            del self.claimed[lease.portion_id]
        super().give_back(lease)

    def stage(self, leases: Sequence[Lease], *, stage_id: int, loss_sum: float) -> None:
        """Records the stage of portions that are delivered together."""
        for lease in leases:
            del self.claimed[lease.portion_id]
            self.stage_of[lease.portion_id] = stage_id
        self._losses[min(lease.portion_id for lease in leases)] = loss_sum

    def outcome(self) -> PassOutcome:
        """What the pass came to."""
        if not self.done:
            return PassOutcome(complete=False)
        loss_sum = 0.0
        for _, loss in sorted(self._losses.items()):
            loss_sum += loss
        stage_ids = tuple(stage for first in sorted(self._losses) if (stage := self.stage_of[first]))
        return PassOutcome(True, loss_sum, self.cut.num_examples, stage_ids)


class CoordinatedQueue(PassQueue[StagedPass]):
    """Passes that a coordinator begins. Guarded by its queue's lock."""

    def __init__(self, calls: WaitingCalls, *, first_lease: int) -> None:
        super().__init__(calls, first_lease=first_lease)
        # The number of the present coordinator, and of the one that began the present pass.
        self._coordinator_epoch = 0
        self._begun_by = 0

    # What workers ask.

    def answer(self, worker: WorkerProgress, number: int | None, *, passes: int, now: float) -> LeaseAnswer:
        if self.end_reason is not None:
            return Ended(self.number, self.end_reason)
        portion_id = None
        if self.present is not None:
            portion_id = self.choose(self.present, worker)
            if portion_id is None:
                portion_id = self.present.copy_for(worker)
                self.counts.copies += portion_id is not None
        if self.present is None or portion_id is None:
            return NothingNow(self.number)
        return self.give(self.present, worker, portion_id, now=now)

    def claim(self, worker: WorkerProgress, lease_id: int, *, now: float) -> Verdict:
        """Whether a portion's result counts."""
        lease, reason = self.find(worker, lease_id)
        if lease is None:
            return Verdict(False, reason)
        work_pass = self.pass_of(lease)
        winner = work_pass.claimed.get(lease.portion_id)
        if winner is lease:
            return Verdict(True)
        worker.computed([lease], now=now)
        if winner is not None:
            self.counts.wasted += 1
            reason = f"portion {lease.portion_id} was claimed by worker {winner.worker.worker_id!r} before"
            work_pass.give_back(lease)
            self.end_lease(lease, why=reason)
            return Verdict(False, reason)
        work_pass.claimed[lease.portion_id] = lease
        self.counts.stolen += lease.copy and len(work_pass.running[lease.portion_id]) > 1
        return Verdict(True)

    def objection(self, leases: Sequence[Lease]) -> str:
        for lease in leases:
            if self.pass_of(lease).claimed.get(lease.portion_id) is not lease:
                return f"lease {lease.lease_id} was not claimed: claim it before its gradient enters a sum"
        return ""

    def take_in(
        self, worker: WorkerProgress, leases: Sequence[Lease], *, stage_id: int, loss_sum: float, now: float
    ) -> None:
        if not stage_id and math.isfinite(loss_sum):
            raise BadRequest(
                f"worker {worker.worker_id!r} delivers a finite loss without a stage: stage the gradients first"
            )
        self.passes[0].stage(leases, stage_id=stage_id, loss_sum=loss_sum)
        super().take_in(worker, leases, stage_id=stage_id, loss_sum=loss_sum, now=now)

    def delivered_before(self, worker: WorkerProgress, lease_id: int, *, stage_id: int) -> bool:
        if not super().delivered_before(worker, lease_id, stage_id=stage_id):
            return False
        done = self.deliveries[lease_id]
        # In the same stage, as far as that is remembered.
        of_present = self.present is not None and done.pass_ == self.number
        return not of_present or self.passes[0].stage_of[done.portion.portion_id] == stage_id

    # What the coordinator asks, which is Superseded where another came after it. These take the lock themselves.

    def attach(self, coordinator_epoch: int) -> None:
        """Makes a coordinator the only one, in place of any before it; work that one of those had ended goes on."""
        with self._calls.settled():
            if self._require_latest(coordinator_epoch):
                if self.end_reason is not None:
                    self._calls.note("work goes on: another coordinator came", ended=self.end_reason)
                self._coordinator_epoch, self.end_reason = coordinator_epoch, None
                # Those before it that wait hear that they are.
                self._calls.wake_all()

    def begin_pass(
        self,
        pass_: int,
        *,
        coordinator_epoch: int,
        num_portions: int,
        copies_max: int,
        portions_per_stage: int,
        scalars: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Begins a pass in place of the present one, whose leases end. The same one again does nothing.

        BadRequest for a pass that does not come after those before.
        """
        with self._calls.settled():
            spec = self.require_open()
            sizes = {"num_portions": num_portions, "copies_max": copies_max, "portions_per_stage": portions_per_stage}
            for name, value in {"pass": pass_, **sizes}.items():
                if value < 1:
                    raise BadRequest(f"{name} is {value}; expected 1 at least")
            came_back = self._require_latest(coordinator_epoch)
            if self.end_reason is not None and not came_back:
                raise BadRequest(f"pass {pass_} cannot begin: the coordinator has ended the work ({self.end_reason})")
            if self.present is not None and (self.number, self._begun_by) == (pass_, coordinator_epoch):
                return
            # A worker that has parameters of a pass by that number would compute on them.
            if pass_ <= self.number:
                raise BadRequest(f"pass {pass_} cannot begin: pass {self.number} has begun before; take a higher one")
            cut = Cut.by_number(spec.num_examples, num_portions)
            self._coordinator_epoch = self._begun_by = coordinator_epoch
            self.end_reason, self.scalars = None, dict(scalars)
            for worker in self.workers.values():
                worker.leases.clear()
            self.begin(StagedPass(pass_, cut, copies_max=copies_max, portions_per_stage=portions_per_stage))
            self._calls.wake_all()

    def await_pass(self, pass_: int, *, coordinator_epoch: int, wake: Wake | None = None) -> PassOutcome:
        """What a pass came to. While it goes on, `wake` is kept and called once, when it is worth asking again.

        Pass 0 never begins: who awaits it is woken when the data set is opened. BadRequest for another
        pass than the present one, StateLost for one that was under way when the server's checkpoint was written.
        """
        with self._calls.settled():
            self._require_latest(coordinator_epoch)
            outcome = PassOutcome(complete=False)
            if pass_:
                if pass_ != self.number:
                    raise BadRequest(f"pass {pass_} is awaited, but the present one is {self.number}: await that")
                if self.present is None:
                    raise StateLost(
                        f"pass {pass_} is not under way: the server came back from a checkpoint, and what was staged"
                        " is gone; begin another pass"
                    )
                outcome = self.present.outcome()
            if wake is not None and not outcome.complete:
                self._calls.watch(wake)
            return outcome

    def end(self, *, coordinator_epoch: int, message: str) -> None:
        """Ends the work: every worker that asks hears so."""
        with self._calls.settled():
            self._require_latest(coordinator_epoch)
            if self.end_reason is None:
                self._calls.note("work ended", reason=message)
            self._coordinator_epoch, self.end_reason = coordinator_epoch, message
            self._calls.wake_all()

    def _require_latest(self, coordinator_epoch: int) -> bool:
        """Whether the coordinator is a later one than those before; Superseded for an earlier one."""
        present = self._coordinator_epoch
        if coordinator_epoch < present:
            raise Superseded(f"coordinator {coordinator_epoch} was followed by coordinator {present}: stop this one")
        return coordinator_epoch > present

    # Where it stands. Of a pass that was under way nothing is kept but its number: what was staged is gone.

    def waits_for(self, worker_id: str) -> tuple[str, ...]:
        if self.spec is not None and (self.present is None or self.present.done):
            return ("the coordinator",)
        return super().waits_for(worker_id)

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"coordinator_epoch": self._coordinator_epoch}

    def restore(self, plain: Mapping[str, Any]) -> None:
        super().restore(plain)
        self._coordinator_epoch = int(plain["coordinator_epoch"])
