"""glibc's allocator: keep the memory of large messages mapped, and return memory that is not needed again."""

from __future__ import annotations

import ctypes
import functools
import os

# glibc's names for the settings, in malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

# Smaller blocks come from the heap (glibc accepts no larger limit), of which so many free bytes stay mapped.
HEAP_BLOCK_BYTES_MAX = 32 << 20
FREE_BYTES_MAX = 256 << 20


@functools.cache
def keep_large_blocks(*, shared: bool = False) -> bool:
    """Make glibc's allocator keep freed blocks of messages mapped. Return whether it accepted.

    By default glibc maps each block of a few MiB again, and every page of it faults and is zeroed: for a stream of
    4 MiB messages that is the largest part of their cost. The user's MALLOC_ variables take precedence.

    Args:
        shared: Make all threads use one heap, so that one can reuse blocks of another. Call it before they start.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ) or not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {_M_MMAP_THRESHOLD: HEAP_BLOCK_BYTES_MAX, _M_TRIM_THRESHOLD: FREE_BYTES_MAX}
    if shared:
        settings[_M_ARENA_MAX] = 1
    return all(mallopt(setting, value) == 1 for setting, value in settings.items())


def give_back_free_memory() -> bool:
    """Return the pages of freed blocks to the system, which glibc would keep. Return whether the allocator did."""
    return _is_glibc() and ctypes.CDLL(None).malloc_trim(0) == 1


def _is_glibc() -> bool:
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        return False
    return (version or "").startswith("glibc")
