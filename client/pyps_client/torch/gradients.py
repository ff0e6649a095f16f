"""Gradients as they gather and as they are sent, and the checks that keep NaN and infinity from the servers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch

from pyps_client.torch.device_codecs import DEVICE_TYPES, ENCODINGS, DeviceVector
from pyps_client.torch.layout import Block, Layout
from pyps_client.torch.memory import is_plain, recorded_event, tensor_over, torch_dtype
from pyps_client.vectors import FiniteGuard, Vectors
from pyps_wire.allocator import give_back_free_memory
from pyps_wire.codecs import Codec
from pyps_wire.common_pb2 import PAYLOAD_KIND_GRADIENT, REASON_NOT_FINITE, Receipt
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import Model

# A minibatch's gradients, one entry per tensor; None: no gradient.
Minibatch = Sequence[torch.Tensor | None]

# Freed gradients of this size are given back to the system.
LARGE_BYTES = 16 << 20


class Gradients:
    """Gradients of one or more minibatches, summed tensor by tensor, and their form on the wire.

    Tensors without a gradient are absent, which is not a gradient of zero. Sums are float32, on the parameters' device.
    On the CPU they gather in the pushed vectors; after `hand_out` the model computes its gradients there.
    """

    def __init__(self, layout: Layout, vectors: list[npt.NDArray[Any]], *, codec: Codec | None = None) -> None:
        """`vectors`: one per group, float32, float16, or uint16 (bfloat16's bits).

        `codec`: what the worker converts float32 vectors to; None where they are sent as they are.
        """
        # The payload; valid after seal() and ready(), but for groups that are encoded on their device.
        self.vectors = vectors
        # What a push sends: the vectors, and from seal() to clear() such groups on their device.
        self.sealed: Vectors = vectors
        self._sealed: list[Any] = [*vectors]
        self._layout = layout
        host = [tensor_over(vector) for vector in vectors]
        dtype = host[0].dtype
        # The type of the payload on the wire.
        self.wire_dtype = (codec and torch_dtype(codec)) or dtype
        # The first address of each vector, and the one behind it.
        self._ranges = [(vector.data_ptr(), vector.data_ptr() + vector.nbytes) for vector in host]
        # By index, where each tensor gathers, and its place in the vectors.
        self._on_host = layout.places(host)
        self._places = dict(self._on_host)
        # The addresses of tensors that gather in the vectors.
        self._addresses: dict[int, int] = {}
        # Each block's places as a few long slices.
        self._slices: list[list[torch.Tensor]] = []
        # Blocks that gather in buffers of their own: the buffer, the same in the wire's type (converted on the device,
        # before the bus), and pairs of pieces to copy, to the vectors and from the buffer.
        self._apart: list[tuple[Block, torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]] = []
        for block in layout.blocks:
            targets = [host[block.group].narrow(0, piece.group_offset, piece.length) for piece in block.ranges]
            # The whole group, in the vector's order: shards do not begin where tensors do.
            encodes = (
                codec in ENCODINGS
                and block.device.type in DEVICE_TYPES
                and block.length == len(vectors[block.group])
                and (layout.kinds is None or layout.kinds[block.group] == PAYLOAD_KIND_GRADIENT)
            )
            if block.device.type == "cpu" and dtype == torch.float32 and not encodes:
                own = {index: self._places[index] for index in block.offsets}
                self._addresses |= {index: place.data_ptr() for index, place in own.items() if place.numel()}
                self._slices.append(targets)
            else:
                flat = torch.zeros(block.length, dtype=torch.float32, device=block.device)
                converts = block.device.type != "cpu" and dtype != torch.float32
                wire = torch.empty_like(flat, dtype=dtype) if converts else flat
                self._places |= layout.places_in_block(block, flat)
                sources = [wire.narrow(0, piece.block_offset, piece.length) for piece in block.ranges]
                self._slices.append([flat])
                if encodes:
                    self._sealed[block.group], targets, sources = DeviceVector(flat), [], []
                self._apart.append((block, flat, wire, list(zip(targets, sources, strict=True))))
        # Tensors of one dtype, for one call of torch.
        self._batches = [batch for block in layout.blocks for batch in block.batches]
        self._whole = [each for slices in self._slices for each in slices]
        self._events: list[torch.cuda.Event] = []
        self.kinds = layout.kinds
        # True where all gathered numbers were found finite in the wire's type.
        self._known_to_fit = False
        # True once memory of the model's own gradients was given back to the system.
        self._gave_back = False
        # Versions of the parameters that the first and the newest of the minibatches were computed on.
        self.base_versions: Mapping[int, int] = {}
        self.newest_base_versions: Mapping[int, int] = {}
        self.clear()

    def add(self, gradients: Minibatch, *, versions: Mapping[int, int], example_count: int = 0) -> None:
        """Add one minibatch's gradients, which were computed on parameters of these versions.

        After an exception such as Ctrl-C nothing has gathered: half of a sum is of no use.
        """
        try:
            for batch in self._batches:
                self._add_batch(batch, gradients)
        except BaseException:
            self.clear()
            raise
        self._known_to_fit = False
        if self.minibatch_count == 0:
            self.base_versions = versions
        self.newest_base_versions = versions
        self.minibatch_count += 1
        self.example_count += example_count

    def lay(self, index: int, gradient: torch.Tensor, *, factor: float = 1.0) -> torch.cuda.Event | None:
        """Copy one tensor's whole gradient, times a factor, to its place in the vectors.

        From a device it is there after the event; what was copied stays among `sums`, on the device.
        """
        place = self._places[index]
        if index in self._addresses:
            self._add_batch((index,), {index: gradient})
        with torch.no_grad():
            if index not in self._addresses:
                self.present[index] = True
                place.copy_(gradient)
            if factor != 1.0:
                place.mul_(factor)
            if place is not (on_host := self._on_host[index]):
                on_host.copy_(place, non_blocking=place.is_cuda)
        return recorded_event(place.device) if place.is_cuda else None

    def fits(self, numbers: npt.NDArray[Any]) -> bool:
        return all_fit([tensor_over(numbers)], self.wire_dtype)

    def are_finite(self) -> bool:
        gathered = self._gathered()
        self._known_to_fit = surely_fit(gathered, self.wire_dtype)
        return self._known_to_fit or all_finite(gathered)

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
            if gradient is None or not is_plain(gradient) or gradient.data_ptr() == address:
                continue
            if gradient.dtype == torch.float32 and self._layout.may_lie_in_vectors(index):
                parameter.grad = self._layout.own_place(self.vectors, index)
                replaced.append(gradient)
        # Once: a program that makes new ones for every minibatch uses their memory again.
        if not self._gave_back and sum(gradient.nbytes for gradient in replaced) > LARGE_BYTES:
            del gradient
            replaced.clear()
            self._gave_back = give_back_free_memory()

    def take_back(self) -> None:
        """Copy the model's gradients out of the vectors; what has gathered stays as it is."""
        for index, address in self._addresses.items():
            parameter = self._layout.parameters[index]
            gradient = parameter.grad
            if gradient is not None and gradient.layout == torch.strided and gradient.data_ptr() == address:
                parameter.grad = gradient.clone()

    def seal(self, *, checked: bool = True) -> bool:
        """Convert what has gathered to the vectors' type and start its copy to the host.

        Return False where the sum is not finite in the wire's type, and must not be sent; not `checked`: always True.
        """
        if checked and not self._known_to_fit and not all_fit(self._gathered(), self.wire_dtype):
            return False
        for block, flat, wire, copies in self._apart:
            # None of these takes part in autograd.
            if wire is not flat:
                wire.copy_(flat)
            for target, source in copies:
                target.copy_(source, non_blocking=block.on_cuda)
            if block.on_cuda:
                self._events.append(recorded_event(block.device))
        self.sealed = self._sealed
        return True

    def ready(self) -> None:
        """Return once what was sealed may be read: the vectors on the host, or sums on a device."""
        while self._events:
            self._events.pop().synchronize()

    def sums(self) -> list[torch.Tensor | None]:
        """Return the gathered sums in float32, one entry per tensor; None without one."""
        return [self._places[index] if present else None for index, present in enumerate(self.present)]

    def clear(self) -> None:
        self.sealed = self.vectors
        self.present = [False] * len(self._layout.parameters)
        self.minibatch_count = 0
        self.example_count = 0

    def _add_batch(self, batch: Sequence[int], gradients: Minibatch | Mapping[int, torch.Tensor]) -> None:
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
        with torch.no_grad():
            if first[0]:
                torch._foreach_copy_(*first)
            if again[0]:
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

    A minibatch that the servers check before they apply any of it is sent unchecked: their receipts say the result.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._minibatch_guard = FiniteGuard()
        self._payload_guard = FiniteGuard()
        # Minibatches that another process of the replica refused.
        self._left_out_with_others = 0
        # The gathering minibatch, if the servers will check it for NaN.
        self.unchecked: Minibatch = ()

    @property
    def skipped(self) -> int:
        """Minibatches and sums of minibatches that were left out because they were not finite."""
        return self._minibatch_guard.skips_total + self._payload_guard.skips_total + self._left_out_with_others

    def add(
        self,
        gradients: Minibatch,
        *,
        to: Gradients,
        versions: Mapping[int, int],
        example_count: int,
        server_checks: bool,
    ) -> bool:
        """Add a minibatch to what has gathered; return False where it is not finite, and left out.

        `server_checks`: it is sent alone, to a server that checks it.
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
        if not is_first and not all_finite([each for each in gradients if each is not None]):
            self.leave_out(gradients)
            return False
        to.add(gradients, versions=versions, example_count=example_count)
        if self.unchecked:
            return True
        if is_first and not to.are_finite():
            to.clear()
            self.leave_out(gradients)
            return False
        self._minibatch_guard.skips = 0
        return True

    def passed(self) -> None:
        self._minibatch_guard.skips = 0

    def leave_out(self, gradients: Minibatch, *, for_others: bool = False) -> None:
        """Count a minibatch as left out, and log where it is not finite; `for_others`: in another process."""
        if for_others:
            self._left_out_with_others += 1
            return
        for tensor, gradient in zip(self._model.tensors, gradients, strict=True):
            if gradient is not None and not all_finite([gradient]):
                index = tuple(gradient.isfinite().logical_not().nonzero()[0].tolist())
                self._minibatch_guard.skipped(tensor.name, index, float(gradient[index]))
                return
        self._payload_guard.skipped("1 minibatch, converted for the wire,", (), math.inf)

    def seal(self, gathered: Gradients) -> bool:
        """Return whether what has gathered may be sent; otherwise leave it out."""
        if gathered.seal(checked=not self.unchecked):
            self._payload_guard.skips = 0
            return True
        count = gathered.minibatch_count
        gathered.clear()
        self._payload_guard.skipped(f"{count} minibatches, summed and converted for the wire,", (), math.inf)
        return False

    def note(self, receipts: Sequence[Receipt]) -> None:
        """Count an unchecked push that the servers refused for its NaN as left out."""
        gradients, self.unchecked = self.unchecked, ()
        if not gradients:
            return
        for receipt in receipts:
            if receipt.reason == REASON_NOT_FINITE:
                self.leave_out(gradients)
                return
        self.passed()


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether no element is NaN or infinite; one pass over memory, on the tensors' own devices."""
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        sums.setdefault(tensor.device, []).append(tensor.sum().float())
    # A finite sum has finite terms only. Another may have overflowed, so then every term is checked.
    return all(bool(torch.stack(of_device).sum().isfinite()) for of_device in sums.values()) or all(
        bool(tensor.isfinite().all()) for tensor in tensors
    )


def all_fit(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether all elements are finite in `dtype`."""
    return surely_fit(tensors, dtype) or all(
        bool(torch.stack(torch.aminmax(tensor)).to(dtype).isfinite().all()) for tensor in tensors if tensor.numel()
    )


def surely_fit(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether one pass proves that all elements are finite in `dtype`; it can for float32 on the host only."""
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
