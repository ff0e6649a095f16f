"""Pages of the host's memory that a GPU may copy from and to by itself."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy.typing as npt
import torch

from pyps_client.log import logger

# The pages serve all GPUs of the process.
_PORTABLE = 1


class PinnedPages:
    """Registers the pages of some arrays with CUDA until `release`. Where CUDA will not, copies are only slower."""

    def __init__(self, arrays: Iterable[npt.NDArray[Any]], devices: Sequence[torch.device]) -> None:
        """`devices`: those that copy."""
        self._devices = devices
        # The arrays' memory must not go before the registration.
        self._arrays = list(arrays)
        self._registered: list[int] = []
        for begin, end in whole_pages(self._arrays):
            error = int(_runtime().cudaHostRegister(begin, end - begin, _PORTABLE))
            if error == 0:
                self._registered.append(begin)
                continue
            logger.info(
                "%d MiB of memory cannot be pinned (CUDA error %d): copies between them and the GPU are slower",
                *((end - begin) >> 20, error),
            )
            self._clear_last_error()

    def release(self) -> None:
        """Unregisters the pages, once no copy is under way."""
        try:
            for device in self._devices:
                torch.cuda.synchronize(device)
        except RuntimeError as failure:
            # A GPU that has failed answers nothing any more, and what went wrong was raised elsewhere.
            logger.debug("memory stays pinned: %s", failure)
            return
        for begin in self._registered:
            error = int(_runtime().cudaHostUnregister(begin))
            if error != 0:
                logger.debug("the memory at %#x was not unpinned (CUDA error %d)", begin, error)
                self._clear_last_error()
        self._registered = []
        self._arrays = []

    def _clear_last_error(self) -> None:
        """Takes back the error that CUDA keeps for whoever asks next, which would be an innocent kernel's launch."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._devices[0])


def whole_pages(arrays: Iterable[npt.NDArray[Any]]) -> list[tuple[int, int]]:
    """The stretches of whole pages that arrays lie on, apart from each other and in order: addresses, the end excluded.

    CUDA registers pages, and none twice.
    """
    size = mmap.PAGESIZE
    touched = sorted(
        (array.ctypes.data // size * size, -(-(array.ctypes.data + array.nbytes) // size) * size)
        for array in arrays
        if array.nbytes
    )
    merged: list[tuple[int, int]] = []
    for begin, end in touched:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
