"""A run over real shards, without a server: rounds, the gate, changes and what waits."""

from functools import partial

import numpy as np
import pytest

from pyps.core.gradient import Extent, PayloadKind, PushPlan
from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.roster import Roster
from pyps_wire.errors import InvalidArgument, LimitExceeded, ScheduleOwned, WaitTimedOut
from shards import RunDriver, effort_of, gradient, pull, refusal, serving, sparse


def test_a_push_that_was_on_its_way_while_the_roster_shrank_completes_its_round_itself():
    driver = RunDriver("a", "b", protocol="hardsync", expected_workers="2")
    driver.push("a")
    driver.push("b")
    shard = driver.run.content.shards[0]
    original = shard.push

    def push(gradient, **keywords):
        # Between the look at the roster and the shard's lock b leaves, and its round is looked at in vain.
        driver.run.leave("r", "b", 1, failed=False, message="")
        driver.run.rounds.complete_rounds()
        return original(gradient, **keywords)

    shard.push = push
    assert driver.push("a", base_version=1).outcome is Outcome.PENDING
    assert shard.version == 2


class Name(str):
    """A worker's name that counts how often it is looked at."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        Name.looks += 1
        return str.__eq__(self, other)

    def __lt__(self, other: str) -> bool:
        Name.looks += 1
        return str.__lt__(self, other)

    def __hash__(self) -> int:
        Name.looks += 1
        return str.__hash__(self)


def test_a_push_to_a_round_of_many_workers_takes_no_more_than_one_to_a_round_of_few():
    def last_before_the_update(num_workers: int) -> int:
        names = [Name(f"w{index:02d}") for index in range(num_workers)]
        driver = RunDriver(*names, protocol="hardsync", expected_workers=str(num_workers))
        for name in names:
            driver.push(name)
        for name in names[:-2]:
            driver.push(name, base_version=1)
            driver.run.content.shards[0].when_version(2, lambda: None)
        looks = Name.looks
        return effort_of(lambda: driver.push(names[-2], base_version=1)) + Name.looks - looks

    few, many = last_before_the_update(8), last_before_the_update(64)
    assert many - few < 56 / 4, (few, many)


def test_bytes_that_wait_are_counted_until_they_are_an_update():
    driver = RunDriver("a", "b", "c", protocol="hardsync", expected_workers="3", max_pending_bytes="1024")
    account = driver.run.rounds.pending
    for shard_id in (0, 1):
        driver.push("a", shard_id=shard_id)
    assert account.bytes_held == 128
    driver.push("b")
    assert account.bytes_held == 192
    driver.push("c")
    assert account.bytes_held == 64
    account.bytes_max = 80
    with pytest.raises(LimitExceeded, match="--max-pending-bytes"):
        driver.push("b", shard_id=1)
    assert account.bytes_held == 64
    assert driver.run.content.shards[1].num_pending == 1
    account.bytes_max = 1024
    driver.run.configure(protocol="async")
    assert (account.bytes_held, driver.versions()) == (0, [1, 1])


def test_a_push_under_one_mutex_is_applied_to_all_its_shards_or_fails_for_all_and_gives_the_mutex_back():
    """Its owners, and reads under threads, are in tests/paper/test_asgd.py."""
    run = serving(protocol="asgd")

    def push_whole(*parts: tuple[list[float], int], sequence: int, kind: int = PayloadKind.GRADIENT) -> list[Receipt]:
        plans = [
            PushPlan(shard_id, gradient(values, sequence=sequence, base_version=base_version))
            for shard_id, (values, base_version) in enumerate(parts)
        ]
        plans[-1] = plans[-1]._replace(gradient=plans[-1].gradient._replace(kind=kind))
        return [pushed.receipt for pushed in run.push_whole(plans)]

    for wrong, kind, words in (
        (([1.0] * 16, 5), PayloadKind.GRADIENT, "version 5 of shard 1, which is at version 0"),
        (([1.0], 0), PayloadKind.GRADIENT, "4 bytes long"),
        (([1.0] * 16, 0), PayloadKind.DELTA, "pushed kind 2 to shard 1"),
    ):
        assert words in refusal(push_whole, ([1.0] * 16, 0), wrong, sequence=1, kind=kind)
        assert [shard.version for shard in run.content.shards.values()] == [0, 0]
        assert run.mutex is not None and not run.mutex.locked()
    receipts = push_whole(([1.0] * 16, 0), ([2.0] * 16, 0), sequence=2)
    assert [(receipt.shard_id, receipt.version_after) for receipt in receipts] == [(0, 1), (1, 1)]
    assert [pull(shard)[1][0] for shard in run.content.shards.values()] == [-1.0, -2.0]
    receipts = push_whole(([np.nan] * 16, 1), ([1.0] * 16, 1), sequence=3)
    assert [receipt.reason for receipt in receipts] == [Reason.NOT_FINITE, Reason.UNSPECIFIED]


def test_a_change_is_checked_as_a_whole_before_anything_changes():
    driver = RunDriver("a", protocol="hardsync", expected_workers="1")
    before = driver.run.rounds.behaviour
    with pytest.raises(InvalidArgument, match="nonsense"):
        driver.run.configure(protocol="async", schedule="nonsense")
    with pytest.raises(InvalidArgument, match="learning_rate"):
        driver.run.configure(protocol="async", learning_rate=float("nan"))
    assert driver.run.rounds.behaviour is before
    assert driver.events("configured") == []


def test_a_change_ends_the_warm_up_and_tells_what_it_settled():
    driver = RunDriver("a", "b", protocol="async", warmup="updates=9,protocol=hardsync", expected_workers="2")
    driver.push("a")
    settled = driver.run.configure(protocol="softsync:n=1")
    assert (settled.gradients, settled.updates) == (1, 1)
    assert driver.run.rounds.behaviour.texts["warmup"] == ""
    assert "gradients settled 1, updates made 1" in driver.events("configured")[0]


def test_counts_of_examples_on_some_gradients_only_are_told_once():
    driver = RunDriver("a", "b", protocol="hardsync", expected_workers="2")
    driver.push("a")
    driver.push("b", 3.0, example_count=0)
    assert driver.run.content.shards[0].read(lambda _, values: float(values[0])) == -2.0
    for _ in range(3):
        driver.run.tick()
    [message] = driver.events("warning")
    assert "without a count of examples" in message
    assert driver.run.rounds.warnings == (message,)
    driver.run.configure(protocol="async")
    assert driver.run.rounds.warnings == ()


def test_the_gate_opens_without_expected_workers_that_do_not_come_in_time():
    """One of them has joined and never pushes, one never starts: both are named until then."""
    driver = RunDriver("a", "joined", protocol="hardsync", expected_workers="3", stall_seconds="10")
    assert driver.push("a").waiting_for == ("joined", "1 more worker that has not joined")
    driver.run.tick()
    driver.pass_seconds(9, "a", "joined")
    assert driver.versions() == [0, 0]
    driver.pass_seconds(2, "a", "joined")
    assert driver.versions() == [1, 0]
    [message] = driver.events("stalled")
    assert "waited for joined, 1 more worker that has not joined" in message
    assert driver.run.membership.roster == Roster(("a",))
    assert driver.push("joined", base_version=1).outcome is Outcome.PENDING
    assert driver.run.membership.roster.workers == ("a", "joined")


def test_sparse_gradients_stay_sparse_where_they_wait():
    for protocol, warmup, waiting_bytes in (
        ("hardsync", "", 8),
        ("softsync:n=1", "", 8),
        ("async", "", 0),
        ("async", "updates=1,protocol=hardsync", 8),
    ):
        driver = RunDriver("a", "b", protocol=protocol, warmup=warmup, expected_workers="2")
        shard = driver.run.content.shards[0]
        pushed = sparse(1.0, *[0.0] * 15)
        driver.run.push(PushPlan(0, pushed), run_id="r")
        assert shard.pending_bytes == waiting_bytes, (protocol, warmup)
        driver.run.push(PushPlan(0, pushed._replace(worker_id="b")), run_id="r")
        assert pull(shard)[1].tolist()[:2] == [-1.0 if waiting_bytes else -2.0, 0.0], (protocol, warmup)


def test_a_round_with_a_quorum_waits_for_its_grace_and_not_longer():
    driver = RunDriver("a", "b", "c", protocol="backup:b=1,grace=2", expected_workers="3")
    for name in "abc":
        driver.push(name)
    assert driver.versions()[0] == 1, "the first round waits for all"
    driver.push("a", base_version=1)
    driver.clock.now = 101.0
    driver.push("b", base_version=1)
    for now, version in ((102.0, 1), (102.9, 1), (103.0, 2)):
        driver.clock.now = now
        driver.run.tick()
        assert driver.versions()[0] == version, now
    assert driver.push("c", base_version=1).reason is Reason.DROPPED
    # One that leaves makes two of three the quorum of the rest.
    driver.push("c", base_version=2)
    driver.run.leave("r", "b", 1, failed=False, message="")
    driver.run.rounds.complete_rounds()
    # A worker that comes in time is not late.
    assert driver.push("a", base_version=2).outcome is Outcome.APPLIED
    driver.clock.now = 105.0
    driver.run.tick()
    assert driver.versions()[0] == 3


def test_a_quorum_goes_and_comes_with_the_workers():
    driver = RunDriver("a", "b", "c", "d", protocol="backup:b=1,grace=2", expected_workers="3")
    for name, version in (("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1)):
        driver.push(name, base_version=version)
    # Two of four are none.
    driver.push("d", shard_id=1)
    driver.clock.now += 2
    driver.run.tick()
    assert driver.versions()[0] == 1
    driver.run.leave("r", "d", 1, failed=False, message="")
    for version in (1, 2):
        driver.run.tick()
        assert driver.versions()[0] == version
        driver.clock.now += 2


def test_a_round_of_the_warm_up_has_no_grace_and_one_after_it_has():
    driver = RunDriver(
        "a", "b", "c", protocol="backup:b=1,grace=2", warmup="updates=2,protocol=hardsync", expected_workers="3"
    )
    for base_version, late in ((0, "c"), (1, "c"), (2, "")):
        for name in "ab":
            driver.push(name, base_version=base_version)
        driver.clock.now += 2
        driver.run.tick()
        assert driver.versions()[0] == base_version + (not late)
        if late:
            driver.push(late, base_version=base_version)


@pytest.mark.parametrize(
    ("protocol", "names", "what"),
    [
        ("softsync:n=1", "ab", "gradients that waited became updates, as fewer workers are active: worker b"),
        ("hardsync", "ab", "rounds were completed without a worker that others waited for: worker b"),
        ("hardsync", "a", "rounds were completed without workers that were expected: shards 1"),
    ],
)
def test_the_event_of_a_completed_round_says_why_it_was_completed(protocol: str, names: str, what: str) -> None:
    driver = RunDriver(*names, protocol=protocol, expected_workers="2", stall_seconds="10")
    for name in names:
        driver.push(name)
    driver.run.tick()
    if names == "ab":
        assert driver.push("a", base_version=1).outcome is Outcome.PENDING
        driver.run.leave("r", "b", 1, failed=False, message="")
        driver.run.rounds.complete_rounds()
    else:
        driver.pass_seconds(11, "a")
    [event] = driver.events("round")
    assert event.startswith(what)


def test_the_first_turns_do_without_expected_workers_that_do_not_come_in_time():
    driver = RunDriver("a", "joined", protocol="ssp:s=1", expected_workers="3", stall_seconds="10")
    woken = []
    ask = partial(driver.may_proceed, "a", wake=lambda: woken.append("a"))
    assert not ask()
    assert driver.run.rounds.waited_for_by("a") == ("joined", "1 more worker that has not joined")
    driver.run.tick()
    driver.pass_seconds(9, "a", "joined")
    assert woken == []
    driver.pass_seconds(2, "a", "joined")
    assert woken == ["a"]
    assert ask()
    [message] = driver.events("stalled")
    assert "waited for joined, 1 more worker that has not joined" in message


def test_the_rate_of_a_schedule_that_a_worker_owns_is_not_set_beside_it():
    driver = RunDriver("a", protocol="async")
    driver.push("a", learning_rate=0.5)
    with pytest.raises(ScheduleOwned, match=r"worker 'a' owns the schedule .* before the server's is changed"):
        driver.run.configure(learning_rate=0.1, staleness="divide")
    assert (driver.run.content.shards[0].learning_rate, driver.run.rounds.behaviour.staleness.text) == (0.5, "none")
    driver.run.leave("r", "a", 1, failed=False, message="")
    driver.run.configure(learning_rate=0.1)
    assert driver.run.content.shards[0].learning_rate == 0.1


def test_a_call_that_waits_is_no_sign_of_life():
    """A stopped process cannot withdraw its call: the server must not take it for alive by asking itself."""
    driver = RunDriver("a", "b", protocol="serial")
    assert driver.may_proceed("a")
    assert not driver.may_proceed("b")
    for _ in range(2):
        driver.clock.now += 20.0
        driver.run.heartbeat("r", "a", 1, clock=0, scalars={})
        assert driver.run.membership.get("b").alive
        driver.run.tick()
    with pytest.raises(WaitTimedOut, match="'b' was silent for longer than its lease while it waited: ask again"):
        driver.may_proceed("b", again=True)
    assert not driver.run.membership.get("b").alive
    assert not driver.may_proceed("b")
    assert driver.run.membership.get("b").alive


def test_the_end_of_a_run_comes_with_an_update_that_no_push_brought():
    driver = RunDriver("a", "b", protocol="hardsync", expected_workers="2", stop_after="updates=2")
    for shard_id in (0, 1):
        driver.push("a", shard_id=shard_id)
        driver.push("b", shard_id=shard_id)
        driver.push("a", base_version=1, shard_id=shard_id)
    driver.run.leave("r", "b", 1, failed=False, message="")
    driver.run.rounds.complete_rounds()
    assert driver.versions() == [2, 2]
    assert driver.run.state.name == "FINISHED"


def test_a_reset_forgets_who_counted_and_what_waited():
    driver = RunDriver("a", "b", protocol="hardsync", expected_workers="2")
    driver.push("a")
    driver.run.reset("r")
    assert driver.run.membership.roster.workers == ()
    assert driver.run.membership.roster.missing == 2
    assert driver.run.rounds.pending.bytes_held == 0
    assert driver.events("reset")


def test_a_schedule_by_epochs_that_cannot_move_is_told_of() -> None:
    driver = RunDriver("a", schedule="step:every=1,factor=0.5,unit=epochs", epoch_examples="100")
    for version in range(100):
        assert not driver.run.rounds.warnings
        driver.push("a", base_version=version, example_count=0)
    (warning,) = driver.run.rounds.warnings
    assert "examples_in_batch), so the schedule by epochs does not move" in warning
    driver.push("a", base_version=100, example_count=1)
    assert not driver.run.rounds.warnings


def test_weights_by_speed_without_any_count_of_examples_are_told_of() -> None:
    driver = RunDriver("a", "b", protocol="hardsync:weighting=by_speed")
    assert not driver.run.rounds.warnings
    driver.push("a", example_count=0)
    (warning,) = driver.run.rounds.warnings
    assert "examples_in_batch), so weighting=by_speed does not act" in warning
    driver.run.configure(protocol="hardsync")
    assert not driver.run.rounds.warnings


def test_sparse_gradients_with_extents_wait_as_such_and_are_divided_by_their_senders():
    driver = RunDriver("a", "b", protocol="hardsync", expected_workers="2")
    for name, start in (("a", 0), ("b", 1)):
        pushed = sparse(2.0, 4.0, worker_id=name, sequence=1, extents=(Extent(start, 2),))
        driver.run.push(PushPlan(0, pushed), run_id="r")
    assert driver.run.content.shards[0].read(lambda _, values: values[:3].tolist()) == [-2.0, -3.0, -4.0]


def test_a_sparse_push_is_refused_where_a_schedule_raises_the_momentum():
    driver = RunDriver("a", "b", optimizer="momentum:learning_rate=0.5,momentum=0")
    length = driver.run.content.shards[0].length

    def push_sparse(sequence, **fields):
        plan = PushPlan(0, sparse(*[1.0] * length, worker_id="b", sequence=sequence, **fields))
        return driver.run.push(plan, run_id="r").receipt.outcome

    assert push_sparse(1) is push_sparse(2, momentum=0.0, learning_rate=0.5) is Outcome.APPLIED
    with pytest.raises(InvalidArgument, match=r"worker 'b' pushes in codec pairs.*momentum has momentum 0.9, which"):
        push_sparse(3, momentum=0.9, learning_rate=0.5)
    assert driver.run.content.shards[0].version == 2

    driver = RunDriver("a", "b", optimizer="momentum:learning_rate=0.5,momentum=0")
    assert driver.push("a", momentum=0.9, learning_rate=0.5).outcome is Outcome.APPLIED
    with pytest.raises(InvalidArgument, match=r"has momentum 0\.9"):
        push_sparse(1)
