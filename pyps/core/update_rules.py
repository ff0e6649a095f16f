"""The arithmetic of an update: what its gradients do to the parameters and to the slots beside them.

In every rule g is the weighted sum of the update's gradients, alpha the rate, and, where weight decay is not
zero, g += weight_decay * theta before all else: once per update, on the parameters as they are then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from pyps import _kernels
from pyps.core.arrays import Floats, aligned_zeros
from pyps.core.momentum_rules import HeavyBall, Momentum, Nesterov
from pyps.core.plan import Reply
from pyps.core.update_rule import WEIGHT_DECAY, Hyperparameter, Slots, UpdateRule, WeightedGradient
from pyps_wire.errors import UnsupportedOptimizer

__all__ = ["RULES", "Slots", "UpdateRule", "WeightedGradient", "find", "validate"]


class Sgd(UpdateRule):
    """theta -= alpha * g."""

    name = "sgd"
    settings: ClassVar[Mapping[str, Hyperparameter]] = {
        "learning_rate": Hyperparameter(default=0.001),
        "weight_decay": WEIGHT_DECAY,
    }

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
        return _kernels.sgd(
            parameters, gradients, rate=rate, weight_decay=hyperparameters["weight_decay"], reply=reply, guarded=guarded
        )


class Adagrad(UpdateRule):
    """s += g * g; theta -= alpha * g / (sqrt(s) + eps) (Dean et al. 2012, section 4.1).

    The sum holds the current gradient; the root is the paper's (a public note lost it). With lr_decay, alpha
    is divided by 1 + lr_decay * version.
    """

    name = "adagrad"
    adaptive = True
    slot_names = ("accumulator",)
    settings: ClassVar[Mapping[str, Hyperparameter]] = {
        "learning_rate": Hyperparameter(default=0.01),
        "eps": Hyperparameter(default=1e-10),
        "initial_accumulator_value": Hyperparameter(default=0.0),
        "lr_decay": Hyperparameter(default=0.0),
        "weight_decay": WEIGHT_DECAY,
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
        reply: Reply | None = None,
        guarded: bool = False,
    ) -> int:
        return _kernels.adagrad(
            parameters,
            slots["accumulator"],
            gradients,
            rate=rate / (1.0 + version * hyperparameters["lr_decay"]),
            eps=hyperparameters["eps"],
            weight_decay=hyperparameters["weight_decay"],
            reply=reply,
            guarded=guarded,
        )


class Rmsprop(UpdateRule):
    """s = decay * s + (1 - decay) * g * g; theta -= alpha * g / (sqrt(s) + eps)."""

    name = "rmsprop"
    adaptive = True
    slot_names = ("square_average",)
    settings: ClassVar[Mapping[str, Hyperparameter]] = {
        "learning_rate": Hyperparameter(default=0.01),
        "decay": Hyperparameter(default=0.99, below=1.0),
        "eps": Hyperparameter(default=1e-8),
        "weight_decay": WEIGHT_DECAY,
    }

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
        return _kernels.rmsprop(
            parameters,
            slots["square_average"],
            gradients,
            rate=rate,
            decay=hyperparameters["decay"],
            eps=hyperparameters["eps"],
            weight_decay=hyperparameters["weight_decay"],
            reply=reply,
            guarded=guarded,
        )


class Adam(UpdateRule):
    """m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g * g; theta -= alpha * m' / (sqrt(v') + eps).

    m' = m / (1 - beta1^t) and v' = v / (1 - beta2^t), where t counts the shard's updates with this one; eps
    stands after the correction, where torch has it (Kingma and Ba 2015, algorithm 1).
    """

    name = "adam"
    adaptive = True
    slot_names = (
        "first_moment",
        "second_moment",
    )
    momentum_name = "beta1"
    settings: ClassVar[Mapping[str, Hyperparameter]] = {
        "learning_rate": Hyperparameter(default=0.001),
        "beta1": Hyperparameter(default=0.9, below=1.0),
        "beta2": Hyperparameter(default=0.999, below=1.0),
        "eps": Hyperparameter(default=1e-8),
        "weight_decay": WEIGHT_DECAY,
    }

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
        first_correction, second_correction = _bias_corrections(version, hyperparameters)
        return _kernels.adam(
            parameters,
            slots["first_moment"],
            slots["second_moment"],
            gradients,
            rate=rate / first_correction,
            beta1=hyperparameters["beta1"],
            beta2=hyperparameters["beta2"],
            root_scale=1.0 / math.sqrt(second_correction),
            eps=hyperparameters["eps"],
            weight_decay=hyperparameters["weight_decay"],
            reply=reply,
            guarded=guarded,
        )


class Adamw(UpdateRule):
    """theta -= alpha * weight_decay * theta, then as Adam without decay (Loshchilov and Hutter 2019).

    The decay meets neither moments nor their root, so it is the same for parameters of every gradient.
    """

    name = "adamw"
    adaptive = True
    slot_names = (
        "first_moment",
        "second_moment",
    )
    momentum_name = "beta1"
    settings: ClassVar[Mapping[str, Hyperparameter]] = {
        "learning_rate": Hyperparameter(default=0.001),
        "beta1": Hyperparameter(default=0.9, below=1.0),
        "beta2": Hyperparameter(default=0.999, below=1.0),
        "eps": Hyperparameter(default=1e-8),
        "weight_decay": Hyperparameter(default=0.01),
    }

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
        first_correction, second_correction = _bias_corrections(version, hyperparameters)
        return _kernels.adamw(
            parameters,
            slots["first_moment"],
            slots["second_moment"],
            gradients,
            rate=rate / first_correction,
            beta1=hyperparameters["beta1"],
            beta2=hyperparameters["beta2"],
            root_scale=1.0 / math.sqrt(second_correction),
            eps=hyperparameters["eps"],
            weight_decay=rate * hyperparameters["weight_decay"],
            reply=reply,
            guarded=guarded,
        )


class AddDelta(UpdateRule):
    """theta += g: how deltas of locally trained parameters are applied, whatever the run's rule.

    The worker's own optimizer has set the size of the step already, so no learning rate enters and no slot
    changes.
    """

    name = "add_delta"
    settings: ClassVar[Mapping[str, Hyperparameter]] = {}

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
        return _kernels.sgd(parameters, gradients, rate=-rate, reply=reply, guarded=guarded)


def _bias_corrections(version: int, hyperparameters: Mapping[str, float]) -> tuple[float, float]:
    """Returns what Adam's moments are divided by: they started at zero."""
    updates = version + 1
    return 1.0 - hyperparameters["beta1"] ** updates, 1.0 - hyperparameters["beta2"] ** updates


# The rules that a run may be given.
RULES: dict[str, UpdateRule] = {
    rule.name: rule for rule in (Sgd(), Momentum(), HeavyBall(), Nesterov(), Adagrad(), Rmsprop(), Adam(), Adamw())
}


def find(name: str) -> UpdateRule:
    """Returns the rule of that name."""
    if name not in RULES:
        raise UnsupportedOptimizer(f"update rule {name!r} is unknown; this server has {', '.join(sorted(RULES))}")
    return RULES[name]


def require_known(rule: UpdateRule, names: Iterable[str]) -> None:
    """Raises UnsupportedOptimizer for the name of a setting that the rule does not have."""
    unknown = sorted(set(names) - set(rule.settings))
    if unknown:
        raise UnsupportedOptimizer(
            f"{rule.name} has no setting {', '.join(map(repr, unknown))}; it has {', '.join(rule.settings)}"
        )


def validate(rule: UpdateRule | str, hyperparameters: Mapping[str, float]) -> dict[str, float]:
    """Returns the rule's hyperparameters, the missing ones at their defaults.

    Raises UnsupportedOptimizer for a rule, a setting or a value that cannot be.
    """
    rule = find(rule) if isinstance(rule, str) else rule
    require_known(rule, hyperparameters)
    settled = {name: setting.default for name, setting in rule.settings.items()} | {
        name: float(value) for name, value in hyperparameters.items()
    }
    for name, value in settled.items():
        setting = rule.settings[name]
        # Written so that NaN fails; the kernels compute in float32.
        if not (setting.minimum <= value <= float(np.finfo(np.float32).max) and value < setting.below):
            bound = f" and less than {setting.below:g}" if setting.below < math.inf else ""
            raise UnsupportedOptimizer(
                f"{rule.name}'s {name} is {value}; expected a finite float32 of at least {setting.minimum:g}{bound}"
            )
    return settled
