"""A safetensors file, written and read piece by piece, so that a model is never in memory twice.

The format: 8 bytes little-endian length of the header, the header in JSON (name to dtype, shape, offsets),
padded with spaces to a multiple of 8, then the tensors' bytes in the order of the header, without holes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from io import BufferedIOBase
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pyps.core.arrays import Floats, aligned_zeros


class Writable(Protocol):
    def write(self, data: bytes | memoryview, /) -> Any: ...


FLOAT32 = np.dtype("<f4")


class TensorFile:
    """Writes a safetensors file of float32 tensors: names and shapes first, then values."""

    def __init__(
        self,
        file: Writable,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        metadata: Mapping[str, str] | None = None,
    ):
        self._file = file
        self._sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        self._missing = self._expected()
        self._name, self._left = next(self._missing, ("", 0))
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for name, shape in shapes.items():
            end = offset + FLOAT32.itemsize * self._sizes[name]
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, values: npt.NDArray[Any]) -> None:
        """Append values of the named tensor, all or the next part of them."""
        if not values.size:
            return
        assert name == self._name, f"{self._name!r} comes next, not {name!r}"
        assert values.size <= self._left, f"{name!r} has {self._left} values left, not {values.size}"
        self._file.write(np.ascontiguousarray(values, dtype=FLOAT32).reshape(-1).data.cast("B"))
        self._left -= values.size
        if not self._left:
            self._name, self._left = next(self._missing, ("", 0))

    @property
    def complete(self) -> bool:
        """Whether every value was written."""
        return not self._name

    def _expected(self) -> Iterator[tuple[str, int]]:
        # Tensors without values are never written.
        return ((name, size) for name, size in self._sizes.items() if size)


# As in the library.
_HEADER_BYTES_MAX = 100_000_000


class TensorReader:
    """Reads tensors of a safetensors file straight into arrays as shards need them.

    The library would map the file as well, which counts as the model's memory once more.
    """

    def __init__(self, file: BufferedIOBase):
        """Read the header. Raises ValueError where it is none."""
        self._file = file
        size = int.from_bytes(file.read(8), "little")
        if size > _HEADER_BYTES_MAX:
            raise ValueError(f"a header of {size} bytes")
        try:
            header = json.loads(file.read(size))
        except RecursionError:
            raise ValueError("a header that is nested too deeply") from None
        if not isinstance(header, dict):
            raise ValueError("a header that is no object")
        self._header = header
        self._start = 8 + size

    def read(self, name: str) -> Floats:
        """Return the values of a float32 tensor in one row. Raises ValueError where the file does not hold them."""
        try:
            kind, (begin, end) = self._header[name]["dtype"], self._header[name]["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise ValueError("there is no such tensor") from None
        size = FLOAT32.itemsize
        if kind != "F32" or not (type(begin) is type(end) is int and 0 <= begin <= end and (end - begin) % size == 0):
            raise ValueError(f"it is {kind!r} from {begin!r} to {end!r}, not float32")
        self._file.seek(0, 2)
        if self._start + end > self._file.tell():
            raise ValueError("the file ends before it")
        values = aligned_zeros((end - begin) // size)
        self._file.seek(self._start + begin)
        if self._file.readinto(values.view(np.uint8).data) != end - begin:
            raise ValueError("the file ends before it")
        return values
