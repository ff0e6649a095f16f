"""Which process of a replica trains which numbers: what each process holds, made into the parts of one model.

Under model parallelism (Dean et al. 2012, section 3) every process of a replica computes the same plan from what all
of them claim to hold. Whoever initializes a run fixes its cut, one part a process; whoever joins later takes over the
run's cut, so far as each of its blocks lies in one process's memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pyps_wire.blocks import first_overlap, lack, place_in_words
from pyps_wire.errors import InvalidArgument, ModelMismatch
from pyps_wire.partition import Model, Tensor

# What tells blocks apart: name, shape and offset.
Key = tuple[str, tuple[int, ...], tuple[int, ...]]

_OTHER_MODEL = "Give all workers of a run one model, or start another run."


@dataclass(frozen=True, slots=True)
class Claim:
    """A tensor, or a block of one, in a process's memory."""

    name: str
    # Of the optimizer; the same in all processes of a replica.
    param_group: int
    # Of what lies here, and of the tensor as a whole: equal where it is not cut, and then all offsets are 0.
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]
    # The processes that hold these very numbers, this one included.
    holders: frozenset[int]

    @property
    def key(self) -> Key:
        return self.name, self.shape, self.offset

    @property
    def is_whole(self) -> bool:
        return self.shape == self.whole_shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Extent(NamedTuple):
    """A block of a tensor, and which claim of each process that holds it it is."""

    claim: Claim
    indices: dict[int, int]


class Held(NamedTuple):
    """A tensor of this process's own parts, and where it lies."""

    # As the own parts' model has it.
    tensor: Tensor
    # The index of this process's claim that it lies in, and where in that claim's local tensor.
    claim: int
    place: tuple[slice, ...]


class Slice(NamedTuple):
    """Numbers in a process's memory: a place in the local tensor of one of its claims."""

    claim: int
    place: tuple[slice, ...]


class Copy(NamedTuple):
    """Numbers that one process trains and others hold too, in an order that is the same on all processes."""

    owner: int
    sizes: tuple[int, ...]
    # Where each of them lies in this process, None where it does not hold it. The owner holds all.
    slices: tuple[Slice | None, ...]


@dataclass(frozen=True)
class Arrangement:
    """The whole model of a replica's processes, and what of it this process trains."""

    model: Model
    # The optimizer's parameter group of each group of `model`.
    param_groups: tuple[int, ...]
    # This process's own, ascending.
    parts: tuple[int, ...]
    # The tensors of the own parts, in the order of `Partition.of_parts(parts).model`.
    held: tuple[Held, ...]
    # One for each process that trains what others hold too, ascending; the same length on all processes.
    copies: tuple[Copy, ...]

    @property
    def own_param_groups(self) -> tuple[int, ...]:
        """The optimizer's parameter group of each group of the own parts, numbered as by `Partition.of_parts`."""
        pairs = zip(self.model.group_parts, self.param_groups, strict=True)
        return tuple(param_group for part, param_group in pairs if part in self.parts)


def arrange(claims: Sequence[Sequence[Claim]], index: int, *, run: Model | None = None, shard_size: int) -> Arrangement:
    """Arrange the tensors of a replica's processes in parts; `claims[k]` is process k's, `index` is this process.

    Without a `run` the processes make one: part k is what process k trains, and a tensor that several hold goes to
    the one that has the least so far. Otherwise the run's model is taken as it is cut, and each of its parts goes to a
    process that holds all of it. Raises InvalidArgument where the claims are no model, ModelMismatch where they are not
    the run's; the same on all processes.
    """
    extents = extents_of(claims)
    is_cut = run is not None and (run.num_parts > 1 or any(tensor.whole_shape for tensor in run.tensors))
    if run is None or (len(claims) == 1 and not is_cut):
        # One process that holds all, in a run that is not cut, is compared by the handshake.
        model, param_groups = _initial_cut(claims, extents, shard_size)
        owners = list(range(len(claims)))
    else:
        model, param_groups = run, _param_groups(run, extents)
        owners = _joined(run, claims)
    parts = tuple(part for part, owner in enumerate(owners) if owner == index)
    return Arrangement(
        model=model,
        param_groups=param_groups,
        parts=parts,
        held=tuple(_held(model, claims[index], parts)),
        copies=tuple(_copies(model, claims, owners, index)),
    )


def extents_of(claims: Sequence[Sequence[Claim]]) -> list[Extent]:
    """What the processes claim, each block once, in order of first appearance; `claims[k]` is process k's.

    Raises InvalidArgument where the claims contradict each other, or are not, each number once, the whole of every
    tensor.
    """
    extents: dict[Key, Extent] = {}
    firsts: dict[str, tuple[int, Claim]] = {}
    for process, of_process in enumerate(claims):
        if len({claim.name for claim in of_process}) < len(of_process):
            raise InvalidArgument(
                f"Two tensors of process {process} of the replica have one name: names must be unique."
            )
        for position, claim in enumerate(of_process):
            _check_claim(claim, process, *firsts.setdefault(claim.name, (process, claim)))
            # A tensor of fewer rows than processes leaves nothing for some of them.
            if claim.size or claim.is_whole:
                extents.setdefault(claim.key, Extent(claim, {})).indices[process] = position
    of_name: dict[str, list[Extent]] = {name: [] for name in firsts}
    for extent in extents.values():
        _check_holders(extent, claims)
        of_name[extent.claim.name].append(extent)
    for name, of_tensor in of_name.items():
        _check_cover(name, firsts[name][1].whole_shape, of_tensor)
    return list(extents.values())


def _check_claim(claim: Claim, process: int, first_process: int, first: Claim) -> None:
    if claim.whole_shape != first.whole_shape:
        raise InvalidArgument(
            f"Tensor {claim.name!r} has shape {first.whole_shape} in process {first_process} of the replica, but "
            f"{claim.whole_shape} in process {process}. {_how_to_tell_apart(claim.name)}"
        )
    if claim.param_group != first.param_group:
        raise InvalidArgument(
            f"Tensor {claim.name!r} is in parameter group {first.param_group} of process {first_process}'s optimizer, "
            f"but in group {claim.param_group} of process {process}'s: give all processes of a replica the same groups."
        )


def _check_holders(extent: Extent, claims: Sequence[Sequence[Claim]]) -> None:
    """Raise InvalidArgument for a block of two processes, unless both know that they hold copies."""
    here, name = extent.claim, extent.claim.name
    for process, position in extent.indices.items():
        holders = claims[process][position].holders
        absent = sorted(holders.difference(extent.indices))
        if absent:
            raise InvalidArgument(
                f"Process {process} of the replica says that process {absent[0]} too holds the numbers "
                f"{place_in_words(here.offset, here.shape)} of tensor {name!r}, but that one does not."
            )
        others = sorted(set(extent.indices).difference(holders))
        if others:
            raise _claimed_twice(here, here, min(process, others[0]), max(process, others[0]))


def _check_cover(name: str, whole_shape: tuple[int, ...], of_tensor: Sequence[Extent]) -> None:
    """Raise InvalidArgument for blocks of one tensor that overlap or leave some of it out."""
    blocks = [extent.claim for extent in of_tensor]
    pair = first_overlap(blocks)
    if pair is not None:
        processes = {id(extent.claim): min(extent.indices) for extent in of_tensor}
        a, b = sorted(pair, key=lambda claim: processes[id(claim)])
        raise _claimed_twice(a, b, processes[id(a)], processes[id(b)])
    if words := lack(blocks, whole_shape):
        raise InvalidArgument(
            f"No process of the replica holds the rest of tensor {name!r} of shape {whole_shape}: {words} numbers. "
            f"Is a process missing, or the offset of a block wrong?"
        )


def _claimed_twice(a: Claim, b: Claim, a_process: int, b_process: int) -> InvalidArgument:
    return InvalidArgument(
        f"Process {a_process} and process {b_process} of the replica both claim numbers of tensor {a.name!r}: "
        f"{place_in_words(a.offset, a.shape)} and {place_in_words(b.offset, b.shape)}. {_how_to_tell_apart(a.name)}"
    )


def _how_to_tell_apart(name: str) -> str:
    return (
        f"Different tensors, as of the stages of a pipeline, need different names; copies are declared by "
        f"Replica(replicated=[{name!r}]), and blocks of one tensor by Replica(blocks={{{name!r}: Block(...)}})."
    )


def _initial_cut(
    claims: Sequence[Sequence[Claim]], extents: Sequence[Extent], shard_size: int
) -> tuple[Model, tuple[int, ...]]:
    """Return a new run's model, part k for process k, and the parameter group of each of its groups."""
    own = _trained_by(extents, len(claims))
    tensors: list[Tensor] = []
    param_groups: list[int] = []
    for process, extents_of_process in enumerate(own):
        if not any(extent.claim.size for extent in extents_of_process):
            raise InvalidArgument(
                f"Process {process} of the replica has nothing to train: it holds no tensor, or only copies of those "
                f"that other processes train. Start fewer processes, or give it a part of the model."
            )
        in_order = sorted(extents_of_process, key=lambda e, p=process: (e.claim.param_group, e.indices[p]))  # type: ignore[misc]
        for param_group, of_group in itertools.groupby(in_order, key=lambda extent: extent.claim.param_group):
            for claim in (extent.claim for extent in of_group):
                whole_shape, offset = ((), ()) if claim.is_whole else (claim.whole_shape, claim.offset)
                tensors.append(Tensor(claim.name, claim.shape, len(param_groups), whole_shape, offset, process))
            param_groups.append(param_group)
    return Model(tuple(tensors), shard_size), tuple(param_groups)


def _trained_by(extents: Sequence[Extent], num_processes: int) -> list[list[Extent]]:
    """Return what each process trains: all that it alone holds, and of shared blocks so many that loads are even."""
    own: list[list[Extent]] = [[] for _ in range(num_processes)]
    loads = [0] * num_processes
    for extent in sorted(extents, key=lambda extent: len(extent.indices) > 1):
        process = min(extent.indices, key=lambda holder: (loads[holder], holder))
        own[process].append(extent)
        loads[process] += extent.claim.size
    return own


def _param_groups(run: Model, extents: Sequence[Extent]) -> tuple[int, ...]:
    """Return the parameter group of each of the run's groups; raise ModelMismatch for another model."""
    claims = {extent.claim.name: extent.claim for extent in extents}
    names = {tensor.name for tensor in run.tensors}
    missing = next((name for name in claims if name not in names), None)
    if missing is not None:
        raise ModelMismatch(f"Tensor {missing!r} of this model is not in the run's. {_OTHER_MODEL}")
    param_groups: dict[int, Claim] = {}
    for tensor in run.tensors:
        claim, whole_shape = claims.get(tensor.name), tensor.whole_shape or tensor.shape
        if claim is None:
            raise ModelMismatch(
                f"No process of this replica has tensor {tensor.name!r} of the run's model. {_OTHER_MODEL}"
            )
        if claim.whole_shape != whole_shape:
            raise ModelMismatch(
                f"Tensor {tensor.name!r} has shape {claim.whole_shape} in this model, but {whole_shape} in the run's. "
                f"{_OTHER_MODEL}"
            )
        first = param_groups.setdefault(tensor.group, claim)
        if first.param_group != claim.param_group:
            raise ModelMismatch(
                f"Tensors {first.name!r} and {claim.name!r} are in one parameter group of the run's model, but in "
                f"groups {first.param_group} and {claim.param_group} here."
            )
    return tuple(param_groups[group].param_group for group in range(run.num_groups))


def _joined(run: Model, claims: Sequence[Sequence[Claim]]) -> list[int]:
    """Return the process that trains each part of the run's model: one that holds all of it."""
    held = [{claim.name: claim for claim in of_process} for of_process in claims]
    parts = [[tensor for tensor in run.tensors if tensor.part == part] for part in range(run.num_parts)]
    fits = [
        [process for process, mine in enumerate(held) if all(_lies_in(tensor, mine) for tensor in of_part)]
        for of_part in parts
    ]
    owners, loads = [0] * len(parts), [0] * len(claims)
    # Those that fit few processes first: the others have a choice.
    for part in sorted(range(len(parts)), key=lambda part: (len(fits[part]), part)):
        if not fits[part]:
            closest = max(held, key=lambda mine, part=part: sum(_lies_in(tensor, mine) for tensor in parts[part]))  # type: ignore[misc]
            lost = next(tensor for tensor in parts[part] if not _lies_in(tensor, closest))
            raise _of_other_cut(
                run,
                f", and part {part}, with the numbers {place_in_words(_offset_of(lost), lost.shape)} of tensor "
                f"{lost.name!r}, lies in no process of this replica as a whole; it has {len(held)}",
            )
        owners[part] = min(fits[part], key=lambda process: (loads[process], process))
        loads[owners[part]] += sum(tensor.size for tensor in parts[part])
    idle = next((process for process in range(len(claims)) if process not in owners), None)
    if idle is not None:
        raise _of_other_cut(run, f"; process {idle} of this replica would train none")
    return owners


def _offset_of(tensor: Tensor) -> tuple[int, ...]:
    return tensor.offset or (0,) * len(tensor.shape)


def _lies_in(tensor: Tensor, mine: dict[str, Claim]) -> bool:
    claim = mine.get(tensor.name)
    if claim is None:
        return False
    ends = zip(_offset_of(tensor), tensor.shape, claim.offset, claim.shape, strict=True)
    return all(begin <= offset and offset + extent <= begin + size for offset, extent, begin, size in ends)


def _of_other_cut(run: Model, problem: str) -> ModelMismatch:
    is_cut, so_many = "The run's model is not cut", ""
    if run.num_parts > 1:
        is_cut = f"The run's model is cut into {run.num_parts} parts"
        so_many = f"{run.num_parts} processes, cut as the run's, or "
    return ModelMismatch(f"{is_cut}{problem}. Start {so_many}one process that holds the whole model.")


def _held(model: Model, mine: Sequence[Claim], parts: Sequence[int]) -> Iterable[Held]:
    """Return the tensors of some parts, their groups counted from 0, with their places in a process's memory."""
    positions = {claim.name: position for position, claim in enumerate(mine)}
    own = [group for group, part in enumerate(model.group_parts) if part in parts]
    groups = {group: position for position, group in enumerate(own)}
    for tensor in model.tensors:
        if tensor.group in groups:
            position = positions[tensor.name]
            yield Held(replace(tensor, group=groups[tensor.group]), position, _place_in(mine[position], tensor))


def _copies(model: Model, claims: Sequence[Sequence[Claim]], owners: Sequence[int], index: int) -> Iterable[Copy]:
    """Return the numbers that one process trains and others hold too, with their places in this process's memory."""
    positions = [{claim.name: position for position, claim in enumerate(of_process)} for of_process in claims]
    copied: dict[int, tuple[list[int], list[Slice | None]]] = {}
    for tensor in model.tensors:
        owner = owners[tensor.part]
        claim = claims[owner][positions[owner][tensor.name]]
        if len(claim.holders) == 1:
            continue
        sizes, slices = copied.setdefault(owner, ([], []))
        sizes.append(tensor.size)
        # All holders of a claim hold the same block of its tensor.
        is_here = index in claim.holders
        slices.append(Slice(positions[index][tensor.name], _place_in(claim, tensor)) if is_here else None)
    for owner, (sizes, slices) in sorted(copied.items()):
        yield Copy(owner, tuple(sizes), tuple(slices))


def _place_in(claim: Claim, tensor: Tensor) -> tuple[slice, ...]:
    triples = zip(_offset_of(tensor), tensor.shape, claim.offset, strict=True)
    return tuple(slice(offset - begin, offset - begin + extent) for offset, extent, begin in triples)
