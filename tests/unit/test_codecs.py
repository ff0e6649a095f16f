"""pyps_wire.codecs: every bit pattern, rounding, NaN; the native kernels write the same."""

import numpy as np
import pytest

from kernel_values import WORDS, around_all_halves, decode_reference, encode_reference
from pyps import _kernels
from pyps.core.gradient import NATIVE
from pyps_wire import common_pb2
from pyps_wire.codecs import BFLOAT16, CODECS, DELTA, FLOAT16, FLOAT32, INT4, INT8, ONEBIT, codec_numbered, codec_of
from pyps_wire.errors import InvalidArgument, WrongSize

HALVES = (FLOAT16, BFLOAT16)
ALL_PATTERNS = np.arange(65536, dtype="<u2")


def words(values, codec):
    return np.frombuffer(codec.encode(np.asarray(values, np.float32)), codec.dtype)


def test_every_pattern_is_read_and_comes_back_unchanged():
    for codec in HALVES:
        values, place, theirs = codec.decode(ALL_PATTERNS.tobytes(), 65536), *np.zeros((2, 65536), np.float32)
        codec.decode_into(ALL_PATTERNS.tobytes(), place)
        _kernels.decode(ALL_PATTERNS.tobytes(), codec, theirs)
        expected = decode_reference(ALL_PATTERNS.tobytes(), codec)
        numbers = ~np.isnan(expected)
        for found in (values, place, theirs):
            np.testing.assert_array_equal(found.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])
            np.testing.assert_array_equal(~np.isnan(found), numbers)
        np.testing.assert_array_equal(words(values, codec).view("<u2")[numbers], ALL_PATTERNS[numbers])
        np.testing.assert_array_equal(np.isnan(codec.decode(codec.encode(values), 65536)), ~numbers)


def test_numbers_are_rounded_to_nearest_with_ties_to_even_as_the_kernels_round_them():
    for codec in HALVES:
        values = around_all_halves(codec)
        assert bytes(codec.encode(values)) == encode_reference(values, codec) == _kernels.encode(values, codec), codec


def test_a_nan_whose_bits_are_all_low_does_not_become_infinity():
    values = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7F80FFFF], np.uint32).view(np.float32)
    for codec in HALVES:
        assert np.isnan(codec.decode(codec.encode(values), 5)).all(), codec
        assert np.isnan(codec.decode(_kernels.encode(values, codec), 5)).all(), codec


@pytest.mark.filterwarnings("error")
def test_numbers_beyond_float16_become_infinity_without_a_warning():
    assert np.isinf(FLOAT16.decode(FLOAT16.encode(np.array([70000.0, -1e30], np.float32)), 2)).all()


def test_float32_is_not_copied_and_decodes_to_a_read_only_view():
    values = np.arange(8, dtype=np.float32)
    payload = FLOAT32.encode(values)
    decoded = FLOAT32.decode(payload, 8)
    assert np.shares_memory(decoded, values)
    assert not decoded.flags.writeable
    assert values.flags.writeable


def test_a_payload_may_lie_at_any_byte_be_empty_and_never_end_within_a_number():
    for codec in WORDS:
        payload = bytes(codec.encode(np.array([0.5, -2.0, 3.0], np.float32)))
        for offset in range(8):
            message = b"x" * offset + payload
            assert codec.decode(memoryview(message)[offset:], 3).tolist() == [0.5, -2.0, 3.0], (codec, offset)
        assert codec.encode(np.empty(0, np.float32)).nbytes == 0
        assert codec.decode(b"", 0).shape == (0,)
        with pytest.raises(WrongSize, match=f"{len(payload) - 1} bytes"):
            codec.decode(payload[:-1], 3)
    with pytest.raises(WrongSize, match="6 bytes long; 4 parameters as bfloat16 are 8 bytes"):
        BFLOAT16.decode_into(bytes(6), np.zeros(4, np.float32))


def test_encode_refuses_other_types_and_strides():
    for values in (np.ones(3), np.ones((4, 4), np.float32)[:, ::2]):
        with pytest.raises(InvalidArgument, match="contiguous float32"):
            FLOAT32.encode(values)


def test_names_and_numbers_are_those_of_the_contract_and_others_are_refused_with_them():
    assert all(codec_of(codec.name) is codec_numbered(int(codec)) is codec for codec in CODECS.values())
    assert {codec.name: int(codec) for codec in NATIVE} == _kernels.CODECS
    assert sorted(CODECS.values()) == sorted(common_pb2.Codec.values())[1:]
    assert [codec_of(name).max_bytes(1) for name in ("float32", "float16", "bfloat16")] == [4, 2, 2]
    for call in (lambda: codec_of("int7"), lambda: codec_numbered(99), lambda: codec_numbered(0)):
        with pytest.raises(InvalidArgument, match="bfloat16"):
            call()


COUNTS = [0, 1, 31, 32, 33, 1000, 1024, 1025, 4097]


def values_of_all_sizes(count):
    random = np.random.default_rng(count)
    return (random.standard_normal(count) * 10.0 ** random.integers(-30, 30, count)).astype(np.float32)


@pytest.mark.parametrize("count", COUNTS)
def test_the_error_of_a_scaled_codec_is_within_its_blocks_largest_step(count):
    values = values_of_all_sizes(count)
    largest = np.pad(np.abs(values), (0, -count % 32)).reshape(-1, 32).max(axis=1)
    for codec, steps, size in ((INT8, 127, count + -(-count // 32)), (INT4, 3.5, 17 * -(-count // 32))):
        payload = codec.encode(values)
        assert payload.nbytes == codec.max_bytes(count) == size
        lost = np.pad(np.abs(values - codec.decode(payload, count)), (0, -count % 32)).reshape(-1, 32)
        assert (lost.max(axis=1) <= largest / steps).all(), codec


def test_int4_takes_the_nearest_of_its_magnitudes_and_of_two_the_one_with_an_even_index():
    scale = np.float32(2.0**-20)
    near = {0.25: 0, 0.26: 0.5, 0.74: 0.5, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4, 5.1: 6, -7: -6, -0.75: -1}
    for value, nearest in near.items():
        values = np.array([7.0, *[value] * 20], np.float32) * scale
        assert INT4.decode(INT4.encode(values), 21)[5] == np.float32(nearest) * scale, value


@pytest.mark.parametrize("count", COUNTS[1:])
def test_onebit_writes_the_means_of_a_blocks_numbers_on_either_side_of_zero(count):
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    decoded = ONEBIT.decode(ONEBIT.encode(values), count)
    for start in range(0, count, 1024):
        block, theirs = values[start : start + 1024], decoded[start : start + 1024]
        for side in (block >= 0, block < 0):
            if side.any():
                assert np.unique(theirs[side]).size == 1
                np.testing.assert_allclose(theirs[side][0], block[side].mean(), rtol=2.0**-8)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("codec", [INT8, INT4, ONEBIT])
def test_zeros_stay_zero_and_a_block_with_nan_or_infinity_is_not_finite(codec):
    values = np.zeros(2 * codec.block, np.float32)
    assert not codec.decode(codec.encode(values), values.size).any()
    for wrong in (np.nan, np.inf, -np.inf):
        values[codec.block + 8] = wrong
        decoded = codec.decode(codec.encode(values), values.size)
        assert not decoded[: codec.block].any() and not np.isfinite(decoded[codec.block + 8])
    with pytest.raises(WrongSize):
        codec.decode(codec.encode(values)[1:], values.size)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 512, 513, 5000])
def test_delta_writes_what_differs_in_bits_and_nothing_else(count):
    generator = np.random.default_rng(count)
    held = np.asarray(generator.standard_normal(count), np.float32)
    elsewhere, values = held.copy(), held.copy()
    values[generator.random(count) < 0.02] = np.nan
    values[:1] = -0.0
    payload = DELTA.encode_difference(values, held)
    num_changed = np.count_nonzero(values.view(np.uint32) != elsewhere.view(np.uint32))
    assert payload.nbytes <= -(-count // 512) + 12 * num_changed
    DELTA.add_into(payload, elsewhere)
    for copy in (held, elsewhere):
        np.testing.assert_array_equal(copy.view(np.uint32), values.view(np.uint32))
    whole = DELTA.encode(values)
    assert whole.nbytes <= DELTA.max_bytes(count)
    np.testing.assert_array_equal(DELTA.decode(whole, count).view(np.uint32), values.view(np.uint32))


def test_a_malformed_delta_is_refused_and_writes_nothing():
    values = np.ones(70, np.float32)
    whole = bytes(DELTA.encode(values))
    beyond = bytearray(whole)
    beyond[1 + 15] |= 0x80
    place = np.zeros(70, np.float32)
    for payload in (b"", whole[:1], whole[:-1], whole + b"\0", bytes(beyond), bytes(beyond) + bytes(4)):
        with pytest.raises(InvalidArgument):
            DELTA.add_into(payload, place)
        assert not place.any()
