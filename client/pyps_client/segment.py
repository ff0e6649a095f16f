"""Memory that a worker shares with the servers of its machine: one sealed, nameless file that lives in memory only."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import weakref

import numpy as np
import numpy.typing as npt

from pyps_client.fork import at_fork

# Numbers begin behind a page that holds only the nonce.
HEAD_BYTES = mmap.PAGESIZE


class Memory:
    """Memory for lent vectors, of this process alone: a forked child has a copy."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    @property
    def whole(self) -> memoryview:
        """All of it."""
        return memoryview(self._memory)

    def vector(self, offset: int, size: int, dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """The numbers that begin `offset` bytes from the start. The mapping lasts as long as such a vector."""
        return np.frombuffer(self._memory, dtype, size, offset)


class Segment(Memory):
    """A memfd sealed against shrinking and growing, mapped as a whole. It is gone when its last user is.

    A forked child's writes stay its own. Where it has not written it goes on to see what its parent and the servers
    write.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError where the system has no such thing, or not so much memory."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("pyps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, num_bytes)
            # All of it now: memory that is not there must be an error here, not the end of the process later.
            os.posix_fallocate(self.fd, 0, num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(self.fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(self.fd)
            raise
        self.nonce = secrets.randbits(64)
        self._memory[:8] = self.nonce.to_bytes(8, "little")
        self._close = weakref.finalize(self, os.close, self.fd)
        _segments.add(self)

    def keep_own_copy(self) -> None:
        """In a forked child: from now on writes stay in this process, and the file is let go."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        mapped = libc.mmap(address, self.num_bytes, protection, mmap.MAP_PRIVATE | _MAP_FIXED, self.fd, 0)
        if mapped != address and libc.mprotect(address, self.num_bytes, mmap.PROT_READ) != 0:
            # Without a copy to write to, a child that writes must end rather than spoil its parent's run.
            os.abort()
        self._close()


# The same on every Linux; Python has no name for it.
_MAP_FIXED = 0x10

_segments: weakref.WeakSet[Segment] = weakref.WeakSet()


def _after_fork() -> None:
    for segment in list(_segments):
        segment.keep_own_copy()


at_fork(after_in_child=_after_fork)
