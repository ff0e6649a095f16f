"""Who holds the others up, and for how long: refused pushes, clocks that stand still, workers that never came."""

from __future__ import annotations

import numpy as np
import pytest

from pyps.core.receipt import Outcome, Reason
from pyps_wire.errors import PypsError, ScheduleOwned
from run_crew import Crew


def test_a_worker_whose_pushes_are_all_refused_is_left_out_of_rounds_for_good():
    crew = Crew("a", "b", protocol="hardsync", stall_seconds="10", lease_seconds="1000")
    crew.push("b", np.nan)
    waited = []
    for version in range(6):
        assert crew.push("a", base_version=version).min_version in {0, version + 1}
        began = crew.clock.now
        while crew.versions()[0] == version:
            assert crew.push("b", np.nan, base_version=version).reason is Reason.NOT_FINITE
            crew.clock.now += 1.0
            crew.run.tick()
        waited.append(crew.clock.now - began)
    assert max(waited) <= 12
    assert waited[3:] == [0, 0, 0], "it was given two more chances"


def test_a_worker_left_out_counts_again_from_a_push_that_is_taken():
    crew = Crew("a", "b", protocol="hardsync", stall_seconds="10", lease_seconds="1000")
    for _ in range(2):
        crew.push("b", np.nan)
        crew.run.membership.stall("b")
    crew.push("b", np.nan)
    assert crew.run.roster.workers == ()
    assert crew.push("b").outcome is Outcome.PENDING or crew.versions()[0] == 1
    assert crew.run.roster.workers == ("b",)


def test_the_first_worker_whose_push_with_a_rate_is_taken_owns_the_schedule_until_it_goes():
    crew = Crew("a", "b")
    for fields in ({"learning_rate": np.nan}, {"learning_rate": 0.5, "base_version": 7}):
        with pytest.raises(PypsError):
            crew.push("a", **fields)
    assert crew.push("a", np.inf, learning_rate=0.5).outcome is Outcome.REJECTED
    assert crew.run.conduct.owner.worker_id == ""
    for version in range(2):
        assert crew.push("b", learning_rate=0.5, base_version=version).outcome is Outcome.APPLIED
    assert crew.run.conduct.owner.worker_id == "b"
    with pytest.raises(ScheduleOwned, match=r"'a'.*'b' owns"):
        crew.push("a", learning_rate=0.25, base_version=2)
    crew.run.leave("r", "b", 1, failed=False, message="")
    assert crew.push("a", learning_rate=0.25, base_version=2).rate == 0.25


def test_a_server_with_a_schedule_of_its_own_takes_no_rate():
    crew = Crew("a", schedule="step:every=5")
    with pytest.raises(ScheduleOwned, match="step:every=5"):
        crew.push("a", learning_rate=0.5)
    assert crew.versions() == [0, 0]


def test_a_worker_that_asks_for_the_same_step_and_pushes_is_waited_for_no_longer_than_the_stall_time():
    crew = Crew("a", "b", protocol="ssp:s=0", stall_seconds="10", lease_seconds="1000")
    assert crew.may_proceed("a", 0)
    assert crew.may_proceed("b", 0)
    assert not crew.may_proceed("a", 1)
    for _ in range(12):
        assert crew.may_proceed("b", 0)
        crew.push("b", base_version=crew.versions()[0])
        crew.run.tick()
        crew.clock.now += 1.0
    assert [crew.may_proceed("a", clock) for clock in (1, 2, 3)] == [True] * 3
    assert any("worker is not waited for until it asks for its next step" in event for event in crew.events("stalled"))


def test_a_worker_that_left_before_the_protocol_took_turns_is_not_waited_for():
    crew = Crew("a", "b", "c", protocol="async", expected_workers="3")
    for name in "ab":
        crew.push(name, base_version=crew.versions()[0])
    crew.run.leave("r", "a", 1, failed=False, message="")
    crew.run.configure(protocol="serial")
    assert crew.may_proceed("c", 0)


def test_fewer_expected_workers_open_the_gate_of_a_round_and_of_a_pacer():
    crew = Crew("a", "b", protocol="hardsync", expected_workers="3")
    for name in "ab":
        assert [crew.push(name, shard_id=shard_id).outcome for shard_id in (0, 1)] == [Outcome.PENDING] * 2
    crew.run.conduct.expect(2)
    assert crew.versions() == [1, 1]
    crew = Crew("a", "b", protocol="serial", expected_workers="3")
    assert not crew.may_proceed("a", 0)
    assert not crew.may_proceed("b", 0)
    crew.run.conduct.expect(2)
    assert crew.may_proceed("a", 0)
