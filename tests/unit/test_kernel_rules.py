"""The update rules' kernels against references written from their formulas, bit for bit, on every instruction set."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest

import kernel_values
from kernel_values import CODECS, LENGTHS, at_offset, bits, decode_reference, payload_of, wide_values
from pyps import _kernels

F = np.float32
instruction_set = kernel_values.instruction_set


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


def fresh(name, length):
    return [wide_values(length, 1), *(np.zeros(length, F) for _ in range(RULES[name].num_slots))]


def check(name, gradients_of, *, length, weight_decay=0.0, updates=2):
    """Compares updates of fresh arrays; `gradients_of(update)` makes each one's gradients."""
    arrays = fresh(name, length)
    for update in range(updates):
        gradients = gradients_of(update)
        expected = expected_of(name, arrays, gradients, weight_decay)

        RULES[name].kernel(*arrays, gradients, rate=RATE, **RULES[name].settings, weight_decay=weight_decay)

        for array, (found, wanted) in enumerate(zip(arrays, expected, strict=True)):
            told = [(codec, factor) for _, codec, factor in gradients]
            case = f"{name}: array {array} of {length} after update {update}, of {told}, decay {weight_decay}"
            assert np.array_equal(bits(found), bits(wanted)), case


def test_one_gradient_equals_the_formula():
    for name, codec, length in product(RULES, CODECS.values(), LENGTHS):
        check(name, lambda update, n=length, c=codec: [(payload_of(n, c, 2 + update), c, 1.0)], length=length)


def test_factor_and_weight_decay_equal_the_formula():
    for name, codec, length in product(RULES, CODECS.values(), [1, 9, 4097]):
        gradients = [[(payload_of(length, codec, 2 + update), codec, 0.3)] for update in range(2)]
        check(name, gradients.__getitem__, length=length, weight_decay=0.013)


def test_several_gradients_are_summed_in_their_order():
    codecs, factors = [*CODECS.values(), _kernels.FLOAT16], [0.3, 1.0, -0.7, 1 / 3]
    for length in [0, 1, 7, 8, 9, 31, 1023, 1024, 1025, 4097, 100_003]:
        gradients = [
            [
                (at_offset(payload_of(length, codec, 10 * update + seed), seed), codec, factor)
                for seed, (codec, factor) in enumerate(zip(codecs, factors, strict=True))
            ]
            for update in range(2)
        ]
        for name, weight_decay in product(RULES, [0.0, 0.013]):
            check(name, gradients.__getitem__, length=length, weight_decay=weight_decay)


def test_a_gradient_may_begin_at_any_byte():
    for codec, length, offset in product(CODECS.values(), [1, 9, 4097], range(8)):
        payload = payload_of(length, codec, 2)
        gradient = at_offset(payload, offset), codec, 1.0
        other = at_offset(payload, (offset + 3) % 8), codec, 0.5
        for name, gradients in product(RULES, ([gradient], [gradient, other])):
            check(name, lambda _, g=gradients: g, length=length, updates=1)


def test_adagrad_divides_by_the_root_of_the_sum():
    """Dean et al. 2012, section 4.1: gradients 3 then 4 make steps of 0.1 and 0.08."""
    for index in (0, 8):  # In the vector body and in the tail.
        p, a, g = (np.zeros(9, F) for _ in range(3))
        for gradient, wanted in ((3, -0.1), (4, -0.18)):
            g[index] = gradient
            _kernels.adagrad(p, a, [(g, _kernels.FLOAT32, 1.0)], rate=0.1, eps=0)
            assert p[index] == pytest.approx(wanted, rel=1e-6), index
        assert a[index] == 25


def test_a_rule_that_divides_makes_no_step_where_the_denominator_is_zero_or_infinite():
    for name in ("adagrad without eps", "rmsprop without eps", "adam without eps"):
        for value in (0.0, -0.0, 1e-30, 1e30):  # The squares of the last two are zero and infinite.
            p, *slots = np.ones(9, F), *(np.zeros(9, F) for _ in range(RULES[name].num_slots))

            gradients = [(np.full(9, value, F), _kernels.FLOAT32, 1.0)]
            RULES[name].kernel(p, *slots, gradients, rate=0.1, **RULES[name].settings)

            assert np.array_equal(p, np.ones(9, F)), (name, value)
            assert np.isinf(slots[-1]).all() == (value == 1e30), (name, value)


def test_without_weight_decay_an_infinite_parameter_does_not_reach_the_slots():
    p, v = np.full(9, np.inf, F), np.zeros(9, F)

    _kernels.momentum(p, v, [(np.ones(9, F), _kernels.FLOAT32, 1.0)], rate=0.1, momentum=0.9)

    assert np.array_equal(v, np.ones(9, F))


def test_bandwidth_touches_every_element():
    for num_arrays in (1, 2, 3):
        arrays, g = [wide_values(4097, seed) for seed in range(num_arrays)], wide_values(4097, 9)
        expected = [array + g for array in arrays]

        _kernels.bandwidth(arrays, g)

        assert all(map(np.array_equal, arrays, expected)), num_arrays
