"""One pass over a data set: which portion is with whom.

A portion is pending, then with one worker or, near the end of a coordinator's pass, with several; of those the first
to claim it wins. It ends as delivered, and goes back where whoever has it is gone (algorithm of Dean et al. 2012,
section 4.2: portions, backup copies; the claim is ours).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pyps.work.answers import Delivered, PassOutcome
from pyps.work.crew import Hand
from pyps.work.portions import Cut, PendingPortions, Portion

# Leases whose end is remembered, to be told to a worker that comes back with one.
ENDS_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Lease:
    """One giving-out of a portion to a worker."""

    lease_id: int
    pass_: int
    portion_id: int
    worker_id: str
    # In seconds of the run's clock.
    leased_at: float
    # Whether another worker had the portion then.
    copy: bool


@dataclass(slots=True)
class Task:
    """A portion that is with somebody."""

    # By lease, in order of giving-out.
    computing: dict[int, Lease] = field(default_factory=dict)
    # Of these, whose result counts.
    winner: Lease | None = None


class WorkPass:
    """A pass that goes on. Guarded by its queue's lock."""

    def __init__(
        self,
        number: int,
        cut: Cut,
        *,
        batch_size: int = 0,
        copies_max: int = 1,
        portions_per_stage: int = 0,
        pending: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        self.number = number
        self.cut = cut
        self.batch_size = batch_size
        self.copies_max = copies_max
        # 0 where gradients are pushed, and nothing is claimed.
        self.portions_per_stage = portions_per_stage
        self.pending = PendingPortions([(0, cut.num_portions)] if pending is None else pending)
        # By portion.
        self.tasks: dict[int, Task] = {}
        self._leases: dict[int, Lease] = {}
        self._ends: dict[int, str] = {}
        # How often each portion was taken away from a worker that was too slow.
        self._times_stalled: dict[int, int] = {}
        # What was delivered under one stage, by its first portion: the stage and the sum of the losses.
        self._stages: dict[int, tuple[int, float]] = {}
        self._stage_of: dict[int, int] = {}
        self._example_count = 0
        # Portions delivered, by worker.
        self.done_by: Counter[str] = Counter()

    @property
    def num_portions(self) -> int:
        """All portions."""
        return self.cut.num_portions

    @property
    def num_done(self) -> int:
        """Delivered portions."""
        return self.num_portions - len(self.pending) - len(self.tasks)

    @property
    def done(self) -> bool:
        """Whether every portion is delivered."""
        return not self.pending and not self.tasks

    # Leases.

    def lease(self, lease_id: int) -> Lease | None:
        """A lease that holds, None for others."""
        return self._leases.get(lease_id)

    def end_of(self, lease_id: int) -> str:
        """Why a lease ended, in words; empty where it did not, or is forgotten."""
        return self._ends.get(lease_id, "")

    def leases_of(self, worker_id: str) -> list[Lease]:
        """The leases that a worker holds."""
        return [lease for lease in self._leases.values() if lease.worker_id == worker_id]

    def held(self) -> Iterator[Lease]:
        """The leases whose ends the pass waits for: all but those of portions that another has claimed."""
        for task in self.tasks.values():
            yield from [task.winner] if task.winner is not None else task.computing.values()

    def holders(self) -> set[str]:
        """The workers that the pass waits for."""
        return {lease.worker_id for lease in self.held()}

    def choose(self, hand: Hand, *, others_next: set[int]) -> int | None:
        """The pending portion that a worker had best take; None where none is pending.

        Consecutive portions go to the same worker, and pass after pass the same ones: their data may lie with it.
        """
        pending = self.pending
        if not pending:
            return None
        if hand.next_portion is not None and hand.next_portion in pending:
            return hand.next_portion
        if hand.next_portion is None and hand.began_before is not None:
            first = self.cut.containing(hand.began_before)
            if first in pending:
                return first
        start, stop = pending.longest()
        # Where somebody walks towards the run, it keeps the first half of it.
        return (start + stop) // 2 if start in others_next else start

    def choose_copy(self, worker_id: str) -> int | None:
        """The portion that a worker had best compute once more beside others; None where there is none.

        Of those that are with the fewest workers it is the one that was given out the longest ago.
        """
        candidates = [
            (len(task.computing), min(lease.leased_at for lease in task.computing.values()), portion_id)
            for portion_id, task in self.tasks.items()
            if task.winner is None
            and len(task.computing) < self.copies_max
            and all(lease.worker_id != worker_id for lease in task.computing.values())
        ]
        return min(candidates)[2] if candidates else None

    def give(self, portion_id: int, hand: Hand, *, lease_id: int, now: float) -> Lease:
        """Gives a portion to a worker, beside those that have it."""
        task = self.tasks.setdefault(portion_id, Task())
        lease = Lease(lease_id, self.number, portion_id, hand.worker_id, now, copy=bool(task.computing))
        if not lease.copy:
            self.pending.remove(portion_id)
        task.computing[lease_id] = self._leases[lease_id] = lease
        return lease

    def give_back(self, lease: Lease, *, why: str) -> None:
        """Ends a lease without a result. The portion stays with those that compute it too, else it is pending."""
        task = self.tasks[lease.portion_id]
        self._end(lease, task, why)
        if task.winner is lease:
            task.winner = None
        if not task.computing:
            del self.tasks[lease.portion_id]
            self.pending.add(lease.portion_id)

    def beaten(self, lease: Lease) -> str:
        """Ends a lease that lost against another, and says against which."""
        task = self.tasks[lease.portion_id]
        assert task.winner is not None
        why = f"portion {lease.portion_id} was claimed by worker {task.winner.worker_id!r} before"
        self._end(lease, task, why)
        return why

    def deliver(self, leases: Iterable[Lease], *, stage_id: int, loss_sum: float) -> int:
        """Takes results in. Returns how many workers still compute one of these portions, in vain."""
        in_vain, portion_ids = 0, []
        for lease in leases:
            task = self.tasks.pop(lease.portion_id)
            for other in list(task.computing.values()):
                delivered = f"portion {other.portion_id} was delivered by worker {lease.worker_id!r} before"
                self._end(other, task, "" if other is lease else delivered)
                in_vain += other is not lease
            portion_ids.append(lease.portion_id)
            self.done_by[lease.worker_id] += 1
            self._example_count += self.portion(lease).num_examples
            self._times_stalled.pop(lease.portion_id, None)
        if self.portions_per_stage:
            self._stages[min(portion_ids)] = (stage_id, loss_sum)
            self._stage_of.update(dict.fromkeys(portion_ids, stage_id))
        return in_vain

    # Stalls.

    def stalled(self, lease: Lease) -> None:
        """Notes that a portion was taken away from a worker for being too slow: the next may take twice as long."""
        self._times_stalled[lease.portion_id] = self._times_stalled.get(lease.portion_id, 0) + 1

    def patience(self, lease: Lease, *, seconds: float) -> float:
        """For how long a worker may give nothing while it holds that lease and others wait."""
        return math.ldexp(seconds, min(self._times_stalled.get(lease.portion_id, 0), 32))

    # What it comes to.

    def portion(self, lease: Lease) -> Portion:
        """What was given out."""
        return self.cut.portion(lease.portion_id, lease_id=lease.lease_id)

    def outcome(self) -> PassOutcome:
        """What the pass came to."""
        if not self.done:
            return PassOutcome(complete=False)
        loss_sum = 0.0
        for _, stage in sorted(self._stages.items()):
            loss_sum += stage[1]
        stage_ids = tuple(stage_id for _, (stage_id, _) in sorted(self._stages.items()) if stage_id)
        return PassOutcome(True, loss_sum, self._example_count, stage_ids)

    def stage_of(self, delivered: Delivered, *, default: int) -> int:
        """The stage that has the gradient of a delivered portion; `default` where that is not known any more."""
        if delivered.pass_ != self.number or not self.portions_per_stage:
            return default
        return self._stage_of[delivered.portion.portion_id]

    def unfinished(self) -> list[tuple[int, int]]:
        """All portions that are not delivered, as runs."""
        return PendingPortions([*self.pending.runs, *((task, task + 1) for task in self.tasks)]).runs

    def _end(self, lease: Lease, task: Task, why: str) -> None:
        del task.computing[lease.lease_id], self._leases[lease.lease_id]
        if why:
            self._ends[lease.lease_id] = why
            if len(self._ends) > ENDS_REMEMBERED:
                del self._ends[next(iter(self._ends))]
