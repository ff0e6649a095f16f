"""Staleness policies: how the age of a gradient reduces its effect.

A policy gives two numbers, because an adaptive rule cancels a scaled gradient: `rate_scale` multiplies the step,
`weight` the gradient itself, slots included. To add one: a frozen dataclass whose fields are its settings, and its name
in POLICIES.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

from pyps.core import spec
from pyps_wire.errors import InvalidArgument


class Weighing(NamedTuple):
    """A policy's verdict on one gradient."""

    accept: bool = True
    weight: float = 1.0
    rate_scale: float = 1.0


class StalenessPolicy(ABC):
    """Weighs gradients by their staleness, the tau of the papers.

    Called under a shard's lock, from many shards at once: a policy must be quick, must not block, must hold no state
    and must give equal answers to equal arguments, since a shard's log is replayed through it.
    """

    __slots__ = ()

    name: ClassVar[str]
    # Whether `update_scale` may return another number than 1.
    scales_updates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for setting in fields(self):  # type: ignore[arg-type]
            value = getattr(self, setting.name)
            if not 0 <= value < math.inf:
                raise InvalidArgument(
                    f"staleness policy {self.name!r}: {setting.name} is {value:g}; "
                    "expected a finite number that is not negative"
                )

    @abstractmethod
    def weigh(self, staleness: int, split: float) -> Weighing:
        """Return the weights of a gradient that is `staleness` updates old, or that it is refused.

        `split` is the papers' n: how many updates the protocol makes of one gradient from each worker.
        """

    def update_scale(self, stalenesses: Sequence[int]) -> float:
        """Return the factor of the step of an update whose gradients have these stalenesses."""
        return 1.0

    @property
    def text(self) -> str:
        return spec.spell(self.name, self)


@dataclass(frozen=True, slots=True)
class NoPenalty(StalenessPolicy):
    """Takes every gradient as if it were fresh: alpha0."""

    name: ClassVar[str] = "none"

    def weigh(self, staleness: int, split: float) -> Weighing:
        return Weighing()


@dataclass(frozen=True, slots=True)
class Divide(StalenessPolicy):
    """Divides the step by the staleness: alpha0 / max(1, tau) (Zhang et al. 2016, staleness-aware ASGD)."""

    name: ClassVar[str] = "divide"

    def weigh(self, staleness: int, split: float) -> Weighing:
        return Weighing(rate_scale=1.0 / max(1, staleness))


@dataclass(frozen=True, slots=True)
class DividePlusOne(StalenessPolicy):
    """Divides the step by one more than the staleness: alpha0 / (tau + 1)."""

    name: ClassVar[str] = "divide_plus_one"

    def weigh(self, staleness: int, split: float) -> Weighing:
        return Weighing(rate_scale=1.0 / (staleness + 1))


@dataclass(frozen=True, slots=True)
class ConstantShare(StalenessPolicy):
    """Divides every step by the protocol's split: alpha0 / n (Gupta et al. 2016, n-softsync's constant rate).

    n is the staleness to be expected: L under async, L/c under softsync, 1 behind a barrier.
    """

    name: ClassVar[str] = "constant"

    def weigh(self, staleness: int, split: float) -> Weighing:
        return Weighing(rate_scale=1.0 / max(1.0, split))


@dataclass(frozen=True, slots=True)
class PerUpdate(StalenessPolicy):
    """Divides an update's step by the mean staleness of its gradients: alpha0 / max(1, <sigma>) (Gupta et al. 2016)."""

    name: ClassVar[str] = "per_update"
    scales_updates: ClassVar[bool] = True

    def weigh(self, staleness: int, split: float) -> Weighing:
        return Weighing()

    def update_scale(self, stalenesses: Sequence[int]) -> float:
        return len(stalenesses) / max(len(stalenesses), sum(stalenesses)) if stalenesses else 1.0


@dataclass(frozen=True, slots=True)
class Exponential(StalenessPolicy):
    """Lets the step decay with the staleness: alpha0 * exp(-beta * tau) (Chan and Lane 2014, who give no beta)."""

    name: ClassVar[str] = "exponential"
    beta: float = 0.1

    def weigh(self, staleness: int, split: float) -> Weighing:
        return Weighing(rate_scale=math.exp(-self.beta * staleness))


@dataclass(frozen=True, slots=True)
class Polynomial(StalenessPolicy):
    """Lets the step fall as a power of the staleness: alpha0 * (1 + tau)^-a (FedAsync, Xie et al. 2019).

    Takes no gradient that is more than `rounds_max` rounds old; 0 for no such bound. A round is a gradient from each
    worker, which is `split` updates.
    """

    name: ClassVar[str] = "polynomial"
    a: float = 0.5
    rounds_max: float = 0.0

    def weigh(self, staleness: int, split: float) -> Weighing:
        accept = not self.rounds_max or staleness <= self.rounds_max * max(1.0, split)
        return Weighing(accept=accept, rate_scale=(1.0 + staleness) ** -self.a)


@dataclass(frozen=True, slots=True)
class Hinge(StalenessPolicy):
    """Spares gradients up to a staleness of b: alpha0, then alpha0 / (a * (tau - b) + 1) (FedAsync)."""

    name: ClassVar[str] = "hinge"
    a: float = 10.0
    b: float = 4.0

    def weigh(self, staleness: int, split: float) -> Weighing:
        return Weighing(rate_scale=1.0 / (self.a * max(0.0, staleness - self.b) + 1.0))


@dataclass(frozen=True, slots=True)
class Drop(StalenessPolicy):
    """Takes no gradient that is more than `spread` updates old (Rudra's `SendReceive`, spread 10)."""

    name: ClassVar[str] = "drop"
    spread: int = 10

    def weigh(self, staleness: int, split: float) -> Weighing:
        return Weighing(accept=staleness <= self.spread)


POLICIES: dict[str, type[StalenessPolicy]] = {
    kind.name: kind
    for kind in (NoPenalty, Divide, DividePlusOne, ConstantShare, PerUpdate, Exponential, Polynomial, Hinge, Drop)
}

# The papers' short names.
ALIASES = {
    "inv": "divide",
    "inv1": "divide_plus_one",
    "const_n": "constant",
    "exp": "exponential",
    "poly": "polynomial",
}


def parse(text: str) -> StalenessPolicy:
    """Return the policy of a text such as "divide" or "hinge:a=10,b=4".

    Raise InvalidArgument for an unknown name, an unknown setting or a value out of range.
    """
    name, colon, settings = text.strip().partition(":")
    return spec.make(f"{ALIASES.get(name, name)}{colon}{settings}", POLICIES, what="staleness policy")
