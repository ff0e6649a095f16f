"""Tensors that are split into blocks, and whether the blocks of all parts make up the whole.

Under model parallelism (Dean et al. 2012, section 3) a process holds a part of the model. A split tensor is listed
block by block, each with the whole's sizes and its own place in it. Together the blocks are the whole, without overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from pyps_wire.errors import InvalidArgument

PARTS_MAX = 1024
# Of one tensor.
BLOCKS_MAX = 1024


class Placed(Protocol):
    """A tensor as these functions see it."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def whole_shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> tuple[int, ...]: ...
    @property
    def part(self) -> int: ...


def place(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a block in the whole tensor."""
    return tuple(slice(begin, begin + extent) for begin, extent in zip(offset, shape, strict=True))


def place_in_words(offset: Sequence[int], shape: Sequence[int]) -> str:
    """Return the same for people: "[0:256, 128:256]"."""
    return f"[{', '.join(f'{begin}:{begin + extent}' for begin, extent in zip(offset, shape, strict=True))}]"


def check_block(name: str, shape: Sequence[int], whole_shape: Sequence[int], offset: Sequence[int]) -> None:
    """Raise InvalidArgument for a block that is empty or does not lie in its whole."""
    if not len(shape) == len(whole_shape) == len(offset):
        raise InvalidArgument(
            f"the block of tensor {name!r} has {len(shape)} sizes and {len(offset)} offsets, the whole of shape "
            f"{tuple(whole_shape)} has {len(whole_shape)}: give as many of each"
        )
    ends = [begin + extent for begin, extent in zip(offset, shape, strict=True)]
    if any(begin < 0 or end > size for begin, end, size in zip(offset, ends, whole_shape, strict=True)):
        raise InvalidArgument(
            f"the block {place_in_words(offset, shape)} of tensor {name!r} reaches beyond the whole, whose shape is "
            f"{tuple(whole_shape)}"
        )
    if 0 in shape:
        raise InvalidArgument(
            f"the block {place_in_words(offset, shape)} of tensor {name!r} of shape {tuple(whole_shape)} is empty: "
            "split no tensor into more parts than it has rows or columns"
        )


def _overlap(a: Placed, b: Placed) -> bool:
    return all(
        begin < other + other_extent and other < begin + extent
        for begin, extent, other, other_extent in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    )


B = TypeVar("B", bound=Placed)


def first_overlap(blocks: Sequence[B]) -> tuple[B, B] | None:
    """Return two blocks of one tensor that overlap, if there are any.

    Blocks are compared along the dimension in which they differ most, usually only with their neighbours.
    """
    if len(blocks) < 2 or not blocks[0].offset:
        return (blocks[0], blocks[1]) if len(blocks) > 1 else None
    axis = max(range(len(blocks[0].offset)), key=lambda a: len({block.offset[a] for block in blocks}))
    open_blocks: list[B] = []
    for block in sorted(blocks, key=lambda block: block.offset[axis]):
        begin = block.offset[axis]
        open_blocks = [other for other in open_blocks if other.offset[axis] + other.shape[axis] > begin]
        other = next((other for other in open_blocks if _overlap(other, block)), None)
        if other is not None:
            return other, block
        open_blocks.append(block)
    return None


def lack(blocks: Sequence[Placed], whole_shape: Sequence[int]) -> str:
    """Say how much of a tensor there is, where blocks that do not overlap leave some of it out; else ""."""
    covered, size = sum(math.prod(block.shape) for block in blocks), math.prod(whole_shape)
    if covered == size:
        return ""
    present = ", ".join(place_in_words(block.offset, block.shape) for block in blocks[:4]) or "empty blocks"
    return f"there are only {present}{' and more' if len(blocks) > 4 else ''}, {covered} of its {size}"


def check_whole(tensors: Iterable[Placed]) -> None:
    """Raise InvalidArgument where the blocks of a tensor overlap or leave some of it out, with tensor and parts."""
    blocks: dict[str, list[Placed]] = {}
    for tensor in tensors:
        if tensor.whole_shape:
            blocks.setdefault(tensor.name, []).append(tensor)
    for name, of_tensor in blocks.items():
        _check_tensor(name, of_tensor)


def _check_tensor(name: str, blocks: Sequence[Placed]) -> None:
    if len(blocks) > BLOCKS_MAX:
        raise InvalidArgument(f"tensor {name!r} is split into {len(blocks)} blocks; at most {BLOCKS_MAX} are allowed")
    a = blocks[0]
    other = next((b for b in blocks if b.whole_shape != a.whole_shape), None)
    if other is not None:
        raise InvalidArgument(
            f"tensor {name!r} has shape {a.whole_shape} in part {a.part}, but {other.whole_shape} in part {other.part}"
        )
    pair = first_overlap(blocks)
    if pair is not None:
        a, b = sorted(pair, key=lambda block: block.part)
        raise InvalidArgument(
            f"part {a.part} and part {b.part} both claim numbers of tensor {name!r}: "
            f"{place_in_words(a.offset, a.shape)} and {place_in_words(b.offset, b.shape)}"
        )
    if words := lack(blocks, a.whole_shape):
        raise InvalidArgument(f"parts of tensor {name!r} of shape {a.whole_shape} are missing: {words} numbers")
