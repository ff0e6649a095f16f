"""What a process of a replica holds of each parameter (all of it, a block, or a copy), and where that lies in vectors.

DTensors say themselves how they are cut.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pyps_client.push import GroupRate
from pyps_client.replica.arrangement import Arrangement, Claim, Key
from pyps_client.replica.group import ALONE, Group, agreed
from pyps_client.torch.layout import Layout, blocks_of
from pyps_client.torch.rates import RateChanges
from pyps_wire.blocks import check_block
from pyps_wire.common_pb2 import OptimizerSettings
from pyps_wire.errors import BadRequest
from pyps_wire.partition import Model

if TYPE_CHECKING:
    from pyps_client.replica.processes import Replica


@dataclass(frozen=True)
class Claimed:
    """The parameters of a process, what it claims of each, and the plain tensors in which that lies."""

    parameters: tuple[torch.Tensor, ...]
    claims: tuple[Claim, ...]
    # A DTensor's own memory; else the parameter itself.
    local: tuple[torch.Tensor, ...]

    def gradients(self) -> list[torch.Tensor | None]:
        """This minibatch's gradient of each of `local`. All processes of a replica call it."""
        return [local_gradient(parameter) for parameter in self.parameters]


@dataclass(frozen=True)
class Cut:
    """What a worker, or one process of a replica, trains of a model that is cut over parts."""

    arrangement: Arrangement
    claimed: Claimed


def claims_of(groups: Sequence[Sequence[tuple[str, torch.Tensor]]], replica: Replica | None) -> Claimed:
    """Reads what this process holds of the parameters, by name, in each of the optimizer's groups.

    All processes of a replica call it, and what one of them must refuse all refuse. Raises BadRequest for DTensors
    without a replica, for placements that no server can hold, and for names that no process has.
    """
    peers: Group = ALONE if replica is None else replica
    candidates = agreed(peers, lambda: _candidates(groups, replica))
    of_processes = [set(of_process) for of_process in peers.all_gather([claim.key for claim in candidates])]
    named = [pair for group in groups for pair in group]
    if replica is not None:
        agreed(peers, lambda: _check_names(replica, {name for name, _ in named}, of_processes))
    claims = tuple(
        replace(claim, holders=frozenset(process for process in claim.holders if claim.key in of_processes[process]))
        for claim in candidates
    )
    parameters = tuple(parameter for _, parameter in named)
    return Claimed(parameters, claims, tuple(_local(parameter) for parameter in parameters))


def local_gradient(parameter: Any) -> torch.Tensor | None:
    """The gradient of what this process holds of a parameter; None where it has none.

    Collective where processes have yet to add up what each of them has of it, as of a replicated LayerNorm whose
    input is cut.
    """
    gradient: Any = parameter.grad
    if gradient is None or not _is_dtensor(parameter):
        own: torch.Tensor | None = gradient
        return own
    with torch.no_grad():
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        local = gradient.to_local()
        # Where it is still under way, the memory has yet to be filled.
        plain: torch.Tensor = local.wait() if hasattr(local, "wait") else local
        return plain


def _is_dtensor(parameter: Any) -> bool:
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(parameter, tensor.DTensor)


def _local(parameter: Any) -> torch.Tensor:
    local: torch.Tensor = parameter._local_tensor if _is_dtensor(parameter) else parameter
    return local


def _candidates(groups: Sequence[Sequence[tuple[str, Any]]], replica: Replica | None) -> list[Claim]:
    """The claims, with all processes as holders that may hold the same: those are meant that do."""
    on_mesh: frozenset[int] = frozenset()
    for name, parameter in itertools.chain(*groups):
        if _is_dtensor(parameter):
            if replica is None:
                raise BadRequest(
                    f"Parameter {name!r} is a DTensor, of which this process holds a part only: give RemoteOptimizer "
                    f"replica=Replica()."
                )
            on_mesh |= _positions(name, parameter.device_mesh.mesh, replica)
    return [
        _of_dtensor(name, parameter, index, replica)
        if replica is not None and _is_dtensor(parameter)
        else _of_plain(name, tuple(parameter.shape), index, replica, on_mesh)
        for index, group in enumerate(groups)
        for name, parameter in group
    ]


def _of_plain(
    name: str, shape: tuple[int, ...], param_group: int, replica: Replica | None, on_mesh: frozenset[int]
) -> Claim:
    whole_shape, offset = shape, (0,) * len(shape)
    if replica is None:
        return Claim(name, param_group, shape, whole_shape, offset, frozenset({0}))
    holders = frozenset({replica.index})
    if name in replica.blocks:
        whole_shape, offset = tuple(replica.blocks[name].whole_shape), tuple(replica.blocks[name].offset)
        check_block(name, shape, whole_shape, offset)
    else:
        # What parallelize_module leaves alone is the same in all processes of its mesh.
        holders |= on_mesh
    if name in replica.replicated:
        holders = frozenset(range(replica.count))
    return Claim(name, param_group, shape, whole_shape, offset, holders)


def _of_dtensor(name: str, parameter: Any, param_group: int, replica: Replica) -> Claim:
    # Not with the module: it takes seconds, and whoever has DTensors has loaded it.
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements
    foreign = next((placement for placement in placements if type(placement) not in (Shard, Replicate)), None)
    if foreign is not None:
        raise BadRequest(
            f"Parameter {name!r} has placements {tuple(placements)}; servers hold what is cut into one block a process "
            f"(Shard) or the same everywhere (Replicate), not {foreign}."
        )
    if name in replica.blocks or name in replica.replicated:
        raise BadRequest(f"Parameter {name!r} is a DTensor, which says itself how it is cut: leave it out of Replica.")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise BadRequest(f"Parameter {name!r} lies on a mesh that process {replica.index} of the replica is not in.")
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    of_copies = tuple(
        slice(None) if isinstance(placement, Replicate) else at
        for placement, at in zip(placements, coordinate, strict=True)
    )
    holders = _positions(name, mesh.mesh[of_copies], replica)
    return Claim(name, param_group, tuple(shape), tuple(parameter.shape), tuple(offset), holders)


def _positions(name: str, ranks: torch.Tensor, replica: Replica) -> frozenset[int]:
    """The replica's numbers of processes that torch's world numbers otherwise."""
    outside = sorted(set(ranks.flatten().tolist()).difference(replica.ranks))
    if outside:
        raise BadRequest(
            f"The mesh of parameter {name!r} reaches process {outside[0]} of torch.distributed, which is none of the "
            f"replica's: make the mesh and the Replica of the same processes."
        )
    return frozenset(replica.ranks.index(rank) for rank in ranks.flatten().tolist())


def _check_names(replica: Replica, own: set[str], of_processes: Sequence[set[Key]]) -> None:
    present = {name for of_process in of_processes for name, _, _ in of_process}
    absent = sorted(set(replica.blocks).difference(own)) or sorted(replica.replicated.difference(present))
    if absent:
        raise BadRequest(
            f"Replica speaks of {absent[0]!r}, but no parameter of the optimizer has this name: give names as "
            f"model.named_parameters() does, without what torch.compile adds."
        )


def layout_of(arrangement: Arrangement, claimed: Claimed) -> Layout:
    """The layout of what this process trains; a tensor that servers hold in several blocks is several of them."""
    model = Model(tuple(held.tensor for held in arrangement.held), arrangement.model.shard_size)
    ends = [0] * model.num_groups
    parameters: list[torch.Tensor] = []
    offsets: list[int] = []
    apart: set[int] = set()
    for index, (tensor, held) in enumerate(zip(model.tensors, arrangement.held, strict=True)):
        local = claimed.local[held.claim]
        if tensor.shape != tuple(local.shape):
            local = local.detach()[held.place]
            apart.add(index)
        elif local is not claimed.parameters[held.claim]:
            apart.add(index)
        parameters.append(local)
        offsets.append(ends[tensor.group])
        ends[tensor.group] += tensor.size
    return Layout(
        model=model,
        parameters=tuple(parameters),
        group_offsets=tuple(offsets),
        blocks=blocks_of(model.tensors, parameters, offsets),
        first_buffer=len(parameters),
        names={id(parameter): claim.name for parameter, claim in zip(claimed.parameters, claimed.claims, strict=True)},
        apart=frozenset(apart),
    )


class CutRates:
    """Learning rates of an optimizer's groups as those of the process's own vectors, which are more or fewer."""

    def __init__(self, arrangement: Arrangement) -> None:
        # Own vector -> the optimizer's group.
        self._groups = arrangement.own_param_groups

    def changes(self, of_groups: RateChanges) -> RateChanges:
        """The same changes, by own vector."""

        def changes() -> Mapping[int, GroupRate]:
            rates = of_groups()
            return {vector: rates[group] for vector, group in enumerate(self._groups) if group in rates}

        return changes

    def spread(self, rates: Sequence[float]) -> list[float]:
        """A number a vector, of one a group."""
        return [rates[group] for group in self._groups]


def settings_of(arrangement: Arrangement, settings: OptimizerSettings) -> OptimizerSettings:
    """The optimizer's settings with a group for each group of the cut model."""
    groups = [settings.groups[group] for group in arrangement.param_groups]
    return OptimizerSettings(rule=settings.rule, groups=groups)


def gradients_of(arrangement: Arrangement, claimed: Claimed) -> list[torch.Tensor | None]:
    """This minibatch's gradients, one entry a tensor of the layout. All processes of a replica call it."""
    local = claimed.gradients()
    return [None if (whole := local[held.claim]) is None else whole[held.place] for held in arrangement.held]
