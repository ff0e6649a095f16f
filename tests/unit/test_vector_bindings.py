"""The vector kernels' Python face: what it refuses before anything is written."""

import numpy as np
import pytest

from kernel_values import assert_refused, misaligned, read_only
from pyps import _kernels


def ones(length=4, precision=np.float32):
    return np.ones(length, precision)


def calls_with(array):
    """Every place of an array, by the name that its errors have."""
    k = _kernels
    writing = [
        lambda z: k.vector_fill(z, 2),
        lambda z: k.vector_copy(z, ones()),
        lambda z: k.vector_scale(z, 2),
        lambda z: k.vector_add(z, ones(), ones()),
        lambda z: k.vector_subtract(z, ones(), ones()),
        lambda z: k.vector_multiply(z, ones(), ones()),
        lambda z: k.vector_axpy(z, 2, ones()),
        lambda z: k.vector_move(z, ones(), 2, ones()),
        lambda z: k.vector_combine(z, [2], [ones()]),
        lambda z: k.vector_fold(z, [ones()], 2),
    ]
    reading = {
        "x": [
            lambda x: k.vector_copy(ones(), x),
            lambda x: k.vector_add(ones(), x, ones()),
            lambda x: k.vector_axpy(ones(), 2, x),
            lambda x: k.vector_move(ones(), x, 2, ones()),
            lambda x: k.vector_move(ones(), x, 2, None),
            lambda x: k.vector_dot(x, ones()),
            k.vector_norm1,
            k.vector_norm_inf,
        ],
        "y": [
            lambda y: k.vector_add(ones(), ones(), y),
            lambda y: k.vector_move(ones(), ones(), 2, y),
            lambda y: k.vector_dot(ones(), y),
        ],
        r"vectors\[1\]": [lambda x: k.vector_combine(ones(), [1, 2], [ones(), x])],
        r"stages\[1\]": [lambda x: k.vector_fold(ones(), [ones(), x], 2)],
        r"names\[1\]": [lambda x: k.vector_gram([ones(), x], [ones()])],
        r"others\[0\]": [lambda x: k.vector_gram([ones()], [x])],
    }
    for name, calls in {"z": writing, **reading}.items():
        for call in calls:
            yield name, lambda call=call: call(array)


REFUSED = [
    ([1.0] * 4, TypeError, "is of type list; expected a numpy.ndarray of float32"),
    (np.ones(4, np.float16), TypeError, "has dtype float16; expected float32"),
    (np.ones(4, np.int64), TypeError, "has dtype int64; expected float32"),
    (np.ones(4, ">f8"), TypeError, "has dtype >f8; expected float32"),
    (np.ones((2, 2), np.float32), ValueError, "is 2-dimensional; expected 1-D"),
    (np.ones(8, np.float32)[::2], ValueError, "is not C-contiguous"),
    (misaligned(4), ValueError, "is not aligned to 4 bytes"),
]


def test_arrays_that_do_not_fit_are_refused():
    for array, error, words in REFUSED:
        for name, call in calls_with(array):
            assert_refused(call, error, f"^{name} {words}")
    array = np.frombuffer(bytearray(8 * 4 + 4), np.float64, offset=4, count=4)
    assert_refused(lambda: _kernels.vector_norm1(array), ValueError, r"^x is not aligned to 8 bytes")
    stages = [ones(4, np.float64)]
    words = r"^stages\[0\] has dtype float64; expected float32$"
    assert_refused(lambda: _kernels.vector_fold(ones(), stages, 1), TypeError, words)


def test_a_read_only_target_is_refused_and_a_read_only_source_is_not():
    for name, call in calls_with(read_only(ones())):
        if name == "z":
            assert_refused(call, ValueError, r"^z is not writable$")
        else:
            call()


def test_unequal_lengths_are_refused():
    z, k = ones(), _kernels
    for call, words in (
        (lambda: k.vector_copy(z, ones(5)), "x is 5 long; z is 4 long"),
        (lambda: k.vector_add(z, ones(), ones(5)), "y is 5 long; z is 4 long"),
        (lambda: k.vector_axpy(z, 1, ones(3)), "x is 3 long; z is 4 long"),
        (lambda: k.vector_move(z, ones(), 1, ones(3)), "y is 3 long; z is 4 long"),
        (lambda: k.vector_dot(ones(), ones(3)), "y is 3 long; x is 4 long"),
        (lambda: k.vector_combine(z, [1, 1], [ones(), ones(3)]), r"vectors\[1\] is 3 long; vectors\[0\] is 4 long"),
        (lambda: k.vector_combine(z, [1], [ones(3)]), r"vectors\[0\] is 3 long; z is 4 long"),
        (lambda: k.vector_fold(z, [ones(3)], 1), r"stages\[0\] is 3 long; z is 4 long"),
        (lambda: k.vector_gram([ones(), ones(3)], [ones()]), r"names\[1\] is 3 long; names\[0\] is 4 long"),
        (lambda: k.vector_gram([ones()], [ones(3)]), r"others\[0\] is 3 long; names\[0\] is 4 long"),
    ):
        assert_refused(call, ValueError, f"^{words}$")
    assert (z == 1).all()


def test_arrays_that_overlap_in_part_are_refused():
    memory = ones(9)
    z, k = memory[:4], _kernels
    for x in (memory[1:5], memory[3:7], memory[:8].view(np.float64)):
        for call in (
            lambda x=x: k.vector_copy(z, x),
            lambda x=x: k.vector_add(z, x, ones()),
            lambda x=x: k.vector_add(z, ones(), x),
            lambda x=x: k.vector_axpy(z, 1, x),
            lambda x=x: k.vector_move(z, ones(), 1, x),
            lambda x=x: k.vector_combine(z, [1, 1], [ones(), x]),
        ):
            assert_refused(call, ValueError, r"^z and .* overlap in memory$")
    with pytest.raises(ValueError, match=r"^z and stages\[0\] overlap in memory$"):
        k.vector_fold(z, [memory[1:5]], 1)
    k.vector_add(z, memory[4:8], memory[5:9])


def test_scalars_and_lists_that_do_not_fit_are_refused():
    z, k = ones(), _kernels
    for divisor in (0, -1, float("nan"), float("inf")):
        words = r"^divisor is .*; expected a number above 0 that is finite$"
        assert_refused(lambda d=divisor: k.vector_fold(z, [ones()], d), ValueError, words)
    for call, error, words in (
        (lambda: k.vector_combine(z, [1, 2], [ones()]), ValueError, "2 scalars for 1 vectors; expected one for each"),
        (lambda: k.vector_combine(z, [1], ones()), TypeError, "vectors is of type ndarray; expected a list of arrays"),
        (
            lambda: k.vector_gram([ones()], (x for x in [ones()])),
            TypeError,
            "others is of type generator; expected a list of arrays",
        ),
    ):
        assert_refused(call, error, f"^{words}$")
    assert (z == 1).all()
