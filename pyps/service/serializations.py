"""Answers with parameters, made once for all pulls of one version."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import NamedTuple

import numpy as np

from pyps import _kernels
from pyps.core.gradient import NATIVE, PublishedReply, Reply
from pyps.core.store import Store
from pyps.service.executor import INLINE_PARAMETERS_MAX
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.codecs import FLOAT32, Codec
from pyps_wire.framing import PAYLOAD_FIELD, join
from pyps_wire.lane import PULL

# The bytes of a message's other fields in front of its parameters.
HEADER_ROOM = 48
# For the workers of a round, which all wait for the same versions.
ROUND_BYTES_MAX = 64 * 2**20
# For other pulls, whose frames are seldom taken twice.
RECENT_BYTES_MAX = 16 * 2**20


class Answer:
    """A message to a caller. A lane sends header and payload apart, gRPC as one buffer."""

    def __init__(self, kind: int, header: bytes = b"") -> None:
        """Make an answer without a payload; `kind` is that of lanes (`pyps_wire.lane`)."""
        self.kind = kind
        self.header = header
        self.payload: bytes | memoryview = b""

    @property
    def whole(self) -> bytes:
        """Return header and payload in one buffer."""
        return self.header


class ReplyFrame(Answer):
    """An answer with parameters, whose memory exists before they are known.

    Kernels write float32 for a codec that they do not know; `seal` encodes it.
    """

    def __init__(self, kind: int, length: int, codec: Codec, *, header_room: int) -> None:
        """Make room for the parameters, behind a header that rarely has more bytes than its room."""
        self.kind = kind
        self.codec = codec
        self._header_room = header_room
        self._whole: bytes | None = None
        if codec in NATIVE:
            # Costs nothing if there is nothing newer: memory is taken when it is written.
            self._frame, offset = _kernels.new_frame(header_room, PAYLOAD_FIELD, length, codec)
            self.reply = Reply(self._frame, offset, codec)
        else:
            self.reply = Reply(bytearray(FLOAT32.max_bytes(length)), 0, FLOAT32)

    def seal(self, header: wire.Parameters | wire.ExchangeReply) -> ReplyFrame:
        """Complete the answer, once the parameters are written."""
        reply = self.reply
        self.header = header.SerializeToString()
        if reply.codec is self.codec:
            self.payload = memoryview(reply.buffer)[reply.offset :]
        else:
            self.payload = self.codec.encode(np.frombuffer(reply.buffer, np.float32))
        return self

    @property
    def whole(self) -> bytes:
        """Return header and payload in one buffer, made once."""
        if self._whole is None:
            room, header = self._header_room, self.header
            if self.reply.codec is not self.codec:
                self._whole = join(header, self.payload)
            elif _kernels.write_header(self._frame, room, header):
                self._whole = self._frame
            else:
                self._whole = header + self._frame[room:]
        return self._whole


class PublishedFrame(Answer):
    """An answer to a worker whose pulls follow a published copy."""

    def __init__(self, kind: int, codec: Codec, *, min_version: int = 0) -> None:
        super().__init__(kind)
        self.reply = PublishedReply(codec, min_version=min_version)

    @property
    def codec(self) -> Codec:
        return self.reply.codec

    def seal(self, header: wire.Parameters | wire.ExchangeReply) -> PublishedFrame:
        reply = self.reply
        if reply.since_version is not None:
            header.differences.since_version = reply.since_version
            header.differences.sizes.extend(memoryview(payload).nbytes for payload in reply.payloads)
        self.header, self.payload = header.SerializeToString(), b"".join(reply.payloads)
        return self

    @property
    def whole(self) -> bytes:
        return join(self.header, self.payload)


Frame = ReplyFrame | PublishedFrame


class Wanted(NamedTuple):
    """A pull's request for one shard."""

    shard: Store
    codec: Codec
    # The version that the caller holds; -1 for none.
    held_version: int = -1
    # The version for which it waited, as the other workers of its round do; 0 for none.
    min_version: int = 0

    @property
    def bytes_max(self) -> int:
        """The most bytes that the answer's payload takes."""
        codec = FLOAT32 if self.codec.published else self.codec
        return codec.max_bytes(self.shard.length)

    def frame(self, *, worker_id: str) -> tuple[int, Frame] | None:
        """Return the shard's version and message, None if the caller's is as new; record a worker's pull."""
        frame: Frame
        if self.codec.published and worker_id:
            frame = PublishedFrame(PULL, self.codec, min_version=self.min_version)
        else:
            frame = ReplyFrame(PULL, self.shard.length, self.codec, header_room=HEADER_ROOM)
        version = self.shard.pull(frame.reply, held_version=self.held_version, worker_id=worker_id or None)
        if version is None:
            return None
        header = wire.Parameters(shard_id=self.shard.shard_id, version=version, epoch=self.shard.epoch)
        header.codec = frame.codec  # type: ignore[assignment]
        return version, frame.seal(header)


class _Kept(NamedTuple):
    version: int
    frame: Frame
    num_bytes: int


class Serializations:
    """The newest frames of large shards, by shard and codec, within a bound. May be used from any thread."""

    def __init__(self, *, round_bytes_max: int = ROUND_BYTES_MAX, recent_bytes_max: int = RECENT_BYTES_MAX) -> None:
        self._round_bytes_max = round_bytes_max
        self._recent_bytes_max = recent_bytes_max
        self._lock = Lock()
        # Guarded by _lock. The newest last.
        self._frames: OrderedDict[tuple[Store, Codec], _Kept] = OrderedDict()
        self.bytes_held = 0
        # Held while a frame is made; taken before the shard's own.
        self._making: dict[tuple[Store, Codec], Lock] = {}

    def take(self, wanted: Wanted, *, worker_id: str) -> Frame | None:
        """Return the shard's message, None if the caller's version is as new; record a worker's pull."""
        if wanted.shard.length < INLINE_PARAMETERS_MAX or wanted.codec.published:
            # Faster to make than to find; and the shard keeps what it published.
            made = wanted.frame(worker_id=worker_id)
            return None if made is None else made[1]
        # Two pulls at once make one frame.
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
        """Drop frames of old versions and of shards that are not these."""
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

    def _keep(self, wanted: Wanted, version: int, frame: Frame) -> None:
        bytes_max = self._round_bytes_max if wanted.min_version else self._recent_bytes_max
        kept = _Kept(version, frame, wanted.bytes_max)
        with self._lock:
            self._drop(wanted.shard, wanted.codec)
            self._frames[wanted.shard, wanted.codec] = kept
            self.bytes_held += kept.num_bytes
            while self.bytes_held > bytes_max:
                self._drop(*next(iter(self._frames)))

    def _drop(self, shard: Store, codec: Codec) -> None:
        kept = self._frames.pop((shard, codec), None)
        if kept is not None:
            self.bytes_held -= kept.num_bytes
