"""Stages: sums of gradients that workers send, until a coordinator folds the accepted ones into a vector."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pyps.core.arrays import Floats
from pyps.core.gradient import decoded
from pyps_wire.codecs import Codec
from pyps_wire.errors import InvalidArgument, NoRoom, NotFinite, WrongSize


@dataclass(frozen=True, slots=True)
class StagePart:
    """One shard of the sum of the gradients of some portions."""

    pass_: int
    # The first portion in the sum, and its lease, which names the stage.
    portion_id: int
    stage_id: int
    shard_id: int
    # The shards on this server that its sender holds.
    num_shards: int
    codec: Codec
    payload: bytes | memoryview


@dataclass(eq=False)
class _Stage:
    stage_id: int
    portion_id: int
    # By shard. An array is never written again, so a fold may keep it.
    parts: dict[int, Floats] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


class Stages:
    """The stages of the present pass. Every method may be called from any thread.

    Of two stages of one portion only the one with the later lease is kept: the other's worker has lost the portion.
    """

    def __init__(self, lengths: Mapping[int, int], *, room: Callable[[], int]) -> None:
        """`lengths` are the shards' numbers of parameters; `room` returns the bytes that all stages may take."""
        self._lengths = lengths
        self._room = room
        self._lock = threading.Lock()
        # Guarded by _lock; pass_ and bytes are read without it.
        self.pass_ = 0
        self.bytes = 0
        self._by_portion: dict[int, _Stage] = {}
        self._by_id: dict[int, _Stage] = {}

    def add(self, part: StagePart) -> bool:
        """Add one shard of a stage, once; return True if the stage is complete here, or no longer needed.

        Raises:
            InvalidArgument: The part is of another pass or shard.
            WrongSize, NotFinite: The payload cannot be used.
            NoRoom: There is no memory for another stage.
        """
        self._require_fitting(part)
        with self._lock:
            answer = self._answered(part)
            if answer is None:
                self._require_room(part)
        if answer is not None:
            return answer
        # Not under the lock: decoding takes as long as a small update.
        values = self._decoded(part)
        with self._lock:
            answer = self._answered(part)
            return self._put(part, values) if answer is None else answer

    def begin(self, pass_: int) -> None:
        """Delete all stages, and accept those of this pass from now on."""
        with self._lock:
            self.pass_ = pass_
            self.bytes = 0
            self._by_portion, self._by_id = {}, {}

    def complete(self, stage_ids: Iterable[int]) -> list[dict[int, Floats]]:
        """Return these stages, the parts of each by shard; InvalidArgument unless all are complete here."""
        with self._lock:
            return [self._complete(stage_id) for stage_id in stage_ids]

    def _require_fitting(self, part: StagePart) -> None:
        length = self._lengths.get(part.shard_id)
        if length is None:
            known = ", ".join(map(str, sorted(self._lengths))) or "none"
            raise InvalidArgument(f"stage {part.stage_id} has shard {part.shard_id}, this server holds {known}")
        if not 1 <= part.num_shards <= len(self._lengths):
            raise InvalidArgument(
                f"stage {part.stage_id} has num_shards {part.num_shards}, this server holds {len(self._lengths)} "
                "shards: send each that the worker has, zeros where a portion has no gradient"
            )
        if part.stage_id == 0:
            raise InvalidArgument("a stage has stage_id 0; expected the lease of its first portion")
        try:
            part.codec.require_count(part.payload, length)
        except WrongSize as error:
            raise WrongSize(f"stage {part.stage_id}, shard {part.shard_id}: {error}") from None

    def _decoded(self, part: StagePart) -> Floats:
        values, index = decoded(part.payload, part.codec, count=self._lengths[part.shard_id])
        if index >= 0:
            raise NotFinite(
                f"stage {part.stage_id} holds NaN or infinity for parameter {index} of shard {part.shard_id}: deliver "
                "a loss that is not finite, and stage nothing"
            )
        return values

    # Called under the lock.

    def _answered(self, part: StagePart) -> bool | None:
        """Return the answer for a part that is here already or was replaced by a later stage; None for a new part."""
        if part.pass_ != self.pass_:
            raise InvalidArgument(
                f"stage {part.stage_id} is of pass {part.pass_}, and pass {self.pass_} is under way here: discard "
                "it and request another portion"
            )
        stage = self._by_id.get(part.stage_id)
        if stage is None:
            latest = self._by_portion.get(part.portion_id)
            return True if latest is not None and latest.stage_id > part.stage_id else None
        if stage.portion_id != part.portion_id:
            raise InvalidArgument(
                f"stage {part.stage_id} is of portion {part.portion_id}, and was of portion {stage.portion_id} before: "
                "a stage begins with one portion"
            )
        return self._is_complete(stage) if part.shard_id in stage.parts else None

    def _put(self, part: StagePart, values: Floats) -> bool:
        self._require_room(part)
        stage = self._by_id.get(part.stage_id)
        if stage is None:
            former = self._by_portion.get(part.portion_id)
            if former is not None:
                del self._by_id[former.stage_id]
                self.bytes -= former.num_bytes
            stage = _Stage(part.stage_id, part.portion_id)
            self._by_id[part.stage_id] = self._by_portion[part.portion_id] = stage
        stage.parts[part.shard_id] = values
        self.bytes += values.nbytes
        return self._is_complete(stage)

    def _require_room(self, part: StagePart) -> None:
        # The new stage replaces an earlier one of its portion.
        former = self._by_portion.get(part.portion_id)
        freed = former.num_bytes if former is not None and former.stage_id != part.stage_id else 0
        num_bytes, room = self.bytes - freed + 4 * self._lengths[part.shard_id], self._room()
        if num_bytes > room:
            raise NoRoom(
                f"stage {part.stage_id} of portion {part.portion_id} would make {num_bytes} bytes of staged "
                f"gradients, and vectors leave room for {room}: raise --max-vector-bytes, or start the coordinator "
                "with fewer stages (--portions, --fold group:k=N); with groups each worker that dies or joins during a "
                "pass may add a few stages"
            )

    def _complete(self, stage_id: int) -> dict[int, Floats]:
        stage = self._by_id.get(stage_id)
        parts = stage.parts if stage is not None else {}
        if len(parts) < len(self._lengths):
            raise InvalidArgument(
                f"names the stage {stage_id}, of which {len(parts)} of {len(self._lengths)} shards are here in pass "
                f"{self.pass_}; fold stages whose delivery was accepted"
            )
        return dict(parts)

    def _is_complete(self, stage: _Stage) -> bool:
        return len(stage.parts) == len(self._lengths)
