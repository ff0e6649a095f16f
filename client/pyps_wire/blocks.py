"""Blocks of a tensor that is split over parts of the model: checks that they make up the whole, without overlap.

Under model parallelism (Dean et al. 2012, section 3) a process holds a part of the model. A split tensor is listed
block by block, each with the whole's sizes and its own place in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

from pyps_wire.errors import InvalidArgument

PARTS_MAX = 1024
# The most blocks of one tensor.
BLOCKS_MAX = 1024


class Placed(Protocol):
    """A block, with its place in the whole tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> tuple[int, ...]: ...


def place(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a block in the whole tensor."""
    return tuple(slice(begin, begin + extent) for begin, extent in zip(offset, shape, strict=True))


def place_in_words(offset: Sequence[int], shape: Sequence[int]) -> str:
    """Return the index of a block as text: "[0:256, 128:256]"."""
    return f"[{', '.join(f'{begin}:{begin + extent}' for begin, extent in zip(offset, shape, strict=True))}]"


def check_block(name: str, shape: Sequence[int], whole_shape: Sequence[int], offset: Sequence[int]) -> None:
    """Raise InvalidArgument for a block that is empty, or not within the whole tensor."""
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

    Blocks are sorted along the dimension in which they differ most, so that most are compared with neighbours only.
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
    """Return which numbers of a tensor there are, if blocks that do not overlap leave some out; else ""."""
    covered, size = sum(math.prod(block.shape) for block in blocks), math.prod(whole_shape)
    if covered == size:
        return ""
    present = ", ".join(place_in_words(block.offset, block.shape) for block in blocks[:4]) or "empty blocks"
    return f"there are only {present}{' and more' if len(blocks) > 4 else ''}, {covered} of its {size}"
