"""The native codecs and scans against references of a few lines, bit for bit, on every instruction set."""

from itertools import product

import numpy as np

import kernel_values
from kernel_values import (
    LENGTHS,
    WORDS,
    around_all_halves,
    at_offset,
    bits,
    decode_reference,
    encode_reference,
    lane_sum,
    payload_of,
    wide_values,
)
from pyps import _kernels
from pyps_wire.codecs import BFLOAT16, FLOAT16, FLOAT32

instruction_set = kernel_values.instruction_set
HALVES = (FLOAT16, BFLOAT16)
ALL_HALVES = np.arange(65536, dtype=np.uint16).tobytes()


def test_no_instruction_set_is_left_out_of_the_tests():
    assert set(_kernels.available()) <= set(kernel_values.INSTRUCTION_SETS)


def test_every_16_bit_pattern_decodes_exactly():
    for codec in HALVES:
        values, expected = np.empty(65536, np.float32), decode_reference(ALL_HALVES, codec)

        _kernels.decode(ALL_HALVES, codec, values)

        nan = np.isnan(expected)
        assert np.array_equal(np.isnan(values), nan), codec
        assert np.array_equal(np.signbit(values), np.signbit(expected)), codec
        assert np.array_equal(bits(values)[~nan], bits(expected)[~nan]), codec


def test_decoding_restores_what_was_encoded():
    for codec, length in product(WORDS, LENGTHS):
        payload, values = payload_of(length, codec, 1), np.empty(length, np.float32)

        _kernels.decode(payload, codec, values)

        assert np.array_equal(bits(values), bits(decode_reference(payload, codec))), (codec, length)
        assert _kernels.encode(values, codec) == payload, (codec, length)


def test_encode_rounds_to_nearest_even():
    for codec, length in product(WORDS, LENGTHS):
        values = np.random.default_rng(7).integers(0, 2**32, length, dtype=np.uint32).view(np.float32)
        values[np.isnan(values)] = 0

        assert _kernels.encode(values, codec) == encode_reference(values, codec), (codec, length)


def test_encode_rounds_right_next_to_every_16_bit_value_and_every_tie():
    for codec in HALVES:
        values = around_all_halves(codec)

        assert _kernels.encode(values, codec) == encode_reference(values, codec), codec


def test_nan_stays_nan_and_keeps_its_sign():
    patterns = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF]
    values = np.array(patterns * 3, np.uint32).view(np.float32)
    for codec in WORDS:
        decoded = np.empty_like(values)
        _kernels.decode(_kernels.encode(values, codec), codec, decoded)

        assert np.isnan(decoded).all(), codec
        assert np.array_equal(np.signbit(decoded), np.signbit(values)), codec


def test_finite_values_pass_the_guard():
    for codec, length in product(WORDS, LENGTHS):
        assert _kernels.first_non_finite(payload_of(length, codec, 1), codec, length) == -1, (codec, length)


def test_the_guard_agrees_with_numpy_on_every_pattern():
    for codec in WORDS:
        halves = np.arange(65536, dtype=np.uint32)
        patterns = (halves << 16).tobytes() if codec == FLOAT32 else ALL_HALVES
        size = len(patterns) // 65536
        finite = np.isfinite(decode_reference(patterns, codec))
        numbers = [patterns[i * size : (i + 1) * size] for i in range(65536)]

        passed = [_kernels.first_non_finite(number, codec, 1) == -1 for number in numbers]

        assert passed == finite.tolist(), codec
        for offset in (0, 1, 3):
            found = _kernels.first_non_finite(at_offset(patterns, offset), codec, 65536)
            assert found == np.argmin(finite), (codec, offset)


def test_the_guard_finds_the_first_of_several():
    lengths, wrong = (1, 7, 8, 9, 4095, 4096, 4097, 10_000), (np.nan, np.inf, -np.inf)
    for codec, length, value in product(WORDS, lengths, wrong):
        for index in {0, length // 2, length - 1}:
            values = wide_values(length, 1)
            values[[index, -1]] = value

            found = _kernels.first_non_finite(_kernels.encode(values, codec), codec, length)

            assert found == index, (codec, length, value)


def test_summary_equals_the_sum_over_sixteen_lanes():
    for length in LENGTHS:
        values = wide_values(length, 1)
        expected = lane_sum(values.astype(np.float64) ** 2), values.min(initial=np.inf), values.max(initial=-np.inf)

        assert _kernels.summary(values) == expected, length


def test_summary_shows_a_nan_in_the_sum_alone():
    values = np.array([1, np.nan, -2] * 7, np.float32)

    sum_of_squares, low, high = _kernels.summary(values)

    assert np.isnan(sum_of_squares)
    assert (low, high) == (-2, 1)
