"""Shards as Pull sends them, made once for all who ask for the same version."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import NamedTuple

import numpy as np

from pyps import _kernels
from pyps.core.gradient import NATIVE
from pyps.core.plan import Reply
from pyps.core.store import Store
from pyps.service.executor import INLINE_PARAMETERS_MAX
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.codecs import FLOAT32, Codec
from pyps_wire.framing import PAYLOAD_FIELD, join

# What the numbers of a message need in front of its parameters.
HEADER_ROOM = 48
# For the workers of a round, who all wait for the same versions.
ROUND_BYTES_MAX = 64 * 2**20
# For those who happen to pull at the same time: their neighbours' frames are worth little memory.
RECENT_BYTES_MAX = 16 * 2**20


class ReplyFrame:
    """A message with parameters, for which there is memory before they are known.

    What kernels do not write goes into it in the end, from float32.
    """

    __slots__ = ("_frame", "_header_room", "codec", "reply")

    def __init__(self, length: int, codec: Codec, *, header_room: int) -> None:
        """For so many parameters, behind a header of at most so many bytes for most."""
        self.codec = codec
        self._header_room = header_room
        if codec in NATIVE:
            # Memory that is not written costs nothing, should nothing newer be there.
            self._frame, offset = _kernels.new_frame(header_room, PAYLOAD_FIELD, length, codec)
            self.reply = Reply(self._frame, offset, codec)
        else:
            self.reply = Reply(bytearray(FLOAT32.max_bytes(length)), 0, FLOAT32)

    def parts(self, header: wire.Parameters | wire.ExchangeReply) -> tuple[bytes, memoryview]:
        """The same message as its header and its parameters, where these lie."""
        reply = self.reply
        if reply.codec is not self.codec:
            payload = memoryview(self.codec.encode(np.frombuffer(reply.buffer, np.float32)))
        else:
            payload = memoryview(reply.buffer)[reply.offset :]
        return header.SerializeToString(), payload

    def complete(self, header: wire.Parameters | wire.ExchangeReply) -> bytes:
        """The message, once the parameters are written and its other fields known."""
        if self.reply.codec is not self.codec:
            return join(header, self.codec.encode(np.frombuffer(self.reply.buffer, np.float32)))
        fields, room = header.SerializeToString(), self._header_room
        # A header that has much to say is longer than its room: those are few.
        return self._frame if _kernels.write_header(self._frame, room, fields) else fields + self._frame[room:]


class Wanted(NamedTuple):
    """What a pull wants of one shard."""

    shard: Store
    codec: Codec
    # The version that the caller holds; -1 for none.
    held_version: int = -1
    # Whether it waited for that version, as the other workers of its round do.
    of_round: bool = False

    @property
    def payload_bytes(self) -> int:
        """The size of the shard's parameters as they are sent."""
        return self.codec.max_bytes(self.shard.length)

    def frame(self, *, worker_id: str) -> tuple[int, bytes] | None:
        """The shard's version and message, None when the caller's version is as new. A worker's pull is recorded."""
        frame = ReplyFrame(self.shard.length, self.codec, header_room=HEADER_ROOM)
        version = self.shard.pull(frame.reply, held_version=self.held_version, worker_id=worker_id or None)
        if version is None:
            return None
        header = wire.Parameters(shard_id=self.shard.shard_id, version=version, epoch=self.shard.epoch)
        header.codec = self.codec  # type: ignore[assignment]
        return version, frame.complete(header)


class _Kept(NamedTuple):
    version: int
    frame: bytes


class Serializations:
    """The newest frames of large shards, by shard and codec, within a bound. May be used from any thread."""

    def __init__(self, *, round_bytes_max: int = ROUND_BYTES_MAX, recent_bytes_max: int = RECENT_BYTES_MAX) -> None:
        self._round_bytes_max = round_bytes_max
        self._recent_bytes_max = recent_bytes_max
        self._lock = Lock()
        # Guarded by _lock. What was made last stands last.
        self._frames: OrderedDict[tuple[Store, Codec], _Kept] = OrderedDict()
        self._bytes = 0
        # Held while a frame is made; taken before the shard's own.
        self._making: dict[tuple[Store, Codec], Lock] = {}

    @property
    def bytes_held(self) -> int:
        """The size of the frames kept."""
        return self._bytes

    def take(self, wanted: Wanted, *, worker_id: str) -> bytes | None:
        """The shard's message, None when the caller's version is as new. Only pulls of a worker are recorded."""
        if wanted.shard.length < INLINE_PARAMETERS_MAX:
            # It is sooner made than found.
            made = wanted.frame(worker_id=worker_id)
            return None if made is None else made[1]
        # Two who ask at once make one frame.
        with self._making_of(wanted):
            with self._lock:
                kept = self._frames.get((wanted.shard, wanted.codec))
            newer = kept is not None and kept.version > wanted.held_version
            if kept is not None and newer and wanted.shard.note_pull(kept.version, worker_id=worker_id or None):
                return kept.frame
            made = wanted.frame(worker_id=worker_id)
            if made is None:
                return None
            self._keep(wanted, *made)
            return made[1]

    def tidy(self, shards: Mapping[int, Store]) -> None:
        """Lets go what nobody will ask for: frames of shards that have moved on, or are no longer these."""
        with self._lock:
            for (shard, codec), kept in list(self._frames.items()):
                if shard.version != kept.version or shards.get(shard.shard_id) is not shard:
                    self._drop(shard, codec)
            for shard, codec in list(self._making):
                if shards.get(shard.shard_id) is not shard:
                    del self._making[shard, codec]

    def _making_of(self, wanted: Wanted) -> Lock:
        with self._lock:
            return self._making.setdefault((wanted.shard, wanted.codec), Lock())

    def _keep(self, wanted: Wanted, version: int, frame: bytes) -> None:
        bytes_max = self._round_bytes_max if wanted.of_round else self._recent_bytes_max
        with self._lock:
            self._drop(wanted.shard, wanted.codec)
            self._frames[wanted.shard, wanted.codec] = _Kept(version, frame)
            self._bytes += len(frame)
            while self._bytes > bytes_max:
                self._drop(*next(iter(self._frames)))

    def _drop(self, shard: Store, codec: Codec) -> None:
        kept = self._frames.pop((shard, codec), None)
        if kept is not None:
            self._bytes -= len(kept.frame)
