"""The native kernels against references of a few lines, bit for bit, on every instruction set."""

import numpy as np
import pytest

from pyps import _kernels

CODECS = {
    "float32": _kernels.FLOAT32,
    "float16": _kernels.FLOAT16,
    "bfloat16": _kernels.BFLOAT16,
}
LENGTHS = [0, 1, 7, 8, 9, 4097, 1_000_000]
RATE, EPS = 0.1, 1e-10

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
every_length = pytest.mark.parametrize("length", LENGTHS)


@pytest.fixture(params=_kernels.available(), autouse=True)
def isa(request):
    before = _kernels.isa()
    _kernels.select(request.param)
    yield request.param
    _kernels.select(before)


# References, written from the formulas.


def sgd_reference(p, g, rate):
    return p - np.float32(rate) * g


def adagrad_reference(p, a, g, rate, eps):
    a = a + g * g
    denominator = np.sqrt(a) + np.float32(eps)
    with np.errstate(invalid="ignore", divide="ignore"):
        step = np.float32(rate) * g / denominator
    return p - np.where(denominator == 0, np.float32(0), step), a


def decode_reference(payload, codec):
    if codec == _kernels.BFLOAT16:
        return (np.frombuffer(payload, np.uint16).astype(np.uint32) << 16).view(np.float32)
    dtype = np.float32 if codec == _kernels.FLOAT32 else np.float16
    return np.frombuffer(payload, dtype).astype(np.float32)


def encode_reference(values, codec):
    """Of finite values or infinities."""
    if codec == _kernels.FLOAT32:
        return values.tobytes()
    if codec == _kernels.FLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).tobytes()
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def bits(values):
    return values.view(np.uint32)


def wide_values(length, seed):
    """Normal values times powers of two, so that roundings of every kind occur; some are zero."""
    random = np.random.default_rng(seed)
    scale = np.exp2(random.integers(-20, 10, length)).astype(np.float32)
    values = random.standard_normal(length).astype(np.float32) * scale
    values[random.random(length) < 0.05] = 0
    return values


def payload_of(length, codec, seed):
    return encode_reference(wide_values(length, seed), codec)


def at_offset(payload, offset):
    return memoryview(bytes(offset) + payload)[offset:]


# Rules.


@every_codec
@every_length
def test_sgd_equals_the_formula(length, codec):
    p, payload = wide_values(length, 1), payload_of(length, codec, 2)
    expected = sgd_reference(p, decode_reference(payload, codec), RATE)

    _kernels.sgd(p, payload, codec, rate=RATE)

    assert np.array_equal(bits(p), bits(expected))


@pytest.mark.parametrize("eps", [EPS, 0.0])
@every_codec
@every_length
def test_adagrad_equals_the_formula(length, codec, eps):
    p, a = wide_values(length, 1), np.zeros(length, np.float32)
    for seed in range(2, 5):
        payload = payload_of(length, codec, seed)
        expected = adagrad_reference(p, a, decode_reference(payload, codec), RATE, eps)

        _kernels.adagrad(p, a, payload, codec, rate=RATE, eps=eps)

        assert np.array_equal(bits(p), bits(expected[0]))
        assert np.array_equal(bits(a), bits(expected[1]))


@every_codec
@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("length", [1, 9, 4097])
def test_a_gradient_may_begin_at_any_byte(length, offset, codec):
    payload = payload_of(length, codec, 2)
    p, a = wide_values(length, 1), np.abs(wide_values(length, 3))
    q = p.copy()
    expected = adagrad_reference(p, a, decode_reference(payload, codec), RATE, EPS)
    expected_q = sgd_reference(q, decode_reference(payload, codec), RATE)

    _kernels.adagrad(p, a, at_offset(payload, offset), codec, rate=RATE, eps=EPS)
    _kernels.sgd(q, at_offset(payload, offset), codec, rate=RATE)

    assert np.array_equal(bits(p), bits(expected[0]))
    assert np.array_equal(bits(a), bits(expected[1]))
    assert np.array_equal(bits(q), bits(expected_q))


@pytest.mark.parametrize("index", [0, 8])  # In the vector body and in the tail.
def test_adagrad_divides_by_the_root_of_the_sum(index):
    """Dean et al. 2012, section 4.1: gradients 3 then 4 make steps of 0.1 and 0.08."""
    p, a, g = (np.zeros(9, np.float32) for _ in range(3))

    g[index] = 3
    _kernels.adagrad(p, a, g, _kernels.FLOAT32, rate=0.1, eps=0)
    assert p[index] == pytest.approx(-0.1, rel=1e-6)

    g[index] = 4
    _kernels.adagrad(p, a, g, _kernels.FLOAT32, rate=0.1, eps=0)
    assert p[index] == pytest.approx(-0.18, rel=1e-6)
    assert a[index] == 25


def test_adagrad_without_eps_is_invariant_to_the_scale_of_the_gradients():
    """Dean et al. 2012, section 4.1; a power of two scales without rounding."""
    runs = []
    for scale in (1.0, 8.0, 2.0**-8):
        p, a = wide_values(999, 1), np.zeros(999, np.float32)
        for seed in range(2, 6):
            g = wide_values(999, seed) * np.float32(scale)
            _kernels.adagrad(p, a, g, _kernels.FLOAT32, rate=RATE, eps=0)
        runs.append(p)

    assert np.array_equal(bits(runs[0]), bits(runs[1]))
    assert np.array_equal(bits(runs[0]), bits(runs[2]))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30])  # The square of the last is zero.
def test_adagrad_makes_no_step_where_the_denominator_is_zero(value):
    p, a = np.ones(9, np.float32), np.zeros(9, np.float32)
    g = np.full(9, value, np.float32)

    _kernels.adagrad(p, a, g, _kernels.FLOAT32, rate=0.1, eps=0)

    assert np.array_equal(p, np.ones(9, np.float32))


def test_bandwidth_touches_every_element():
    p, a, g = wide_values(4097, 1), wide_values(4097, 2), wide_values(4097, 3)
    expected = p + g, a + g

    _kernels.bandwidth(p, a, g)

    assert np.array_equal(p, expected[0])
    assert np.array_equal(a, expected[1])


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


@every_length
def test_summary_equals_the_sum_over_sixteen_lanes(length):
    values = wide_values(length, 1)
    lanes = np.zeros(16)
    padded = np.zeros(-(-length // 16) * 16)
    padded[:length] = values
    for row in padded.reshape(-1, 16):
        lanes += row * row
    total = 0.0
    for lane in lanes:
        total += lane

    sum_of_squares, low, high = _kernels.summary(values)

    assert sum_of_squares == total
    assert low == (values.min() if length else np.inf)
    assert high == (values.max() if length else -np.inf)


def test_summary_shows_a_nan_in_the_sum_alone():
    values = np.array([1, np.nan, -2] * 7, np.float32)

    sum_of_squares, low, high = _kernels.summary(values)

    assert np.isnan(sum_of_squares)
    assert (low, high) == (-2, 1)
