"""All that a work queue knows, and what becomes of a portion when somebody comes, gives or goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyps.work.answers import Delivered, Ended, LeaseAnswer, Leased, NothingNow, PassDone, Progress, WorkerProgress
from pyps.work.crew import Crew, Hand
from pyps.work.data_spec import DataSpec
from pyps.work.delivery_log import DeliveryLog
from pyps.work.portions import Cut
from pyps.work.waiting import Waiting
from pyps.work.work_pass import Lease, WorkPass
from pyps_wire.errors import BadRequest


@dataclass(slots=True)
class Counts:
    """What happened since the run began."""

    # Backup copies given out; portions that a backup copy finished first.
    copies: int = 0
    stolen: int = 0
    # Leases that ended because their workers died or gave nothing for too long.
    lost: int = 0
    # Results that were thrown away.
    wasted: int = 0
    passes_done: int = 0


class WorkState:
    """The state of a work queue. Guarded by its queue's lock; what is to be called after that is left in `due`."""

    def __init__(
        self,
        *,
        batch_size_of: Callable[[int], int],
        accumulate: Callable[[], int],
        epochs_ahead: Callable[[], int],
        first_lease: int,
    ) -> None:
        self._batch_size_of = batch_size_of
        self._accumulate = accumulate
        self._epochs_ahead = epochs_ahead
        self.spec: DataSpec | None = None
        # The present one and, where that is not complete, those that free workers have begun after it. None before
        # the first, and after a restore amid a coordinator's.
        self.passes: list[WorkPass] = []
        # Of the present pass, or of the last one where none goes on.
        self.number = 0
        self.crew = Crew()
        self.counts = Counts()
        self.log = DeliveryLog()
        self.next_lease = first_lease
        self.waiting = Waiting()
        self.coordinator_epoch = 0
        # The coordinator that began the present pass.
        self.begun_by = 0
        self.scalars: dict[str, float] = {}
        # Why the coordinator ended the work.
        self.end: str | None = None
        self.due: list[Callable[[], object]] = []

    # Passes.

    @property
    def work_pass(self) -> WorkPass | None:
        """The present pass."""
        return self.passes[0] if self.passes else None

    def pass_of(self, lease: Lease) -> WorkPass:
        """The pass of a lease that holds."""
        return self.passes[lease.pass_ - self.number]

    def begin_plain(self, spec: DataSpec, number: int) -> None:
        """Begins an epoch, cut as the server's settings are now; BadRequest where portions have no size."""
        batch_size = self._batch_size_of(number) or spec.batch_size
        portion_examples = spec.portion_examples or batch_size * max(1, self._accumulate())
        if not portion_examples:
            raise BadRequest(
                f"how large portions of the data set {spec.name!r} are is not known: name portion_examples or"
                " batch_size, or start the servers with --batch-growth"
            )
        work_pass = WorkPass(number, Cut.by_size(spec.num_examples, portion_examples), batch_size=batch_size)
        if self.passes and not self.passes[0].done:
            self.passes.append(work_pass)
        else:
            self.begin(work_pass)

    def begin(self, *passes: WorkPass) -> None:
        """Puts passes in place of the present one, whose leases end."""
        self.passes, self.number = list(passes), passes[0].number
        self.crew.forget_departed()
        self.log.begin_pass(self.number)

    # Who gets what.

    def answer(self, hand: Hand, number: int | None, *, passes: int, now: float) -> LeaseAnswer:
        """What a free worker that asks for that pass (None: the present one, or the next) is to do.

        `passes`: how many it goes through, 0 where that is not known.
        """
        spec, present = self.spec, self.work_pass
        assert spec is not None
        if self.end is not None:
            return Ended(self.number, self.end)
        if present is None or (spec.coordinated and present.done):
            return NothingNow(self.number)
        if not spec.coordinated:
            if number is not None and (number < present.number or (present.done and number == present.number)):
                return PassDone(number)
            if present.done:
                self.begin_plain(spec, present.number + 1)
        # Who asks for a later pass gets what is left of an earlier one, too: nobody else may come for it.
        last = max(self.number, min(self.number + self._epochs_ahead(), passes - 1))
        for number in range(self.number, last + 1):
            if number - self.number == len(self.passes):
                self.begin_plain(spec, number)
            work_pass = self.passes[number - self.number]
            leased = self._give(work_pass, hand, now=now)
            if leased is not None:
                return leased
            if work_pass.leases_of(hand.worker_id):
                # It can end the pass, or its part of it, by itself: alone, a worker never mixes two.
                break
        return NothingNow(self.number)

    def _give(self, work_pass: WorkPass, hand: Hand, *, now: float) -> Leased | None:
        """Gives a worker what it had best take of a pass; None where nothing is there for it."""
        if work_pass.pending or work_pass.copies_max > 1:
            hand.enter(work_pass.number)
        portion_id = work_pass.choose(hand, others_next=self._others_next(hand))
        if portion_id is None and work_pass.copies_max > 1:
            portion_id = work_pass.choose_copy(hand.worker_id)
            self.counts.copies += portion_id is not None
        if portion_id is None:
            return None
        lease = work_pass.give(portion_id, hand, lease_id=self.next_lease, now=now)
        self.next_lease += 1
        portion = work_pass.portion(lease)
        hand.next_portion = portion_id + 1
        if hand.began is None and not lease.copy:
            hand.began = portion.start
        following = work_pass.choose(hand, others_next=self._others_next(hand))
        return Leased(
            work_pass.number,
            portion,
            next=None if following is None else work_pass.cut.portion(following),
            batch_size=work_pass.batch_size,
            portions_per_stage=work_pass.portions_per_stage,
        )

    def _others_next(self, hand: Hand) -> set[int]:
        """The portions that other workers in the same pass walk towards."""
        return {
            other.next_portion
            for other in self.crew
            if other.next_portion is not None and other is not hand and other.pass_ == hand.pass_
        }

    # Who gives what.

    def lease_of(self, hand: Hand, lease_id: int) -> tuple[Lease | None, str]:
        """A worker's lease or, where it has none by that number, why. BadRequest for one that never was."""
        if not 0 < lease_id < self.next_lease:
            raise BadRequest(f"lease {lease_id} was never given out: send the lease_id of the portion that was leased")
        lease = next((lease for work_pass in self.passes if (lease := work_pass.lease(lease_id))), None)
        if lease is not None and lease.worker_id == hand.worker_id:
            return lease, ""
        if lease is not None:
            return None, f"lease {lease_id} is worker {lease.worker_id!r}'s, not {hand.worker_id!r}'s"
        delivered = self.log.get(lease_id)
        if delivered is not None:
            return None, f"lease {lease_id} was delivered by worker {delivered.worker_id!r} before"
        why = next((why for work_pass in self.passes if (why := work_pass.end_of(lease_id))), "")
        return None, why or f"lease {lease_id} ended with its pass, or the server was restored since"

    def delivered_before(self, hand: Hand, lease_id: int, *, stage_id: int) -> bool:
        """Whether this very worker delivered the lease, in the same stage as far as that is remembered."""
        done = self.log.get(lease_id)
        if done is None or (done.worker_id, done.incarnation) != (hand.worker_id, hand.incarnation):
            return False
        return self.work_pass is None or self.work_pass.stage_of(done, default=stage_id) == stage_id

    def unclaimed(self, leases: Sequence[Lease]) -> str:
        """What is wrong with leases that were not claimed, empty where all were."""
        assert self.work_pass is not None
        for lease in leases:
            if self.work_pass.tasks[lease.portion_id].winner is not lease:
                return f"lease {lease.lease_id} was not claimed: claim it before its gradient enters a sum"
        return ""

    def check_delivery(
        self, hand: Hand, leases: Sequence[Lease], *, stage_id: int, loss_sum: float, example_count: int
    ) -> None:
        """Raises BadRequest for what cannot be the result of these portions."""
        assert self.spec is not None
        expected = sum(self.pass_of(lease).portion(lease).num_examples for lease in leases)
        if example_count != expected:
            raise BadRequest(
                f"worker {hand.worker_id!r} delivers {example_count} examples, but its portions have {expected}:"
                " deliver whole portions"
            )
        if self.spec.coordinated and not stage_id and math.isfinite(loss_sum):
            raise BadRequest(
                f"worker {hand.worker_id!r} delivers a finite loss without a stage: stage the gradients first"
            )

    def take_in(self, hand: Hand, leases: Sequence[Lease], *, stage_id: int, loss_sum: float, now: float) -> None:
        """Counts portions as delivered."""
        assert self.spec is not None
        if not self.spec.coordinated:
            self.computed(hand, leases, now=now)
            # Who waited beside portions of its own may be free for the next pass now.
            self.due += self.waiting.leave(hand.worker_id)
        for work_pass in self.passes:
            of_pass = [lease for lease in leases if lease.pass_ == work_pass.number]
            if of_pass:
                for lease in of_pass:
                    portion = work_pass.portion(lease)
                    self.log.add(Delivered(work_pass.number, portion, hand.worker_id, hand.incarnation))
                self.counts.wasted += work_pass.deliver(of_pass, stage_id=stage_id, loss_sum=loss_sum)
        hand.gave_at = now
        while self.passes[0].done:
            self.counts.passes_done += 1
            self.due += self.waiting.all()
            if len(self.passes) == 1:
                break
            self.begin(*self.passes[1:])

    def computed(self, hand: Hand, leases: Sequence[Lease], *, now: float) -> None:
        """Notes that a worker has computed these portions, and how fast."""
        examples = sum(self.pass_of(lease).portion(lease).num_examples for lease in leases)
        hand.computed(examples, leased_at=min(lease.leased_at for lease in leases), now=now)
        hand.gave_at = now

    # What goes back.

    def give_back(self, lease: Lease, *, why: str) -> None:
        """Ends a lease without a result: somebody else may have its portion now."""
        self.pass_of(lease).give_back(lease, why=why)
        self.due += self.waiting.workers()

    def take_back_all(self, hand: Hand, *, why: str) -> int:
        """Ends all leases of a worker that is gone; returns how many."""
        leases = self.leases_of(hand)
        for lease in leases:
            self.give_back(lease, why=why)
        return len(leases)

    def take_back_unknown(self, hand: Hand, held: Collection[int]) -> None:
        """Ends the leases that their worker does not know of, and lets it begin with them again."""
        for lease in self.leases_of(hand):
            if lease.lease_id not in held:
                self.give_back(lease, why=f"worker {hand.worker_id!r} asked for work without a word of it")
                hand.enter(lease.pass_)
                hand.next_portion = lease.portion_id

    def leases_of(self, hand: Hand) -> list[Lease]:
        """The leases that a worker holds, of all passes."""
        return [lease for work_pass in self.passes for lease in work_pass.leases_of(hand.worker_id)]

    # Where it stands.

    def progress(self, *, deliveries: bool) -> Progress:
        """Where the work stands."""
        work_pass, counts = self.work_pass, self.counts
        return Progress(
            spec=self.spec,
            pass_=self.number,
            passes_done=counts.passes_done,
            num_portions=work_pass.num_portions if work_pass else 0,
            done=work_pass.num_done if work_pass else 0,
            running=len(work_pass.tasks) if work_pass else 0,
            pending=len(work_pass.pending) if work_pass else 0,
            ahead=sum(later.num_done for later in self.passes[1:]),
            copies=counts.copies,
            stolen=counts.stolen,
            lost=counts.lost,
            wasted=counts.wasted,
            ended=self.end is not None,
            workers=tuple(
                WorkerProgress(
                    hand.worker_id,
                    done=work_pass.done_by[hand.worker_id] if work_pass else 0,
                    running=len(self.leases_of(hand)),
                    examples_per_second=hand.speed,
                )
                for hand in self.crew.of_pass
            ),
            scalars=dict(self.scalars),
            deliveries=tuple(self.log) if deliveries else (),
        )

    # How it is kept.

    def to_json(self) -> dict[str, Any]:
        """All that a restored queue needs; portions that are with workers count as pending."""
        return {
            "spec": self.spec.to_json() if self.spec is not None else None,
            "pass": self.number,
            # From the present one on. What a coordinator's workers had staged is not kept: its pass begins anew.
            "plain": [
                {
                    "portion_examples": work_pass.cut.portion_examples,
                    "batch_size": work_pass.batch_size,
                    "unfinished": [list(run) for run in work_pass.unfinished()],
                }
                for work_pass in self.passes
                if self.spec is not None and not self.spec.coordinated
            ],
            "next_lease": self.next_lease,
            "coordinator_epoch": self.coordinator_epoch,
            "counts": {name: getattr(self.counts, name) for name in Counts.__slots__},
            "deliveries": self.log.to_json(),
        }

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Goes on where `to_json` stood."""
        spec = DataSpec.from_json(plain["spec"]) if plain["spec"] is not None else None
        # Checkpoints of before passes were begun ahead have one or none.
        kept_passes = [plain["plain"]] if isinstance(plain["plain"], dict) else plain["plain"] or []
        passes = []
        for number, kept in enumerate(kept_passes if spec is not None else [], start=int(plain["pass"])):
            assert spec is not None
            cut = Cut.by_size(spec.num_examples, int(kept["portion_examples"]))
            unfinished = [(int(start), int(stop)) for start, stop in kept["unfinished"]]
            passes.append(WorkPass(number, cut, batch_size=int(kept["batch_size"]), pending=unfinished))
        counts, log = Counts(**plain["counts"]), DeliveryLog.from_json(plain["deliveries"])
        self.spec, self.passes, self.number = spec, passes, int(plain["pass"])
        self.next_lease = max(self.next_lease, int(plain["next_lease"]))
        self.coordinator_epoch = int(plain["coordinator_epoch"])
        self.counts, self.log = counts, log
