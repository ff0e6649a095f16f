"""How float32 vectors become what travels, a shard at a time, and come back."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyps_wire.codecs import decode_into, encode


class Converter(Protocol):
    """Rounds float32 to a codec's words, to nearest and ties to even, and back. Several threads may call it at once."""

    def encode(self, values: npt.NDArray[np.float32], codec: int) -> memoryview:
        """The contiguous values as they travel."""

    def decode(self, payload: memoryview, codec: int, place: npt.NDArray[np.float32]) -> None:
        """Writes what came into its place, which has its length."""


class NumpyConverter:
    """Conversion with what every client has."""

    def encode(self, values: npt.NDArray[np.float32], codec: int) -> memoryview:
        return encode(values, codec)

    def decode(self, payload: memoryview, codec: int, place: npt.NDArray[np.float32]) -> None:
        decode_into(payload, codec, place)


NUMPY = NumpyConverter()
