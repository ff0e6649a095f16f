"""Answers of a work queue."""

from __future__ import annotations

from dataclasses import dataclass

from pyps.work.portions import Portion


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
class Delivered:
    """A delivered portion, with its lease, and its worker."""

    pass_: int
    portion: Portion
    worker_id: str
    incarnation: int
