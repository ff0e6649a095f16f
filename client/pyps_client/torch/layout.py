"""The places of a torch model's tensors in their groups' vectors, and the part of its state that servers hold."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from pyps_client.log import logger
from pyps_wire.common_pb2 import PAYLOAD_KIND_BUFFER, PAYLOAD_KIND_GRADIENT
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import DEFAULT_SHARD_SIZE, Model, Tensor


@dataclass(frozen=True, slots=True)
class Range:
    """Neighbouring tensors of one block that are neighbours in their group's vector too."""

    # The first number, in the block's buffer and in the group's vector.
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
    # The first number of each tensor in the block's buffer, by index.
    offsets: Mapping[int, int]
    ranges: tuple[Range, ...]
    length: int

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True, slots=True)
class Layout:
    """The plan by which parameters, in the optimizer's order, become one vector a group and back."""

    model: Model
    parameters: tuple[torch.Tensor, ...]
    # The first number of each tensor in its group's vector.
    group_offsets: tuple[int, ...]
    blocks: tuple[Block, ...]
    # The first of `parameters` that is a buffer (batch norm's statistics); buffers are the last group.
    first_buffer: int
    # The servers' names of the module's tensors, by id.
    names: Mapping[int, str]
    # Tensors that cannot move, as parts of a parameter or a DTensor.
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
    cut = next((name for group in groups for name, parameter in group if hasattr(parameter, "placements")), None)
    if cut is not None:
        raise InvalidArgument(
            f"Parameter {cut!r} is a DTensor, of which this process holds a part only: give RemoteOptimizer "
            f"replica=Replica()."
        )
    first_buffer = sum(map(len, groups))
    if with_buffers:
        groups.append([(plain_name(name), buffer) for name, buffer in shareable_buffers(module).items()])
    parameters: list[torch.Tensor] = []
    tensors: list[Tensor] = []
    offsets: list[int] = []
    for group_index, group in enumerate(groups):
        offset = 0
        for name, parameter in group:
            tensors.append(Tensor(name, tuple(parameter.shape), group_index))
            parameters.append(parameter)
            offsets.append(offset)
            offset += parameter.numel()
    _refuse_overlaps(parameters, [tensor.name for tensor in tensors])
    shortened = {
        id(getattr(part, "weight", None)) for part in module.modules() if getattr(part, "max_norm", None) is not None
    }
    return Layout(
        model=Model(tuple(tensors), shard_size=shard_size, name=_name_of(module)),
        parameters=tuple(parameters),
        group_offsets=tuple(offsets),
        blocks=blocks_of(tensors, parameters, offsets),
        first_buffer=first_buffer,
        names={id(tensor): spec.name for tensor, spec in zip(parameters, tensors, strict=True)},
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
            (_checked_name(parameter, names, group=group_index, index=index), parameter)
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


def blocks_of(
    tensors: Sequence[Tensor], parameters: Sequence[torch.Tensor], offsets: Sequence[int]
) -> tuple[Block, ...]:
    """Return the tensors by group and device, each with its place in flat buffers."""
    members: dict[tuple[int, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        members.setdefault((tensor.group, parameters[index].device), []).append(index)
    blocks = []
    for (group, device), indices in members.items():
        batches: dict[torch.dtype, list[int]] = {}
        begins: dict[int, int] = {}
        ranges: list[Range] = []
        length = 0
        for index in indices:
            size = parameters[index].numel()
            batches.setdefault(parameters[index].dtype, []).append(index)
            begins[index] = length
            last = ranges[-1] if ranges else None
            if last is not None and last.group_offset + last.length == offsets[index]:
                ranges[-1] = Range(last.block_offset, last.group_offset, last.length + size)
            else:
                ranges.append(Range(length, offsets[index], size))
            length += size
        blocks.append(Block(group, device, tuple(map(tuple, batches.values())), begins, tuple(ranges), length))
    return tuple(blocks)


def whole_state(module: torch.nn.Module, layout: Layout, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model's state dict with the servers' values, and this worker's own where servers hold none.

    Names are the model's original ones, without torch.compile's prefix; a tied tensor stands under each of its names.
    The servers' values are float32; all are on the CPU.
    """
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        shared = layout.names.get(id(value))
        if shared is not None:
            state[plain_name(name)] = held[shared]
        elif isinstance(value, torch.Tensor):
            state[plain_name(name)] = value.detach().to("cpu", copy=True)
    # Then those of the replica's other processes.
    return state | {name: values for name, values in held.items() if name not in state}


def tell_unshared(module: torch.nn.Module, layout: Layout) -> None:
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


def tell_narrowed(layout: Layout) -> None:
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


def _name_of(module: torch.nn.Module) -> str:
    """Return the model's class, with a digest of its modules' classes, which tells two Sequential apart."""
    # What torch.compile puts around a module is no part of it.
    inner = getattr(module, "_orig_mod", module)
    kinds: dict[str, str] = {}
    for name, part in inner.named_modules():
        kinds[plain_name(f"{name}.")] = getattr(part, "original_name", type(part).__name__)
    text = "\n".join(f"{name} {kind}" for name, kind in kinds.items())
    return f"{type(inner).__name__[:100]} ({zlib.crc32(text.encode()):08x})"


def plain_name(name: str) -> str:
    """Return a tensor's name without torch.compile's prefix: compiled and plain workers must agree."""
    return name.replace("_orig_mod.", "")


def _checked_name(parameter: Any, names: Mapping[int, str], *, group: int, index: int) -> str:
    """Return the parameter's name in the model; refuse one that servers cannot hold."""
    where = f"Parameter {index} of group {group}"
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
    problem = _problem(parameter)
    if problem:
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
    """Refuse different parameters on the same memory: each would be trained by itself and overwrite the other.

    Disjoint views of one storage, as in a flattened LSTM, are fine.
    """
    spans = sorted(
        (str(parameter.device), parameter.data_ptr(), parameter.data_ptr() + _span_bytes(parameter), name)
        for parameter, name in zip(parameters, names, strict=True)
        if parameter.numel()
    )
    for (device, _, end, name), (next_device, begin, _, next_name) in pairwise(spans):
        if device == next_device and begin < end:
            raise InvalidArgument(
                f"The parameters {name!r} and {next_name!r} are different Parameter objects that share "
                f"memory: they would be trained as two and overwrite each other. Tie them as one Parameter "
                f"(model.a.weight = model.b.weight)."
            )


def _span_bytes(parameter: torch.Tensor) -> int:
    reach = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return reach * parameter.element_size()
