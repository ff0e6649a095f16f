"""One pull, as one server answers it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from pyps_client.channel import Channel
from pyps_client.connection import Connection, call_seconds
from pyps_client.intake import Intake
from pyps_client.parking import Parking
from pyps_client.process_hooks import keep_large_blocks
from pyps_client.retry import LinkLost
from pyps_client.transport import Link
from pyps_wire.common_pb2 import CODEC_UNSPECIFIED, Role, Sender
from pyps_wire.errors import PypsError, WaitTimedOut
from pyps_wire.framing import split
from pyps_wire.local_pb2 import LocalPull, LocalRequest
from pyps_wire.parameter_server_pb2 import Parameters, PullRequest
from pyps_wire.work_pb2 import LeaseReply, LeaseRequest


class IncomingPull:
    """What one server has that is newer. Asked again after a loss, it asks only for what did not come yet."""

    def __init__(
        self,
        sender: Sender,
        role: Role,
        intake: Intake,
        *,
        connection: Connection,
        min_versions: Mapping[int, int],
        parking: Parking,
        lent: bool = False,
        portion: LeaseRequest | None = None,
    ) -> None:
        """`min_versions`: shard id to the version to wait for, while `parking` lasts. `lent`: the vectors are.

        With `portion` the server leases one too, in the moment of which the parameters are: `lease` then has its
        answer, and without a portion no parameters come.
        """
        self._sender = sender
        self._role = role
        self._intake = intake
        self._connection = connection
        self._held = intake.held
        self._min_versions = min_versions
        self._parking = parking
        self._lent = lent
        self._portion = portion
        self.lease = LeaseReply()
        self._waiting = set(self._held.shards)
        self._changed: set[int] = set()

    def __call__(self, channel: Channel, stop: threading.Event) -> set[int]:
        answered = 0
        # A further round comes where the epoch changed between two tries of the first, and while versions are
        # waited for.
        while self._waiting:
            asked = sorted(self._waiting)
            request = self._request(asked)
            num_bytes = self._intake.codec.bytes_of(sum(self._held.shards[i].length for i in asked))
            waited_milliseconds = request.wait_milliseconds + request.portion.wait_milliseconds
            timeout_seconds = waited_milliseconds / 1000 + call_seconds(num_bytes)
            before = len(self._changed)
            try:
                self._ask(channel, request, timeout_seconds, num_bytes)
            except WaitTimedOut as unanswered:
                self._parking.go_on(unanswered, stop=stop)
                answered += 1
                continue
            except LinkLost as lost:
                lost.answered = answered + len(self._changed) - before
                raise
            self._waiting.difference_update(asked)
        self._held.answered(self._min_versions)
        return self._changed

    def _ask(self, channel: Channel, request: PullRequest, timeout_seconds: float, num_bytes: int) -> None:
        link = self._connection.link_to_use() if self._lent and not request.HasField("portion") else None
        if link is not None and link.begin(parks=request.wait_milliseconds > 0):
            try:
                self._ask_locally(link, request, timeout_seconds)
            finally:
                link.end()
            return
        if num_bytes > LARGE_BYTES:
            keep_large_blocks()
        for message in channel.read("Pull", request, timeout_seconds=timeout_seconds):
            header, payload = split(message)
            reply = Parameters.FromString(header)
            if reply.HasField("lease"):
                self.lease, self._portion = reply.lease, None
            if reply.codec == CODEC_UNSPECIFIED:
                continue
            self._intake.write(reply.shard_id, reply.codec, payload)
            self._accept(reply)

    def _ask_locally(self, link: Link, request: PullRequest, timeout_seconds: float) -> None:
        reply = link.request(LocalRequest(pull=LocalPull(request=request)), timeout_seconds=timeout_seconds)
        if reply.WhichOneof("reply") != "pulled":
            raise PypsError(f"{self._connection.name} answered a pull with something else.")
        for written in reply.pulled.shards:
            self._accept(written)

    def _request(self, asked: Sequence[int]) -> PullRequest:
        waits = any(self._min_versions.get(shard_id, 0) > self._held.versions[shard_id] for shard_id in asked)
        request = PullRequest(
            sender=self._sender,
            role=self._role,
            epoch=self._held.epoch,
            codec=self._intake.codec,  # type: ignore[arg-type]
            wait_milliseconds=round(self._parking.call_seconds * 1000) if waits else 0,
            portion=self._portion,
        )
        for shard_id in asked:
            request.wants.add(
                shard_id=shard_id,
                held_version=self._held.versions[shard_id],
                min_version=self._min_versions.get(shard_id, 0),
            )
        return request

    def _accept(self, reply: Parameters) -> None:
        """Notes one shard that was written into its place."""
        if reply.epoch != self._held.epoch:
            self._held.enter(reply.epoch)
            # A heartbeat may have told of a later restore meanwhile.
            self._connection.epoch = max(self._connection.epoch, reply.epoch)
            self._waiting = set(self._held.shards)
            # Versions of the epoch before: nobody may wait for them any more.
            self._min_versions = {}
        self._intake.accept(reply.shard_id, reply.version)
        self._waiting.discard(reply.shard_id)
        self._changed.add(reply.shard_id)


# A call that moves more is worth telling the allocator of.
LARGE_BYTES = 1 << 20
