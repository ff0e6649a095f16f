"""pyps_wire.codecs: every bit pattern, rounding, NaN; the native kernels write the same."""

import numpy as np
import pytest

from kernel_values import around_all_halves, decode_reference, encode_reference
from pyps import _kernels
from pyps_wire import common_pb2
from pyps_wire.codecs import CODECS, codec_of, decode, decode_into, dtype_of, encode, item_size, name_of
from pyps_wire.errors import BadRequest, WrongSize

FLOAT32, FLOAT16, BFLOAT16 = (CODECS[name] for name in ("float32", "float16", "bfloat16"))
HALVES = (FLOAT16, BFLOAT16)
ALL_PATTERNS = np.arange(65536, dtype="<u2")


def words(values, codec):
    return np.frombuffer(encode(np.asarray(values, np.float32), codec), dtype_of(codec))


def test_every_pattern_is_read_and_comes_back_unchanged():
    for codec in HALVES:
        values, place, theirs = decode(ALL_PATTERNS.tobytes(), codec), *np.zeros((2, 65536), np.float32)
        decode_into(ALL_PATTERNS.tobytes(), codec, place)
        _kernels.decode(ALL_PATTERNS.tobytes(), codec, theirs)
        expected = decode_reference(ALL_PATTERNS.tobytes(), codec)
        numbers = ~np.isnan(expected)
        for found in (values, place, theirs):
            np.testing.assert_array_equal(found.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])
            np.testing.assert_array_equal(~np.isnan(found), numbers)
        np.testing.assert_array_equal(words(values, codec).view("<u2")[numbers], ALL_PATTERNS[numbers])
        np.testing.assert_array_equal(np.isnan(decode(encode(values, codec), codec)), ~numbers)


def test_numbers_are_rounded_to_nearest_with_ties_to_even_as_the_kernels_round_them():
    for codec in HALVES:
        values = around_all_halves(codec)
        assert bytes(encode(values, codec)) == encode_reference(values, codec) == _kernels.encode(values, codec), codec


def test_a_nan_whose_bits_are_all_low_does_not_become_infinity():
    values = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7F80FFFF], np.uint32).view(np.float32)
    for codec in HALVES:
        assert np.isnan(decode(encode(values, codec), codec)).all(), codec
        assert np.isnan(decode(_kernels.encode(values, codec), codec)).all(), codec


@pytest.mark.filterwarnings("error")
def test_what_float16_cannot_hold_becomes_infinity_without_a_warning():
    assert np.isinf(decode(encode(np.array([70000.0, -1e30], np.float32), FLOAT16), FLOAT16)).all()


def test_float32_is_not_copied_and_decodes_to_a_read_only_view():
    values = np.arange(8, dtype=np.float32)
    payload = encode(values, FLOAT32)
    decoded = decode(payload, FLOAT32)
    assert np.shares_memory(decoded, values)
    assert not decoded.flags.writeable
    assert values.flags.writeable


def test_a_payload_may_lie_at_any_byte_be_empty_and_never_end_within_a_number():
    for codec in CODECS.values():
        payload = bytes(encode(np.array([0.5, -2.0, 3.0], np.float32), codec))
        for offset in range(8):
            message = b"x" * offset + payload
            assert decode(memoryview(message)[offset:], codec).tolist() == [0.5, -2.0, 3.0], (codec, offset)
        assert encode(np.empty(0, np.float32), codec).nbytes == 0
        assert decode(b"", codec).shape == (0,)
        with pytest.raises(WrongSize, match=f"{len(payload) - 1} bytes"):
            decode(payload[:-1], codec)
    with pytest.raises(WrongSize, match="3 numbers does not fit"):
        decode_into(bytes(6), BFLOAT16, np.zeros(4, np.float32))


def test_what_would_be_converted_silently_is_refused():
    for values in (np.ones(3), np.ones((4, 4), np.float32)[:, ::2]):
        with pytest.raises(BadRequest, match="contiguous float32"):
            encode(values, FLOAT32)


def test_names_and_numbers_are_those_of_the_contract_and_others_are_refused_with_them():
    assert {name_of(codec): codec for codec in CODECS.values()} == CODECS
    assert sorted(CODECS.values()) == sorted(common_pb2.Codec.values())[1:]
    assert [item_size(codec_of(name)) for name in ("float32", "float16", "bfloat16")] == [4, 2, 2]
    for call in (lambda: codec_of("int8"), lambda: name_of(9), lambda: item_size(0)):
        with pytest.raises(BadRequest, match="bfloat16"):
            call()
