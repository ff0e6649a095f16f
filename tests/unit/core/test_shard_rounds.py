"""Rounds on a shard: who is in an update, when workers come late, die, push twice or have nothing to push."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from pyps.core.gradient import Extent
from pyps.core.receipt import Outcome, Reason
from pyps.core.roster import Roster
from pyps.core.shard import Shard
from shards import (
    Log,
    digest,
    make_behaviour,
    make_shard,
    nothing,
    pull,
    push,
    replay,
    restored,
    roster,
    roster_of,
    sparse,
)

TWO = roster("a", "b")
THREE = roster("a", "b", "c")


def hardsync(**fields: object) -> Shard:
    return make_shard([0.0], protocol="hardsync", **fields)  # type: ignore[arg-type]


def test_a_receipt_names_at_most_eight_awaited_workers():
    shard = hardsync()
    receipt = push(shard, [1.0], worker_id="w00", workers=roster_of(20))
    assert receipt.waiting_for == tuple(f"w{index:02d}" for index in range(1, 9))
    assert shard.waiting_for(roster_of(20)) == tuple(f"w{index:02d}" for index in range(1, 20))


def test_a_late_gradient_is_refused_and_so_is_its_retry():
    for protocol, policy, reason, words in (
        ("hardsync", "none", Reason.STALE, "present version 3"),
        ("backup:b=1", "none", Reason.DROPPED, ""),
        ("async", "drop:spread=2", Reason.STALE, "the policy 'drop' takes no gradient that is 3 updates old"),
        ("softsync:n=1", "drop:spread=2", Reason.STALE, "the policy 'drop'"),
    ):
        shard = make_shard([0.0], protocol=protocol, policy=policy, version=3)
        receipt = push(shard, [1.0], base_version=0, workers=THREE)
        assert (receipt.outcome, receipt.reason, receipt.staleness) == (Outcome.REJECTED, reason, 3), protocol
        assert words in receipt.message and receipt.min_version == 3, receipt
        assert push(shard, [1.0], base_version=0) == receipt._replace(duplicate=True), protocol
        assert (shard.version, shard.state().pending, pull(shard)[1].tolist()) == (3, (), [0.0]), protocol


def test_a_second_gradient_in_a_round_changes_nothing_and_a_retried_one_is_known():
    shard = hardsync()
    push(shard, [1.0], workers=TWO)
    again = push(shard, [1.0], workers=TWO)
    assert (again.outcome, again.duplicate, again.min_version) == (Outcome.PENDING, True, 1)
    receipt = push(shard, [9.0], sequence=1, workers=TWO)
    assert (receipt.outcome, receipt.reason, receipt.min_version) == (Outcome.REJECTED, Reason.REPEATED, 1)
    push(shard, [3.0], worker_id="b", workers=TWO)
    assert (shard.num_pending, pull(shard)[1].tolist()) == (0, [-2.0])


def test_a_poisoned_gradient_is_clipped_to_the_median_norm_of_its_round():
    five = roster_of(5)

    def after_a_round(protocol: str, values: Sequence[list[float]]) -> tuple[list[float], list[float]]:
        shard = make_shard([0.0, 0.0], protocol=protocol)
        receipts = [push(shard, each, worker_id=f"w{i:02d}", workers=five) for i, each in enumerate(values)]
        return pull(shard)[1].tolist(), [receipts[-1].weight]

    honest = [[3.0, 4.0], [3.0, 4.0], [6.0, 8.0], [0.0, 2.5]]
    for protocol in ("hardsync:clip=median", "backup:b=0,clip=median"):
        # Norms 5, 5, 10, 2.5 and 5000: the median is 5.
        moved, weight = after_a_round(protocol, [*honest, [-3000.0, -4000.0]])
        assert moved == pytest.approx([-(3 + 3 + 3 + 0 - 3) / 5, -(4 + 4 + 4 + 2.5 - 4) / 5])
        assert weight == [pytest.approx(0.2 / 1000)], "the receipt says it"
    assert after_a_round("hardsync", [*honest, [-3000.0, -4000.0]])[0][0] > 500
    # Gradients of equal norm, and a round that another protocol settles.
    shard = make_shard([0.0], protocol="hardsync:clip=median")
    push(shard, [1.0], worker_id="a", workers=THREE)
    push(shard, [-8.0], worker_id="b", workers=THREE)
    shard.configure(behaviour=make_behaviour("async"), roster=THREE)
    assert pull(shard)[1].tolist() == [0.0]


def test_each_number_of_sparse_gradients_is_divided_by_the_workers_that_sent_it_or_by_all():
    merged = {"senders": [-2.0, -6.0, 0.0, -4.0], "all": [-4 / 3, -2.0, 0.0, -4 / 3]}
    for protocol, (merge, expected) in product(("hardsync", "backup:b=0", "softsync:n=1"), merged.items()):
        separator = "," if ":" in protocol else ":"
        log = Log()
        shard = make_shard(np.zeros(4), protocol=f"{protocol}{separator}merge={merge}", recorder=log)
        rows = {"a": (1.0, 6.0, 0.0, 0.0), "b": (3.0, 0.0, 0.0, 0.0), "c": (0.0, 0.0, 0.0, 4.0)}
        for name, row in rows.items():
            assert shard.pending_bytes == {"a": 0, "b": 16, "c": 24}[name], "what waits stays small"
            shard.push(sparse(*row, worker_id=name), roster=THREE)
        assert pull(shard)[1].tolist() == pytest.approx(expected), (protocol, merge)
        replayed = make_shard(np.zeros(4), protocol=shard.behaviour.aggregation)
        assert replay(log, replayed)[-1] == digest(pull(shard)[1])


def test_a_number_outside_the_extents_of_a_sparse_gradient_was_not_sent_either():
    for merge, expected in {"senders": [-3.0, -2.0, 7.0, -4.0, 7.0], "all": [-2.0, -2.0, 7.0, -4 / 3, 7.0]}.items():
        settings = {"learning_rate": 1.0, "weight_decay": 0.5}
        shard = make_shard([0.0, 0.0, 7.0, 0.0, 7.0], settings=settings, protocol=f"hardsync:merge={merge}")
        ends, front = (Extent(0, 1), Extent(3, 1)), (Extent(0, 2),)
        shard.push(sparse(2.0, 4.0, worker_id="a", extents=ends), roster=THREE)
        shard.push(sparse(4.0, 2.0, worker_id="b", extents=front), roster=THREE)
        push(shard, [0.0, 2.0 if merge == "senders" else 4.0], worker_id="c", extents=front, workers=THREE)
        assert pull(shard)[1].tolist() == pytest.approx(expected), merge


def test_a_weight_counts_among_the_senders_of_a_number_and_a_dense_gradient_sends_all_that_is_not_0():
    shard = make_shard(np.zeros(3), protocol="hardsync:clip=median")
    shard.push(sparse(4.0, 0.0, 0.0, worker_id="a", example_count=30), roster=THREE)
    shard.push(sparse(0.0, 4.0, 0.0, worker_id="b", example_count=10), roster=THREE)
    push(shard, [8.0, 0.0, 0.0], worker_id="c", example_count=10, workers=THREE)
    assert pull(shard)[1].tolist() == [-4.0, -4.0, 0.0], "c is clipped to a norm of 4"


def test_a_sparse_gradient_alone_or_with_nothing_beside_it_is_applied_in_full():
    for protocol in ("async", "hardsync", "softsync:n=1,merge=all", "ssp:s=0,strict_bsp=true"):
        shard = make_shard([0.0, 0.0], protocol=protocol)
        shard.push(sparse(0.0, 3.0), roster=roster("a"))
        assert pull(shard)[1].tolist() == [0.0, -3.0], protocol
    shard = make_shard([0.0, 0.0], protocol="hardsync")
    shard.push(nothing(worker_id="b"), roster=TWO)
    shard.push(sparse(0.0, 3.0), roster=TWO)
    assert pull(shard)[1].tolist() == [0.0, -3.0]
    refused = make_shard([0.0]).push(sparse(np.nan), roster=roster("a")).receipt
    assert refused.reason is Reason.NOT_FINITE


def test_nothing_has_no_norm_and_a_round_of_nothing_is_not_clipped():
    shard = make_shard([0.0], protocol="hardsync:clip=median")
    shard.push(nothing(worker_id="a"), roster=TWO)
    shard.push(nothing(worker_id="b"), roster=TWO)
    shard.push(nothing(worker_id="a", base_version=1, sequence=1), roster=TWO)
    push(shard, [4.0], worker_id="b", sequence=1, workers=TWO)
    assert pull(shard)[1].tolist() == [-2.0]


def test_a_round_is_completed_without_a_dead_worker_and_wakes_waiting_calls():
    shard = hardsync()
    calls: list[int] = []
    push(shard, [1.0], workers=THREE)
    receipt = push(shard, [3.0], worker_id="b", workers=THREE)
    shard.when_version(receipt.min_version, lambda: calls.append(shard.version))
    assert len(shard.complete(THREE)) == 0
    assert len(shard.complete(TWO, version=shard.version + 1)) == 0
    assert len(shard.complete(TWO, version=shard.version)) == 1
    assert (calls, pull(shard)[1].tolist()) == ([1], [-2.0])
    push(shard, [1.0], sequence=1, workers=TWO)
    assert len(shard.complete(Roster())) == 1


def test_softsync_makes_several_updates_at_once_when_many_workers_go():
    shard = make_shard([0.0], protocol="softsync:n=1")
    for sequence in range(5):
        push(shard, [float(2**sequence)], sequence=sequence, workers=roster_of(6))
    assert len(shard.complete(roster_of(2))) == 2
    assert pull(shard)[1].tolist() == [-1.5 - 6.0]
    assert [waiting.gradient.sequence for waiting in shard.state().pending] == [4]


def test_a_finished_shard_completes_no_round_and_wakes_waiting_calls():
    shard = hardsync()
    calls: list[int] = []
    push(shard, [1.0], workers=TWO)
    shard.when_version(1, lambda: calls.append(shard.version))
    shard.finish()
    assert (calls, shard.complete(roster("a")), shard.num_pending) == ([0], [], 1)


def test_a_round_of_nothing_is_an_update_that_touches_no_number():
    for rule in ("sgd", "momentum", "adam"):
        shard = make_shard([1.0, 2.0], rule=rule, settings={"learning_rate": 0.1}, protocol="hardsync")
        push(shard, [1.0, 1.0])
        before = shard.state()
        for worker_id, sequence in (("a", 1), ("b", 0)):
            shard.push(nothing(worker_id=worker_id, sequence=sequence, base_version=1), roster=TWO)
        after = shard.state()
        assert after.version == before.version + 1, rule
        assert after.parameters.tobytes() == before.parameters.tobytes(), rule
        assert all((slot == before.slots[name]).all() for name, slot in after.slots.items()), rule


def test_without_a_barrier_nothing_is_answered_and_makes_no_update():
    for protocol in ("async", "softsync:n=1", "serial", "ssp:s=1", "asgd"):
        shard = make_shard([1.0], protocol=protocol)
        receipt = shard.push(nothing(example_count=8), roster=TWO).receipt
        assert (receipt.outcome, receipt.version_before, receipt.version_after) == (Outcome.APPLIED, 0, 0), protocol
        assert (shard.version, shard.state().pending, shard.examples) == (0, (), 8), protocol
        assert shard.push(nothing(example_count=8), roster=TWO).receipt.duplicate, protocol


def test_a_round_survives_a_restore_and_takes_no_second_gradient_of_a_worker():
    shard = hardsync()
    push(shard, [1.0], workers=TWO)
    later = restored(shard, shard.state(), epoch=1)
    assert push(later, [5.0], epoch=1, sequence=1, workers=TWO).reason == Reason.REPEATED
    push(later, [3.0], worker_id="b", epoch=1, workers=TWO)
    assert pull(later)[1].tolist() == [-2.0]


def test_the_recorder_hears_of_a_completion_only_where_there_is_one():
    log = Log()
    shard = hardsync(recorder=log)
    shard.complete(roster("a"))
    push(shard, [1.0], workers=TWO)
    shard.complete(TWO)
    shard.complete(roster("a"))
    assert [type(event).__name__ for event in log.events[0]] == ["Pushed", "Completed"]
