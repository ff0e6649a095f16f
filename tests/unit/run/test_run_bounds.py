"""How far workers may set what moves the parameters, where an operator says so."""

import re
from dataclasses import replace

import pytest

from pyps.core.bounds import Bounds
from pyps.core.gradient import PayloadKind
from pyps.core.rule_settings import RuleSettings
from pyps.run.handshake import Greeting, Opening
from pyps_wire.codecs import INT8
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import partition
from shards import MODEL, RunDriver, floats, gradient, make_run

BOUNDS = "learning_rate_min=0.1,learning_rate_max=0.5,momentum_max=0.9,delta_norm_max=3,examples_max=100"


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"learning_rate": 5.0}, "learning_rate is 5, above learning_rate_max=0.5"),
        ({"learning_rate": 0.0}, "learning_rate is 0, below learning_rate_min=0.1"),
        ({"learning_rate": 5.0, "provisional": True}, "learning_rate is 5, above"),
        ({"momentum": 0.95}, "momentum is 0.95, above momentum_max=0.9"),
        ({"example_count": 101}, "example_count is 101, above examples_max=100"),
    ],
)
def test_a_push_beyond_the_bounds_changes_nothing(whole, fields, words):
    driver = RunDriver("a", bounds=BOUNDS, optimizer="momentum:learning_rate=0.5,momentum=0.9")
    if whole:
        driver.run.push = lambda plan, **run: driver.run.push_whole([plan], **run)[0]
    with pytest.raises(InvalidArgument, match=words) as caught:
        driver.push("a", **fields)
    assert "start the servers with other --bounds" in str(caught.value)
    assert driver.versions() == [0, 0] and driver.run.rounds.owner.worker_id == ""
    within = {"learning_rate": 0.1, "momentum": 0.8, "example_count": 100}
    assert driver.push("a", **within).rate == 0.1


def test_deltas_and_buffers_keep_to_their_norm():
    bounds = Bounds.parse(BOUNDS)
    for kind in (PayloadKind.DELTA, PayloadKind.BUFFER):
        with pytest.raises(InvalidArgument, match="the delta's norm is 5, above delta_norm_max=3"):
            bounds.require_push(gradient([3.0, 4.0], kind=kind), 2)
        bounds.require_push(gradient([0.3, 0.4], kind=kind), 2)
        # Their norm is 2.996, and 3.006 once they are decoded.
        encoded = bytes(INT8.encode(floats(2.704, 1.29)))
        with pytest.raises(InvalidArgument, match=r"the delta's norm is 3\.0.*, above delta_norm_max=3"):
            bounds.require_push(gradient([], kind=kind, codec=INT8, payload=encoded), 2)
    bounds.require_push(gradient([3.0, 4.0]), 2)


def test_the_first_workers_optimizer_keeps_to_the_bounds():
    run = make_run(bounds=BOUNDS, optimizer="")
    greeting = Greeting(
        "r", "a", 1, 1, "test", False, 0, 1, MODEL, RuleSettings.parse("sgd:learning_rate=0.5"), "", "", 0, ""
    )
    term = run.hello(greeting)
    for text, words in {
        "sgd:learning_rate=5": "learning_rate is 5, above learning_rate_max=0.5",
        "adam:learning_rate=0.2,beta1=0.99": "beta1 is 0.99, above momentum_max=0.9",
    }.items():
        settings = RuleSettings.parse(text)
        with pytest.raises(InvalidArgument, match=re.escape(words)):
            run.hello(replace(greeting, optimizer=settings))
        with pytest.raises(InvalidArgument, match=re.escape(words)):
            run.begin_initialize(Opening("r", "a", 1, term, partition(MODEL, num_servers=1), settings, 0))


def test_a_command_keeps_to_the_bounds():
    driver = RunDriver("a", bounds="learning_rate_max=1")
    with pytest.raises(InvalidArgument, match="learning_rate is 2, above learning_rate_max=1"):
        driver.run.configure(learning_rate=2.0)
    driver.run.configure(learning_rate=0.5)
    assert driver.run.content.shards[0].learning_rate == 0.5
