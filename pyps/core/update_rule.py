"""What an update rule is; the rules themselves are in update_rules.py."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from pyps.core.arrays import Floats, aligned_zeros
from pyps.core.plan import Reply

Slots = dict[str, Floats]


class WeightedGradient(NamedTuple):
    """One gradient of an update's sum: encoded numbers, their codec, and what they are multiplied by."""

    payload: bytes | memoryview
    codec: int
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A setting of a rule: any finite float32 from `minimum` up that is less than `below`."""

    default: float
    minimum: float = 0.0
    below: float = math.inf


# The setting of that name, as nearly every rule has it.
WEIGHT_DECAY = Hyperparameter(default=0.0)


class UpdateRule(ABC):
    """Turns gradients into an update.

    `apply` is called under a shard's lock, from many shards at once, once for every stretch of an update: a
    rule holds no state but what is in the slots, and reads nothing outside the given stretch.
    """

    name: ClassVar[str]
    # True where the step does not grow with the gradient, so that only the rate can scale it.
    adaptive: ClassVar[bool] = False
    slot_names: ClassVar[tuple[str, ...]] = ()
    # The setting that a schedule may move beside the learning rate; empty where the rule has no momentum.
    momentum_name: ClassVar[str] = ""
    settings: ClassVar[Mapping[str, Hyperparameter]]

    def make_slots(self, length: int, hyperparameters: Mapping[str, float]) -> Slots:
        """Returns the slots of a shard that has had no update."""
        return {name: aligned_zeros(length) for name in self.slot_names}

    @abstractmethod
    def apply(
        self,
        parameters: Floats,
        slots: Slots,
        gradients: Sequence[WeightedGradient],
        *,
        rate: float,
        version: int,
        hyperparameters: Mapping[str, float],
        reply: Reply | None = None,
        guarded: bool = False,
    ) -> int:
        """Updates parameters and slots in place by g = f0 * g0 + f1 * g1 + ..., in float32, in this order.

        `version` counts the shard's updates before this one. `rate` is the step size, in which schedules and
        staleness are accounted for; the learning rate among the hyperparameters is not read. The new parameters
        are also written to `reply`.

        Returns how many numbers of gradients were left out: none unless `guarded`, which is for payloads that
        somebody may write to while they are read. Each block of such a gradient is copied and looked at again.
        """
