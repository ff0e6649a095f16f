"""Exactly once: whatever is lost, repeated or overtaken on the way, each push is applied once or refused."""

import json
import tracemalloc
from collections.abc import Iterable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pyps.core.ledger import FORGOTTEN, Ledger, LedgerState, packed, unpacked
from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.roster import Roster
from shards import gradient, make_shard, pull, push, restored, roster

NOBODY = Roster()


def receipt(sequence: int) -> Receipt:
    return Receipt(
        shard_id=0, sequence=sequence, outcome=Outcome.APPLIED, version_before=sequence, version_after=sequence + 1
    )


def filled(sequences: Iterable[int], **limits: int) -> Ledger:
    ledger = Ledger(**limits)
    for sequence in sequences:
        ledger.record("a", 1, receipt(sequence), roster=NOBODY)
    return ledger


def test_what_it_takes_is_known_well_enough_without_asking_each_object():
    tracemalloc.start()
    try:
        ledger = Ledger()
        for life in range(100):
            for number in range(1000, 1008):
                ledger.record(
                    f"worker-{life}",
                    10**18 + life,
                    Receipt(0, number, Outcome.APPLIED, number, number + 1, rate=number / 7, weight=number / 9),
                    roster=NOBODY,
                )
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.7 * taken < ledger.num_bytes < 1.3 * taken
    # The eight receipts of a worker, and what finds them.
    assert taken < 100 * 1800


def test_a_receipt_comes_back_whole():
    for whole in (
        receipt(2**62)._replace(sequence=2**64 - 1),
        Receipt(
            *(7, 3, Outcome.PENDING, 2**40, 2**40, Reason.UNSPECIFIED, "über\n", False, 2**33, 0.1, 1 / 3, 1e-300),
            *(2**20, 2**63, 2**40 + 1, ("b", "ç d")),
        ),
        receipt(3)._replace(outcome=Outcome.REJECTED, reason=Reason.STALE, version_after=3, message="late"),
    ):
        again = unpacked(packed(whole))
        assert again == whole
        assert [type(value) for value in again] == [type(value) for value in whole]


def test_the_last_eight_receipts_of_a_life_are_kept_and_what_is_older_is_forgotten():
    ledger = filled(range(20))
    assert [ledger.lookup("a", 1, sequence) for sequence in range(12)] == [FORGOTTEN] * 12
    assert [ledger.lookup("a", 1, sequence) for sequence in range(12, 20)] == [receipt(s) for s in range(12, 20)]
    assert ledger.lookup("a", 1, 20) is ledger.lookup("b", 1, 15) is ledger.lookup("a", 2, 15) is None


def test_a_push_that_was_overtaken_is_new_unless_by_too_many():
    assert filled(range(1, 8)).lookup("a", 1, 0) is None
    assert filled(range(1, 10)).lookup("a", 1, 0) is FORGOTTEN
    # What was let go stays forgotten whatever order the pushes came in.
    ledger = filled([2, 1, 0, 5, 4, 3], receipts_max=3)
    answers = [ledger.lookup("a", 1, sequence) for sequence in range(6)]
    assert answers == [FORGOTTEN] * 3 + [receipt(3), receipt(4), receipt(5)]


def test_the_worker_that_was_silent_longest_is_let_go_and_a_later_life_of_it_is_new():
    ledger = Ledger(lives_max=2)
    for worker_id, sequence in [("a", 0), ("b", 0), ("a", 1), ("c", 0)]:
        ledger.record(worker_id, 10, receipt(sequence), roster=NOBODY)
    for again in (ledger, kept(ledger)):
        assert [again.lookup(w, 10, 0) for w in "abc"] == [receipt(0), FORGOTTEN, receipt(0)]
        # Of a life that was let go, what is later than all that it pushed is new; what is not is forgotten for good.
        assert [again.lookup("b", 10, 1), again.lookup("b", 9, 1), again.lookup("b", 20, 0)] == [None, FORGOTTEN, None]
        again.record("b", 10, receipt(3), roster=NOBODY)
        assert [again.lookup("b", 10, s) for s in (0, 1, 3)] == [FORGOTTEN, None, receipt(3)]


def test_a_life_that_began_early_and_pushes_first_after_many_short_ones_is_new():
    ledger = Ledger(lives_max=2)
    for incarnation in range(100, 200):
        ledger.record(f"short-{incarnation % 3}", incarnation, receipt(0), roster=NOBODY)
    assert ledger.lookup("early", 1, 0) is None
    assert ledger.lookup("short-0", 102, 0) is FORGOTTEN


def test_of_more_names_than_are_kept_the_earliest_makes_way_and_none_of_its_lives_is_new():
    ledger = Ledger(lives_max=2)
    for incarnation in range(100, 200):
        ledger.record(f"name-{incarnation}", incarnation, receipt(0), roster=NOBODY)
    state = ledger.entries()
    # Two are held, and eight names.
    assert len(state.forgotten) == 8
    assert state.forgotten_incarnation == 189
    for again in (ledger, kept(ledger)):
        lookups = {i: again.lookup(f"name-{i}", i, 0) for i in range(100, 200)}
        assert lookups == {**dict.fromkeys(range(100, 198), FORGOTTEN), 198: receipt(0), 199: receipt(0)}
        assert [again.lookup(f"name-{i}", i, 1) for i in (189, 190)] == [FORGOTTEN, None]
        assert [again.lookup("early", i, 0) for i in (189, 190)] == [FORGOTTEN, None]


def test_no_crowd_of_names_makes_a_push_of_an_active_worker_look_old():
    """Whatever their incarnations, and however many lives the worker itself has had."""
    shard = make_shard([0.0], ledger=Ledger(lives_max=3))
    active = roster("honest")
    for incarnation in (1, 2, 3, 4):
        assert push(shard, [1.0], worker_id="honest", incarnation=incarnation).outcome is Outcome.APPLIED
    for number in range(100):
        crowd = {"worker_id": f"name-{number}", "incarnation": 10**18 + number, "workers": active}
        assert push(shard, [1.0], **crowd).outcome is Outcome.APPLIED
    for again in (shard, restored(shard, shard.state())):
        assert push(again, [1.0], worker_id="honest", incarnation=4, base_version=0, workers=active).duplicate
        later = push(again, [1.0], worker_id="honest", incarnation=4, sequence=1, workers=active)
        assert later.outcome is Outcome.APPLIED
        assert push(again, [1.0], worker_id="honest", incarnation=2, workers=active).reason is Reason.FORGOTTEN
    # Where all are active, the one that was silent longest is let go.
    three = roster("a", "b", "c", "d")
    for name in "abcd":
        push(shard, [1.0], worker_id=name, incarnation=10**19, workers=three)
    assert [push(shard, [1.0], worker_id=n, incarnation=10**19, workers=three).duplicate for n in "bcd"] == [True] * 3


def kept(ledger: Ledger) -> Ledger:
    plain, receipts = ledger.entries().to_plain()
    return Ledger(LedgerState.from_plain(json.loads(json.dumps(plain)), receipts))


# Properties, through a real shard: every push of every life has a parameter of its own, which counts how
# often the push was applied.

LIVES = [("a", 1), ("a", 2), ("b", 1)]
PUSHES = 12

deliveries = st.lists(st.tuples(st.sampled_from(range(len(LIVES))), st.integers(0, PUSHES - 1)), max_size=120)


def one_hot(life: int, sequence: int) -> np.ndarray:
    values = np.zeros(len(LIVES) * PUSHES, np.float32)
    values[life * PUSHES + sequence] = -1.0
    return values


def deliver(shard, life: int, sequence: int) -> Receipt:
    worker_id, incarnation = LIVES[life]
    sent = gradient(one_hot(life, sequence), worker_id=worker_id, incarnation=incarnation, sequence=sequence)
    return shard.push(sent, roster=roster()).receipt


@given(deliveries, st.integers(0, 120))
@settings(max_examples=60, deadline=None)
def test_each_push_is_applied_as_its_first_answer_says(order, restore_after):
    shard = make_shard(np.zeros(len(LIVES) * PUSHES))
    first: dict[tuple[int, int], Receipt] = {}
    for number, (life, sequence) in enumerate(order):
        if number == restore_after:
            shard = restored(shard, shard.state())
        answer = deliver(shard, life, sequence)
        known = first.setdefault((life, sequence), answer)
        if answer is not known and answer.reason != Reason.FORGOTTEN:
            assert answer == known._replace(duplicate=True)
    applied = pull(shard)[1].reshape(len(LIVES), PUSHES)
    for (life, sequence), answer in first.items():
        assert applied[life, sequence] == (answer.outcome == Outcome.APPLIED)
    assert applied.sum() == shard.version
