"""pyps_wire.codecs: every bit pattern, rounding, NaN; the native kernels write the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pyps import _kernels
from pyps_wire import common_pb2
from pyps_wire.codecs import CODECS, codec_of, decode, decode_into, dtype_of, encode, item_size, name_of
from pyps_wire.errors import BadRequest, WrongSize

FLOAT32, FLOAT16, BFLOAT16 = (CODECS[name] for name in ("float32", "float16", "bfloat16"))
ALL_PATTERNS = np.arange(65536, dtype="<u2")

all_floats = hnp.arrays(np.uint32, st.integers(0, 64), elements=st.integers(0, 2**32 - 1)).map(
    lambda bits: bits.view(np.float32)
)


def words(values, codec):
    return np.frombuffer(encode(np.asarray(values, np.float32), codec), dtype_of(codec))


def nearest_even_bfloat16(value):
    """The definition: of the two neighbours that bfloat16 has, the nearer; the even one of a tie."""
    bits = int(np.float32(value).view(np.uint32))
    below, above = bits >> 16, (bits >> 16) + 1
    low_half = bits & 0xFFFF
    if low_half == 0x8000:
        return below if below % 2 == 0 else above
    return below if low_half < 0x8000 else above


@pytest.mark.parametrize("codec", [FLOAT16, BFLOAT16])
def test_every_pattern_that_is_a_number_comes_back_unchanged(codec):
    values = decode(ALL_PATTERNS.tobytes(), codec)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(words(values, codec).view("<u2")[numbers], ALL_PATTERNS[numbers])


@pytest.mark.parametrize("codec", [FLOAT16, BFLOAT16])
def test_every_pattern_that_is_nan_stays_nan(codec):
    values = decode(ALL_PATTERNS.tobytes(), codec)
    again = decode(encode(values, codec), codec)
    np.testing.assert_array_equal(np.isnan(again), np.isnan(values))


def test_every_bfloat16_pattern_decodes_to_the_float32_with_those_upper_bits():
    values = decode(ALL_PATTERNS.tobytes(), BFLOAT16)
    np.testing.assert_array_equal(values.view(np.uint32), ALL_PATTERNS.astype(np.uint32) << 16)


@given(all_floats)
def test_bfloat16_rounds_to_nearest_with_ties_to_even(values):
    numbers = values[~np.isnan(values)]
    assert words(numbers, BFLOAT16).tolist() == [nearest_even_bfloat16(value) for value in numbers]


def test_bfloat16_rounds_every_tie_to_the_even_neighbour():
    ties = ((ALL_PATTERNS.astype(np.uint32) << 16) | 0x8000).view(np.float32)
    finite = np.isfinite(ties)
    expected = ALL_PATTERNS + ALL_PATTERNS % 2
    np.testing.assert_array_equal(words(ties[finite], BFLOAT16), expected[finite])


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7F80FFFF])
@pytest.mark.parametrize("codec", [FLOAT16, BFLOAT16])
def test_a_nan_whose_bits_are_all_low_does_not_become_infinity(codec, bits):
    value = np.array([bits], np.uint32).view(np.float32)
    assert np.isnan(decode(encode(value, codec), codec)).all()


@pytest.mark.filterwarnings("error")
def test_what_float16_cannot_hold_becomes_infinity_without_a_warning():
    assert np.isinf(decode(encode(np.array([70000.0, -1e30], np.float32), FLOAT16), FLOAT16)).all()


@pytest.mark.parametrize("codec", [FLOAT32, FLOAT16, BFLOAT16])
@given(values=all_floats)
def test_the_kernels_write_the_same_numbers(codec, values):
    ours, theirs = words(values, codec), np.frombuffer(_kernels.encode(values, codec), dtype_of(codec))
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(ours[numbers], theirs[numbers])
    assert np.isnan(decode(theirs, codec)).tolist() == (~numbers).tolist()


@pytest.mark.parametrize("codec", [FLOAT16, BFLOAT16])
def test_the_kernels_read_every_pattern_alike(codec):
    out = np.empty(65536, np.float32)
    _kernels.decode(ALL_PATTERNS.tobytes(), codec, out)
    np.testing.assert_array_equal(out, decode(ALL_PATTERNS.tobytes(), codec))


def test_float32_is_not_copied_and_decodes_to_a_read_only_view():
    values = np.arange(8, dtype=np.float32)
    payload = encode(values, FLOAT32)
    decoded = decode(payload, FLOAT32)
    assert np.shares_memory(decoded, values)
    assert not decoded.flags.writeable
    assert values.flags.writeable


@pytest.mark.parametrize("codec", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("offset", range(8))
def test_a_payload_may_lie_at_any_byte(codec, offset):
    values = np.array([0.5, -2.0, 3.0], np.float32)
    message = b"x" * offset + bytes(encode(values, codec))
    np.testing.assert_array_equal(decode(memoryview(message)[offset:], codec), values)


@pytest.mark.parametrize("codec", [FLOAT32, FLOAT16, BFLOAT16])
def test_no_values_are_no_bytes(codec):
    payload = encode(np.empty(0, np.float32), codec)
    assert payload.nbytes == 0
    assert decode(payload, codec).shape == (0,)


@pytest.mark.parametrize("codec", [FLOAT32, FLOAT16, BFLOAT16])
def test_a_payload_cut_within_a_number_is_refused(codec):
    payload = bytes(encode(np.ones(3, np.float32), codec))
    with pytest.raises(WrongSize, match=f"{len(payload) - 1} bytes"):
        decode(payload[:-1], codec)


@pytest.mark.parametrize("values", [np.ones(3), np.ones((4, 4), np.float32)[:, ::2]])
def test_what_would_be_converted_silently_is_refused(values):
    with pytest.raises(BadRequest, match="contiguous float32"):
        encode(values, FLOAT32)


def test_names_and_numbers_are_those_of_the_contract():
    assert {name_of(codec): codec for codec in CODECS.values()} == CODECS
    assert sorted(CODECS.values()) == sorted(common_pb2.Codec.values())[1:]
    assert [item_size(codec_of(name)) for name in ("float32", "float16", "bfloat16")] == [4, 2, 2]


@pytest.mark.parametrize("call", [lambda: codec_of("int8"), lambda: name_of(9), lambda: item_size(0)])
def test_an_unknown_codec_is_refused_with_those_that_exist(call):
    with pytest.raises(BadRequest, match="bfloat16"):
        call()


@pytest.mark.parametrize("codec", [FLOAT16, BFLOAT16])
def test_decoding_into_a_place_gives_the_same_bits(codec):
    place = np.zeros(65536, np.float32)
    decode_into(ALL_PATTERNS.tobytes(), codec, place)
    numbers = ~np.isnan(place)
    expected = decode(ALL_PATTERNS.tobytes(), codec)
    np.testing.assert_array_equal(place.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])
    np.testing.assert_array_equal(numbers, ~np.isnan(expected))


def test_decoding_into_a_place_of_another_size_is_refused():
    with pytest.raises(WrongSize, match="3 numbers does not fit"):
        decode_into(bytes(6), BFLOAT16, np.zeros(4, np.float32))
