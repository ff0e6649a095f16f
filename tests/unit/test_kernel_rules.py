"""The update rules' kernels against references written from their formulas, bit for bit, on every instruction set."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

import kernel_values
from kernel_values import LENGTHS, NUMBERS, WORDS, apply, at_offset, bits, decode_reference, payload_of, wide_values
from pyps import _kernels
from pyps.core.rules import RULES
from pyps_wire.codecs import FLOAT16, FLOAT32

F = np.float32
instruction_set = kernel_values.instruction_set


# References, written from the formulas: each returns (p, slots) from (p, slots, g) and the numbers.


def divided(dividend, divisor):
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(divisor == 0, F(0), dividend / divisor)


def sgd(p, g, n):
    return (p - n.rate * g,)


def momentum(p, v, g, n):
    v = n.momentum * v + n.gradient_share * g
    return p - n.rate * v, v


def heavy_ball(p, v, g, n):
    v = n.momentum * v + n.rate * g
    return p - v, v


def nesterov(p, v, g, n):
    v = n.momentum * v + g
    return p - n.rate * (g + n.momentum * v), v


def delayed_nesterov(p, v, d, g, n):
    d = d + g
    if not n.ends:
        return p - n.rate * (n.share * g), v, d
    v = n.momentum * v + n.share * d
    return p - n.rate * (n.share * g + n.momentum * v), v, np.zeros_like(d)


def adagrad(p, a, g, n):
    a = a + g * g
    return p - divided(n.rate * g, np.sqrt(a) + n.eps), a


def rmsprop(p, s, g, n):
    s = n.decay * s + n.gradient_share * (g * g)
    return p - divided(n.rate * g, np.sqrt(s) + n.eps), s


def adam(p, m, v, g, n):
    m = n.beta1 * m + n.gradient_share1 * g
    v = n.beta2 * v + n.gradient_share2 * (g * g)
    return p - divided(n.rate * m, np.sqrt(v) * n.root_scale + n.eps), m, v


def adamw(p, m, v, g, n):
    return adam(n.parameter_share * p, m, v, g, n)


REFERENCES = {
    function.__name__: function
    for function in (sgd, momentum, heavy_ball, nesterov, delayed_nesterov, adagrad, rmsprop, adam, adamw)
}
# A rule and numbers unlike the usual ones.
WITHOUT_EPS = [(rule, {"eps": 0.0}) for rule in ("adagrad", "rmsprop", "adam")]
CASES = [*((rule, {}) for rule in RULES), ("delayed_nesterov", {"ends": 0.0}), *WITHOUT_EPS]


def expected_of(rule, arrays, gradients, numbers):
    n = SimpleNamespace(**{name: F(number) for name, number in (NUMBERS | numbers).items()})
    p, *slots = arrays
    g = None
    for payload, codec, factor in gradients:
        weighted = F(factor) * decode_reference(payload, codec)
        g = weighted if g is None else g + weighted
    if n.weight_decay and rule != "adamw":
        g = g + n.weight_decay * p
    return REFERENCES[rule](p, *slots, g, n)


def check(case, gradients_of, *, length, weight_decay=0.0, updates=2):
    rule, numbers = case
    numbers = numbers | {"weight_decay": weight_decay, "parameter_share": 1 - weight_decay}
    arrays = [wide_values(length, 1), *(np.zeros(length, F) for _ in RULES[rule].slot_names)]
    for update in range(updates):
        gradients = gradients_of(update)
        expected = expected_of(rule, arrays, gradients, numbers)

        apply(rule, *arrays, gradients, **numbers)

        for array, (found, wanted) in enumerate(zip(arrays, expected, strict=True)):
            pushed = [(codec, factor) for _, codec, factor in gradients]
            what = f"{case}: array {array} of {length} after update {update}, of {pushed}, decay {weight_decay}"
            assert np.array_equal(bits(found), bits(wanted)), what


def test_one_gradient_equals_the_formula():
    for case, codec, length in product(CASES, WORDS, LENGTHS):
        check(case, lambda update, n=length, c=codec: [(payload_of(n, c, 2 + update), c, 1.0)], length=length)


def test_factor_and_weight_decay_equal_the_formula():
    for case, codec, length in product(CASES, WORDS, [1, 9, 4097]):
        gradients = [[(payload_of(length, codec, 2 + update), codec, 0.3)] for update in range(2)]
        check(case, gradients.__getitem__, length=length, weight_decay=0.013)


def test_several_gradients_are_summed_in_their_order():
    codecs, factors = [*WORDS, FLOAT16], [0.3, 1.0, -0.7, 1 / 3]
    for length in [0, 1, 7, 8, 9, 31, 1023, 1024, 1025, 4097, 100_003]:
        gradients = [
            [
                (at_offset(payload_of(length, codec, 10 * update + seed), seed), codec, factor)
                for seed, (codec, factor) in enumerate(zip(codecs, factors, strict=True))
            ]
            for update in range(2)
        ]
        for case, weight_decay in product(CASES, [0.0, 0.013]):
            check(case, gradients.__getitem__, length=length, weight_decay=weight_decay)


def test_a_gradient_may_begin_at_any_byte():
    for codec, length, offset in product(WORDS, [1, 9, 4097], range(8)):
        payload = payload_of(length, codec, 2)
        gradient = at_offset(payload, offset), codec, 1.0
        other = at_offset(payload, (offset + 3) % 8), codec, 0.5
        for case, gradients in product(CASES, ([gradient], [gradient, other])):
            check(case, lambda _, g=gradients: g, length=length, updates=1)


def test_adagrad_divides_by_the_root_of_the_sum():
    """Dean et al. 2012, section 4.1: gradients 3 then 4 make steps of 0.1 and 0.08."""
    for index in (0, 8):  # In the vector body and in the tail.
        p, a, g = (np.zeros(9, F) for _ in range(3))
        for gradient, wanted in ((3, -0.1), (4, -0.18)):
            g[index] = gradient
            apply("adagrad", p, a, [(g, FLOAT32, 1.0)], eps=0)
            assert p[index] == pytest.approx(wanted, rel=1e-6), index
        assert a[index] == 25


def test_a_rule_that_divides_makes_no_step_where_the_denominator_is_zero_or_infinite():
    for rule, numbers in WITHOUT_EPS:
        for value in (0.0, -0.0, 1e-30, 1e30):  # The squares of the last two are zero and infinite.
            p, *slots = np.ones(9, F), *(np.zeros(9, F) for _ in RULES[rule].slot_names)

            apply(rule, p, *slots, [(np.full(9, value, F), FLOAT32, 1.0)], **numbers)

            assert np.array_equal(p, np.ones(9, F)), (rule, value)
            assert np.isinf(slots[-1]).all() == (value == 1e30), (rule, value)


def test_without_weight_decay_an_infinite_parameter_does_not_reach_the_slots():
    p, v = np.full(9, np.inf, F), np.zeros(9, F)

    apply("nesterov", p, v, [(np.ones(9, F), FLOAT32, 1.0)])

    assert np.array_equal(v, np.ones(9, F))


def test_bandwidth_touches_every_element():
    for num_arrays in (1, 2, 3):
        arrays, g = [wide_values(4097, seed) for seed in range(num_arrays)], wide_values(4097, 9)
        expected = [array + g for array in arrays]

        _kernels.bandwidth(arrays, g)

        assert all(map(np.array_equal, arrays, expected)), num_arrays
