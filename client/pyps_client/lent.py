"""Vectors that a session lends to its worker: where a server's machine is the worker's too, both see them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client.segment import HEAD_BYTES, Memory
from pyps_client.vectors import Vectors, dtype_of
from pyps_wire.codecs import Codec
from pyps_wire.common_pb2 import Sender
from pyps_wire.local_pb2 import LocalRequest, LocalVectors
from pyps_wire.partition import Model

# Vectors begin at multiples of a page: so a GPU's driver may pin them, and no two share a line of cache.
ALIGNMENT_BYTES = 4096


@dataclass(frozen=True)
class Lent:
    """The flat vectors of one session, one a parameter group; valid as long as somebody holds one of them."""

    # Where parameters arrive: in the type of the pull codec (float32, float16, or uint16, bfloat16's bits), or float32.
    parameters: list[npt.NDArray[Any]]
    # Where gradients leave from, in the push codec's type or float32: as many such lists as were asked for.
    gradients: list[list[npt.NDArray[Any]]]
    # True where no other process sees the memory: a forked child has a copy of its own.
    private: bool = False
    # The codec in which float32 gradients travel; None where all travel as they lie.
    converted_to: Codec | None = None


@dataclass(frozen=True)
class Layout:
    """Which vectors are lent: the model's groups, in what types, how often."""

    model: Model
    codec: Codec
    pull_codec: Codec
    gradient_buffers: int
    # Whether vectors that no other process sees are float32, converted on their way.
    converts: bool = False

    def lists(self) -> Iterator[Codec]:
        """The codec of each list of vectors: the gradients', then the parameters'."""
        yield from [self.codec] * self.gradient_buffers
        yield self.pull_codec


class Lending:
    """What one session has lent, in its own memory or in a segment."""

    def __init__(self, layout: Layout, segment: Memory | None = None) -> None:
        """In a segment of `segment_bytes(layout)`; without one in the process's own memory."""
        self.segment = segment
        self._layout = layout
        self._offsets = _offsets(layout)
        if segment is None:
            lists = _own_lists(layout)
            converted_to = layout.codec if layout.converts else None
            self.lent = Lent(lists[-1], lists[:-1], private=True, converted_to=converted_to)
        else:
            lists = _shared_lists(layout, segment, self._offsets)
            self.lent = Lent(lists[-1], lists[:-1])

    def index_of(self, vectors: Vectors) -> int | None:
        """Which of the lent gradients these are; None where they are others."""
        pairs = zip(count(), self.lent.gradients, strict=False)
        return next((index for index, lent in pairs if _same(vectors, lent)), None)

    def are_parameters(self, vectors: Vectors) -> bool:
        """Whether these are the lent parameters."""
        return _same(vectors, self.lent.parameters)

    def attach_request(self, sender: Sender, ticket: bytes) -> LocalRequest:
        """Says to a server where in the segment everything lies."""
        assert self.segment is not None
        vectors = [
            LocalVectors(codec=codec, offsets=offsets)  # type: ignore[arg-type]
            for codec, offsets in zip(self._layout.lists(), self._offsets, strict=True)
        ]
        request = LocalRequest()
        request.attach.sender.CopyFrom(sender)
        request.attach.ticket = ticket
        request.attach.segment_bytes = self.segment.num_bytes
        request.attach.gradients.extend(vectors[:-1])
        request.attach.parameters.CopyFrom(vectors[-1])
        return request


def segment_bytes(layout: Layout) -> int:
    """The size of a segment that holds the layout."""
    *_, (*_, last) = _offsets(layout)
    return last + _whole_pages(layout.model.group_sizes[-1], layout.pull_codec)


def _offsets(layout: Layout) -> list[list[int]]:
    """Where each vector begins in a segment, list by list."""
    offsets: list[list[int]] = []
    end = HEAD_BYTES
    for codec in layout.lists():
        offsets.append([])
        for size in layout.model.group_sizes:
            offsets[-1].append(end)
            end += _whole_pages(size, codec)
    return offsets


def _own_lists(layout: Layout) -> list[list[npt.NDArray[Any]]]:
    """The vectors, list by list, in the process's own memory."""
    dtypes = [dtype_of(codec, converted=layout.converts) for codec in layout.lists()]
    return [[_aligned(size, dtype) for size in layout.model.group_sizes] for dtype in dtypes]


def _shared_lists(layout: Layout, segment: Memory, offsets: list[list[int]]) -> list[list[npt.NDArray[Any]]]:
    """The vectors, list by list, where they begin in a segment."""
    return [
        [
            segment.vector(offset, size, dtype_of(codec, converted=False))
            for size, offset in zip(layout.model.group_sizes, of_list, strict=True)
        ]
        for codec, of_list in zip(layout.lists(), offsets, strict=True)
    ]


def _whole_pages(size: int, codec: Codec) -> int:
    return -(-codec.bytes_of(size) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _same(vectors: Vectors, lent: Vectors) -> bool:
    return vectors is lent or (len(vectors) == len(lent) and all(map(is_, vectors, lent)))


def _aligned(size: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    num_bytes = size * dtype.itemsize
    block = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -block.ctypes.data % ALIGNMENT_BYTES
    return block[start : start + num_bytes].view(dtype)
