"""What each protocol decides of a gradient; how a shard obeys is in test_shard_rounds.py."""

from pyps.core.gradient import PayloadKind
from pyps.core.pacing import ClockBound, TurnTaking
from pyps.core.protocols import PROTOCOLS, parse
from pyps.core.protocols.asynchronous import Asgd, Async, Softsync
from pyps.core.protocols.barrier import Backup, Hardsync, StrictBsp
from pyps.core.protocols.base import Acknowledge, Apply, Park, Part, Pending
from pyps.core.protocols.paced import Serial, Ssp
from pyps.core.roster import Roster
from shards import arrival, contribution, refusal, roster, roster_of

EAGER = ("async", "asgd", "asgd:mutex=shard", "serial", "ssp:s=0", "ssp:s=3")
BARRIERS = (Hardsync(), Hardsync("equal"), Backup(0), StrictBsp())
TEXTS = (
    *("async", "softsync:n=4", "hardsync", "hardsync:weighting=equal", "backup:b=0", "backup:b=2", "ssp:s=3"),
    *("ssp:s=0,strict_bsp=true", "serial", "asgd", "asgd:mutex=shard,accumulate=4"),
)
WORDS = {
    "Downpour": Async(),
    "asynchronous": Async(),
    "synchronous": Serial(),
    "hybrid:weighting=equal": Hardsync("equal"),
    "BSP": Hardsync(),
    "1-softsync": Softsync(1),
    "30-softsync": Softsync(30),
    " softsync:n=4 ": Softsync(4),
    "ssp: s=3": Ssp(3),
    "asgd:mutex=shard": Asgd("shard"),
    "backup:b=2": Backup(2),
}
REFUSALS = {
    "gossip": f"protocol 'gossip' is unknown; expected one of {', '.join(sorted(PROTOCOLS))}",
    "softsync": "softsync's n is 0; expected at least 1, as in softsync:n=4",
    "softsync:n=x": "protocol 'softsync': n is 'x'; expected a whole number",
    "softsync:m=3": "protocol 'softsync' has no setting 'm=3'; it has n=, merge=",
    "softsync:n=2,merge=some": "softsync's merge is 'some'; expected one of senders, all",
    "hardsync:weighting=count": "hardsync's weighting is 'count'; expected one of by_count, by_speed, equal",
    "hardsync:clip=mean": "hardsync's clip is 'mean'; expected one of none, median",
    "backup:b=1,clip=mean": "backup's clip is 'mean'; expected one of none, median",
    "backup:b=1,grace=-1": "backup's grace is -1; expected the seconds that an update waits for the last b workers",
    "backup": "backup's b is -1; expected the workers that no update waits for, as in backup:b=2",
    "ssp": "ssp's s is -1; expected the clocks that a worker may be ahead of the slowest, as in ssp:s=3",
    "ssp:s=2,strict_bsp=true": "ssp's strict_bsp needs s=0, and s is 2",
    "asgd:mutex=none": "asgd's mutex is 'none'; expected one of whole, shard",
    "asgd:accumulate=5000000000": "asgd's accumulate is 5000000000; expected the minibatches summed in a push, at most",
    "asgd:accumulate=-1": "asgd's accumulate is -1; expected the minibatches summed in a push, at most",
    "async:n=1": "protocol 'async' has no setting 'n=1'; it has no settings",
}


def test_a_protocols_text_makes_an_equal_protocol_and_others_words_are_understood():
    assert {name: kind.name for name, kind in PROTOCOLS.items()} == {name: name for name in PROTOCOLS}
    assert [parse(text).text for text in TEXTS] == list(TEXTS)
    assert {parse(text).name for text in TEXTS} == {*PROTOCOLS} - {"sandblaster"}
    assert {text: parse(text) for text in WORDS} == WORDS


def test_what_cannot_be_is_refused_with_what_can():
    for text, words in REFUSALS.items():
        assert words in refusal(parse, text)


def test_a_protocol_says_whether_it_is_a_barrier_and_asgd_alone_asks_for_one_mutex_and_sums():
    for text in TEXTS:
        protocol = parse(text)
        assert protocol.barrier is (text.startswith(("hardsync", "backup")) or "strict_bsp" in text), text
        assert protocol.at(0).updates_per_round == (4 if text == "softsync:n=4" else protocol.barrier), text
        wishes = {"asgd": (True, 0), "asgd:mutex=shard,accumulate=4": (False, 4)}
        assert (protocol.whole_model, protocol.accumulate) == wishes.get(text, (False, 0)), text


def test_without_a_barrier_each_gradient_is_applied_alone_and_whole_however_old():
    for text in EAGER:
        protocol, arrived = parse(text), arrival("a", workers=roster_of(4), version=9, base_version=2)
        assert protocol.decide(arrived) == Apply((Part(arrived.contribution, share=1.0),)), text
        assert protocol.decide(arrival("a", workers=roster_of(4), kind=PayloadKind.NOTHING)) == Acknowledge(), text
        assert protocol.complete(Pending(), version=0, roster=roster_of(4)) is None, text
        assert (protocol.waiting_for(Pending(), roster_of(4)), protocol.warnings(1)) == ((), ()), text
        protocol.check(1)


def test_the_papers_n_is_l_with_expected_workers_and_1_where_one_computes_at_a_time():
    splits = {text: parse(text).split(roster("a", "b", missing=2)) for text in EAGER}
    assert splits == {text: 1.0 if text == "serial" else 4.0 for text in EAGER}
    assert [protocol.split(roster("a", "b", "c")) for protocol in BARRIERS] == [1.0] * len(BARRIERS)


def test_serial_and_ssp_alone_have_a_pacer_and_each_run_has_its_own():
    pacers = {text: type(parse(text).pacer()) for text in (*EAGER, "ssp:s=0,strict_bsp=true")}
    judged = {"serial": TurnTaking, "ssp:s=0": ClockBound, "ssp:s=3": ClockBound}
    assert pacers == dict.fromkeys(pacers, type(None)) | judged
    assert parse("serial").pacer() is not parse("serial").pacer()


def test_c_is_the_floor_of_l_over_n_and_at_least_one():
    cases = {(30, 1): 30, (30, 4): 7, (30, 30): 1, (4, 3): 1, (2, 5): 1, (0, 1): 1}
    assert {(num_workers, n): Softsync(n).gradients_per_update(num_workers) for num_workers, n in cases} == cases
    assert [Softsync(n).split(roster_of(30)) for n in (1, 4, 30)] == [1.0, 30 / 7, 30.0]
    assert Softsync(2).split(roster_of(0)) == 1.0
    assert parse("softsync:n=4").warnings(30) == (
        "softsync:n=4 with 30 workers makes an update of every 7 gradients, so the effective n is 4.28571",
    )
    assert parse("softsync:n=5").warnings(30) == parse("softsync:n=4").warnings(0) == ()


def test_c_gradients_are_one_mean_in_order_of_arrival_whoever_sent_them():
    first, second = contribution("b"), contribution("b", sequence=1)
    arrived = arrival("a", first, second, workers=roster_of(3))
    parts = tuple(Part(each, 1 / 3) for each in (first, second, arrived.contribution))
    assert Softsync(1).decide(arrived) == Apply(parts)
    assert Softsync(1).decide(arrival("a", first, workers=roster_of(3))) == Park(min_version=0), (
        "and nobody waits with it"
    )
    # Workers still expected count for c, a push of nothing does not.
    assert isinstance(Softsync(1).decide(arrival("a", workers=roster("a", missing=1))), Park)
    assert Softsync(1).decide(arrival("a", workers=roster_of(1), kind=PayloadKind.NOTHING)) == Acknowledge()


def test_when_workers_leave_exactly_c_pending_gradients_are_applied():
    waiting = tuple(contribution("a", sequence=sequence) for sequence in range(3))
    due = Softsync(1).complete(Pending(waiting), version=0, roster=roster_of(2))
    assert due == Apply((Part(waiting[0], 0.5), Part(waiting[1], 0.5)))
    assert Softsync(1).complete(Pending(waiting[2:]), version=1, roster=roster_of(2)) is None
    # When another protocol comes all are, as one mean.
    assert shares(Softsync(1).settle(Pending(waiting))) == [1 / 3] * 3


# Hardsync, backup workers and strict BSP decide by who has contributed (algorithm notes 2.1, 2.7, 2.9, 2.11).


def workers_of(decision: object) -> list[str]:
    assert isinstance(decision, Apply)
    return [part.contribution.gradient.worker_id for part in decision.parts]


def shares(decision: object) -> list[float]:
    assert isinstance(decision, Apply)
    return [part.share for part in decision.parts]


def test_the_first_of_two_waits_for_the_next_version_and_the_last_completes_the_round_in_worker_order():
    for protocol in BARRIERS:
        assert protocol.decide(arrival("a", workers=roster("a", "b"), version=5)) == Park(6, ("b",)), protocol
        arrived = arrival("b", contribution("c"), contribution("a"), workers=roster("a", "b", "c"))
        assert workers_of(protocol.decide(arrived)) == ["a", "b", "c"], protocol


def test_a_round_waits_for_the_live_and_keeps_the_gradients_of_the_dead():
    died_since = Hardsync().decide(arrival("b", contribution("a"), workers=roster("b")))
    assert (workers_of(died_since), shares(died_since)) == (["a", "b"], [0.5, 0.5])
    # Two gradients and two live workers, but one of the gradients is of a third.
    assert isinstance(Hardsync().decide(arrival("b", contribution("dead"), workers=roster("b", "c"))), Park)
    assert isinstance(Hardsync().decide(arrival("b", contribution("a"), workers=roster("a", "b", "late"))), Park)
    assert Hardsync().waiting_for(Pending([contribution("b")]), roster("c", "a", "b")) == ("a", "c")
    assert Hardsync().waiting_for(Pending(), roster("c", "a", "b")) == ()


def test_a_round_is_complete_when_the_one_it_waited_for_goes():
    waiting = Pending([contribution("b"), contribution("a")])
    for protocol in BARRIERS:
        assert protocol.complete(waiting, version=0, roster=roster("a", "b", "c")) is None, protocol
        assert protocol.complete(Pending(), version=0, roster=Roster()) is None, protocol
        assert workers_of(protocol.complete(waiting, version=0, roster=roster("a", "b"))) == ["a", "b"], protocol


def test_the_first_update_waits_for_all_expected_workers():
    """Backup too: its L is not known before, and an update of the first few would be another algorithm."""
    waiting = Pending([contribution("a")])
    early = Roster(("a", "b"), 2, coming=("c",))
    for protocol in BARRIERS:
        others = ("c", "1 more worker that has not joined")
        assert protocol.decide(arrival("b", *waiting, workers=early)) == Park(1, others), protocol
        assert protocol.complete(waiting, 0, Roster(("a",), 1)) is None, protocol
        assert protocol.waiting_for(waiting, early) == ("b", "c", "1 more worker that has not joined"), protocol
        assert protocol.waiting_for(waiting, Roster(("a",), 2)) == ("2 more workers that have not joined",), protocol
        assert workers_of(protocol.decide(arrival("b", *waiting, workers=roster("a", "b")))) == ["a", "b"], protocol


def test_pending_gradients_know_their_workers_after_each_arrival_and_roster_change():
    pending, rosters = Pending(), (roster("a", "b", "c"), roster("a", "b", "c"), roster("b", "d"), Roster())
    for count, name in enumerate("bdab", start=1):
        pending.add(contribution(name))
        there = set("bdab"[:count])
        assert (len(pending), set(pending.workers), pending.num_bytes) == (count, there, 4 * count)
        for each in rosters:
            assert list(pending.late(each)) == [worker for worker in each.workers if worker not in there], each


def test_by_count_weighs_by_examples_so_that_unequal_minibatches_give_the_mean_over_examples():
    def weighed(protocol: Hardsync, *counts: int) -> list[float]:
        first = contribution("a", example_count=counts[0])
        return shares(protocol.decide(arrival("b", first, workers=roster("a", "b"), example_count=counts[1])))

    assert weighed(Hardsync("by_count"), 30, 10) == [0.75, 0.25]
    assert weighed(Hardsync("equal"), 30, 10) == [0.5, 0.5]
    assert weighed(Hardsync("by_speed"), 30, 10) == [0.9, 0.1], "one minibatch each"
    assert weighed(Hardsync(), 30, 0) == weighed(Hardsync(), 0, 0) == [0.5, 0.5], "one without a count makes all equal"
    assert shares(Hardsync().decide(arrival("a", workers=roster("a"), example_count=37))) == [1.0]
    assert shares(StrictBsp().decide(arrival("b", contribution("a"), workers=roster("a", "b")))) == [1.0, 1.0]


def test_by_speed_weighs_by_examples_times_the_examples_of_a_minibatch():
    slow = contribution("a", example_count=32, minibatch_count=4)
    quick = arrival("b", slow, workers=roster("a", "b"), example_count=64, minibatch_count=16)
    assert shares(Hardsync("by_speed").decide(quick)) == [0.5, 0.5], "32 * 8 and 64 * 4"


def test_nothing_counts_as_a_contribution_and_without_a_count_weighs_nothing():
    arrived = arrival("b", contribution("a"), workers=roster("a", "b"), kind=PayloadKind.NOTHING)
    assert shares(Hardsync().decide(arrived)) == [0.5, 0.5]
    idle = contribution("a", example_count=0, kind=PayloadKind.NOTHING, values=[])
    arrived = arrival("b", idle, contribution("c", example_count=30), workers=roster("a", "b", "c"), example_count=10)
    assert shares(Hardsync().decide(arrived)) == [0.0, 0.25, 0.75]


def test_backup_applies_the_first_l_minus_b_and_one_at_least():
    workers, first = roster("a", "b", "c", "d"), contribution("d")
    assert isinstance(Backup(1).decide(arrival("b", first, workers=workers)), Park)
    assert shares(Backup(1).decide(arrival("a", first, contribution("b"), workers=workers))) == [1 / 3] * 3
    assert isinstance(Backup(5).decide(arrival("a", workers=roster("a", "b"))), Apply)


def test_a_backup_with_grace_waits_for_all_and_says_when_it_could_do_without_the_last():
    workers, backup = roster("a", "b", "c"), Backup(1, grace=2.0)
    assert isinstance(backup.decide(arrival("b", contribution("a"), workers=workers)), Park)
    assert [backup.has_quorum(count, workers) for count in (0, 1, 2, 3)] == [False, False, True, True]
    assert not backup.has_quorum(2, roster("a", "b", missing=1)), "the first update waits for all expected workers"
    waiting = Pending([contribution("a"), contribution("b")])
    assert backup.complete(waiting, 0, workers) is None
    assert workers_of(backup.complete(waiting, 0, roster("a", "b"))) == ["a", "b"]
    assert isinstance(backup.decide(arrival("c", *waiting, workers=workers)), Apply)
    assert not any(parse(text).has_quorum(9, workers) for text in ("async", "hardsync", "softsync:n=1"))


def test_a_backup_that_leaves_nobody_is_refused_and_warned_of_while_workers_are_few():
    backup = parse("backup:b=2")
    words = "backup:b=2 waits for none of 2 workers; expected b below 2"
    assert words in refusal(backup.check, 2)
    for num_workers in (3, 0):  # 0: not known yet
        backup.check(num_workers)
    warnings = [" ".join(backup.warnings(num_workers)) for num_workers in (1, 2, 3)]
    assert ["backup:b=2 with 1 worker" in warnings[0], "backup:b=2 with 2 worker" in warnings[1]] == [True, True]
    assert warnings[2] == ""
