"""Which process of a replica trains which numbers: the model made of what its processes hold, or the run's.

Under model parallelism (Dean et al. 2012, section 3) every process of a replica computes the same plan from the claims
of all: what each of them holds. The replica that initializes a run makes one part of what each process trains. A later
replica takes the parts of the run; each must lie as a whole in the memory of one process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pyps_wire.errors import InvalidArgument, ModelMismatch
from pyps_wire.partition import Model, Tensor, check_whole, place_in_words

# A block's name, shape and offset.
Key = tuple[str, tuple[int, ...], tuple[int, ...]]

_OTHER_MODEL = "Give all workers of a run one model, or start another run."


@dataclass(frozen=True, slots=True)
class Claim:
    """A tensor, or a block of one, in a process's memory."""

    name: str
    # Of the optimizer; the same in all processes of a replica.
    param_group: int
    shape: tuple[int, ...]
    # The sizes of the whole tensor, and where the block begins in it.
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]
    # The processes that hold the same numbers, this one included.
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


# By process and name: the index of the process's claim, and the claim.
Named = Sequence[Mapping[str, tuple[int, Claim]]]


class Extent(NamedTuple):
    """A block that one or more processes hold; by process, the index of the claim."""

    claim: Claim
    indices: dict[int, int]


class Held(NamedTuple):
    """A tensor in a process's memory: the index of a claim, and the place in that claim's local tensor."""

    tensor: Tensor
    claim: int
    place: tuple[slice, ...]


class Copy(NamedTuple):
    """Tensors that one process trains and others hold too, in an order that is the same on all processes."""

    owner: int
    sizes: tuple[int, ...]
    # In this process, None for a tensor that it does not hold. The owner holds all.
    held: tuple[Held | None, ...]


@dataclass(frozen=True)
class Arrangement:
    """The whole model of a replica's processes, and what this process trains."""

    model: Model
    # The optimizer's parameter group of each group of `model`.
    param_groups: tuple[int, ...]
    # This process's own, ascending.
    parts: tuple[int, ...]
    # The tensors of the own parts, as in `Partition.of_parts(parts).model`.
    held: tuple[Held, ...]
    # One for each process that trains tensors that others hold too, ascending; the same length on all processes.
    copies: tuple[Copy, ...]

    @property
    def own_param_groups(self) -> tuple[int, ...]:
        """The optimizer's parameter group of each group of the own parts, numbered as by `Partition.of_parts`."""
        pairs = zip(self.model.group_parts, self.param_groups, strict=True)
        return tuple(param_group for part, param_group in pairs if part in self.parts)


def arrange(claims: Sequence[Sequence[Claim]], index: int, *, run: Model | None = None, shard_size: int) -> Arrangement:
    """Arrange the tensors of a replica's processes in parts; `claims[k]` is process k's, `index` is this process.

    Without a `run`, part k is what process k trains; of the processes that hold a tensor, the one with the fewest
    parameters so far gets it. With a run, each of its parts goes to a process that holds all of the part.

    Raises InvalidArgument if the claims make no model, and ModelMismatch if it is not the run's; the same on all
    processes.
    """
    extents = _extents(claims)
    named = [{claim.name: (position, claim) for position, claim in enumerate(own)} for own in claims]
    if run is None:
        model, param_groups = _new_model(extents, len(claims), shard_size)
        owners = list(range(len(claims)))
    else:
        model, param_groups = run, _param_groups(run, extents)
        owners = _owners(run, named)
    parts = tuple(part for part, owner in enumerate(owners) if owner == index)
    own_groups = [group for group, part in enumerate(model.group_parts) if part in parts]
    own = [replace(t, group=own_groups.index(t.group)) for t in model.tensors if t.part in parts]
    return Arrangement(
        model=model,
        param_groups=param_groups,
        parts=parts,
        held=tuple(_held(tensor, named[index]) for tensor in own),
        copies=tuple(_copies(model, named, owners, index)),
    )


def _extents(claims: Sequence[Sequence[Claim]]) -> list[Extent]:
    """Return the claimed blocks, each once, in the order in which they appear first.

    Raises InvalidArgument unless they are, each number once, the whole of every tensor.
    """
    extents: dict[Key, Extent] = {}
    firsts: dict[str, tuple[int, Claim]] = {}
    for process, own in enumerate(claims):
        if len({claim.name for claim in own}) < len(own):
            raise InvalidArgument(
                f"Two tensors of process {process} of the replica have one name: names must be unique."
            )
        for position, claim in enumerate(own):
            first_process, first = firsts.setdefault(claim.name, (process, claim))
            if claim.param_group != first.param_group:
                raise InvalidArgument(
                    f"Tensor {claim.name!r} is in parameter group {first.param_group} of process {first_process}'s "
                    f"optimizer, but in group {claim.param_group} of process {process}'s: give all processes of a "
                    f"replica the same groups."
                )
            # A tensor of fewer rows than processes leaves nothing for some of them.
            if claim.size or claim.is_whole:
                extents.setdefault(claim.key, Extent(claim, {})).indices[process] = position
    try:
        if empty := firsts.keys() - {extent.claim.name for extent in extents.values()}:
            raise InvalidArgument(f"parts of tensor {min(empty)!r} are missing: there are only empty blocks")
        for claim, indices in extents.values():
            for process, position in indices.items():
                if others := indices.keys() - claims[process][position].holders:
                    raise InvalidArgument(
                        f"part {process} and part {min(others)} both claim numbers of tensor {claim.name!r}: all of "
                        f"{place_in_words(claim.offset, claim.shape)}"
                    )
        check_whole(
            Tensor(claim.name, claim.shape, 0, claim.whole_shape, claim.offset, part=min(indices))
            for claim, indices in extents.values()
            if claim.size
        )
    except InvalidArgument as error:
        raise InvalidArgument(
            f"The processes of the replica hold no model (part 0 is what process 0 holds): {error}. Different tensors, "
            f"as of the stages of a pipeline, need different names. Declare copies by Replica(replicated=[NAME]), and "
            f"blocks of one tensor by Replica(blocks={{NAME: Block(...)}}). See that no process is missing."
        ) from None
    return list(extents.values())


def _new_model(extents: Sequence[Extent], num_processes: int, shard_size: int) -> tuple[Model, tuple[int, ...]]:
    """Return a new run's model, part k for process k, and the parameter group of each of its groups."""
    trained: list[list[Extent]] = [[] for _ in range(num_processes)]
    loads = [0] * num_processes
    # The blocks of one process first: those of several make the loads even.
    for extent in sorted(extents, key=lambda extent: len(extent.indices) > 1):
        process = min(extent.indices, key=loads.__getitem__)
        trained[process].append(extent)
        loads[process] += extent.claim.size
    tensors: list[Tensor] = []
    param_groups: list[int] = []
    for process, own in enumerate(trained):
        if not loads[process]:
            raise InvalidArgument(
                f"Process {process} of the replica has nothing to train: it holds no tensor, or only copies of those "
                f"that other processes train. Start fewer processes, or give it a part of the model."
            )
        order = sorted((claim.param_group, indices[process], claim) for claim, indices in own)
        for param_group, of_group in itertools.groupby(order, key=lambda each: each[0]):
            for _, _, claim in of_group:
                whole_shape, offset = ((), ()) if claim.is_whole else (claim.whole_shape, claim.offset)
                tensors.append(Tensor(claim.name, claim.shape, len(param_groups), whole_shape, offset, process))
            param_groups.append(param_group)
    return Model(tuple(tensors), shard_size), tuple(param_groups)


def _param_groups(run: Model, extents: Sequence[Extent]) -> tuple[int, ...]:
    """Return the parameter group of each of the run's groups. Raises ModelMismatch for another model."""
    claims = {extent.claim.name: extent.claim for extent in extents}
    unknown = claims.keys() - {tensor.name for tensor in run.tensors}
    if unknown:
        raise ModelMismatch(f"Tensor {min(unknown)!r} of this model is not in the run's. {_OTHER_MODEL}")
    firsts: dict[int, Claim] = {}
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
        first = firsts.setdefault(tensor.group, claim)
        if first.param_group != claim.param_group:
            raise ModelMismatch(
                f"Tensors {first.name!r} and {claim.name!r} are in one parameter group of the run's model, but in "
                f"groups {first.param_group} and {claim.param_group} here."
            )
    return tuple(firsts[group].param_group for group in range(run.num_groups))


def _owners(run: Model, named: Named) -> list[int]:
    """Return the process that trains each part of the run's model: one that holds all of it."""
    parts = [[tensor for tensor in run.tensors if tensor.part == part] for part in range(run.num_parts)]
    fits = [[p for p, mine in enumerate(named) if all(_lies_in(t, mine) for t in of_part)] for of_part in parts]
    owners, loads = [0] * len(parts), [0] * len(named)
    split, advice = "The run's model is not split", "Start one process that holds the whole model."
    if run.num_parts > 1:
        split = f"The run's model is split into {run.num_parts} parts"
        advice = (
            f"Start {run.num_parts} processes that split it in the same way, or one process that holds the whole model."
        )
    # The parts with the smallest choice of processes first.
    for part in sorted(range(len(parts)), key=lambda part: len(fits[part])):
        if not fits[part]:
            lost = min(parts[part], key=lambda tensor: any(_lies_in(tensor, mine) for mine in named))
            raise ModelMismatch(
                f"{split}, and part {part} lies in no process of this replica as a whole, such as "
                f"the numbers {place_in_words(_offset_of(lost), lost.shape)} of tensor {lost.name!r}; the replica has "
                f"{len(named)} processes. {advice}"
            )
        owners[part] = min(fits[part], key=loads.__getitem__)
        loads[owners[part]] += sum(tensor.size for tensor in parts[part])
    if idle := set(range(len(named))).difference(owners):
        raise ModelMismatch(f"{split}; process {min(idle)} of this replica would train none. {advice}")
    return owners


def _offset_of(tensor: Tensor) -> tuple[int, ...]:
    return tensor.offset or (0,) * len(tensor.shape)


def _lies_in(tensor: Tensor, mine: Mapping[str, tuple[int, Claim]]) -> bool:
    if tensor.name not in mine:
        return False
    _, claim = mine[tensor.name]
    ends = zip(_offset_of(tensor), tensor.shape, claim.offset, claim.shape, strict=True)
    return all(begin <= offset and offset + extent <= begin + size for offset, extent, begin, size in ends)


def _held(tensor: Tensor, mine: Mapping[str, tuple[int, Claim]]) -> Held:
    position, claim = mine[tensor.name]
    triples = zip(_offset_of(tensor), tensor.shape, claim.offset, strict=True)
    return Held(tensor, position, tuple(slice(at - begin, at - begin + extent) for at, extent, begin in triples))


def _copies(model: Model, named: Named, owners: Sequence[int], index: int) -> Iterable[Copy]:
    """Yield the tensors that one process trains and others hold too, with their places in this process's memory."""
    copied: dict[int, list[Tensor]] = {}
    for tensor in model.tensors:
        if len(named[owners[tensor.part]][tensor.name][1].holders) > 1:
            copied.setdefault(owners[tensor.part], []).append(tensor)
    for owner, tensors in sorted(copied.items()):
        # All holders of a claim hold the same block of its tensor.
        here = [index in named[owner][tensor.name][1].holders for tensor in tensors]
        held = [_held(tensor, named[index]) if is_here else None for tensor, is_here in zip(tensors, here, strict=True)]
        yield Copy(owner, tuple(tensor.size for tensor in tensors), tuple(held))
