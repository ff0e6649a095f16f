"""One pull, as one server answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pyps_client.channel import Channel
from pyps_client.connection import Connection, call_seconds
from pyps_client.retry import LinkLost
from pyps_client.vectors import Vector, part_of
from pyps_wire.codecs import decode
from pyps_wire.common_pb2 import CODEC_FLOAT32, Role, Sender
from pyps_wire.errors import PypsError, WrongSize
from pyps_wire.framing import split
from pyps_wire.parameter_server_pb2 import Parameters, PullRequest
from pyps_wire.partition import Partition, ShardRange


class Held:
    """The versions that a caller holds of one server's shards, all of one epoch."""

    def __init__(self, shards: Sequence[ShardRange]) -> None:
        self.epoch = 0
        self.versions = {shard.shard_id: -1 for shard in shards}

    def enter(self, epoch: int) -> None:
        """Forgets versions of an earlier epoch: the server counts anew from its checkpoint."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.versions = dict.fromkeys(self.versions, -1)


class IncomingPull:
    """What one server has that is newer. Asked again after a loss, it asks only for what did not come yet."""

    def __init__(
        self,
        sender: Sender,
        role: Role,
        vectors: Sequence[Vector],
        *,
        partition: Partition,
        connection: Connection,
        held: Held,
        min_versions: Mapping[int, int],
        wait_seconds: float,
    ) -> None:
        self._sender = sender
        self._role = role
        self._vectors = vectors
        self._connection = connection
        self._held = held
        self._min_versions = min_versions
        self._wait_seconds = wait_seconds
        self._shards = {shard.shard_id: shard for shard in partition.of_server(connection.index)}
        self._waiting = set(self._shards)
        self._changed: set[int] = set()

    def __call__(self, channel: Channel) -> set[int]:
        answered = 0
        # A second round comes only where the epoch changed between two tries of the first.
        while self._waiting:
            asked = sorted(self._waiting)
            num_bytes = 4 * sum(self._shards[shard_id].length for shard_id in asked)
            timeout_seconds = self._wait_seconds + call_seconds(num_bytes)
            try:
                for message in channel.read("Pull", self._request(asked), timeout_seconds=timeout_seconds):
                    self._take(message)
                    answered += 1
            except LinkLost as lost:
                lost.answered = answered
                raise
            self._waiting.difference_update(asked)
        return self._changed

    def _request(self, asked: Sequence[int]) -> PullRequest:
        request = PullRequest(
            sender=self._sender,
            role=self._role,
            epoch=self._held.epoch,
            codec=CODEC_FLOAT32,
            wait_milliseconds=int(self._wait_seconds * 1000),
        )
        for shard_id in asked:
            request.wants.add(
                shard_id=shard_id,
                held_version=self._held.versions[shard_id],
                min_version=self._min_versions.get(shard_id, 0),
            )
        return request

    def _take(self, message: bytes) -> None:
        """Writes one shard into its place. The payload is read where gRPC left it."""
        header, payload = split(message)
        reply = Parameters.FromString(header)
        shard = self._shards.get(reply.shard_id)
        if shard is None:
            raise PypsError(f"{self._connection.name} sent shard {reply.shard_id}, which it does not hold.")
        values = decode(payload, reply.codec)
        if values.size != shard.length:
            raise WrongSize(
                f"{self._connection.name} sent {values.size} parameters of shard {shard.shard_id}; expected "
                f"{shard.length}."
            )
        if reply.epoch != self._held.epoch:
            self._held.enter(reply.epoch)
            self._connection.epoch = reply.epoch
            self._waiting = set(self._shards)
        np.copyto(part_of(self._vectors, shard), values)
        self._held.versions[shard.shard_id] = reply.version
        self._waiting.discard(shard.shard_id)
        self._changed.add(shard.shard_id)
