"""One push, as one server gets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client.channel import Channel
from pyps_client.connection import call_seconds
from pyps_client.retry import LinkLost
from pyps_client.vectors import part_of
from pyps_wire.codecs import item_size
from pyps_wire.common_pb2 import Extent, Receipt
from pyps_wire.framing import join
from pyps_wire.parameter_server_pb2 import PushRequest
from pyps_wire.partition import Partition, ShardRange

# What of a shard is pushed: nothing of a list for all of it.
Extents = tuple[tuple[int, int], ...]


def present_shards(
    partition: Partition, server_index: int, present: Sequence[bool] | None
) -> tuple[tuple[ShardRange, Extents], ...]:
    """A server's shards with something present, each with its stretches present (none: all of it)."""
    shards = partition.of_server(server_index)
    if present is None or all(present):
        return tuple((shard, ()) for shard in shards)
    listed: list[tuple[ShardRange, Extents]] = []
    for shard in shards:
        extents = _extents(partition, shard.shard_id, present)
        if extents == ((0, shard.length),):
            listed.append((shard, ()))
        elif extents:
            listed.append((shard, extents))
    return tuple(listed)


class OutgoingPush:
    """The shards of one push to one server; after a loss it sends only those without a receipt again."""

    def __init__(
        self,
        header: PushRequest,
        shards: Sequence[tuple[ShardRange, Extents]],
        vectors: Sequence[npt.NDArray[Any]],
        *,
        base_versions: Mapping[int, int],
        newest_base_versions: Mapping[int, int],
    ) -> None:
        # The fields that all shards share.
        self._header = header
        self._vectors = vectors
        self._base_versions = base_versions
        self._newest_base_versions = newest_base_versions
        self._waiting = {shard.shard_id: (shard, extents) for shard, extents in shards}
        self._receipts: list[Receipt] = []

    def __call__(self, channel: Channel) -> list[Receipt]:
        if not self._waiting:
            return self._receipts
        num_bytes = item_size(self._header.codec) * sum(shard.length for shard, _ in self._waiting.values())
        # A list of what is sent now: gRPC's thread iterates over it while receipts take entries away.
        frames = self._frames(list(self._waiting.values()))
        answered = 0
        for message in channel.stream("Push", frames, timeout_seconds=call_seconds(num_bytes)):
            receipt = Receipt.FromString(message)
            if receipt.sequence == self._header.sequence and receipt.shard_id in self._waiting:
                del self._waiting[receipt.shard_id]
                self._receipts.append(receipt)
                answered += 1
        if self._waiting:
            raise LinkLost(f"{len(self._waiting)} shards were left without a receipt", answered=answered)
        return self._receipts

    def _frames(self, shards: Sequence[tuple[ShardRange, Extents]]) -> Iterator[bytes]:
        """The messages, each made when gRPC is ready to send it: one is in memory at a time."""
        header = PushRequest()
        header.CopyFrom(self._header)
        for shard, extents in shards:
            header.shard_id = shard.shard_id
            header.base_version = self._base_versions[shard.shard_id]
            header.newest_base_version = self._newest_base_versions[shard.shard_id]
            values = part_of(self._vectors, shard)
            del header.extents[:]
            if extents:
                header.extents.extend(Extent(offset=start, length=length) for start, length in extents)
                values = np.concatenate([values[start : start + length] for start, length in extents])
            yield join(header, values.data)


def _extents(partition: Partition, shard_id: int, present: Sequence[bool]) -> Extents:
    """The stretches of a shard whose tensors are present, neighbours joined."""
    extents: list[tuple[int, int]] = []
    for piece in partition.pieces(shard_id):
        if not present[piece.tensor_index]:
            continue
        if extents and sum(extents[-1]) == piece.shard_offset:
            extents[-1] = (extents[-1][0], extents[-1][1] + piece.length)
        else:
            extents.append((piece.shard_offset, piece.length))
    return tuple(extents)
