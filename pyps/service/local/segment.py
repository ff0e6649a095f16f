"""A worker's memory in the server's address space."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock

from pyps import logs
from pyps.core.plan import SharedMemory
from pyps_wire.errors import BadRequest

NONCE_BYTES = 8

# Of Linux's fcntl.h; Python names them on Linux only, and not all.
_F_GET_SEALS = 1034
# Against further seals, shrinking and growing.
_SEALED = 0x1 | 0x2 | 0x4
# Against writing, and against writing by whoever maps it from now on.
_READ_ONLY = 0x8 | 0x10

# The unit of st_blocks.
_BLOCK_BYTES = 512
# Below, it is unmapped at once; a large one takes as long as a fifth of a second a GiB.
AT_ONCE_BYTES = 4 * 2**20
# In pieces: each keeps the process from mapping memory while it lasts.
_PIECE_BYTES = 64 * 2**20

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

log = logs.get("pyps.service")


class Segment(SharedMemory):
    """Mapped memory that its worker can neither shrink nor grow, so that touching it cannot end the server.

    It stays mapped until it is closed and nobody holds it. Every method may be called from any thread.
    """

    def __init__(self, descriptor: int, *, num_bytes: int, hand_over: Callable[[Callable[[], None]], None]):
        """Maps a descriptor's memory; BadRequest where it is not what it has to be. The descriptor can be closed.

        `hand_over` lets a thread do what takes long.
        """
        require_sealed(descriptor, num_bytes=num_bytes)
        try:
            self._memory = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise BadRequest(f"the segment of {num_bytes} bytes cannot be mapped: {error.strerror}") from None
        self.num_bytes = num_bytes
        self._hand_over = hand_over
        self._views: list[memoryview] = []
        self._lock = Lock()
        # Guarded by _lock. Whoever closes it is one.
        self._num_users = 1
        # Done once it is closed and nobody touches the memory any more.
        self.unused: Future[None] = Future()
        # So that nobody who waits for it can cancel it.
        self.unused.set_running_or_notify_cancel()

    @property
    def nonce(self) -> int:
        """The number that the worker wrote at the very beginning."""
        return int.from_bytes(self._memory[:NONCE_BYTES], "little")

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """A stretch of the memory; not to be used any more once the segment is closed, unless one holds it."""
        with memoryview(self._memory) as whole:
            view = whole[offset : offset + num_bytes]
        self._views.append(view)
        return view

    def hold(self) -> None:
        """Keeps the memory mapped until it is let go; ServerUnavailable where it is closed already."""
        with self._lock:
            self.require_attached()
            self._num_users += 1

    def let_go(self) -> None:
        """Ends one's hold; the last unmaps the memory."""
        with self._lock:
            self._num_users -= 1
            last = self._num_users == 0
        if not last:
            return
        self.unused.set_result(None)
        if self.num_bytes < AT_ONCE_BYTES:
            self._unmap()
        else:
            self._hand_over(self._unmap)

    def close(self) -> None:
        """Unmaps the memory, now or when nobody holds it any more. May be called again."""
        with self._lock:
            attached, self.attached = self.attached, False
        if attached:
            self.let_go()

    def _unmap(self) -> None:
        try:
            for view in self._views:
                view.release()
            _forget_pages(self._memory, self.num_bytes)
            self._memory.close()
        except BufferError:
            # It goes when whoever holds a part of it lets go.
            log.warning("a worker's memory is still in use after its last request", bytes=self.num_bytes)


def _forget_pages(memory: mmap.mmap, num_bytes: int) -> None:
    """Takes the pages out of this process, which is what takes long; mmap's own close would stop all threads for it."""
    begin = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(begin)
    del begin
    for offset in range(0, num_bytes, _PIECE_BYTES):
        _LIBC.madvise(address + offset, min(_PIECE_BYTES, num_bytes - offset), mmap.MADV_DONTNEED)


def require_sealed(descriptor: int, *, num_bytes: int) -> None:
    """Refuses what a worker could take away under the server's hands, or what the server could not write."""
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        raise BadRequest("the descriptor that came with Attach is no memfd: only such memory can be sealed") from None
    if seals & _SEALED != _SEALED or seals & _READ_ONLY:
        raise BadRequest(
            f"the segment's seals are {seals:#x}: seal it against shrinking, growing and further seals ({_SEALED:#x}),"
            " and not against writing"
        )
    status = os.fstat(descriptor)
    if status.st_size != num_bytes:
        raise BadRequest(f"the segment has {status.st_size} bytes, and Attach says {num_bytes}")
    if (page := os.fstatvfs(descriptor).f_bsize) != mmap.PAGESIZE:
        # Where huge pages run out, whoever touches one that is missing is killed.
        raise BadRequest(f"the segment lies in pages of {page} bytes; expected ordinary ones of {mmap.PAGESIZE}")
    if (allocated := status.st_blocks * _BLOCK_BYTES) < num_bytes:
        # Who touches a page first is charged for it: no caller makes the server allocate memory.
        raise BadRequest(
            f"{allocated} of the segment's {num_bytes} bytes are there: allocate it in full (posix_fallocate) first"
        )
