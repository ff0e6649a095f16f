"""What the processes of a replica hold in their memories, and whether that makes one model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pyps_wire.blocks import first_overlap, overlap, place_in_words
from pyps_wire.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Claim:
    """A tensor, or a block of one, that lies in a process's memory."""

    name: str
    # Of the optimizer; the same in all processes of a replica.
    param_group: int
    # Of what lies here, and of the tensor as a whole: equal where it is not cut, and then all offsets are 0.
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]
    # The processes that hold these very numbers, this one included.
    holders: frozenset[int]

    # So that it is a `pyps_wire.blocks.Placed`; parts are made of claims, not claimed.
    @property
    def part(self) -> int:
        return 0

    @property
    def is_whole(self) -> bool:
        return self.shape == self.whole_shape

    @property
    def size(self) -> int:
        """Number of parameters."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Extent:
    """A stretch of a tensor that processes claim, and which claim of each process it is."""

    claim: Claim
    indices: dict[int, int]


def extents_of(claims: Sequence[Sequence[Claim]]) -> list[Extent]:
    """What the processes claim, each stretch once, in order of first appearance; `claims[k]` is process k's.

    Raises BadRequest where the claims contradict each other, or leave numbers of a tensor out.
    """
    extents: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Extent] = {}
    firsts: dict[str, tuple[int, Claim]] = {}
    for process, of_process in enumerate(claims):
        if len({claim.name for claim in of_process}) < len(of_process):
            raise BadRequest(f"Two tensors of process {process} of the replica have one name: names must be unique.")
        for position, claim in enumerate(of_process):
            _check_claim(claim, process, *firsts.setdefault(claim.name, (process, claim)))
            extent = extents.setdefault((claim.name, claim.offset, claim.shape), Extent(claim, {}))
            extent.indices[process] = position
    for extent in extents.values():
        _check_holders(extent, claims)
    _check_whole(extents.values())
    return list(extents.values())


def _check_claim(claim: Claim, process: int, first_process: int, first: Claim) -> None:
    """Refuses a claim that holds nothing, or that does not go with the first one of its name."""
    if claim.size == 0 and not claim.is_whole:
        raise BadRequest(
            f"Process {process} of the replica holds nothing of tensor {claim.name!r} of shape {claim.whole_shape}: it "
            f"is cut into more parts than it has rows or columns. Start fewer processes, or leave it uncut."
        )
    if claim.whole_shape != first.whole_shape:
        raise BadRequest(
            f"Tensor {claim.name!r} has shape {first.whole_shape} in process {first_process} of the replica, but "
            f"{claim.whole_shape} in process {process}. {_how_to_tell_apart(claim.name)}"
        )
    if claim.param_group != first.param_group:
        raise BadRequest(
            f"Tensor {claim.name!r} is in parameter group {first.param_group} of process {first_process}'s optimizer, "
            f"but in group {claim.param_group} of process {process}'s: give all processes of a replica the same groups."
        )


def _check_holders(extent: Extent, claims: Sequence[Sequence[Claim]]) -> None:
    """Refuses a stretch that two processes claim, unless both know that they hold copies of it."""
    here, name = extent.claim, extent.claim.name
    for process, position in extent.indices.items():
        holders = claims[process][position].holders
        absent = sorted(holders.difference(extent.indices))
        if absent:
            raise BadRequest(
                f"Process {process} of the replica says that process {absent[0]} too holds the numbers "
                f"{place_in_words(here.offset, here.shape)} of tensor {name!r}, but that one does not."
            )
        others = sorted(set(extent.indices).difference(holders))
        if others:
            raise _claimed_twice(here, here, min(process, others[0]), max(process, others[0]))


def _check_whole(extents: Iterable[Extent]) -> None:
    """Refuses claims that are not, each number once, the whole of every tensor."""
    of_name: dict[str, list[Extent]] = {}
    for extent in extents:
        of_name.setdefault(extent.claim.name, []).append(extent)
    for of_tensor in of_name.values():
        processes = {id(extent.claim): min(extent.indices) for extent in of_tensor}
        pair = first_overlap([extent.claim for extent in of_tensor])
        if pair is not None:
            a, b = sorted(pair, key=lambda claim: processes[id(claim)])
            raise _claimed_twice(a, b, processes[id(a)], processes[id(b)])
        _check_no_gap([extent.claim for extent in of_tensor])


def _check_no_gap(blocks: Sequence[Claim]) -> None:
    """Refuses blocks of one tensor, none of which overlap, that leave some of its numbers out."""
    name, whole = blocks[0].name, blocks[0].whole_shape
    if sum(block.size for block in blocks) == math.prod(whole):
        return
    borders = [
        sorted({0, size, *(edge for block in blocks for edge in _edges(block, axis))})
        for axis, size in enumerate(whole)
    ]
    for cell in itertools.product(*(itertools.pairwise(of_axis) for of_axis in borders)):
        offset = tuple(begin for begin, _ in cell)
        shape = tuple(end - begin for begin, end in cell)
        if not any(overlap(block, replace(block, offset=offset, shape=shape)) for block in blocks):
            raise BadRequest(
                f"No process of the replica holds the numbers {place_in_words(offset, shape)} of tensor {name!r} of "
                f"shape {whole}: is a process missing, or the offset of a block wrong?"
            )


def _edges(block: Claim, axis: int) -> tuple[int, int]:
    return block.offset[axis], block.offset[axis] + block.shape[axis]


def _claimed_twice(a: Claim, b: Claim, a_process: int, b_process: int) -> BadRequest:
    return BadRequest(
        f"Process {a_process} and process {b_process} of the replica both claim numbers of tensor {a.name!r}: "
        f"{place_in_words(a.offset, a.shape)} and {place_in_words(b.offset, b.shape)}. {_how_to_tell_apart(a.name)}"
    )


def _how_to_tell_apart(name: str) -> str:
    return (
        f"Different tensors, as of the stages of a pipeline, need different names; copies are declared by "
        f"Replica(replicated=[{name!r}]), and blocks of one tensor by Replica(blocks={{{name!r}: Block(...)}})."
    )
