from dataclasses import dataclass, field

import pytest

from pyps.core import protocols, spec, staleness
from pyps.core.behaviour import Behaviour
from pyps.core.protocols.asynchronous import Softsync
from pyps.core.protocols.paced import Ssp
from shards import refusal


@dataclass(frozen=True, slots=True)
class Tea:
    leaves: int = 0
    sugar: float = 0.1
    milk: bool = False
    cup: str = "blue"
    strength: float = field(init=False, default=0.0)


REGISTRY = {"tea": Tea}


def brewed(text: str) -> Tea:
    return spec.make(text, REGISTRY, what="drink")


def test_a_text_makes_a_thing_that_spells_it():
    for text, thing in {
        "tea": Tea(),
        "tea:leaves=3,sugar=1e-05,milk=true,cup=red": Tea(3, 1e-5, True, "red"),
        "tea:cup=a=b": Tea(cup="a=b"),
    }.items():
        assert (brewed(text), spec.spell("tea", thing)) == (thing, text)
    assert brewed(" tea: leaves = 3, milk=ON ") == Tea(3, milk=True)
    for sugar in (0.1, 1 / 3, 1e-12, 3.0, 1e22):
        assert brewed(spec.spell("tea", Tea(sugar=sugar))) == Tea(sugar=sugar)
    # Settings without a name.
    assert spec.spell_settings(Tea(3)) == "leaves=3"
    assert spec.build(Tea, "leaves=3", what="drink") == Tea(3)


def test_what_cannot_be_read_is_refused_with_what_can():
    for text, words in {
        "coffee": "drink 'coffee' is unknown; expected one of tea",
        "tea:lemon=1": "drink 'tea' has no setting 'lemon=1'; it has leaves=, sugar=, milk=, cup=",
        "tea:strength=1": "drink 'tea' has no setting 'strength=1'",
        "tea:leaves": "drink 'tea' has no setting 'leaves'",
        "tea:leaves=1,leaves=2": "drink 'tea': leaves is given twice",
        "tea:leaves=1.5": "drink 'tea': leaves is '1.5'; expected a whole number",
        "tea:sugar=much": "drink 'tea': sugar is 'much'; expected a number",
        "tea:milk=2": "drink 'tea': milk is '2'; expected true or false",
    }.items():
        assert words in refusal(brewed, text)


def test_an_example_shows_every_setting_and_can_be_read():
    for registry in (protocols.PROTOCOLS, staleness.POLICIES):
        for kind in registry.values():
            assert isinstance(spec.make(spec.example(kind), registry, what="behaviour"), kind)
    assert spec.example(Softsync) == "softsync:n=4,merge=senders"
    assert spec.example(Ssp) == "ssp:s=3,strict_bsp=false"
    assert spec.example(staleness.Hinge) == "hinge:a=10,b=4"


def test_its_texts_make_an_equal_behaviour_that_cannot_be_changed():
    for texts in (
        {},
        {"protocol": "softsync:n=4", "staleness": "exponential:beta=0.25"},
        {"protocol": "hardsync", "warmup": "updates=20", "clip_norm": 2.5},
        {"schedule": "warmup:length=10+step:every=30,factor=0.1"},
        {"schedule": "cosine:length=10,unit=epochs", "epoch_examples": 1437},
        {"batch_growth": "start=8,maximum=64,every=2", "epoch_examples": 1437},
    ):
        behaviour = Behaviour.parse(**texts)  # type: ignore[arg-type]
        again = Behaviour.parse(**behaviour.texts)
        assert (again, again.texts, hash(again)) == (behaviour, behaviour.texts, hash(behaviour)), texts
    with pytest.raises(AttributeError):
        behaviour.clip_norm = 1.0  # type: ignore[misc]
    # Other words make no other behaviour, so that nothing is settled in vain.
    assert Behaviour.parse(protocol="hybrid") == Behaviour.parse(protocol="bsp")


def test_a_wrong_text_of_a_behaviour_is_refused_by_name():
    for name, text, words in (
        ("clip_norm", -1.0, "clip_norm is -1.0; expected the norm that pushes are clipped to, or 0 to clip none"),
        ("clip_norm", float("nan"), "clip_norm is nan"),
        ("staleness", "age", "'age' is unknown"),
        ("schedule", "linear", "'linear' is unknown"),
        ("batch_growth", "start=8,maximum=64", "set --epoch-examples"),
        ("warmup", "updates=0", "warmup's updates is 0"),
    ):
        assert words in refusal(Behaviour.parse, **{name: text})
