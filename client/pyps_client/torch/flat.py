"""Flat vectors as torch sees them, and each tensor's place in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pyps_client.torch.layout import Block, Layout

# index of a tensor -> its place in a flat vector
Places = Mapping[int, torch.Tensor]


def tensor_over(vector: npt.NDArray[Any]) -> torch.Tensor:
    """A vector's memory as torch sees it, not copied; uint16 are the bits of bfloat16, which numpy lacks."""
    if vector.dtype == np.uint16:
        return torch.from_numpy(vector.view(np.int16)).view(torch.bfloat16)
    # Words of another codec would be taken for whole numbers.
    assert vector.dtype.kind == "f", f"torch has no numbers for words of {vector.dtype}"
    return torch.from_numpy(vector)


def places_in(layout: Layout, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor's place in its group's vector."""
    return [
        place(flat[tensor.group], offset, parameter)
        for tensor, offset, parameter in zip(layout.model.tensors, layout.group_offsets, layout.parameters, strict=True)
    ]


def places_of_block(
    block: Block, flat: torch.Tensor | None, parameters: Sequence[torch.Tensor], on_host: Sequence[torch.Tensor]
) -> Places:
    """The places of a block's tensors in its own buffer, or on the host where the block has none."""
    if flat is None:
        return {index: on_host[index] for index in block.offsets}
    return {index: place(flat, offset, parameters[index]) for index, offset in block.offsets.items()}


def place(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's place in a flat buffer, in its shape: logical order, whatever its memory format."""
    return flat.narrow(0, offset, parameter.numel()).view(parameter.shape)


def own_place(layout: Layout, vectors: Sequence[npt.NDArray[Any]], index: int) -> torch.Tensor:
    """A tensor's place in its group's vector, as a torch storage of its own over that memory alone.

    So the tensor may be saved, or moved into memory of its own, without the vector's other tensors.
    """
    parameter, offset = layout.parameters[index], layout.group_offsets[index]
    vector = vectors[layout.model.tensors[index].group]
    return tensor_over(vector[offset : offset + parameter.numel()]).view(parameter.shape)


def may_lie_in_vectors(layout: Layout, index: int) -> bool:
    """Whether a tensor's numbers, or its gradient's, could be read and written right in a float32 vector on the host.

    Shared buffers never are: the model moves them by itself.
    """
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
    """An event at the end of what the device's current stream was given so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
