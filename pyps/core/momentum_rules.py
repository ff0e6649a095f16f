"""Update rules whose steps have momentum; their place among the others is in update_rules.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pyps import _kernels
from pyps.core.arrays import Floats
from pyps.core.plan import Reply
from pyps.core.update_rule import WEIGHT_DECAY, Hyperparameter, Slots, UpdateRule, WeightedGradient

_MOMENTUM = Hyperparameter(default=0.9, below=1.0)


class Momentum(UpdateRule):
    """v = m * v + (1 - dampening) * g; theta -= alpha * v: heavy-ball momentum in torch's form.

    A shard's first update takes v = g without dampening, as torch does. A new rate moves along the old
    velocity too.
    """

    name = "momentum"
    slot_names = ("velocity",)
    momentum_name = "momentum"
    settings: ClassVar[Mapping[str, Hyperparameter]] = {
        "learning_rate": Hyperparameter(default=0.001),
        "momentum": _MOMENTUM,
        "dampening": Hyperparameter(default=0.0),
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
        if hyperparameters["momentum"] == 0.0:
            return _without_momentum(parameters, gradients, hyperparameters, rate=rate, reply=reply, guarded=guarded)
        return _kernels.momentum(
            parameters,
            slots["velocity"],
            gradients,
            rate=rate,
            momentum=hyperparameters["momentum"],
            dampening=hyperparameters["dampening"] if version > 0 else 0.0,
            weight_decay=hyperparameters["weight_decay"],
            reply=reply,
            guarded=guarded,
        )


class HeavyBall(UpdateRule):
    """v = m * v + alpha * g; theta -= v: heavy-ball momentum with the rate inside the velocity.

    The form for updates whose gradients carry rates of their own, as in Zhang et al. 2016 (staleness-aware
    ASGD): what a gradient was worth when it came stays so, whatever the rate is later.
    """

    name = "heavy_ball"
    slot_names = ("velocity",)
    momentum_name = "momentum"
    settings: ClassVar[Mapping[str, Hyperparameter]] = {
        "learning_rate": Hyperparameter(default=0.001),
        "momentum": _MOMENTUM,
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
        return _kernels.heavy_ball(
            parameters,
            slots["velocity"],
            gradients,
            rate=rate,
            momentum=hyperparameters["momentum"],
            weight_decay=hyperparameters["weight_decay"],
            reply=reply,
            guarded=guarded,
        )


class Nesterov(UpdateRule):
    """v = m * v + g; theta -= alpha * (g + m * v): Nesterov's momentum in torch's form.

    The parameters held and served are the look-ahead point of Sutskever et al. 2013, at which the next
    gradient is wanted: with u = -alpha * v and a constant alpha they are phi + m * u, where
    u' = m * u - alpha * grad(phi + m * u) and phi' = phi + u'.
    """

    name = "nesterov"
    slot_names = ("velocity",)
    momentum_name = "momentum"
    settings: ClassVar[Mapping[str, Hyperparameter]] = {
        "learning_rate": Hyperparameter(default=0.001),
        "momentum": _MOMENTUM,
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
        if hyperparameters["momentum"] == 0.0:
            return _without_momentum(parameters, gradients, hyperparameters, rate=rate, reply=reply, guarded=guarded)
        return _kernels.nesterov(
            parameters,
            slots["velocity"],
            gradients,
            rate=rate,
            momentum=hyperparameters["momentum"],
            weight_decay=hyperparameters["weight_decay"],
            reply=reply,
            guarded=guarded,
        )


def _without_momentum(
    parameters: Floats,
    gradients: Sequence[WeightedGradient],
    hyperparameters: Mapping[str, float],
    *,
    rate: float,
    reply: Reply | None,
    guarded: bool,
) -> int:
    """Steps along the gradient and leaves the velocity as it is, as torch does where a schedule is at 0."""
    weight_decay = hyperparameters["weight_decay"]
    return _kernels.sgd(parameters, gradients, rate=rate, weight_decay=weight_decay, reply=reply, guarded=guarded)
