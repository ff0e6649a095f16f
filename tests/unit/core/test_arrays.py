"""Arrays begin on a cache line."""

from __future__ import annotations

import numpy as np
import pytest

from pyps.core.arrays import aligned, aligned_copy, aligned_zeros, read_only


@pytest.mark.parametrize("length", [1, 7, 16, 4097])
def test_aligned_zeros_are_zeros_on_a_cache_line(length: int) -> None:
    zeros = aligned_zeros(length)
    assert zeros.ctypes.data % 64 == 0
    assert zeros.tolist() == [0.0] * length


def test_an_aligned_copy_shares_nothing_with_its_original() -> None:
    original = np.ones(3, np.float32)
    copy = aligned_copy(original)
    original[:] = 2.0
    assert copy.tolist() == [1.0, 1.0, 1.0]


def test_another_type_is_not_converted_silently() -> None:
    with pytest.raises(AssertionError, match="float64"):
        aligned_copy(np.ones(3))  # type: ignore[arg-type]


def test_a_read_only_view_follows_the_array_it_cannot_change() -> None:
    values = aligned_zeros(1)
    view = read_only(values)
    values[0] = 1.0
    assert (view[0], view.flags.writeable, values.flags.writeable) == (1.0, False, True)


def test_an_array_that_fits_is_taken_as_it_is_and_another_copied() -> None:
    fitting = aligned_zeros(40)
    assert aligned(fitting) is fitting
    for other in (fitting[1:], fitting[:32:2], read_only(fitting)):
        copy = aligned(other)
        assert not np.shares_memory(copy, fitting)
        assert copy.ctypes.data % 64 == 0 and copy.flags.writeable
