"""Release one by one, the quorum at the start, and the stages of a warm-up: who may begin a step."""

from __future__ import annotations

from pyps.core.pacing import ClockBound, Release, StagedPacer, TurnTaking
from unit.core.test_pacing import World, arrive_all


def test_workers_are_released_one_after_the_other_in_order_of_joining() -> None:
    """replicas(t) = min(L, 1 + floor((t - t_w) / dt)) of the algorithm notes, 2.3."""
    pacer = Release(10, 4)
    released = arrive_all(pacer, "bca")
    counts = []
    for version in range(10, 20):
        released += pacer.advanced(version)
        counts.append(len(released))
    assert counts == [min(3, 1 + (version - 10) // 4) for version in range(10, 20)]
    assert released == list("bca")


def test_one_not_yet_released_moves_up_when_one_before_it_departs() -> None:
    pacer = Release(10, 4)
    arrive_all(pacer, "abc")
    assert pacer.depart("a") == ["b"]
    assert pacer.waiting_for("c") == ("b",)


def test_nobody_needs_to_ask_once_all_are_released_and_one_more_would_be() -> None:
    pacer = Release(10, 4)
    arrive_all(pacer, "abc")
    assert [pacer.asks(version) for version in (9, 18, 21, 22)] == [True, True, True, False]


def test_nobody_proceeds_before_the_quorum_has_asked() -> None:
    for pacer in (TurnTaking(quorum=3), ClockBound(2, quorum=3)):
        assert arrive_all(pacer, "aab") == []
        assert (pacer.missing, pacer.waiting, pacer.waiting_for("a")) == (1, ("a", "b"), ())
        assert pacer.arrive("c", 0)[0] == "a"


def test_one_that_has_asked_and_departed_or_was_excused_counts_for_the_quorum_once() -> None:
    bound = ClockBound(0, quorum=2)
    bound.arrive("a", 0)
    bound.depart("a")
    assert bound.arrive("b", 0) == ["b"]
    pacer = TurnTaking(quorum=3)
    assert pacer.arrive("a", 0) == []
    assert pacer.excuse(["a", "b"]) == []
    assert pacer.excuse(["c"]) == ["a"]


def test_those_that_wait_go_on_when_the_quorum_is_lowered_and_anything_happens() -> None:
    pacer = ClockBound(0, quorum=5)
    arrive_all(pacer, "ab")
    pacer.quorum = 0
    assert pacer.advanced(1) == ["a", "b"]


def test_a_warm_up_goes_from_turns_over_release_to_freedom() -> None:
    world = World(StagedPacer(TurnTaking(), None, updates=4, release_every=2))
    for worker_id in "abc":
        world.ask(worker_id)
    story = []
    for _ in range(12):
        story.append("".join(sorted(world.computing)))
        # All that compute push, in order of name, and ask again.
        for worker_id in sorted(world.computing):
            world.ask(worker_id)
    # One at a time for four updates; then the first alone for two, then two for two, then all.
    assert story[:8] == ["a", "b", "c", "a", "a", "a", "ab", "abc"]
    assert not world.pacer.asks(world.version)


def test_clocks_are_counted_from_the_end_of_the_warm_up() -> None:
    pacer = StagedPacer(None, ClockBound(0), updates=10)
    arrive_all(pacer, "ab")
    arrive_all(pacer, "a", clock=7)
    pacer.advanced(10)
    assert pacer.arrive("a", 8) == []
    assert pacer.waiting_for("a") == ("b",)
    assert pacer.arrive("b", 1) == ["a", "b"]


def test_a_free_warm_up_asks_where_a_later_stage_must_know_who_is_there() -> None:
    assert StagedPacer(None, ClockBound(0), updates=10).asks(0)
    assert StagedPacer(None, None, updates=10, release_every=5).asks(0)
    assert not StagedPacer(None, None, updates=10).asks(0)


def test_a_run_that_is_past_its_warm_up_is_in_its_main_stage_at_once() -> None:
    pacer = StagedPacer(TurnTaking(), ClockBound(1), updates=10)
    pacer.advanced(10)
    assert arrive_all(pacer, "ab") == ["a", "b"]


def test_another_pacer_takes_over_who_waits_and_who_computes() -> None:
    turns, bound = TurnTaking(), ClockBound(0)
    arrive_all(turns, "abc")
    turns.arrive("a", 40)
    assert turns.waiting == ("a", "c")
    assert bound.take_over(turns) == ["a", "c"]
    assert bound.arrive("a", 41) == []
    assert bound.waiting_for("a") == ("b", "c")


def test_turns_begin_when_those_that_compute_together_have_asked_again() -> None:
    bound, turns = ClockBound(5), TurnTaking()
    arrive_all(bound, "ab")
    assert turns.take_over(bound) == []
    assert turns.arrive("a", 1) == []
    assert turns.arrive("b", 1) == ["a"]
