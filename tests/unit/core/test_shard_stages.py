"""Warm start on a shard: which protocol decides at which version, and what stays (algorithm notes 2.3)."""

from __future__ import annotations

import numpy as np
import pytest

from pyps.core.behaviour import Behaviour
from pyps.core.pacing import StagedPacer
from pyps.core.receipt import Outcome, Reason
from shards import crew, make_shard, pull, push, roster

TWO = roster("a", "b")


def staged(warmup: str, protocol: str = "async", staleness: str = "none") -> Behaviour:
    return Behaviour.parse(protocol=protocol, warmup=warmup, staleness=staleness)


def test_the_main_protocol_decides_from_the_named_version_on() -> None:
    shard = make_shard([0.0], behaviour=staged("updates=2,protocol=hardsync"))
    outcomes = []
    for sequence in range(3):
        for worker_id in "ab":
            receipt = push(shard, [1.0], worker_id=worker_id, sequence=sequence, workers=TWO)
            outcomes.append((receipt.version_before, receipt.outcome))
    pending, applied = Outcome.PENDING, Outcome.APPLIED
    assert outcomes == [(0, pending), (0, applied), (1, pending), (1, applied), (2, applied), (3, applied)]


def test_a_warm_up_may_come_before_a_barrier() -> None:
    shard = make_shard([0.0], behaviour=staged("updates=1,protocol=serial", "hardsync"))
    assert push(shard, [1.0], workers=TWO).outcome == Outcome.APPLIED
    assert push(shard, [1.0], sequence=1, workers=TWO).outcome == Outcome.PENDING
    assert push(shard, [1.0], worker_id="b", base_version=0, workers=TWO).reason == Reason.STALE
    assert shard.waiting_for(TWO) == ("b",)
    assert shard.complete(roster("a")) == 1


def test_no_gradient_waits_when_the_warm_up_ends() -> None:
    shard = make_shard([0.0], behaviour=staged("updates=1,protocol=hardsync", "softsync:n=1"))
    push(shard, [1.0], workers=TWO)
    assert shard.complete(roster("a")) == 1
    assert shard.num_pending == 0
    assert push(shard, [1.0], sequence=1, workers=TWO).min_version == 0


def test_gradients_of_the_warm_up_are_settled_as_its_round() -> None:
    shard = make_shard([0.0], behaviour=staged("updates=5,protocol=hardsync"))
    push(shard, [1.0], example_count=3, workers=crew(3))
    push(shard, [5.0], worker_id="b", example_count=1, workers=crew(3))
    shard.configure(behaviour=Behaviour.parse(), roster=crew(3))
    assert pull(shard)[1].tolist() == [-2.0]


def test_slots_go_on_through_the_change_of_protocols() -> None:
    """Warm start carries the sum of squares on, else the first pushes would each take a full step."""
    shard = make_shard(
        [0.0], rule="adagrad", settings={"learning_rate": 0.1}, behaviour=staged("updates=1,protocol=serial")
    )
    push(shard, [3.0])
    push(shard, [4.0], sequence=1)
    assert shard.state().slots["accumulator"].tolist() == [25.0]


def test_a_restored_shard_is_in_the_stage_of_its_version() -> None:
    behaviour = staged("updates=10,protocol=hardsync")
    assert push(make_shard([0.0], behaviour=behaviour, version=9), [1.0], workers=TWO).outcome == Outcome.PENDING
    assert push(make_shard([0.0], behaviour=behaviour, version=10), [1.0], workers=TWO).outcome == Outcome.APPLIED


def test_each_shard_changes_at_its_own_version() -> None:
    behaviour = staged("updates=1,protocol=hardsync")
    ahead, behind = (make_shard(np.zeros(1), shard_id=index, behaviour=behaviour) for index in range(2))
    push(ahead, [1.0])
    assert push(ahead, [1.0], sequence=1, workers=TWO).outcome == Outcome.APPLIED
    assert push(behind, [1.0], workers=TWO).outcome == Outcome.PENDING


def test_the_split_is_that_of_the_stage() -> None:
    shard = make_shard([0.0], behaviour=staged("updates=1,protocol=serial", "async", "constant"))
    rates = [push(shard, [1.0], sequence=sequence, workers=crew(4)).rate for sequence in range(2)]
    assert rates == [1.0, 0.25]


@pytest.mark.parametrize(
    ("warmup", "protocol", "paced"),
    [
        ("updates=5,protocol=serial", "async", True),
        ("updates=5,protocol=hardsync", "async", False),
        ("updates=5,protocol=hardsync", "ssp:s=1", True),
        ("updates=5,protocol=hardsync,release_every=2", "async", True),
    ],
)
def test_steps_are_granted_where_a_stage_or_the_release_asks_for_it(warmup: str, protocol: str, paced: bool) -> None:
    pacer = staged(warmup, protocol).aggregation.pacer()
    assert isinstance(pacer, StagedPacer) is paced
    assert (pacer is None) is not paced


@pytest.mark.parametrize(("warmup", "protocol"), [("hardsync", "async"), ("serial", "hardsync")])
def test_a_barrier_in_either_stage_forbids_to_compute_ahead(warmup: str, protocol: str) -> None:
    assert staged(f"updates=5,protocol={warmup}", protocol).aggregation.barrier


def test_the_main_protocol_says_the_rest() -> None:
    aggregation = staged("updates=5", "asgd:accumulate=4").aggregation
    assert (aggregation.whole_model, aggregation.accumulate, aggregation.barrier) == (True, 4, False)
    assert staged("updates=5", "softsync:n=3").aggregation.warnings(4) == (
        "softsync:n=3 with 4 workers makes an update of every gradient, so the effective n is 4",
    )
