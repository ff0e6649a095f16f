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


def test_a_part_is_counted_by_the_processes_that_hold_it_and_the_run_by_replicas() -> None:
    held = [process("r", 0), process("r", 1, counts=False), process("s", 0), process("s", 1), worker("a")]
    roster = whole_roster(held, Expectation(4))

    assert (roster.workers, roster.missing, roster.num_expected) == (("a", "r", "s"), 1, 4)
    # A worker that holds the whole model counts for every part.
    assert [roster.of_part(part).workers for part in (0, 1, 7)] == [("a", "r/0", "s/0"), ("a", "s/1"), ("a",)]
    counting = [roster.counts(worker_id) for worker_id in ("r/0", "r/1", "r", "a")]
    assert counting == [True, False, False, True], "by its own name"


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
