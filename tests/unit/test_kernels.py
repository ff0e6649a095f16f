"""The native codecs and scans against references of a few lines, bit for bit, on every instruction set."""

import numpy as np
import pytest

from kernel_values import (
    at_offset,
    bits,
    decode_reference,
    encode_reference,
    every_codec,
    every_length,
    payload_of,
    wide_values,
)
from pyps import _kernels


@pytest.fixture(params=_kernels.available(), autouse=True)
def isa(request):
    before = _kernels.isa()
    _kernels.select(request.param)
    yield request.param
    _kernels.select(before)


# Codecs.


@pytest.mark.parametrize("codec", [_kernels.FLOAT16, _kernels.BFLOAT16])
def test_every_16_bit_pattern_decodes_exactly(codec):
    payload = np.arange(65536, dtype=np.uint16).tobytes()
    values = np.empty(65536, np.float32)
    expected = decode_reference(payload, codec)

    _kernels.decode(payload, codec, values)

    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(values), nan)
    assert np.array_equal(np.signbit(values), np.signbit(expected))
    assert np.array_equal(bits(values)[~nan], bits(expected)[~nan])


@every_codec
@every_length
def test_decoding_restores_what_was_encoded(length, codec):
    payload = payload_of(length, codec, 1)
    values = np.empty(length, np.float32)

    _kernels.decode(payload, codec, values)

    assert _kernels.encode(values, codec) == payload


@every_codec
@every_length
def test_encode_rounds_to_nearest_even(length, codec):
    random = np.random.default_rng(7)
    values = random.integers(0, 2**32, length, dtype=np.uint32).view(np.float32)
    values[np.isnan(values)] = 0

    assert _kernels.encode(values, codec) == encode_reference(values, codec)


@pytest.mark.parametrize("codec", [_kernels.FLOAT16, _kernels.BFLOAT16])
def test_encode_rounds_right_next_to_every_16_bit_value_and_every_tie(codec):
    decoded = decode_reference(np.arange(65536, dtype=np.uint16).tobytes(), codec)
    decoded = decoded[np.isfinite(decoded)]
    ties = np.unique(decoded).astype(np.float64)
    ties = ((ties[1:] + ties[:-1]) / 2).astype(np.float32)
    exact = np.concatenate([decoded, ties, np.float32([65519.996, 65520, np.inf, -np.inf])])
    up, down = np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))
    values = np.concatenate([exact, up, down])

    assert _kernels.encode(values, codec) == encode_reference(values, codec)


@every_codec
def test_nan_stays_nan_and_keeps_its_sign(codec):
    patterns = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF]
    values = np.array(patterns * 3, np.uint32).view(np.float32)

    decoded = np.empty_like(values)
    _kernels.decode(_kernels.encode(values, codec), codec, decoded)

    assert np.isnan(decoded).all()
    assert np.array_equal(np.signbit(decoded), np.signbit(values))


# The finite guard.


@every_codec
@every_length
def test_finite_values_pass_the_guard(length, codec):
    assert _kernels.first_non_finite(payload_of(length, codec, 1), codec) == -1


@every_codec
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_the_guard_agrees_with_numpy_on_every_pattern(offset, codec):
    if codec == _kernels.FLOAT32:
        patterns = (np.arange(65536, dtype=np.uint32) << 16).tobytes()
    else:
        patterns = np.arange(65536, dtype=np.uint16).tobytes()
    size = len(patterns) // 65536
    finite = np.isfinite(decode_reference(patterns, codec))
    wrong = [
        i
        for i in range(65536)
        if (_kernels.first_non_finite(patterns[i * size : (i + 1) * size], codec) == -1) != finite[i]
    ]
    assert wrong == []
    first = int(np.argmin(finite))
    assert _kernels.first_non_finite(at_offset(patterns, offset), codec) == first


@every_codec
@pytest.mark.parametrize("length", [1, 7, 8, 9, 4095, 4096, 4097, 10_000])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_guard_finds_the_first_of_several(value, length, codec):
    for index in {0, length // 2, length - 1}:
        values = wide_values(length, 1)
        values[index] = value
        values[-1] = value
        payload = _kernels.encode(values, codec)

        assert _kernels.first_non_finite(payload, codec) == index


# Inspection.


def sum_of_squares_reference(values):
    lanes = np.zeros(16)
    padded = np.zeros(-(-values.size // 16) * 16)
    padded[: values.size] = values
    for row in padded.reshape(-1, 16):
        lanes += row * row
    total = 0.0
    for lane in lanes:
        total += lane
    return total


@every_length
def test_summary_equals_the_sum_over_sixteen_lanes(length):
    values = wide_values(length, 1)

    sum_of_squares, low, high = _kernels.summary(values)

    assert sum_of_squares == sum_of_squares_reference(values)
    assert low == (values.min() if length else np.inf)
    assert high == (values.max() if length else -np.inf)


def test_summary_shows_a_nan_in_the_sum_alone():
    values = np.array([1, np.nan, -2] * 7, np.float32)

    sum_of_squares, low, high = _kernels.summary(values)

    assert np.isnan(sum_of_squares)
    assert (low, high) == (-2, 1)


@every_codec
@every_length
def test_the_norm_is_the_root_of_the_sum_over_sixteen_lanes(length, codec):
    payload = payload_of(length, codec, 1)
    squares = sum_of_squares_reference(decode_reference(payload, codec))

    assert _kernels.norm(payload, codec) == np.sqrt(squares)
    assert _kernels.norm(at_offset(payload, 3), codec) == np.sqrt(squares)


def test_the_norm_does_not_overflow():
    assert _kernels.norm(np.full(4, 3e38, np.float32), _kernels.FLOAT32) == 2 * float(np.float32(3e38))
