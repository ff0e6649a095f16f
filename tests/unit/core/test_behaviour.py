"""A behaviour in words and back."""

from __future__ import annotations

import pytest

from pyps.core.aggregation import Async, Hardsync
from pyps.core.behaviour import Behaviour
from pyps.core.staleness import Divide
from pyps.core.warmup import Staged
from pyps_wire.errors import BadRequest

PLAIN = {
    "protocol": "async",
    "warmup": "",
    "staleness": "none",
    "schedule": "constant",
    "clip_norm": 0.0,
    "batch_growth": "",
    "epoch_examples": 0,
}


@pytest.mark.parametrize(
    "texts",
    [
        {},
        {"protocol": "softsync:n=4", "staleness": "exponential:beta=0.25"},
        {"protocol": "hardsync", "warmup": "updates=20", "clip_norm": 2.5},
        {"schedule": "warmup:length=10+step:every=30,factor=0.1"},
        {"schedule": "cosine:length=10,unit=epochs", "epoch_examples": 1437},
        {"batch_growth": "start=8,maximum=64,every=2", "epoch_examples": 1437},
    ],
)
def test_its_texts_make_an_equal_behaviour(texts: dict[str, object]) -> None:
    behaviour = Behaviour.parse(**{**PLAIN, **texts})  # type: ignore[arg-type]
    assert Behaviour.parse(**behaviour.texts) == behaviour
    assert Behaviour.parse(**behaviour.texts).texts == behaviour.texts


def test_equal_texts_make_equal_behaviours_so_that_nothing_is_settled_in_vain() -> None:
    assert Behaviour.parse(protocol="hybrid").aggregation == Behaviour.parse(protocol="bsp").aggregation == Hardsync()


def test_a_warm_up_is_a_stage_of_the_protocol() -> None:
    behaviour = Behaviour.parse(protocol="async", warmup="updates=20,protocol=hardsync", staleness="divide")
    staged = behaviour.aggregation
    assert isinstance(staged, Staged)
    assert (staged.at(19), staged.at(20), behaviour.staleness) == (Hardsync(), Async(), Divide())
    assert staged.text == "async after updates=20,protocol=hardsync"


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"clip_norm": -1.0}, "clip_norm is -1.0; expected the norm that pushes are clipped to, or 0 to clip none"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"staleness": "age"}, "'age' is unknown"),
        ({"schedule": "linear"}, "'linear' is unknown"),
        ({"batch_growth": "start=8,maximum=64"}, "set --epoch-examples"),
        ({"warmup": "updates=0"}, "warmup's updates is 0"),
    ],
)
def test_a_wrong_text_is_refused_by_name(texts: dict[str, object], words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        Behaviour.parse(**texts)  # type: ignore[arg-type]
    assert words in str(refused.value)


def test_a_behaviour_is_hashable_and_cannot_be_changed() -> None:
    behaviour = Behaviour.parse()
    assert hash(behaviour) == hash(Behaviour.parse())
    with pytest.raises(AttributeError):
        behaviour.clip_norm = 1.0  # type: ignore[misc]
