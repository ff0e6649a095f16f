"""The arithmetic of an update: what a gradient does to the parameters and to the slots beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from pyps import _kernels
from pyps.core.arrays import Floats, aligned_zeros
from pyps_wire.errors import UnsupportedOptimizer

Slots = dict[str, Floats]


class WeightedGradient(NamedTuple):
    """One gradient of an update's sum: encoded numbers, their codec, and what they are multiplied by."""

    payload: bytes | memoryview
    codec: int
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A setting of a rule: any finite float32 from `minimum` up."""

    default: float
    minimum: float = 0.0


class UpdateRule(Protocol):
    """Turns a gradient into an update.

    `apply` is called under a shard's lock, from many shards at once, once for every stretch of an update: a
    rule holds no state but what is in the slots, and reads nothing outside the given stretch.
    """

    name: str
    # True where the step does not grow with the gradient, so that only the rate can scale it.
    adaptive: bool
    slot_names: tuple[str, ...]
    settings: Mapping[str, Hyperparameter]

    def make_slots(self, length: int, hyperparameters: Mapping[str, float]) -> Slots:
        """Returns the slots of a shard that has had no update."""
        ...

    def apply(
        self,
        parameters: Floats,
        slots: Slots,
        gradients: Sequence[WeightedGradient],
        *,
        rate: float,
        version: int,
        hyperparameters: Mapping[str, float],
    ) -> None:
        """Updates parameters and slots in place by g = f0 * g0 + f1 * g1 + ..., in float32, in this order.

        `version` counts the shard's updates before this one. `rate` is the step size, in which schedules and
        staleness are accounted for; the learning rate among the hyperparameters is not read.
        """
        ...


class Sgd:
    """theta -= alpha * g."""

    name = "sgd"
    adaptive = False
    slot_names: tuple[str, ...] = ()
    settings: Mapping[str, Hyperparameter] = {"learning_rate": Hyperparameter(default=0.001)}

    def make_slots(self, length: int, hyperparameters: Mapping[str, float]) -> Slots:
        return {}

    def apply(
        self,
        parameters: Floats,
        slots: Slots,
        gradients: Sequence[WeightedGradient],
        *,
        rate: float,
        version: int,
        hyperparameters: Mapping[str, float],
    ) -> None:
        _kernels.sgd(parameters, *_summed(gradients, parameters.size), rate=rate)


class Adagrad:
    """s += g * g; theta -= gamma * g / (sqrt(s) + eps) (Dean et al. 2012, section 4.1).

    The sum holds the current gradient; the root is the paper's (a public note lost it).
    """

    name = "adagrad"
    adaptive = True
    slot_names: tuple[str, ...] = ("accumulator",)
    settings: Mapping[str, Hyperparameter] = {
        "learning_rate": Hyperparameter(default=0.01),
        "eps": Hyperparameter(default=1e-10),
        "initial_accumulator_value": Hyperparameter(default=0.0),
    }

    def make_slots(self, length: int, hyperparameters: Mapping[str, float]) -> Slots:
        accumulator = aligned_zeros(length)
        accumulator.fill(hyperparameters["initial_accumulator_value"])
        return {"accumulator": accumulator}

    def apply(
        self,
        parameters: Floats,
        slots: Slots,
        gradients: Sequence[WeightedGradient],
        *,
        rate: float,
        version: int,
        hyperparameters: Mapping[str, float],
    ) -> None:
        gradient, codec = _summed(gradients, parameters.size)
        _kernels.adagrad(parameters, slots["accumulator"], gradient, codec, rate=rate, eps=hyperparameters["eps"])


class AddDelta:
    """theta += scale * delta: how locally trained parameters' delta is applied, whatever the run's rule.

    The worker's own optimizer has set the size of the step already, so no learning rate enters and no slot
    changes.
    """

    name = "add_delta"
    adaptive = False
    slot_names: tuple[str, ...] = ()
    settings: Mapping[str, Hyperparameter] = {}

    def make_slots(self, length: int, hyperparameters: Mapping[str, float]) -> Slots:
        return {}

    def apply(
        self,
        parameters: Floats,
        slots: Slots,
        gradients: Sequence[WeightedGradient],
        *,
        rate: float,
        version: int,
        hyperparameters: Mapping[str, float],
    ) -> None:
        _kernels.sgd(parameters, *_summed(gradients, parameters.size), rate=-rate)


# The rules that a run may be given.
RULES: dict[str, UpdateRule] = {rule.name: rule for rule in (Sgd(), Adagrad())}


def find(name: str) -> UpdateRule:
    """Returns the rule of that name."""
    if name not in RULES:
        raise UnsupportedOptimizer(f"update rule {name!r} is unknown; this server has {', '.join(sorted(RULES))}")
    return RULES[name]


def validate(rule: UpdateRule | str, hyperparameters: Mapping[str, float]) -> dict[str, float]:
    """Returns the rule's hyperparameters, the missing ones at their defaults.

    Raises UnsupportedOptimizer for a rule, a setting or a value that cannot be.
    """
    rule = find(rule) if isinstance(rule, str) else rule
    unknown = sorted(set(hyperparameters) - set(rule.settings))
    if unknown:
        raise UnsupportedOptimizer(
            f"{rule.name} has no setting {', '.join(map(repr, unknown))}; it has {', '.join(rule.settings)}"
        )
    settled = {name: setting.default for name, setting in rule.settings.items()} | {
        name: float(value) for name, value in hyperparameters.items()
    }
    for name, value in settled.items():
        minimum = rule.settings[name].minimum
        # Written so that NaN fails; the kernels compute in float32.
        if not minimum <= value <= float(np.finfo(np.float32).max):
            raise UnsupportedOptimizer(
                f"{rule.name}'s {name} is {value}; expected a finite float32 of at least {minimum:g}"
            )
    return settled


def _summed(gradients: Sequence[WeightedGradient], length: int) -> tuple[bytes | memoryview, int]:
    if len(gradients) == 1 and gradients[0].factor == 1.0:
        return gradients[0].payload, gradients[0].codec
    total = aligned_zeros(length)
    for payload, codec, factor in gradients:
        _kernels.sgd(total, payload, codec, rate=-factor)
    return total.tobytes(), _kernels.FLOAT32
