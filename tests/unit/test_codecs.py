"""pyps_wire.codecs: every bit pattern, rounding, NaN; the native kernels write the same."""

import numpy as np
import pytest

from kernel_values import around_all_halves, decode_reference, encode_reference
from pyps import _kernels
from pyps.core.gradient import NATIVE
from pyps_wire import common_pb2
from pyps_wire.codecs import BFLOAT16, CODECS, FLOAT16, FLOAT32, INT8, codec_numbered, codec_of
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
    for codec in NATIVE:
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


@pytest.mark.parametrize("count", [1, 31, 32, 33, 1000])
def test_int8_is_off_by_at_most_a_step_of_its_blocks_scale(count):
    random = np.random.default_rng(count)
    values = (random.standard_normal(count) * 10.0 ** random.integers(-30, 30, count)).astype(np.float32)
    payload = INT8.encode(values)
    assert payload.nbytes == INT8.max_bytes(count) == count + -(-count // 32)
    lost = np.pad(np.abs(values - INT8.decode(payload, count)), (0, -count % 32)).reshape(-1, 32)
    largest = np.pad(np.abs(values), (0, -count % 32)).reshape(-1, 32).max(axis=1)
    assert (lost.max(axis=1) <= largest / 127).all()


def test_int8_keeps_zeros_and_a_block_with_nan_or_infinity_is_not_finite():
    values = np.zeros(64, np.float32)
    assert not INT8.decode(INT8.encode(values), 64).any()
    for wrong in (np.nan, np.inf, -np.inf):
        values[40] = wrong
        decoded = INT8.decode(INT8.encode(values), 64)
        assert not decoded[:32].any() and not np.isfinite(decoded[32:]).any()
