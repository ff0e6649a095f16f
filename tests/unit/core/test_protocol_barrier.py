"""Hardsync, backup workers and strict BSP decide by who has contributed (algorithm notes 2.1, 2.7, 2.9, 2.11)."""

from __future__ import annotations

import pytest

from pyps.core.aggregation import Apply, Backup, Drop, Hardsync, Park, Part, Refuse, StrictBsp, parse
from pyps.core.gradient import PayloadKind
from pyps.core.protocols.barrier import Barrier
from pyps.core.receipt import Reason
from pyps.core.roster import Roster
from pyps_wire.errors import BadRequest
from shards import arrival, contribution, roster

BARRIERS = (Hardsync(), Hardsync("equal"), Backup(0), StrictBsp())


@pytest.mark.parametrize("protocol", BARRIERS)
def test_the_first_of_two_waits_for_the_next_version(protocol: Barrier) -> None:
    assert protocol.decide(arrival("a", workers=roster("a", "b"), version=5)) == Park(min_version=6)


@pytest.mark.parametrize("protocol", BARRIERS)
def test_the_last_completes_the_round_in_worker_order(protocol: Barrier) -> None:
    decision = protocol.decide(
        arrival("b", contribution("c"), contribution("a"), workers=roster("a", "b", "c"), version=0)
    )
    assert isinstance(decision, Apply)
    assert [part.contribution.gradient.worker_id for part in decision.parts] == ["a", "b", "c"]


@pytest.mark.parametrize("protocol", [Hardsync(), StrictBsp()])
def test_a_gradient_of_another_version_is_refused_and_told_what_to_pull(protocol: Barrier) -> None:
    decision = protocol.decide(arrival("a", workers=roster("a"), version=5, base_version=4))
    assert isinstance(decision, Refuse)
    assert (decision.reason, decision.min_version) == (Reason.STALE, 5)
    assert "present version 5" in decision.message and "version 4" in decision.message


def test_backup_drops_what_comes_late() -> None:
    decision = Backup(1).decide(arrival("a", workers=roster("a", "b"), version=5, base_version=4))
    assert isinstance(decision, Drop)
    assert decision.min_version == 5


@pytest.mark.parametrize("protocol", BARRIERS)
def test_a_second_gradient_of_one_worker_in_a_round_is_refused(protocol: Barrier) -> None:
    decision = protocol.decide(arrival("a", contribution("a"), workers=roster("a", "b"), sequence=1))
    assert isinstance(decision, Refuse)
    assert (decision.reason, decision.min_version) == (Reason.REPEATED, 1)
    assert "'a'" in decision.message


def test_nobody_completes_a_round_while_expected_workers_are_missing() -> None:
    waiting = (contribution("a"),)
    assert isinstance(Hardsync().decide(arrival("b", *waiting, workers=roster("a", "b", missing=1))), Park)
    assert Hardsync().complete(waiting, version=0, roster=roster("a", missing=1)) is None


def test_the_gradient_of_a_worker_that_has_died_since_is_averaged_in() -> None:
    decision = Hardsync().decide(arrival("b", contribution("a"), workers=roster("b")))
    assert isinstance(decision, Apply)
    assert [(part.contribution.gradient.worker_id, part.share) for part in decision.parts] == [("a", 0.5), ("b", 0.5)]


def test_a_dead_workers_gradient_does_not_stand_for_a_live_ones() -> None:
    """Two gradients and two live workers, but one of the gradients is of a third."""
    assert isinstance(Hardsync().decide(arrival("b", contribution("dead"), workers=roster("b", "c"))), Park)


@pytest.mark.parametrize("protocol", BARRIERS)
def test_a_round_is_complete_when_the_one_it_waited_for_goes(protocol: Barrier) -> None:
    waiting = (contribution("b"), contribution("a"))
    assert protocol.complete(waiting, version=0, roster=roster("a", "b", "c")) is None
    assert protocol.complete((), version=0, roster=Roster()) is None
    due = protocol.complete(waiting, version=0, roster=roster("a", "b"))
    assert due is not None
    assert [part.contribution.gradient.worker_id for part in due.parts] == ["a", "b"]


def test_a_late_joiner_counts_as_soon_as_the_roster_names_it() -> None:
    waiting = (contribution("a"),)
    assert isinstance(Hardsync().decide(arrival("b", *waiting, workers=roster("a", "b", "late"))), Park)
    assert isinstance(Hardsync().decide(arrival("late", *waiting, workers=roster("a", "late"))), Apply)


# How the parts are weighed.


def shares(decision: object) -> list[float]:
    assert isinstance(decision, Apply)
    return [part.share for part in decision.parts]


def test_by_count_weighs_by_examples_so_that_unequal_minibatches_give_the_mean_over_examples() -> None:
    arrived = arrival("b", contribution("a", example_count=30), workers=roster("a", "b"), example_count=10)
    assert shares(Hardsync("by_count").decide(arrived)) == [0.75, 0.25]
    assert shares(Hardsync("equal").decide(arrived)) == [0.5, 0.5]


def test_by_count_where_one_gradient_has_no_count_is_equal() -> None:
    arrived = arrival("b", contribution("a", example_count=30), workers=roster("a", "b"), example_count=0)
    assert shares(Hardsync().decide(arrived)) == [0.5, 0.5]


def test_nothing_without_a_count_weighs_nothing() -> None:
    idle = contribution("a", example_count=0, kind=PayloadKind.NOTHING, values=[])
    arrived = arrival("b", idle, contribution("c", example_count=30), workers=roster("a", "b", "c"), example_count=10)
    assert shares(Hardsync().decide(arrived)) == [0.0, 0.25, 0.75]


def test_by_count_without_any_count_is_equal() -> None:
    assert shares(Hardsync().decide(arrival("b", contribution("a"), workers=roster("a", "b")))) == [0.5, 0.5]


def test_a_worker_alone_has_the_whole_share_however_many_examples_it_has() -> None:
    assert shares(Hardsync().decide(arrival("a", workers=roster("a"), example_count=37))) == [1.0]


def test_strict_bsp_sums() -> None:
    assert shares(StrictBsp().decide(arrival("b", contribution("a"), workers=roster("a", "b")))) == [1.0, 1.0]


def test_what_waits_when_another_protocol_comes_is_weighed_as_a_round() -> None:
    waiting = (contribution("b", example_count=1), contribution("a", example_count=3))
    assert shares(Hardsync().settle(waiting)) == [0.75, 0.25]
    assert shares(Hardsync("equal").settle(waiting)) == [0.5, 0.5]
    assert shares(StrictBsp().settle(waiting)) == [1.0, 1.0]
    assert Hardsync().settle(()) is None


def test_nothing_counts_as_a_contribution() -> None:
    arrived = arrival("b", contribution("a"), workers=roster("a", "b"), kind=PayloadKind.NOTHING)
    assert shares(Hardsync().decide(arrived)) == [0.5, 0.5]


# Backup workers.


def test_backup_applies_the_first_l_minus_b() -> None:
    workers = roster("a", "b", "c", "d")
    first = contribution("d")
    assert isinstance(Backup(1).decide(arrival("b", first, workers=workers)), Park)
    decision = Backup(1).decide(arrival("a", first, contribution("b"), workers=workers))
    assert shares(decision) == [1 / 3] * 3


@pytest.mark.parametrize("protocol", BARRIERS)
def test_the_first_update_waits_for_all_expected_workers(protocol: Barrier) -> None:
    """Backup too: its L is not known before, and an update of the first few would be another algorithm."""
    waiting = (contribution("a"),)
    early = Roster(("a", "b"), 2, coming=("c",))
    assert protocol.decide(arrival("b", *waiting, workers=early)) == Park(min_version=1)
    assert protocol.complete(waiting, 0, Roster(("a",), 1)) is None
    assert protocol.waiting_for(waiting, early) == ("b", "c", "1 more worker that has not joined")
    assert protocol.waiting_for(waiting, Roster(("a",), 2)) == ("2 more workers that have not joined",)
    assert isinstance(protocol.decide(arrival("b", *waiting, workers=roster("a", "b"))), Apply)


@pytest.mark.parametrize("num_workers, warned", [(1, True), (2, True), (3, False)])
def test_backup_warns_where_it_waits_for_nobody(num_workers: int, warned: bool) -> None:
    warnings = Backup(2).warnings(num_workers)
    assert [f"backup:b=2 with {num_workers} worker" in warning for warning in warnings] == [True] * warned


def test_backup_waits_for_one_at_least() -> None:
    assert isinstance(Backup(5).decide(arrival("a", workers=roster("a", "b"))), Apply)


def test_a_backup_that_leaves_nobody_is_refused() -> None:
    with pytest.raises(BadRequest, match="backup:b=2 leaves nobody of 2 workers to wait for; expected b below 2"):
        parse("backup:b=2").check(2)
    parse("backup:b=2").check(3)
    parse("backup:b=2").check(0)  # not known yet


# Whom a round waits for.


def test_a_round_waits_for_those_that_have_not_contributed_once_one_has() -> None:
    workers = roster("c", "a", "b")
    assert Hardsync().waiting_for((contribution("b"),), workers) == ("a", "c")
    assert Hardsync().waiting_for((), workers) == ()


@pytest.mark.parametrize("protocol", BARRIERS)
def test_behind_a_barrier_the_papers_n_is_1(protocol: Barrier) -> None:
    assert protocol.split(roster("a", "b", "c")) == 1.0


def test_parts_keep_the_contributions_themselves() -> None:
    waiting = contribution("a")
    decision = Hardsync().decide(arrival("b", waiting, workers=roster("a", "b")))
    assert isinstance(decision, Apply)
    assert decision.parts[0] == Part(waiting, 0.5)
    assert decision.share_of(waiting) == 0.5
