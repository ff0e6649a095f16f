"""Policies by name; what the divisor does is in tests/paper/test_staleness_divisor.py."""

from __future__ import annotations

import pytest

from pyps.core.staleness import POLICIES, Weighing, WeighingContext, parse
from pyps_wire.errors import BadRequest

CONTEXT = WeighingContext(worker_id="a", num_workers=4, version=100)


@pytest.mark.parametrize("staleness", [0, 1, 1000])
def test_no_penalty_takes_every_gradient_as_fresh(staleness: int) -> None:
    assert parse("none").weigh(staleness, CONTEXT) == Weighing(accept=True, weight=1.0, rate_scale=1.0)


def test_divide_scales_the_rate_and_leaves_the_gradient_alone() -> None:
    assert parse("divide").weigh(4, CONTEXT) == Weighing(accept=True, weight=1.0, rate_scale=0.25)


def test_a_policy_is_found_under_its_own_name() -> None:
    assert [parse(name).name for name in POLICIES] == list(POLICIES)


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadRequest, match="'inv' is unknown; expected one of divide, none"):
        parse("inv")
