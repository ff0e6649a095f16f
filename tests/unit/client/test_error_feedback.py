"""pyps_client.vectors.Encoder under a stateful codec: what becomes of a push's error, by its receipt."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyps_client.launch import Launch
from pyps_client.lbfgs.worker import Staging
from pyps_client.vectors import Encoder, values_at
from pyps_wire.codecs import FLOAT32, INT8, Codec, codec_of
from pyps_wire.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_PENDING,
    OUTCOME_REJECTED,
    PAYLOAD_KIND_BUFFER,
    PAYLOAD_KIND_GRADIENT,
    REASON_DROPPED,
    REASON_EPOCH,
    REASON_FINISHED,
    REASON_FORGOTTEN,
    REASON_NOT_FINITE,
    REASON_REPEATED,
    REASON_STALE,
    Receipt,
)
from pyps_wire.errors import InvalidArgument, WrongSize
from pyps_wire.partition import Model, Tensor, partition

PLAN = partition(Model((Tensor("w", (64,)), Tensor("mean", (3,), group=1))), num_servers=1)
SHARD, BUFFER = PLAN.shards
RANDOM = np.random.default_rng(3)
GRADIENTS = RANDOM.standard_normal((4, 64)).astype(np.float32)


class Halved(type(INT8)):  # type: ignore[misc]
    feedback = 0.5


HALVED = Halved(4713, "halved", INT8.max_bytes)
CODECS = [INT8, HALVED, *map(codec_of, ("topk:ratio=0.3", "topk2bit:ratio=0.5", "threshold:tau=1.2"))]


def receipt(outcome: int = OUTCOME_APPLIED, reason: int = 0, **fields: Any) -> Receipt:
    return Receipt(shard_id=SHARD.shard_id, outcome=outcome, reason=reason, **fields)  # type: ignore[arg-type]


def lost_by(values: np.ndarray, codec: Codec = INT8) -> np.ndarray:
    return values - codec.decode(codec.encode(values), values.size)


def push(encoder: Encoder, gradient: np.ndarray, answer: Receipt | None, extents: Any = ()) -> None:
    encoder.begin(object())
    payload = encoder.payload(gradient, SHARD, extents)
    assert encoder.payload(gradient + 1, SHARD, extents) is payload, "a retry sends the same bytes"
    if answer is not None:
        encoder.answered(answer)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("reason", [None, 0, REASON_DROPPED, REASON_FORGOTTEN, REASON_STALE, REASON_REPEATED,
                                    REASON_NOT_FINITE, REASON_EPOCH, REASON_FINISHED])  # fmt: skip
def test_the_receipt_decides_what_is_owed_to_the_next_gradient(codec, reason):
    encoder = Encoder(codec)
    push(encoder, GRADIENTS[0], receipt(OUTCOME_PENDING))
    owed = lost_by(GRADIENTS[0], codec)
    wanted = np.float32(codec.feedback) * owed + GRADIENTS[1]
    push(encoder, GRADIENTS[1], receipt(OUTCOME_REJECTED if reason else OUTCOME_APPLIED, reason or 0)
         if reason is not None else None)  # fmt: skip
    # The next push gives an unanswered one up.
    encoder.begin(object())
    if reason == REASON_DROPPED:
        # That is `wanted`, but for the rounding of a number beside a much larger level.
        expected = lost_by(wanted, codec) + codec.decode(codec.encode(wanted), wanted.size)
        np.testing.assert_allclose(expected, wanted, atol=1e-6)
    elif reason in (None, 0, REASON_FORGOTTEN):
        expected = lost_by(wanted, codec)
    else:
        expected = owed
    np.testing.assert_array_equal(encoder.residuals[SHARD.shard_id].values, expected)


def test_only_present_ranges_change_and_two_buffers_a_shard_are_used_again():
    encoder, extents = Encoder(INT8), ((3, 5), (40, 9))
    places = np.r_[3:8, 40:49]
    push(encoder, GRADIENTS[0], receipt())
    residual = encoder.residuals[SHARD.shard_id]
    buffers, owed = {id(residual.values), id(residual.lost)}, residual.values.copy()
    wanted = owed[places] + GRADIENTS[1][places]
    push(encoder, GRADIENTS[1][places], receipt(), extents)
    owed[places] = lost_by(wanted)
    np.testing.assert_array_equal(residual.values, owed)
    push(encoder, GRADIENTS[2][places], receipt(OUTCOME_REJECTED, REASON_DROPPED), extents)
    owed[places] += GRADIENTS[2][places]
    np.testing.assert_array_equal(residual.values, owed)
    push(encoder, GRADIENTS[3], receipt())
    assert {id(residual.values), id(residual.lost)} == buffers


def test_what_is_owed_is_cleared_after_an_absence_and_after_a_restore_far_back():
    for epoch, version, kept in ((1, 14, True), (1, 15, False), (1, 2, True), (2, 14, True), (2, 6, True),
                                 (2, 5, False), (1, -1, True)):  # fmt: skip
        encoder = Encoder(INT8)
        push(encoder, GRADIENTS[0], receipt(OUTCOME_PENDING, epoch=1, version_after=9, min_version=10))
        encoder.clear_old(lambda _, moment=(epoch, version): moment, age_max=4)
        assert encoder.residuals[SHARD.shard_id].values.any() == kept, (epoch, version)


def test_a_state_goes_to_the_next_life_as_if_the_push_under_way_were_applied():
    encoder, later, exact = Encoder(INT8), Encoder(INT8), Encoder(FLOAT32)
    push(encoder, GRADIENTS[0], receipt(epoch=1, version_after=7))
    push(encoder, GRADIENTS[1], None)
    state = encoder.state()
    encoder.answered(receipt(epoch=1, version_after=8))
    later.load(state, PLAN)
    np.testing.assert_array_equal(later.residuals[SHARD.shard_id].values, encoder.residuals[SHARD.shard_id].values)
    later.clear_old(lambda _: (1, 9), age_max=2)
    np.testing.assert_array_equal(later.state()[SHARD.shard_id]["values"], encoder.state()[SHARD.shard_id]["values"])
    exact.load(state, PLAN)
    assert exact.state() == {}
    state[SHARD.shard_id]["values"] = np.zeros(63, np.float32)
    with pytest.raises(WrongSize, match="residual of shard 0 has shape \\(63,\\); the shard has 64"):
        later.load(state, PLAN)


def test_sandblasters_sums_are_sent_without_feedback_or_not_at_all():
    session = SimpleNamespace(launch=Launch("one:1", gradient_codec="int8"))
    with pytest.raises(InvalidArgument, match=r"gradient_codec is int8, which makes up .* use float32, float16 or"):
        Staging(session)  # type: ignore[arg-type]


def test_buffers_are_sent_as_they_are():
    encoder, moves = Encoder(INT8), np.array([1e-9, 1.0, 1e9], np.float32)
    encoder.begin(object(), [PAYLOAD_KIND_GRADIENT, PAYLOAD_KIND_BUFFER])
    assert bytes(encoder.payload(moves, BUFFER, ())) == moves.tobytes()
    assert not encoder.residuals


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("extents", [(), ((8, 24), (40, 8))])
def test_of_a_push_scaled_at_its_end_nothing_is_lost(codec, extents):
    encoder = Encoder(codec)
    push(encoder, GRADIENTS[0], receipt())
    before, scale = encoder.residuals[SHARD.shard_id].values.copy(), 0.3
    gradient = values_at(GRADIENTS[1], extents)
    for answer in (receipt(), receipt(OUTCOME_REJECTED, REASON_DROPPED), None):
        encoder.residuals[SHARD.shard_id].values[:] = before
        encoder.begin(object())
        payload = encoder.payload(gradient, SHARD, extents)
        encoder.scale = scale
        if answer is not None:
            encoder.answered(answer)
        saved = encoder.state()[SHARD.shard_id]["values"]
        # The next push gives an unanswered one up.
        encoder.begin(object())
        np.testing.assert_array_equal(saved, encoder.residuals[SHARD.shard_id].values)
        applied = 0.0 if answer is not None and answer.reason else scale * codec.decode(payload, gradient.size)
        owed = values_at(encoder.residuals[SHARD.shard_id].values, extents)
        expected = codec.feedback * values_at(before, extents) + scale * gradient
        np.testing.assert_allclose(owed + applied, expected, atol=1e-6)


def test_a_push_that_servers_held_and_forgot_leaves_the_residuals_alone():
    encoder = Encoder(INT8)
    push(encoder, GRADIENTS[0], receipt())
    before = encoder.residuals[SHARD.shard_id].values.copy()
    plan = object()
    encoder.begin(plan)
    encoder.payload(GRADIENTS[1], SHARD, ())
    encoder.discard(plan)
    encoder.begin(object())
    np.testing.assert_array_equal(encoder.residuals[SHARD.shard_id].values, before)


@pytest.mark.parametrize("answer", [None, receipt(OUTCOME_REJECTED, REASON_DROPPED)])
def test_a_push_whose_scale_servers_do_not_know_changes_no_residual_that_is_saved_or_goes_on(answer):
    encoder = Encoder(INT8)
    push(encoder, GRADIENTS[0], receipt())
    before = encoder.residuals[SHARD.shard_id].values.copy()
    encoder.begin(object(), held=True)
    encoder.payload(GRADIENTS[1], SHARD, ())
    if answer is not None:
        encoder.answered(answer)
    np.testing.assert_array_equal(encoder.state()[SHARD.shard_id]["values"], before)
    encoder.begin(object())
    np.testing.assert_array_equal(encoder.residuals[SHARD.shard_id].values, before)


def test_a_residual_that_overflows_in_its_encoding_is_cleared_once_it_was_refused(caplog):
    encoder = Encoder(INT8)
    push(encoder, GRADIENTS[0], receipt())
    encoder.residuals[SHARD.shard_id].values[5] = np.finfo(np.float32).max
    with np.errstate(all="ignore"):
        push(encoder, GRADIENTS[1], receipt(OUTCOME_REJECTED, REASON_NOT_FINITE))
    assert "too large to be sent, after a gradient near the largest float32" in caplog.text
    push(encoder, GRADIENTS[2], receipt())
    np.testing.assert_array_equal(encoder.residuals[SHARD.shard_id].values, lost_by(GRADIENTS[2]))
