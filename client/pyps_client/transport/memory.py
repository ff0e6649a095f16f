"""The flat vectors of a worker's gradients and parameters, and the memory that servers on its machine may share."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client.fork import tracked
from pyps_client.vectors import dtype_of
from pyps_wire.codecs import Codec
from pyps_wire.common_pb2 import Sender
from pyps_wire.local_pb2 import LocalRequest, LocalVectors
from pyps_wire.partition import Model

# Vectors begin at multiples of a page: so a GPU's driver may pin them, and no two share a line of cache.
ALIGNMENT_BYTES = 4096
# Numbers begin behind a page that holds only a segment's nonce.
HEAD_BYTES = mmap.PAGESIZE
# The same on every Linux; Python has no name for it.
_MAP_FIXED = 0x10


class Segment:
    """A memfd sealed against shrinking and growing, mapped as a whole. It is freed with its last user.

    Writes of a forked child are visible to the child alone.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raise OSError where the system has no memfd, or too little memory."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        # Windows has no such module.
        import fcntl

        self.num_bytes = num_bytes
        self.fd = os.memfd_create("pyps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, num_bytes)
            # Allocate all of it now: memory that is missing must be an error here, not the process's end later.
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

    def vector(self, offset: int, size: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return the numbers that begin `offset` bytes from the start; they keep the memory mapped."""
        return np.frombuffer(self._memory, dtype, size, offset)

    def keep_own_copy(self) -> None:
        """In a forked child: map the memory again, so that writes stay in this process, and close the file."""
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


@dataclass(frozen=True)
class Lent:
    """The vectors of one session, one a parameter group."""

    # Where parameters arrive: in the pull codec's type (float32, float16, or uint16, bfloat16's bits), or float32.
    parameters: list[npt.NDArray[Any]]
    # One list a buffer, in the push codec's type or float32.
    gradients: list[list[npt.NDArray[Any]]]
    # True where no other process sees the memory: a forked child has a copy of its own.
    private: bool = False
    # The codec in which float32 gradients are sent; None where they are sent as they are.
    converted_to: Codec | None = None
    # True where pulls add to the parameters: nothing else may write there.
    follows: bool = False


class Layout:
    """The vectors' types, and their places in a segment."""

    def __init__(
        self, model: Model, codec: Codec, pull_codec: Codec, gradient_buffers: int, *, converts: bool = False
    ) -> None:
        """`converts`: vectors in private memory are float32, converted when they are sent or received."""
        self.gradient_buffers = gradient_buffers
        self._sizes = model.group_sizes
        self._converts = converts
        # One for each list of vectors: the gradients', then the parameters'.
        self.codecs = [codec] * gradient_buffers + [pull_codec]
        # Where each vector begins, list by list, and the size of all.
        self._offsets: list[list[int]] = []
        self.num_bytes = HEAD_BYTES
        for each in self.codecs:
            self._offsets.append([])
            for size in self._sizes:
                self._offsets[-1].append(self.num_bytes)
                self.num_bytes += -(-each.max_bytes(size) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def vectors(self, segment: Segment | None = None) -> Lent:
        """Return the vectors, zeroed, in a segment of `num_bytes`; in private memory without one."""
        converts = self._converts and segment is None
        lists: list[list[npt.NDArray[Any]]] = []
        for codec, offsets in zip(self.codecs, self._offsets, strict=True):
            dtype = dtype_of(codec, converted=converts)
            places = zip(self._sizes, offsets, strict=True)
            lists.append(
                [segment.vector(place, size, dtype) if segment else _aligned(size, dtype) for size, place in places]
            )
        converted_to = self.codecs[0] if converts or self.codecs[0].dtype is None else None
        follows = self.codecs[-1].published
        return Lent(lists[-1], lists[:-1], private=segment is None, converted_to=converted_to, follows=follows)

    def attach_request(self, sender: Sender, ticket: bytes) -> LocalRequest:
        """Return the request that lets a server map the segment."""
        vectors = [
            LocalVectors(codec=codec, offsets=offsets)  # type: ignore[arg-type]
            for codec, offsets in zip(self.codecs, self._offsets, strict=True)
        ]
        request = LocalRequest()
        request.attach.sender.CopyFrom(sender)
        request.attach.ticket = ticket
        request.attach.segment_bytes = self.num_bytes
        request.attach.gradients.extend(vectors[:-1])
        request.attach.parameters.CopyFrom(vectors[-1])
        return request


def _aligned(size: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    num_bytes = size * dtype.itemsize
    block = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -block.ctypes.data % ALIGNMENT_BYTES
    return block[start : start + num_bytes].view(dtype)


_segments = tracked(after_in_child=Segment.keep_own_copy)
