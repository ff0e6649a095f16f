"""One push, as one server gets it."""

from __future__ import annotations

import math
import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client.channel import Channel
from pyps_client.connection import call_seconds
from pyps_client.retry import LinkLost
from pyps_client.vectors import check_vectors, part_of
from pyps_wire.codecs import decode, dtype_of, item_size
from pyps_wire.common_pb2 import PAYLOAD_KIND_GRADIENT, PAYLOAD_KIND_NOTHING, Extent, Receipt
from pyps_wire.errors import BadRequest, WrongSize
from pyps_wire.framing import join
from pyps_wire.parameter_server_pb2 import PushRequest
from pyps_wire.partition import Model, Partition, ShardRange

# What of a shard is pushed: an empty tuple for all of it, None for nothing.
Extents = tuple[tuple[int, int], ...] | None
Part = tuple[ShardRange, Extents]


def pushed_parts(
    partition: Partition, server_index: int, left_out: Container[int] = (), *, present: Sequence[bool] | None
) -> tuple[Part, ...]:
    """A server's shards but for some, each with its stretches present."""
    shards = [shard for shard in partition.of_server(server_index) if shard.shard_id not in left_out]
    if present is None or all(present):
        return tuple((shard, ()) for shard in shards)
    return tuple((shard, _extents(partition, shard, present)) for shard in shards)


def norm_of(parts: Iterable[Part], vectors: Sequence[npt.NDArray[Any]], *, codec: int, kinds: Sequence[int]) -> float:
    """The Euclidean norm of a push's gradients; deltas do not count. Summed in float64."""
    total = 0.0
    for shard, extents in parts:
        if extents is None or kinds[shard.group] != PAYLOAD_KIND_GRADIENT:
            continue
        values = decode(_present_values(vectors, shard, extents).view(np.uint8).data, codec).astype(np.float64)
        total += float(values @ values)
    return math.sqrt(total)


def check_push(
    model: Model,
    vectors: Sequence[npt.NDArray[Any]],
    *,
    codec: int,
    present: Sequence[bool] | None,
    kinds: Sequence[int],
) -> None:
    """Refuses what does not fit the model, before anything is sent."""
    check_vectors(vectors, model, dtype_of(codec), what="pushed gradient")
    if present is not None and len(present) != len(model.tensors):
        raise WrongSize(f"present has {len(present)} flags; expected one for each of {len(model.tensors)} tensors.")
    if len(kinds) != model.num_groups:
        raise WrongSize(f"kinds has {len(kinds)} entries; expected one for each of {model.num_groups} groups.")


def check_bases(partition: Partition, base: Mapping[int, int], newest: Mapping[int, int]) -> None:
    """Refuses a gradient that was computed on nothing."""
    for shard in partition.shards:
        if min(base.get(shard.shard_id, -1), newest.get(shard.shard_id, -1)) < 0:
            raise BadRequest(f"A push needs parameters pulled before: no version of shard {shard.shard_id} is held.")


class OutgoingPush:
    """The shards of one push to one server; after a loss it sends only those without a receipt again."""

    def __init__(
        self,
        header: PushRequest,
        parts: Sequence[Part],
        vectors: Sequence[npt.NDArray[Any]],
        *,
        base_versions: Mapping[int, int],
        newest_base_versions: Mapping[int, int],
        kinds: Sequence[int],
        learning_rates: Mapping[int, float],
    ) -> None:
        """`kinds`: a PayloadKind a parameter group. `learning_rates`: new ones, by group."""
        # The fields that all shards share.
        self._header = PushRequest()
        self._header.CopyFrom(header)
        self._vectors = vectors
        self._base_versions = base_versions
        self._newest_base_versions = newest_base_versions
        self._kinds = kinds
        self._learning_rates = learning_rates
        self._waiting = {shard.shard_id: (shard, extents) for shard, extents in parts}
        self._receipts: list[Receipt] = []

    def __call__(self, channel: Channel, _: threading.Event) -> list[Receipt]:
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

    def _frames(self, parts: Sequence[Part]) -> Iterator[bytes]:
        """The messages, each made when gRPC is ready to send it: one is in memory at a time."""
        for shard, extents in parts:
            header = self._header_of(shard)
            header.num_shards = len(parts)
            if extents is None:
                # Said in so many words: where a round waits for every worker, silence would hold it up.
                header.kind = PAYLOAD_KIND_NOTHING
                yield header.SerializeToString()
                continue
            header.extents.extend(Extent(offset=start, length=length) for start, length in extents)
            yield join(header, _present_values(self._vectors, shard, extents).data)

    def _header_of(self, shard: ShardRange) -> PushRequest:
        header = PushRequest()
        header.CopyFrom(self._header)
        header.shard_id = shard.shard_id
        header.base_version = self._base_versions[shard.shard_id]
        header.newest_base_version = self._newest_base_versions[shard.shard_id]
        header.kind = self._kinds[shard.group]  # type: ignore[assignment]
        if shard.group in self._learning_rates:
            header.learning_rate = self._learning_rates[shard.group]
        return header


def _present_values(
    vectors: Sequence[npt.NDArray[Any]], shard: ShardRange, extents: tuple[tuple[int, int], ...]
) -> npt.NDArray[Any]:
    """The shard's numbers that are pushed, end to end; not copied where all of it is."""
    values = part_of(vectors, shard)
    if not extents:
        return values
    return np.concatenate([values[start : start + length] for start, length in extents])


def _extents(partition: Partition, shard: ShardRange, present: Sequence[bool]) -> Extents:
    """The stretches of a shard whose tensors are present, neighbours joined."""
    extents: list[tuple[int, int]] = []
    for piece in partition.pieces(shard.shard_id):
        if not present[piece.tensor_index]:
            continue
        if extents and sum(extents[-1]) == piece.shard_offset:
            extents[-1] = (extents[-1][0], extents[-1][1] + piece.length)
        else:
            extents.append((piece.shard_offset, piece.length))
    if extents == [(0, shard.length)]:
        return ()
    return tuple(extents) or None
