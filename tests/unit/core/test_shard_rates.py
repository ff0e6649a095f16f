"""What makes an update's rate: the base rate and its owner, schedule, batch growth, staleness; and clipping."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pyps.core.batch_growth import BatchGrowth
from pyps.core.gradient import Codec, PayloadKind
from pyps.core.receipt import Outcome, Reason
from pyps_wire.errors import BadRequest
from shards import floats, make_behaviour, make_shard, nothing, pull, push, restored, roster

TWO = roster("a", "b")


# The base rate and the worker that owns it.


def test_the_owners_rate_holds_from_its_push_on() -> None:
    shard = make_shard([0.0])
    first = push(shard, [1.0], learning_rate=0.5)
    second = push(shard, [1.0], worker_id="b")
    assert (first.rate, second.rate, shard.learning_rate) == (0.5, 0.5, 0.5)
    assert pull(shard)[1].tolist() == [-1.0]


def test_the_owners_rate_holds_though_its_gradient_is_not_needed() -> None:
    shard = make_shard([0.0], protocol="backup:b=1", version=2)
    late = push(shard, [1.0], base_version=1, learning_rate=0.5, workers=TWO)
    assert (late.reason, late.rate, shard.learning_rate) == (Reason.DROPPED, 0.0, 0.5)


def test_the_owners_rate_comes_with_nothing_too() -> None:
    shard = make_shard([0.0])
    shard.push(nothing(learning_rate=0.5), roster=roster())
    assert shard.learning_rate == 0.5


def test_a_push_that_leaves_no_trace_brings_no_rate() -> None:
    shard = make_shard([0.0])
    push(shard, [np.nan], learning_rate=0.5)
    push(shard, [1.0], epoch=1, learning_rate=0.5)
    assert shard.learning_rate == 1.0


def test_a_retried_push_does_not_bring_its_rate_again() -> None:
    shard = make_shard([0.0])
    push(shard, [1.0], learning_rate=0.5)
    shard.configure(learning_rate=0.25, roster=roster())
    assert push(shard, [1.0], learning_rate=0.5, base_version=0).duplicate
    assert shard.learning_rate == 0.25


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf])
def test_a_rate_that_cannot_be_is_an_error(rate: float) -> None:
    shard = make_shard([0.0])
    with pytest.raises(BadRequest, match="push 0 of worker 'a': learning_rate is"):
        push(shard, [1.0], learning_rate=rate)


def test_a_restored_shard_keeps_base_rate_and_examples() -> None:
    shard = make_shard([0.0])
    push(shard, [1.0], learning_rate=0.5, example_count=32)
    later = restored(shard, shard.state())
    assert (later.learning_rate, later.examples) == (0.5, 32)


# Schedules and batch growth.


def test_a_schedule_is_evaluated_by_the_shards_version_when_the_update_is_made() -> None:
    shard = make_shard([0.0], behaviour=make_behaviour(rate_schedule="step:every=2,factor=0.5"))
    rates = [push(shard, [1.0], sequence=sequence).rate for sequence in range(5)]
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert pull(shard)[1].tolist() == [-3.25]


def test_a_schedule_in_epochs_counts_the_examples_behind_applied_gradients() -> None:
    text = "step:every=1,factor=0.5,unit=epochs,epoch_examples=20"
    shard = make_shard([0.0], behaviour=make_behaviour("softsync:n=1", rate_schedule=text))
    rates = []
    for sequence in range(6):
        receipt = push(shard, [1.0], sequence=sequence, example_count=10, workers=TWO)
        if receipt.outcome == Outcome.APPLIED:
            rates.append(receipt.rate)
    assert rates == [1.0, 0.5, 0.25]
    assert shard.examples == 60


def test_a_growing_minibatch_may_raise_the_rate() -> None:
    growth = BatchGrowth.parse("start=8,maximum=32,every=1,lr_scaling=linear", epoch_examples=10)
    shard = make_shard([0.0], behaviour=make_behaviour(batch_growth=growth))
    rates = [push(shard, [1.0], sequence=sequence, example_count=10).rate for sequence in range(4)]
    assert rates == [1.0, 2.0, 4.0, 4.0]


def test_schedule_base_rate_and_staleness_multiply() -> None:
    behaviour = make_behaviour(policy="divide", rate_schedule="step:every=1,factor=0.5")
    shard = make_shard([0.0], behaviour=behaviour, version=2)
    receipt = push(shard, [1.0], base_version=0, learning_rate=8.0)
    assert (receipt.rate, receipt.rate_scale) == (1.0, 0.5)
    assert pull(shard)[1].tolist() == [-1.0]


def test_a_policy_that_scales_the_whole_update_shows_in_receipt_and_parameters() -> None:
    shard = make_shard([0.0], protocol="softsync:n=1", policy="per_update", version=6)
    push(shard, [1.0], base_version=0, workers=TWO)
    receipt = push(shard, [1.0], sequence=1, base_version=4, workers=TWO)
    assert (receipt.rate, receipt.rate_scale, receipt.weight) == (0.25, 0.25, 0.5)
    assert pull(shard)[1].tolist() == [-0.25]


def test_a_round_that_is_completed_without_a_push_has_the_rate_of_its_version() -> None:
    behaviour = make_behaviour("hardsync", rate_schedule="step:every=1,factor=0.5")
    shard = make_shard([0.0], behaviour=behaviour, version=1)
    push(shard, [1.0], workers=TWO)
    shard.complete(roster("a"))
    assert pull(shard)[1].tolist() == [-0.5]


def test_the_schedule_leaves_deltas_alone() -> None:
    shard = make_shard([0.0], behaviour=make_behaviour(rate_schedule="step:every=1,factor=0.5"), version=3)
    assert push(shard, [1.0], kind=PayloadKind.DELTA).rate == 1.0
    assert pull(shard)[1].tolist() == [1.0]


# Clipping.


def test_a_push_is_clipped_to_the_norm() -> None:
    shard = make_shard([0.0, 0.0], behaviour=make_behaviour(clip_norm=1.0))
    receipt = push(shard, [3.0, 4.0])
    assert receipt.weight == pytest.approx(0.2)
    assert pull(shard)[1].tolist() == pytest.approx([-0.6, -0.8])


def test_a_push_below_the_norm_is_left_alone() -> None:
    shard = make_shard([0.0, 0.0], behaviour=make_behaviour(clip_norm=5.0))
    assert push(shard, [3.0, 4.0]).weight == 1.0


def test_the_norm_of_the_whole_push_counts_where_the_worker_tells_it() -> None:
    shard = make_shard([0.0, 0.0], behaviour=make_behaviour(clip_norm=5.0))
    assert push(shard, [3.0, 4.0], norm=10.0).weight == 0.5


def test_a_worker_cannot_evade_the_clipping_by_telling_too_small_a_norm() -> None:
    shard = make_shard([0.0, 0.0], behaviour=make_behaviour(clip_norm=1.0))
    assert push(shard, [3.0, 4.0], norm=0.1).weight == pytest.approx(0.2)


@pytest.mark.parametrize("norm", [-1.0, math.nan, math.inf])
def test_a_norm_that_cannot_be_is_an_error(norm: float) -> None:
    shard = make_shard([0.0])
    with pytest.raises(BadRequest, match="gradient_norm is"):
        push(shard, [1.0], norm=norm)


@pytest.mark.parametrize("codec", list(Codec))
def test_the_norm_is_read_in_the_payloads_codec(codec: Codec) -> None:
    shard = make_shard([0.0, 0.0], behaviour=make_behaviour(clip_norm=1.0))
    payload = {
        Codec.FLOAT32: floats(3.0, 4.0).tobytes(),
        Codec.FLOAT16: np.array([3.0, 4.0], np.float16).tobytes(),
        Codec.BFLOAT16: (floats(3.0, 4.0).view(np.uint32) >> 16).astype(np.uint16).tobytes(),
    }[codec]
    assert push(shard, [], payload=payload, codec=codec).weight == pytest.approx(0.2)


def test_a_payload_at_any_place_of_a_message_is_clipped() -> None:
    shard = make_shard([0.0, 0.0], behaviour=make_behaviour(clip_norm=1.0))
    message = b"abc" + floats(3.0, 4.0).tobytes()
    assert push(shard, [], payload=memoryview(message)[3:]).weight == pytest.approx(0.2)


def test_what_is_clipped_enters_the_slots_clipped() -> None:
    """Unlike staleness, which scales the step: clipping is about the gradient itself, as on a worker."""
    shard = make_shard([0.0], rule="adagrad", behaviour=make_behaviour(clip_norm=2.0))
    push(shard, [4.0])
    assert shard.state().slots["accumulator"].tolist() == [4.0]


def test_a_delta_is_not_clipped() -> None:
    shard = make_shard([0.0], behaviour=make_behaviour(clip_norm=1.0))
    push(shard, [4.0], kind=PayloadKind.DELTA)
    assert pull(shard)[1].tolist() == [4.0]


def test_clipping_may_be_switched_on_while_a_shard_runs() -> None:
    shard = make_shard([0.0])
    shard.configure(behaviour=make_behaviour(clip_norm=1.0), roster=roster())
    push(shard, [4.0])
    assert pull(shard)[1].tolist() == [-1.0]
