"""Conversion of shards by torch, which has it vectorised."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from pyps_wire.common_pb2 import CODEC_BFLOAT16, CODEC_FLOAT16, CODEC_FLOAT32

# Each codec's type.
DTYPES: Mapping[int, torch.dtype] = {
    CODEC_FLOAT32: torch.float32,
    CODEC_FLOAT16: torch.float16,
    CODEC_BFLOAT16: torch.bfloat16,
}


def dtype_name(dtype: str | torch.dtype | None) -> str | None:
    """The name under which a codec is asked for, of torch's type too."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


class TorchConverter:
    """A session's converter (`pyps_client.conversion.Converter`): the same bits as numpy's in a part of the time."""

    def encode(self, values: npt.NDArray[np.float32], codec: int) -> memoryview:
        return torch.from_numpy(values).to(DTYPES[codec]).view(torch.int16).numpy().data

    def decode(self, payload: memoryview, codec: int, place: npt.NDArray[np.float32]) -> None:
        if len(place):
            torch.from_numpy(place).copy_(_words(payload, DTYPES[codec]))


def _words(payload: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A payload as a tensor, in place and at any alignment; only to be read, of which torch has no notion."""
    address = np.frombuffer(payload, np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * payload.nbytes).from_address(address), dtype=dtype)
