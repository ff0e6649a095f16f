import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from pyps.lbfgs.optimizer import LINE_SEARCHES, Found, LbfgsSettings, Start
from shards import refusal

Curve = Callable[[float], tuple[float, float]]
ARMIJO = LbfgsSettings()
WOLFE = LbfgsSettings(line_search="wolfe")
STRICT = replace(WOLFE, c2=0.1)


class Line:
    """A function as a line; counts its passes and remembers where it was asked last."""

    def __init__(self, curve: Curve) -> None:
        self.curve = curve
        self.steps: list[float] = []
        self.slopes = 0

    def loss(self, step: float) -> float:
        self.steps.append(step)
        return self.curve(step)[0]

    def slope(self) -> float:
        self.slopes += 1
        return self.curve(self.steps[-1])[1]


def search(settings: LbfgsSettings, curve: Curve, *, step: float = 1.0) -> tuple[Found | None, Line, Start]:
    line, (loss, slope) = Line(curve), curve(0.0)
    start = Start(loss, slope, step)
    return LINE_SEARCHES[settings.line_search](line, start, settings), line, start


def parabola(least: float) -> Curve:
    return lambda a: ((a - least) ** 2, 2.0 * (a - least))


def walled(curve: Curve, wall: float, value: float) -> Curve:
    """The curve, but beyond the wall a loss that is not finite."""
    return lambda a: curve(a) if a < wall else (value, math.nan)


def swing(a: float) -> tuple[float, float]:
    """More and Thuente 1994, equation 5.1: -a / (a^2 + 2), falling slowly towards its least value at the root of 2."""
    return -a / (a * a + 2.0), (a * a - 2.0) / (a * a + 2.0) ** 2


def wiggle(a: float) -> tuple[float, float]:
    """A wide parabola with waves on it: many places where the slope is 0."""
    return a * a / 20.0 - a + 0.18 * math.sin(5.0 * a), a / 10.0 - 1.0 + 0.9 * math.cos(5.0 * a)


def require_armijo(found: Found | None, start: Start, c1: float = 1e-4) -> Found:
    assert found.loss <= start.loss + c1 * found.step * start.slope
    return found


def test_the_step_found_holds_its_conditions_and_is_the_last_asked_for():
    curves = (parabola(1.0), parabola(0.01), parabola(30.0), swing, wiggle)
    for kind, curve, step in product((ARMIJO, WOLFE, STRICT), curves, (1.0, 1e-3, 1e3)):
        found, line, start = search(kind, curve, step=step)
        found = require_armijo(found, start)
        if kind is not ARMIJO:
            assert abs(found.slope) <= kind.c2 * abs(start.slope), (kind, curve, step)
        assert line.steps[-1] == found.step, (kind, curve, step)
        assert (found.loss, found.slope) == curve(found.step), (kind, curve, step)


def test_a_loss_that_is_not_finite_means_that_the_step_was_too_long():
    for kind, value in product((ARMIJO, WOLFE, STRICT), (math.nan, math.inf, -math.inf)):
        found, line, start = search(kind, walled(parabola(1.0), 0.3, value), step=1.0)
        if kind is STRICT:
            # The slope never gets flat before the wall: the best step is taken all the same.
            assert require_armijo(found, start).step < 0.3, value
        else:
            assert require_armijo(found, start).step in (0.25, 0.125), (kind, value)
        assert line.steps[:3] == [1.0, 0.5, 0.25], (kind, value)


def test_armijo_takes_the_first_step_that_is_low_enough_and_folds_nothing_before_it():
    found, line, _ = search(ARMIJO, parabola(0.2))
    assert found == Found(0.25, *parabola(0.2)(0.25))
    assert line.steps == [1.0, 0.5, 0.25]
    assert line.slopes == 1


def test_armijo_halves_on_where_the_loss_is_fine_and_the_gradient_is_not():
    def curve(a: float) -> tuple[float, float]:
        loss, slope = parabola(1.0)(a)
        return loss, slope if a < 0.6 else math.nan

    found, _, _ = search(ARMIJO, curve)
    assert found is not None and found.step == 0.5


def test_a_direction_along_which_no_trial_is_lower_ends_after_the_trials_allowed():
    def cliff(a: float) -> tuple[float, float]:
        return (0.0, -1.0) if a == 0.0 else (1.0 + a, 1.0)

    for kind in (ARMIJO, WOLFE):
        found, line, _ = search(kind, cliff)
        assert (found, len(line.steps)) == (None, 20), kind


def test_wolfe_finds_the_least_point_of_a_parabola_in_two_trials():
    for step in (0.4, 4.0):
        found, line, _ = search(replace(WOLFE, c2=0.01), parabola(1.0), step=step)
        assert found is not None and found.step == pytest.approx(1.0)
        assert len(line.steps) == 2


def test_wolfe_takes_the_best_step_where_trials_run_out_and_comes_back_to_it_within_those_allowed():
    found, line, start = search(replace(WOLFE, c2=0.01, trials_max=3), parabola(1000.0))
    assert require_armijo(found, start).step == line.steps[-1]
    assert len(line.steps) == len(set(line.steps)), "it stands at the best step: no pass is made again"
    # The slope stays steep up to the wall, so that every trial beyond it leads away from the best step.
    found, line, start = search(replace(WOLFE, c2=0.01, trials_max=6), walled(parabola(1000.0), 1.5, math.inf))
    assert require_armijo(found, start).step == line.steps[-1]
    assert line.steps[-1] in line.steps[:-1]
    assert len(line.steps) == 6


def test_wolfe_makes_no_more_passes_than_it_may():
    curves = (parabola(1.0), parabola(1000.0), walled(parabola(1000.0), 1.5, math.nan), wiggle)
    for curve, trials_max in product(curves, range(1, 9)):
        found, line, start = search(replace(WOLFE, c2=1e-3, trials_max=trials_max), curve)
        assert len(line.steps) <= trials_max, curve
        if found is not None:
            assert (found.loss, found.slope) == curve(line.steps[-1]), (curve, trials_max)
            require_armijo(found, start)


def test_a_setting_out_of_range_is_refused_by_name():
    for name, value, expected in (
        ("history", 0, "history is 0; expected at least 1"),
        ("trials_max", 0, "trials_max is 0; expected at least 1"),
        ("iterations_max", -1, "iterations_max is -1; expected at least 1"),
        ("line_search", "exact", "line_search is exact; expected armijo or wolfe"),
        ("c1", 1.0, "c1 is 1.0; expected a number between 0 and 1"),
        ("c2", 1e-5, "c2 is 1e-05; expected a number between c1, 0.0001, and 1"),
        ("backtrack", 0.0, "backtrack is 0.0; expected a number between 0 and 1"),
        ("gradient_tolerance", -1.0, "gradient_tolerance is -1.0; expected a finite number of at least 0"),
        ("loss_tolerance", math.nan, "loss_tolerance is nan; expected a finite number of at least 0"),
        ("curvature", math.inf, "curvature is inf; expected a finite number of at least 0"),
    ):
        assert refusal(LbfgsSettings, **{name: value}) == expected
