"""A run over real shards, without a server: rounds, the gate, changes and what waits."""

from __future__ import annotations

from functools import partial

import pytest

from pyps.core.behaviour import Behaviour
from pyps.core.receipt import Outcome, Reason
from pyps.core.roster import Roster
from pyps_wire.errors import BadRequest, LimitExceeded, ScheduleOwned, WaitTimedOut
from run_crew import Crew


def test_a_round_that_waits_for_a_silent_worker_is_completed_at_its_lease_by_a_tick():
    crew = Crew("a", "b", protocol="hardsync", expected_workers="2")
    crew.push("a")
    crew.push("b", 3.0)
    assert crew.push("a", base_version=1).outcome is Outcome.PENDING
    crew.clock.now += 20.0
    crew.run.heartbeat("r", "a", 1, clock=0, scalars={})
    crew.run.tick()
    assert crew.versions() == [1, 0]
    crew.clock.now += 11.0
    crew.run.tick()
    assert crew.versions() == [2, 0]
    [message] = crew.events("round")
    assert "worker b" in message
    assert crew.run.statistics.total().updates == 2


def test_a_push_that_was_on_its_way_while_the_roster_shrank_completes_its_round_itself():
    crew = Crew("a", "b", protocol="hardsync", expected_workers="2")
    crew.push("a")
    crew.push("b")
    shard = crew.run.shards[0]
    original = shard.push

    def push(gradient, **keywords):
        # Between the look at the roster and the shard's lock b leaves, and its round is looked at in vain.
        crew.run.leave("r", "b", 1, failed=False, message="")
        crew.run.conduct.complete_rounds()
        return original(gradient, **keywords)

    shard.push = push
    assert crew.push("a", base_version=1).outcome is Outcome.PENDING
    assert shard.version == 2


def test_bytes_that_wait_are_counted_until_they_are_an_update():
    crew = Crew("a", "b", "c", protocol="hardsync", expected_workers="3", max_pending_bytes="1024")
    account = crew.run.conduct.account
    for shard_id in (0, 1):
        crew.push("a", shard_id=shard_id)
    assert account.bytes_held == 128
    crew.push("b")
    assert account.bytes_held == 192
    crew.push("c")
    assert account.bytes_held == 64
    account.bytes_max = 80
    with pytest.raises(LimitExceeded, match="--max-pending-bytes"):
        crew.push("b", shard_id=1)
    assert account.bytes_held == 64
    assert crew.run.shards[1].num_pending == 1
    account.bytes_max = 1024
    crew.run.configure(protocol="async")
    assert (account.bytes_held, crew.versions()) == (0, [1, 1])


def test_a_change_is_checked_as_a_whole_before_anything_changes():
    crew = Crew("a", protocol="hardsync", expected_workers="1")
    before = crew.run.behaviour
    with pytest.raises(BadRequest, match="nonsense"):
        crew.run.configure(protocol="async", schedule="nonsense")
    with pytest.raises(BadRequest, match="learning_rate"):
        crew.run.configure(protocol="async", learning_rate=float("nan"))
    assert crew.run.behaviour is before
    assert crew.events("configured") == []


def test_a_restored_run_says_whose_settings_are_in_force():
    kept, told = Behaviour.parse(protocol="async"), Behaviour.parse(protocol="hardsync")
    for in_force, words in (
        (told, "the server was told other settings than the checkpoint holds"),
        (kept, "what was changed while the run went on is still in force"),
    ):
        crew = Crew("a")
        crew.run.conduct.go_on(in_force, kept=kept, told=told)
        assert crew.run.behaviour == in_force
        [message] = crew.events("configured")
        assert message.startswith(words)


def test_a_change_ends_the_warm_up_and_tells_what_it_settled():
    crew = Crew("a", "b", protocol="async", warmup="updates=9,protocol=hardsync", expected_workers="2")
    crew.push("a")
    settled = crew.run.configure(protocol="softsync:n=1")
    assert (settled.gradients, settled.updates) == (1, 1)
    assert crew.run.behaviour.texts["warmup"] == ""
    assert "gradients settled 1, updates made 1" in crew.events("configured")[0]


def test_a_stalled_worker_is_left_out_after_its_time_and_comes_back_with_its_push():
    crew = Crew("a", "b", protocol="hardsync", expected_workers="2", stall_seconds="10")
    crew.push("a")
    crew.push("b")
    crew.push("a", base_version=1)
    crew.pass_seconds(12)
    assert crew.versions() == [2, 0]
    assert "worker b" in crew.events("stalled")[0]
    assert crew.run.roster.workers == ("a",)
    assert crew.push("b", base_version=1).reason is Reason.STALE
    assert crew.run.roster.workers == ("a", "b")


def test_counts_of_examples_on_some_gradients_only_are_told_once():
    crew = Crew("a", "b", protocol="hardsync", expected_workers="2")
    crew.push("a")
    crew.push("b", 3.0, example_count=0)
    assert crew.run.shards[0].read(lambda _, values: float(values[0])) == -2.0
    for _ in range(3):
        crew.run.tick()
    [message] = crew.events("warning")
    assert "without a count of examples" in message
    assert crew.run.conduct.warnings == (message,)
    crew.run.configure(protocol="async")
    assert crew.run.conduct.warnings == ()


def test_the_gate_opens_without_expected_workers_that_do_not_come_in_time():
    """One of them has joined and never pushes, one never starts: both are named until then."""
    crew = Crew("a", "joined", protocol="hardsync", expected_workers="3", stall_seconds="10")
    assert crew.push("a").waiting_for == ("joined", "1 more worker that has not joined")
    crew.run.tick()
    crew.pass_seconds(9, "a", "joined")
    assert crew.versions() == [0, 0]
    crew.pass_seconds(2, "a", "joined")
    assert crew.versions() == [1, 0]
    [message] = crew.events("stalled")
    assert "waited for joined, 1 more worker that has not joined" in message
    assert crew.run.roster == Roster(("a",))
    assert crew.push("joined", base_version=1).outcome is Outcome.PENDING
    assert crew.run.roster.workers == ("a", "joined")


def test_a_gate_at_which_nobody_waits_stays_shut():
    crew = Crew("a", protocol="hardsync", expected_workers="2", stall_seconds="10")
    crew.pass_seconds(35, "a")
    assert crew.run.roster.missing == 2
    assert crew.events("stalled") == []


def test_the_first_turns_do_without_expected_workers_that_do_not_come_in_time():
    crew = Crew("a", "joined", protocol="ssp:s=1", expected_workers="3", stall_seconds="10")
    woken = []
    ask = partial(crew.may_proceed, "a", wake=lambda: woken.append("a"))
    assert not ask()
    assert crew.run.conduct.waited_for_by("a") == ("joined", "1 more worker that has not joined")
    crew.run.tick()
    crew.pass_seconds(9, "a", "joined")
    assert woken == []
    crew.pass_seconds(2, "a", "joined")
    assert woken == ["a"]
    assert ask()
    [message] = crew.events("stalled")
    assert "waited for joined, 1 more worker that has not joined" in message


def test_the_rate_of_a_schedule_that_a_worker_owns_is_not_set_beside_it():
    crew = Crew("a", protocol="async")
    crew.push("a", learning_rate=0.5)
    with pytest.raises(ScheduleOwned, match=r"worker 'a' owns the schedule .* before the server's is changed"):
        crew.run.configure(learning_rate=0.1, staleness="divide")
    assert (crew.run.shards[0].learning_rate, crew.run.behaviour.staleness.text) == (0.5, "none")
    crew.run.leave("r", "a", 1, failed=False, message="")
    crew.run.configure(learning_rate=0.1)
    assert crew.run.shards[0].learning_rate == 0.1


def test_a_call_that_waits_is_no_sign_of_life():
    """A stopped process cannot withdraw its call: the server must not take it for alive by asking itself."""
    crew = Crew("a", "b", protocol="serial")
    assert crew.may_proceed("a")
    assert not crew.may_proceed("b")
    for _ in range(2):
        crew.clock.now += 20.0
        crew.run.heartbeat("r", "a", 1, clock=0, scalars={})
        assert crew.run.membership.get("b").alive
        crew.run.tick()
    with pytest.raises(WaitTimedOut, match="'b' was silent for longer than its lease while it waited: ask again"):
        crew.may_proceed("b", again=True)
    assert not crew.run.membership.get("b").alive
    # It is awake again, and calls.
    assert not crew.may_proceed("b")
    assert crew.run.membership.get("b").alive


def test_the_end_of_a_run_comes_with_an_update_that_no_push_brought():
    crew = Crew("a", "b", protocol="hardsync", expected_workers="2", stop_after="updates=2")
    for shard_id in (0, 1):
        crew.push("a", shard_id=shard_id)
        crew.push("b", shard_id=shard_id)
        crew.push("a", base_version=1, shard_id=shard_id)
    crew.run.leave("r", "b", 1, failed=False, message="")
    crew.run.conduct.complete_rounds()
    assert crew.versions() == [2, 2]
    assert crew.run.state.name == "FINISHED"


def test_a_reset_forgets_who_counted_and_what_waited():
    crew = Crew("a", "b", protocol="hardsync", expected_workers="2")
    crew.push("a")
    crew.run.reset("r")
    assert crew.run.roster.workers == ()
    assert crew.run.roster.missing == 2
    assert crew.run.conduct.account.bytes_held == 0
    assert crew.events("reset")


def test_a_schedule_by_epochs_that_cannot_move_is_told_of() -> None:
    crew = Crew("a", schedule="step:every=1,factor=0.5,unit=epochs", epoch_examples="100")
    for version in range(100):
        assert not crew.run.conduct.warnings
        crew.push("a", base_version=version, example_count=0)
    (warning,) = crew.run.conduct.warnings
    assert "count_examples), so the schedule by epochs does not move" in warning
    crew.push("a", base_version=100, example_count=1)
    assert not crew.run.conduct.warnings
