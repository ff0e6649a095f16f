"""Memory that numpy and torch both use: views of vectors, pages that a GPU copies from, converted shards."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pyps_client.log import logger
from pyps_client.vectors import Converter
from pyps_wire.codecs import Codec


def tensor_over(vector: npt.NDArray[Any]) -> torch.Tensor:
    """Return a torch view of a vector; uint16 are the bits of bfloat16, which numpy lacks."""
    if vector.dtype == np.uint16:
        return torch.from_numpy(vector.view(np.int16)).view(torch.bfloat16)
    # The words of another codec would be taken for whole numbers.
    assert vector.dtype.kind == "f", f"torch has no numbers for words of {vector.dtype}"
    return torch.from_numpy(vector)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether numpy could have a view of all of it: no subclass, no sparse tensor, nothing on a device."""
    kinds = (torch.nn.Parameter, torch.Tensor)
    return type(tensor) in kinds and tensor.device.type == "cpu" and tensor.layout == torch.strided


def recorded_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


# cudaHostRegisterPortable: the pages serve all GPUs of the process.
_PORTABLE = 1


class PinnedPages:
    """Arrays whose pages CUDA has pinned, until `release`. Where it cannot, copies are only slower."""

    def __init__(self, arrays: Iterable[npt.NDArray[Any]], devices: Sequence[torch.device]) -> None:
        """`arrays`: each on pages of its own. `devices`: the GPUs that copy; without one nothing is pinned."""
        self._devices = devices
        self._runtime: Any
        if devices:
            self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # Held until their pages are unregistered.
        self._registered: list[npt.NDArray[Any]] = []
        for array in (array for array in arrays if devices and array.size):
            error = int(self._runtime.cudaHostRegister(array.ctypes.data, array.nbytes, _PORTABLE))
            if error == 0:
                self._registered.append(array)
                continue
            logger.info(
                "%s bytes of memory cannot be pinned (CUDA error %d): copies between them and the GPU are slower",
                *(f"{array.nbytes:,}", error),
            )
            self._clear_last_error()

    def release(self) -> None:
        """Unregister the pages, once no copy is under way."""
        try:
            for device in self._devices:
                torch.cuda.synchronize(device)
        except RuntimeError as failure:
            # A GPU that has failed answers nothing, and its error was raised elsewhere.
            logger.debug("memory stays pinned: %s", failure)
            return
        for array in self._registered:
            error = int(self._runtime.cudaHostUnregister(array.ctypes.data))
            if error != 0:
                logger.debug("the memory at %#x was not unpinned (CUDA error %d)", array.ctypes.data, error)
                self._clear_last_error()
        self._registered = []

    def _clear_last_error(self) -> None:
        """Clear the error that CUDA keeps, which the next kernel's launch would raise."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._devices[0])


def torch_dtype(codec: Codec) -> torch.dtype | None:
    """Return torch's type of a codec's words, which has the codec's name; None without one."""
    return None if codec.dtype is None else getattr(torch, codec.name, None)


class TorchConverter(Converter):
    """Converts faster than numpy, to the same bits, where torch has the type."""

    def encode(self, values: npt.NDArray[np.float32], codec: Codec) -> memoryview:
        dtype = torch_dtype(codec)
        if dtype is None or not len(values):
            return super().encode(values, codec)
        return torch.from_numpy(values).to(dtype).view(torch.uint8).numpy().data

    def decode(self, payload: memoryview, codec: Codec, place: npt.NDArray[np.float32]) -> None:
        dtype = torch_dtype(codec)
        if dtype is None or not len(place):
            super().decode(payload, codec, place)
            return
        # Read in place: the payload may be read-only, and at any alignment.
        address = np.frombuffer(payload, np.uint8).ctypes.data
        words = (ctypes.c_uint8 * payload.nbytes).from_address(address)
        torch.from_numpy(place).copy_(torch.frombuffer(words, dtype=dtype))
