"""Arithmetic on vectors against references of a few lines, bit for bit, on every instruction set."""

import numpy as np
import pytest

from kernel_values import wide_values
from pyps import _kernels

LENGTHS = [0, 1, 7, 15, 16, 17, 4097]
PRECISIONS = {"float32": np.float32, "float64": np.float64}
A = 0.1

every_length = pytest.mark.parametrize("length", LENGTHS)


def every(*names):
    """Parametrises each name over the precisions: every mixture."""

    def decorate(test):
        for name in names:
            test = pytest.mark.parametrize(name, PRECISIONS.values(), ids=PRECISIONS.keys())(test)
        return test

    return decorate


@pytest.fixture(params=_kernels.available(), autouse=True)
def isa(request):
    before = _kernels.isa()
    _kernels.select(request.param)
    yield request.param
    _kernels.select(before)


def vector(length, precision, seed):
    """In float64 with bits that float32 has no room for."""
    values = wide_values(length, seed).astype(precision)
    return values * precision(1 + 2**-40) if precision == np.float64 else values


def exact(values):
    return values.astype(np.float64)


def same(found, expected):
    """Bit for bit, a sign of zero included."""
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def lane_sum(terms):
    """Element i in lane i modulo 16, the lanes added in order."""
    rows = np.zeros(-(-len(terms) // 16) * 16)
    rows[: len(terms)] = terms
    lanes = np.zeros(16)
    for row in rows.reshape(-1, 16):
        lanes += row
    total = 0.0
    for lane in lanes:
        total += lane
    return total


def dot_reference(x, y):
    return lane_sum(exact(x) * exact(y))


def combine_reference(scalars, vectors, length, divisor=1.0):
    total = np.zeros(length)
    for scalar, values in zip(scalars, vectors, strict=True):
        total += scalar * exact(values)
    return total / divisor


BINARY = {
    "add": (_kernels.vector_add, np.add),
    "subtract": (_kernels.vector_subtract, np.subtract),
    "multiply": (_kernels.vector_multiply, np.multiply),
}
every_binary = pytest.mark.parametrize("kernel, reference", BINARY.values(), ids=BINARY.keys())


# Element by element.


@every("precision")
@every_length
def test_fill_writes_one_number(length, precision):
    z = vector(length, precision, 1)

    _kernels.vector_fill(z, A)

    assert same(z, np.full(length, A, precision))


@every("to", "of")
@every_length
def test_copy_rounds_once(length, of, to):
    x, z = vector(length, of, 1), np.empty(length, to)

    _kernels.vector_copy(z, x)

    assert same(z, x.astype(to))


@every("precision")
@every_length
def test_scale_is_in_place(length, precision):
    z = vector(length, precision, 1)
    expected = (A * exact(z)).astype(precision)

    _kernels.vector_scale(z, A)

    assert same(z, expected)


@every_binary
@every("to", "left", "right")
@every_length
def test_two_vectors_make_a_third(length, left, right, to, kernel, reference):
    x, y, z = vector(length, left, 1), vector(length, right, 2), np.empty(length, to)

    kernel(z, x, y)

    assert same(z, reference(exact(x), exact(y)).astype(to))


@every("to", "of")
@every_length
def test_axpy_adds_a_multiple(length, of, to):
    x, z = vector(length, of, 1), vector(length, to, 2)
    expected = (exact(z) + A * exact(x)).astype(to)

    _kernels.vector_axpy(z, A, x)

    assert same(z, expected)


@every("to", "left", "right")
@every_length
def test_move_goes_a_step_along(length, left, right, to):
    x, y, z = vector(length, left, 1), vector(length, right, 2), np.empty(length, to)

    _kernels.vector_move(z, x, A, y)

    assert same(z, (exact(x) + A * exact(y)).astype(to))


@every("to", "of")
def test_move_along_nothing_copies(of, to):
    x, z = vector(17, of, 1), np.empty(17, to)

    _kernels.vector_move(z, x, A, None)

    assert same(z, x.astype(to))


@every("precision")
@every_length
def test_a_target_may_be_what_is_read(length, precision):
    x, y = vector(length, precision, 1), vector(length, precision, 2)

    def result(operation):
        z = x.copy()
        operation(z)
        return z

    difference = (exact(x) - exact(y)).astype(precision)
    assert same(result(lambda z: _kernels.vector_copy(z, z)), x)
    assert same(result(lambda z: _kernels.vector_subtract(z, z, y)), difference)
    assert same(result(lambda z: _kernels.vector_subtract(z, y, z)), -difference + precision(0))
    assert same(result(lambda z: _kernels.vector_add(z, z, z)), (2 * exact(x)).astype(precision))
    assert same(result(lambda z: _kernels.vector_axpy(z, A, z)), (exact(x) + A * exact(x)).astype(precision))
    assert same(result(lambda z: _kernels.vector_move(z, y, A, z)), (exact(y) + A * exact(x)).astype(precision))
    expected = combine_reference([A, 3.0, -2.0], [x, y, x], length).astype(precision)
    assert same(result(lambda z: _kernels.vector_combine(z, [A, 3.0, -2.0], [z, y, z])), expected)


def test_what_is_too_large_for_float32_becomes_infinite_and_nan_stays():
    x = np.array([1e300, -1e300, np.inf, np.nan, 1e-300])
    z = np.empty(5, np.float32)

    _kernels.vector_copy(z, x)

    assert np.array_equal(z, np.float32([np.inf, -np.inf, np.inf, np.nan, 0]), equal_nan=True)


# Sums over elements.


@every("left", "right")
@every_length
def test_dot_adds_in_one_order(length, left, right):
    x, y = vector(length, left, 1), vector(length, right, 2)

    assert _kernels.vector_dot(x, y) == dot_reference(x, y)
    assert _kernels.vector_dot(y, x) == dot_reference(x, y)


@every("precision")
@every_length
def test_norm1_adds_magnitudes_in_one_order(length, precision):
    x = vector(length, precision, 1)

    assert _kernels.vector_norm1(x) == lane_sum(np.abs(exact(x)))


@every("precision")
@every_length
def test_norm_inf_is_the_largest_magnitude(length, precision):
    x = vector(length, precision, 1)

    assert _kernels.vector_norm_inf(x) == np.abs(x).max(initial=0)
    assert _kernels.vector_norm_inf(-x) == np.abs(x).max(initial=0)


@every("precision")
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_norm_inf_of_nan_is_nan_wherever_it_stands(length, precision):
    for index in range(length):
        x = vector(length, precision, 1)
        x[index] = np.nan
        if index > 0:
            x[index - 1] = -np.inf
        assert np.isnan(_kernels.vector_norm_inf(x))
        x[index] = 0
        assert _kernels.vector_norm_inf(x) == np.abs(x).max()


def test_sums_of_what_is_not_finite_are_not_finite():
    x = np.ones(40, np.float32)
    x[33] = np.inf
    y = x.copy()
    y[33] = 0

    assert _kernels.vector_dot(x, x) == np.inf
    assert _kernels.vector_norm1(x) == np.inf
    assert np.isnan(_kernels.vector_dot(x, y))


# Many vectors at once.


@every("to", "of")
@every_length
@pytest.mark.parametrize("num", [0, 1, 2, 5])
def test_combine_adds_multiples_in_their_order(num, length, of, to):
    vectors = [vector(length, of if k % 2 else np.float32, k) for k in range(num)]
    scalars = [A * (k - 2) for k in range(num)]
    z = np.empty(length, to)

    _kernels.vector_combine(z, scalars, vectors)

    assert same(z, combine_reference(scalars, vectors, length).astype(to))


@every("to")
@every_length
@pytest.mark.parametrize("num", [0, 1, 2, 5])
def test_fold_divides_the_sum_of_its_stages(num, length, to):
    stages = [vector(length, np.float32, k) for k in range(num)]
    z = np.empty(length, to)

    _kernels.vector_fold(z, stages, 7)

    assert same(z, combine_reference([1.0] * num, stages, length, 7.0).astype(to))


@pytest.mark.parametrize("length", [*LENGTHS, 1023, 1024, 1025])
@pytest.mark.parametrize("num_names, num_others", [(1, 1), (3, 5), (7, 2)])
def test_gram_gives_the_bits_of_dot(num_names, num_others, length):
    names = [vector(length, (np.float32, np.float64)[k % 2], k) for k in range(num_names)]
    others = [vector(length, (np.float32, np.float64)[k % 3 == 0], 50 + k) for k in range(num_others)]

    products = _kernels.vector_gram(names, others)

    assert products.dtype == np.float64 and products.shape == (num_names, num_others)
    assert products.tolist() == [[dot_reference(x, y) for y in others] for x in names]


def test_gram_of_a_list_with_itself_is_symmetric():
    vectors = [vector(3001, (np.float32, np.float64)[k % 2], k) for k in range(9)]

    products = _kernels.vector_gram(vectors, vectors)

    assert products.tolist() == [[dot_reference(x, y) for y in vectors] for x in vectors]


def test_gram_may_meet_one_vector_in_several_places():
    x, y, z = (vector(100, np.float32, k) for k in range(3))

    products = _kernels.vector_gram([x, y, x], [y, z, y, x])

    assert products.tolist() == [[dot_reference(p, q) for q in (y, z, y, x)] for p in (x, y, x)]


def test_gram_of_no_vectors_is_empty():
    x = vector(4, np.float32, 1)

    assert _kernels.vector_gram([], [x, x]).shape == (0, 2)
    assert _kernels.vector_gram([x], []).shape == (1, 0)
