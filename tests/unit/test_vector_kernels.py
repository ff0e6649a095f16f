"""Arithmetic on vectors against references of a few lines, bit for bit, on every instruction set."""

from functools import cache
from itertools import product

import numpy as np

import kernel_values
from kernel_values import lane_sum, wide_values
from pyps import _kernels

instruction_set = kernel_values.instruction_set
LENGTHS = [0, 1, 7, 8, 9, 15, 16, 17, 4097]
PRECISIONS = (np.float32, np.float64)
A = 0.1


def mixtures(num_precisions):
    """Every length with every mixture of precisions."""
    return product(LENGTHS, *[PRECISIONS] * num_precisions)


@cache
def _vector(length, precision, seed):
    values = wide_values(length, seed).astype(precision)
    return values * precision(1 + 2**-40) if precision == np.float64 else values


def vector(length, precision, seed):
    """In float64 with bits that float32 has no room for."""
    return _vector(length, precision, seed).copy()


def exact(values):
    return values.astype(np.float64)


def same(found, expected):
    """Bit for bit, a sign of zero included."""
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def dot_reference(x, y):
    return lane_sum(exact(x) * exact(y))


def combine_reference(scalars, vectors, length, divisor=1.0):
    total = np.zeros(length)
    for scalar, values in zip(scalars, vectors, strict=True):
        total += scalar * exact(values)
    return total / divisor


# Element by element.


def test_one_vector_makes_another_rounded_once():
    for length, of, to in mixtures(2):
        x, y = vector(length, of, 1), vector(length, to, 2)
        for name, kernel, expected in (
            ("fill", lambda z, x: _kernels.vector_fill(z, A), np.full(length, A)),
            ("scale", lambda z, x: _kernels.vector_scale(z, A), A * exact(y)),
            ("copy", _kernels.vector_copy, exact(x)),
            ("axpy", lambda z, x: _kernels.vector_axpy(z, A, x), exact(y) + A * exact(x)),
            ("move along nothing", lambda z, x: _kernels.vector_move(z, x, A, None), exact(x)),
        ):
            z = y.copy()

            kernel(z, x)

            assert same(z, expected.astype(to)), (name, length, of, to)


def test_two_vectors_make_a_third():
    for length, left, right, to in mixtures(3):
        x, y = vector(length, left, 1), vector(length, right, 2)
        for kernel, expected in (
            (_kernels.vector_add, exact(x) + exact(y)),
            (_kernels.vector_subtract, exact(x) - exact(y)),
            (_kernels.vector_multiply, exact(x) * exact(y)),
            (lambda z, x, y: _kernels.vector_move(z, x, A, y), exact(x) + A * exact(y)),
        ):
            z = np.empty(length, to)

            kernel(z, x, y)

            assert same(z, expected.astype(to)), (kernel.__name__, length, left, right, to)


def test_a_target_may_be_what_is_read():
    for length, precision in mixtures(1):
        x, y = vector(length, precision, 1), vector(length, precision, 2)
        difference = exact(x) - exact(y)
        for name, call, expected in (
            ("copy", lambda z: _kernels.vector_copy(z, z), exact(x)),
            ("subtract y", lambda z, y=y: _kernels.vector_subtract(z, z, y), difference),
            ("subtract from y", lambda z, y=y: _kernels.vector_subtract(z, y, z), -difference + 0.0),
            ("add", lambda z: _kernels.vector_add(z, z, z), 2 * exact(x)),
            ("axpy", lambda z: _kernels.vector_axpy(z, A, z), exact(x) + A * exact(x)),
            ("move", lambda z, y=y: _kernels.vector_move(z, y, A, z), exact(y) + A * exact(x)),
            (
                "combine",
                lambda z, y=y: _kernels.vector_combine(z, [A, 3.0, -2.0], [z, y, z]),
                combine_reference([A, 3.0, -2.0], [x, y, x], length),
            ),
        ):
            z = x.copy()

            call(z)

            assert same(z, expected.astype(precision)), (name, length, precision)


def test_what_is_too_large_for_float32_becomes_infinite_and_nan_stays():
    x = np.array([1e300, -1e300, np.inf, np.nan, 1e-300])
    z = np.empty(5, np.float32)

    _kernels.vector_copy(z, x)

    assert np.array_equal(z, np.float32([np.inf, -np.inf, np.inf, np.nan, 0]), equal_nan=True)


# Sums over elements.


def test_dot_adds_in_one_order():
    for length, left, right in mixtures(2):
        x, y = vector(length, left, 1), vector(length, right, 2)

        assert _kernels.vector_dot(x, y) == _kernels.vector_dot(y, x) == dot_reference(x, y), (length, left, right)


def test_norms_are_of_magnitudes_in_one_order():
    for length, precision in mixtures(1):
        x = vector(length, precision, 1)

        assert _kernels.vector_norm1(x) == lane_sum(np.abs(exact(x))), (length, precision)
        for sign in (x, -x):
            assert _kernels.vector_norm_inf(sign) == np.abs(x).max(initial=0), (length, precision)


def test_norm_inf_of_nan_is_nan_wherever_it_stands():
    for length, precision in product([1, 15, 16, 17, 40], PRECISIONS):
        for index in range(length):
            x = vector(length, precision, 1)
            x[index] = np.nan
            if index > 0:
                x[index - 1] = -np.inf
            assert np.isnan(_kernels.vector_norm_inf(x)), (length, precision, index)
            x[index] = 0
            assert _kernels.vector_norm_inf(x) == np.abs(x).max(), (length, precision, index)


def test_sums_of_what_is_not_finite_are_not_finite():
    x = np.ones(40, np.float32)
    x[33] = np.inf
    y = x.copy()
    y[33] = 0

    assert _kernels.vector_dot(x, x) == np.inf
    assert _kernels.vector_norm1(x) == np.inf
    assert np.isnan(_kernels.vector_dot(x, y))


# Many vectors at once.


def test_combine_adds_multiples_in_their_order():
    for (length, of, to), num in product(mixtures(2), [0, 1, 2, 5]):
        vectors = [vector(length, of if k % 2 else np.float32, k) for k in range(num)]
        scalars = [A * (k - 2) for k in range(num)]
        z = np.empty(length, to)

        _kernels.vector_combine(z, scalars, vectors)

        assert same(z, combine_reference(scalars, vectors, length).astype(to)), (length, of, to, num)


def test_fold_divides_the_sum_of_its_stages():
    for (length, to), num in product(mixtures(1), [0, 1, 2, 5]):
        stages = [vector(length, np.float32, k) for k in range(num)]
        z = np.empty(length, to)

        _kernels.vector_fold(z, stages, 7)

        assert same(z, combine_reference([1.0] * num, stages, length, 7.0).astype(to)), (length, to, num)


def test_gram_gives_the_bits_of_dot():
    for length, (num_names, num_others) in product([*LENGTHS, 1023, 1024, 1025], [(1, 1), (3, 5), (7, 2)]):
        names = [vector(length, PRECISIONS[k % 2], k) for k in range(num_names)]
        others = [vector(length, PRECISIONS[k % 3 == 0], 50 + k) for k in range(num_others)]

        products = _kernels.vector_gram(names, others)

        assert products.dtype == np.float64 and products.shape == (num_names, num_others)
        assert products.tolist() == [[dot_reference(x, y) for y in others] for x in names], (length, num_names)


def test_gram_may_meet_one_vector_in_several_places():
    x, y, z = (vector(100, np.float32, k) for k in range(3))
    vectors = [vector(3001, PRECISIONS[k % 2], k) for k in range(9)]
    for names, others in (([x, y, x], [y, z, y, x]), (vectors, vectors)):
        products = _kernels.vector_gram(names, others)

        assert products.tolist() == [[dot_reference(p, q) for q in others] for p in names]


def test_gram_of_no_vectors_is_empty():
    x = vector(4, np.float32, 1)

    assert _kernels.vector_gram([], [x, x]).shape == (0, 2)
    assert _kernels.vector_gram([x], []).shape == (1, 0)
