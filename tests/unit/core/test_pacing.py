"""Who may begin a step: each pacer's rule, and that no order of comings and goings stops everybody."""

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyps.core.pacing import ClockBound, Pacer, Release, StagedPacer, TurnTaking
from pyps_wire.errors import InvalidArgument
from shards import effort_of

WORKERS = "abcde"
MAKERS: list[Callable[[], Pacer]] = [
    TurnTaking,
    lambda: ClockBound(0),
    lambda: ClockBound(3),
    lambda: Release(4, 3),
    lambda: StagedPacer(TurnTaking(), None, updates=5),
    lambda: StagedPacer(TurnTaking(), None, updates=5, release_every=2),
    lambda: StagedPacer(None, ClockBound(1), updates=5, release_every=2),
    lambda: StagedPacer(TurnTaking(), TurnTaking(), updates=5, release_every=2),
]

# An event of a worker: it requests its next step, departs, or restarts with a count of its own.
happenings = st.lists(
    st.tuples(st.sampled_from(WORKERS), st.sampled_from([*["ask"] * 4, "depart", "restart"])),
    max_size=120,
)


class World:
    """Workers around a pacer, as a server keeps them: each push is an update."""

    def __init__(self, pacer: Pacer) -> None:
        self.pacer = pacer
        self.version = 0
        self.counts = dict.fromkeys(WORKERS, 0)
        self.computing: set[str] = set()
        self.waiting: set[str] = set()
        self.turns: list[str] = []

    def play(self, happenings: Iterable[tuple[str, str]]) -> None:
        for worker_id, what in happenings:
            if what == "ask":
                self.ask(worker_id)
            elif what == "depart":
                self.depart(worker_id)
            else:
                self.depart(worker_id)
                self.counts[worker_id] = 0
                self.ask(worker_id)

    def ask(self, worker_id: str) -> None:
        """Push if the worker computes, then request its next step; repeat the request if it waits."""
        if worker_id in self.computing:
            self.computing.remove(worker_id)
            self.counts[worker_id] += 1
            self.version += 1
            self.let_go(self.pacer.advanced(self.version))
        self.waiting.add(worker_id)
        if self.pacer.asks(self.version):
            self.let_go(self.pacer.arrive(worker_id, self.counts[worker_id]))
        else:
            self.let_go(list(self.waiting))

    def depart(self, worker_id: str) -> None:
        self.computing.discard(worker_id)
        self.waiting.discard(worker_id)
        self.let_go(self.pacer.depart(worker_id))

    def let_go(self, worker_ids: list[str]) -> None:
        """Only those may be named that wait, each once."""
        assert len(set(worker_ids)) == len(worker_ids)
        assert set(worker_ids) <= self.waiting
        self.waiting -= set(worker_ids)
        self.computing |= set(worker_ids)
        self.turns += worker_ids


def together(pacer: Pacer, quorum: int) -> Pacer:
    """Return the pacer with a quorum."""
    pacer.quorum = quorum
    return pacer


def arrive_all(pacer: Pacer, workers: str, clock: int = 0) -> list[str]:
    """Return the workers that were granted a step while these requested one in this order."""
    return [let_go for worker_id in workers for let_go in pacer.arrive(worker_id, clock)]


def test_turns_go_round_in_order_of_joining():
    pacer = TurnTaking()
    turns = arrive_all(pacer, "bca")
    assert (pacer.waiting_for("c"), pacer.waiting_for("b"), pacer.waiting_for("unheard of")) == (("b",), (), ())
    for clock in (1, 2):
        for worker_id in "bca":
            turns += pacer.arrive(worker_id, clock)
    assert "".join(turns) == "bcabcab"


def test_a_worker_that_departs_out_of_turn_grants_nothing_and_rejoins_last():
    pacer = TurnTaking()
    arrive_all(pacer, "abc")
    assert pacer.depart("b") == pacer.depart("unheard of") == []
    assert pacer.arrive("b", 7) == []
    assert [*pacer.arrive("a", 1), *pacer.arrive("c", 1), *pacer.arrive("b", 8)] == ["c", "b", "a"]
    assert pacer.depart("a") == ["c"], "the turn goes on when the one that has it departs"


@settings(max_examples=60)
@given(happenings)
def test_turns_are_exclusive_and_fair(happenings):
    """Nobody gets a second turn while another, present all the time, waits for one."""
    world = World(TurnTaking())
    overtaken: dict[str, Counter[str]] = {}
    for happening in happenings:
        had = len(world.turns)
        world.play([happening])
        assert len(world.computing) == (1 if world.computing | world.waiting else 0)
        # A worker that restarted waits from now on.
        waited = world.waiting - ({happening[0]} if happening[1] != "ask" else set())
        overtaken = {worker_id: overtaken.get(worker_id, Counter()) for worker_id in waited}
        for worker_id in waited:
            overtaken[worker_id].update(world.turns[had:])
            assert max(overtaken[worker_id].values(), default=0) <= 1


def test_a_worker_proceeds_until_it_is_s_clocks_ahead_of_the_slowest():
    """Ho et al. 2013: it may proceed iff c - min_q c_q <= s."""
    for s in (0, 1, 3):
        pacer = ClockBound(s)
        arrive_all(pacer, "ab")
        clocks = [clock for clock in range(1, s + 1) if pacer.arrive("a", clock) == ["a"]]
        assert clocks == list(range(1, s + 1))
        assert pacer.arrive("a", s + 1) == [], s
        assert pacer.waiting_for("a") == ("b",)
        assert pacer.arrive("b", 1) == ["a", "b"], s


def test_a_worker_waits_for_all_that_are_too_far_behind():
    pacer = ClockBound(1)
    arrive_all(pacer, "abcd")
    pacer.arrive("c", 1)
    arrive_all(pacer, "a", clock=2)
    assert pacer.waiting_for("a") == ("b", "d")


def test_a_worker_that_joins_late_begins_at_the_present_minimum():
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


def test_a_clock_that_goes_backwards_is_refused():
    """It would join at the slowest each time, and so run ahead without bound."""
    pacer = ClockBound(1)
    arrive_all(pacer, "ab")
    assert pacer.arrive("a", 1) == ["a"]
    with pytest.raises(InvalidArgument, match="'a' requests the step after 0 steps, and has finished 1 already"):
        pacer.arrive("a", 0)
    assert pacer.arrive("a", 2) == []


def test_a_worker_set_aside_continues_its_step_and_joins_again_with_the_next():
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


def test_a_worker_that_restarts_after_it_was_set_aside_joins_with_any_count():
    pacer = TurnTaking()
    arrive_all(pacer, "ab", clock=5)
    assert pacer.set_aside("a") == ["b"]
    pacer.depart("a")
    assert pacer.arrive("a", 0) == []
    assert pacer.arrive("b", 6) == ["a"]


def test_a_withdrawn_request_gives_up_the_turn_and_the_next_request_comes_last():
    pacer = TurnTaking()
    arrive_all(pacer, "abcd")
    assert pacer.withdraw("b") == []
    assert pacer.withdraw("a") == ["c"]
    assert pacer.arrive("b", 0) == []
    assert [pacer.arrive("c", 1), pacer.arrive("d", 1)] == [["d"], ["b"]]


def test_a_withdrawn_request_leaves_the_clock_unchanged():
    """Else a worker could run ahead by asking and taking back."""
    pacer = ClockBound(0)
    arrive_all(pacer, "ab")
    assert pacer.arrive("a", 1) == []
    pacer.withdraw("a")
    assert pacer.arrive("a", 1) == []
    assert pacer.waiting_for("a") == ("b",)


@settings(max_examples=60)
@given(happenings, st.integers(0, 4))
def test_nobody_is_ever_more_than_s_clocks_ahead(happenings, s):
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


# Release one by one, the quorum at the start, and the stages of a warm-up.


def test_workers_are_released_one_after_the_other_in_order_of_joining():
    """replicas(t) = min(L, 1 + floor((t - t_w) / dt)) of the algorithm notes, 2.3."""
    pacer = Release(10, 4)
    released = arrive_all(pacer, "bca")
    counts = []
    for version in range(10, 20):
        released += pacer.advanced(version)
        counts.append(len(released))
    assert counts == [min(3, 1 + (version - 10) // 4) for version in range(10, 20)]
    assert released == list("bca")


def test_a_worker_not_yet_released_moves_up_when_an_earlier_one_departs():
    pacer = Release(10, 4)
    arrive_all(pacer, "abc")
    assert pacer.depart("a") == ["b"]
    assert pacer.waiting_for("c") == ("b",)


def test_nobody_needs_to_ask_once_all_are_released_and_one_more_would_be():
    pacer = Release(10, 4)
    arrive_all(pacer, "abc")
    assert [pacer.asks(version) for version in (9, 18, 21, 22)] == [True, True, True, False]


def test_a_departed_or_excused_worker_counts_once_towards_the_quorum():
    bound = together(ClockBound(0), 2)
    bound.arrive("a", 0)
    bound.depart("a")
    assert bound.arrive("b", 0) == ["b"]
    pacer = together(TurnTaking(), 3)
    assert pacer.arrive("a", 0) == []
    assert pacer.excuse(["a", "b"]) == []
    assert pacer.excuse(["c"]) == ["a"]


def test_waiting_workers_proceed_at_the_next_event_after_the_quorum_is_lowered():
    pacer = together(ClockBound(0), 5)
    arrive_all(pacer, "ab")
    pacer.quorum = 0
    assert pacer.advanced(1) == ["a", "b"]


def test_a_warm_up_goes_from_turns_over_release_to_freedom():
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


def test_clocks_are_counted_from_the_end_of_the_warm_up():
    pacer = StagedPacer(None, ClockBound(0), updates=10)
    arrive_all(pacer, "ab")
    arrive_all(pacer, "a", clock=7)
    pacer.advanced(10)
    assert pacer.arrive("a", 8) == []
    assert pacer.waiting_for("a") == ("b",)
    assert pacer.arrive("b", 1) == ["a", "b"]


def test_a_free_warm_up_requires_requests_if_a_later_stage_needs_to_know_the_workers():
    assert StagedPacer(None, ClockBound(0), updates=10).asks(0)
    assert StagedPacer(None, None, updates=10, release_every=5).asks(0)
    assert not StagedPacer(None, None, updates=10).asks(0)


def test_a_run_that_is_past_its_warm_up_is_in_its_main_stage_at_once():
    pacer = StagedPacer(TurnTaking(), ClockBound(1), updates=10)
    pacer.advanced(10)
    assert arrive_all(pacer, "ab") == ["a", "b"]


def test_another_pacer_takes_over_waiting_and_computing_workers():
    turns, bound = TurnTaking(), ClockBound(0)
    arrive_all(turns, "abc")
    turns.arrive("a", 40)
    assert turns.waiting_for("a") == turns.waiting_for("c") == ("b",)
    assert bound.take_over(turns) == ["a", "c"]
    assert bound.arrive("a", 41) == []
    assert bound.waiting_for("a") == ("b", "c")


def test_turns_begin_after_all_computing_workers_have_requested_a_step():
    bound, turns = ClockBound(5), TurnTaking()
    arrive_all(bound, "ab")
    assert turns.take_over(bound) == []
    assert turns.arrive("a", 1) == []
    assert turns.arrive("b", 1) == ["a"]


def steps_together(make: Callable[[], Pacer], num_workers: int) -> int:
    """Return the cost of two steps of so many workers, and of the questions whom they wait for."""
    pacer, names = make(), [f"{i:03}" for i in range(num_workers)]

    def play() -> None:
        going = [let_go for name in names for let_go in pacer.arrive(name, 0)]
        for name in going:
            going += pacer.arrive(name, 1) if len(going) <= 2 * num_workers else []
            pacer.waited_for([name])
        pacer.waited_for(names)

    return effort_of(play, "opcode")


@pytest.mark.parametrize("make", MAKERS)
def test_an_arrival_costs_no_more_than_in_proportion_to_the_workers(make):
    assert steps_together(make, 64) <= 16 * steps_together(make, 16)


@settings(max_examples=150)
@given(st.sampled_from(MAKERS), happenings, st.randoms(use_true_random=False))
def test_whatever_happens_somebody_may_go_on_and_in_the_end_everybody_has(make, happenings, random):
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


@settings(max_examples=50)
@given(happenings=happenings, quorum=st.integers(1, len(WORKERS)))
def test_nobody_computes_before_the_quorum(happenings, quorum):
    pacer = together(ClockBound(2), quorum)
    world = World(pacer)
    seen = set()
    for worker_id, what in happenings:
        world.play([(worker_id, what)])
        seen |= {worker_id} if what != "depart" else set()
        assert pacer.missing == max(0, quorum - len(seen))
        assert bool(world.computing) == bool(not pacer.missing and (world.computing or world.waiting))
