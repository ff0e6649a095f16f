"""Policies by name, in closed form; what a weighing does to a shard is in tests/paper/test_staleness_policies.py."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyps.core.aggregation import parse as parse_protocol
from pyps.core.staleness import ALIASES, POLICIES, Weighing, WeighingContext, parse
from pyps_wire.errors import BadRequest
from shards import crew

ACCEPTING = sorted(set(POLICIES) - {"drop"})


def context(split: float = 1.0) -> WeighingContext:
    return WeighingContext(worker_id="a", num_workers=4, version=100, split=split)


@pytest.mark.parametrize(
    ("text", "at_0", "at_1", "at_10"),
    [
        ("none", 1.0, 1.0, 1.0),
        ("divide", 1.0, 1.0, 1 / 10),
        ("divide_plus_one", 1.0, 1 / 2, 1 / 11),
        ("exponential:beta=0.5", 1.0, math.exp(-0.5), math.exp(-5)),
        ("exponential", 1.0, math.exp(-0.1), math.exp(-1)),
        ("polynomial:a=2", 1.0, 1 / 4, 1 / 121),
        ("polynomial", 1.0, 1 / math.sqrt(2), 1 / math.sqrt(11)),
        ("hinge", 1.0, 1.0, 1 / 61),
        ("hinge:a=2,b=0", 1.0, 1 / 3, 1 / 21),
    ],
)
def test_a_policy_scales_the_rate_by_its_formula(text: str, at_0: float, at_1: float, at_10: float) -> None:
    scales = [parse(text).weigh(staleness, context()).rate_scale for staleness in (0, 1, 10)]
    assert scales == pytest.approx([at_0, at_1, at_10], rel=1e-15)


@pytest.mark.parametrize("staleness", [0, 1, 1000])
def test_no_penalty_takes_every_gradient_as_fresh(staleness: int) -> None:
    assert parse("none").weigh(staleness, context()) == Weighing(accept=True, weight=1.0, rate_scale=1.0)


@pytest.mark.parametrize("text", ACCEPTING)
def test_no_policy_but_drop_touches_the_gradient_itself(text: str) -> None:
    weighing = parse(text).weigh(1000, context(split=4))
    assert (weighing.accept, weighing.weight) == (True, 1.0)


@pytest.mark.parametrize("staleness", [0, 1, 1000])
@pytest.mark.parametrize(("split", "scale"), [(1.0, 1.0), (4.0, 0.25), (7.5, 1 / 7.5), (0.0, 1.0)])
def test_constant_divides_by_the_protocols_split_alone(split: float, scale: float, staleness: int) -> None:
    assert parse("constant").weigh(staleness, context(split)).rate_scale == scale


@pytest.mark.parametrize(
    ("protocol", "scale"), [("async", 1 / 30), ("softsync:n=5", 1 / 5), ("softsync:n=7", 4 / 30), ("hardsync", 1.0)]
)
def test_constant_follows_what_the_protocol_makes_of_thirty_workers(protocol: str, scale: float) -> None:
    """With n = 7, c = floor(30 / 7) = 4 and the n in effect is 30 / 4."""
    split = parse_protocol(protocol).split(crew(30))
    assert parse("constant").weigh(3, context(split)).rate_scale == pytest.approx(scale, rel=1e-15)


def test_per_update_divides_the_update_by_the_mean_staleness_of_its_gradients() -> None:
    policy = parse("per_update")
    scales = [policy.update_scale(stalenesses) for stalenesses in ((0,), (0, 1), (4,), (2, 4, 9), ())]
    assert scales == [1.0, 1.0, 1 / 4, 1 / 5, 1.0]
    assert policy.weigh(9, context()).rate_scale == 1.0


@pytest.mark.parametrize("text", sorted(set(POLICIES) - {"per_update"}))
def test_the_other_policies_leave_the_update_as_a_whole_alone(text: str) -> None:
    assert parse(text).update_scale((3, 5)) == 1.0


@pytest.mark.parametrize(("staleness", "accept"), [(0, True), (10, True), (11, False)])
def test_drop_takes_what_is_at_most_its_spread_old(staleness: int, accept: bool) -> None:
    assert parse("drop").weigh(staleness, context()) == Weighing(accept=accept, weight=1.0, rate_scale=1.0)


@given(staleness=st.integers(0, 10**12))
def test_drop_with_a_spread_beyond_every_staleness_is_no_penalty(staleness: int) -> None:
    """The identity drop(inf) == none of the algorithm notes, 2.10."""
    assert parse(f"drop:spread={10**12}").weigh(staleness, context()) == parse("none").weigh(staleness, context())


@given(text=st.sampled_from(ACCEPTING), staleness=st.integers(0, 10**9), split=st.floats(0, 1e6))
def test_a_scale_is_a_share_that_does_not_grow_with_the_staleness(text: str, staleness: int, split: float) -> None:
    policy = parse(text)
    younger, older = (policy.weigh(age, context(split)).rate_scale for age in (staleness, staleness + 1))
    assert 0.0 <= older <= younger <= 1.0


@given(
    a=st.floats(0, 1e300, allow_subnormal=True),
    b=st.floats(0, 1e300),
    text=st.sampled_from(["exponential:beta={a!r}", "polynomial:a={a!r}", "hinge:a={a!r},b={b!r}"]),
)
def test_a_policys_text_names_exactly_that_policy(text: str, a: float, b: float) -> None:
    policy = parse(text.format(a=a, b=b))
    assert parse(policy.text) == policy
    assert parse(policy.text).text == policy.text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("hinge:a=10,b=4", "hinge"),
        ("hinge: b=3.0 , a=1e1", "hinge:b=3"),
        ("exp:beta=5e-1", "exponential:beta=0.5"),
        ("drop:spread=10", "drop"),
        (" divide ", "divide"),
    ],
)
def test_a_policys_text_leaves_out_what_is_at_its_default(text: str, canonical: str) -> None:
    assert parse(text).text == canonical


def test_a_policy_is_found_under_its_own_name() -> None:
    assert [parse(name).name for name in POLICIES] == list(POLICIES)


def test_a_policy_is_found_under_the_papers_short_name() -> None:
    assert {alias: parse(alias).name for alias in ALIASES} == ALIASES


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    there_are = "constant, divide, divide_plus_one, drop, exponential, hinge, none, per_update, polynomial"
    with pytest.raises(BadRequest, match=f"^staleness policy 'inverse' is unknown; expected one of {there_are}$"):
        parse("inverse")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exponential:beta=-1", "'exponential': beta is -1; expected a finite number that is not negative"),
        ("exponential:beta=nan", "'exponential': beta is nan; expected a finite number"),
        ("polynomial:a=inf", "'polynomial': a is inf; expected a finite number"),
        ("hinge:b=-0.5", "'hinge': b is -0.5; expected a finite number"),
        ("drop:spread=-1", "'drop': spread is -1; expected a finite number"),
        ("drop:spread=1.5", "'drop': spread is '1.5'; expected a whole number"),
        ("exp:beta=fast", "'exponential': beta is 'fast'; expected a number"),
        ("exp:gamma=1", "'exponential' has no setting 'gamma=1'; it has beta="),
        ("divide:n=3", "'divide' has no setting 'n=3'; it has no settings"),
        ("hinge:a=1,a=2", "'hinge': a is given twice"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse(text)
