"""What a process of a replica holds of each parameter: all of it, a block, or a copy; read off DTensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pyps_client.claims import Claim
from pyps_client.peers import ALONE, Peers, agreed
from pyps_client.torch.replica import Replica
from pyps_wire.blocks import check_block
from pyps_wire.errors import BadRequest


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


class _Stretch(NamedTuple):
    """What a process holds of a tensor, and which processes may hold the same."""

    name: str
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]
    # The mesh, where that is known of a DTensor; candidates, of which those are meant that hold the same stretch.
    holders: frozenset[int]


def claims_of(groups: Sequence[Sequence[tuple[str, torch.Tensor]]], replica: Replica | None) -> Claimed:
    """Reads what this process holds of the parameters, by name, in each of the optimizer's groups.

    All processes of a replica call it, and what one of them must refuse all refuse. Raises BadRequest for DTensors
    without a replica, for placements that no server can hold, and for names that no process has.
    """
    named = [pair for group in groups for pair in group]
    param_groups = [index for index, group in enumerate(groups) for _ in group]
    peers: Peers = ALONE if replica is None else replica
    stretches = agreed(peers, lambda: _stretches(named, replica))
    of_processes = [set(of_process) for of_process in peers.gather(_keys(stretches))]
    if replica is not None:
        agreed(peers, lambda: _check_names(replica, dict(named), of_processes))
    claims = [
        Claim(s.name, param_group, s.shape, s.whole_shape, s.offset, _holders(s, key, of_processes))
        for s, key, param_group in zip(stretches, _keys(stretches), param_groups, strict=True)
    ]
    parameters = tuple(parameter for _, parameter in named)
    return Claimed(parameters, tuple(claims), tuple(_local(parameter) for parameter in parameters))


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


# What tells stretches apart: name, shape and offset.
_Key = tuple[str, tuple[int, ...], tuple[int, ...]]


def _keys(stretches: Sequence[_Stretch]) -> list[_Key]:
    return [(stretch.name, stretch.shape, stretch.offset) for stretch in stretches]


def _holders(stretch: _Stretch, key: _Key, of_processes: Sequence[set[_Key]]) -> frozenset[int]:
    return frozenset(process for process in stretch.holders if key in of_processes[process])


def _stretches(named: Sequence[tuple[str, Any]], replica: Replica | None) -> list[_Stretch]:
    on_mesh: frozenset[int] = frozenset()
    for name, parameter in named:
        if _is_dtensor(parameter):
            if replica is None:
                raise BadRequest(
                    f"Parameter {name!r} is a DTensor, of which this process holds a part only: give RemoteOptimizer "
                    f"replica=Replica()."
                )
            on_mesh |= _positions(name, parameter.device_mesh.mesh, replica)
    return [_stretch(name, parameter, replica, on_mesh) for name, parameter in named]


def _stretch(name: str, parameter: Any, replica: Replica | None, on_mesh: frozenset[int]) -> _Stretch:
    if _is_dtensor(parameter):
        assert replica is not None
        return _of_dtensor(name, parameter, replica)
    shape = tuple(parameter.shape)
    if replica is None:
        return _Stretch(name, shape, shape, (0,) * len(shape), frozenset({0}))
    alone, everybody = frozenset({replica.index}), frozenset(range(replica.count))
    block = replica.blocks.get(name)
    if block is not None:
        whole_shape, offset = tuple(block.whole_shape), tuple(block.offset)
        check_block(name, shape, whole_shape, offset)
        return _Stretch(name, shape, whole_shape, offset, everybody if name in replica.replicated else alone)
    # What parallelize_module leaves alone is the same in all processes of its mesh.
    holders = everybody if name in replica.replicated else alone | on_mesh
    return _Stretch(name, shape, shape, (0,) * len(shape), holders)


def _of_dtensor(name: str, parameter: Any, replica: Replica) -> _Stretch:
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
    return _Stretch(name, tuple(shape), tuple(parameter.shape), tuple(offset), holders)


def _positions(name: str, ranks: torch.Tensor, replica: Replica) -> frozenset[int]:
    """The replica's numbers of processes that torch's world numbers otherwise."""
    outside = sorted(set(ranks.flatten().tolist()).difference(replica.ranks))
    if outside:
        raise BadRequest(
            f"The mesh of parameter {name!r} reaches process {outside[0]} of torch.distributed, which is none of the "
            f"replica's: make the mesh and the Replica of the same processes."
        )
    return frozenset(replica.ranks.index(rank) for rank in ranks.flatten().tolist())


def _check_names(replica: Replica, own: dict[str, torch.Tensor], of_processes: Sequence[set[_Key]]) -> None:
    present = {name for of_process in of_processes for name, _, _ in of_process}
    absent = sorted(set(replica.blocks).difference(own)) or sorted(replica.replicated.difference(present))
    if absent:
        raise BadRequest(
            f"Replica speaks of {absent[0]!r}, but no parameter of the optimizer has this name: give names as "
            f"model.named_parameters() does, without what torch.compile adds."
        )
