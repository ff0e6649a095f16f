"""Codecs of few bits on a device: the bits of pyps_wire.codecs, and the residuals of pyps_client.vectors.Encoder."""

import numpy as np
import pytest
import torch

from pyps_client.torch.device_codecs import ENCODINGS, DeviceVector
from pyps_client.vectors import Encoder, values_at
from pyps_wire.codecs import CODECS
from pyps_wire.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_REJECTED,
    REASON_DROPPED,
    REASON_FORGOTTEN,
    REASON_NOT_FINITE,
    REASON_STALE,
    Receipt,
)
from pyps_wire.partition import Model, Tensor, partition

GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)
on_devices = pytest.mark.parametrize("device", ["cpu", GPU])
encodings = pytest.mark.parametrize("codec", [CODECS[number] for number in ENCODINGS], ids=repr)

SIZES = [0, 1, 31, 32, 33, 1023, 1024, 1025, 4097, *np.random.default_rng(1).integers(2, 9000, 6).tolist()]
EDGES = np.array([0, -0.0, 1e-45, -1e-44, 3e-39, 1.2e-38, 0.5, 3.5, 5, 7, -127, 3e38, -3.4e38], np.float32)
NOT_FINITE = np.array([np.nan, -np.inf, np.inf, 1], np.float32)


def numbers(size: int) -> list[np.ndarray]:
    """Return numbers of one size, of many sizes, on all borders, of any bits, and some that are not finite."""
    random = np.random.default_rng(size)
    normal = random.standard_normal(size)
    any_bits = random.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore"):
        spread = (normal * 10.0 ** random.integers(-45, 38, size)).astype(np.float32)
    few = np.where(random.random(size) < 0.001, random.choice(NOT_FINITE, size), normal.astype(np.float32))
    finite = np.where(np.isfinite(any_bits), any_bits, np.float32(0))
    # Blocks whose largest number is next to a limit, times a power of two.
    next_to = np.nextafter(np.float32([7, 7, 127, 127]), np.float32([0, 200, 0, 200]))
    limits = (
        (random.choice(next_to, size) * 2.0 ** random.integers(-150, 120, size)).astype(np.float32).repeat(32)[:size]
    )
    return [normal.astype(np.float32), limits, spread, random.choice(EDGES, size), finite, any_bits, few]


def bits_of(values: np.ndarray) -> np.ndarray:
    """Return the bits, those of any NaN as of one."""
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


def on(device: str, values: np.ndarray) -> DeviceVector:
    return DeviceVector(torch.from_numpy(values.copy()).to(device))


@on_devices
@encodings
@pytest.mark.parametrize("size", SIZES)
def test_payloads_and_what_they_lose_have_the_bits_of_the_host(codec, size, device):
    for values, owed in zip(numbers(size), reversed(numbers(size)), strict=True):
        lost = np.empty(size, np.float32)
        with np.errstate(all="ignore"):
            expected = codec.encode_feedback(values, owed, lost)
        for residual in (owed, on(device, owed)):
            payload, left = on(device, values).encode_feedback(residual, codec)
            assert bytes(payload) == bytes(expected)
            assert np.array_equal(bits_of(left.on_host()), bits_of(lost))


PLAN = partition(Model((Tensor("w", (3000,)),)), num_servers=1)
SHARD = PLAN.shards[0]
ANSWERS = [(OUTCOME_REJECTED, reason) for reason in (REASON_DROPPED, REASON_FORGOTTEN, REASON_STALE, REASON_NOT_FINITE)]
ANSWERS += [(OUTCOME_APPLIED, 0)] * 4


@on_devices
@encodings
def test_residuals_go_from_push_to_push_as_those_of_the_host_and_between_both(codec, device):
    random = np.random.default_rng(8)
    host, other = Encoder(codec), Encoder(codec)
    for number in range(1, 161):
        gradient = random.standard_normal(3000).astype(np.float32)
        gradient[7] *= np.float32(1e38) if number == 44 else np.float32(1)
        extents = ((5, 40), (1000, 900)) if random.random() < 0.1 else ()
        # A backward pass sends shards from the host.
        places = gradient if random.random() < 0.1 else on(device, gradient)
        outcome, reason = ANSWERS[random.integers(len(ANSWERS))]
        for encoder in (host, other):
            encoder.begin(number)
            encoder.clear_old(lambda _, version=number + 9 * (number % 25 == 0): (0, version), age_max=8)
        payload = other.payload(values_at(places, extents), SHARD, extents)
        assert bytes(payload) == bytes(host.payload(values_at(gradient, extents), SHARD, extents))
        assert other.payload(values_at(places, extents), SHARD, extents) is payload, "a retry sends the same bytes"
        if number % 10 == 0:
            np.testing.assert_equal(other.state(), host.state())
        # Else the next push gives it up.
        if random.random() < 0.9:
            for encoder in (host, other):
                encoder.answered(Receipt(shard_id=0, outcome=outcome, reason=reason, version_after=number))
        if number % 20 == 0:
            saved, other = other.state(), Encoder(codec)
            other.load(saved, PLAN)
