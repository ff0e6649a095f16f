"""The rules' settings and slots; their arithmetic is in tests/paper and tests/unit/test_kernels.py."""

from __future__ import annotations

import math

import pytest

from pyps.core.update_rules import RULES, find, validate
from pyps_wire.errors import UnsupportedOptimizer
from shards import make_shard, push


def test_missing_settings_get_their_defaults() -> None:
    settled = validate("adagrad", {"learning_rate": 0.05})
    assert settled == {
        "learning_rate": 0.05,
        "eps": 1e-10,
        "initial_accumulator_value": 0.0,
        "lr_decay": 0.0,
        "weight_decay": 0.0,
    }


def test_a_rule_may_be_named_or_given() -> None:
    assert validate(RULES["sgd"], {}) == validate("sgd", {})


def test_an_unknown_rule_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnsupportedOptimizer, match=r"'lamb' is unknown; this server has adagrad, adam, .*, sgd"):
        find("lamb")


def test_an_unknown_setting_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnsupportedOptimizer, match="sgd has no setting 'momentum'; it has learning_rate, weight_decay"):
        validate("sgd", {"learning_rate": 0.1, "momentum": 0.9})


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, 1e39])
def test_a_learning_rate_that_cannot_be_is_refused(value: float) -> None:
    with pytest.raises(UnsupportedOptimizer, match=r"learning_rate is .*; expected a finite float32"):
        validate("sgd", {"learning_rate": value})


def test_a_shard_refuses_settings_that_its_rule_does_not_have() -> None:
    with pytest.raises(UnsupportedOptimizer, match="'eps'"):
        make_shard([0.0], settings={"eps": 1.0})


def test_the_accumulator_starts_at_its_initial_value() -> None:
    settings = {"learning_rate": 1.0, "eps": 0.0, "initial_accumulator_value": 9.0}
    shard = make_shard([0.0], rule="adagrad", settings=settings)
    push(shard, [4.0])
    state = shard.state()
    assert (state.slots["accumulator"][0], state.parameters[0]) == (25.0, pytest.approx(-0.8))


def test_slots_lie_on_cache_lines() -> None:
    slots = RULES["adagrad"].make_slots(5, validate("adagrad", {}))
    assert slots["accumulator"].ctypes.data % 64 == 0


def test_each_rule_makes_exactly_the_slots_that_it_names() -> None:
    for rule in RULES.values():
        assert tuple(rule.make_slots(3, validate(rule, {}))) == rule.slot_names
