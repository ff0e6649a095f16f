"""The learning rates and momenta in an optimizer's parameter groups, which schedulers move, and who hears of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyps_client.learning_rates import GroupRate
from pyps_client.log import logger
from pyps_client.torch.translate import Translation, text_of, value_of
from pyps_wire.common_pb2 import OptimizerSettings
from pyps_wire.errors import BadRequest

# Group -> the learning rate and momentum that the push which begins now must carry.
RateChanges = Callable[[], Mapping[int, GroupRate]]


class GroupRates:
    """Reads the groups' learning rates, and momenta where the rule has one; tells which the next push must carry.

    One worker owns the schedule; what it sends is in force for the push that carries it. Another worker's changes
    count only until that one has pushed, which is said once.
    """

    def __init__(
        self,
        translation: Translation,
        param_groups: Sequence[Mapping[str, Any]],
        joined_with: OptimizerSettings,
        *,
        owns_schedule: bool,
    ) -> None:
        self._torch_momentum = translation.hyperparameters.get(translation.momentum)
        # The optimizer's own list, so that its groups always hold the present rates.
        self._param_groups = param_groups
        self._owns_schedule = owns_schedule
        # What the servers were last told of each group.
        settings = [group.hyperparameters for group in joined_with.groups]
        self._told = [GroupRate(group["learning_rate"], group.get(translation.momentum)) for group in settings]
        # True once the first change was sent.
        self._moved = False

    def now(self) -> list[float]:
        """The rate of each group."""
        return [rate.learning_rate for rate in self._now()]

    @property
    def are_the_servers(self) -> bool:
        """Whether the servers go by them, or will from the next push on: this worker moves the schedule it owns."""
        return self._owns_schedule and (self._moved or self._now() != self._told)

    def take_changes(self) -> dict[int, GroupRate]:
        """Group -> rate, for the push that begins now; empty where the servers have been told all."""
        now = self._now()
        changes = {index: rate for index, rate in enumerate(now) if rate != self._told[index]}
        has_scheduler = any("initial_lr" in group for group in self._param_groups)
        if not self._moved and has_scheduler:
            # A scheduler is there: claims the schedule before it first moves, so that a second owner is refused at
            # once.
            changes = dict(enumerate(now))
        if not self._owns_schedule and changes and not self._moved:
            logger.info(
                "the learning rate or momentum moves here too, which has no effect on the servers%s: another worker "
                "owns the schedule (owns_schedule=True would make it this one)",
                " once that one's scheduler has" if has_scheduler else "",
            )
        self._moved = self._moved or bool(changes)
        self._told = now
        if not self._owns_schedule:
            # What is moved by hand, or by a plateau, is this worker's alone: nobody else's need move at all.
            return {index: rate._replace(provisional=True) for index, rate in changes.items() if has_scheduler}
        return changes

    def _now(self) -> list[GroupRate]:
        return [self._of(index, group) for index, group in enumerate(self._param_groups)]

    def _of(self, index: int, group: Mapping[str, Any]) -> GroupRate:
        rate = float(group["lr"])
        if not 0 <= rate < math.inf:
            raise BadRequest(f"lr of parameter group {index} is {rate!r}; expected a finite number, 0 or more.")
        if self._torch_momentum is None:
            return GroupRate(rate)
        momentum = value_of(group, self._torch_momentum)
        if not 0 <= momentum < 1:
            raise BadRequest(
                f"{text_of(self._torch_momentum)} of parameter group {index} is {momentum!r}; expected a number of at "
                "least 0 and less than 1."
            )
        return GroupRate(rate, momentum)


class LocalRates:
    """The sizes of the worker's own step between pulls, one a group.

    By default the servers' present learning rates under plain SGD, and no steps under other rules.
    """

    def __init__(self, translation: Translation, rates: GroupRates, *, asked: float | None) -> None:
        self._translation = translation
        self._rates = rates
        self._asked = asked

    @property
    def may_be_other_than_zero(self) -> bool:
        """Whether there are steps at all."""
        return not self._translation.stateful if self._asked is None else self._asked > 0

    def __call__(
        self, told: Mapping[int, float], spread: Callable[[Sequence[float]], Sequence[float]] = list
    ) -> list[float]:
        """`told`: the servers' rates by vector, as far as they are known. `spread`: gives a number a vector."""
        rates = spread(self._rates.now())
        if self._asked is not None:
            return [self._asked] * len(rates)
        if self._translation.stateful:
            return [0.0] * len(rates)
        if self._rates.are_the_servers:
            return list(rates)
        return [told.get(vector, rate) for vector, rate in enumerate(rates)]


def check_local_rate(asked: float | None) -> None:
    """Refuses a step size that cannot be."""
    if asked is not None and not 0 <= asked < math.inf:
        raise BadRequest(f"local_learning_rate is {asked!r}; expected 0 (no local steps) or more.")


def check_read_my_writes(translation: Translation, *, asked: float | None) -> None:
    """Refuses read_my_writes without a step size to take one's own gradients with."""
    if asked == 0 or (asked is None and translation.stateful):
        raise BadRequest(
            "read_my_writes takes the worker's own steps on what was pulled, but there are no local steps: pass "
            "local_learning_rate, the size of a plain SGD step."
        )
