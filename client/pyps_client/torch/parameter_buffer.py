"""The way of pulled parameters into a torch model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pyps_client.torch.aliases import Aliases
from pyps_client.torch.flat import places_in, places_of_block, recorded_event, tensor_over
from pyps_client.torch.layout import Block, Layout
from pyps_wire import blocks
from pyps_wire.partition import ShardRange, Tensor


class ParameterBuffer:
    """The parameters as last pulled, one vector a group on the host, and the way into the model.

    The vectors are float32, float16, or uint16 (bfloat16's bits), and converted to the model's type on its own
    device. Between two calls of `write` they may be rewritten by another thread, from `wait_until_free`
    on; where parameters may lie in them (`alias`), by nobody but the training thread, within a step.
    """

    def __init__(
        self, layout: Layout, vectors: list[npt.NDArray[Any]], *, alias: bool = False, private: bool = True
    ) -> None:
        """`alias`: lets float32 parameters on the CPU lie in the vectors. `private`: no other process sees those."""
        # What a session pulls into.
        self.vectors = vectors
        self._layout = layout
        self._host = [tensor_over(vector) for vector in vectors]
        on_host = places_in(layout, self._host)
        # On a device, the vectors arrive in one piece and are spread from there.
        self._staging = [
            None
            if block.device.type == "cpu"
            else torch.empty(block.length, dtype=self._host[block.group].dtype, device=block.device)
            for block in layout.blocks
        ]
        self._places = [
            places_of_block(block, staging, layout.parameters, on_host)
            for block, staging in zip(layout.blocks, self._staging, strict=True)
        ]
        self._events: list[torch.cuda.Event] = []
        self._may_alias = alias and self._host[0].dtype == torch.float32
        self._aliases = Aliases(layout, vectors, private=private)
        self._copies = self._planned_copies()

    def write(self) -> None:
        """Brings the vectors, which were all pulled, into the model's parameters, in place."""
        if self._may_alias:
            self._may_alias = False
            self._aliases.adopt()
            self._copies = self._planned_copies()
        elif self._aliases.changed():
            self._copies = self._planned_copies()
        if self._copies:
            self._copy()

    def written_elsewhere(self) -> bool:
        """True when the user wrote parameters that lie in the vectors since `write`: a pull may not mend all of it."""
        return self._aliases.written_elsewhere()

    def separate(self) -> None:
        """Moves the parameters out of the vectors: from now on they are copied, and may be changed between pulls."""
        self._may_alias = False
        if self._aliases.indices:
            self._aliases.separate()
            self._copies = self._planned_copies()

    def value_of(self, index: int) -> torch.Tensor:
        """A tensor's values as last written, on its device; good until the next pull."""
        return next(places[index] for places in self._places if index in places)

    def wait_until_free(self) -> None:
        """Returns once copies out of the vectors have ended, so that they may be rewritten."""
        while self._events:
            self._events.pop().synchronize()

    def tensors_of(self, vectors: Sequence[npt.NDArray[np.float32]]) -> dict[str, torch.Tensor]:
        """The tensors that lie in such vectors, by name, on the CPU; views of the vectors, but where they were cut."""
        places = places_in(self._layout, [torch.from_numpy(vector) for vector in vectors])
        return _joined(zip(self._layout.model.tensors, places, strict=True))

    @torch.no_grad()
    def _copy(self) -> None:
        for block, staging, batches in self._copies:
            if staging is not None:
                self._stage(block, staging)
            for parameters, places in batches:
                torch._foreach_copy_(parameters, places)
            if block.on_cuda:
                self._events.append(recorded_event(block.device))

    def _stage(self, block: Block, staging: torch.Tensor) -> None:
        for stretch in block.stretches:
            source = self._host[block.group].narrow(0, stretch.group_offset, stretch.length)
            target = staging.narrow(0, stretch.block_offset, stretch.length)
            target.copy_(source, non_blocking=block.on_cuda)

    def _planned_copies(self) -> list[tuple[Block, torch.Tensor | None, list[_Batch]]]:
        """What `write` has to copy, a block at a time: parameters of one dtype and their places together."""
        copies = []
        for block, staging, places in zip(self._layout.blocks, self._staging, self._places, strict=True):
            copied = [[index for index in batch if index not in self._aliases.indices] for batch in block.batches]
            batches = [
                ([self._layout.parameters[index] for index in batch], [places[index] for index in batch])
                for batch in copied
                if batch
            ]
            if batches:
                copies.append((block, staging, batches))
        return copies


_Batch = tuple[list[torch.Tensor], list[torch.Tensor]]


def _joined(tensors: Iterable[tuple[Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors by name; the blocks of a tensor that is cut over parts become one new tensor."""
    by_name: dict[str, torch.Tensor] = {}
    for tensor, values in tensors:
        if tensor.whole_shape:
            whole = by_name.setdefault(tensor.name, values.new_full(tensor.whole_shape, math.nan))
            whole[blocks.place(tensor.offset, tensor.shape)] = values
        else:
            by_name[tensor.name] = values
    return by_name


def initial_values(layout: Layout) -> Callable[[ShardRange], npt.NDArray[np.float32]]:
    """The model's own values, which must rest, as another thread may ask for them: a shard's at a time, in float32."""
    for block in layout.blocks:
        if block.on_cuda:
            torch.cuda.synchronize(block.device)
    return partial(_values_in, layout)


@torch.no_grad()
def _values_in(layout: Layout, shard: ShardRange) -> npt.NDArray[np.float32]:
    values = torch.empty(shard.length, dtype=torch.float32, device="cpu")
    tensors = zip(layout.model.tensors, layout.group_offsets, layout.parameters, strict=True)
    for tensor, offset, parameter in tensors:
        begin = max(offset, shard.offset)
        length = min(offset + parameter.numel(), shard.offset + shard.length) - begin
        if tensor.group == shard.group and length > 0:
            source = parameter.detach().reshape(-1).narrow(0, begin - offset, length)
            values.narrow(0, begin - shard.offset, length).copy_(source)
    return values.numpy()
