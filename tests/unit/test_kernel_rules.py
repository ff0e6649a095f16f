"""The update rules' kernels against references written from their formulas, bit for bit, on every instruction set."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from kernel_values import CODECS, LENGTHS, at_offset, bits, decode_reference, every_codec, payload_of, wide_values
from pyps import _kernels

F = np.float32


@pytest.fixture(params=_kernels.available(), autouse=True)
def isa(request):
    before = _kernels.isa()
    _kernels.select(request.param)
    yield request.param
    _kernels.select(before)


# References, written from the formulas: each returns (p, slots) from (p, slots, g).


def divided(dividend, divisor):
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(divisor == 0, F(0), dividend / divisor)


def sgd(p, g, *, rate):
    return (p - F(rate) * g,)


def momentum(p, v, g, *, rate, momentum, dampening):
    v = F(momentum) * v + F(1 - dampening) * g
    return p - F(rate) * v, v


def heavy_ball(p, v, g, *, rate, momentum):
    v = F(momentum) * v + F(rate) * g
    return p - v, v


def nesterov(p, v, g, *, rate, momentum):
    v = F(momentum) * v + g
    return p - F(rate) * (g + F(momentum) * v), v


def adagrad(p, a, g, *, rate, eps):
    a = a + g * g
    return p - divided(F(rate) * g, np.sqrt(a) + F(eps)), a


def rmsprop(p, s, g, *, rate, decay, eps):
    s = F(decay) * s + F(1 - decay) * (g * g)
    return p - divided(F(rate) * g, np.sqrt(s) + F(eps)), s


def adam(p, m, v, g, *, rate, beta1, beta2, root_scale, eps):
    m = F(beta1) * m + F(1 - beta1) * g
    v = F(beta2) * v + F(1 - beta2) * (g * g)
    return p - divided(F(rate) * m, np.sqrt(v) * F(root_scale) + F(eps)), m, v


@dataclass
class Rule:
    kernel: Callable[..., None]
    reference: Callable[..., tuple[np.ndarray, ...]]
    num_slots: int
    settings: Mapping[str, float] = field(default_factory=dict)


ADAM = {"beta1": 0.9, "beta2": 0.999, "root_scale": 31.6, "eps": 1e-8}
RULES = {
    "sgd": Rule(_kernels.sgd, sgd, 0),
    "momentum": Rule(_kernels.momentum, momentum, 1, {"momentum": 0.9, "dampening": 0.3}),
    "heavy_ball": Rule(_kernels.heavy_ball, heavy_ball, 1, {"momentum": 0.9}),
    "nesterov": Rule(_kernels.nesterov, nesterov, 1, {"momentum": 0.9}),
    "adagrad": Rule(_kernels.adagrad, adagrad, 1, {"eps": 1e-10}),
    "adagrad without eps": Rule(_kernels.adagrad, adagrad, 1, {"eps": 0.0}),
    "rmsprop": Rule(_kernels.rmsprop, rmsprop, 1, {"decay": 0.99, "eps": 1e-8}),
    "rmsprop without eps": Rule(_kernels.rmsprop, rmsprop, 1, {"decay": 0.99, "eps": 0.0}),
    "adam": Rule(_kernels.adam, adam, 2, ADAM),
    "adam without eps": Rule(_kernels.adam, adam, 2, ADAM | {"eps": 0.0}),
    "adamw": Rule(_kernels.adamw, adam, 2, ADAM),
}
RATE = 0.1

every_rule = pytest.mark.parametrize("name", RULES)


def expected_of(name, arrays, gradients, weight_decay):
    rule = RULES[name]
    p, *slots = arrays
    g = None
    for payload, codec, factor in gradients:
        weighted = F(factor) * decode_reference(payload, codec)
        g = weighted if g is None else g + weighted
    if weight_decay and name == "adamw":
        p = F(1 - weight_decay) * p
    elif weight_decay:
        g = g + F(weight_decay) * p
    return rule.reference(p, *slots, g, rate=RATE, **rule.settings)


def check(name, gradients_of, *, length, weight_decay=0.0, updates=2):
    """Compares updates of fresh arrays; `gradients_of(update)` makes each one's gradients."""
    arrays = [wide_values(length, 1), *(np.zeros(length, F) for _ in range(RULES[name].num_slots))]
    for update in range(updates):
        gradients = gradients_of(update)
        expected = expected_of(name, arrays, gradients, weight_decay)

        RULES[name].kernel(*arrays, gradients, rate=RATE, **RULES[name].settings, weight_decay=weight_decay)

        for found, wanted in zip(arrays, expected, strict=True):
            assert np.array_equal(bits(found), bits(wanted))


@every_rule
@every_codec
@pytest.mark.parametrize("length", LENGTHS)
def test_one_gradient_equals_the_formula(length, codec, name):
    check(name, lambda update: [(payload_of(length, codec, 2 + update), codec, 1.0)], length=length)


@every_rule
@every_codec
@pytest.mark.parametrize("length", [1, 9, 4097])
def test_factor_and_weight_decay_equal_the_formula(length, codec, name):
    gradients = lambda update: [(payload_of(length, codec, 2 + update), codec, 0.3)]  # noqa: E731
    check(name, gradients, length=length, weight_decay=0.013)


@every_rule
@pytest.mark.parametrize("weight_decay", [0.0, 0.013])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 31, 1023, 1024, 1025, 4097, 100_003])
def test_several_gradients_are_summed_in_their_order(length, weight_decay, name):
    def gradients(update):
        codecs = [*CODECS.values(), _kernels.FLOAT16]
        factors = [0.3, 1.0, -0.7, 1 / 3]
        return [
            (at_offset(payload_of(length, codec, 10 * update + seed), seed), codec, factor)
            for seed, (codec, factor) in enumerate(zip(codecs, factors, strict=True))
        ]

    check(name, gradients, length=length, weight_decay=weight_decay)


@every_rule
@every_codec
@pytest.mark.parametrize("length", [1, 9, 4097])
def test_a_gradient_may_begin_at_any_byte(length, codec, name):
    payload = payload_of(length, codec, 2)
    for offset in range(8):
        gradient = at_offset(payload, offset), codec, 1.0
        other = at_offset(payload, (offset + 3) % 8), codec, 0.5
        check(name, lambda _, only=gradient: [only], length=length, updates=1)
        check(name, lambda _, both=(gradient, other): [*both], length=length, updates=1)


@every_rule
def test_a_gradient_alone_equals_itself_in_a_sum(name):
    payload, codec = payload_of(4097, _kernels.BFLOAT16, 2), _kernels.BFLOAT16
    results = []
    for gradients in ([(payload, codec, 0.3)], [(payload, codec, 0.3), (bytes(2 * 4097), codec, 1.0)]):
        arrays = [wide_values(4097, 1), *(np.zeros(4097, F) for _ in range(RULES[name].num_slots))]
        RULES[name].kernel(*arrays, gradients, rate=RATE, **RULES[name].settings)
        results.append(arrays)

    for alone, summed in zip(*results, strict=True):
        assert np.array_equal(alone, summed)


@pytest.mark.parametrize("index", [0, 8])  # In the vector body and in the tail.
def test_adagrad_divides_by_the_root_of_the_sum(index):
    """Dean et al. 2012, section 4.1: gradients 3 then 4 make steps of 0.1 and 0.08."""
    p, a, g = (np.zeros(9, F) for _ in range(3))

    g[index] = 3
    _kernels.adagrad(p, a, [(g, _kernels.FLOAT32, 1.0)], rate=0.1, eps=0)
    assert p[index] == pytest.approx(-0.1, rel=1e-6)

    g[index] = 4
    _kernels.adagrad(p, a, [(g, _kernels.FLOAT32, 1.0)], rate=0.1, eps=0)
    assert p[index] == pytest.approx(-0.18, rel=1e-6)
    assert a[index] == 25


def test_adagrad_without_eps_is_invariant_to_the_scale_of_the_gradients():
    """Dean et al. 2012, section 4.1; a power of two scales without rounding."""
    runs = []
    for scale in (1.0, 8.0, 2.0**-8):
        p, a = wide_values(999, 1), np.zeros(999, F)
        for seed in range(2, 6):
            g = wide_values(999, seed)
            _kernels.adagrad(p, a, [(g, _kernels.FLOAT32, scale)], rate=RATE, eps=0)
        runs.append(p)

    assert np.array_equal(bits(runs[0]), bits(runs[1]))
    assert np.array_equal(bits(runs[0]), bits(runs[2]))


DIVIDING = ["adagrad without eps", "rmsprop without eps", "adam without eps"]


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30])  # The square of the last is zero.
@pytest.mark.parametrize("name", DIVIDING)
def test_a_rule_makes_no_step_where_the_denominator_is_zero(name, value):
    arrays = [np.ones(9, F), *(np.zeros(9, F) for _ in range(RULES[name].num_slots))]
    gradients = [(np.full(9, value, F), _kernels.FLOAT32, 1.0)]

    RULES[name].kernel(*arrays, gradients, rate=0.1, **RULES[name].settings)

    assert np.array_equal(arrays[0], np.ones(9, F))


@pytest.mark.parametrize("name", DIVIDING)
def test_a_parameter_stands_still_where_the_square_is_too_large(name):
    arrays = [np.ones(9, F), *(np.zeros(9, F) for _ in range(RULES[name].num_slots))]
    gradients = [(np.full(9, 1e30, F), _kernels.FLOAT32, 1.0)]

    RULES[name].kernel(*arrays, gradients, rate=0.1, **RULES[name].settings)

    assert np.isinf(arrays[-1]).all()
    assert np.array_equal(arrays[0], np.ones(9, F))


def test_without_weight_decay_an_infinite_parameter_does_not_reach_the_slots():
    p, v = np.full(9, np.inf, F), np.zeros(9, F)

    _kernels.momentum(p, v, [(np.ones(9, F), _kernels.FLOAT32, 1.0)], rate=0.1, momentum=0.9)

    assert np.array_equal(v, np.ones(9, F))


@pytest.mark.parametrize("num_arrays", [1, 2, 3])
def test_bandwidth_touches_every_element(num_arrays):
    arrays, g = [wide_values(4097, seed) for seed in range(num_arrays)], wide_values(4097, 9)
    expected = [array + g for array in arrays]

    _kernels.bandwidth(arrays, g)

    for array, wanted in zip(arrays, expected, strict=True):
        assert np.array_equal(array, wanted)
