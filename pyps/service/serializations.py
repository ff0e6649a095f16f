"""Shards as Pull sends them, made once for all who ask for the same version."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import NamedTuple

from pyps import _kernels
from pyps.core.arrays import Floats
from pyps.core.gradient import Codec, item_bytes
from pyps.core.shard import Shard
from pyps.service.workbench import INLINE_BYTES_MAX
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.framing import PAYLOAD_FIELD

# For the workers of a round, who all wait for the same versions.
ROUND_BYTES_MAX = 64 * 2**20
# For those who happen to pull at the same time: their neighbours' frames are worth little memory.
RECENT_BYTES_MAX = 16 * 2**20


class Wanted(NamedTuple):
    """What a pull wants of one shard."""

    shard: Shard
    codec: Codec
    # The version that the caller holds; -1 for none.
    held_version: int = -1
    # Whether it waited for that version, as the other workers of its round do.
    of_round: bool = False

    @property
    def payload_bytes(self) -> int:
        """The size of the shard's parameters as they are sent."""
        return self.shard.length * item_bytes(self.codec)

    def frame(self, version: int, parameters: Floats) -> bytes | None:
        """The message; None when the caller's version is as new. Called under the shard's lock."""
        if version <= self.held_version:
            return None
        header = wire.Parameters(
            shard_id=self.shard.shard_id,
            version=version,
            epoch=self.shard.epoch,
            codec=int(self.codec),  # type: ignore[arg-type]
        )
        return _kernels.join_frame(header.SerializeToString(), PAYLOAD_FIELD, parameters, self.codec)


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
        self._frames: OrderedDict[tuple[Shard, Codec], _Kept] = OrderedDict()
        self._bytes = 0

    @property
    def bytes_held(self) -> int:
        """The size of the frames kept."""
        return self._bytes

    def take(self, wanted: Wanted, *, worker_id: str) -> bytes | None:
        """The shard's message, None when the caller's version is as new. Only pulls of a worker are recorded."""

        def read(version: int, parameters: Floats) -> bytes | None:
            # Under the shard's lock: two who ask at once make one frame. A small one is sooner made than found.
            if version <= wanted.held_version or wanted.payload_bytes < INLINE_BYTES_MAX:
                return wanted.frame(version, parameters)
            frame = self._find(wanted, version)
            if frame is None and (frame := wanted.frame(version, parameters)) is not None:
                self._keep(wanted, version, frame)
            return frame

        return wanted.shard.read(read, worker_id=worker_id or None)

    def tidy(self, shards: Mapping[int, Shard]) -> None:
        """Lets go what nobody will ask for: frames of shards that have moved on, or are no longer these."""
        with self._lock:
            for (shard, codec), kept in list(self._frames.items()):
                if shard.version != kept.version or shards.get(shard.shard_id) is not shard:
                    self._drop(shard, codec)

    def _find(self, wanted: Wanted, version: int) -> bytes | None:
        with self._lock:
            kept = self._frames.get((wanted.shard, wanted.codec))
            return kept.frame if kept is not None and kept.version == version else None

    def _keep(self, wanted: Wanted, version: int, frame: bytes) -> None:
        bytes_max = self._round_bytes_max if wanted.of_round else self._recent_bytes_max
        with self._lock:
            self._drop(wanted.shard, wanted.codec)
            self._frames[wanted.shard, wanted.codec] = _Kept(version, frame)
            self._bytes += len(frame)
            while self._bytes > bytes_max:
                self._drop(*next(iter(self._frames)))

    def _drop(self, shard: Shard, codec: Codec) -> None:
        kept = self._frames.pop((shard, codec), None)
        if kept is not None:
            self._bytes -= len(kept.frame)
