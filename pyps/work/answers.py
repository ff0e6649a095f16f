"""Answers of a work queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyps.work.portions import DataSpec, Portion


@dataclass(frozen=True, slots=True)
class Leased:
    """A portion belongs to the caller until it delivers it or is lost."""

    # The pass of the portion: an earlier one than requested if that is not done.
    pass_: int
    portion: Portion
    # The portion that the caller will probably get next; not leased.
    next: Portion | None
    # Examples in a minibatch; 0 leaves it to the worker.
    batch_size: int
    # Claimed portions whose gradients are summed in one stage; 0 if gradients are pushed.
    portions_per_stage: int

    @property
    def lease_id(self) -> int:
        """The number of this lease."""
        return self.portion.lease_id


@dataclass(frozen=True, slots=True)
class NothingNow:
    """Other workers have all portions, or no pass has begun: ask again later."""

    pass_: int


@dataclass(frozen=True, slots=True)
class PassDone:
    """Every portion of the requested pass is delivered."""

    pass_: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The coordinator has ended the work."""

    pass_: int
    message: str


LeaseAnswer = Leased | NothingNow | PassDone | Ended


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a claim or a delivery is accepted, all of it or none, and why not."""

    accepted: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """The result of a pass; the other fields are set only if it is complete."""

    complete: bool
    # Added in float64 in the order of portions.
    loss_sum: float = 0.0
    example_count: int = 0
    # In the order of their first portions; none for portions whose loss was not finite.
    stage_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Delivered:
    """A delivered portion, with its lease, and its worker."""

    pass_: int
    portion: Portion
    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """One worker's part of the current pass."""

    worker_id: str
    # Portions delivered, and held now, including those of later passes.
    done: int
    running: int
    # Measured over its last portions; 0 if unknown.
    examples_per_second: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the work is."""

    # None before a worker opened a data set.
    spec: DataSpec | None
    pass_: int
    # Since the run began: see Counts.
    copies: int
    stolen: int
    lost: int
    wasted: int
    passes_done: int
    # Portions of the current pass: all, delivered, with workers (backup copies counted once), with no worker.
    num_portions: int = 0
    done: int = 0
    running: int = 0
    pending: int = 0
    # Delivered portions of later passes.
    ahead: int = 0
    workers: tuple[WorkerShare, ...] = ()
    deliveries: tuple[Delivered, ...] = ()
    # Of a coordinator: whether it has ended the work, and its own figures.
    ended: bool = False
    scalars: Mapping[str, float] = field(default_factory=dict)
