"""What `pyps advise` says, by curves of the test's own."""

import math
from dataclasses import replace

import pytest

from pyps.cli.laboratory.advice import Advice, Speeds, Way, _fewer, best_first, protocols_for, reached
from pyps.cli.laboratory.settings import Settings
from pyps.cli.laboratory.sweep import Pool
from pyps.cli.laboratory.trial import Outcome, Point, Trial

SETTINGS = Settings(workers=4)


def way(seconds: float, settings: Settings = SETTINGS, name: str = "pyps") -> Way:
    """Return a way that gets to 0.5 after so many seconds."""
    curve = [Point(0, 0.0, 1.0), Point(100, 2 * seconds, 0.0)]
    return Way(name, Trial("async", "none", 0.1, 0), settings, [curve], [Outcome(curve, {})])


@pytest.mark.parametrize(
    ("one", "best", "ddp", "failures", "verdict"),
    [
        (1.0, 1.0, 5.0, "", "one"),
        (1.05, 1.0, 5.0, "", "one"),
        (2.0, 1.0, 5.0, "", "pyps"),
        (2.0, 1.0, 1.05, "", "ddp"),
        # One DDP worker that dies ends them all.
        (2.0, 1.0, 1.05, "60,5", "pyps"),
        (math.inf, 1.0, math.inf, "", "pyps"),
        (math.inf, math.inf, math.inf, "", "none"),
    ],
)
def test_the_simplest_way_that_is_as_good_is_the_advice(one, best, ddp, failures, verdict):
    of_pyps = way(best, replace(SETTINGS, failures=failures))
    assert Advice(0.5, way(one), way(ddp), [of_pyps, way(9.0)]).verdict == verdict


def test_a_target_is_reached_between_two_points_and_by_no_curve_that_stays_above_it():
    points = [Point(0, 0.0, 2.0), Point(10, 1.0, 1.5), Point(20, 3.0, 0.5)]
    assert reached(points, 1.0) == 2.0
    assert reached(points, 1.5) == 1.0
    assert reached(points, 0.4) == math.inf
    assert reached([Point(0, 0.0, math.nan), *points], 1.0) == 2.0
    # What comes back above it has not got there.
    back = [*points, Point(30, 4.0, 1.5)]
    assert reached(back, 1.0) == math.inf
    assert reached([*back, Point(40, 5.0, 0.5)], 1.0) == 4.5


def test_of_ways_that_are_about_as_quick_the_one_that_ends_best_comes_first():
    ends = [way(1.0), way(1.05), way(1.2), way(math.inf)]
    ends[1].curves[0][-1] = ends[1].curves[0][-1]._replace(figure=-0.05)
    quick, better, slow, never = ends
    assert best_first([never, slow, quick, better], 0.5) == [better, quick, slow, never]


def test_fewer_workers_keep_the_slow_ones_that_fit():
    assert _fewer("3x2,1x10", 2) == "2x2,0x10"
    assert Settings(workers=2, slow=_fewer("3x2,1x10", 2)).worker_plans
    assert _fewer("", 2) == ""


def test_protocols_fit_the_workers():
    assert protocols_for(2) == ["async", "hardsync"]
    assert protocols_for(32) == ["async", "softsync:n=8", "backup:b=2", "hardsync"]


def test_a_slow_link_asks_for_few_bits_and_local_steps_and_a_fast_one_for_neither():
    few = replace(SETTINGS, parameters=100_000, step_seconds="10ms", bandwidth="10mbit")
    fast = replace(few, bandwidth="10gbit")
    with Pool(None, 1) as pool:
        speeds = Speeds(pool)
        assert speeds.with_codec(few, "async").codec == "int4"
        assert speeds.with_codec(fast, "async").codec == "float32"
        assert speeds.local_pays(few)
        assert not speeds.local_pays(fast)
