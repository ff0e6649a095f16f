"""glibc's allocator: keep the memory of large messages mapped, and return what is no longer needed."""

from __future__ import annotations

import ctypes
import functools
import os

# glibc's names for the settings, in malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

# Blocks below the first (glibc takes no more) come from the heap; so much of it stays mapped while it is free.
HEAP_BLOCK_BYTES_MAX = 32 << 20
FREE_BYTES_MAX = 256 << 20


@functools.cache
def keep_large_blocks(*, shared: bool = False) -> bool:
    """Make glibc's allocator keep freed blocks of messages mapped. Return whether it accepted.

    By default glibc maps each block of a few MiB again, and every page of it faults and is zeroed: for a stream of
    4 MiB messages that is the largest part of their cost. MALLOC_ variables of the user take precedence. Other C
    libraries are left alone.

    Args:
        shared: Make all threads use one heap, so that a block that one thread frees serves another. Call it before
            the threads begin.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    if not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {_M_MMAP_THRESHOLD: HEAP_BLOCK_BYTES_MAX, _M_TRIM_THRESHOLD: FREE_BYTES_MAX}
    if shared:
        settings[_M_ARENA_MAX] = 1
    return all(mallopt(setting, value) == 1 for setting, value in settings.items())


def give_back_free_memory() -> bool:
    """Return the pages of freed blocks to the system. Return whether the allocator did.

    For memory that is not needed again: glibc keeps the holes between blocks in use, and with `keep_large_blocks` many
    of a model's tensors lie there.
    """
    return _is_glibc() and ctypes.CDLL(None).malloc_trim(0) == 1


def _is_glibc() -> bool:
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        return False
    return (version or "").startswith("glibc")
