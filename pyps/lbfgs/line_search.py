"""How far to go along a search direction: backtracking to Armijo's condition, and the strong Wolfe conditions.

Dean et al. 2012 leave the line search open. phi(a) = f(x + a d) stands for the loss along the direction d (Nocedal and
Wright, Numerical Optimization, 2006, chapter 3):

    Armijo         phi(a) <= phi(0) + c1 a phi'(0)
    strong Wolfe   Armijo, and |phi'(a)| <= c2 |phi'(0)|

A step whose loss or slope is not finite has gone too far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Line(Protocol):
    """The loss along the search direction."""

    def loss(self, step: float) -> float:
        """Returns phi(step): a pass over the whole data set."""
        ...

    def slope(self) -> float:
        """Returns phi' at the step last asked for, from the gradient that came with its loss; not finite if that is."""
        ...


@dataclass(frozen=True)
class Start:
    """What is known before the first trial."""

    loss: float  # phi(0)
    slope: float  # phi'(0), below 0
    step: float  # the first to try


@dataclass(frozen=True)
class Found:
    """A step whose loss is low enough; it is the one that the line was last asked for."""

    step: float
    loss: float
    slope: float


class LineSearch(Protocol):
    """Finds a step."""

    def search(self, line: Line, start: Start) -> Found | None:
        """Returns a step that holds Armijo's condition at least, None where no trial did."""
        ...


@dataclass(frozen=True)
class Armijo:
    """Tries shorter and shorter steps until one holds Armijo's condition."""

    c1: float = 1e-4
    backtrack: float = 0.5  # each step is so much of the one before
    trials_max: int = 20

    def search(self, line: Line, start: Start) -> Found | None:
        step = start.step
        for _ in range(self.trials_max):
            loss = line.loss(step)
            if decreases_enough(loss, step, start, c1=self.c1):
                slope = line.slope()
                if math.isfinite(slope):
                    return Found(step, loss, slope)
            step *= self.backtrack
        return None


@dataclass(frozen=True)
class StrongWolfe:
    """Brackets a step that holds the strong Wolfe conditions, then closes in on it.

    Nocedal and Wright's algorithms 3.5 and 3.6 as one loop: `low` is the best step that holds Armijo's condition, `far`
    the other end of an interval that has a good step in it, unknown while the loss falls beyond every step tried.
    """

    c1: float = 1e-4
    c2: float = 0.9
    trials_max: int = 20

    def search(self, line: Line, start: Start) -> Found | None:
        low, far = _Point(0.0, start.loss, start.slope), None
        step, stands_at = start.step, 0.0
        for number in range(1, self.trials_max + 1):
            if number == self.trials_max and low.step > 0.0:
                # There is a step to return, and another trial might lead away from it for good.
                break
            trial, stands_at = self._try(line, start, step, low), step
            if abs(trial.slope) <= self.c2 * abs(start.slope):
                return Found(trial.step, trial.loss, trial.slope)
            if not math.isfinite(trial.slope):
                far = trial
            else:
                before, low = low, trial
                ahead = 1.0 if far is None else far.step - before.step
                if trial.slope * ahead >= 0.0:
                    far = before
                elif far is None:
                    step = _beyond(before, low)
                    continue
            step = _between(low, far)
            if step in (low.step, far.step):
                break
        return self._settle(line, start, low, stands_at=stands_at)

    def _try(self, line: Line, start: Start, step: float, low: _Point) -> _Point:
        """Returns the trial; its slope is asked for only where the step may become `low`, and else not a number."""
        loss = line.loss(step)
        if not decreases_enough(loss, step, start, c1=self.c1) or (low.step > 0.0 and loss >= low.loss):
            return _Point(step, loss, math.nan)
        return _Point(step, loss, line.slope())

    def _settle(self, line: Line, start: Start, low: _Point, *, stands_at: float) -> Found | None:
        """Takes the best step found, whatever its slope; another pass makes it the one last asked for, if it is not."""
        if low.step == 0.0:
            return None
        if low.step == stands_at:
            return Found(low.step, low.loss, low.slope)
        again = self._try(line, start, low.step, _Point(0.0, start.loss, start.slope))
        return Found(again.step, again.loss, again.slope) if math.isfinite(again.slope) else None


def decreases_enough(loss: float, step: float, start: Start, *, c1: float) -> bool:
    """Armijo's condition, which no loss holds that is not finite."""
    return math.isfinite(loss) and loss <= start.loss + c1 * step * start.slope


@dataclass(frozen=True)
class _Point:
    step: float
    loss: float
    slope: float


# How far the next step keeps from the ends of the interval, as a part of its length; and how much longer than the last
# a step is where no interval is known yet.
_MARGIN = 0.1
_GROWTH_MIN, _GROWTH_MAX = 1.1, 10.0


def _between(low: _Point, far: _Point) -> float:
    """The least point of the parabola through both losses and low's slope, kept inside the interval."""
    length = far.step - low.step
    place = 0.5
    if math.isfinite(far.loss):
        bend = far.loss - low.loss - low.slope * length
        if bend > 0.0:
            place = -low.slope * length / (2.0 * bend)
    return low.step + min(max(place, _MARGIN), 1.0 - _MARGIN) * length


def _beyond(before: _Point, low: _Point) -> float:
    """Where the slope would be 0 if it went on as between the two, kept beyond the second."""
    rise = low.slope - before.slope
    step = low.step - low.slope * (low.step - before.step) / rise if rise > 0.0 else math.inf
    return min(max(step, _GROWTH_MIN * low.step), _GROWTH_MAX * low.step)
