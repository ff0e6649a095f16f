"""Laying a sum of gradients aside on all servers (service VectorMachine), until a coordinator folds it in."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial

from pyps_client.channel import Channel
from pyps_client.connection import call_seconds
from pyps_client.conversion import NUMPY, Converter
from pyps_client.process_hooks import keep_large_blocks
from pyps_client.pulling import LARGE_BYTES
from pyps_client.retry import Busy
from pyps_client.session import Session
from pyps_client.vectors import Vectors, part_of
from pyps_wire.codecs import codec_of
from pyps_wire.errors import LimitExceeded, NoRoom
from pyps_wire.framing import join
from pyps_wire.partition import ShardRange
from pyps_wire.vector_machine_pb2 import StageReply, StageRequest


class Staging:
    """The way of sums of gradients to the servers' stages, in the codec of pushes."""

    def __init__(self, session: Session, *, converter: Converter = NUMPY) -> None:
        self._session = session
        self._codec = codec_of(session.launch.codec)
        self._converter = converter

    def stage(self, vectors: Vectors, *, pass_number: int, portion_id: int, stage_id: int) -> None:
        """Lays vectors (one a group, float32 or the codec's type) aside on all servers at once; returns when all have
        them.

        `portion_id`, `stage_id`: the first portion in the sum, and its lease. The vectors must rest meanwhile: after a
        lost connection they are sent again. BadRequest where a server takes no stages of this pass, NoRoom where it has
        no memory for one more.
        """
        partition = self._session.partition
        header = StageRequest(
            sender=self._session.sender,
            portion_id=portion_id,
            stage_id=stage_id,
            codec=self._codec,  # type: ignore[arg-type]
            # The field's name is a keyword of Python's.
            **{"pass": pass_number},  # type: ignore[arg-type]
        )
        self._session.ask_all(
            [partial(self._send, header, partition.of_server(index), vectors) for index in range(partition.num_servers)]
        )

    def _send(
        self,
        header: StageRequest,
        shards: Sequence[ShardRange],
        vectors: Vectors,
        channel: Channel,
        _: threading.Event,
    ) -> None:
        """Sends a stage to one server. After a loss all of it is sent again, in place of what came before."""
        if not shards:
            # More servers than shards.
            return
        num_bytes = self._codec.bytes_of(sum(shard.length for shard in shards))
        if num_bytes > LARGE_BYTES:
            keep_large_blocks()
        frames = self._frames(header, shards, vectors)
        try:
            channel.send("Stage", frames, StageReply, timeout_seconds=call_seconds(num_bytes))
        except NoRoom:
            # The memory for stages: none of it is given up before the pass ends.
            raise
        except LimitExceeded as exceeded:
            # The memory for calls under way.
            raise Busy(str(exceeded)) from None

    def _frames(self, header: StageRequest, shards: Sequence[ShardRange], vectors: Vectors) -> Iterator[bytes]:
        """A message a shard, each made when gRPC is ready to send it."""
        for shard in shards:
            request = StageRequest()
            request.CopyFrom(header)
            request.shard_id = shard.shard_id
            request.num_shards = len(shards)
            yield join(request, self._converter.encoded(part_of(vectors, shard), self._codec))
