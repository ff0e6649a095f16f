"""A shard's behaviour and base rate may be replaced while it runs; what waits for a protocol that goes is settled."""

from __future__ import annotations

import numpy as np
import pytest

from pyps.core.receipt import Outcome
from pyps.core.roster import Roster
from pyps_wire.errors import BadRequest
from shards import Configured, Log, crew, make_behaviour, make_shard, pull, push, roster

TWO = roster("a", "b")


def test_another_protocol_decides_from_the_next_push_on() -> None:
    shard = make_shard([0.0], protocol="hardsync")
    assert shard.configure(behaviour=make_behaviour("async"), roster=TWO) == 0
    assert push(shard, [1.0], workers=TWO).outcome == Outcome.APPLIED
    assert shard.behaviour == make_behaviour("async")


@pytest.mark.parametrize(
    ("protocol", "moved"),
    [
        ("softsync:n=1", -2.0),
        ("hardsync:weighting=equal", -2.0),
        ("hardsync", -1.5),
        ("backup:b=0", -2.0),
        ("ssp:s=0,strict_bsp=true", -4.0),
    ],
)
def test_what_waits_becomes_one_update_of_the_old_protocols_kind(protocol: str, moved: float) -> None:
    shard = make_shard([0.0], protocol=protocol)
    push(shard, [1.0], example_count=3, workers=crew(3))
    push(shard, [3.0], worker_id="b", example_count=1, workers=crew(3))
    assert shard.configure(behaviour=make_behaviour("async"), roster=crew(3)) == 1
    assert (shard.version, shard.examples, shard.num_pending) == (1, 4, 0)
    assert pull(shard)[1].tolist() == [moved]


def test_what_waits_is_settled_at_the_old_rate_and_under_the_old_schedule() -> None:
    old = make_behaviour("hardsync", rate_schedule="step:every=1000,factor=0.5")
    shard = make_shard([0.0], behaviour=old, version=1000)
    push(shard, [1.0], workers=TWO)
    shard.configure(behaviour=make_behaviour("async"), learning_rate=100.0, roster=TWO)
    assert pull(shard)[1].tolist() == [-0.5]


def test_without_another_protocol_gradients_go_on_waiting_as_they_were_weighed() -> None:
    shard = make_shard([0.0], protocol="softsync:n=1", policy="divide", version=4)
    push(shard, [1.0], base_version=0, workers=TWO)
    assert shard.configure(behaviour=make_behaviour("softsync:n=1", "none"), roster=TWO) == 0
    push(shard, [1.0], sequence=1, base_version=0, workers=TWO)
    assert pull(shard)[1].tolist() == [-0.625]


def test_workers_at_the_barrier_go_on_when_the_protocol_is_replaced() -> None:
    shard = make_shard([0.0], protocol="hardsync")
    calls: list[int] = []
    receipt = push(shard, [1.0], workers=TWO)
    shard.when_version(receipt.min_version, lambda: calls.append(shard.version))
    shard.configure(behaviour=make_behaviour("async"), roster=TWO)
    assert calls == [1]


def test_another_base_rate_holds_from_the_next_update_on() -> None:
    shard = make_shard([0.0], protocol="hardsync")
    push(shard, [1.0], workers=TWO)
    shard.configure(learning_rate=10.0, roster=TWO)
    assert push(shard, [1.0], worker_id="b", workers=TWO).rate == 10.0
    assert (shard.learning_rate, pull(shard)[1].tolist()) == (10.0, [-10.0])


@pytest.mark.parametrize("rate", [-1.0, np.nan, np.inf, 1e39])
def test_a_rate_that_cannot_be_changes_nothing(rate: float) -> None:
    log = Log()
    shard = make_shard([0.0], recorder=log)
    with pytest.raises(BadRequest, match=r"learning_rate is .*; expected a finite float32 of at least 0"):
        shard.configure(learning_rate=rate, behaviour=make_behaviour("hardsync"), roster=TWO)
    assert (shard.learning_rate, shard.behaviour.aggregation.name, log.events) == (1.0, "async", {})


def test_a_protocol_that_leaves_nobody_changes_nothing() -> None:
    shard = make_shard([0.0])
    with pytest.raises(BadRequest, match="backup:b=2 leaves nobody of 2 workers"):
        shard.configure(behaviour=make_behaviour("backup:b=2"), learning_rate=5.0, roster=TWO)
    assert (shard.learning_rate, shard.behaviour.aggregation.name) == (1.0, "async")


class FullDisk(Log):
    def configured(self, *told: object) -> None:
        raise OSError("no space left on device")


def test_a_change_that_cannot_be_recorded_is_not_made() -> None:
    shard = make_shard([0.0], protocol="hardsync", recorder=FullDisk())
    push(shard, [1.0], workers=TWO)
    with pytest.raises(OSError, match="no space"):
        shard.configure(behaviour=make_behaviour("async"), learning_rate=5.0, roster=TWO)
    assert (shard.version, shard.num_pending, shard.learning_rate) == (0, 1, 1.0)
    assert shard.behaviour.aggregation.name == "hardsync"


def test_the_recorder_hears_of_a_change_with_all_that_makes_it_again() -> None:
    log, behaviour = Log(), make_behaviour("softsync:n=2")
    shard = make_shard([0.0], recorder=log, version=3)
    shard.configure(behaviour=behaviour, learning_rate=0.5, roster=TWO)
    shard.configure(learning_rate=0.25, roster=TWO)
    assert log.events[0] == [Configured(behaviour, 0.5, TWO, 3), Configured(None, 0.25, TWO, 3)]


def test_a_finished_shard_settles_nothing() -> None:
    shard = make_shard([0.0], protocol="hardsync")
    push(shard, [1.0], workers=TWO)
    shard.finish()
    assert shard.configure(behaviour=make_behaviour("async"), roster=Roster()) == 0
    assert (shard.version, shard.num_pending) == (0, 1)
