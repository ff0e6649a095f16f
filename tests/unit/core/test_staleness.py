"""Policies by name, in closed form; what a weighing does to a shard is in tests/paper/test_staleness_policies.py."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyps.core.staleness import ALIASES, POLICIES, parse
from shards import refusal

ACCEPTING = sorted(set(POLICIES) - {"drop"})


def test_a_policy_scales_the_rate_by_its_formula():
    for text, expected in {
        "none": [1.0, 1.0, 1.0],
        "divide": [1.0, 1.0, 1 / 10],
        "divide_plus_one": [1.0, 1 / 2, 1 / 11],
        "exponential:beta=0.5": [1.0, math.exp(-0.5), math.exp(-5)],
        "exponential": [1.0, math.exp(-0.1), math.exp(-1)],
        "polynomial:a=2": [1.0, 1 / 4, 1 / 121],
        "polynomial": [1.0, 1 / math.sqrt(2), 1 / math.sqrt(11)],
        "hinge": [1.0, 1.0, 1 / 61],
        "hinge:a=2,b=0": [1.0, 1 / 3, 1 / 21],
    }.items():
        scales = [parse(text).weigh(staleness, 1.0).rate_scale for staleness in (0, 1, 10)]
        assert scales == pytest.approx(expected, rel=1e-15), text


def test_no_policy_but_drop_touches_the_gradient_itself_and_none_but_per_update_the_update_as_a_whole():
    for text in ACCEPTING:
        weighing = parse(text).weigh(1000, 4)
        assert (weighing.accept, weighing.weight) == (True, 1.0), text
    for text in set(POLICIES) - {"per_update"}:
        assert parse(text).update_scale((3, 5)) == 1.0, text


def test_polynomial_takes_no_gradient_that_is_more_rounds_old_than_it_is_told():
    policy = parse("polynomial:rounds_max=4")
    accepted = {split: [policy.weigh(age, split).accept for age in (4, 5, 12, 13)] for split in (0.0, 1.0, 3.0)}
    assert accepted == {0.0: [True, False, False, False], 1.0: [True, False, False, False], 3.0: [True] * 3 + [False]}
    assert policy.weigh(3, 1.0).rate_scale == 0.5


def test_constant_divides_by_the_protocols_split_alone():
    splits = {1.0: 1.0, 4.0: 0.25, 7.5: 1 / 7.5, 0.0: 1.0}
    for (split, scale), staleness in product(splits.items(), (0, 1, 1000)):
        assert parse("constant").weigh(staleness, split).rate_scale == scale, (split, staleness)


def test_per_update_divides_the_update_by_the_mean_staleness_of_its_gradients():
    policy = parse("per_update")
    scales = [policy.update_scale(stalenesses) for stalenesses in ((0,), (0, 1), (4,), (2, 4, 9), ())]
    assert scales == [1.0, 1.0, 1 / 4, 1 / 5, 1.0]
    assert policy.weigh(9, 1.0).rate_scale == 1.0


@settings(max_examples=50)
@given(text=st.sampled_from(ACCEPTING), staleness=st.integers(0, 10**9), split=st.floats(0, 1e6))
def test_a_scale_is_a_share_that_does_not_grow_with_the_staleness(text, staleness, split):
    policy = parse(text)
    younger, older = (policy.weigh(age, split).rate_scale for age in (staleness, staleness + 1))
    assert 0.0 <= older <= younger <= 1.0


def test_a_policys_text_leaves_out_what_is_at_its_default_and_the_papers_short_names_are_understood():
    canonical = {
        "hinge:a=10,b=4": "hinge",
        "hinge: b=3.0 , a=1e1": "hinge:b=3",
        "exp:beta=5e-1": "exponential:beta=0.5",
        "drop:spread=10": "drop",
        " divide ": "divide",
    }
    assert {text: parse(text).text for text in canonical} == canonical
    assert [parse(name).name for name in POLICIES] == list(POLICIES)
    assert {alias: parse(alias).name for alias in ALIASES} == ALIASES


def test_a_wrong_setting_is_refused_in_one_sentence():
    there_are = ", ".join(sorted(POLICIES))
    for text, words in {
        "inverse": f"staleness policy 'inverse' is unknown; expected one of {there_are}",
        "exponential:beta=-1": "'exponential': beta is -1; expected a finite number that is not negative",
        "exponential:beta=nan": "'exponential': beta is nan; expected a finite number",
        "polynomial:a=inf": "'polynomial': a is inf; expected a finite number",
        "hinge:b=-0.5": "'hinge': b is -0.5; expected a finite number",
        "drop:spread=-1": "'drop': spread is -1; expected a finite number",
        "drop:spread=1.5": "'drop': spread is '1.5'; expected a whole number",
        "exp:gamma=1": "'exponential' has no setting 'gamma=1'; it has beta=",
        "divide:n=3": "'divide' has no setting 'n=3'; it has no settings",
        "hinge:a=1,a=2": "'hinge': a is given twice",
    }.items():
        assert words in refusal(parse, text)
