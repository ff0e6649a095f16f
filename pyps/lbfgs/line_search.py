"""Line searches: backtracking to Armijo's condition, and the strong Wolfe conditions.

Dean et al. 2012 leave the line search open. phi(a) = f(x + a d) is the loss along the direction d (Nocedal and Wright,
Numerical Optimization, 2006, chapter 3):

    Armijo         phi(a) <= phi(0) + c1 a phi'(0)
    strong Wolfe   Armijo, and |phi'(a)| <= c2 |phi'(0)|

A step whose loss or slope is not finite is too long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Line(Protocol):
    """The loss along the search direction."""

    def loss(self, step: float) -> float:
        """Return phi(step), by a pass over the whole data set."""
        ...

    def slope(self) -> float:
        """Return phi' at the step of the last `loss`, from that pass's gradient; not finite if the gradient is not."""
        ...


@dataclass(frozen=True)
class Start:
    """The point at which a search begins."""

    loss: float  # phi(0)
    slope: float  # phi'(0), below 0
    step: float  # the first to try


@dataclass(frozen=True)
class Found:
    """A step with its loss and its slope. A search returns the step of the line's last `loss`."""

    step: float
    loss: float
    slope: float


class LineSearch(Protocol):
    def search(self, line: Line, start: Start) -> Found | None:
        """Return a step that holds Armijo's condition at least; None if no trial did."""
        ...


@dataclass(frozen=True)
class Armijo:
    """Shortens the step until it holds Armijo's condition."""

    c1: float = 1e-4
    backtrack: float = 0.5  # the ratio of a step to the one before
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
    the other end of an interval that contains a good step, None while the loss falls beyond every step tried.
    """

    c1: float = 1e-4
    c2: float = 0.9
    trials_max: int = 20

    def search(self, line: Line, start: Start) -> Found | None:
        low, far = Found(0.0, start.loss, start.slope), None
        step = start.step
        for number in range(1, self.trials_max + 1):
            if number == self.trials_max and low.step > 0.0:
                # Another trial might not be better, and would cost a pass to come back from.
                break
            trial = self._try(line, start, step, low)
            if abs(trial.slope) <= self.c2 * abs(start.slope):
                return trial
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
        # The best step found, whatever its slope.
        if low.step == 0.0 or low.step == trial.step:
            return low if low.step else None
        # Another pass brings the line back to it.
        again = self._try(line, start, low.step, Found(0.0, start.loss, start.slope))
        return again if math.isfinite(again.slope) else None

    def _try(self, line: Line, start: Start, step: float, low: Found) -> Found:
        """Return the trial; its slope is NaN unless the step may become `low`."""
        loss = line.loss(step)
        if not decreases_enough(loss, step, start, c1=self.c1) or (low.step > 0.0 and loss >= low.loss):
            return Found(step, loss, math.nan)
        return Found(step, loss, line.slope())


def decreases_enough(loss: float, step: float, start: Start, *, c1: float) -> bool:
    """Return whether Armijo's condition holds; never for a loss that is not finite."""
    return math.isfinite(loss) and loss <= start.loss + c1 * step * start.slope


# The distance of the next step from the ends of the interval, in its lengths; and the ratio of a step to the last one
# while no interval is known.
_MARGIN = 0.1
_GROWTH_MIN, _GROWTH_MAX = 1.1, 10.0


def _between(low: Found, far: Found) -> float:
    """Return the least point of the parabola through both losses and low's slope, kept inside the interval."""
    length = far.step - low.step
    place = 0.5
    if math.isfinite(far.loss):
        bend = far.loss - low.loss - low.slope * length
        if bend > 0.0:
            place = -low.slope * length / (2.0 * bend)
    return low.step + min(max(place, _MARGIN), 1.0 - _MARGIN) * length


def _beyond(before: Found, low: Found) -> float:
    """Return where the slope would be 0 if it changed as between the two, kept beyond the second."""
    rise = low.slope - before.slope
    step = low.step - low.slope * (low.step - before.step) / rise if rise > 0.0 else math.inf
    return min(max(step, _GROWTH_MIN * low.step), _GROWTH_MAX * low.step)
