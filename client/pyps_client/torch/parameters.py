"""A torch model's parameters: how pulled values enter the model, and who else writes or moves them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pyps_client.fork import tracked
from pyps_client.log import logger
from pyps_client.torch.layout import Block, Layout, several
from pyps_client.torch.memory import is_plain, recorded_event, tensor_over
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import ShardRange

# torch's count of a tensor's writes.
_version = attrgetter("_version")
_bytes_of = methodcaller("tobytes")

# The most parameters, and about the number of elements of each, that are sampled to find writes.
NUM_SAMPLES = 16


class Parameters:
    """The last pulled parameters, one vector per group on the host, and their copies into the model.

    Another thread may rewrite the vectors from `wait_until_free` until `write`; where parameters may lie in them
    (`alias`), only the training thread may, within a step. A parameter that a program moves (`model.to`) is copied from
    then on. Where other processes see the vectors, a forked child gets copies of the parameters as of the fork.
    """

    def __init__(
        self, layout: Layout, vectors: list[npt.NDArray[Any]], *, alias: bool = False, private: bool = True
    ) -> None:
        """`vectors`: float32, float16, or uint16 (bfloat16's bits); the model's device converts them.

        `alias`: lets float32 parameters on the CPU lie in the vectors. `private`: no other process sees those.
        """
        self.vectors = vectors
        self._layout = layout
        self._host = [tensor_over(vector) for vector in vectors]
        # A device gets a vector in one piece and spreads it.
        self._staging = [
            None
            if block.device.type == "cpu"
            else torch.empty(block.length, dtype=self._host[block.group].dtype, device=block.device)
            for block in layout.blocks
        ]
        # Each tensor's pulled values by index, on its device; valid until the next pull.
        self.values = layout.places(self._host)
        for block, staging in zip(layout.blocks, self._staging, strict=True):
            if staging is not None:
                self.values |= layout.places_in_block(block, staging)
        self._events: list[torch.cuda.Event] = []
        # Streams for copies to a device while other shards still arrive, and the model computes.
        devices = {block.device for block in layout.blocks if block.on_cuda}
        self._streams = {device: torch.cuda.Stream(device) for device in devices}  # type: ignore[no-untyped-call]
        # Group, first number and end of each shard whose copy to the devices has begun.
        self._landed: set[tuple[int, int, int]] = set()
        self._private = private
        # True until the first `write`, if that moves parameters into the vectors.
        self._adopts = alias and self._host[0].dtype == torch.float32
        # Parameters that lie in the vectors, with their addresses.
        self.aliases: dict[torch.Tensor, int] = {}
        # Their values for children forked before the next change, and their counts of writes at that copy.
        self._for_children: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copied_at: list[int] = []
        self._copies = self._planned_copies()
        # Float32 copies of half-precision parameters by index, from their first local step on.
        self._masters: dict[int, torch.Tensor] = {}

    def write(self) -> None:
        """Bring the vectors' values into the model."""
        self._for_children = []
        adopts, self._adopts = self._adopts, False
        if adopts:
            self._adopt()
        if adopts or list(map(torch.Tensor.data_ptr, self.aliases)) != list(self.aliases.values()):
            self.aliases = self._lying()
            self._copies = self._planned_copies()
        # For autograd, which must refuse a graph that was made before.
        for tensor in self.aliases:
            torch.autograd.graph.increment_version(tensor)
        if self._copies:
            self._copy()
        self._landed.clear()

    def land(self, shard: ShardRange) -> None:
        """Begin to copy a shard to the devices while others arrive, on any thread; `write` copies the rest."""
        for block, staging in zip(self._layout.blocks, self._staging, strict=True):
            if staging is not None and block.group == shard.group:
                with torch.cuda.stream(self._streams[block.device]) if block.on_cuda else nullcontext():
                    self._stage(block, staging, shard.offset, shard.offset + shard.length)
        self._landed.add((shard.group, shard.offset, shard.offset + shard.length))

    def separate(self) -> None:
        """Move the parameters out of the vectors: from now on they are copied, and may be changed between pulls."""
        # The vectors may have been rewritten since.
        self._landed.clear()
        self._adopts = False
        if self.aliases:
            for tensor in self._lying():
                tensor.data = tensor.data.clone()
            self.aliases, self._for_children = {}, []
            self._copies = self._planned_copies()

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
        self.aliases, self._for_children = {}, []

    def wait_until_free(self) -> None:
        """Return once no device reads the vectors, or their copies on it, any more."""
        for stream in self._streams.values():
            stream.synchronize()
        while self._events:
            self._events.pop().synchronize()

    @torch.no_grad()
    def step_locally(self, gradients: Sequence[torch.Tensor | None], rates: Sequence[float]) -> None:
        """Take a step on the model, of these rates, at least one per group: parameters -= rate * gradient.

        Half-precision parameters are moved in float32 copies: a small step would vanish in their own type.
        """
        for block in self._layout.blocks:
            rate = rates[block.group]
            if rate == 0.0:
                continue
            if min(block.offsets) < self._layout.first_buffer:
                # The vectors must stay as they are: a shard without a newer version is not pulled again.
                self.separate()
            for batch in block.batches:
                given = {index: gradient for index in batch if (gradient := gradients[index]) is not None}
                if given:
                    torch._foreach_add_([self._moved(index) for index in given], list(given.values()), alpha=-rate)
                for index in given.keys() & self._masters.keys():
                    self._layout.parameters[index].copy_(self._masters[index])

    def _moved(self, index: int) -> torch.Tensor:
        """Return the tensor that a local step moves."""
        parameter = self._layout.parameters[index]
        if parameter.dtype.itemsize >= torch.float32.itemsize:
            return parameter
        if index not in self._masters:
            self._masters[index] = parameter.detach().float()
        return self._masters[index]

    def _adopt(self) -> None:
        """Move the parameters that nothing else holds into the vectors, which have their values."""
        for index, parameter in enumerate(self._layout.parameters):
            can = index not in self._layout.shortened and self._layout.may_lie_in_vectors(index)
            if can and _is_sole_owner(parameter):
                parameter.data = self._layout.own_place(self.vectors, index)
                self.aliases[parameter] = parameter.data_ptr()
        if not self._private:
            _shared.add(self)

    def _lying(self) -> dict[torch.Tensor, int]:
        """Return the aliases that no program has moved."""
        return {tensor: address for tensor, address in self.aliases.items() if tensor.data_ptr() == address}

    @torch.no_grad()
    def _copy(self) -> None:
        for block, staging, batches in self._copies:
            if block.on_cuda:
                torch.cuda.current_stream(block.device).wait_stream(self._streams[block.device])
            if staging is not None:
                for begin, end in self._not_landed(block.group):
                    self._stage(block, staging, begin, end)
            for parameters, values in batches:
                torch._foreach_copy_(parameters, values)
            if block.on_cuda:
                self._events.append(recorded_event(block.device))
        for index, master in self._masters.items():
            master.copy_(self.values[index])
        if self._masters:
            self._events += map(recorded_event, self._streams)

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
        """Return the copies of `write` by block: parameters of one dtype together, with their values."""
        copies = []
        for block, staging in zip(self._layout.blocks, self._staging, strict=True):
            batches = []
            for batch in block.batches:
                copied = [index for index in batch if self._layout.parameters[index] not in self.aliases]
                if copied:
                    targets = [self._layout.parameters[index] for index in copied]
                    batches.append((targets, [self.values[index] for index in copied]))
            if batches:
                copies.append((block, staging, batches))
        return copies


class Written:
    """Finds writes to a model's parameters between two steps, which do not reach the servers.

    torch counts most writes. Writes to or of `p.data` are found in samples of some parameters on the CPU; on a GPU only
    before the first step, since each check would wait for the device.
    """

    def __init__(self, layout: Layout, parameters: Parameters) -> None:
        self._watched = [index for index in range(layout.first_buffer) if index not in layout.shortened]
        self._names = [layout.model.tensors[index].name for index in self._watched]
        self._tensors = [layout.parameters[index] for index in self._watched]
        self._parameters = parameters
        self._sampled = slice(0, None, max(1, -(-len(self._tensors) // NUM_SAMPLES)))
        self._addresses: list[int] = []
        self._samples: list[npt.NDArray[Any]] = []
        self._warned = False
        # True from a write that was found until the caller clears it.
        self.spoiled = False
        self.note()

    def note(self) -> None:
        """Take the parameters as they are now for the servers'."""
        self._noted = self._now()

    def changed(self) -> bool:
        return self._now() != self._noted

    def check(self, *, is_first: bool) -> None:
        """Refuse writes before the first step, which were meant to last; warn once of later ones."""
        now = self._now()
        if now == self._noted and not is_first:
            return
        (old_versions, old_numbers), (versions, numbers) = self._noted, now
        names = [name for name, old, new in zip(self._names, old_versions, versions, strict=True) if old != new]
        if not names:
            sampled = zip(self._names[self._sampled], old_numbers, numbers, strict=True)
            # The length differs where the model was moved to another type.
            names = [name for name, old, new in sampled if old != new and len(old) == len(new)]
        if is_first and not names:
            pulled = self._parameters.values
            watched = zip(self._watched, self._names, self._tensors, strict=True)
            names = [name for index, name, tensor in watched if not torch.equal(tensor, pulled[index].to(tensor))]
        if not names:
            return
        if is_first:
            raise InvalidArgument(
                f"Parameters ({several(names)}) were written after RemoteOptimizer had joined the run, and would be "
                "overwritten with the servers': load or initialise the model before the first zero_grad(), forward "
                "pass, step() or read of the run (global_step), which gives a new run the first worker's parameters. A "
                "run that has begun keeps its own (pyps serve --resume)."
            )
        self.spoiled = True
        if not self._warned:
            self._warned = True
            logger.warning(
                "parameters (%s) were written between two steps, by load_state_dict, clamp_ or the like: the servers "
                "do not hear of it, and what they send takes its place. Limit weights within the model "
                "(torch.nn.utils.parametrize). Values put back meanwhile, as after an evaluation, do no harm.",
                several(names),
            )

    def _now(self) -> tuple[list[int], list[bytes]]:
        """Return torch's counts of writes, and samples of some parameters."""
        sampled = self._tensors[self._sampled]
        addresses = list(map(torch.Tensor.data_ptr, sampled))
        if addresses != self._addresses:
            self._addresses, self._samples = addresses, list(map(_sample_of, sampled))
        return list(map(_version, self._tensors)), list(map(_bytes_of, self._samples))


def _sample_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a view of some elements that does not keep their memory alive; an empty one where numpy has no access."""
    if not (is_plain(tensor) and tensor.numel()):
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

    @torch.no_grad()
    def values_in(shard: ShardRange) -> npt.NDArray[np.float32]:
        values = torch.empty(shard.length, dtype=torch.float32, device="cpu")
        for tensor, offset, parameter in zip(
            layout.model.tensors, layout.model.offsets, layout.parameters, strict=True
        ):
            begin = max(offset, shard.offset)
            length = min(offset + tensor.size, shard.offset + shard.length) - begin
            if tensor.group == shard.group and length > 0:
                source = parameter.detach().reshape(-1).narrow(0, begin - offset, length)
                values.narrow(0, begin - shard.offset, length).copy_(source)
        return values.numpy()

    return values_in


def _is_sole_owner(parameter: torch.Tensor) -> bool:
    storage = parameter.untyped_storage()
    whole = storage.nbytes() == parameter.numel() * parameter.element_size()
    count = getattr(torch._C, "_storage_Use_Count", None)
    if not whole or count is None or parameter.is_shared():  # type: ignore[no-untyped-call]
        return False
    # A new tensor's storage has the count of one that nothing else holds.
    alone = torch.empty(1)
    its_storage = alone.untyped_storage()
    return bool(count(storage._cdata) == count(its_storage._cdata))


# Parameters in memory that a forked child would share with its parent.
_shared = tracked(before=Parameters.before_fork, after_in_child=Parameters.in_child)
