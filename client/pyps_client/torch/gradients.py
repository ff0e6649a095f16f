"""Gradients as they gather and as they are sent, and the checks that keep NaN and infinity from the servers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch

from pyps_client.torch.layout import Block, Layout
from pyps_client.torch.memory import (
    may_lie_in_vectors,
    own_place,
    places_in,
    places_of_block,
    recorded_event,
    tensor_over,
    torch_dtype,
)
from pyps_client.vectors import FiniteGuard
from pyps_wire.allocator import give_back_free_memory
from pyps_wire.codecs import Codec
from pyps_wire.common_pb2 import REASON_NOT_FINITE, Receipt
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import Model

# Freed gradients of this size go back to the system.
LARGE_BYTES = 16 << 20


class Gradients:
    """Gradients of one or more minibatches, summed tensor by tensor, and their form on the wire.

    Tensors without a gradient are absent, which is not a gradient of zero. Gathers in float32 on the
    parameters' device; `seal` converts there and brings the result to the host. On the CPU, float32 gradients gather
    right in the vectors that are pushed; and where `hand_out` has put the model's gradients there, they need not be
    moved at all.
    """

    def __init__(self, layout: Layout, vectors: list[npt.NDArray[Any]], *, codec: Codec | None = None) -> None:
        """`vectors`: one a group, float32, float16, or uint16 (bfloat16's bits).

        `codec`: what the session converts them to, where they do not travel as they are.
        """
        # The payload; valid after seal() and ready().
        self.vectors = vectors
        self._layout = layout
        host = [tensor_over(vector) for vector in vectors]
        dtype = host[0].dtype
        # The type of the payload on the wire.
        self.wire_dtype = (codec and torch_dtype(codec)) or dtype
        # First address of each vector, and the one behind it.
        self._ranges = [(vector.data_ptr(), vector.data_ptr() + vector.nbytes) for vector in host]
        # Each tensor's place by index; and each block's places as a few long slices.
        self._places: dict[int, torch.Tensor] = {}
        self._slices: list[list[torch.Tensor]] = []
        # The addresses of places in the vectors, of tensors whose gradients gather there.
        self._addresses: dict[int, int] = {}
        # Blocks that gather in buffers of their own: the buffer, the same in the wire's type (converted on the device,
        # before the bus), and pairs of pieces to copy, to the vectors and from the buffer.
        self._apart: list[tuple[Block, torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]] = []
        self._on_host = on_host = places_in(layout, host)
        for block in layout.blocks:
            targets = [host[block.group].narrow(0, piece.group_offset, piece.length) for piece in block.ranges]
            if block.device.type == "cpu" and dtype == torch.float32:
                places = places_of_block(block, None, layout.parameters, on_host)
                self._addresses |= {index: place.data_ptr() for index, place in places.items() if place.numel()}
                self._slices.append(targets)
            else:
                flat = torch.zeros(block.length, dtype=torch.float32, device=block.device)
                converts = block.device.type != "cpu" and dtype != torch.float32
                wire = torch.empty_like(flat, dtype=dtype) if converts else flat
                places = places_of_block(block, flat, layout.parameters, on_host)
                sources = [wire.narrow(0, piece.block_offset, piece.length) for piece in block.ranges]
                self._slices.append([flat])
                self._apart.append((block, flat, wire, list(zip(targets, sources, strict=True))))
            self._places |= places
        # Tensors of one dtype, for one call of torch.
        self._batches = [batch for block in layout.blocks for batch in block.batches]
        self._whole = [each for slices in self._slices for each in slices]
        self._events: list[torch.cuda.Event] = []
        # The kind of each group's numbers.
        self.kinds = layout.kinds
        self.present = [False] * len(layout.parameters)
        self.minibatch_count = 0
        self.example_count = 0
        # Whether all gathered numbers were found finite in the wire's type.
        self._seen_fit = False
        # Whether the model's own gradients were given back to the system.
        self._gave_back = False
        # Versions of the parameters that the first and the newest of the minibatches were computed on.
        self.base_versions: Mapping[int, int] = {}
        self.newest_base_versions: Mapping[int, int] = {}

    def add(
        self, gradients: Sequence[torch.Tensor | None], *, versions: Mapping[int, int], example_count: int = 0
    ) -> None:
        """Add one minibatch's gradients, which were computed on parameters of these versions.

        An exception amid it, such as Ctrl-C, leaves nothing gathered: a half of a sum is of no use.
        """
        try:
            for batch in self._batches:
                self._add_batch(batch, gradients)
        except BaseException:
            self.clear()
            raise
        self._seen_fit = False
        if self.minibatch_count == 0:
            self.base_versions = versions
        self.newest_base_versions = versions
        self.minibatch_count += 1
        self.example_count += example_count

    def lay(self, index: int, gradient: torch.Tensor) -> torch.cuda.Event | None:
        """Copy one tensor's whole gradient to its place in the vectors; from a device it is there after the event."""
        if index in self._addresses:
            self._add_batch((index,), {index: gradient})
            return None
        self.present[index] = True
        with torch.no_grad():
            self._on_host[index].copy_(gradient, non_blocking=gradient.is_cuda)
        return recorded_event(gradient.device) if gradient.is_cuda else None

    def fits(self, numbers: npt.NDArray[Any]) -> bool:
        values = [tensor_over(numbers)]
        if values[0].dtype == self.wire_dtype:
            return all_finite(values)
        return surely_fit(values, self.wire_dtype) or all_fit(values, self.wire_dtype)

    def are_finite(self) -> bool:
        gathered = self._gathered()
        self._seen_fit = surely_fit(gathered, self.wire_dtype)
        return self._seen_fit or all_finite(gathered)

    def hand_out(self) -> None:
        """Move the model's existing gradients into the vectors, without their values, if nothing has gathered."""
        if self.minibatch_count:
            self.take_back()
            return
        # Freed together: one by one, small objects would soon fill their memory, which could not be given back.
        replaced: list[torch.Tensor] = []
        for index, address in self._addresses.items():
            parameter = self._layout.parameters[index]
            gradient = parameter.grad
            # Sparse ones have no address.
            if gradient is None or gradient.layout != torch.strided or gradient.data_ptr() == address:
                continue
            # One that a float32 view on the CPU can replace.
            is_plain = (
                type(gradient) is torch.Tensor and gradient.device.type == "cpu" and gradient.dtype == torch.float32
            )
            if is_plain and may_lie_in_vectors(self._layout, index):
                parameter.grad = own_place(self._layout, self.vectors, index)
                replaced.append(gradient)
        # Once: a program that makes new ones for every minibatch uses their memory again.
        if not self._gave_back and sum(gradient.nbytes for gradient in replaced) > LARGE_BYTES:
            del gradient
            replaced.clear()
            self._gave_back = give_back_free_memory()

    def take_back(self) -> None:
        """Copy the model's gradients out of the vectors: what has gathered stays as it is."""
        for index, address in self._addresses.items():
            parameter = self._layout.parameters[index]
            gradient = parameter.grad
            if gradient is not None and gradient.layout == torch.strided and gradient.data_ptr() == address:
                parameter.grad = gradient.clone()

    def seal(self, *, checked: bool = True) -> bool:
        """Convert what has gathered to the vectors' type and start its copy to the host.

        Returns False where the sum is not finite in the wire's type, and must not be sent; without `checked` unseen.
        """
        if checked and not self._seen_fit:
            gathered = self._gathered()
            if not (surely_fit(gathered, self.wire_dtype) or all_fit(gathered, self.wire_dtype)):
                return False
        for block, flat, wire, copies in self._apart:
            # None of these takes part in autograd.
            if wire is not flat:
                wire.copy_(flat)
            for target, source in copies:
                target.copy_(source, non_blocking=block.on_cuda)
            if block.on_cuda:
                self._events.append(recorded_event(block.device))
        return True

    def ready(self) -> None:
        """Return once the vectors on the host hold what was sealed."""
        while self._events:
            self._events.pop().synchronize()

    def sums(self) -> list[torch.Tensor | None]:
        """Return the gathered sums in float32, one entry a tensor; None without one."""
        return [self._places[index] if present else None for index, present in enumerate(self.present)]

    def clear(self) -> None:
        self.present = [False] * len(self.present)
        self.minibatch_count = 0
        self.example_count = 0

    def _add_batch(
        self, batch: Sequence[int], gradients: Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor]
    ) -> None:
        """Add the gradients of tensors of one dtype, in as few calls of torch as possible."""
        first: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        again: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        present, addresses = self.present, self._addresses
        for index in batch:
            gradient = gradients[index]
            if gradient is None:
                continue
            address = gradient.data_ptr()
            # It may lie in its place already.
            lies_there = address == addresses.get(index) and gradient.is_contiguous()
            if not lies_there or gradient.is_neg() or gradient.is_conj():
                # Another view of the vectors would be overwritten while it is read.
                for begin, end in self._ranges:
                    if begin <= address < end:
                        gradient = gradient.clone()
                targets, values = again if present[index] else first
                targets.append(self._places[index])
                values.append(gradient)
            present[index] = True
        if first[0]:
            with torch.no_grad():
                torch._foreach_copy_(*first)
        if again[0]:
            with torch.no_grad():
                torch._foreach_add_(*again)

    def _gathered(self) -> list[torch.Tensor]:
        """Return the float32 sums of present tensors, in long slices where all of a block are."""
        if False not in self.present:
            return self._whole
        gathered: list[torch.Tensor] = []
        for block, slices in zip(self._layout.blocks, self._slices, strict=True):
            present = [self._places[index] for index in block.offsets if self.present[index]]
            gathered += slices if len(present) == len(block.offsets) else present
        return gathered


class Finite:
    """Leaves out minibatches, and sums of them, that are not finite; raises NotFinite after too many in a row.

    A minibatch that the servers check before they apply any of it passes unchecked: their receipts tell.
    """

    def __init__(self, model: Model, *, checks: bool = True) -> None:
        """`checks`: whether to check minibatches; else the caller does."""
        self._model = model
        self._checks = checks
        self._minibatch_guard = FiniteGuard()
        self._payload_guard = FiniteGuard()
        # Minibatches that another process of the replica refused.
        self._left_out_with_others = 0
        # The gathering minibatch, if the servers will check it for NaN.
        self.unchecked: Sequence[torch.Tensor | None] = ()

    @property
    def skipped(self) -> int:
        """Minibatches and sums of minibatches that were left out because they were not finite."""
        return self._minibatch_guard.skips_total + self._payload_guard.skips_total + self._left_out_with_others

    def add(
        self,
        gradients: Sequence[torch.Tensor | None],
        *,
        to: Gradients,
        versions: Mapping[int, int],
        example_count: int,
        server_checks: bool,
    ) -> bool:
        """Add a minibatch to what has gathered; False where it is not finite, and left out.

        `versions`: of the parameters that it was computed on. `server_checks`: it goes alone, to a server that checks.
        """
        for index, gradient in enumerate(gradients):
            if gradient is not None and gradient.layout != torch.strided:
                raise InvalidArgument(
                    f"The gradient of {self._model.tensors[index].name!r} has layout {gradient.layout}; servers take "
                    "dense gradients only: make the layer with sparse=False."
                )
        self.unchecked = gradients if server_checks else ()
        # A sum cannot be undone. The first minibatch is checked in its place, in one piece.
        is_first = to.minibatch_count == 0
        if self._checks and not is_first and not all_finite([each for each in gradients if each is not None]):
            self._skip(gradients)
            return False
        to.add(gradients, versions=versions, example_count=example_count)
        if self.unchecked:
            return True
        if self._checks and is_first and not to.are_finite():
            to.clear()
            self._skip(gradients)
            return False
        if self._minibatch_guard.skips:
            self._minibatch_guard.passed()
        return True

    def leave_out(self, gradients: Sequence[torch.Tensor | None], *, for_others: bool) -> None:
        """Count a minibatch that is left out: for its own numbers, or for those of another process of the replica."""
        if for_others:
            self._left_out_with_others += 1
        else:
            self._skip(gradients)

    def passed(self) -> None:
        if self._minibatch_guard.skips:
            self._minibatch_guard.passed()

    def seal(self, gathered: Gradients) -> bool:
        """Return whether what has gathered may be sent; else leave it out."""
        if gathered.seal(checked=not self.unchecked):
            if self._payload_guard.skips:
                self._payload_guard.passed()
            return True
        count = gathered.minibatch_count
        gathered.clear()
        self._payload_guard.skipped(f"{count} minibatches, summed and converted for the wire,", (), math.inf)
        return False

    def note(self, receipts: Sequence[Receipt]) -> None:
        """Count an unchecked push that the servers refused for its NaN as skipped."""
        gradients, self.unchecked = self.unchecked, ()
        if not gradients:
            return
        for receipt in receipts:
            if receipt.reason == REASON_NOT_FINITE:
                self._skip(gradients)
                return
        if self._minibatch_guard.skips:
            self._minibatch_guard.passed()

    def _skip(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Count a minibatch as skipped, and log where it is not finite."""
        for tensor, gradient in zip(self._model.tensors, gradients, strict=True):
            if gradient is not None and not all_finite([gradient]):
                index = tuple(gradient.isfinite().logical_not().nonzero()[0].tolist())
                self._minibatch_guard.skipped(tensor.name, index, float(gradient[index]))
                return
        self._payload_guard.skipped("1 minibatch, converted for the wire,", (), math.inf)


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether no element is NaN or infinite; one pass over memory, on the tensors' own devices."""
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        sums.setdefault(tensor.device, []).append(tensor.sum().float())
    # A finite sum has finite terms only. Another may have overflowed, so then every term is checked.
    return all(bool(torch.stack(of_device).sum().isfinite()) for of_device in sums.values()) or all(
        bool(tensor.isfinite().all()) for tensor in tensors
    )


def surely_fit(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether one pass shows that all elements are finite in `dtype`; False leaves it open.

    It does so for float32 on the host only.
    """
    # The square of an element that is too large exceeds this by itself, however the sum is rounded: all terms are
    # positive. Float32 squares of what bfloat16 or float32 cannot hold are infinite.
    bound = torch.finfo(dtype).max ** 2 if dtype == torch.float16 else math.inf
    for tensor in tensors:
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return False
        flat = tensor.view(-1)
        # Not true of NaN either.
        if not torch.dot(flat, flat).item() < bound:
            return False
    return True


def all_fit(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether all elements are finite in `dtype`, by their extremes."""
    return all(
        bool(torch.stack(torch.aminmax(tensor)).to(dtype).isfinite().all()) for tensor in tensors if tensor.numel()
    )
