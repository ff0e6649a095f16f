"""Warm start as a stage before the main protocol; how it serves Adagrad is in tests/paper/test_downpour_shards.py."""

from __future__ import annotations

import pytest

from pyps.core.behaviour import Behaviour
from pyps.core.warmup import WarmUp
from pyps_wire.errors import BadRequest
from simulated import cluster, crew

MAINS = ["async", "softsync:n=1", "ssp:s=1", "serial", "asgd"]
BARRIERS = ["hardsync", "backup:b=1", "ssp:s=0,strict_bsp=true"]


@pytest.mark.parametrize("warmup", ["serial", "hardsync"])
@pytest.mark.parametrize("main", [*MAINS, *BARRIERS])
def test_every_protocol_may_follow_on_a_warm_up(main: str, warmup: str) -> None:
    run = cluster(main, workers=crew(3, steps=10), warmup=f"updates=5,protocol={warmup}").run()
    assert [run.steps(worker_id) for worker_id in "abc"] == [10, 10, 10]


@pytest.mark.parametrize("warmup", ["serial", "hardsync"])
@pytest.mark.parametrize("main", MAINS)
def test_every_protocol_without_a_barrier_may_be_entered_one_after_the_other(main: str, warmup: str) -> None:
    text = f"updates=5,protocol={warmup},release_every=3"
    run = cluster(main, workers=crew(3, steps=20), warmup=text).run()
    assert [run.steps(worker_id) for worker_id in "abc"] == [20, 20, 20]


@pytest.mark.parametrize("main", BARRIERS)
def test_a_barrier_cannot_be_entered_one_after_the_other(main: str) -> None:
    """Those let in would wait for those that are not, and these for their updates."""
    message = f"release_every lets the workers in one after the other, and {main} waits for the gradients of the others"
    with pytest.raises(BadRequest, match=message):
        Behaviour.parse(protocol=main, warmup="updates=5,release_every=3")


@pytest.mark.parametrize(
    "text",
    ["updates=200", "updates=200,protocol=hardsync", "updates=1,protocol=hardsync:weighting=equal,release_every=5"],
)
def test_a_warm_ups_text_is_that_of_an_equal_one(text: str) -> None:
    assert WarmUp.parse(text).text == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("protocol=serial", "warmup's updates is 0; expected at least 1, as in updates=200"),
        ("updates=5,release_every=-1", "warmup's release_every is -1; expected updates, or 0 for none"),
        ("updates=5,protocol=softsync:n=2", "warmup's protocol is 'softsync:n=2'; expected serial or hardsync"),
        ("updates=5,protocol=gentle", "protocol 'gentle' is unknown"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        WarmUp.parse(text)
