"""Who holds the others up, and for how long: refused pushes, clocks that stand still, workers that never came."""

from dataclasses import replace

import numpy as np
import pytest

from pyps.core.receipt import Outcome, Reason
from pyps.run.observers import EVENTS_MAX, Events, Standstill, Wait, Waits
from pyps.run.rounds import ScheduleOwner
from pyps_wire.errors import PypsError, ScheduleOwned
from shards import RunDriver


def test_a_worker_whose_pushes_are_all_refused_is_left_out_of_rounds_for_good():
    driver = RunDriver("a", "b", protocol="hardsync", stall_seconds="10", lease_seconds="1000")
    driver.push("b", np.nan)
    waited = []
    for version in range(6):
        assert driver.push("a", base_version=version).min_version in {0, version + 1}
        began = driver.clock.now
        while driver.versions()[0] == version:
            assert driver.push("b", np.nan, base_version=version).reason is Reason.NOT_FINITE
            driver.clock.now += 1.0
            driver.run.tick()
        waited.append(driver.clock.now - began)
    assert max(waited) <= 12
    assert waited[3:] == [0, 0, 0], "it was given two more chances"


def test_a_worker_left_out_counts_again_from_a_push_that_is_taken():
    driver = RunDriver("a", "b", protocol="hardsync", stall_seconds="10", lease_seconds="1000")
    for _ in range(2):
        driver.push("b", np.nan)
        driver.run.membership.stall("b")
    driver.push("b", np.nan)
    assert driver.run.membership.roster.workers == ()
    # "a" has never pushed: nobody else is waited for.
    assert driver.push("b").outcome is Outcome.APPLIED
    assert driver.run.membership.roster.workers == ("b",)


def test_a_round_that_is_made_again_waits_for_a_worker_no_longer_than_a_lease():
    # On another server b may wait for a, which is rounds behind on this one.
    driver = RunDriver("a", "b", protocol="hardsync", stall_seconds="1000", lease_seconds="10")
    driver.push("b")
    driver.push("a", resent_staleness=0)
    # Each push of b restarts the time.
    for version in range(1, 4):
        assert driver.push("a", resent_staleness=0).min_version == version + 1
        driver.pass_seconds(6, "a", "b")
        assert driver.push("b", resent_staleness=0).outcome is Outcome.APPLIED
    driver.push("a", resent_staleness=0)
    driver.pass_seconds(9, "a", "b")
    assert driver.versions()[0] == 4
    driver.pass_seconds(2, "a", "b")
    # The next one does not wait for b, and those after b's push do.
    assert driver.push("a", resent_staleness=0).outcome is Outcome.APPLIED
    assert driver.push("b", base_version=6).outcome is Outcome.PENDING
    assert driver.push("a", base_version=6).outcome is Outcome.APPLIED
    # Nothing is sent again any more.
    driver.push("a", base_version=7)
    driver.pass_seconds(30, "a", "b")
    assert driver.versions()[0] == 7


def test_the_first_worker_whose_push_with_a_rate_is_taken_owns_the_schedule_until_it_goes():
    driver = RunDriver("a", "b")
    for fields in ({"learning_rate": np.nan}, {"momentum": 0.5}, {"learning_rate": 0.5, "base_version": 7}):
        with pytest.raises(PypsError):
            driver.push("a", **fields)
    assert driver.push("a", np.inf, learning_rate=0.5).outcome is Outcome.REJECTED
    assert driver.run.rounds.owner.worker_id == ""
    for version in range(2):
        assert driver.push("b", learning_rate=0.5, base_version=version).outcome is Outcome.APPLIED
    assert driver.run.rounds.owner.worker_id == "b"
    with pytest.raises(ScheduleOwned, match=r"'a'.*'b' owns"):
        driver.push("a", learning_rate=0.25, base_version=2)
    driver.run.leave("r", "b", 1, failed=False, message="")
    assert driver.push("a", learning_rate=0.25, base_version=2).rate == 0.25
    # A rate holds, and has an owner, though the protocol has no need of its gradient.
    backup = RunDriver("a", "b", protocol="backup:b=0")
    backup.push("a")
    assert backup.push("b", learning_rate=0.5).reason is Reason.DROPPED
    assert backup.run.rounds.owner.worker_id == "b"


def test_a_worker_whose_rate_is_provisional_owns_nothing_and_its_rate_holds_until_somebody_sets_one():
    driver = RunDriver("a", "b")
    theirs = {"learning_rate": 0.25, "provisional": True}
    assert driver.push("b", **theirs).rate == 0.25
    assert driver.run.rounds.owner.worker_id == ""
    assert driver.push("a", learning_rate=0.5, base_version=1).rate == 0.5
    assert driver.push("b", base_version=2, **theirs).rate == 0.5
    # The owner's first push is still on its way to the other shard.
    assert driver.push("b", shard_id=1, **theirs).rate == 0.25
    driver.run.leave("r", "a", 1, failed=False, message="")
    assert driver.push("b", base_version=3, **theirs).rate == 0.5


def test_a_server_with_a_schedule_of_its_own_takes_no_rate():
    driver = RunDriver("a", schedule="step:every=5")
    with pytest.raises(ScheduleOwned, match="step:every=5"):
        driver.push("a", learning_rate=0.5)
    assert driver.versions() == [0, 0]


def test_a_worker_that_asks_for_the_same_step_and_pushes_is_waited_for_no_longer_than_the_stall_time():
    driver = RunDriver("a", "b", protocol="ssp:s=0", stall_seconds="10", lease_seconds="1000")
    assert driver.may_proceed("a", 0)
    assert driver.may_proceed("b", 0)
    assert not driver.may_proceed("a", 1)
    for _ in range(12):
        assert driver.may_proceed("b", 0)
        driver.push("b", base_version=driver.versions()[0])
        driver.run.tick()
        driver.clock.now += 1.0
    assert [driver.may_proceed("a", clock) for clock in (1, 2, 3)] == [True] * 3
    assert any(
        "no worker waits for this one until it requests its next step" in event for event in driver.events("stalled")
    )


def test_a_worker_that_left_before_the_protocol_took_turns_is_not_waited_for():
    driver = RunDriver("a", "b", "c", protocol="async", expected_workers="3")
    for name in "ab":
        driver.push(name, base_version=driver.versions()[0])
    driver.run.leave("r", "a", 1, failed=False, message="")
    driver.run.configure(protocol="serial")
    assert driver.may_proceed("c", 0)


def test_fewer_expected_workers_open_the_gate_of_a_round_and_of_a_pacer():
    driver = RunDriver("a", "b", protocol="hardsync", expected_workers="3")
    for name in "ab":
        assert [driver.push(name, shard_id=shard_id).outcome for shard_id in (0, 1)] == [Outcome.PENDING] * 2
    driver.run.rounds.expect(2)
    assert driver.versions() == [1, 1]
    driver = RunDriver("a", "b", protocol="serial", expected_workers="3")
    assert not driver.may_proceed("a", 0)
    assert not driver.may_proceed("b", 0)
    driver.run.rounds.expect(2)
    assert driver.may_proceed("a", 0)


def test_an_owner_stays_while_one_of_its_pushes_under_way_is_taken():
    owner = ScheduleOwner()
    refused, taken = owner.claim("a"), owner.claim("a")
    assert not owner.settle(refused, taken=False) and owner.worker_id == "a"
    late = owner.claim("a")
    assert owner.settle(taken, taken=True)
    assert not owner.settle(late, taken=False) and owner.worker_id == "a"
    assert owner.release("a") and not owner.worker_id
    assert not owner.settle(owner.claim("b"), taken=False) and not owner.worker_id


# Whether the server itself stood still; and what people are told.


def test_only_a_look_that_comes_much_too_late_tells_of_a_standstill():
    now = [100.0]
    standstill = Standstill(0.2, clock=lambda: now[0])
    told = []
    for later in (0.2, 0.01, 1.1, 36.2, 0.2):
        now[0] += later
        told.append(standstill.look())
    assert told == [0.0, 0.0, 0.0, pytest.approx(36.0), 0.0]


def test_events_say_what_happened_and_many_of_a_kind_push_out_their_like_only():
    events = Events(lambda: 5.0)
    events.add("left", "worker left", worker="b", state="finished", message="")
    [event] = events
    assert (event.number, event.time, event.kind) == (1, 5.0, "left")
    assert event.message == "worker left: worker b, state finished"
    for index in range(EVENTS_MAX):
        for kind in ("joined", "replica"):
            events.add(kind, f"worker {index} {kind}")
    kept = list(events)
    assert len(kept) == EVENTS_MAX and [event.number for event in kept] == sorted(event.number for event in kept)
    assert [kept[0].kind, kept[-1].message] == ["left", f"worker {EVENTS_MAX - 1} replica"]
    assert events.since(2 * EVENTS_MAX) == kept[-1:]


def test_waits_tell_who_waits_for_whom_and_count_equal_ones():
    waits, woken = Waits(), []
    for_b = Wait("a", lambda: "a waits for b", lambda: ("b",), lambda: woken.append("a"))
    for_c = Wait("a", lambda: "a waits for c", lambda: ("c",), lambda: woken.append("a"))
    observer = Wait("", lambda: "an observer waits", lambda: ("b",), lambda: woken.append("eye"))
    with waits.waiting(for_b), waits.waiting(for_c), waits.waiting(observer), waits.waiting(replace(observer)):
        assert waits.descriptions() == ["a waits for b", "a waits for c", "an observer waits (2 calls)"]
        assert waits.waits_for() == {"a": ("b", "c")}
        waits.wake_all()
    assert woken == ["a", "a", "eye", "eye"]
    assert waits.descriptions() == []
