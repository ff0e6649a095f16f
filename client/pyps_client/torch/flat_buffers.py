"""Flat buffers between a torch model and the wire: one for parameters, and those that gradients gather in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pyps_client.torch.layout import Block, Layout
from pyps_wire.errors import BadRequest

# torch's dtype for each codec.
WIRE_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class ParameterBuffer:
    """The parameters as last pulled, one float32 vector a group on the host, and the way into the model.

    Between two calls of `write` the vectors may be rewritten by another thread, from `wait_until_free` on.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._host = [_host_vector(size, torch.float32, layout) for size in layout.model.group_sizes]
        # Numpy views of the host vectors: what a session pulls into.
        self.vectors: list[npt.NDArray[np.float32]] = [vector.numpy() for vector in self._host]
        self._host_views = [
            _view(self._host[tensor.group], offset, parameter)
            for tensor, offset, parameter in zip(
                layout.model.tensors, layout.group_offsets, layout.parameters, strict=True
            )
        ]
        # On a device, the vectors arrive in one piece and are spread from there.
        self._staging = [
            None if block.device.type == "cpu" else torch.empty(block.length, device=block.device)
            for block in layout.blocks
        ]
        self._views = [
            _views(block, staging, layout.parameters, self._host_views)
            for block, staging in zip(layout.blocks, self._staging, strict=True)
        ]
        self._events: list[torch.cuda.Event] = []

    @torch.no_grad()
    def read(self) -> list[npt.NDArray[np.float32]]:
        """The model's own values, one new float32 vector a group."""
        vectors = [torch.empty(size) for size in self._layout.model.group_sizes]
        for tensor, offset, parameter in zip(
            self._layout.model.tensors, self._layout.group_offsets, self._layout.parameters, strict=True
        ):
            _view(vectors[tensor.group], offset, parameter).copy_(parameter)
        return [vector.numpy() for vector in vectors]

    @torch.no_grad()
    def write(self) -> None:
        """Writes the vectors into the model's parameters, in place."""
        parameters = self._layout.parameters
        for block, staging, views in zip(self._layout.blocks, self._staging, self._views, strict=True):
            if staging is not None:
                for stretch in block.stretches:
                    source = self._host[block.group].narrow(0, stretch.group_offset, stretch.length)
                    staging.narrow(0, stretch.block_offset, stretch.length).copy_(source, non_blocking=block.on_cuda)
            for batch in block.batches:
                torch._foreach_copy_([parameters[index] for index in batch], [views[index] for index in batch])
            if block.on_cuda:
                self._events.append(_recorded_event(block.device))

    def float32_of(self, index: int) -> torch.Tensor:
        """A tensor's values as last written, in float32 and on its device; good until the next pull."""
        return next(views[index] for views in self._views if index in views)

    def wait_until_free(self) -> None:
        """Returns once copies out of the vectors have ended, so that they may be rewritten."""
        while self._events:
            self._events.pop().synchronize()

    def tensors_of(self, vectors: Sequence[npt.NDArray[np.float32]]) -> dict[str, torch.Tensor]:
        """The tensors that lie in such vectors, by name, on the CPU; views of the vectors."""
        flat = [torch.from_numpy(vector) for vector in vectors]
        return {
            tensor.name: _view(flat[tensor.group], offset, parameter)
            for tensor, offset, parameter in zip(
                self._layout.model.tensors, self._layout.group_offsets, self._layout.parameters, strict=True
            )
        }


class GradientBuffer:
    """Gradients of one or more minibatches, summed tensor by tensor, and their form on the wire.

    Tensors without a gradient are absent, which is not a gradient of zero. Gathers in float32 on the
    parameters' device; `seal` converts there and brings the result to the host.
    """

    def __init__(self, layout: Layout, codec: str) -> None:
        if codec not in WIRE_DTYPES:
            raise BadRequest(f"gradient_dtype is {codec!r}; expected one of {', '.join(WIRE_DTYPES)}.")
        self._layout = layout
        self._dtype = WIRE_DTYPES[codec]
        self._host = [_host_vector(size, self._dtype, layout) for size in layout.model.group_sizes]
        # What a session pushes, one a group; valid after seal() and ready().
        self.vectors: list[npt.NDArray[Any]] = [_numpy_view(vector) for vector in self._host]
        self._flat = [self._block_buffer(block) for block in layout.blocks]
        # Converted on the device, so that only the wire's type crosses the bus.
        self._wire = [
            torch.empty_like(flat, dtype=self._dtype)
            if flat is not None and flat.device.type != "cpu" and self._dtype != torch.float32
            else flat
            for flat in self._flat
        ]
        host_views = [
            _view(self._host[tensor.group], offset, parameter)
            for tensor, offset, parameter in zip(
                layout.model.tensors, layout.group_offsets, layout.parameters, strict=True
            )
        ]
        self._views = [
            _views(block, flat, layout.parameters, host_views)
            for block, flat in zip(layout.blocks, self._flat, strict=True)
        ]
        self._events: list[torch.cuda.Event] = []
        # What the numbers of each group mean, as a session takes it.
        self.kinds = layout.kinds
        self.present = [False] * len(layout.parameters)
        self.minibatch_count = 0
        self.example_count = 0
        # Versions of the parameters that the first and the newest of the minibatches were computed on.
        self.base_versions: Mapping[int, int] = {}
        self.newest_base_versions: Mapping[int, int] = {}

    @torch.no_grad()
    def add(
        self, gradients: Sequence[torch.Tensor | None], *, versions: Mapping[int, int], example_count: int = 0
    ) -> None:
        """Adds one minibatch's gradients, which were computed on parameters of these versions."""
        for block, views in zip(self._layout.blocks, self._views, strict=True):
            for batch in block.batches:
                given = [(index, gradient) for index in batch if (gradient := gradients[index]) is not None]
                first = [pair for pair in given if not self.present[pair[0]]]
                again = [pair for pair in given if self.present[pair[0]]]
                if first:
                    torch._foreach_copy_([views[index] for index, _ in first], [value for _, value in first])
                if again:
                    torch._foreach_add_([views[index] for index, _ in again], [value for _, value in again])
        for index, gradient in enumerate(gradients):
            self.present[index] = self.present[index] or gradient is not None
        if self.minibatch_count == 0:
            self.base_versions = versions
        self.newest_base_versions = versions
        self.minibatch_count += 1
        self.example_count += example_count

    @torch.no_grad()
    def seal(self) -> bool:
        """Converts what was gathered to the wire's type and starts its way to the host.

        False when the sum or the conversion overflowed: nothing of it may be sent.
        """
        # A single float32 minibatch was checked before it was added, and is here as it was.
        if (self.minibatch_count > 1 or self._dtype != torch.float32) and not self._fits():
            return False
        for block, flat, wire in zip(self._layout.blocks, self._flat, self._wire, strict=True):
            if flat is None or wire is None:
                continue
            if wire is not flat:
                wire.copy_(flat)
            for stretch in block.stretches:
                target = self._host[block.group].narrow(0, stretch.group_offset, stretch.length)
                source = wire.narrow(0, stretch.block_offset, stretch.length)
                target.copy_(source, non_blocking=block.on_cuda)
            if block.on_cuda:
                self._events.append(_recorded_event(block.device))
        return True

    def ready(self) -> None:
        """Returns once the vectors on the host hold what was sealed."""
        while self._events:
            self._events.pop().synchronize()

    def sums(self) -> list[torch.Tensor | None]:
        """What was gathered, in float32, one entry a tensor; None where there is nothing."""
        views = {index: view for of_block in self._views for index, view in of_block.items()}
        return [views[index] if present else None for index, present in enumerate(self.present)]

    def clear(self, *, overflowed: bool = False) -> None:
        """Makes all tensors absent, for the next gradients. The vectors must rest no longer."""
        if overflowed:
            # Absent tensors keep their old contents, and the check for overflow looks at the whole buffer.
            for sums in self._gathered():
                sums.zero_()
        self.present = [False] * len(self.present)
        self.minibatch_count = 0
        self.example_count = 0

    def _fits(self) -> bool:
        """True when the sums are finite, and still so in the wire's type, which only the extremes can tell."""
        return all(
            bool(torch.stack(torch.aminmax(sums)).to(self._dtype).isfinite().all())
            for sums in self._gathered()
            if sums.numel()
        )

    def _gathered(self) -> list[torch.Tensor]:
        """The float32 sums of all tensors, where they gather."""
        gathered: list[torch.Tensor] = []
        for block, flat in zip(self._layout.blocks, self._flat, strict=True):
            if flat is not None:
                gathered.append(flat)
                continue
            host = self._host[block.group]
            gathered += [host.narrow(0, stretch.group_offset, stretch.length) for stretch in block.stretches]
        return gathered

    def _block_buffer(self, block: Block) -> torch.Tensor | None:
        """The block's own flat buffer; None where gradients gather right in the group's vector on the host."""
        if block.device.type == "cpu" and self._dtype == torch.float32:
            return None
        return torch.zeros(block.length, device=block.device)


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """True when no element is NaN or infinite; one pass over memory, on the tensors' own devices."""
    # A finite sum has finite terms only. A sum that is not may have overflowed, so then every term is looked
    # at.
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.sum().float())
    if all(bool(torch.stack(sums).sum().isfinite()) for sums in by_device.values()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _host_vector(size: int, dtype: torch.dtype, layout: Layout) -> torch.Tensor:
    """A vector on the host, pinned where a GPU copies from and to it without the CPU's help."""
    return torch.zeros(size, dtype=dtype, pin_memory=layout.uses_cuda)


def _numpy_view(vector: torch.Tensor) -> npt.NDArray[Any]:
    """A host vector as numpy sees it; bfloat16, which numpy lacks, as its bits in uint16."""
    if vector.dtype == torch.bfloat16:
        return vector.view(torch.int16).numpy().view(np.uint16)
    return vector.numpy()


def _view(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's place in a flat buffer, in its shape: logical order, whatever its memory format."""
    return flat.narrow(0, offset, parameter.numel()).view(parameter.shape)


def _views(
    block: Block,
    flat: torch.Tensor | None,
    parameters: Sequence[torch.Tensor],
    host_views: Sequence[torch.Tensor],
) -> dict[int, torch.Tensor]:
    """tensor index -> its view in the block's own buffer, or on the host where the block has none."""
    if flat is None:
        return {index: host_views[index] for index in block.offsets}
    return {index: _view(flat, offset, parameters[index]) for index, offset in block.offsets.items()}


def _recorded_event(device: torch.device) -> torch.cuda.Event:
    """An event at the end of what the device's current stream was given so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
