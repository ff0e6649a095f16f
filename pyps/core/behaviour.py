"""A shard's behaviour: protocol, staleness policy, schedule, clipping and growth of the minibatch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypedDict

from pyps.core import protocols
from pyps.core import schedule as schedules
from pyps.core import staleness as policies
from pyps.core.gradient import Gradient, norm_of
from pyps.core.protocols.base import Aggregation
from pyps.core.schedule import BatchGrowth, Schedule
from pyps.core.staleness import StalenessPolicy, Weighing
from pyps.core.warmup import Staged, WarmUp
from pyps_wire.errors import InvalidArgument

CONSTANT = Schedule()


class BehaviourTexts(TypedDict):
    """The texts of a behaviour in configurations, checkpoints and logs."""

    protocol: str
    warmup: str
    staleness: str
    schedule: str
    clip_norm: float
    batch_growth: str
    # The examples of an epoch, for a schedule or batch growth that counts epochs; 0 for not known.
    epoch_examples: int


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a shard treats gradients; one object serves all shards."""

    aggregation: Aggregation
    staleness: StalenessPolicy
    schedule: Schedule = CONSTANT
    # The norm that pushes are clipped to; 0 for not at all.
    clip_norm: float = 0.0
    batch_growth: BatchGrowth | None = None
    epoch_examples: int = 0
    # Whether `rate_factor` is always 1.
    constant_rate: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_norm < math.inf:
            raise InvalidArgument(
                f"clip_norm is {self.clip_norm}; expected the norm that pushes are clipped to, or 0 to clip none"
            )
        object.__setattr__(self, "constant_rate", not self.schedule.terms and self.batch_growth is None)

    @classmethod
    def parse(
        cls,
        *,
        protocol: str = "async",
        warmup: str = "",
        staleness: str = "none",
        schedule: str = "constant",
        clip_norm: float = 0.0,
        batch_growth: str = "",
        epoch_examples: int = 0,
    ) -> Behaviour:
        """Return the behaviour that the texts name; raise InvalidArgument, which names the wrong text, for others."""
        aggregation = protocols.parse(protocol)
        return cls(
            aggregation=Staged(WarmUp.parse(warmup), aggregation) if warmup else aggregation,
            staleness=policies.parse(staleness),
            schedule=schedules.parse(schedule, epoch_examples=epoch_examples),
            clip_norm=clip_norm,
            batch_growth=BatchGrowth.parse(batch_growth, epoch_examples=epoch_examples) if batch_growth else None,
            epoch_examples=epoch_examples,
        )

    @property
    def texts(self) -> BehaviourTexts:
        """The arguments from which `parse` makes an equal behaviour."""
        staged = self.aggregation if isinstance(self.aggregation, Staged) else None
        return {
            "protocol": staged.main.text if staged else self.aggregation.text,
            "warmup": staged.warm_up.text if staged else "",
            "staleness": self.staleness.text,
            "schedule": self.schedule.text,
            "clip_norm": self.clip_norm,
            "batch_growth": self.batch_growth.text if self.batch_growth else "",
            "epoch_examples": self.epoch_examples,
        }

    @property
    def counts_epochs(self) -> bool:
        """True if the schedule or the batch growth depends on epochs."""
        return self.batch_growth is not None or any(term.epoch_examples for term in self.schedule.terms)

    def clip(self, weighing: Weighing, gradient: Gradient, norm: float | None, shard_length: int) -> Weighing:
        # The gradient itself is scaled, as by torch.nn.utils.clip_grad_norm_, not the step.
        norm = norm_of(gradient, shard_length) if norm is None else norm
        if norm <= self.clip_norm:
            return weighing
        return weighing._replace(weight=weighing.weight * (self.clip_norm / norm))

    def rate_factor(self, version: int, examples: int) -> float:
        """Return the factor of the base rate after so many updates and examples."""
        growth = self.batch_growth.rate_factor(examples) if self.batch_growth else 1.0
        return self.schedule.factor(version, examples) * growth
