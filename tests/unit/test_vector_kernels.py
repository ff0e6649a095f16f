"""Arithmetic on vectors against references of a few lines, bit for bit, on every instruction set."""

from itertools import product

import numpy as np

import kernel_values
from kernel_values import lane_sum, wide_values
from pyps import _kernels

instruction_set = kernel_values.instruction_set
LENGTHS = [0, 1, 7, 8, 9, 15, 16, 17, 4097]
A = 0.1
vector = wide_values


def exact(values):
    return values.astype(np.float64)


def same(found, expected):
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def dot_reference(x, y):
    return lane_sum(exact(x) * exact(y))


def combine_reference(scalars, vectors, length, divisor=1.0):
    total = np.zeros(length)
    for scalar, values in zip(scalars, vectors, strict=True):
        total += scalar * exact(values)
    return total / divisor


def test_elements_are_computed_in_float64_and_rounded_once():
    for length in LENGTHS:
        x, y = vector(length, 1), vector(length, 2)
        for name, call, expected in (
            ("copy", lambda z, x=x: _kernels.vector_copy(z, x), exact(x)),
            ("move", lambda z, x=x, y=y: _kernels.vector_move(z, x, A, y), exact(x) + A * exact(y)),
            ("move along nothing", lambda z, x=x: _kernels.vector_move(z, x, A, None), exact(x)),
        ):
            z = np.empty(length, np.float32)

            call(z)

            assert same(z, expected.astype(np.float32)), (name, length)


def test_a_target_may_be_what_is_read():
    for length in LENGTHS:
        x, y = vector(length, 1), vector(length, 2)
        for name, call, expected in (
            ("copy", lambda z: _kernels.vector_copy(z, z), exact(x)),
            ("move from itself", lambda z, y=y: _kernels.vector_move(z, z, A, y), exact(x) + A * exact(y)),
            ("move along itself", lambda z, y=y: _kernels.vector_move(z, y, A, z), exact(y) + A * exact(x)),
            (
                "combine",
                lambda z, y=y: _kernels.vector_combine(z, [A, 3.0, -2.0], [z, y, z]),
                combine_reference([A, 3.0, -2.0], [x, y, x], length),
            ),
        ):
            z = x.copy()

            call(z)

            assert same(z, expected.astype(np.float32)), (name, length)


def test_dot_adds_in_one_order():
    for length in LENGTHS:
        x, y = vector(length, 1), vector(length, 2)

        assert _kernels.vector_dot(x, y) == _kernels.vector_dot(y, x) == dot_reference(x, y), length


def test_norms_are_of_magnitudes_in_one_order():
    for length in LENGTHS:
        x = vector(length, 1)

        assert _kernels.vector_norm1(x) == lane_sum(np.abs(exact(x))), length
        for sign in (x, -x):
            assert _kernels.vector_norm_inf(sign) == np.abs(x).max(initial=0), length


def test_norm_inf_of_nan_is_nan_wherever_it_stands():
    for length in (1, 15, 16, 17, 40):
        for index in range(length):
            x = vector(length, 1)
            x[index] = np.nan
            if index > 0:
                x[index - 1] = -np.inf
            assert np.isnan(_kernels.vector_norm_inf(x)), (length, index)
            x[index] = 0
            assert _kernels.vector_norm_inf(x) == np.abs(x).max(), (length, index)


def test_sums_of_what_is_not_finite_are_not_finite():
    x = np.ones(40, np.float32)
    x[33] = np.inf
    y = x.copy()
    y[33] = 0

    assert _kernels.vector_dot(x, x) == np.inf
    assert _kernels.vector_norm1(x) == np.inf
    assert np.isnan(_kernels.vector_dot(x, y))


def test_combine_adds_multiples_in_their_order_and_fold_divides_the_sum_of_its_stages():
    for length, num in product(LENGTHS, [0, 1, 2, 5]):
        vectors = [vector(length, k) for k in range(num)]
        scalars = [A * (k - 2) for k in range(num)]
        z = np.empty(length, np.float32)

        _kernels.vector_combine(z, scalars, vectors)
        assert same(z, combine_reference(scalars, vectors, length).astype(np.float32)), (length, num)

        _kernels.vector_fold(z, vectors, 7)
        assert same(z, combine_reference([1.0] * num, vectors, length, 7.0).astype(np.float32)), (length, num)


def test_gram_gives_the_bits_of_dot():
    for length, (num_names, num_others) in product([*LENGTHS, 1023, 1024, 1025], [(1, 1), (3, 5), (7, 2)]):
        names = [vector(length, k) for k in range(num_names)]
        others = [vector(length, 50 + k) for k in range(num_others)]

        products = _kernels.vector_gram(names, others)

        assert products.dtype == np.float64 and products.shape == (num_names, num_others)
        assert products.tolist() == [[dot_reference(x, y) for y in others] for x in names], (length, num_names)


def test_gram_may_meet_one_vector_in_several_places():
    x, y, z = (vector(100, k) for k in range(3))
    vectors = [vector(3001, k) for k in range(9)]
    for names, others in (([x, y, x], [y, z, y, x]), (vectors, vectors)):
        products = _kernels.vector_gram(names, others)

        assert products.tolist() == [[dot_reference(p, q) for q in others] for p in names]


def test_gram_of_no_vectors_is_empty():
    x = vector(4, 1)

    assert _kernels.vector_gram([], [x, x]).shape == (0, 2)
    assert _kernels.vector_gram([x], []).shape == (1, 0)
