"""What a work queue answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyps.work.portions import DataSpec, Portion


@dataclass(frozen=True, slots=True)
class Leased:
    """A portion is the asker's until it delivers it or is gone."""

    # The pass that the portion is of: an earlier one than was asked for where that one is not done.
    pass_: int
    portion: Portion
    # What the asker is likely to get next; not held.
    next: Portion | None
    # Examples in a minibatch; 0 leaves it to the worker.
    batch_size: int
    # Claimed portions whose gradients are summed in one stage; 0 where gradients are pushed.
    portions_per_stage: int

    @property
    def lease_id(self) -> int:
        """The number of this lease."""
        return self.portion.lease_id


@dataclass(frozen=True, slots=True)
class NothingNow:
    """Others have what there is, or no pass has begun: ask again later."""

    pass_: int


@dataclass(frozen=True, slots=True)
class PassDone:
    """Every portion of the pass asked for is delivered."""

    pass_: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The coordinator has ended the work."""

    pass_: int
    message: str


LeaseAnswer = Leased | NothingNow | PassDone | Ended


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a claim or a delivery counts, all of it or none, and why not."""

    counts: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """What a pass came to; all but `complete` only where that is true."""

    complete: bool
    # Added in float64 in the order of portions, whenever they came.
    loss_sum: float = 0.0
    example_count: int = 0
    # In the order of their first portions; none for what was not finite.
    stage_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Delivered:
    """Who delivered a portion."""

    pass_: int
    # With the lease under which it was delivered.
    portion: Portion
    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """One worker's part in the present pass."""

    worker_id: str
    # Portions delivered, and held now, be it of later passes.
    done: int
    running: int
    # As measured over its last portions; 0 while unknown.
    examples_per_second: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the work stands."""

    # None before a worker named a data set.
    spec: DataSpec | None
    pass_: int
    # Since the run began: see Counts.
    copies: int
    stolen: int
    lost: int
    wasted: int
    passes_done: int
    # Portions of the present pass: all, delivered, with workers (backup copies counted once), with nobody.
    num_portions: int = 0
    done: int = 0
    running: int = 0
    pending: int = 0
    # Delivered portions of later passes, which free workers have begun.
    ahead: int = 0
    workers: tuple[WorkerShare, ...] = ()
    deliveries: tuple[Delivered, ...] = ()
    # Of a coordinator: whether it has ended the work, and its own figures.
    ended: bool = False
    scalars: Mapping[str, float] = field(default_factory=dict)
