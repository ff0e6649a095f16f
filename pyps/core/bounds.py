"""The operator's limits for the rates, momenta and pushes of workers and commands."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from pyps.core import rules, spec
from pyps.core.gradient import EXAMPLES_MAX, Gradient, PayloadKind, norm_of_payload
from pyps.core.rule_settings import RuleSettings
from pyps_wire.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Bounds:
    """The default of each limit allows every valid value."""

    # The base rate, before the schedule and staleness.
    learning_rate_min: float = 0.0
    learning_rate_max: float = math.inf
    momentum_max: float = 1.0
    # The Euclidean norm of a shard's part of a push of deltas or buffers, but not of gradients, which clipping bounds.
    delta_norm_max: float = math.inf
    # The examples of one push, which weigh it in a round and advance schedules.
    examples_max: int = EXAMPLES_MAX

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            # Written so that NaN fails too.
            if not value >= 0:
                raise InvalidArgument(f"bounds: {name} is {value}; expected a number of at least 0")
        if self.learning_rate_min > self.learning_rate_max:
            raise InvalidArgument(
                f"bounds: learning_rate_min is {self.learning_rate_min:g}; expected at most learning_rate_max,"
                f" {self.learning_rate_max:g}"
            )

    @classmethod
    def parse(cls, text: str) -> Bounds:
        """Parse "learning_rate_max=0.5,momentum_max=0.95"; raise InvalidArgument for other text."""
        return spec.build(cls, text, what="bounds")

    def require_settings(self, settings: RuleSettings) -> None:
        """Raise InvalidArgument if the rate or momentum of a group is out of bounds."""
        momentum_name = rules.find(settings.rule).momentum_name
        for group in settings.groups:
            self.require_rate(group["learning_rate"])
            if momentum_name:
                self._require(momentum_name, group[momentum_name], "momentum_max")

    def require_rate(self, learning_rate: float) -> None:
        """Raise InvalidArgument for a base rate out of bounds."""
        self._require("learning_rate", learning_rate, "learning_rate_max")
        if learning_rate < self.learning_rate_min:
            self._refuse("learning_rate", learning_rate, "below", "learning_rate_min")

    def require_push(self, gradient: Gradient, shard_length: int) -> None:
        """Raise InvalidArgument for a push whose rate, momentum, examples or norm is out of bounds."""
        if gradient.learning_rate is not None:
            self.require_rate(gradient.learning_rate)
        if gradient.momentum is not None:
            self._require("momentum", gradient.momentum, "momentum_max")
        self._require("example_count", gradient.example_count, "examples_max")
        if gradient.kind in (PayloadKind.DELTA, PayloadKind.BUFFER) and self.delta_norm_max < math.inf:
            self._require("the delta's norm", norm_of_payload(gradient, shard_length), "delta_norm_max")

    def _require(self, what: str, value: float, bound: str) -> None:
        if value > getattr(self, bound):
            self._refuse(what, value, "above", bound)

    def _refuse(self, what: str, value: float, where: str, bound: str) -> None:
        raise InvalidArgument(
            f"{what} is {value:g}, {where} {bound}={getattr(self, bound):g}, which this server was started with: set it"
            " within, or start the servers with other --bounds"
        )
