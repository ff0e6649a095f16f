"""Update rules: how the gradients of an update change a shard's parameters and slots.

A rule is a row of `_ROWS` and a formula in csrc/kernel_rules.h. In every rule g is the weighted sum of the update's
gradients and alpha the rate. With weight decay, g += weight_decay * theta comes first, once per update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np

from pyps import _kernels
from pyps.core.arrays import Floats, aligned_zeros
from pyps.core.gradient import FLOAT32_MAX, PayloadKind, Reply
from pyps_wire.codecs import Codec
from pyps_wire.errors import UnsupportedOptimizer

Slots = dict[str, Floats]
# One gradient of an update's sum: encoded numbers, their codec, and the factor that multiplies them.
WeightedGradient = tuple[bytes | memoryview, Codec, float]


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A setting of a rule: any finite float32 from `least` up that is less than `below`."""

    default: float
    below: float = math.inf
    least: float = 0.0
    whole: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateRule:
    """An update's formula, by its name in csrc/kernel_rules.h, with its settings and slots. It has no state."""

    name: str
    settings: Mapping[str, Hyperparameter]
    slot_names: tuple[str, ...] = ()
    # The setting that gives a slot's first values, where they are not zero.
    first_values: Mapping[str, str] = field(default_factory=dict)
    # True where the step does not grow with the gradient, so that only the rate can scale it.
    adaptive: bool = False
    # The setting that a schedule may change as well as the learning rate; empty where the rule has no momentum.
    momentum_name: str = ""
    # The rule to use while the momentum is zero, so that the velocity does not change.
    without_momentum: UpdateRule | None = None
    # Makes the kernel's numbers of the rate and the settings, in place, at a version; None where they are the same.
    derive: Callable[[dict[str, float], int], None] | None = None

    def make_slots(self, length: int, hyperparameters: Mapping[str, float]) -> Slots:
        """Return the slots of a shard that has had no update."""
        slots = {name: aligned_zeros(length) for name in self.slot_names}
        for name, setting in self.first_values.items():
            slots[name].fill(hyperparameters[setting])
        return slots

    def bind(
        self,
        parameters: Floats,
        slots: Slots,
        hyperparameters: Mapping[str, float],
        *,
        kind: PayloadKind = PayloadKind.GRADIENT,
    ) -> BoundRule:
        """Return the rule with a shard's arrays and settings, for updates by pushes of that kind."""
        if kind is PayloadKind.BUFFER:
            return BoundRule(_ADDITION, parameters, {}, {"weight_decay": 0.0}, sign=-1.0)
        sign = -1.0 if kind is PayloadKind.DELTA else 1.0
        if self.without_momentum and hyperparameters[self.momentum_name] == 0.0:
            return BoundRule(self.without_momentum, parameters, {}, hyperparameters, sign=sign)
        bound = LookaheadRule if hyperparameters.get("lookahead") else BoundRule
        return bound(self, parameters, slots, hyperparameters, sign=sign)


class BoundRule:
    """A rule with the arrays and settings of one shard, which are checked here and not again for each update."""

    def __init__(
        self,
        rule: UpdateRule,
        parameters: Floats,
        slots: Slots,
        hyperparameters: Mapping[str, float],
        *,
        sign: float = 1.0,
    ) -> None:
        """`sign` is -1 where pushes hold the opposite of a gradient: deltas, and moves of buffers."""
        kernel = _kernels.ShardKernel(rule.name, parameters, slots)
        self.length = parameters.size
        self.sign = sign
        self.adaptive = rule.adaptive
        # Encodes the parameters to where a Reply says.
        self.write: Callable[[Reply], object] = kernel.write
        self._parameters = parameters
        self._update = kernel.apply
        self._settings = dict(hyperparameters)
        self._derive = rule.derive
        self._numbers = itemgetter(*kernel.numbers)

    @property
    def handed_out(self) -> Floats:
        """The parameters as pulls bring them; do not keep the array."""
        return self._parameters

    def apply(
        self,
        gradients: Sequence[WeightedGradient],
        *,
        rate: float,
        version: int,
        reply: Reply | None = None,
        guarded: bool = False,
        start: int = 0,
        stop: int | None = None,
    ) -> int:
        """Update parameters and slots in place by g = f0 * g0 + f1 * g1 + ..., in float32, in this order.

        Called under the shard's lock.

        Args:
            gradients: One at least, each as long as the updated part of the shard.
            rate: The step size after schedules and staleness. The learning rate among the settings is not read.
            version: The number of updates before this one.
            reply: Where to write the new parameters too.
            guarded: Whether a worker may write to the payloads meanwhile. Each block of 1,024 numbers is then copied,
                and left out of the sum if it is no longer finite.
            start, stop: The part of the shard to update; all of it by default.

        Returns:
            How many numbers were left out.
        """
        numbers = self._settings.copy()
        numbers["rate"] = rate
        if self._derive:
            self._derive(numbers, version)
        return self._update(gradients, self._numbers(numbers), reply, guarded, start, stop)


class LookaheadRule(BoundRule):
    """A rule that hands out the parameters as momentum alone will move them next: theta - alpha * m * v.

    Pulls and replies bring these; checkpoints and exports hold theta. alpha is the rate of the last update, or before
    the first one of this object the learning rate with which it was bound.
    """

    def __init__(
        self, rule: UpdateRule, parameters: Floats, slots: Slots, hyperparameters: Mapping[str, float], *, sign: float
    ) -> None:
        super().__init__(rule, parameters, slots, hyperparameters, sign=sign)
        self.write = self._write_ahead
        self._velocity, self._ahead = slots["velocity"], aligned_zeros(self.length)
        self._write: Callable[[Reply], object] = _kernels.ShardKernel("sgd", self._ahead, {}).write
        self._momentum, self._rate = hyperparameters["momentum"], hyperparameters["learning_rate"]

    def apply(
        self, gradients: Sequence[WeightedGradient], *, rate: float, reply: Reply | None = None, **more: Any
    ) -> int:
        self._rate = rate
        left_out = super().apply(gradients, rate=rate, **more)
        if reply is not None:
            self._write_ahead(reply)
        return left_out

    @property
    def handed_out(self) -> Floats:
        return self._look_ahead()

    def _write_ahead(self, reply: Reply) -> None:
        self._look_ahead()
        self._write(reply)

    def _look_ahead(self) -> Floats:
        np.multiply(self._velocity, np.float32(self._rate * self._momentum), out=self._ahead)
        return np.subtract(self._parameters, self._ahead, out=self._ahead)


# Shares are computed here, not in the kernel's float32, which would round twice: there 1 - 0.999 is not 0.001.
def _momentum(numbers: dict[str, float], version: int) -> None:
    numbers["gradient_share"] = 1.0 - (numbers["dampening"] if version > 0 else 0.0)


def _delayed_nesterov(numbers: dict[str, float], version: int) -> None:
    numbers["share"] = 1.0 / numbers["n"]
    numbers["ends"] = float((version + 1) % numbers["n"] == 0.0)


def _adagrad(numbers: dict[str, float], version: int) -> None:
    numbers["rate"] /= 1.0 + version * numbers["lr_decay"]


def _rmsprop(numbers: dict[str, float], version: int) -> None:
    numbers["gradient_share"] = 1.0 - numbers["decay"]


def _adam(numbers: dict[str, float], version: int) -> None:
    beta1, beta2, updates = numbers["beta1"], numbers["beta2"], version + 1
    numbers["gradient_share1"] = 1.0 - beta1
    numbers["gradient_share2"] = 1.0 - beta2
    # The moments started at zero.
    numbers["rate"] = min(numbers["rate"] / (1.0 - beta1**updates), FLOAT32_MAX)
    numbers["root_scale"] = 1.0 / math.sqrt(1.0 - beta2**updates)


def _adamw(numbers: dict[str, float], version: int) -> None:
    numbers["weight_decay"] = min(numbers["weight_decay"] * numbers["rate"], FLOAT32_MAX)
    numbers["parameter_share"] = 1.0 - numbers["weight_decay"]
    _adam(numbers, version)


def _addition(numbers: dict[str, float], version: int) -> None:
    numbers["rate"] = 1.0


_LEARNING_RATE = Hyperparameter(default=0.001)
_MOMENTUM = Hyperparameter(default=0.9, below=1.0)
_WEIGHT_DECAY = Hyperparameter(default=0.0)
_MOMENTUM_SETTINGS = {"learning_rate": _LEARNING_RATE, "momentum": _MOMENTUM, "weight_decay": _WEIGHT_DECAY}
_ADAM_SETTINGS = {
    "learning_rate": _LEARNING_RATE,
    "beta1": Hyperparameter(default=0.9, below=1.0),
    "beta2": Hyperparameter(default=0.999, below=1.0),
    "eps": Hyperparameter(default=1e-8),
    "weight_decay": _WEIGHT_DECAY,
}

# theta -= alpha * g.
SGD = UpdateRule(name="sgd", settings={"learning_rate": _LEARNING_RATE, "weight_decay": _WEIGHT_DECAY})
# theta -= g, at no rate.
_ADDITION = UpdateRule(name="sgd", settings={}, derive=_addition)

_ROWS = (
    SGD,
    # v = m * v + (1 - dampening) * g; theta -= alpha * v: heavy-ball momentum in torch's form.
    #
    # As in torch, a shard's first update takes v = g without dampening, and a momentum of zero leaves v as it is. A new
    # rate scales the old velocity too.
    UpdateRule(
        name="momentum",
        settings={
            "learning_rate": _LEARNING_RATE,
            "momentum": _MOMENTUM,
            "dampening": Hyperparameter(default=0.0),
            "weight_decay": _WEIGHT_DECAY,
        },
        slot_names=("velocity",),
        momentum_name="momentum",
        without_momentum=SGD,
        derive=_momentum,
    ),
    # v = m * v + alpha * g; theta -= v: heavy-ball momentum with the rate inside the velocity.
    #
    # For updates whose gradients have rates of their own, as in Zhang et al. 2016 (staleness-aware ASGD): a gradient
    # keeps the rate at which it arrived.
    UpdateRule(name="heavy_ball", settings=_MOMENTUM_SETTINGS, slot_names=("velocity",), momentum_name="momentum"),
    # v = m * v + g; theta -= alpha * (g + m * v): Nesterov's momentum in torch's form.
    #
    # The parameters are the look-ahead point of Sutskever et al. 2013, where the next gradient is computed: with
    # u = -alpha * v and a constant alpha they are phi + m * u, where u' = m * u - alpha * grad(phi + m * u) and
    # phi' = phi + u'.
    UpdateRule(
        name="nesterov",
        settings=_MOMENTUM_SETTINGS,
        slot_names=("velocity",),
        momentum_name="momentum",
        without_momentum=SGD,
    ),
    # d += g; theta -= alpha / n * g; each n-th update: v = m * v + d / n; theta -= alpha * m * v; d = 0.
    #
    # Delayed Nesterov (Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling"): for deltas of local
    # training that arrive one by one, where Nesterov's momentum at each push fails. Updates are counted by the shard's
    # version. With n = 1 it is Nesterov's rule; n pushes from one version are one step of it on their mean. A parameter
    # without a gradient in an n-th update keeps its d until the next. With lookahead = 1 workers get theta - alpha * m
    # * v, the parameters as momentum will move them next.
    UpdateRule(
        name="delayed_nesterov",
        settings={
            **_MOMENTUM_SETTINGS,
            "n": Hyperparameter(default=1.0, least=1.0, whole=True),
            "lookahead": Hyperparameter(default=0.0, below=2.0, whole=True),
        },
        slot_names=("velocity", "gradient_sum"),
        momentum_name="momentum",
        derive=_delayed_nesterov,
    ),
    # s += g * g; theta -= alpha * g / (sqrt(s) + eps) (Dean et al. 2012, section 4.1).
    #
    # The sum includes the current gradient. With lr_decay, alpha is divided by 1 + lr_decay * version.
    UpdateRule(
        name="adagrad",
        settings={
            "learning_rate": Hyperparameter(default=0.01),
            "eps": Hyperparameter(default=1e-10),
            "initial_accumulator_value": Hyperparameter(default=0.0),
            "lr_decay": Hyperparameter(default=0.0),
            "weight_decay": _WEIGHT_DECAY,
        },
        slot_names=("accumulator",),
        first_values={"accumulator": "initial_accumulator_value"},
        adaptive=True,
        derive=_adagrad,
    ),
    # s = decay * s + (1 - decay) * g * g; theta -= alpha * g / (sqrt(s) + eps).
    UpdateRule(
        name="rmsprop",
        settings={
            "learning_rate": Hyperparameter(default=0.01),
            "decay": Hyperparameter(default=0.99, below=1.0),
            "eps": Hyperparameter(default=1e-8),
            "weight_decay": _WEIGHT_DECAY,
        },
        slot_names=("square_average",),
        adaptive=True,
        derive=_rmsprop,
    ),
    # m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g * g; theta -= alpha * m' / (sqrt(v') + eps).
    #
    # m' = m / (1 - beta1^t) and v' = v / (1 - beta2^t), where t counts the shard's updates with this one; eps stands
    # after the correction, where torch has it (Kingma and Ba 2015, algorithm 1).
    UpdateRule(
        name="adam",
        settings=_ADAM_SETTINGS,
        slot_names=("first_moment", "second_moment"),
        adaptive=True,
        momentum_name="beta1",
        derive=_adam,
    ),
    # theta -= alpha * weight_decay * theta, then as Adam without decay (Loshchilov and Hutter 2019).
    #
    # The decay enters neither the moments nor their root, so it does not depend on the gradients.
    UpdateRule(
        name="adamw",
        settings={**_ADAM_SETTINGS, "weight_decay": Hyperparameter(default=0.01)},
        slot_names=("first_moment", "second_moment"),
        adaptive=True,
        momentum_name="beta1",
        derive=_adamw,
    ),
)

# The rules that a run may be given.
RULES: dict[str, UpdateRule] = {rule.name: rule for rule in _ROWS}

# Of each row one sum: s += mean(g * g); theta -= alpha * g / (sqrt(s) + eps) (Mudigere et al. 2022, section 4.1.4).
_ROWWISE_ADAGRAD = UpdateRule(
    name="rowwise_adagrad",
    settings={**RULES["adagrad"].settings, "eps": Hyperparameter(default=1e-8)},
    slot_names=("accumulator",),
    first_values={"accumulator": "initial_accumulator_value"},
    adaptive=True,
    derive=_adagrad,
)
# theta = g: what an optimizer elsewhere has computed. The rate is not read; as of an adaptive rule staleness scales it
# alone.
_ASSIGN = UpdateRule(name="assign", settings={"learning_rate": _LEARNING_RATE}, adaptive=True)
# The rules that a table may be given.
ROW_RULES = {rule.name: rule for rule in (SGD, RULES["adagrad"], _ROWWISE_ADAGRAD, RULES["adam"], _ASSIGN)}


def find(name: str) -> UpdateRule:
    if name not in RULES:
        raise UnsupportedOptimizer(f"update rule {name!r} is unknown; this server has {', '.join(sorted(RULES))}")
    return RULES[name]


def require_known(rule: UpdateRule, names: Iterable[str]) -> None:
    """Raise UnsupportedOptimizer for the name of a setting that the rule does not have."""
    unknown = sorted(set(names) - set(rule.settings))
    if unknown:
        raise UnsupportedOptimizer(
            f"{rule.name} has no setting {', '.join(map(repr, unknown))}; it has {', '.join(rule.settings)}"
        )


def validate(rule: UpdateRule | str, hyperparameters: Mapping[str, float]) -> dict[str, float]:
    """Return the rule's hyperparameters, missing ones at defaults; raise UnsupportedOptimizer for wrong ones."""
    rule = find(rule) if isinstance(rule, str) else rule
    require_known(rule, hyperparameters)
    values = {name: float(hyperparameters.get(name, setting.default)) for name, setting in rule.settings.items()}
    for name, value in values.items():
        setting = rule.settings[name]
        # Written so that NaN fails; the kernels compute in float32.
        fits = setting.least <= value <= float(np.finfo(np.float32).max) and value < setting.below
        if not fits or (setting.whole and not value.is_integer()):
            bound = f" and less than {setting.below:g}" if setting.below < math.inf else ""
            numbers = "a whole number" if setting.whole else "a finite float32"
            raise UnsupportedOptimizer(
                f"{rule.name}'s {name} is {value}; expected {numbers} of at least {setting.least:g}{bound}"
            )
    return values
