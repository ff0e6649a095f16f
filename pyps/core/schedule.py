"""How the learning rate changes during training, and how the workers' minibatch grows.

A shard evaluates its schedule when it makes an update, from its own counts: a worker's view of them is stale. To add a
curve: a frozen dataclass with `at`, and its name in CURVES.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from pyps.core import spec
from pyps.core.gradient import FLOAT32_MAX
from pyps_wire.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Schedule:
    """Gives the factor of the base learning rate: the product of its terms, 1 without any."""

    terms: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        highest = math.prod(max(1.0, term.curve.highest) for term in self.terms)
        if highest > FLOAT32_MAX:
            # A larger factor is infinite in float32, and infinity times 0 is NaN.
            raise InvalidArgument(
                f"schedule {self.text!r} multiplies the rate by up to {highest:g}; expected at most {FLOAT32_MAX:.3g},"
                " the largest float32: give its points smaller factors"
            )

    def factor(self, version: int, examples: int) -> float:
        """Return the factor for the update that comes after `version` updates made of `examples` examples."""
        return math.prod((term.factor(version, examples) for term in self.terms), start=1.0)

    @property
    def text(self) -> str:
        return "+".join(term.text for term in self.terms) or Constant.name


@dataclass(frozen=True, slots=True)
class Term:
    """A curve and the unit of its time t."""

    curve: Curve
    # The examples of an epoch if t counts epochs and parts of them; 0 if t counts updates.
    epoch_examples: int = 0

    def factor(self, version: int, examples: int) -> float:
        return self.curve.at(examples / self.epoch_examples if self.epoch_examples else version)

    @property
    def text(self) -> str:
        return self.curve.text + (f",unit=epochs,epoch_examples={self.epoch_examples}" if self.epoch_examples else "")


class Curve(ABC):
    """A factor over the time t."""

    __slots__ = ()

    name: ClassVar[str]

    @abstractmethod
    def at(self, time: float) -> float:
        """Return the factor at a time that is not negative."""

    @property
    def highest(self) -> float:
        """An upper bound of the factor."""
        return 1.0

    @property
    def text(self) -> str:
        return spec.spell(self.name, self)

    @classmethod
    def read(cls, settings: str) -> Self:
        """Return the curve with the settings "name=value,name=value"."""
        return spec.build(cls, settings, what=f"schedule {cls.name!r}")


@dataclass(frozen=True, slots=True)
class Constant(Curve):
    """Leaves the rate alone: 1."""

    name: ClassVar[str] = "constant"

    def at(self, time: float) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class Step(Curve):
    """Multiplies the rate by `factor` once every so often: factor^floor(t / every) (torch's StepLR)."""

    name: ClassVar[str] = "step"
    every: float = 0.0
    factor: float = 0.1

    def __post_init__(self) -> None:
        _check_length(self, "every", self.every)
        _check_fraction(self, "factor", self.factor)

    def at(self, time: float) -> float:
        return self.factor ** math.floor(time / self.every)


@dataclass(frozen=True, slots=True)
class Exponential(Curve):
    """Multiplies the rate by `decay` over each `every`, smoothly: decay^(t / every) (torch's ExponentialLR)."""

    name: ClassVar[str] = "exponential"
    decay: float = 0.0
    every: float = 1.0

    def __post_init__(self) -> None:
        _check(0 < self.decay <= 1, self, "decay", self.decay, expected="a number above 0 and at most 1")
        _check_length(self, "every", self.every)

    def at(self, time: float) -> float:
        return math.pow(self.decay, time / self.every)


@dataclass(frozen=True, slots=True)
class Cosine(Curve):
    """Falls along half a cosine to `minimum` and stays there (Loshchilov and Hutter 2017, without restarts).

    minimum + (1 - minimum) * (1 + cos(pi * min(t, length) / length)) / 2 (torch's CosineAnnealingLR).
    """

    name: ClassVar[str] = "cosine"
    length: float = 0.0
    minimum: float = 0.0

    def __post_init__(self) -> None:
        _check_length(self, "length", self.length)
        _check_fraction(self, "minimum", self.minimum)

    def at(self, time: float) -> float:
        progress = min(time, self.length) / self.length
        return self.minimum + (1.0 - self.minimum) * (1.0 + math.cos(math.pi * progress)) / 2.0


@dataclass(frozen=True, slots=True)
class WarmUp(Curve):
    """Rises evenly from `start` to 1 and stays there (Goyal et al. 2017, gradual warm-up).

    start + (1 - start) * min(t, length) / length (torch's LinearLR).
    """

    name: ClassVar[str] = "warmup"
    length: float = 0.0
    start: float = 0.1

    def __post_init__(self) -> None:
        _check_length(self, "length", self.length)
        _check_fraction(self, "start", self.start)

    def at(self, time: float) -> float:
        return self.start + (1.0 - self.start) * (min(time, self.length) / self.length)


@dataclass(frozen=True, slots=True)
class Piecewise(Curve):
    """Takes each factor from its time on, 1 before the first: "piecewise:1000=0.1;2000=0.01"."""

    name: ClassVar[str] = "piecewise"
    # (time, factor), times ascending.
    points: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        numbers = [number for point in self.points for number in point]
        times = [time for time, _ in self.points]
        usable = all(0 <= number < math.inf for number in numbers) and times == sorted(set(times))
        if not self.points or not usable:
            raise InvalidArgument(
                f"schedule 'piecewise' has the points {self._spelled()!r}; expected time=factor;time=factor, "
                "finite, not negative, the times ascending"
            )

    def at(self, time: float) -> float:
        reached = [factor for start, factor in self.points if start <= time]
        return reached[-1] if reached else 1.0

    @property
    def highest(self) -> float:
        return max(factor for _, factor in self.points)

    @property
    def text(self) -> str:
        return f"{self.name}:{self._spelled()}"

    @classmethod
    def read(cls, settings: str) -> Self:
        """Return the curve of "time=factor;time=factor"."""
        pairs = [item.partition("=") for item in settings.split(";") if item.strip()]
        try:
            points = tuple((float(time), float(factor)) for time, _, factor in pairs)
        except ValueError:
            raise InvalidArgument(
                f"schedule 'piecewise' has the points {settings!r}; expected time=factor;time=factor"
            ) from None
        return cls(points)

    def _spelled(self) -> str:
        return ";".join(f"{spec.spell_value(time)}={spec.spell_value(factor)}" for time, factor in self.points)


CURVES: dict[str, type[Curve]] = {kind.name: kind for kind in (Constant, Step, Exponential, Cosine, WarmUp, Piecewise)}


def parse(text: str, *, epoch_examples: int = 0) -> Schedule:
    """Return the schedule of a text such as "warmup:length=100+step:every=30,factor=0.1,unit=epochs".

    `epoch_examples` is the length of an epoch where the text counts epochs and does not give it.
    Raise InvalidArgument for an unknown name, an unknown setting or a value out of range.
    """
    # A plus inside a number (1e+3) is followed by a digit.
    terms = [_parse_term(part.strip(), epoch_examples) for part in re.split(r"\+(?!\d)", text)]
    return Schedule(tuple(term for term in terms if not isinstance(term.curve, Constant)))


def _parse_term(text: str, epoch_examples: int) -> Term:
    name, _, rest = text.partition(":")
    if name not in CURVES:
        raise InvalidArgument(f"schedule {name!r} is unknown; expected one of {', '.join(sorted(CURVES))}")
    items = rest.split(",")
    timing = [item for item in items if item.partition("=")[0].strip() in ("unit", "epoch_examples")]
    curve = CURVES[name].read(",".join(item for item in items if item not in timing))
    unit = spec.build(_Unit, ",".join(timing), what=f"schedule {name!r}")
    return Term(curve, unit.length(curve, epoch_examples))


LR_SCALINGS = ("none", "sqrt", "linear")


@dataclass(frozen=True, slots=True)
class BatchGrowth:
    """Doubles the minibatch every so many epochs: b(e) = min(maximum, start * 2^floor(e / every)) (Zhang et al. 2013).

    e counts epochs of `epoch_examples` examples behind a shard's updates. The rate multiplies the mean gradient, so the
    rate of each example falls as the minibatch grows; `lr_scaling` makes up for that.
    """

    # Examples in a worker's minibatch, at first and at most.
    start: int = 0
    maximum: int = 0
    # Epochs between two doublings.
    every: float = 2.0
    # The factor of the rate: 1, the root of the growth b(e) / start, or the growth.
    lr_scaling: str = "none"
    epoch_examples: int = 0

    def __post_init__(self) -> None:
        most, scaling = spec.COUNT_MAX, self.lr_scaling
        expected = f"at least the start, {self.start}, and at most {most}"
        _check(self.start >= 1, self, "start", self.start, expected="a minibatch of at least 1 example")
        _check(self.start <= self.maximum <= most, self, "maximum", self.maximum, expected=expected)
        _check(1e-6 <= self.every < math.inf, self, "every", self.every, expected="a finite number of epochs above 0")
        _check(scaling in LR_SCALINGS, self, "lr_scaling", scaling, expected=f"one of {', '.join(LR_SCALINGS)}")
        if self.epoch_examples < 1:
            raise InvalidArgument(
                "batch_growth counts epochs, but how many examples an epoch has is not known; set --epoch-examples"
            )

    @classmethod
    def parse(cls, text: str, *, epoch_examples: int = 0) -> BatchGrowth:
        """Return the growth of a text such as "start=8,maximum=64,every=2,lr_scaling=none".

        `epoch_examples` is the length of an epoch where the text does not give it.
        Raise InvalidArgument for an unknown setting or a value out of range.
        """
        if "epoch_examples" not in text:
            text = f"{text},epoch_examples={epoch_examples}"
        return spec.build(cls, text, what="batch_growth")

    @property
    def text(self) -> str:
        return spec.spell_settings(self, always=("every",))

    def size(self, examples: int) -> int:
        """Return the minibatch after so many examples."""
        doublings = math.floor(examples / (self.every * self.epoch_examples))
        # Not more than the maximum needs, so that the number stays small.
        return min(self.maximum, self.start << min(doublings, self.maximum.bit_length()))

    def rate_factor(self, examples: int) -> float:
        """Return the factor of the rate after so many examples."""
        growth = self.size(examples) / self.start
        return {"none": 1.0, "sqrt": math.sqrt(growth), "linear": growth}[self.lr_scaling]


@dataclass(frozen=True, slots=True)
class _Unit:
    """The settings of a term's time in a text."""

    unit: str = "updates"
    epoch_examples: int = 0

    def length(self, curve: Curve, epoch_examples: int) -> int:
        """Return how many examples an epoch has, 0 where the time counts updates."""
        _check(self.unit in ("updates", "epochs"), curve, "unit", self.unit, expected="updates or epochs")
        _check(self.epoch_examples >= 0, curve, "epoch_examples", self.epoch_examples, expected="a number above 0")
        if self.unit == "updates":
            if self.epoch_examples:
                raise InvalidArgument(f"schedule {curve.name!r} counts updates; epoch_examples needs unit=epochs")
            return 0
        if not (self.epoch_examples or epoch_examples):
            raise InvalidArgument(
                f"schedule {curve.name!r} counts epochs, but how many examples an epoch has is not known;"
                " set --epoch-examples"
            )
        return self.epoch_examples or epoch_examples


def _check(holds: bool, thing: Curve | BatchGrowth, setting: str, value: float | str, *, expected: str) -> None:
    if not holds:
        what = "batch_growth" if isinstance(thing, BatchGrowth) else f"schedule {thing.name!r}"
        raise InvalidArgument(f"{what}: {setting} is {value}; expected {expected}")


def _check_length(curve: Curve, setting: str, value: float) -> None:
    if value == 0.0:
        # Also where it is not given: the length of a curve has no sensible default.
        raise InvalidArgument(f"schedule {curve.name!r} needs {setting}=..., a finite number above 0")
    # A smaller number could overflow when a time is divided by it.
    _check(1e-6 <= value < math.inf, curve, setting, value, expected="a finite number above 0")


def _check_fraction(curve: Curve, setting: str, value: float) -> None:
    _check(0 <= value <= 1, curve, setting, value, expected="a number from 0 to 1")
