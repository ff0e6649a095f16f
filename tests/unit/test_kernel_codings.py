"""Codecs whose numbers share bytes: the servers' kernels and the workers' library give numpy's bits."""

import numpy as np
import pytest

import kernel_values
from kernel_values import LENGTHS, apply, at_offset, bits, wide_values
from pyps import _kernels
from pyps_wire import native
from pyps_wire.codecs import INT4, INT8, ONEBIT, codec_of
from pyps_wire.errors import InvalidArgument, WrongSize

F = np.float32
BLOCKS = (INT8, INT4, ONEBIT)

instruction_set = kernel_values.instruction_set


@pytest.fixture(autouse=True)
def numpy_alone(monkeypatch):
    """Lets codecs be numpy's, the reference."""
    monkeypatch.setattr(native, "functions", None)


def cases():
    for length in (*LENGTHS, 31, 32, 33, 1023, 1024, 1025):
        values = wide_values(length, 1)
        yield values
        if length not in (33, 1025):
            continue
        # Ties of int4 and int8, subnormal numbers, the largest, and what is not finite.
        yield np.resize(np.array([7, 0.25, -0.75, 1.25, 2.5, 3.5, 5, 0.0, -0.0], F), length)
        yield np.resize(np.array([127, 0.5, -1.5, 2.5, 63.5], F), length)
        yield values * F(2.0**-135)
        yield np.resize(np.array([3.4e38, -1e38, 0, 3e38], F), length)
        for wrong in (np.nan, np.inf, -np.inf):
            broken = values.copy()
            broken[length // 2 : length // 2 + 1] = wrong
            yield broken


@pytest.mark.parametrize("codec", BLOCKS)
def test_kernels_encode_and_decode_to_numpys_bits(codec):
    for values in cases():
        payload = bytes(codec.encode(values))
        assert _kernels.encode(values, codec) == payload, values
        decoded, expected = np.empty_like(values), np.empty_like(values)
        _kernels.decode(at_offset(payload, 3), codec, decoded)
        codec.decode_into(payload, expected)
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(bits(decoded)[numbers], bits(expected)[numbers])
        assert np.isnan(decoded[~numbers]).all()
        found = _kernels.first_non_finite(payload, codec, values.size)
        assert found == (-1 if np.isfinite(expected).all() else int(np.argmin(np.isfinite(expected))))


@pytest.mark.parametrize("codec", BLOCKS)
def test_an_update_equals_that_of_the_decoded_numbers(codec):
    for length in LENGTHS:
        gradients = [(codec.encode(wide_values(length, seed)), codec, 0.3) for seed in (1, 2)]
        decoded = [(codec.decode(payload, length).data, 1, factor) for payload, _, factor in gradients]
        for num in (1, 2):
            arrays, expected = (np.ones((2, length), F) for _ in range(2))
            apply("adagrad", *arrays, gradients[:num])
            apply("adagrad", *expected, decoded[:num])
            np.testing.assert_array_equal(bits(arrays), bits(expected))


@pytest.mark.skipif(native.load() is None, reason="pyps-client was installed without a compiler")
@pytest.mark.parametrize("codec", BLOCKS)
def test_the_workers_library_gives_numpys_bits(codec, instruction_set, monkeypatch):
    def results(values):
        lost, sums = np.zeros_like(values), values.copy()
        payload = codec.encode_feedback(values, sums[::-1].copy(), lost)
        codec.add_into(payload, sums)
        payloads = payload, codec.encode(values), codec.encode_difference(values[::-1].copy(), sums)
        return [bytes(each) for each in payloads], codec.decode(payload, values.size), lost, sums

    for values in cases():
        with np.errstate(all="ignore"), monkeypatch.context() as patch:
            expected = results(values)
            patch.setattr(native, "functions", native.load(instruction_set))
            found = results(values)
        assert found[0] == expected[0], values
        for mine, theirs in zip(found[1:], expected[1:], strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.skipif(native.load() is None, reason="pyps-client was installed without a compiler")
@pytest.mark.parametrize(
    "text", ["threshold", "threshold:tau=0.01", "topk", "topk:ratio=1", "topk2bit", "topk2bit:ratio=0.3"]
)
def test_the_workers_library_sends_the_same_numbers(text, instruction_set, monkeypatch):
    codec = codec_of(text)

    def results(values):
        lost, residual = np.zeros_like(values), values[::-1].copy()
        payload = codec.encode_feedback(values, residual, lost)
        decoded = codec.decode(payload, values.size)
        return [bytes(payload), bytes(codec.encode(values))], lost, decoded

    def is_accepted(payload):
        try:
            return codec.decode(payload, 4097)
        except (InvalidArgument, WrongSize):
            return None

    random = np.random.default_rng(1)
    largest = np.full(64, 0x7FFFFFFF, np.uint32).view(F)  # NaN too.
    for values in [*cases(), np.resize(F(-1.0), 9000), largest]:
        with np.errstate(all="ignore"), monkeypatch.context() as patch:
            expected = results(values)
            patch.setattr(native, "functions", native.load(instruction_set))
            found = results(values)
        assert found[0] == expected[0], values
        for mine, theirs in zip(found[1:], expected[1:], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    payload = codec.encode(wide_values(4097, 1))
    for _ in range(200):
        changed = np.frombuffer(payload, np.uint8).copy()
        changed[random.integers(min(changed.size, 80), size=2)] = random.integers(256, size=2)
        changed = changed[: random.integers(changed.size // 2, changed.size + 1)].tobytes()
        expected = is_accepted(changed)
        with monkeypatch.context() as patch:
            patch.setattr(native, "functions", native.load(instruction_set))
            found = is_accepted(changed)
        assert (found is None) == (expected is None)
        np.testing.assert_array_equal(found, expected)


def test_the_workers_library_refuses_what_is_no_contiguous_float32():
    for values in (np.ones(3), np.ones((4, 4), F)[:, ::2]):
        with pytest.raises(InvalidArgument, match="contiguous float32"):
            native.address(values, values.size)


@pytest.mark.skipif(native.load() is None, reason="pyps-client was installed without a compiler")
@pytest.mark.parametrize("text", ["int8", "int4", "onebit", "threshold", "topk", "topk2bit"])
def test_the_workers_library_takes_its_own_codecs_alone_and_arrays_of_one_length(text, monkeypatch):
    known, values, lost = codec_of(text), wide_values(4097, 1), np.zeros(4097, F)
    more = (known.value,) if known.sparse else (known.max_bytes,)
    newcomer = type(known)(4713, "newcomer", *more)
    expected = bytes(known.encode(values))
    monkeypatch.setattr(native, "functions", native.load())
    assert bytes(newcomer.encode(values)) == bytes(newcomer.encode_feedback(values, lost.copy(), lost)) == expected
    np.testing.assert_array_equal(newcomer.decode(expected, values.size), known.decode(expected, values.size))
    for arrays in ((lost[1:], lost), (lost, lost[1:])):
        with pytest.raises(InvalidArgument, match="arrays of one length, not of 4097 and 4096 numbers"):
            known.encode_feedback(values, *arrays)
