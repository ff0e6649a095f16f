"""What a gradient's age costs it.

A policy gives two numbers, because scaling a gradient does nothing durable under an adaptive rule:
`rate_scale` multiplies the step, `weight` the gradient itself, slots included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pyps_wire.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Weighing:
    """A policy's verdict on one gradient."""

    accept: bool = True
    weight: float = 1.0
    rate_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class WeighingContext:
    """What a policy may know beside the staleness."""

    worker_id: str
    num_workers: int
    # Updates of the shard so far.
    version: int


class StalenessPolicy(Protocol):
    """Weighs gradients by their staleness.

    Called under a shard's lock, from many shards at once: a policy must be quick, must not block and must
    hold no state of its own.
    """

    name: str

    def weigh(self, staleness: int, context: WeighingContext) -> Weighing:
        """Returns what is to be made of a gradient that is `staleness` updates old."""
        ...


class NoPenalty:
    """Takes every gradient as if it were fresh."""

    name = "none"

    def weigh(self, staleness: int, context: WeighingContext) -> Weighing:
        return Weighing()


class Divide:
    """Divides the step by the staleness: alpha0 / max(1, tau) (Zhang et al. 2016, staleness-aware ASGD)."""

    name = "divide"

    def weigh(self, staleness: int, context: WeighingContext) -> Weighing:
        staleness_divisor = max(1, staleness)
        return Weighing(rate_scale=1.0 / staleness_divisor)


POLICIES: dict[str, type[StalenessPolicy]] = {"none": NoPenalty, "divide": Divide}


def parse(text: str) -> StalenessPolicy:
    """Returns the policy that the text names."""
    if text not in POLICIES:
        raise BadRequest(f"staleness policy {text!r} is unknown; expected one of {', '.join(sorted(POLICIES))}")
    return POLICIES[text]()
