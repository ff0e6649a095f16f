"""A pass over a data set: its portions, their leases, and the workers that hold them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from pyps.work.portions import Division, PendingPortions, Portion
from pyps_wire.work_pb2 import AwaitPassReply

# A worker's speed is measured over this number of its last portions, so that a change shows soon.
PORTIONS_MEASURED = 4


@dataclass(slots=True, eq=False)
class Lease:
    """A portion that a worker has, with the number of the lease."""

    pass_: int
    portion: Portion
    worker: WorkerProgress
    # In seconds of the run's clock.
    leased_at: float
    # Whether another worker had the portion then.
    copy: bool


@dataclass(frozen=True, slots=True)
class Delivered:
    """A delivered portion, with its lease, and its worker."""

    pass_: int
    portion: Portion
    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to a claim or a delivery, with the reason of a refusal."""

    accepted: bool
    message: str = ""


@dataclass(slots=True, eq=False)
class WorkerProgress:
    """A worker of the queue. Times are in seconds of the run's clock."""

    worker_id: str
    incarnation: int
    # Of all passes, by the lease's number.
    leases: dict[int, Lease] = field(default_factory=dict)
    # The pass of its last portion, and the portion after that one; None before its first.
    pass_: int = -1
    next_portion: int | None = None
    # The first example that it got in that pass and in the pass before. It begins the next pass with the same data.
    began: int | None = None
    began_before: int | None = None
    # The time of its last claim or delivery.
    gave_at: float | None = None
    # The examples of its last portions, and the seconds that they took.
    measured: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=PORTIONS_MEASURED))

    @property
    def speed(self) -> float:
        """Examples per second over its last portions; 0 if unknown."""
        seconds = sum(seconds for _, seconds in self.measured)
        return sum(examples for examples, _ in self.measured) / seconds if seconds > 0 else 0.0

    def enter(self, pass_: int) -> None:
        """Begin a pass, unless the worker is in it."""
        if pass_ != self.pass_:
            self.began_before, self.began = self.began if self.began is not None else self.began_before, None
            self.pass_, self.next_portion = pass_, None

    def computed(self, leases: Sequence[Lease], *, now: float) -> None:
        """Measure the time for portions. They may have been leased while the worker computed others."""
        leased_at = min(lease.leased_at for lease in leases)
        began = leased_at if self.gave_at is None else max(leased_at, self.gave_at)
        if now > began:
            self.measured.append((sum(lease.portion.num_examples for lease in leases), now - began))
        self.gave_at = now


class WorkPass:
    """A pass: each portion is pending, with workers, or delivered. Guarded by its queue's lock."""

    def __init__(
        self,
        number: int,
        division: Division,
        *,
        batch_size: int = 0,
        copies_max: int = 1,
        portions_per_stage: int = 0,
        pending: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        self.number = number
        self.division = division
        self.batch_size = batch_size
        self.portions_per_stage = portions_per_stage
        self._copies_max = copies_max
        self.pending = PendingPortions([(0, division.num_portions)] if pending is None else pending)
        # By portion, its leases, in order.
        self.running: dict[int, list[Lease]] = {}
        # Portions delivered, by worker.
        self.done_by: Counter[str] = Counter()
        # By portion, how often it was taken from a worker that was too slow.
        self.times_stalled: Counter[int] = Counter()
        # With a coordinator: by portion, the lease whose claim was accepted; by delivered portion, its stage; by first
        # portion of a stage, the sum of losses.
        self.claimed: dict[int, Lease] = {}
        self.stage_of: dict[int, int] = {}
        self._losses: dict[int, float] = {}

    @property
    def num_done(self) -> int:
        return self.division.num_portions - len(self.pending) - len(self.running)

    @property
    def done(self) -> bool:
        """True when every portion is delivered."""
        return not self.pending and not self.running

    def awaited(self) -> Iterator[Lease]:
        """Return the leases that the pass waits for; of a claimed portion, only the claimed one."""
        leases = chain.from_iterable(self.running.values())
        return (lease for lease in leases if self.claimed.get(lease.portion.portion_id, lease) is lease)

    def copy_for(self, worker: WorkerProgress) -> int | None:
        """Return the running portion that a worker should compute too: with the fewest leases, then the oldest."""
        candidates = [
            (len(leases), min(lease.leased_at for lease in leases), portion_id)
            for portion_id, leases in self.running.items()
            if portion_id not in self.claimed
            and len(leases) < self._copies_max
            and all(lease.worker is not worker for lease in leases)
        ]
        return min(candidates)[2] if candidates else None

    def give(self, lease: Lease) -> None:
        if not lease.copy:
            self.pending.remove(lease.portion.portion_id)
        self.running.setdefault(lease.portion.portion_id, []).append(lease)

    def give_back(self, lease: Lease) -> None:
        """End a lease without a result. The portion becomes pending, unless other workers have it."""
        if self.claimed.get(lease.portion.portion_id) is lease:
            del self.claimed[lease.portion.portion_id]
        leases = self.running[lease.portion.portion_id]
        leases.remove(lease)
        if not leases:
            del self.running[lease.portion.portion_id]
            self.pending.add(lease.portion.portion_id)

    def stage(self, leases: Sequence[Lease], *, stage_id: int, loss_sum: float) -> None:
        for lease in leases:
            del self.claimed[lease.portion.portion_id]
            self.stage_of[lease.portion.portion_id] = stage_id
        self._losses[min(lease.portion.portion_id for lease in leases)] = loss_sum

    def deliver(self, lease: Lease) -> list[Lease]:
        """Mark a portion as delivered; return all its leases, including this one."""
        self.done_by[lease.worker.worker_id] += 1
        self.times_stalled.pop(lease.portion.portion_id, None)
        return self.running.pop(lease.portion.portion_id)

    def unfinished(self) -> list[tuple[int, int]]:
        """Return all portions that are not delivered, as ranges."""
        return PendingPortions([*self.pending.runs, *((portion, portion + 1) for portion in self.running)]).runs

    def outcome(self) -> AwaitPassReply:
        if not self.done:
            return AwaitPassReply(complete=False)
        loss_sum = 0.0
        for _, loss in sorted(self._losses.items()):
            loss_sum += loss
        return AwaitPassReply(
            complete=True,
            loss_sum=loss_sum,
            example_count=self.division.num_examples,
            # A portion whose loss is not finite has no stage.
            stage_ids=[stage for first in sorted(self._losses) if (stage := self.stage_of[first])],
        )
