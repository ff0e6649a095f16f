"""How float32 vectors become what travels, a shard at a time, and come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_wire.codecs import Codec


class Converter:
    """Makes of float32 what travels, and back, with what every client has. Several threads may call it at once."""

    def encode(self, values: npt.NDArray[np.float32], codec: Codec) -> memoryview:
        """The contiguous values as they travel."""
        return codec.encode(values)

    def decode(self, payload: memoryview, codec: Codec, place: npt.NDArray[np.float32]) -> None:
        """Writes what came into its place, which has its length."""
        codec.decode_into(payload, place)

    def encoded(self, values: npt.NDArray[Any], codec: Codec) -> memoryview:
        """Contiguous values as they travel: float32 is converted, words of the codec stay as they are."""
        return values.view(np.uint8).data if values.dtype == codec.dtype else self.encode(values, codec)


NUMPY = Converter()
