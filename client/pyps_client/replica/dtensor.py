"""What a process of a replica holds of each parameter (all of it, a block, or a copy), and the layout of its part."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pyps_client.replica.arrangement import Arrangement, Claim, Key
from pyps_client.replica.group import Group, agreed
from pyps_client.torch.layout import Layout
from pyps_wire.common_pb2 import OptimizerSettings
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import Model, check_block


@dataclass(frozen=True)
class Claimed:
    """The parameters of a process and, of each, its claim and its plain tensor."""

    parameters: tuple[torch.Tensor, ...]
    claims: tuple[Claim, ...]
    # The local memory of a DTensor; otherwise the parameter itself.
    local: tuple[torch.Tensor, ...]

    def gradients(self) -> list[torch.Tensor | None]:
        """Return this minibatch's gradient of each of `local`, or None. All processes of a replica call it.

        The processes sum partial gradients, such as those of a replicated LayerNorm whose input is split.
        """
        gradients: list[torch.Tensor | None] = []
        with torch.no_grad():
            for parameter in self.parameters:
                gradient: Any = parameter.grad
                if gradient is not None and _is_dtensor(parameter):
                    placements = parameter.placements  # type: ignore[attr-defined]
                    if gradient.placements != placements:
                        gradient = gradient.redistribute(placements=placements)
                    gradient = gradient.to_local()
                    # The sum may not have arrived yet.
                    gradient = gradient.wait() if hasattr(gradient, "wait") else gradient
                gradients.append(gradient)
        return gradients


@dataclass(frozen=True)
class ModelCut:
    """The part of a split model that a worker, or one process of a replica, trains."""

    arrangement: Arrangement
    claimed: Claimed

    def layout(self) -> Layout:
        """Return the layout of the trained part. A tensor that servers hold in several blocks is several tensors."""
        held, claimed = self.arrangement.held, self.claimed
        model = Model(tuple(each.tensor for each in held), self.arrangement.model.shard_size)
        parameters: list[torch.Tensor] = []
        apart: set[int] = set()
        for index, (tensor, claim, place) in enumerate(held):
            local = claimed.local[claim]
            if local is not claimed.parameters[claim] or tensor.shape != tuple(local.shape):
                apart.add(index)
            parameters.append(local if tensor.shape == tuple(local.shape) else local.detach()[place])
        pairs = zip(claimed.parameters, claimed.claims, strict=True)
        return Layout(
            model=model,
            parameters=tuple(parameters),
            first_buffer=len(parameters),
            names={id(parameter): claim.name for parameter, claim in pairs},
            apart=frozenset(apart),
        )

    def settings(self, of_optimizer: OptimizerSettings) -> OptimizerSettings:
        groups = [of_optimizer.groups[group] for group in self.arrangement.param_groups]
        return OptimizerSettings(rule=of_optimizer.rule, groups=groups)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return this minibatch's gradients, one a tensor of the layout. All processes of a replica call it."""
        local = self.claimed.gradients()
        return [None if (whole := local[claim]) is None else whole[place] for _, claim, place in self.arrangement.held]


def claims_of(groups: Sequence[Sequence[tuple[str, torch.Tensor]]], replica: Group) -> Claimed:
    """Return the claims of this process, from the named parameters in each of the optimizer's groups.

    All processes of a replica call it, and all raise the error of one. Raises InvalidArgument for placements that no
    server can hold, and for names that no process has.
    """
    candidates = agreed(replica, lambda: _candidates(groups, replica))
    of_processes = [set(of_process) for of_process in replica.all_gather([claim.key for claim in candidates])]
    named = [pair for group in groups for pair in group]
    agreed(replica, lambda: _check_names(replica, {name for name, _ in named}, of_processes))
    claims = tuple(
        replace(claim, holders=frozenset(process for process in claim.holders if claim.key in of_processes[process]))
        for claim in candidates
    )
    parameters = tuple(parameter for _, parameter in named)
    return Claimed(parameters, claims, tuple(_local(parameter) for parameter in parameters))


def _is_dtensor(parameter: Any) -> bool:
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(parameter, tensor.DTensor)


def _local(parameter: Any) -> torch.Tensor:
    local: torch.Tensor = parameter._local_tensor if _is_dtensor(parameter) else parameter
    return local


def _candidates(groups: Sequence[Sequence[tuple[str, Any]]], replica: Group) -> list[Claim]:
    """Return the claims, with every process as a holder that may hold the same numbers."""
    on_mesh: frozenset[int] = frozenset()
    for name, parameter in itertools.chain(*groups):
        if _is_dtensor(parameter):
            on_mesh |= _positions(name, parameter.device_mesh.mesh, replica)
    return [
        _of_dtensor(name, parameter, index, replica)
        if _is_dtensor(parameter)
        else _of_plain(name, tuple(parameter.shape), index, replica, on_mesh)
        for index, group in enumerate(groups)
        for name, parameter in group
    ]


def _of_plain(name: str, shape: tuple[int, ...], param_group: int, replica: Group, on_mesh: frozenset[int]) -> Claim:
    # A parameter that parallelize_module leaves alone is the same in all processes of the mesh.
    whole_shape, offset, holders = shape, (0,) * len(shape), on_mesh | {replica.index}
    if name in replica.blocks:
        block = replica.blocks[name]
        whole_shape, offset, holders = tuple(block.whole_shape), tuple(block.offset), frozenset({replica.index})
        check_block(name, shape, whole_shape, offset)
    if name in replica.replicated:
        holders = frozenset(range(replica.count))
    return Claim(name, param_group, shape, whole_shape, offset, holders)


def _of_dtensor(name: str, parameter: Any, param_group: int, replica: Group) -> Claim:
    # Loading it takes seconds. A program that has DTensors has loaded it.
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements
    foreign = next((placement for placement in placements if type(placement) not in (Shard, Replicate)), None)
    if foreign is not None:
        raise InvalidArgument(
            f"Parameter {name!r} has placements {tuple(placements)}; servers hold a tensor that is split into one "
            f"block a process (Shard), or the same in all (Replicate), not {foreign}."
        )
    if name in replica.blocks or name in replica.replicated:
        raise InvalidArgument(
            f"Parameter {name!r} is a DTensor, whose placements say how it is split: leave it out of Replica."
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise InvalidArgument(f"Parameter {name!r} is on a mesh without process {replica.index} of the replica.")
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    of_copies = tuple(
        slice(None) if isinstance(placement, Replicate) else at
        for placement, at in zip(placements, coordinate, strict=True)
    )
    holders = _positions(name, mesh.mesh[of_copies], replica)
    return Claim(name, param_group, tuple(shape), tuple(parameter.shape), tuple(offset), holders)


def _positions(name: str, ranks: torch.Tensor, replica: Group) -> frozenset[int]:
    """Return the indices in the replica of processes that torch numbers by rank."""
    outside = sorted(set(ranks.flatten().tolist()).difference(replica.ranks))
    if outside:
        raise InvalidArgument(
            f"The mesh of parameter {name!r} has process {outside[0]} of torch.distributed, which is not in the "
            f"replica: make the mesh and the Replica of the same processes."
        )
    return frozenset(replica.ranks.index(rank) for rank in ranks.flatten().tolist())


def _check_names(replica: Group, own: set[str], of_processes: Sequence[set[Key]]) -> None:
    present = {name for of_process in of_processes for name, _, _ in of_process}
    absent = sorted(set(replica.blocks).difference(own)) or sorted(replica.replicated.difference(present))
    if absent:
        raise InvalidArgument(
            f"Replica names {absent[0]!r}, but no parameter of the optimizer has this name: give names as "
            f"model.named_parameters() does, without what torch.compile adds."
        )
