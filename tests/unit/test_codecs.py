"""pyps_wire.codecs: every bit pattern, rounding, NaN; the native kernels write the same."""

import contextlib

import numpy as np
import pytest

from kernel_values import WORDS, around_all_halves, decode_reference, encode_reference
from pyps import _kernels
from pyps.core.gradient import NATIVE
from pyps_wire import common_pb2
from pyps_wire.codecs import (
    BFLOAT16,
    CODECS,
    DELTA,
    FLOAT16,
    FLOAT32,
    INT4,
    INT8,
    ONEBIT,
    THRESHOLD,
    TOPK,
    TOPK2BIT,
    codec_numbered,
    codec_of,
)
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


SPARSE = [THRESHOLD, TOPK, TOPK2BIT]


@pytest.mark.parametrize("codec", SPARSE)
def test_a_sparse_payload_fits_and_holds_some_numbers_of_each_chunk(codec):
    random = np.random.default_rng(0)
    for count in (0, 1, 254, 255, 256, 257, 4095, 4096, 4097, 20_000):
        for values in (random.standard_normal(count), np.zeros(count), np.eye(1, count, count - 1)[0] if count else []):
            for setting in (codec, codec.with_setting(f"{codec.setting}={1 if codec.feedback < 1 else 1e-3}")):
                values = np.asarray(values, np.float32)
                payload = setting.encode(values)
                assert payload.nbytes <= codec.max_bytes(count), (count, setting.text)
                decoded = codec.decode(payload, count)
                assert not (np.signbit(values) ^ np.signbit(decoded))[decoded != 0].any()
        if setting.name == "topk":
            np.testing.assert_array_equal(decoded, BFLOAT16.decode(BFLOAT16.encode(values), count))


@pytest.mark.parametrize("codec", [TOPK, TOPK2BIT])
def test_the_largest_magnitudes_are_kept_and_of_equal_ones_the_first(codec):
    values = np.random.default_rng(0).permutation(np.arange(1, 4097, dtype=np.float32)) * np.float32(-1)
    kept = np.flatnonzero(codec.decode(codec.encode(values), 4096))
    np.testing.assert_array_equal(kept, np.flatnonzero(values < -4096 + round(4096 * codec.value)))
    equal = np.ones(5000, np.float32)
    kept = np.flatnonzero(codec.decode(codec.encode(equal), 5000))
    first, second = round(4096 * codec.value), round(904 * codec.value)
    np.testing.assert_array_equal(kept, [*range(first), *range(4096, 4096 + second)])


@pytest.mark.parametrize(
    ("codec", "share"), [(TOPK, 0.95), (TOPK2BIT, 0.95), (THRESHOLD, 1.0), (INT8, 1.0), (ONEBIT, 1.0)]
)
def test_a_share_of_what_was_lost_is_added_to_the_next_gradient(codec, share):
    gradient, residual = np.random.default_rng(0).standard_normal((2, 5000)).astype(np.float32)
    lost = np.empty_like(gradient)
    sent = codec.decode(codec.encode_feedback(gradient, residual, lost), 5000)
    np.testing.assert_allclose(sent + lost, gradient + np.float32(share) * residual, atol=1e-5)


def test_onebit_makes_up_for_a_bias_that_shares_its_block_with_a_matrix():
    random, bias = np.random.default_rng(0), np.linspace(-0.1, 0.1, 24)
    sent, pushed, residual, lost = np.zeros((4, 1024), np.float32)
    for _ in range(200):
        gradient = np.asarray([*random.standard_normal(1000), *bias], np.float32)
        sent += ONEBIT.decode(ONEBIT.encode_feedback(gradient, residual, lost), 1024)
        pushed += gradient
        residual, lost = lost, residual
    # One push is off by 0.8, and 200 by 160 without the residual.
    assert np.abs(sent - pushed)[-24:].max() < 1.5


def test_threshold_sends_what_reaches_tau_times_the_mean_magnitude():
    values = np.full(4096, 0.5, np.float32)
    values[[7, 4000]] = 600, -700
    level = BFLOAT16.decode(BFLOAT16.encode(np.array([3 * np.abs(values).mean()], np.float32)), 1)[0]
    decoded = THRESHOLD.decode(THRESHOLD.encode(values), 4096)
    assert dict(zip(np.flatnonzero(decoded), decoded[decoded != 0], strict=True)) == {7: level, 4000: -level}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("codec", SPARSE)
def test_a_chunk_with_nan_or_infinity_is_sent_as_not_finite(codec):
    values = np.random.default_rng(0).standard_normal(9000).astype(np.float32)
    for wrong in (np.nan, np.inf, -np.inf):
        values[5000] = wrong
        decoded = codec.decode(codec.encode(values), 9000)
        assert np.isfinite(decoded[:4096]).all() and not np.isfinite(decoded[4096:8192]).all()


@pytest.mark.parametrize("codec", SPARSE)
def test_a_malformed_sparse_payload_is_refused(codec):
    values = np.random.default_rng(0).standard_normal(9000).astype(np.float32)
    payload = bytes(codec.encode(values))
    for wrong, words in (
        (payload + b"x", "1 bytes follow the last chunk"),
        (payload[:-1], "ends within a chunk"),
        (payload[:1], "ends within a chunk"),
        (b"", "ends within a chunk"),
        (b"\x11\0" + b"\xff" * 60 + payload, "goes beyond the numbers of its chunk"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            codec.decode(wrong, 9000)
    random = np.random.default_rng(1)
    for _ in range(300):
        changed = np.frombuffer(payload, np.uint8).copy()
        changed[random.integers(changed.size, size=3)] = random.integers(256, size=3)
        with contextlib.suppress(InvalidArgument):
            codec.decode(changed[: random.integers(changed.size // 2, changed.size + 1)].tobytes(), 9000)


def test_a_codecs_setting_is_a_part_of_its_text_and_the_encoders_alone():
    few = codec_of("topk:ratio=0.001")
    assert few == TOPK and few.text == "topk:ratio=0.001" and codec_of("topk").text == "topk:ratio=0.01"
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    assert np.count_nonzero(TOPK.decode(few.encode(values), 4096)) == 4
    for text in ("topk:ratio=0", "topk:ratio=x", "topk:tau=1", "topk:ratio=1.1", "topk2bit:0.1", "threshold:tau=nan"):
        with pytest.raises(InvalidArgument, match=r"is .*; expected (ratio|tau)= and a number above 0"):
            codec_of(text)
    with pytest.raises(InvalidArgument, match="int8 has no settings, but 'x=1' was given"):
        codec_of("int8:x=1")
