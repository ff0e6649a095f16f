"""Behaviours from a line of text and back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pyps.core import aggregation, spec, staleness
from pyps_wire.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Tea:
    leaves: int = 0
    sugar: float = 0.1
    milk: bool = False
    cup: str = "blue"
    strength: float = field(init=False, default=0.0)


REGISTRY = {"tea": Tea}


@pytest.mark.parametrize(
    ("text", "thing"),
    [
        ("tea", Tea()),
        ("tea:leaves=3,sugar=1e-05,milk=true,cup=red", Tea(3, 1e-5, True, "red")),
        ("tea:cup=a=b", Tea(cup="a=b")),
    ],
)
def test_a_text_makes_a_thing_that_spells_it(text: str, thing: Tea) -> None:
    assert spec.make(text, REGISTRY, what="drink") == thing
    assert spec.spell("tea", thing) == text


def test_spaces_and_other_words_for_true_are_understood() -> None:
    assert spec.make(" tea: leaves = 3, milk=ON ", REGISTRY, what="drink") == Tea(3, milk=True)


@pytest.mark.parametrize("sugar", [0.1, 1 / 3, 1e-12, 3.0, 1e22])
def test_a_number_is_read_back_exactly(sugar: float) -> None:
    assert spec.make(spec.spell("tea", Tea(sugar=sugar)), REGISTRY, what="drink") == Tea(sugar=sugar)


def test_settings_without_a_name() -> None:
    assert spec.spell_settings(Tea(3)) == "leaves=3"
    assert spec.build(Tea, "leaves=3", what="drink") == Tea(3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("coffee", "drink 'coffee' is unknown; expected one of tea"),
        ("tea:lemon=1", "drink 'tea' has no setting 'lemon=1'; it has leaves=, sugar=, milk=, cup="),
        ("tea:strength=1", "drink 'tea' has no setting 'strength=1'"),
        ("tea:leaves", "drink 'tea' has no setting 'leaves'"),
        ("tea:leaves=1,leaves=2", "drink 'tea': leaves is given twice"),
        ("tea:leaves=1.5", "drink 'tea': leaves is '1.5'; expected a whole number"),
        ("tea:sugar=much", "drink 'tea': sugar is 'much'; expected a number"),
        ("tea:milk=2", "drink 'tea': milk is '2'; expected true or false"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_can(text: str, words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        spec.make(text, REGISTRY, what="drink")
    assert words in str(refused.value)


def test_an_example_shows_every_setting_and_can_be_read() -> None:
    for registry in (aggregation.PROTOCOLS, staleness.POLICIES):
        for kind in registry.values():
            assert isinstance(spec.make(spec.example(kind), registry, what="behaviour"), kind)
    assert spec.example(aggregation.Softsync) == "softsync:n=4"
    assert spec.example(aggregation.Ssp) == "ssp:s=3,strict_bsp=false"
    assert spec.example(staleness.Hinge) == "hinge:a=10,b=4"
