"""Who may begin a step: each pacer's rule, and that no order of comings and goings stops everybody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacing_world import MAKERS, WORKERS, World, arrive_all, happenings
from pyps.core.pacing import ClockBound, Pacer, TurnTaking
from pyps_wire.errors import BadRequest

# Turns.


def test_turns_go_round_in_order_of_joining() -> None:
    pacer = TurnTaking()
    turns = arrive_all(pacer, "bca")
    for clock in (1, 2):
        for worker_id in "bca":
            turns += pacer.arrive(worker_id, clock)
    assert "".join(turns) == "bcabcab"


def test_one_that_joins_during_a_turn_goes_next_where_nobody_waits() -> None:
    pacer = TurnTaking()
    assert arrive_all(pacer, "ab") == ["a"]
    assert pacer.arrive("a", 1) == ["b"]


def test_one_that_joins_late_goes_after_those_that_wait_and_before_the_one_that_computes() -> None:
    pacer = TurnTaking()
    arrive_all(pacer, "abcd")
    assert [*pacer.arrive("a", 1), *pacer.arrive("b", 1), *pacer.arrive("c", 1), *pacer.arrive("d", 1)] == list("bcda")


def test_one_that_departs_and_comes_again_joins_last() -> None:
    pacer = TurnTaking()
    arrive_all(pacer, "abc")
    pacer.depart("b")
    assert pacer.arrive("b", 7) == []
    assert [*pacer.arrive("a", 1), *pacer.arrive("c", 1), *pacer.arrive("b", 8)] == ["c", "b", "a"]


def test_the_turn_goes_on_when_the_one_that_has_it_departs() -> None:
    pacer = TurnTaking()
    arrive_all(pacer, "abc")
    assert pacer.depart("a") == ["b"]


def test_a_departure_out_of_turn_lets_nobody_go() -> None:
    pacer = TurnTaking()
    arrive_all(pacer, "abc")
    assert pacer.depart("b") == pacer.depart("unheard of") == []
    assert pacer.arrive("a", 1) == ["c"]


def test_asking_again_because_the_answer_was_lost_does_not_end_the_turn() -> None:
    pacer = TurnTaking()
    arrive_all(pacer, "ab")
    assert pacer.arrive("a", 0) == ["a"]
    assert pacer.waiting_for("b") == ("a",)


def test_asking_again_while_waiting_changes_nothing() -> None:
    pacer = TurnTaking()
    arrive_all(pacer, "abc")
    assert pacer.arrive("c", 0) == pacer.arrive("b", 0) == []
    assert pacer.arrive("a", 1) == ["b"]


def test_one_waits_for_the_worker_whose_turn_it_is() -> None:
    pacer = TurnTaking()
    arrive_all(pacer, "bac")
    assert (pacer.waiting_for("a"), pacer.waiting_for("b"), pacer.waiting_for("unheard of")) == (("b",), (), ())


@given(happenings)
def test_turns_are_exclusive_and_fair(happenings: list[tuple[str, str]]) -> None:
    """Nobody gets a second turn while another, present all the time, waits for one."""
    world = World(TurnTaking())
    overtaken: dict[str, Counter[str]] = {}
    for happening in happenings:
        had = len(world.turns)
        world.play([happening])
        assert len(world.computing) == (1 if world.computing | world.waiting else 0)
        # One that came anew waits from now on.
        waited = world.waiting - ({happening[0]} if happening[1] != "ask" else set())
        overtaken = {worker_id: overtaken.get(worker_id, Counter()) for worker_id in waited}
        for worker_id in waited:
            overtaken[worker_id].update(world.turns[had:])
            assert max(overtaken[worker_id].values(), default=0) <= 1


# The bound on clocks.


@pytest.mark.parametrize("s", [0, 1, 3])
def test_a_worker_proceeds_until_it_is_s_clocks_ahead_of_the_slowest(s: int) -> None:
    """Ho et al. 2013: it may proceed iff c - min_q c_q <= s."""
    pacer = ClockBound(s)
    arrive_all(pacer, "ab")
    clocks = [clock for clock in range(1, s + 1) if pacer.arrive("a", clock) == ["a"]]
    assert clocks == list(range(1, s + 1))
    assert pacer.arrive("a", s + 1) == []
    assert pacer.waiting_for("a") == ("b",)
    assert pacer.arrive("b", 1) == ["a", "b"]


def test_one_waits_for_all_that_are_too_far_behind() -> None:
    pacer = ClockBound(1)
    arrive_all(pacer, "abcd")
    pacer.arrive("c", 1)
    arrive_all(pacer, "a", clock=2)
    assert pacer.waiting_for("a") == ("b", "d")


def test_one_that_joins_late_begins_at_the_present_minimum() -> None:
    """Whatever its own count: 0, or that of a life before."""
    pacer = ClockBound(1)
    arrive_all(pacer, "ab")
    arrive_all(pacer, "ab", clock=1)
    arrive_all(pacer, "ab", clock=2)
    assert pacer.arrive("late", 0) == ["late"]
    assert pacer.arrive("later", 700) == ["later"]
    assert arrive_all(pacer, "ab", clock=3) == ["a", "b"]
    assert arrive_all(pacer, "ab", clock=4) == []
    assert pacer.waiting_for("a") == ("late", "later")
    assert pacer.arrive("late", 1) == ["late"]
    assert pacer.arrive("later", 701) == ["a", "b", "later"]


def test_those_held_back_by_the_slowest_go_on_when_it_departs() -> None:
    pacer = ClockBound(0)
    arrive_all(pacer, "abc")
    assert arrive_all(pacer, "ab", clock=1) == []
    assert pacer.depart("c") == ["a", "b"]


def test_a_worker_that_began_anew_counts_from_the_beginning() -> None:
    pacer = ClockBound(1)
    for clock in range(5):
        arrive_all(pacer, "ab", clock=clock)
    pacer.depart("a")
    assert pacer.arrive("a", 0) == ["a"]
    assert pacer.arrive("b", 5) == ["b"]


def test_a_clock_that_goes_backwards_is_refused() -> None:
    """It would join at the slowest each time, and so run ahead without bound."""
    pacer = ClockBound(1)
    arrive_all(pacer, "ab")
    assert pacer.arrive("a", 1) == ["a"]
    with pytest.raises(BadRequest, match="'a' asks to go on after 0 steps, and has said that it finished 1"):
        pacer.arrive("a", 0)
    assert pacer.arrive("a", 2) == []


# Those that are waited for no longer.


def test_one_set_aside_goes_on_with_its_step_and_joins_again_with_the_next() -> None:
    pacer = ClockBound(1)
    arrive_all(pacer, "ab")
    pacer.arrive("b", 1)
    assert pacer.arrive("b", 2) == []
    assert pacer.set_aside("a") == ["b"]
    assert pacer.arrive("a", 0) == ["a"]
    assert pacer.arrive("b", 3) == ["b"]
    assert pacer.arrive("a", 1) == ["a"]
    assert [pacer.arrive("b", 4), pacer.arrive("b", 5)] == [["b"], []]
    assert pacer.waiting_for("b") == ("a",)


def test_one_that_began_anew_after_it_was_set_aside_joins_with_any_count() -> None:
    pacer = TurnTaking()
    arrive_all(pacer, "ab", clock=5)
    assert pacer.set_aside("a") == ["b"]
    pacer.depart("a")
    assert pacer.arrive("a", 0) == []
    assert pacer.arrive("b", 6) == ["a"]


def test_a_question_taken_back_gives_up_the_turn_and_comes_last_when_asked_again() -> None:
    pacer = TurnTaking()
    arrive_all(pacer, "abcd")
    assert pacer.withdraw("b") == []
    assert pacer.withdraw("a") == ["c"]
    assert pacer.arrive("b", 0) == []
    assert [pacer.arrive("c", 1), pacer.arrive("d", 1)] == [["d"], ["b"]]


def test_a_question_taken_back_leaves_the_clock_where_it_was() -> None:
    """Else a worker could run ahead by asking and taking back."""
    pacer = ClockBound(0)
    arrive_all(pacer, "ab")
    assert pacer.arrive("a", 1) == []
    pacer.withdraw("a")
    assert pacer.arrive("a", 1) == []
    assert pacer.waiting_for("a") == ("b",)


@given(happenings, st.integers(0, 4))
def test_nobody_is_ever_more_than_s_clocks_ahead(happenings: list[tuple[str, str]], s: int) -> None:
    """R1: max clock - min clock <= s among those let go, s + 1 when such a step has ended."""
    world = World(ClockBound(s))
    # By a second account: clocks relative to where each worker came in.
    clocks: dict[str, int] = {}
    for worker_id, what in happenings:
        finished = what == "ask" and worker_id in world.computing
        if what != "ask":
            clocks.pop(worker_id, None)
        world.play([(worker_id, what)])
        if worker_id not in clocks and what != "depart":
            clocks[worker_id] = min(clocks.values(), default=0)
        clocks.update({worker_id: clocks[worker_id] + 1} if finished else {})
        slowest = min(clocks.values(), default=0)
        assert all(clocks[computing] - slowest <= s for computing in world.computing)
        assert all(clocks[waiting] - slowest == s + 1 for waiting in world.waiting)


# Nobody waits for ever.


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@given(happenings=happenings, random=st.randoms(use_true_random=False))
def test_whatever_happens_somebody_may_go_on_and_in_the_end_everybody_has(
    make: Callable[[], Pacer], happenings: list[tuple[str, str]], random: Random
) -> None:
    world = World(make())
    for happening in happenings:
        world.play([happening])
        assert world.computing or not world.waiting
        for worker_id in world.waiting:
            assert worker_id not in world.pacer.waiting_for(worker_id)
            assert world.pacer.waiting_for(worker_id)
    left = dict.fromkeys(world.computing | world.waiting, 6)
    while left:
        assert world.computing
        worker_id = random.choice(sorted(world.computing))
        left[worker_id] -= 1
        if left[worker_id]:
            world.ask(worker_id)
        else:
            del left[worker_id]
            world.depart(worker_id)
    assert not world.waiting


@given(happenings=happenings, quorum=st.integers(1, len(WORKERS)))
def test_before_the_quorum_nobody_computes_and_after_it_somebody_does(
    happenings: list[tuple[str, str]], quorum: int
) -> None:
    pacer = ClockBound(2, quorum=quorum)
    world = World(pacer)
    seen = set()
    for worker_id, what in happenings:
        world.play([(worker_id, what)])
        seen |= {worker_id} if what != "depart" else set()
        assert pacer.missing == max(0, quorum - len(seen))
        assert bool(world.computing) == bool(not pacer.missing and (world.computing or world.waiting))
