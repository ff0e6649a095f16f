"""Writes a safetensors file piece by piece, so that a model is never in memory twice.

The format: 8 bytes little-endian length of the header, the header in JSON (name to dtype, shape, offsets),
padded with spaces to a multiple of 8, then the tensors' bytes in the order of the header, without holes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Writable(Protocol):
    """What a TensorFile writes to."""

    def write(self, data: bytes | memoryview, /) -> Any:
        """Appends the data."""


class TensorFile:
    """A safetensors file of float32 tensors in the making: names and shapes first, then values."""

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
            end = offset + 4 * self._sizes[name]
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, values: Floats) -> None:
        """Appends values of the named tensor, all or the next part of them."""
        if not values.size:
            return
        assert name == self._name, f"{self._name!r} comes next, not {name!r}"
        assert values.size <= self._left, f"{name!r} has {self._left} values left, not {values.size}"
        self._file.write(np.ascontiguousarray(values, dtype="<f4").reshape(-1).data.cast("B"))
        self._left -= values.size
        if not self._left:
            self._name, self._left = next(self._missing, ("", 0))

    @property
    def complete(self) -> bool:
        """Whether every value was written."""
        return not self._name

    def _expected(self) -> Iterator[tuple[str, int]]:
        # A tensor without values has nothing to wait for.
        return ((name, size) for name, size in self._sizes.items() if size)
