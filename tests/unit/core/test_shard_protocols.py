"""How a shard obeys protocols and policies other than "apply every gradient at once"."""

from __future__ import annotations

import pytest

from pyps.core import aggregation
from pyps.core.receipt import Outcome, Reason
from pyps.core.staleness import StalenessPolicy, Weighing, WeighingContext
from shards import make_shard, pull, push, restored


class PairMean(aggregation.Aggregation):
    """Applies the mean of every two gradients, the later one first."""

    name = "pair_mean"

    def decide(self, arrival: aggregation.Arrival) -> aggregation.Decision:
        if not arrival.pending:
            return aggregation.Park()
        contributions = (arrival.contribution, *arrival.pending)
        return aggregation.Apply(tuple(aggregation.Part(c, 0.5) for c in contributions))


class OnlyFresh(aggregation.Aggregation):
    """Drops what is one update late, refuses what is later."""

    name = "only_fresh"

    def decide(self, arrival: aggregation.Arrival) -> aggregation.Decision:
        staleness = arrival.contribution.staleness
        if staleness > 1:
            return aggregation.Refuse(Reason.STALE, f"{staleness} updates late")
        if staleness == 1:
            return aggregation.Drop("not needed")
        return aggregation.Apply((aggregation.Part(arrival.contribution),))


def test_a_parked_gradient_is_pending_and_changes_no_parameter() -> None:
    shard = make_shard([1.0], protocol=PairMean())
    receipt = push(shard, [1.0])
    assert (receipt.outcome, receipt.version_after) == (Outcome.PENDING, 0)
    assert pull(shard)[1].tolist() == [1.0]


def test_parked_gradients_become_one_update() -> None:
    shard = make_shard([1.0], protocol=PairMean())
    push(shard, [1.0])
    receipt = push(shard, [3.0], sequence=1)
    assert (receipt.outcome, receipt.version_after, receipt.weight) == (Outcome.APPLIED, 1, 0.5)
    assert pull(shard)[1].tolist() == [-1.0]


def test_a_gradient_that_was_parked_is_applied_once() -> None:
    shard = make_shard([1.0], protocol=PairMean())
    outcomes = [push(shard, [1.0], sequence=sequence).outcome for sequence in range(4)]
    assert outcomes == [Outcome.PENDING, Outcome.APPLIED] * 2
    assert shard.state().pending == ()


def test_parked_gradients_survive_a_restore() -> None:
    shard = make_shard([1.0], protocol=PairMean())
    push(shard, [1.0])
    later = restored(shard, shard.state())
    assert push(later, [1.0]).duplicate
    push(later, [3.0], sequence=1)
    assert pull(later)[1].tolist() == [-1.0]


class TakesTwoUpdatesOld(StalenessPolicy):
    """Accepts staleness up to 2."""

    name = "two_updates_old"

    def weigh(self, staleness: int, context: WeighingContext) -> Weighing:
        return Weighing(accept=staleness <= 2)


@pytest.mark.parametrize("protocol", [aggregation.Async(), PairMean()])
def test_a_gradient_too_old_for_the_policy_is_neither_applied_nor_parked(
    protocol: aggregation.Aggregation,
) -> None:
    shard = make_shard([0.0], protocol=protocol, policy=TakesTwoUpdatesOld(), version=3)
    receipt = push(shard, [1.0], base_version=0)
    assert (receipt.reason, receipt.staleness) == (Reason.STALE, 3)
    assert "'two_updates_old'" in receipt.message
    assert (shard.version, shard.state().pending, pull(shard)[1].tolist()) == (3, (), [0.0])


@pytest.mark.parametrize(("base_version", "reason"), [(1, Reason.DROPPED), (0, Reason.STALE)])
def test_a_late_gradient_stays_refused_when_it_is_pushed_again(base_version: int, reason: Reason) -> None:
    shard = make_shard([0.0], protocol=OnlyFresh(), version=2)
    assert push(shard, [1.0], base_version=base_version).reason == reason
    again = push(shard, [1.0], base_version=base_version)
    assert (again.reason, again.duplicate) == (reason, True)
