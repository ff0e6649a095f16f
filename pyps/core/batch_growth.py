"""How the workers' minibatch grows while training goes on.

Zhang et al. 2013 (ASGD) start small and let the minibatch grow. The rate meets the mean gradient and stays as it
is, so that the rate of each example falls as the minibatch grows; `lr_scaling` makes good for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyps.core import spec
from pyps_wire.errors import BadRequest

LR_SCALINGS = ("none", "sqrt", "linear")


@dataclass(frozen=True, slots=True)
class BatchGrowth:
    """Doubles the minibatch every so many epochs: b(e) = min(maximum, start * 2^floor(e / every)).

    e counts epochs of `epoch_examples` examples behind a shard's updates. A pure function of that count.
    """

    # Examples in a worker's minibatch, at first and at most.
    start: int = 0
    maximum: int = 0
    # Epochs between two doublings.
    every: float = 2.0
    # What the rate is multiplied by: 1, the root of the growth b(e) / start, or the growth.
    lr_scaling: str = "none"
    epoch_examples: int = 0

    def __post_init__(self) -> None:
        _check(self.start >= 1, "start", self.start, expected="a minibatch of at least 1 example")
        expected = f"at least the start, {self.start}, and at most {spec.COUNT_MAX}"
        _check(self.start <= self.maximum <= spec.COUNT_MAX, "maximum", self.maximum, expected=expected)
        _check(1e-6 <= self.every < math.inf, "every", self.every, expected="a finite number of epochs above 0")
        _check(
            self.lr_scaling in LR_SCALINGS, "lr_scaling", self.lr_scaling, expected=f"one of {', '.join(LR_SCALINGS)}"
        )
        if self.epoch_examples < 1:
            raise BadRequest(
                "batch_growth counts epochs, but how many examples an epoch has is not known; set --epoch-examples"
            )

    @classmethod
    def parse(cls, text: str, *, epoch_examples: int = 0) -> BatchGrowth:
        """Returns the growth of "start=8,maximum=64,every=2,lr_scaling=none".

        `epoch_examples` is the length of an epoch where the text does not give it.
        Raises BadRequest for an unknown setting or a value out of range.
        """
        if "epoch_examples" not in text:
            text = f"{text},epoch_examples={epoch_examples}"
        return spec.build(cls, text, what="batch_growth")

    @property
    def text(self) -> str:
        """The text that names an equal growth."""
        return spec.spell_settings(self, always=("every",))

    def size(self, examples: int) -> int:
        """Returns the minibatch after so many examples."""
        doublings = math.floor(examples / (self.every * self.epoch_examples))
        # No more than it takes to reach the maximum, so that the number stays small.
        return min(self.maximum, self.start << min(doublings, self.maximum.bit_length()))

    def rate_factor(self, examples: int) -> float:
        """Returns what multiplies the rate after so many examples."""
        growth = self.size(examples) / self.start
        return {"none": 1.0, "sqrt": math.sqrt(growth), "linear": growth}[self.lr_scaling]


def _check(holds: bool, setting: str, value: float | str, *, expected: str) -> None:
    if not holds:
        raise BadRequest(f"batch_growth: {setting} is {value}; expected {expected}")
