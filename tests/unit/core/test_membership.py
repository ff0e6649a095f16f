import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyps.core.effects import NONE, Effects
from pyps.core.membership import Member, Membership, WorkerState
from pyps.core.roster import roster_of_part
from pyps_wire.errors import LimitExceeded, Superseded, UnknownWorker


@pytest.fixture
def members() -> Membership:
    return Membership(lease_seconds=30.0, workers_max=3)


def ids(members: Membership) -> list[str]:
    return [member.worker_id for member in members.alive()]


def gone(effects: Effects) -> list[str]:
    return [worker_id for worker_id, _ in effects.gone]


def known(members: Membership, worker_id: str) -> Member:
    return members.get(worker_id)


def roster(members: Membership) -> tuple[list[str], int]:
    return list(members.roster.workers), members.roster.missing


def test_a_silent_workers_lease_runs_out_once_and_it_is_alive_again_when_it_is_heard_of(members):
    members.join("a", 1, now=0.0)
    members.heard("a", 1, now=0.0)
    members.join("b", 1, now=10.0)
    assert members.expire(29.9) is NONE
    expired = members.expire(30.5)
    assert (expired.gone, expired.departed, expired.notices[0].kind) == ((("a", True),), ("a",), "expired")
    assert (members.expire(31.0), ids(members), members.num_alive) == (NONE, ["b"], 1)
    assert [notice.kind for notice in members.heard("a", 1, now=35.0).notices] == ["back"]
    assert members.num_alive == 2


def test_a_sign_of_life_renews_the_lease_and_one_that_was_overtaken_does_not_shorten_it(members):
    members.join("a", 1, now=0.0)
    members.heard("a", 1, now=20.0)
    members.heard("a", 1, now=1.0)
    assert members.expire(49.9) is NONE
    assert gone(members.expire(50.1)) == ["a"]


def test_an_unknown_worker_or_process_must_say_hello(members):
    with pytest.raises(UnknownWorker, match="say Hello"):
        members.heard("a", 1, now=0.0)
    members.join("a", 1, now=0.0)
    with pytest.raises(UnknownWorker, match="say Hello"):
        members.heard("a", 2, now=1.0)


def test_a_later_process_takes_the_name_over_and_the_earlier_ones_farewell_does_not_end_it(members):
    members.join("a", 1, now=0.0)
    taken_over = members.join("a", 2, now=1.0)
    assert (taken_over.gone, taken_over.departed) == ((("a", True),), ("a",))
    with pytest.raises(Superseded, match="later process"):
        members.heard("a", 1, now=2.0)
    assert members.leave("a", 1, now=2.0, failed=False) is NONE
    assert (members.num_alive, members.num_ended) == (1, 1)


def test_an_earlier_process_gets_the_name_of_a_dead_one_and_not_of_a_live_one(members):
    members.join("a", 2, now=0.0)
    with pytest.raises(Superseded, match="incarnation 2, this one is 1"):
        members.join("a", 1, now=1.0)
    members.expire(31.0)
    members.join("a", 1, now=32.0)
    assert known(members, "a").incarnation == 1, "its clock may be slow"


def test_a_worker_that_leaves_no_longer_counts_and_has_to_say_hello_to_come_back(members):
    members.join("a", 1, now=0.0)
    assert members.leave("a", 1, now=1.0, failed=True, message="out of memory").departed == ("a",)
    left = known(members, "a")
    assert (left.state, left.message, members.num_alive) == (WorkerState.FAILED, "out of memory", 0)
    assert members.num_ended == 1
    with pytest.raises(UnknownWorker):
        members.heard("a", 1, now=2.0)
    members.join("a", 1, now=3.0)
    assert known(members, "a").alive


def test_too_many_workers_are_refused_with_the_setting_to_change(members):
    for worker_id in "abc":
        members.join(worker_id, 1, now=0.0)
    with pytest.raises(LimitExceeded, match=r"3 workers are alive and the limit is 3; raise --max-workers"):
        members.join("d", 1, now=1.0)
    members.join("b", 2, now=1.0)
    assert known(members, "b").incarnation == 2, "its own may say Hello again"


def test_names_that_said_no_more_than_hello_make_way_and_are_not_remembered(members):
    for worker_id in "abc":
        members.join(worker_id, 1, now=0.0)
    members.heard("b", 1, now=1.0)
    members.join("d", 1, now=11.0)
    assert ids(members) == ["b", "c", "d"]
    members.join("e", 1, now=12.0)
    with pytest.raises(LimitExceeded, match="raise --max-workers"):
        members.join("f", 1, now=20.0)
    assert gone(members.expire(50.0)) == ["b", "d", "e"]
    assert [member.worker_id for member in members.all()] == ["b"]
    with pytest.raises(UnknownWorker, match="say Hello"):
        members.heard("d", 1, now=51.0)


def test_a_repeated_hello_keeps_the_workers_figures(members):
    members.join("a", 1, now=0.0)
    members.heard("a", 1, now=1.0, clock=7, scalars={"loss": 0.5})
    assert members.join("a", 1, now=2.0) == NONE
    member = known(members, "a")
    assert (member.clock, dict(member.scalars), member.joined_at) == (7, {"loss": 0.5}, 0.0)


def test_a_worker_counts_from_its_first_push(members):
    members.join("b", 1, now=0.0)
    members.join("a", 1, now=0.0)
    assert roster(members) == ([], 0)
    assert members.pushed("b", 1, now=1.0)[0].workers == ("b",)
    active, effects = members.pushed("a", 1, now=1.0)
    assert (active.workers, [notice.kind for notice in effects.notices]) == (("a", "b"), ["counts"])
    assert members.pushed("a", 1, now=2.0) == (active, NONE) and members.roster is active, "nothing has changed"
    members.join("a", 2, now=2.0)
    assert roster(members) == (["b"], 0), "a later process counts from its own first push"
    with pytest.raises(Superseded):
        members.pushed("a", 1, now=3.0)


def test_a_worker_that_goes_or_stalls_counts_no_more(members):
    for index, name in enumerate(("a", "b", "c")):
        members.join(name, 1, now=0.0)
        members.pushed(name, 1, now=10.0 * index)
    members.leave("c", 1, now=30.0, failed=False)
    assert roster(members) == (["a", "b"], 0)
    members.expire(35.0)
    assert roster(members) == (["b"], 0)
    assert members.stall("b")
    assert not members.stall("b")
    assert (roster(members), ids(members)) == (([], 0), ["b"])
    members.heard("a", 1, now=36.0)
    assert roster(members) == ([], 0), "back, it counts again from its next push"
    members.pushed("b", 1, now=37.0)
    assert roster(members) == (["b"], 0)


def test_expected_workers_are_missing_until_they_have_pushed_or_gone():
    members = Membership(lease_seconds=30.0, workers_max=9, expected_workers=3)
    assert roster(members) == ([], 3)
    for name in ("a", "b", "c"):
        members.join(name, 1, now=0.0)
    members.pushed("a", 1, now=1.0)
    assert roster(members) == (["a"], 2)
    members.leave("b", 1, now=2.0, failed=True)
    assert roster(members) == (["a"], 1)
    members.pushed("c", 1, now=3.0)
    assert roster(members) == (["a", "c"], 0)
    members.join("d", 1, now=4.0)
    members.leave("a", 1, now=5.0, failed=False)
    assert roster(members) == (["c"], 0), "once all have come nobody is missing again"


def test_an_expected_worker_that_restarts_is_missing_again():
    members = Membership(lease_seconds=30.0, workers_max=9, expected_workers=2)
    members.join("a", 1, now=0.0)
    members.pushed("a", 1, now=0.0)
    members.join("a", 2, now=1.0)
    assert roster(members) == ([], 2)
    members.expect_no_more()
    assert roster(members) == ([], 0)


@pytest.fixture
def pair() -> Membership:
    members = Membership(lease_seconds=1000.0, workers_max=9, stall_seconds=10.0)
    for name in ("a", "b"):
        members.join(name, 1, now=0.0)
        members.pushed(name, 1, now=0.0)
    return members


def look(members: Membership, *in_rounds: str, now: float, **held: Any) -> list[str]:
    """Whom nobody waits for any more after the look."""
    effects = members.end_stalls(now=now, idle={"a", "b"}, in_rounds=set(in_rounds), **held)
    return [*effects.departed, *effects.set_aside, *["expected"] * effects.opens_gate]


def test_a_worker_that_others_wait_for_stalls_and_long_steps_do_not(pair):
    assert [look(pair, *names, now=now) for names, now in (("", 500.0), ("b", 500.0), ("b", 509.0))] == [[]] * 3
    assert look(pair, "b", now=510.0) == ["b"]
    assert pair.roster.workers == ("a",)


def test_a_push_or_a_pause_restarts_the_stall_time(pair):
    look(pair, "a", "b", now=100.0)
    pair.taken("b", 1, now=105.0)
    look(pair, "b", now=106.0)
    assert look(pair, "a", "b", now=112.0) == []
    assert look(pair, "a", "b", now=115.0) == ["b"]


def test_a_step_is_timed_until_the_next_whatever_is_pushed(pair):
    assert [look(pair, now=now, at_steps={"a": step}) for now, step in ((0.0, 1), (9.0, 2))] == [[], []]
    pair.taken("a", 1, now=15.0)
    assert look(pair, now=18.0, at_steps={"a": 2}) == []
    assert look(pair, now=19.0, at_steps={"a": 2}) == ["a"]


def test_a_tick_without_waiting_calls_restarts_the_stall_time_of_the_gate(pair):
    for now, at_gate in ((100.0, ["c"]), (109.0, ["c"]), (109.5, []), (110.0, ["c"]), (119.0, ["c"])):
        assert look(pair, now=now, at_gate=at_gate) == []
    assert look(pair, now=120.0, at_gate=["c"]) == ["expected"]


def test_after_a_takeover_workers_that_are_gone_have_come_and_the_others_have_a_lease_to_join_again(members):
    members.restore({"ended": "finished", "dies": "alive", "lives": "alive"}, expected_workers=3, now=10.0)
    assert roster(members) == ([], 2)
    members.join("lives", 1, now=11.0)
    members.pushed("lives", 1, now=11.0)
    assert roster(members) == (["lives"], 1)
    members.leave("lives", 1, now=12.0, failed=False)
    members.expire(39.9)
    assert not members.done(expected_workers=3)
    members.expire(40.1)
    assert members.done(expected_workers=3) and not members.finished(expected_workers=3)
    assert roster(members) == ([], 0)


CALLS = st.tuples(st.sampled_from(["join", "pushed", "leave", "expire"]), st.sampled_from("abcde"))


@given(st.integers(0, 4), st.lists(CALLS, max_size=30))
def test_a_roster_that_is_changed_equals_one_that_is_made_of_all_members(expected, calls):
    members = Membership(lease_seconds=30.0, workers_max=10)
    members.expect(expected)
    for now, (call, worker_id) in enumerate(calls):
        if call == "join":
            members.join(worker_id, now, now=float(now))
        elif call == "expire":
            members.expire(now + 30.5)
        elif worker_id in ids(members):
            more = {"failed": False} if call == "leave" else {}
            getattr(members, call)(worker_id, known(members, worker_id).incarnation, now=float(now), **more)
        made = roster_of_part(members._entries(), copy.deepcopy(members._expectation))
        assert members.roster == made
