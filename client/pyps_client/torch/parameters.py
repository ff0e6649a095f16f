"""A torch model's parameters: how pulled values come into it, and who else writes or moves them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pyps_client.fork import at_fork
from pyps_client.log import logger
from pyps_client.torch.layout import Block, Layout, several
from pyps_client.torch.memory import (
    may_lie_in_vectors,
    own_place,
    places_in,
    places_of_block,
    recorded_event,
    tensor_over,
)
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import ShardRange

# torch's count of a tensor's writes.
_version = attrgetter("_version")

_bytes_of = methodcaller("tobytes")
# How many parameters, and how many numbers of each, show that something was written.
NUM_SAMPLES = 16

_HALF = (torch.float16, torch.bfloat16)


class Parameters:
    """The last pulled parameters, one vector a group on the host, and their way into the model.

    The vectors are float32, float16, or uint16 (bfloat16's bits); the model's device converts them. From
    `wait_until_free` until `write` another thread may rewrite them; where parameters may lie in them (`alias`), only
    the training thread, within a step.
    """

    def __init__(
        self, layout: Layout, vectors: list[npt.NDArray[Any]], *, alias: bool = False, private: bool = True
    ) -> None:
        """`alias`: lets float32 parameters on the CPU lie in the vectors. `private`: no other process sees those."""
        self.vectors = vectors
        self._layout = layout
        self._host = [tensor_over(vector) for vector in vectors]
        on_host = places_in(layout, self._host)
        # A device gets a vector in one piece and spreads it.
        self._staging = [
            None
            if block.device.type == "cpu"
            else torch.empty(block.length, dtype=self._host[block.group].dtype, device=block.device)
            for block in layout.blocks
        ]
        # By tensor index.
        self._places: dict[int, torch.Tensor] = {}
        for block, staging in zip(layout.blocks, self._staging, strict=True):
            self._places |= places_of_block(block, staging, layout.parameters, on_host)
        self._events: list[torch.cuda.Event] = []
        # Streams for copies to a device while other shards still arrive, and the model computes.
        devices = {block.device for block in layout.blocks if block.on_cuda}
        self._streams = {device: torch.cuda.Stream(device) for device in devices}  # type: ignore[no-untyped-call]
        # Group, first number and end of each shard whose copy to the devices has begun.
        self._landed: set[tuple[int, int, int]] = set()
        self._may_alias = alias and self._host[0].dtype == torch.float32
        self.aliases = Aliases(layout, vectors, private=private)
        self._copies = self._planned_copies()

    def write(self) -> None:
        if self._may_alias:
            self._may_alias = False
            self.aliases.adopt()
            self._copies = self._planned_copies()
        elif self.aliases.changed():
            self._copies = self._planned_copies()
        if self._copies:
            self._copy()
        self._landed.clear()

    def land(self, shard: ShardRange) -> None:
        """Begin to copy a shard to the devices while others still arrive.

        On any thread, between `wait_until_free` and `write`, which copies the rest.
        """
        for block, staging in zip(self._layout.blocks, self._staging, strict=True):
            if staging is not None and block.group == shard.group:
                with torch.cuda.stream(self._streams[block.device]) if block.on_cuda else nullcontext():
                    self._stage(block, staging, shard.offset, shard.offset + shard.length)
        self._landed.add((shard.group, shard.offset, shard.offset + shard.length))

    def separate(self) -> None:
        """Move the parameters out of the vectors: from now on they are copied, and may be changed between pulls."""
        self._may_alias = False
        # The vectors may have been rewritten since.
        self._landed.clear()
        if self.aliases.tensors:
            self.aliases.separate()
            self._copies = self._planned_copies()

    def value_of(self, index: int) -> torch.Tensor:
        """Return a tensor's last written values, on its device; valid until the next pull."""
        return self._places[index]

    def wait_until_free(self) -> None:
        """Return once nobody reads the vectors, and their copies on devices, any more."""
        for stream in self._streams.values():
            stream.synchronize()
        while self._events:
            self._events.pop().synchronize()

    def note_read(self) -> None:
        self._events += map(recorded_event, self._streams)

    @torch.no_grad()
    def _copy(self) -> None:
        for block, staging, batches in self._copies:
            if block.on_cuda:
                torch.cuda.current_stream(block.device).wait_stream(self._streams[block.device])
            if staging is not None:
                for begin, end in self._not_landed(block.group):
                    self._stage(block, staging, begin, end)
            for parameters, places in batches:
                torch._foreach_copy_(parameters, places)
            if block.on_cuda:
                self._events.append(recorded_event(block.device))

    def _not_landed(self, group: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of a group's vector that no `land` has copied."""
        end = 0
        for _, begin, next_end in sorted(landed for landed in self._landed if landed[0] == group):
            if end < begin:
                yield end, begin
            end = next_end
        if end < len(self._host[group]):
            yield end, len(self._host[group])

    def _stage(self, block: Block, staging: torch.Tensor, begin: int, end: int) -> None:
        """Copy a block's part of a range of its group's vector into its buffer on the device."""
        for piece in block.ranges:
            first = max(begin, piece.group_offset)
            length = min(end, piece.group_offset + piece.length) - first
            if length > 0:
                target = staging.narrow(0, piece.block_offset + first - piece.group_offset, length)
                target.copy_(self._host[block.group].narrow(0, first, length), non_blocking=block.on_cuda)

    def _planned_copies(
        self,
    ) -> list[tuple[Block, torch.Tensor | None, list[tuple[list[torch.Tensor], list[torch.Tensor]]]]]:
        """Return the copies of `write`, by block: parameters of one dtype and their places together."""
        lie_there = set(map(id, self.aliases.tensors))
        copies = []
        for block, staging in zip(self._layout.blocks, self._staging, strict=True):
            batches = []
            for batch in block.batches:
                copied = [index for index in batch if id(self._layout.parameters[index]) not in lie_there]
                if copied:
                    targets = [self._layout.parameters[index] for index in copied]
                    batches.append((targets, [self._places[index] for index in copied]))
            if batches:
                copies.append((block, staging, batches))
        return copies


class Aliases:
    """The parameters of a model that lie in the vectors. Used by one thread.

    A parameter that a program moves (`model.to`, `share_memory`) no longer does. Where other processes see the vectors,
    a forked child gets copies as of the fork: it would else see its parent's parameters change.
    """

    def __init__(self, layout: Layout, vectors: Sequence[npt.NDArray[np.float32]], *, private: bool) -> None:
        self._layout = layout
        self._vectors = vectors
        self._private = private
        # Parameters that lie in the vectors, and their addresses.
        self.tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        # Their values for children forked before the next change; and their counts of writes at that copy.
        self._for_children: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copied_at: list[int] = []

    def adopt(self) -> None:
        """Move the model's parameters into the vectors, which hold their values, where nothing else holds them."""
        for index, parameter in enumerate(self._layout.parameters):
            # Not one that its own module writes in each forward pass.
            can = index not in self._layout.shortened and may_lie_in_vectors(self._layout, index)
            if can and _is_sole_owner(parameter):
                parameter.data = own_place(self._layout, self._vectors, index)
                self.tensors.append(parameter)
                self._addresses.append(parameter.data_ptr())
        self.changed()
        if not self._private:
            _forked_apart.add(self)

    def changed(self) -> bool:
        """Count a write of each parameter for autograd: a graph made before may not go backward.

        Returns whether a program has moved some; they are left out from now on.
        """
        self._for_children = []
        moved = list(map(torch.Tensor.data_ptr, self.tensors)) != self._addresses
        if moved:
            self._forget_moved()
        for tensor in self.tensors:
            torch.autograd.graph.increment_version(tensor)
        return moved

    def separate(self) -> None:
        for tensor in self._lying():
            tensor.data = tensor.data.clone()
        self._for_children = []
        self._forget_moved()

    def before_fork(self) -> None:
        """Copy the present values for the child. Children forked in a row share one copy."""
        lying = self._lying()
        now = list(map(_version, lying))
        if not self._for_children or now != self._copied_at:
            self._for_children = [(tensor, tensor.data.clone()) for tensor in lying]
            self._copied_at = now

    def in_child(self) -> None:
        """Move the child's parameters into memory of its own."""
        for tensor, values in self._for_children:
            tensor.data = values
        self._for_children = []
        self._forget_moved()

    def _lying(self) -> list[torch.Tensor]:
        """Return those that no program has moved."""
        pairs = zip(self.tensors, self._addresses, strict=True)
        return [tensor for tensor, address in pairs if tensor.data_ptr() == address]

    def _forget_moved(self) -> None:
        self.tensors = self._lying()
        self._addresses = list(map(torch.Tensor.data_ptr, self.tensors))


class LocalSteps:
    """Local steps on the model.

    Half-precision parameters are moved in float32 copies, as on the servers: a small step would vanish in their type.
    The copies exist from the first local step on.
    """

    def __init__(self, layout: Layout, parameters: Parameters) -> None:
        self._layout = layout
        self._parameters = parameters
        # Float32 values, local steps included, by tensor index. Empty until the first step.
        self.masters: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def reset(self) -> None:
        """Begin again from the parameters that were just written into the model."""
        for index, master in self.masters.items():
            master.copy_(self._parameters.value_of(index))
        self._parameters.note_read()

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor | None], rates: Sequence[float]) -> None:
        """Take a step of these rates, at least one a group: parameters -= rate * gradient."""
        for block in self._layout.blocks:
            rate = rates[block.group]
            if rate == 0.0:
                continue
            if min(block.offsets) < self._layout.first_buffer:
                # The vectors must stay as they are: a shard without a newer version is not pulled again.
                self._parameters.separate()
            for batch in block.batches:
                given = {index: gradient for index in batch if (gradient := gradients[index]) is not None}
                if given:
                    torch._foreach_add_([self._target(index) for index in given], list(given.values()), alpha=-rate)
                for index in given.keys() & self.masters.keys():
                    self._layout.parameters[index].copy_(self.masters[index])

    def _target(self, index: int) -> torch.Tensor:
        parameter = self._layout.parameters[index]
        if parameter.dtype not in _HALF:
            return parameter
        if index not in self.masters:
            self.masters[index] = parameter.detach().float()
        return self.masters[index]


class Written:
    """Finds writes to a model's parameters between two steps, of which servers do not hear.

    torch counts most writes. Those through `.data`, and other memory (`p.data = values`), show in some numbers of some
    parameters on the CPU; on a GPU before the first step only, since a look at each step would wait for it.
    """

    def __init__(self, layout: Layout, parameters: Parameters) -> None:
        self._watched = [index for index in range(layout.first_buffer) if index not in layout.shortened]
        self._names = [layout.model.tensors[index].name for index in self._watched]
        self._tensors = [layout.parameters[index] for index in self._watched]
        self._parameters = parameters
        self._sampled = slice(0, None, max(1, -(-len(self._tensors) // NUM_SAMPLES)))
        self._addresses: list[int] = []
        self._samples: list[npt.NDArray[Any]] = []
        self._told = False
        # Whether a write was found since this was last cleared.
        self.spoiled = False
        self.note()

    def note(self) -> None:
        """Take what was written so far for the servers'."""
        self._versions = list(map(_version, self._tensors))
        self._numbers = self._look()

    def check(self, *, is_first: bool) -> None:
        """Refuse writes before the first step, which were meant to last; warn once of later ones."""
        versions, numbers = list(map(_version, self._tensors)), self._look()
        if versions == self._versions and numbers == self._numbers and not is_first:
            return
        names = [name for name, old, new in zip(self._names, self._versions, versions, strict=True) if old != new]
        if not names:
            sampled = zip(self._names[self._sampled], self._numbers, numbers, strict=True)
            # Of another length where the model was moved to another type.
            names = [name for name, old, new in sampled if old != new and len(old) == len(new)]
        if is_first and not names:
            pulled = zip(self._names, self._tensors, map(self._parameters.value_of, self._watched), strict=True)
            names = [name for name, tensor, values in pulled if not torch.equal(tensor, values.to(tensor))]
        if not names:
            return
        if is_first:
            raise InvalidArgument(
                f"Parameters ({several(names)}) were written after RemoteOptimizer had joined the run, and would be "
                "overwritten with the servers': load or initialise the model before the first zero_grad(), forward "
                "pass or step(), which gives a new run the first worker's parameters. A run that has begun keeps its "
                "own (pyps serve --resume)."
            )
        self.spoiled = True
        if not self._told:
            self._told = True
            logger.warning(
                "parameters (%s) were written between two steps, by load_state_dict, clamp_ or the like: the servers "
                "do not hear of it, and what they send takes its place. Limit weights within the model "
                "(torch.nn.utils.parametrize). Values put back meanwhile, as after an evaluation, do no harm.",
                several(names),
            )

    def changed(self) -> bool:
        return (list(map(_version, self._tensors)), self._look()) != (self._versions, self._numbers)

    def _look(self) -> list[bytes]:
        sampled = self._tensors[self._sampled]
        addresses = list(map(torch.Tensor.data_ptr, sampled))
        if addresses != self._addresses:
            self._addresses, self._samples = addresses, list(map(_sample_of, sampled))
        return list(map(_bytes_of, self._samples))


def _sample_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return some numbers of a parameter where they lie, without a hold on its memory; none where it is elsewhere."""
    is_plain = type(tensor) in (torch.nn.Parameter, torch.Tensor) and tensor.device.type == "cpu" and tensor.numel() > 0
    if not is_plain:
        return np.empty(0)
    size = tensor.element_size()
    is_dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    count = tensor.numel() if is_dense else 1
    memory = memoryview((ctypes.c_char * (count * size)).from_address(tensor.data_ptr()))
    numbers: npt.NDArray[Any] = np.frombuffer(memory, np.dtype(f"V{size}"))
    return numbers[:: max(1, count // NUM_SAMPLES)]


def initial_values(layout: Layout) -> Callable[[ShardRange], npt.NDArray[np.float32]]:
    """Return a function of the model's own values by shard, in float32, for any thread: the model must not change."""
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


def _is_sole_owner(parameter: torch.Tensor) -> bool:
    storage = parameter.untyped_storage()
    whole = storage.nbytes() == parameter.numel() * parameter.element_size()
    count = getattr(torch._C, "_storage_Use_Count", None)
    if not whole or count is None or parameter.is_shared():  # type: ignore[no-untyped-call]
        return False
    alone = torch.empty(1)
    its_storage = alone.untyped_storage()
    return bool(count(storage._cdata) == count(its_storage._cdata))


# Those in vectors that a forked child shares with its parent.
_forked_apart: weakref.WeakSet[Aliases] = weakref.WeakSet()


def _on_each(hook: Callable[[Aliases], None]) -> None:
    for aliases in list(_forked_apart):
        hook(aliases)


at_fork(before=partial(_on_each, Aliases.before_fork), after_in_child=partial(_on_each, Aliases.in_child))
