"""One push, as one server gets it."""

from __future__ import annotations

import math
import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client.channel import Channel
from pyps_client.connection import Connection, call_seconds
from pyps_client.conversion import NUMPY, Converter
from pyps_client.finite import first_non_finite
from pyps_client.intake import Intake
from pyps_client.learning_rates import GroupRate
from pyps_client.process_hooks import keep_large_blocks
from pyps_client.pulling import LARGE_BYTES
from pyps_client.retry import LinkLost
from pyps_client.transport import Link
from pyps_client.vectors import part_of
from pyps_wire.codecs import Codec, codec_numbered
from pyps_wire.common_pb2 import PAYLOAD_KIND_GRADIENT, PAYLOAD_KIND_NOTHING, Extent, Receipt
from pyps_wire.errors import BadRequest, PypsError, WrongSize
from pyps_wire.framing import join, split
from pyps_wire.local_pb2 import LocalRequest
from pyps_wire.parameter_server_pb2 import ExchangeReply, PushRequest
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


def norm_of(
    parts: Iterable[Part],
    vectors: Sequence[npt.NDArray[Any]],
    *,
    codec: Codec,
    kinds: Sequence[int],
    converter: Converter = NUMPY,
) -> float:
    """The Euclidean norm of a push's gradients as they travel; deltas do not count. Summed in float64."""
    total = 0.0
    for shard, extents in parts:
        if extents is None or kinds[shard.group] != PAYLOAD_KIND_GRADIENT:
            continue
        pushed = _present_values(vectors, shard, extents)
        values = codec.decode(converter.encoded(pushed, codec), pushed.size).astype(np.float64)
        total += float(values @ values)
    return math.sqrt(total)


def check_push(model: Model, *, present: Sequence[bool] | None, kinds: Sequence[int]) -> None:
    """Refuses what does not fit the model, before anything is sent."""
    if present is not None and len(present) != len(model.tensors):
        raise WrongSize(f"present has {len(present)} flags; expected one for each of {len(model.tensors)} tensors.")
    if len(kinds) != model.num_groups:
        raise WrongSize(f"kinds has {len(kinds)} entries; expected one for each of {model.num_groups} groups.")


def check_bases(partition: Partition, base: Mapping[int, int], newest: Mapping[int, int]) -> None:
    """Refuses a gradient that was computed on nothing."""
    if base is newest and len(base) == partition.num_shards and min(base.values()) >= 0:
        # As nearly always, and quickly said.
        return
    for shard in partition.shards:
        if min(base.get(shard.shard_id, -1), newest.get(shard.shard_id, -1)) < 0:
            raise BadRequest(f"A push needs parameters pulled before: no version of shard {shard.shard_id} is held.")


# Up to this size two copies cost less than to look for the payload in Python.
COPIED_BYTES_MAX = 1 << 16


class OutgoingPush:
    """The shards of one push to one server; after a loss it sends only those without a receipt again.

    With an intake it is an exchange: what is newer arrives there. Numbers that lie in lent vectors stay there where
    the server sees them too; which way it takes is chosen anew with each try.
    """

    def __init__(
        self,
        header: PushRequest,
        parts: Sequence[Part],
        vectors: Sequence[npt.NDArray[Any]],
        *,
        base_versions: Mapping[int, int],
        newest_base_versions: Mapping[int, int],
        kinds: Sequence[int],
        learning_rates: Mapping[int, GroupRate],
        connection: Connection | None = None,
        intake: Intake | None = None,
        lent_index: int | None = None,
        converter: Converter = NUMPY,
    ) -> None:
        """`kinds`: a PayloadKind a parameter group. `learning_rates`: new ones, by group.

        `lent_index`: which of the lent gradients the vectors are, where they, and the intake's, are lent.
        """
        # The fields that all shards share.
        self._header = header
        self._codec = codec_numbered(header.codec)
        self._vectors = vectors
        self._base_versions = base_versions
        self._newest_base_versions = newest_base_versions
        self._kinds = kinds
        self._learning_rates = learning_rates
        self._connection = connection
        self._intake = intake
        self._lent_index = lent_index
        self._converter = converter
        self._waiting = {shard.shard_id: (shard, extents) for shard, extents in parts}
        self._receipts: list[Receipt] = []

    def __call__(self, channel: Channel, _: threading.Event) -> list[Receipt]:
        before = len(self._receipts)
        try:
            if self._waiting:
                self._send(channel)
        except LinkLost as lost:
            lost.answered = len(self._receipts) - before
            raise
        if self._waiting:
            answered = len(self._receipts) - before
            raise LinkLost(f"{len(self._waiting)} shards were left without a receipt", answered=answered)
        return self._receipts

    def _send(self, channel: Channel) -> None:
        connection = self._connection if self._lent_index is not None else None
        link = connection.link_to_use() if connection is not None else None
        # A list of what is sent now: frames are made of it while receipts take entries away.
        parts = list(self._waiting.values())
        if link is not None and link.begin():
            try:
                self._send_locally(link, parts, call_seconds(self._num_bytes(parts)))
            finally:
                link.end()
            return
        if connection is not None and connection.left_to_look:
            parts = self._looked_through(parts)
        num_bytes = self._num_bytes(parts)
        timeout_seconds = call_seconds(num_bytes)
        if num_bytes > LARGE_BYTES:
            keep_large_blocks()
        if self._intake is not None:
            channel.exchange(self._frames(parts), self._take_reply, timeout_seconds=timeout_seconds)
            return
        for message in channel.stream("Push", self._frames(parts), timeout_seconds=timeout_seconds):
            self._take_receipt(Receipt.FromString(message))

    def _looked_through(self, parts: list[Part]) -> list[Part]:
        """The parts, unless there is NaN or infinity: then one NaN for each, for the server to refuse them all.

        By gRPC it would look at each by itself and apply the others.
        """
        numbers = [_present_values(self._vectors, shard, extents) for shard, extents in parts if extents is not None]
        if all(first_non_finite(values, self._codec) is None for values in numbers):
            return parts
        self._vectors = [np.broadcast_to(np.float32(np.nan), vector.shape) for vector in self._vectors]
        return [(shard, None if extents is None else ((0, 1),)) for shard, extents in parts]

    def _send_locally(self, link: Link, parts: Sequence[Part], timeout_seconds: float) -> None:
        request = LocalRequest()
        exchange = request.exchange
        exchange.gradients = self._lent_index or 0
        exchange.pull = self._intake is not None
        for shard, extents in parts:
            self._fill(exchange.shards.add(), shard, extents, len(parts))
        reply = link.request(request, timeout_seconds=timeout_seconds)
        if reply.WhichOneof("reply") != "exchanged":
            raise PypsError("a push was answered with something else than receipts")
        for answer in reply.exchanged.replies:
            if self._take_receipt(answer.receipt) and answer.codec:
                self._accept(answer)

    def _frames(self, parts: Sequence[Part]) -> Iterator[bytes]:
        """The messages, each made of its numbers when gRPC is ready to send it: two are in memory at a time."""
        for shard, extents in parts:
            request = PushRequest()
            self._fill(request, shard, extents, len(parts))
            if extents is None:
                yield request.SerializeToString()
            else:
                values = _present_values(self._vectors, shard, extents)
                yield join(request, self._converter.encoded(values, self._codec))

    def _fill(self, request: PushRequest, shard: ShardRange, extents: Extents, num_shards: int) -> None:
        """Makes a shard's message, but for its payload."""
        request.CopyFrom(self._header)
        shard_id = shard.shard_id
        request.shard_id = shard_id
        request.base_version = self._base_versions[shard_id]
        request.newest_base_version = self._newest_base_versions[shard_id]
        request.num_shards = num_shards
        # Said in so many words where there is nothing: where a round waits for every worker, silence would hold it up.
        request.kind = PAYLOAD_KIND_NOTHING if extents is None else self._kinds[shard.group]  # type: ignore[assignment]
        if extents:
            request.extents.extend(Extent(offset=start, length=length) for start, length in extents)
        if shard.group in self._learning_rates:
            request.learning_rate, momentum, request.provisional = self._learning_rates[shard.group]
            if momentum is not None:
                request.momentum = momentum
        if self._intake is not None:
            request.reply_codec = self._intake.codec  # type: ignore[assignment]
            held = self._intake.held
            if held.epoch == request.epoch:
                request.held_version = held.versions[shard_id]

    def _take_reply(self, message: bytes) -> bool:
        """Takes an exchange's answer: a receipt and, where they are newer, the shard's parameters."""
        reply, payload = _read_reply(message)
        # Parameters of another epoch than the others that are held would mix two states: a pull brings them all.
        if reply.codec and self._intake is not None and reply.epoch == self._intake.held.epoch:
            self._intake.write(reply.receipt.shard_id, reply.codec, payload)
            self._accept(reply)
        self._take_receipt(reply.receipt)
        return not self._waiting

    def _accept(self, reply: ExchangeReply) -> None:
        if self._intake is not None and reply.epoch == self._intake.held.epoch:
            self._intake.accept(reply.receipt.shard_id, reply.version)

    def _take_receipt(self, receipt: Receipt) -> bool:
        """Notes an answer; False for one to another push."""
        if receipt.sequence != self._header.sequence or receipt.shard_id not in self._waiting:
            return False
        del self._waiting[receipt.shard_id]
        self._receipts.append(receipt)
        return True

    def _num_bytes(self, parts: Sequence[Part]) -> int:
        """About the bytes that travel, both ways."""
        length = sum(shard.length for shard, _ in parts)
        return self._codec.bytes_of(length) + (0 if self._intake is None else self._intake.codec.bytes_of(length))


def _read_reply(message: bytes) -> tuple[ExchangeReply, memoryview]:
    """An exchange's answer and its payload: in place where it is large, copied where that is quicker."""
    if len(message) <= COPIED_BYTES_MAX:
        reply = ExchangeReply.FromString(message)
        return reply, memoryview(reply.payload)
    header, payload = split(message)
    return ExchangeReply.FromString(header), payload


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
