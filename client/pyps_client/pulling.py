"""One pull, as one server answers it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from pyps_client.channel import Channel
from pyps_client.connection import Connection, call_seconds
from pyps_client.parking import Parking
from pyps_client.retry import LinkLost
from pyps_client.vectors import Vector, part_of
from pyps_wire.codecs import decode
from pyps_wire.common_pb2 import CODEC_FLOAT32, Role, Sender
from pyps_wire.errors import PypsError, WaitTimedOut, WrongSize
from pyps_wire.framing import split
from pyps_wire.parameter_server_pb2 import Parameters, PullRequest
from pyps_wire.partition import Partition, ShardRange


class Held:
    """The versions that a caller holds of one server's shards, and those that it is to wait for; all of one epoch.

    One thread may note versions to wait for while another pulls.
    """

    def __init__(self, shards: Sequence[ShardRange]) -> None:
        self.epoch = 0
        self.versions = {shard.shard_id: -1 for shard in shards}
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._wanted: dict[int, int] = {}

    def enter(self, epoch: int) -> None:
        """Forgets versions of an earlier epoch: the server counts anew from its checkpoint."""
        with self._lock:
            if epoch != self.epoch:
                self.epoch = epoch
                self.versions = dict.fromkeys(self.versions, -1)
                self._wanted = {}

    def want(self, shard_id: int, version: int, *, epoch: int) -> None:
        """Notes a version to wait for before the next gradient is computed."""
        with self._lock:
            if epoch == self.epoch:
                self._wanted[shard_id] = max(version, self._wanted.get(shard_id, 0))

    @property
    def wanted(self) -> dict[int, int]:
        """Shard id to the version to wait for, where it has not come yet."""
        with self._lock:
            wanted = self._wanted.items()
            return {shard_id: version for shard_id, version in wanted if self.versions[shard_id] < version}

    def answered(self, waited_for: Mapping[int, int]) -> None:
        """Ends waits that the server has answered: they came, or never will, since the run is over."""
        with self._lock:
            for shard_id, version in waited_for.items():
                if self._wanted.get(shard_id, version + 1) <= version:
                    del self._wanted[shard_id]


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
        parking: Parking,
    ) -> None:
        """`min_versions`: shard id to the version to wait for, while `parking` lasts."""
        self._sender = sender
        self._role = role
        self._vectors = vectors
        self._connection = connection
        self._held = held
        self._min_versions = min_versions
        self._parking = parking
        self._shards = {shard.shard_id: shard for shard in partition.of_server(connection.index)}
        self._waiting = set(self._shards)
        self._changed: set[int] = set()

    def __call__(self, channel: Channel, stop: threading.Event) -> set[int]:
        answered = 0
        # A further round comes where the epoch changed between two tries of the first, and while versions are
        # waited for.
        while self._waiting:
            asked = sorted(self._waiting)
            request = self._request(asked)
            num_bytes = 4 * sum(self._shards[shard_id].length for shard_id in asked)
            timeout_seconds = request.wait_milliseconds / 1000 + call_seconds(num_bytes)
            try:
                for message in channel.read("Pull", request, timeout_seconds=timeout_seconds):
                    self._take(message)
                    answered += 1
            except WaitTimedOut as unanswered:
                self._parking.go_on(unanswered, stop=stop)
                answered += 1
                continue
            except LinkLost as lost:
                lost.answered = answered
                raise
            self._waiting.difference_update(asked)
        self._held.answered(self._min_versions)
        return self._changed

    def _request(self, asked: Sequence[int]) -> PullRequest:
        waits = any(self._min_versions.get(shard_id, 0) > self._held.versions[shard_id] for shard_id in asked)
        request = PullRequest(
            sender=self._sender,
            role=self._role,
            epoch=self._held.epoch,
            codec=CODEC_FLOAT32,
            wait_milliseconds=round(self._parking.call_seconds * 1000) if waits else 0,
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
            # Versions of the epoch before: nobody may wait for them any more.
            self._min_versions = {}
        np.copyto(part_of(self._vectors, shard), values)
        self._held.versions[shard.shard_id] = reply.version
        self._waiting.discard(shard.shard_id)
        self._changed.add(shard.shard_id)
