"""What a worker pushes to one shard, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from pyps_wire.errors import BadRequest, WrongSize


class Codec(IntEnum):
    """How the numbers of a payload are written; the wire contract's numbers."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3


class PayloadKind(IntEnum):
    """What the numbers of a payload mean; the wire contract's numbers. 0 is read as GRADIENT."""

    GRADIENT = 1
    DELTA = 2


class Extent(NamedTuple):
    """A stretch of a shard, in parameters."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """One shard's part of a push.

    The payload must never change: it is scanned before the shard's lock is taken and applied under it.
    (worker_id, incarnation, sequence) is the push's identity. Without extents the payload covers the whole
    shard; parameters outside the extents had no gradient, which is not a gradient of zero.
    """

    worker_id: str
    incarnation: int
    sequence: int
    base_version: int
    epoch: int
    codec: int
    payload: bytes | memoryview
    extents: tuple[Extent, ...] = ()
    kind: int = PayloadKind.GRADIENT
    example_count: int = 0
    minibatch_count: int = 1
    newest_base_version: int | None = None
    # The worker's own count of steps, for protocols that compare workers' clocks.
    clock: int = 0

    def stretches(self, shard_length: int) -> tuple[Extent, ...]:
        """Returns the extents, or the whole shard as one."""
        return self.extents or (Extent(0, shard_length),)

    def parameter_index(self, payload_index: int) -> int:
        """Returns the place in the shard of the payload's number at `payload_index`."""
        for offset, length in self.extents:
            if payload_index < length:
                return offset + payload_index
            payload_index -= length
        return payload_index


# Each extent costs a kernel call under the shard's lock: this many take a fraction of a second.
EXTENTS_MAX = 65_536

# Larger counts are nonsense, and their sums would not fit the messages that tell them.
EXAMPLES_MAX = 2**32

_ITEM_BYTES = {Codec.FLOAT32: 4, Codec.FLOAT16: 2, Codec.BFLOAT16: 2}


def item_bytes(codec: int) -> int:
    """Returns the size of one number of the payload."""
    return _ITEM_BYTES[Codec(codec)]


def require_fitting(gradient: Gradient, *, shard_id: int, shard_length: int) -> None:
    """Raises BadRequest or WrongSize unless the gradient can be applied to a shard of that length."""
    where = f"shard {shard_id}, push {gradient.sequence} of worker {gradient.worker_id!r}"
    if gradient.codec not in _ITEM_BYTES:
        raise BadRequest(f"{where}: codec is {gradient.codec}; expected FLOAT32 (1), FLOAT16 (2) or BFLOAT16 (3)")
    if gradient.kind not in (0, PayloadKind.GRADIENT, PayloadKind.DELTA):
        raise BadRequest(f"{where}: payload kind is {gradient.kind}; expected GRADIENT (1) or DELTA (2)")
    if gradient.example_count > EXAMPLES_MAX:
        raise BadRequest(f"{where}: example_count is {gradient.example_count}; expected at most {EXAMPLES_MAX}")
    _require_extents(gradient.extents, where=where, shard_length=shard_length)
    count = sum(length for _, length in gradient.stretches(shard_length))
    expected = count * item_bytes(gradient.codec)
    size = memoryview(gradient.payload).nbytes
    if size != expected:
        codec_name = Codec(gradient.codec).name.lower()
        raise WrongSize(
            f"{where}: the payload is {size} bytes long; {count} of the shard's {shard_length} parameters"
            f" as {codec_name} are {expected} bytes"
        )


def require_few_extents(count: int) -> None:
    """Raises BadRequest for too many extents; asked before they are read, which takes long for a million."""
    if count > EXTENTS_MAX:
        raise BadRequest(f"{count} extents; expected at most {EXTENTS_MAX}, adjacent ones as one")


def _require_extents(extents: tuple[Extent, ...], *, where: str, shard_length: int) -> None:
    require_few_extents(len(extents))
    end = 0
    for offset, length in extents:
        if length < 1:
            raise BadRequest(f"{where}: the extent at {offset} is {length} parameters long; expected at least 1")
        if offset < end:
            raise BadRequest(
                f"{where}: the extent at {offset} begins before {end}, where the one before it ends;"
                " expected ascending, disjoint extents"
            )
        end = offset + length
    if end > shard_length:
        raise WrongSize(f"{where}: the last extent ends at {end}; the shard has {shard_length} parameters")
