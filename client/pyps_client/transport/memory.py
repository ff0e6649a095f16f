"""The flat vectors of a worker's gradients and parameters, in memory that servers on its machine may share."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client.vectors import dtype_of
from pyps_wire.codecs import Codec
from pyps_wire.common_pb2 import Sender
from pyps_wire.local_pb2 import LocalRequest, LocalVectors
from pyps_wire.partition import Model

# Vectors begin at multiples of a page: so a GPU's driver may pin them, and no two share a line of cache.
ALIGNMENT_BYTES = 4096
# Numbers begin behind a page that holds only a segment's nonce.
HEAD_BYTES = mmap.PAGESIZE


class Memory:
    num_bytes: int
    _memory: mmap.mmap

    def vector(self, offset: int, size: int, dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """Return the numbers that begin `offset` bytes from the start; they keep the memory mapped."""
        return np.frombuffer(self._memory, dtype, size, offset)


@dataclass(frozen=True)
class Lent:
    """The vectors of one session, one a parameter group."""

    # Where parameters arrive: in the pull codec's type (float32, float16, or uint16, bfloat16's bits), or float32.
    parameters: list[npt.NDArray[Any]]
    # One list a buffer, in the push codec's type or float32.
    gradients: list[list[npt.NDArray[Any]]]
    # True where no other process sees the memory: a forked child has a copy of its own.
    private: bool = False
    # The codec in which float32 gradients travel; None where they travel as they are.
    converted_to: Codec | None = None


class Layout:
    """The vectors' types, and their places in shared memory."""

    def __init__(
        self, model: Model, codec: Codec, pull_codec: Codec, gradient_buffers: int, *, converts: bool = False
    ) -> None:
        """`converts`: vectors in private memory are float32, converted when they are sent or received."""
        self.model = model
        self.codec = codec
        self.gradient_buffers = gradient_buffers
        self.converts = converts
        # One for each list of vectors: the gradients', then the parameters'.
        self.codecs = [codec] * gradient_buffers + [pull_codec]
        # Where each vector begins, list by list, and the size of all.
        self.offsets: list[list[int]] = []
        self.num_bytes = HEAD_BYTES
        for each in self.codecs:
            self.offsets.append([])
            for size in model.group_sizes:
                self.offsets[-1].append(self.num_bytes)
                self.num_bytes += -(-each.max_bytes(size) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Lending:
    def __init__(self, layout: Layout, memory: Memory | None = None) -> None:
        """`memory`: of `layout.num_bytes`; private memory without it."""
        self.memory = memory
        self._layout = layout
        converts = layout.converts and memory is None
        lists: list[list[npt.NDArray[Any]]] = []
        for codec, offsets in zip(layout.codecs, layout.offsets, strict=True):
            dtype = dtype_of(codec, converted=converts)
            places = zip(layout.model.group_sizes, offsets, strict=True)
            lists.append(
                [memory.vector(place, size, dtype) if memory else _aligned(size, dtype) for size, place in places]
            )
        converted_to = layout.codec if converts else None
        self.lent = Lent(lists[-1], lists[:-1], private=memory is None, converted_to=converted_to)

    def attach_request(self, sender: Sender, ticket: bytes) -> LocalRequest:
        assert self.memory is not None
        vectors = [
            LocalVectors(codec=codec, offsets=offsets)  # type: ignore[arg-type]
            for codec, offsets in zip(self._layout.codecs, self._layout.offsets, strict=True)
        ]
        request = LocalRequest()
        request.attach.sender.CopyFrom(sender)
        request.attach.ticket = ticket
        request.attach.segment_bytes = self.memory.num_bytes
        request.attach.gradients.extend(vectors[:-1])
        request.attach.parameters.CopyFrom(vectors[-1])
        return request


def _aligned(size: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    num_bytes = size * dtype.itemsize
    block = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -block.ctypes.data % ALIGNMENT_BYTES
    return block[start : start + num_bytes].view(dtype)
