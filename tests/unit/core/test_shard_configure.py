"""A shard's behaviour and base rate may be replaced while it runs; what waits for a protocol that goes is settled."""

from __future__ import annotations

import numpy as np

from pyps.core.receipt import Outcome
from pyps.core.roster import Roster
from shards import Configured, Log, crew, make_behaviour, make_shard, pull, push, refusal, roster

TWO = roster("a", "b")


def test_another_protocol_decides_from_the_next_push_on() -> None:
    shard = make_shard([0.0], protocol="hardsync")
    assert shard.configure(behaviour=make_behaviour("async"), roster=TWO) == 0
    assert push(shard, [1.0], workers=TWO).outcome == Outcome.APPLIED
    assert shard.behaviour == make_behaviour("async")


def test_what_waits_becomes_one_update_of_the_old_protocols_kind() -> None:
    for protocol, moved in {
        "softsync:n=1": -2.0,
        "hardsync:weighting=equal": -2.0,
        "hardsync": -1.5,
        "backup:b=0": -2.0,
        "ssp:s=0,strict_bsp=true": -4.0,
    }.items():
        shard = make_shard([0.0], protocol=protocol)
        push(shard, [1.0], example_count=3, workers=crew(3))
        push(shard, [3.0], worker_id="b", example_count=1, workers=crew(3))
        assert shard.configure(behaviour=make_behaviour("async"), roster=crew(3)) == 1, protocol
        assert (shard.version, shard.examples, shard.num_pending) == (1, 4, 0), protocol
        assert pull(shard)[1].tolist() == [moved], protocol


def test_what_waits_is_settled_at_the_old_rate_and_schedule_and_its_workers_go_on() -> None:
    old = make_behaviour("hardsync", rate_schedule="step:every=1000,factor=0.5")
    shard = make_shard([0.0], behaviour=old, version=1000)
    calls: list[int] = []
    receipt = push(shard, [1.0], workers=TWO)
    shard.when_version(receipt.min_version, lambda: calls.append(shard.version))
    shard.configure(behaviour=make_behaviour("async"), learning_rate=100.0, roster=TWO)
    assert (pull(shard)[1].tolist(), calls) == ([-0.5], [1001])


def test_without_another_protocol_gradients_go_on_waiting_as_they_were_weighed() -> None:
    shard = make_shard([0.0], protocol="softsync:n=1", policy="divide", version=4)
    push(shard, [1.0], base_version=0, workers=TWO)
    assert shard.configure(behaviour=make_behaviour("softsync:n=1", "none"), roster=TWO) == 0
    push(shard, [1.0], sequence=1, base_version=0, workers=TWO)
    assert pull(shard)[1].tolist() == [-0.625]


def test_another_base_rate_holds_from_the_next_update_on() -> None:
    shard = make_shard([0.0], protocol="hardsync")
    push(shard, [1.0], workers=TWO)
    shard.configure(learning_rate=10.0, roster=TWO)
    assert push(shard, [1.0], worker_id="b", workers=TWO).rate == 10.0
    assert (shard.learning_rate, pull(shard)[1].tolist()) == (10.0, [-10.0])


def test_a_rate_or_protocol_that_cannot_be_changes_nothing() -> None:
    log = Log()
    shard = make_shard([0.0], recorder=log)
    wrong = {"expected a finite float32 of at least 0": [("hardsync", rate) for rate in (-1.0, np.nan, np.inf, 1e39)]}
    for words, cases in (wrong | {"backup:b=2 leaves nobody of 2 workers": [("backup:b=2", 5.0)]}).items():
        for protocol, rate in cases:
            change = {"behaviour": make_behaviour(protocol), "learning_rate": rate, "roster": TWO}
            assert words in refusal(shard.configure, **change)
            assert (shard.learning_rate, shard.behaviour.aggregation.name, log.events) == (1.0, "async", {}), rate


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
