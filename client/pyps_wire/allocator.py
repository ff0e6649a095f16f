"""Keeps the blocks of large messages mapped between two of them: fresh pages cost more than the messages do.

And gives back what is as large as a model and is not wanted again.
"""

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
    """Tells glibc's allocator to keep freed blocks of messages; once a process. True where it was told.

    By itself glibc maps each block of a few MiB anew, and every page of it faults and is zeroed: for a stream of
    4 MiB messages that is the largest part of their cost. Whoever set MALLOC_ variables knows better and keeps his
    settings; elsewhere than on glibc nothing happens.

    `shared` makes all threads take their blocks from one heap: where messages go from thread to thread, what one of
    them frees serves the others. To be called before they begin.
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
    """Hands the pages of freed blocks to the system, wherever they lie; True where that was told.

    For what was freed for good: glibc keeps the holes between blocks that are still in use, and with
    `keep_large_blocks` many of a model's tensors lie there.
    """
    return _is_glibc() and ctypes.CDLL(None).malloc_trim(0) == 1


def _is_glibc() -> bool:
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        return False
    return (version or "").startswith("glibc")
