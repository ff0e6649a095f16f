"""What this server's shards hold of each named tensor, in a few numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyps import _kernels
from pyps.core.arrays import Floats
from pyps.core.shard import Shard
from pyps_wire.partition import Partition, Piece

FIRST_VALUES = 8


class Place(NamedTuple):
    """Where a piece of a tensor lies."""

    shard_id: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """What is held of one tensor."""

    held_parameters: int
    version_min: int
    version_max: int
    norm: float
    min: float
    max: float
    first_values: tuple[float, ...]


def places(partition: Partition, shard_ids: Iterable[int]) -> dict[int, list[Place]]:
    """The pieces of each tensor in these shards, by the tensor's index, in the tensor's order."""
    found: dict[int, list[Place]] = {}
    for shard_id in shard_ids:
        for piece in partition.pieces(shard_id):
            found.setdefault(piece.tensor_index, []).append(Place(shard_id, piece))
    for tensor_places in found.values():
        tensor_places.sort(key=lambda place: place.piece.tensor_offset)
    return dict(sorted(found.items()))


def summarise(tensor_places: Sequence[Place], shards: Mapping[int, Shard]) -> TensorSummary:
    """Reads a tensor piece by piece, holding one shard's lock at a time."""
    parts = [_read(shards[place.shard_id], place.piece) for place in tensor_places]
    first = [value for part in parts for value in part.first_values]
    return TensorSummary(
        held_parameters=sum(place.piece.length for place in tensor_places),
        version_min=min(part.version for part in parts),
        version_max=max(part.version for part in parts),
        norm=math.sqrt(math.fsum(part.sum_of_squares for part in parts)),
        min=min(part.min for part in parts),
        max=max(part.max for part in parts),
        first_values=tuple(first[:FIRST_VALUES]),
    )


class _Part(NamedTuple):
    version: int
    sum_of_squares: float
    min: float
    max: float
    first_values: list[float]


def _read(shard: Shard, piece: Piece) -> _Part:
    def read(version: int, parameters: Floats) -> _Part:
        held = parameters[piece.shard_offset : piece.shard_offset + piece.length]
        return _Part(version, *_kernels.summary(held), held[:FIRST_VALUES].tolist())

    return shard.read(read)
