"""Float32 arrays for the kernels: one-dimensional, contiguous, starting on a cache line."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

CACHE_LINE_BYTES = 64


def aligned_zeros(length: int) -> Floats:
    """Return `length` zeros whose first byte lies on a cache line."""
    size = length * np.dtype(np.float32).itemsize
    memory = np.zeros(size + CACHE_LINE_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % CACHE_LINE_BYTES
    return memory[start : start + size].view(np.float32)


def aligned_copy(values: Floats) -> Floats:
    """Return an aligned array of the same values, which shares no memory with them."""
    # An assignment would convert another type silently.
    assert values.dtype == np.float32 and values.ndim == 1, (values.dtype, values.shape)
    copy = aligned_zeros(values.size)
    copy[:] = values
    return copy


def aligned(values: Floats) -> Floats:
    """Return the array itself where a shard can work on it, else an aligned copy."""
    flags = values.flags
    fits = values.dtype == np.float32 and values.ndim == 1 and flags.c_contiguous and flags.writeable
    return values if fits and values.ctypes.data % CACHE_LINE_BYTES == 0 else aligned_copy(values)


def read_only(values: Floats) -> Floats:
    """Return a view through which the values cannot be changed."""
    view = values.view()
    view.flags.writeable = False
    return view
