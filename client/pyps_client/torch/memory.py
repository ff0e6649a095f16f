"""Memory that numpy and torch both see: tensors' places in flat vectors, pages a GPU copies from, converted shards."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pyps_client.log import logger
from pyps_client.torch.layout import Block, Layout
from pyps_client.vectors import Converter
from pyps_wire.codecs import Codec


def tensor_over(vector: npt.NDArray[Any]) -> torch.Tensor:
    """Return a torch view of a vector; uint16 are the bits of bfloat16, which numpy lacks."""
    if vector.dtype == np.uint16:
        return torch.from_numpy(vector.view(np.int16)).view(torch.bfloat16)
    # Words of another codec would be taken for whole numbers.
    assert vector.dtype.kind == "f", f"torch has no numbers for words of {vector.dtype}"
    return torch.from_numpy(vector)


def places_in(layout: Layout, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [
        place(flat[tensor.group], offset, parameter)
        for tensor, offset, parameter in zip(layout.model.tensors, layout.group_offsets, layout.parameters, strict=True)
    ]


def places_of_block(
    block: Block, flat: torch.Tensor | None, parameters: Sequence[torch.Tensor], on_host: Sequence[torch.Tensor]
) -> Mapping[int, torch.Tensor]:
    """Return the places of a block's tensors by index: in its own buffer, or on the host without one."""
    if flat is None:
        return {index: on_host[index] for index in block.offsets}
    return {index: place(flat, offset, parameters[index]) for index, offset in block.offsets.items()}


def place(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter's place in a flat buffer, in its shape: logical order, whatever its memory format."""
    return flat.narrow(0, offset, parameter.numel()).view(parameter.shape)


def own_place(layout: Layout, vectors: Sequence[npt.NDArray[Any]], index: int) -> torch.Tensor:
    """Return a tensor's place in its group's vector, as a storage of its own: it is saved without the other tensors."""
    parameter, offset = layout.parameters[index], layout.group_offsets[index]
    vector = vectors[layout.model.tensors[index].group]
    return tensor_over(vector[offset : offset + parameter.numel()]).view(parameter.shape)


def may_lie_in_vectors(layout: Layout, index: int) -> bool:
    """Return whether a tensor, or its gradient, can lie in a float32 vector on the host: the model moves buffers."""
    parameter = layout.parameters[index]
    return (
        index < layout.first_buffer
        and index not in layout.apart
        and type(parameter) in (torch.nn.Parameter, torch.Tensor)
        and parameter.device.type == "cpu"
        and parameter.dtype == torch.float32
        and parameter.layout == torch.strided
        and parameter.is_contiguous()
        and parameter.numel() > 0
    )


def recorded_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


# The pages serve all GPUs of the process.
_PORTABLE = 1


class PinnedPages:
    """Arrays whose pages CUDA has pinned, until `release`. Where it cannot, copies are only slower."""

    def __init__(self, arrays: Iterable[npt.NDArray[Any]], devices: Sequence[torch.device]) -> None:
        """`devices`: those that copy."""
        self._devices = devices
        # Held until the pages are unregistered.
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
        """Unregister the pages, once no copy is under way."""
        try:
            for device in self._devices:
                torch.cuda.synchronize(device)
        except RuntimeError as failure:
            # A GPU that has failed answers nothing, and its error was raised elsewhere.
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
        """Clear the error that CUDA keeps, which the next kernel's launch would raise."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._devices[0])


def whole_pages(arrays: Iterable[npt.NDArray[Any]]) -> list[tuple[int, int]]:
    """Return the address ranges of whole pages that arrays lie on, disjoint and in order: CUDA registers none twice."""
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
        else:
            torch.from_numpy(place).copy_(_words(payload, dtype))


def _words(payload: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return a payload as a tensor, in place and at any alignment. Do not write to it."""
    address = np.frombuffer(payload, np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * payload.nbytes).from_address(address), dtype=dtype)
