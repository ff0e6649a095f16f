"""Trial points along the search direction: formed on the servers, evaluated by the workers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pyps.core.instructions import PARAMETERS
from pyps.work.formulas import (
    DIRECTION,
    GRADIENT,
    GRADIENT_CHANGE,
    POINT,
    POINT_CHANGE,
    TRIAL_GRADIENT,
    dot,
    fold,
    move,
    norm_inf,
    subtract,
)
from pyps.work.machine import Evaluation, Machine, Objective


@dataclass(frozen=True)
class Measures:
    """What is known of the gradient at a trial point, and of the pair that it would make."""

    slope: float  # t.d
    gradient_norm: float  # the largest element of t
    sy: float
    ss: float
    yy: float

    @property
    def finite(self) -> bool:
        """Whether the gradient can be gone on with."""
        return math.isfinite(self.gradient_norm) and math.isfinite(self.slope)


class Trials:
    """The line of `line_search.Line`, with the servers' parameters at the trial last asked for."""

    def __init__(self, machine: Machine, objective: Objective, note: Mapping[str, float]) -> None:
        self.passes = 0
        self.measures: Measures | None = None  # of the slope last asked for
        self._machine = machine
        self._objective = objective
        self._note = note
        self._evaluation: Evaluation | None = None

    def loss(self, step: float) -> float:
        """Moves the parameters to x + step d and makes a pass; nothing is folded yet."""
        self._machine.execute(move(POINT, step, DIRECTION))
        self._evaluation = self._objective.evaluate({**self._note, "step_length": step})
        self.passes += 1
        return self._evaluation.loss

    def slope(self) -> float:
        """Folds the trial's gradient, and measures in the same message all that a commit would want to know."""
        assert self._evaluation is not None, "slope() follows loss()"
        self.measures = Measures(
            *self._machine.execute(
                fold(TRIAL_GRADIENT, self._evaluation.stage_ids, self._evaluation.example_count),
                # What the parameters changed by, after rounding.
                subtract(POINT_CHANGE, PARAMETERS, POINT),
                subtract(GRADIENT_CHANGE, TRIAL_GRADIENT, GRADIENT),
                dot(TRIAL_GRADIENT, DIRECTION),
                norm_inf(TRIAL_GRADIENT),
                dot(POINT_CHANGE, GRADIENT_CHANGE),
                dot(POINT_CHANGE, POINT_CHANGE),
                dot(GRADIENT_CHANGE, GRADIENT_CHANGE),
            )
        )
        return self.measures.slope if self.measures.finite else math.nan
