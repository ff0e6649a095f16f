"""Where gradients gather, and their form on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch

from pyps_client.torch.conversion import torch_dtype
from pyps_client.torch.flat import (
    may_lie_in_vectors,
    own_place,
    places_in,
    places_of_block,
    recorded_event,
    tensor_over,
)
from pyps_client.torch.layout import Block, Layout
from pyps_client.torch.looks import all_finite, all_fit, surely_fit
from pyps_wire.allocator import give_back_free_memory
from pyps_wire.codecs import Codec

# So much of freed gradients is worth to be given back to the system.
LARGE_BYTES = 16 << 20


class GradientBuffer:
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
        # What a session pushes; valid after seal() and ready().
        self.vectors = vectors
        self._layout = layout
        self._host = [tensor_over(vector) for vector in vectors]
        self._dtype = self._host[0].dtype
        # The type that must hold the numbers in the end.
        self.wire_dtype = (codec and torch_dtype(codec)) or self._dtype
        self._flat = [self._block_buffer(block) for block in layout.blocks]
        # Converted on the device, so that only the wire's type crosses the bus.
        self._wire = [
            torch.empty_like(flat, dtype=self._dtype)
            if flat is not None and flat.device.type != "cpu" and self._dtype != torch.float32
            else flat
            for flat in self._flat
        ]
        on_host = places_in(layout, self._host)
        self._places = [
            places_of_block(block, flat, layout.parameters, on_host)
            for block, flat in zip(layout.blocks, self._flat, strict=True)
        ]
        # Tensor index -> the address of its place in the vectors, where gradients gather right there.
        self._addresses = {
            index: place.data_ptr()
            for flat, places in zip(self._flat, self._places, strict=True)
            for index, place in (places if flat is None else {}).items()
            if place.numel()
        }
        # Where the vectors lie in memory, from an address to behind another.
        self._ranges = [(host.data_ptr(), host.data_ptr() + host.nbytes) for host in self._host]
        self._events: list[torch.cuda.Event] = []
        # What the numbers of each group mean, as a session takes it.
        self.kinds = layout.kinds
        self.present = [False] * len(layout.parameters)
        self.minibatch_count = 0
        self.example_count = 0
        # Whether a look at what has gathered showed that all of it can be sent.
        self._seen_fit = False
        # Whether the memory of the model's own gradients was given back.
        self._gave_back = False
        # Versions of the parameters that the first and the newest of the minibatches were computed on.
        self.base_versions: Mapping[int, int] = {}
        self.newest_base_versions: Mapping[int, int] = {}

    def add(
        self, gradients: Sequence[torch.Tensor | None], *, versions: Mapping[int, int], example_count: int = 0
    ) -> None:
        """Adds one minibatch's gradients, which were computed on parameters of these versions.

        Amid it an exception, as Ctrl-C raises, leaves nothing gathered: what is half added cannot be told apart.
        """
        try:
            for block, places in zip(self._layout.blocks, self._places, strict=True):
                for batch in block.batches:
                    self._add_batch(batch, places, gradients)
        except BaseException:
            self.clear()
            raise
        self._seen_fit = False
        if self.minibatch_count == 0:
            self.base_versions = versions
        self.newest_base_versions = versions
        self.minibatch_count += 1
        self.example_count += example_count

    def are_finite(self) -> bool:
        """True when what has gathered holds no NaN and no infinity; one pass over memory, where it lies."""
        gathered = list(self._gathered())
        self._seen_fit = surely_fit(gathered, self.wire_dtype)
        return self._seen_fit or all_finite(gathered)

    def hand_out(self) -> None:
        """Makes the model's gradients tensors in the vectors, values lost, where nothing has gathered yet.

        Where there is no gradient there still is none.
        """
        if self.minibatch_count:
            self.take_back()
            return
        # Let go together: apart, each one's memory would soon hold some small thing, and could not be given back.
        replaced: list[torch.Tensor] = []
        for index, address in self._addresses.items():
            parameter = self._layout.parameters[index]
            gradient = parameter.grad
            if gradient is None or _lies_at(gradient, address):
                continue
            if may_lie_in_vectors(self._layout, index) and _is_plain(gradient):
                parameter.grad = own_place(self._layout, self.vectors, index)
                replaced.append(gradient)
        num_bytes = sum(gradient.nbytes for gradient in replaced)
        # Where every minibatch has new ones all the same, their memory serves the next.
        if num_bytes > LARGE_BYTES and not self._gave_back:
            del gradient
            replaced.clear()
            self._gave_back = give_back_free_memory()

    def take_back(self) -> None:
        """Gives the model's gradients memory of their own, values and all: what has gathered stays as it is."""
        for index, address in self._addresses.items():
            parameter = self._layout.parameters[index]
            if parameter.grad is not None and _lies_at(parameter.grad, address):
                parameter.grad = parameter.grad.clone()

    def seal(self, *, checked: bool = True) -> bool:
        """Converts what was gathered to the vectors' type and starts its way to the host.

        False when the sum overflowed, or would in the wire's type: nothing of it may be sent. Without `checked` nobody
        looks.
        """
        if checked and not self._fits():
            return False
        for block, flat, wire in zip(self._layout.blocks, self._flat, self._wire, strict=True):
            if flat is None or wire is None:
                continue
            # None of these takes part in autograd.
            if wire is not flat:
                wire.copy_(flat)
            for stretch in block.stretches:
                target = self._host[block.group].narrow(0, stretch.group_offset, stretch.length)
                source = wire.narrow(0, stretch.block_offset, stretch.length)
                target.copy_(source, non_blocking=block.on_cuda)
            if block.on_cuda:
                self._events.append(recorded_event(block.device))
        return True

    def ready(self) -> None:
        """Returns once the vectors on the host hold what was sealed."""
        while self._events:
            self._events.pop().synchronize()

    def sums(self) -> list[torch.Tensor | None]:
        """What was gathered, in float32, one entry a tensor; None where there is nothing."""
        places = {index: place for of_block in self._places for index, place in of_block.items()}
        return [places[index] if present else None for index, present in enumerate(self.present)]

    def clear(self) -> None:
        """Makes all tensors absent, for the next gradients. The vectors must rest no longer."""
        self.present = [False] * len(self.present)
        self.minibatch_count = 0
        self.example_count = 0

    def _add_batch(
        self, batch: Sequence[int], places: Mapping[int, torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Adds the gradients of tensors of one dtype, all of them in as few calls of torch as there can be."""
        first: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        again: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for index in batch:
            gradient = gradients[index]
            if gradient is None:
                continue
            if not self._gathered_there(index, gradient):
                targets, values = again if self.present[index] else first
                targets.append(places[index])
                # Another view of the vectors (turned, moved, of another tensor) would be overwritten while it is read.
                views = any(begin <= gradient.data_ptr() < end for begin, end in self._ranges)
                values.append(gradient.clone() if views else gradient)
            self.present[index] = True
        if first[0]:
            with torch.no_grad():
                torch._foreach_copy_(*first)
        if again[0]:
            with torch.no_grad():
                torch._foreach_add_(*again)

    def _gathered_there(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether the gradient is the tensor's place in the vectors, number by number."""
        if gradient.data_ptr() != self._addresses.get(index):
            return False
        return gradient.is_contiguous() and not gradient.is_neg() and not gradient.is_conj()

    def _fits(self) -> bool:
        """True when the sums are finite, and still so in the wire's type."""
        if self._seen_fit:
            return True
        gathered = list(self._gathered())
        return surely_fit(gathered, self.wire_dtype) or all_fit(gathered, self.wire_dtype)

    def _gathered(self) -> Iterator[torch.Tensor]:
        """The float32 sums of the tensors that are present, where they gather, in long stretches where all are."""
        for block, flat, places in zip(self._layout.blocks, self._flat, self._places, strict=True):
            if not all(self.present[index] for index in places):
                yield from (place for index, place in places.items() if self.present[index])
            elif flat is not None:
                yield flat
            else:
                host = self._host[block.group]
                yield from (host.narrow(0, stretch.group_offset, stretch.length) for stretch in block.stretches)

    def _block_buffer(self, block: Block) -> torch.Tensor | None:
        """The block's own flat buffer; None where gradients gather right in the group's vector on the host."""
        if block.device.type == "cpu" and self._dtype == torch.float32:
            return None
        return torch.zeros(block.length, dtype=torch.float32, device=block.device)


def _lies_at(gradient: torch.Tensor, address: int) -> bool:
    """Whether the gradient's memory begins there; sparse ones have none."""
    return gradient.layout == torch.strided and gradient.data_ptr() == address


def _is_plain(gradient: torch.Tensor) -> bool:
    """True for what a float32 view on the CPU can stand for."""
    return (
        type(gradient) is torch.Tensor
        and gradient.device.type == "cpu"
        and gradient.dtype == torch.float32
        and gradient.layout == torch.strided
    )
