"""Who counts for a shard, where workers hold parts of the model."""

from __future__ import annotations

from pyps.core.roster import Entry, Expectation, Roster, whole_roster


def process(replica: str, index: int, *, counts: bool = True, arrived: bool = True) -> Entry:
    return Entry(f"{replica}/{index}", replica, (index,), counts, arrived)


def worker(name: str, *, counts: bool = True, arrived: bool = True) -> Entry:
    return Entry(name, name, (), counts, arrived)


def test_without_parts_every_shard_goes_by_the_same_roster() -> None:
    roster = Roster(("a", "b"))

    assert roster.of_part(0) is roster
    assert (roster.counts("a"), roster.counts("c")) == (True, False)


def test_a_part_is_counted_by_the_processes_that_hold_it() -> None:
    roster = whole_roster([process("r", 0), process("r", 1), process("s", 0)], Expectation(0))

    assert roster.of_part(0).workers == ("r/0", "s/0")
    assert roster.of_part(1).workers == ("r/1",)


def test_the_run_counts_replicas_however_many_processes_they_have() -> None:
    roster = whole_roster([process("r", 0), process("r", 1), worker("a")], Expectation(3))

    assert (roster.workers, roster.missing, roster.num_expected) == (("a", "r"), 1, 3)


def test_a_worker_that_holds_the_whole_model_counts_for_every_part() -> None:
    roster = whole_roster([worker("a"), process("r", 0)], Expectation(0))

    assert roster.of_part(0).workers == ("a", "r/0")
    assert roster.of_part(7).workers == ("a",)


def test_a_process_counts_by_its_own_name() -> None:
    roster = whole_roster([process("r", 0), process("r", 1, counts=False)], Expectation(0))

    assert [roster.counts(worker_id) for worker_id in ("r/0", "r/1", "r")] == [True, False, False]


def test_a_part_misses_the_replicas_whose_process_for_it_has_yet_to_push() -> None:
    entries = [process("r", 0), process("r", 1, counts=False, arrived=False)]

    roster = whole_roster(entries, Expectation(2))

    assert (roster.missing, roster.of_part(0).missing, roster.of_part(1).missing) == (1, 1, 2)
    assert roster.of_part(1).awaited == ("r/1", "1 more worker that has not joined")


def test_a_part_for_which_all_came_once_misses_nobody_again() -> None:
    expectation = Expectation(2)
    whole_roster([process("r", 0), process("s", 0), process("r", 1)], expectation)

    again = whole_roster([process("r", 0), process("r", 1)], expectation)

    assert (again.of_part(0).missing, again.of_part(1).missing) == (0, 1)


def test_the_log_of_a_shard_tells_rosters_apart_by_what_they_list() -> None:
    before = whole_roster([process("r", 0), process("r", 1)], Expectation(0))
    after = whole_roster([process("r", 0), process("s", 1), process("r", 1)], Expectation(0))

    assert before.of_part(0) == after.of_part(0)
    assert before.of_part(1) != after.of_part(1)
