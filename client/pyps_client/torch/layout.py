"""Where a torch model's tensors lie in the flat vectors of their groups, and which of its state servers hold."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy.typing as npt
import torch

from pyps_client.log import logger
from pyps_client.torch.memory import is_plain, tensor_over
from pyps_wire.common_pb2 import PAYLOAD_KIND_BUFFER, PAYLOAD_KIND_GRADIENT
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import DEFAULT_SHARD_SIZE, Model, Tensor


@dataclass(frozen=True, slots=True)
class Range:
    """Tensors of one block that are neighbours in their group's vector too."""

    # Where the range begins, in the block's buffer and in the group's vector.
    block_offset: int
    group_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Block:
    """The tensors of one group on one device, which share flat buffers."""

    group: int
    device: torch.device
    # Indices of tensors, in order, by dtype: torch handles many tensors of one dtype at once.
    batches: tuple[tuple[int, ...], ...]
    # Where each tensor begins in the block's buffer, by index.
    offsets: Mapping[int, int]
    ranges: tuple[Range, ...]
    length: int

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Layout:
    """A model's parameters, in the optimizer's order, and their places in one vector per group."""

    model: Model
    parameters: tuple[torch.Tensor, ...]
    # The servers' names of the module's tensors, by id.
    names: Mapping[int, str]
    # The first of `parameters` that is a buffer (batch norm's statistics); buffers are the last group.
    first_buffer: int
    # Tensors that cannot be moved: parts of a parameter or of a DTensor.
    apart: frozenset[int] = frozenset()
    # Tensors that their own modules write in each forward pass, such as Embedding(max_norm=...).
    shortened: frozenset[int] = frozenset()

    @property
    def kinds(self) -> tuple[int, ...] | None:
        """The kind of each group's numbers; None where all are gradients."""
        if self.first_buffer == len(self.parameters):
            return None
        return (PAYLOAD_KIND_GRADIENT,) * (self.model.num_groups - 1) + (PAYLOAD_KIND_BUFFER,)

    @property
    def devices(self) -> str:
        """The devices in words: "cuda:0", "cpu, cuda:1"."""
        return ", ".join(dict.fromkeys(str(block.device) for block in self.blocks))

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        members: dict[tuple[int, torch.device], list[int]] = {}
        for index, tensor in enumerate(self.model.tensors):
            members.setdefault((tensor.group, self.parameters[index].device), []).append(index)
        return tuple(self._block(group, device, indices) for (group, device), indices in members.items())

    def places(self, flat: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return each tensor's place in its group's vector, by index."""
        offsets = zip(self.model.tensors, self.model.offsets, strict=True)
        return {index: self._place(flat[tensor.group], at, index) for index, (tensor, at) in enumerate(offsets)}

    def places_in_block(self, block: Block, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the places of a block's tensors in its buffer, by index."""
        return {index: self._place(flat, at, index) for index, at in block.offsets.items()}

    def own_place(self, vectors: Sequence[npt.NDArray[Any]], index: int) -> torch.Tensor:
        """Return a tensor's place in its group's vector as a storage of its own: it is saved without the others."""
        parameter, offset = self.parameters[index], self.model.offsets[index]
        vector = vectors[self.model.tensors[index].group]
        return tensor_over(vector[offset : offset + parameter.numel()]).view(parameter.shape)

    def may_lie_in_vectors(self, index: int) -> bool:
        """Return whether a tensor, or its gradient, can lie in a float32 vector on the host: no buffer can."""
        parameter = self.parameters[index]
        return (
            index < self.first_buffer
            and index not in self.apart
            and is_plain(parameter)
            and parameter.dtype == torch.float32
            and parameter.is_contiguous()
            and parameter.numel() > 0
        )

    def _place(self, flat: torch.Tensor, offset: int, index: int) -> torch.Tensor:
        """Return a view in the tensor's shape: in logical order, whatever its memory format."""
        return flat.narrow(0, offset, self.model.tensors[index].size).view(self.parameters[index].shape)

    def _block(self, group: int, device: torch.device, indices: Sequence[int]) -> Block:
        batches: dict[torch.dtype, list[int]] = {}
        begins: dict[int, int] = {}
        ranges: list[Range] = []
        length = 0
        for index in indices:
            size, offset = self.model.tensors[index].size, self.model.offsets[index]
            batches.setdefault(self.parameters[index].dtype, []).append(index)
            begins[index] = length
            last = ranges[-1] if ranges else None
            if last is not None and last.group_offset + last.length == offset:
                ranges[-1] = Range(last.block_offset, last.group_offset, last.length + size)
            else:
                ranges.append(Range(length, offset, size))
            length += size
        return Block(group, device, tuple(map(tuple, batches.values())), begins, tuple(ranges), length)


def plan(
    module: torch.nn.Module,
    param_groups: Sequence[Mapping[str, Any]],
    *,
    shard_size: int = DEFAULT_SHARD_SIZE,
    with_buffers: bool = False,
) -> Layout:
    """Lay out the parameters of an optimizer's groups; refuse those that no server can hold.

    With buffers, the model's saved floating-point buffers follow as a group of their own.
    """
    groups = named_groups(module, param_groups)
    split = next((name for group in groups for name, parameter in group if hasattr(parameter, "placements")), None)
    if split is not None:
        raise InvalidArgument(
            f"Parameter {split!r} is a DTensor, of which this process holds a part only: give RemoteOptimizer "
            f"replica=Replica()."
        )
    first_buffer = sum(map(len, groups))
    if with_buffers:
        groups.append([(plain_name(name), buffer) for name, buffer in shareable_buffers(module).items()])
    tensors = tuple(
        Tensor(name, tuple(each.shape), index) for index, group in enumerate(groups) for name, each in group
    )
    parameters = tuple(parameter for group in groups for _, parameter in group)
    _refuse_overlaps(parameters, [tensor.name for tensor in tensors])
    shortened = {
        id(getattr(part, "weight", None)) for part in module.modules() if getattr(part, "max_norm", None) is not None
    }
    return Layout(
        Model(tensors, shard_size=shard_size, name=_name_of(module)),
        parameters,
        names={id(parameter): name for group in groups for name, parameter in group},
        first_buffer=first_buffer,
        shortened=frozenset(index for index, parameter in enumerate(parameters) if id(parameter) in shortened),
    )


def named_groups(
    module: torch.nn.Module, param_groups: Sequence[Mapping[str, Any]]
) -> list[list[tuple[str, torch.Tensor]]]:
    """Return each group's parameters with their names in the module; refuse those that no server can hold."""
    names = {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}
    empty = next((index for index, group in enumerate(param_groups) if not group["params"]), None)
    if empty is not None:
        raise InvalidArgument(f"Parameter group {empty} is empty: leave it out.")
    return [
        [
            (_checked_name(parameter, names, f"Parameter {index} of group {group_index}"), parameter)
            for index, parameter in enumerate(group["params"])
        ]
        for group_index, group in enumerate(param_groups)
    ]


def shareable_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's saved floating-point buffers, by the module's own names."""
    saved = module.state_dict(keep_vars=True)
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if name in saved and buffer.is_floating_point() and buffer.numel()
    }


def whole_state(module: torch.nn.Module, layout: Layout, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model's state dict on the CPU: the servers' float32 values, and this worker's where they have none.

    Names are the model's original ones, without torch.compile's prefix; a tied tensor has an entry for each name.
    """
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        shared = layout.names.get(id(value))
        if shared is not None:
            state[plain_name(name)] = held[shared]
        elif isinstance(value, torch.Tensor):
            state[plain_name(name)] = value.detach().to("cpu", copy=True)
    # The other processes of a replica have more tensors.
    return state | {name: values for name, values in held.items() if name not in state}


def warn_of_unshared(module: torch.nn.Module, layout: Layout) -> None:
    parameters = [name for name, value in module.named_parameters() if id(value) not in layout.names]
    buffers = [] if layout.kinds else list(shareable_buffers(module))
    for kind, names, remedy in (
        ("buffers", buffers, "buffers='average' shares them"),
        ("parameters", parameters, "give the optimizer all parameters, frozen ones too, to share them"),
    ):
        if names:
            logger.warning(
                "%s (%s) are not shared: each worker keeps its own, and pyps export does not contain them (%s)",
                *(kind, several(list(map(plain_name, names))), remedy),
            )


def warn_of_float64(layout: Layout) -> None:
    tensors = zip(layout.model.tensors, layout.parameters, strict=True)
    wide = [tensor.name for tensor, parameter in tensors if parameter.dtype == torch.float64]
    if wide:
        logger.warning(
            "%s %s float64, but servers hold and update float32: the model's numbers are float32's after each pull.",
            *(several(wide), "are" if len(wide) > 1 else "is"),
        )


def several(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def plain_name(name: str) -> str:
    """Return a tensor's name without torch.compile's prefix: compiled and plain workers must agree."""
    return name.replace("_orig_mod.", "")


def _name_of(module: torch.nn.Module) -> str:
    """Return the model's class, with a digest of its modules' classes to tell two Sequential apart."""
    # torch.compile's wrapper is no part of the model.
    inner = getattr(module, "_orig_mod", module)
    kinds = {
        plain_name(f"{name}."): getattr(part, "original_name", type(part).__name__)
        for name, part in inner.named_modules()
    }
    text = "\n".join(f"{name} {kind}" for name, kind in kinds.items())
    return f"{kinds['.'][:100]} ({zlib.crc32(text.encode()):08x})"


def _checked_name(parameter: Any, names: Mapping[int, str], where: str) -> str:
    """Return the parameter's name in the model; refuse one that servers cannot hold."""
    if torch.nn.parameter.is_lazy(parameter):
        raise InvalidArgument(
            f"{where} has no shape yet: run one batch through the model before RemoteOptimizer is made."
        )
    if id(parameter) not in names:
        raise InvalidArgument(
            f"{where} (shape {tuple(parameter.shape)}) is not a parameter of the model: give RemoteOptimizer "
            f"the model whose parameters the optimizer was made with, after it was moved or wrapped."
        )
    name = names[id(parameter)]
    if problem := _problem(parameter):
        raise InvalidArgument(f"{where}, {name!r} of shape {tuple(parameter.shape)}, {problem}.")
    return name


def _problem(parameter: torch.Tensor) -> str:
    if parameter.is_inference():
        return "was made under torch.inference_mode(), so that nothing can train it: make the model outside"
    if parameter.is_meta:
        return "is on the meta device and has no values: materialise the model first"
    if parameter.layout != torch.strided:
        return f"has layout {parameter.layout}; servers hold dense parameters only"
    if parameter.is_complex():
        return f"is complex ({parameter.dtype}); train its real view (torch.view_as_real)"
    if not parameter.is_floating_point():
        return f"has dtype {parameter.dtype}; servers hold floating-point parameters only"
    if any(stride == 0 and size > 1 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
        return "is an expanded tensor whose elements share memory: make it contiguous"
    return ""


def _refuse_overlaps(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Refuse different parameters on the same memory: each would overwrite the other.

    Disjoint views of one storage, as in a flattened LSTM, are fine.
    """
    spans = []
    for parameter, name in zip(parameters, names, strict=True):
        if parameter.numel():
            reach = 1 + sum(
                (size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
            )
            begin = parameter.data_ptr()
            spans.append((str(parameter.device), begin, begin + reach * parameter.element_size(), name))
    for (device, _, end, name), (next_device, begin, _, next_name) in pairwise(sorted(spans)):
        if device == next_device and begin < end:
            raise InvalidArgument(
                f"The parameters {name!r} and {next_name!r} are different Parameter objects that share "
                f"memory: they would be trained as two and overwrite each other. Tie them as one Parameter "
                f"(model.a.weight = model.b.weight)."
            )
