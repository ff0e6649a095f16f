"""What makes an update's rate: base rate, schedule, batch growth, staleness, clipping; and how they are replaced."""

import numpy as np
import pytest

from pyps.core.gradient import FLOAT32_MAX
from pyps.core.receipt import Outcome, Reason
from pyps.core.recorder import Configured, Pushed
from pyps.core.roster import Roster
from pyps.core.rules import RULES
from pyps.core.schedule import BatchGrowth
from pyps.core.store import PendingBudget
from pyps_wire.errors import InvalidArgument, LimitExceeded
from shards import FullDisk, Log, make_behaviour, make_shard, nothing, pull, push, refusal, roster, roster_of

TWO = roster("a", "b")


def test_the_owners_rate_holds_from_its_push_on():
    shard = make_shard([0.0])
    first = push(shard, [1.0], learning_rate=0.5)
    second = push(shard, [1.0], worker_id="b")
    assert (first.rate, second.rate, shard.learning_rate) == (0.5, 0.5, 0.5)
    assert pull(shard)[1].tolist() == [-1.0]


def test_the_owners_rate_holds_though_its_gradient_is_not_needed_or_is_nothing():
    shard = make_shard([0.0], protocol="backup:b=1", version=2)
    late = push(shard, [1.0], base_version=1, learning_rate=0.5, workers=TWO)
    assert (late.reason, late.rate, shard.learning_rate) == (Reason.DROPPED, 0.0, 0.5)
    shard = make_shard([0.0])
    shard.push(nothing(learning_rate=0.5), roster=roster())
    assert shard.learning_rate == 0.5


@pytest.mark.parametrize("provisional", [False, True])
@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ({"protocol": "hardsync", "version": 2}, None),
        ({"policy": "drop:spread=0", "version": 2}, None),
        ({"protocol": "hardsync", "budget": PendingBudget(3), "version": 1}, LimitExceeded),
        ({"protocol": "sandblaster", "version": 1}, InvalidArgument),
        ({"recorder": FullDisk(room=0), "version": 1}, OSError),
    ],
)
def test_a_push_that_is_refused_or_fails_sets_neither_rate_nor_momentum(setting, error, provisional):
    """Nor does it set a rate on this shard alone, where provisional ones of others then hold no more."""
    settings = {"learning_rate": 1.0, "momentum": 0.5}
    shard = make_shard([0.0], rule="momentum", settings=settings, **setting)
    rates = {"learning_rate": 7.0, "momentum": 0.75, "provisional": provisional}
    if error is None:
        assert push(shard, [1.0], base_version=1, workers=TWO, **rates).reason == Reason.STALE
    else:
        with pytest.raises(error):
            push(shard, [1.0], workers=TWO, **rates)
    assert (shard.learning_rate, shard.state().momentum, shard.rate_is_set) == (1.0, 0.5, False)


def test_a_push_that_leaves_no_trace_or_is_retried_brings_no_rate():
    shard = make_shard([0.0])
    push(shard, [np.nan], learning_rate=0.5)
    push(shard, [1.0], epoch=1, learning_rate=0.5)
    assert shard.learning_rate == 1.0
    push(shard, [1.0], learning_rate=0.5)
    shard.configure(learning_rate=0.25, roster=roster())
    assert push(shard, [1.0], learning_rate=0.5, base_version=0).duplicate
    assert shard.learning_rate == 0.25


def test_a_provisional_rate_holds_for_its_push_until_a_rate_is_set_and_is_logged_as_what_it_came_to():
    log = Log()
    shard = make_shard([0.0], rule="momentum", momentum=0.5, recorder=log)
    theirs = {"worker_id": "b", "provisional": True}

    def take(**fields) -> tuple[float, float]:
        rate = push(shard, [1.0], sequence=shard.version, **fields).rate
        return rate, shard.hyperparameters["momentum"]

    assert take(learning_rate=0.5, momentum=0.25, **theirs) == (0.5, 0.25)
    assert take(learning_rate=0.125, momentum=0.5, **theirs) == (0.125, 0.5)
    assert take(learning_rate=0.25) == (0.25, 0.5)
    assert take(learning_rate=0.5, momentum=0.25, **theirs) == (0.25, 0.5)
    logged = [event.gradient for event in log.events[0] if isinstance(event, Pushed)]
    assert [gradient.learning_rate for gradient in logged] == [0.5, 0.125, 0.25, None]
    assert logged[3].momentum is None and not any(gradient.provisional for gradient in logged)


def test_a_provisional_rate_changes_neither_a_configured_rate_nor_a_schedule():
    shard = make_shard([0.0])
    shard.configure(learning_rate=0.25, roster=roster())
    scheduled = make_shard([0.0], behaviour=make_behaviour(rate_schedule="step:every=9,factor=0.5"))
    rates = [push(each, [1.0], learning_rate=0.5, provisional=True).rate for each in (shard, scheduled)]
    assert rates == [0.25, 1.0]


def test_a_schedule_is_evaluated_by_the_shards_version_when_the_update_is_made():
    shard = make_shard([0.0], behaviour=make_behaviour(rate_schedule="step:every=2,factor=0.5"))
    rates = [push(shard, [1.0], sequence=sequence).rate for sequence in range(5)]
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert pull(shard)[1].tolist() == [-3.25]
    # Also of a round that is completed without a push.
    behaviour = make_behaviour("hardsync", rate_schedule="step:every=1,factor=0.5")
    shard = make_shard([0.0], behaviour=behaviour, version=1)
    push(shard, [1.0], workers=TWO)
    shard.complete(roster("a"))
    assert pull(shard)[1].tolist() == [-0.5]


def test_a_schedule_in_epochs_counts_the_examples_behind_applied_gradients():
    text = "step:every=1,factor=0.5,unit=epochs,epoch_examples=20"
    shard = make_shard([0.0], behaviour=make_behaviour("softsync:n=1", rate_schedule=text))
    receipts = [push(shard, [1.0], sequence=place, example_count=10, workers=TWO) for place in range(6)]
    assert [each.rate for each in receipts if each.outcome == Outcome.APPLIED] == [1.0, 0.5, 0.25]
    assert shard.examples == 60


def test_a_growing_minibatch_may_raise_the_rate():
    growth = BatchGrowth.parse("start=8,maximum=32,every=1,lr_scaling=linear", epoch_examples=10)
    shard = make_shard([0.0], behaviour=make_behaviour(batch_growth=growth))
    rates = [push(shard, [1.0], sequence=sequence, example_count=10).rate for sequence in range(4)]
    assert rates == [1.0, 2.0, 4.0, 4.0]


def test_schedule_base_rate_and_staleness_multiply():
    behaviour = make_behaviour(policy="divide", rate_schedule="step:every=1,factor=0.5")
    shard = make_shard([0.0], behaviour=behaviour, version=2)
    receipt = push(shard, [1.0], base_version=0, learning_rate=8.0)
    assert (receipt.rate, receipt.rate_scale) == (1.0, 0.5)
    assert pull(shard)[1].tolist() == [-1.0]


def test_a_policy_that_scales_the_whole_update_shows_in_receipt_and_parameters():
    shard = make_shard([0.0], protocol="softsync:n=1", policy="per_update", version=6)
    push(shard, [1.0], base_version=0, workers=TWO)
    receipt = push(shard, [1.0], sequence=1, base_version=4, workers=TWO)
    assert (receipt.rate, receipt.rate_scale, receipt.weight) == (0.25, 0.25, 0.5)
    assert pull(shard)[1].tolist() == [-0.25]


def test_a_push_is_clipped_to_the_norm_that_it_has_or_to_a_larger_one_that_its_worker_tells():
    """The norm of all shards of a push is its worker's to tell; too small a one does not evade the clipping."""
    shard = make_shard([0.0, 0.0])
    for place, (clip_norm, reported, weight) in enumerate(
        ((1.0, 0.0, 0.2), (5.0, 0.0, 1.0), (5.0, 10.0, 0.5), (1.0, 0.1, 0.2))
    ):
        shard.configure(behaviour=make_behaviour(clip_norm=clip_norm), roster=roster())
        before = pull(shard)[1]
        receipt = push(shard, [3.0, 4.0], sequence=place, norm=reported)
        assert receipt.weight == pytest.approx(weight), (clip_norm, reported)
        assert (before - pull(shard)[1]).tolist() == pytest.approx([3.0 * weight, 4.0 * weight], rel=1e-6)


# A behaviour and a base rate may be replaced while the shard runs; what waits for a protocol that goes is settled.


def test_pending_gradients_become_one_update_of_the_old_protocol():
    for protocol, moved in {
        "softsync:n=1": -2.0,
        "hardsync:weighting=equal": -2.0,
        "hardsync": -1.5,
        "backup:b=0": -2.0,
        "ssp:s=0,strict_bsp=true": -4.0,
    }.items():
        shard = make_shard([0.0], protocol=protocol)
        push(shard, [1.0], example_count=3, workers=roster_of(3))
        push(shard, [3.0], worker_id="b", example_count=1, workers=roster_of(3))
        assert len(shard.configure(behaviour=make_behaviour("async"), roster=roster_of(3))) == 1, protocol
        assert (shard.version, shard.examples, shard.num_pending) == (1, 4, 0), protocol
        assert pull(shard)[1].tolist() == [moved], protocol


def test_pending_gradients_are_settled_at_the_old_rate_and_schedule_and_wake_their_workers():
    old = make_behaviour("hardsync", rate_schedule="step:every=1000,factor=0.5")
    shard = make_shard([0.0], behaviour=old, version=1000)
    calls: list[int] = []
    receipt = push(shard, [1.0], workers=TWO)
    shard.when_version(receipt.min_version, lambda: calls.append(shard.version))
    shard.configure(behaviour=make_behaviour("async"), learning_rate=100.0, roster=TWO)
    assert (pull(shard)[1].tolist(), calls) == ([-0.5], [1001])


def test_without_another_protocol_gradients_go_on_waiting_as_they_were_weighed():
    shard = make_shard([0.0], protocol="softsync:n=1", policy="divide", version=4)
    push(shard, [1.0], base_version=0, workers=TWO)
    assert len(shard.configure(behaviour=make_behaviour("softsync:n=1", "none"), roster=TWO)) == 0
    push(shard, [1.0], sequence=1, base_version=0, workers=TWO)
    assert pull(shard)[1].tolist() == [-0.625]


def test_another_base_rate_holds_from_the_next_update_on():
    shard = make_shard([0.0], protocol="hardsync")
    push(shard, [1.0], workers=TWO)
    shard.configure(learning_rate=10.0, roster=TWO)
    assert push(shard, [1.0], worker_id="b", workers=TWO).rate == 10.0
    assert (shard.learning_rate, pull(shard)[1].tolist()) == (10.0, [-10.0])


def test_a_rate_that_cannot_be_changes_nothing():
    log = Log()
    shard = make_shard([0.0], recorder=log)
    for rate in (-1.0, np.nan, np.inf, 1e39):
        change = {"behaviour": make_behaviour("hardsync"), "learning_rate": rate, "roster": TWO}
        assert "expected a finite float32 of at least 0" in refusal(shard.configure, **change)
        assert (shard.learning_rate, shard.behaviour.aggregation.name, log.events) == (1.0, "async", {}), rate


def test_the_recorder_hears_of_a_change_with_all_that_makes_it_again():
    log, behaviour = Log(), make_behaviour("softsync:n=2")
    shard = make_shard([0.0], recorder=log, version=3)
    shard.configure(behaviour=behaviour, learning_rate=0.5, roster=TWO)
    shard.configure(learning_rate=0.25, roster=TWO)
    assert log.events[0] == [
        Configured(0, behaviour, 0.5, TWO, version=3, finished=False),
        Configured(0, None, 0.25, TWO, version=3, finished=False),
    ]


def test_a_finished_shard_settles_nothing():
    shard = make_shard([0.0], protocol="hardsync")
    push(shard, [1.0], workers=TWO)
    shard.finish()
    assert len(shard.configure(behaviour=make_behaviour("async"), roster=Roster())) == 0
    assert (shard.version, shard.num_pending) == (0, 1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("rule", sorted(RULES))
def test_no_rate_that_a_worker_may_send_keeps_a_round_from_its_update(rule):
    growth = BatchGrowth.parse("start=8,maximum=32,every=1,lr_scaling=linear", epoch_examples=1)
    behaviour = make_behaviour(protocol="hardsync", batch_growth=growth)
    shard, both = make_shard(rule=rule, settings={}, behaviour=behaviour), roster("a", "b")
    for number in range(2):
        for name in "ab":
            rates = {"learning_rate": FLOAT32_MAX, "example_count": 8}
            push(shard, np.ones(4), workers=both, worker_id=name, sequence=number, **rates)
    assert shard.version == 2
