"""Conversion of shards by torch, which has it vectorised."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from pyps_client.conversion import Converter
from pyps_wire.codecs import Codec


def torch_dtype(codec: Codec) -> torch.dtype | None:
    """The type of a codec's words, which torch calls as the contract does; None where there is none."""
    return None if codec.dtype is None else getattr(torch, codec.name, None)


def dtype_name(dtype: str | torch.dtype | None) -> str | None:
    """The name under which a codec is asked for, of torch's type too."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


class TorchConverter(Converter):
    """A session's converter: the same bits as numpy's in a part of the time, where torch has the type."""

    def encode(self, values: npt.NDArray[np.float32], codec: Codec) -> memoryview:
        dtype = torch_dtype(codec)
        if dtype is None or not len(values):
            return super().encode(values, codec)
        return torch.from_numpy(values).to(dtype).view(torch.uint8).numpy().data

    def decode(self, payload: memoryview, codec: Codec, place: npt.NDArray[np.float32]) -> None:
        dtype = torch_dtype(codec)
        if dtype is None or not len(place):
            super().decode(payload, codec, place)
        else:
            torch.from_numpy(place).copy_(_words(payload, dtype))


def _words(payload: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A payload as a tensor, in place and at any alignment; only to be read, of which torch has no notion."""
    address = np.frombuffer(payload, np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * payload.nbytes).from_address(address), dtype=dtype)
