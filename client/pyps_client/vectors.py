"""The flat vectors that a worker reads and writes, one a parameter group: their check, their slices, their encoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pyps_client.log import logger
from pyps_wire.codecs import FLOAT32, Codec
from pyps_wire.common_pb2 import (
    OUTCOME_REJECTED,
    PAYLOAD_KIND_BUFFER,
    REASON_DROPPED,
    REASON_FORGOTTEN,
    REASON_NOT_FINITE,
    Receipt,
)
from pyps_wire.errors import NotFinite, WrongSize
from pyps_wire.partition import Model, Partition, ShardRange

Vector = npt.NDArray[np.float32]
# One a group, in the type in which they are sent. Gradients under a stateful codec may be OffHost in their place.
Vectors = Sequence[npt.NDArray[Any]]
# Ranges of a shard, as start and length; an empty tuple for the whole shard.
Extents = tuple[tuple[int, int], ...]

# This number of gradients in a row with NaN or infinity ends a worker.
SKIPS_MAX = 10


class OffHost(Protocol):
    """Float32 gradients that lie on a device, and are encoded there."""

    dtype: np.dtype[Any]

    @property
    def size(self) -> int: ...

    def __getitem__(self, place: slice) -> OffHost: ...

    def on_host(self) -> Vector: ...

    def encode_feedback(self, residual: Vector | OffHost, codec: Codec) -> tuple[memoryview, OffHost]:
        """Return the bytes of feedback * residual + self, and what they lack of it: `Codec.encode_feedback`."""
        ...


def dtype_of(codec: Codec, *, converted: bool) -> np.dtype[Any]:
    """Return the type of vectors for a codec: its own, or float32 if they are converted or it has none."""
    return FLOAT32.dtype if converted or codec.dtype is None else codec.dtype


def codec_for(codec: Codec, kind: int) -> Codec:
    """Return the codec of a group's pushes: buffers move as float32 where the worker's codec loses much of a number."""
    return FLOAT32 if codec.dtype is None and kind == PAYLOAD_KIND_BUFFER else codec


def check_vectors(
    vectors: Sequence[npt.NDArray[Any]], model: Model, dtype: np.dtype[Any], *, what: str, writable: bool = False
) -> None:
    """Raise WrongSize for vectors that do not fit the model's groups."""
    if len(vectors) != model.num_groups:
        raise WrongSize(
            f"{what}: {len(vectors)} vectors were given for {model.num_groups} parameter groups; give one each."
        )
    for group, (vector, size) in enumerate(zip(vectors, model.group_sizes, strict=True)):
        if vector.shape != (size,) or vector.dtype != dtype:
            problem = f"is {vector.dtype}{list(vector.shape)}; expected {dtype}[{size}]"
        elif not vector.flags.c_contiguous or (writable and not vector.flags.writeable):
            problem = f"must be contiguous{' and writable' if writable else ''}"
        else:
            continue
        raise WrongSize(f"{what}: the vector of group {group} {problem}.")


def part_of(vectors: Sequence[npt.NDArray[Any]], shard: ShardRange) -> npt.NDArray[Any]:
    """Return the shard's slice of its group's vector, not copied."""
    return vectors[shard.group][shard.offset : shard.offset + shard.length]


def values_at(values: npt.NDArray[Any], extents: Extents) -> npt.NDArray[Any]:
    """Return the values in these ranges, end to end and on the host; without ranges, all values as they are."""
    if not extents:
        return values
    values = _on_host(values)
    return np.concatenate([values[start : start + length] for start, length in extents])


def _on_host(values: Any) -> Vector:
    return values if isinstance(values, np.ndarray) else values.on_host()


class Converter:
    """Converts float32 to payloads and back, by numpy. Threads may share it."""

    def encode(self, values: npt.NDArray[np.float32], codec: Codec) -> memoryview:
        return codec.encode(values)

    def decode(self, payload: memoryview, codec: Codec, place: npt.NDArray[np.float32]) -> None:
        codec.decode_into(payload, place)

    def encoded(self, values: npt.NDArray[Any], codec: Codec) -> memoryview:
        """Return contiguous values as a payload; values in the codec's type are not converted."""
        return values.view(np.uint8).data if values.dtype == codec.dtype else self.encode(values, codec)


NUMPY = Converter()


class Residual:
    """What encodings of one shard's gradients lost so far, and what the push under way loses. Two buffers, reused.

    An encoding off the host leaves them there. All but `encode` and `take` need `to_host`, or an encoding on the host.
    """

    __slots__ = ("epoch", "lock", "lost", "values", "version")

    def __init__(self, length: int) -> None:
        # float32, one number a parameter of the shard; a vector, or OffHost.
        self.values: Any = np.zeros(length, np.float32)
        # Of the push under way, in the order of its payload.
        self.lost: Any = np.empty(length, np.float32)
        # The shard's epoch and version after the newest push that changed the values; version -1 before.
        self.epoch, self.version = 0, -1
        # Held while an encoding writes `lost`.
        self.lock = Lock()

    def encode(self, values: Vector | OffHost, extents: Extents, codec: Codec) -> memoryview:
        """Return the payload of values in these ranges with what is owed to them, and write what it loses."""
        with self.lock:
            if not isinstance(values, np.ndarray):
                payload, self.lost = values.encode_feedback(self.values, codec)
                return payload
            self.to_host()
            return codec.encode_feedback(values, values_at(self.values, extents), self.lost[: values.size])

    def to_host(self) -> None:
        self.values, self.lost = _on_host(self.values), _on_host(self.lost)

    def rescale(self, lost: Vector, extents: Extents, scale: float, feedback: float) -> None:
        """Correct `lost`, b * e + g - D(q), where servers applied `scale` times q: to b * e + scale * (g - D(q)).

        The names are those of `Encoder`: the residual e and the `feedback` b were encoded as if for g.
        """
        lost *= np.float32(scale)
        lost += np.float32((1.0 - scale) * feedback) * values_at(self.values, extents)

    def take(self, extents: Extents) -> None:
        """Let what the push lost in these ranges be the residual."""
        if extents:
            self._write(self.values, extents, self.lost)
        else:
            self.values, self.lost = self.lost, self.values

    def after(self, lost: Vector, extents: Extents) -> Vector:
        """Return a copy of what `take` would make the residual if the push had lost `lost`."""
        values = np.copy(self.values)
        self._write(values, extents or ((0, values.size),), lost)
        return values

    def _write(self, values: Vector, extents: Extents, lost: Vector) -> None:
        for start, length in extents:
            values[start : start + length], lost = lost[:length], lost[length:]

    def is_old(self, *, epoch: int, version: int, age_max: int) -> bool:
        """Return whether the values are too old for a gradient that was computed at that version.

        They are if the newest push came more than `age_max` versions before, or, once a server was restored, after.
        """
        age = version - self.version
        return self.version >= 0 and (age > age_max or (epoch != self.epoch and -age > age_max))


class Encoder:
    """Encodes a worker's pushes, each shard once a push: a retry sends the same bytes.

    Under a stateful codec, what an encoding loses is added to the next gradient of the same shard (error feedback,
    Seide et al. 2014): a = b * e + g is encoded as q = C(a), with the gradient g, the residual e and b, the codec's
    `feedback`. The receipt decides what the next residual is, so that nothing is applied twice:

    * Applied or pending: a - D(q).
    * Dropped by the protocol, which did not need it: a.
    * Refused as too stale, not finite, repeated, of another epoch, or after the run's end: e stays and g is lost.
      But an e that no codec can send with a finite gradient goes, with a warning: each later push would be refused.
    * Unknown, as the server has forgotten the push or the worker has given it up: a - D(q), as it may be applied.

    A server without room refuses a push without a receipt; it is sent again, with the same bytes. Threads may encode
    different shards at the same time.
    """

    def __init__(self, codec: Codec, converter: Converter = NUMPY) -> None:
        self.codec = codec
        self.converter = converter
        # By shard id.
        self.residuals: dict[int, Residual] = {}
        self._push: object = None
        self._kinds: Sequence[int] | None = None
        # The shards of that push that have no receipt: the ranges, the payload, and how many numbers it holds.
        self._encoded: dict[int, tuple[Extents, memoryview, int]] = {}
        # The factor of that push; None while servers hold it and nothing is applied, as they do not know it yet.
        self.scale: float | None = 1.0

    def begin(self, push: object, kinds: Sequence[int] | None = None, *, held: bool = False) -> bool:
        """Let payloads be of this push from now on, with these kinds of groups; return False if they are already.

        `held`: servers apply nothing of it before they know its `scale`.
        """
        if push is self._push:
            return False
        if self.codec.stateful and self.scale is not None:
            for shard_id, (extents, _, count) in self._encoded.items():
                self._take(shard_id, extents, count, self.scale)
        self._push, self._kinds, self._encoded, self.scale = push, kinds, {}, None if held else 1.0
        return True

    def discard(self, push: object) -> None:
        """Forget a push of which nothing is applied: the residuals stay."""
        if push is self._push:
            self._encoded = {}

    def clear_old(self, moment_of: Callable[[int], tuple[int, int]], *, age_max: int) -> None:
        """Clear residuals that were left more than `age_max` updates ago.

        `moment_of` returns the epoch and version of a shard at which the push's gradient was computed; version -1 for
        unknown.
        """
        for shard_id, residual in self.residuals.items():
            epoch, version = moment_of(shard_id)
            if version >= 0 and residual.is_old(epoch=epoch, version=version, age_max=age_max):
                residual.to_host()
                residual.values.fill(0.0)
                residual.version = -1

    def payload(self, values: npt.NDArray[Any], shard: ShardRange, extents: Extents) -> memoryview:
        """Return the shard's payload in this push: its values in these ranges."""
        if self.codec.dtype is not None:
            # The same each time: to keep it would cost more memory than to encode it again costs time.
            return self.converter.encoded(values, self.codec)
        if self._kinds and codec_for(self.codec, self._kinds[shard.group]) is FLOAT32:
            return FLOAT32.encode(values)
        known = self._encoded.get(shard.shard_id)
        if known is not None and known[0] == extents:
            return known[1]
        if self.codec.stateful:
            residual = self.residuals.get(shard.shard_id)
            if residual is None:
                residual = self.residuals.setdefault(shard.shard_id, Residual(shard.length))
            payload = residual.encode(values, extents, self.codec)
        else:
            payload = self.converter.encode(values, self.codec)
        self._encoded[shard.shard_id] = extents, payload, values.size
        return payload

    def answered(self, receipt: Receipt) -> None:
        """Make the shard's next residual, after a receipt of this push. For stateful codecs."""
        encoded = self._encoded.pop(receipt.shard_id, None)
        rejected = receipt.outcome == OUTCOME_REJECTED
        if encoded is None:
            return
        if receipt.reason == REASON_NOT_FINITE:
            self._clear_overflown(receipt.shard_id)
        if self.scale is None:
            return
        if rejected and receipt.reason not in (REASON_DROPPED, REASON_FORGOTTEN):
            return
        extents, payload, count = encoded
        residual = self.residuals[receipt.shard_id]
        if receipt.reason == REASON_DROPPED:
            residual.to_host()
            self.codec.add_into(payload, residual.lost[:count])
        self._take(receipt.shard_id, extents, count, self.scale)
        residual.epoch, residual.version = receipt.epoch, receipt.min_version or receipt.version_after

    def _clear_overflown(self, shard_id: int) -> None:
        """Clear a residual that is not finite once encoded, whatever the gradient."""
        self.residuals[shard_id].to_host()
        values = self.residuals[shard_id].values
        zeros, lost = np.zeros_like(values), np.empty_like(values)
        with np.errstate(all="ignore"):
            payload = self.codec.encode_feedback(zeros, values, lost)
            if np.isfinite(self.codec.decode(payload, values.size)).all() and np.isfinite(lost).all():
                return
        values.fill(0.0)
        logger.warning(
            "what encodings by %s owe to shard %d is too large to be sent, after a gradient near the largest float32: "
            "it is left out, as each later push would be refused; clip gradients or look at the data",
            *(self.codec.name, shard_id),
        )

    def _take(self, shard_id: int, extents: Extents, count: int, scale: float) -> None:
        residual = self.residuals[shard_id]
        if scale != 1.0:
            residual.rescale(residual.lost[:count], extents, scale, self.codec.feedback)
        residual.take(extents)

    def state(self) -> dict[int, dict[str, Any]]:
        """Return copies of the residuals by shard, for `load`.

        They are as if a push under way were applied, or not, if servers hold it and do not know its scale.
        """
        return {
            shard_id: {"epoch": residual.epoch, "version": residual.version, "values": self._owed(shard_id, residual)}
            for shard_id, residual in self.residuals.items()
            if residual.version >= 0
        }

    def _owed(self, shard_id: int, residual: Residual) -> Vector:
        residual.to_host()
        known = self._encoded.get(shard_id)
        if known is None or self.scale is None:
            return np.copy(residual.values)
        extents, _, count = known
        lost = residual.lost[:count].copy()
        if self.scale != 1.0:
            residual.rescale(lost, extents, self.scale, self.codec.feedback)
        return residual.after(lost, extents)

    def load(self, state: Mapping[int, Mapping[str, Any]], partition: Partition) -> None:
        """Take residuals of an earlier `state` of the same run. Raises WrongSize for other shards' numbers."""
        if not self.codec.stateful:
            return
        for shard in partition.shards:
            if (saved := state.get(shard.shard_id)) is not None:
                residual = self.residuals[shard.shard_id] = Residual(shard.length)
                values = np.asarray(saved["values"], np.float32)
                if values.shape != (shard.length,):
                    raise WrongSize(
                        f"the saved residual of shard {shard.shard_id} has shape {values.shape}; the shard has "
                        f"{shard.length} parameters: load a state of this run"
                    )
                residual.values[:] = values
                residual.epoch, residual.version = int(saved["epoch"]), int(saved["version"])


def first_non_finite(values: npt.NDArray[Any], codec: Codec) -> int | None:
    """Return the flat index of the first NaN or infinity; None where all are finite."""
    flat = values.reshape(-1)
    if flat.dtype.kind != "f":
        flat = codec.decode(flat.view(np.uint8).data, flat.size)
    # A finite sum proves that all terms are finite, in one pass without memory. It may overflow; then check each term.
    with np.errstate(all="ignore"):
        if np.isfinite(np.sum(flat, dtype=np.float32 if flat.dtype == np.float16 else None)):
            return None
    suspects = np.flatnonzero(~np.isfinite(flat))
    return int(suspects[0]) if suspects.size else None


class FiniteGuard:
    """Counts skipped gradients. Mixed precision overflows at times; many in a row are an error."""

    def __init__(self) -> None:
        # In a row, and in total.
        self.skips = 0
        self.skips_total = 0

    def passed(self) -> None:
        self.skips = 0

    def skipped(self, name: str, index: tuple[int, ...], value: float) -> None:
        """Count a gradient that is not sent, and warn. Raises NotFinite after too many in a row."""
        self.skips += 1
        self.skips_total += 1
        where = f"{name}[{', '.join(map(str, index))}]" if index else name
        if self.skips >= SKIPS_MAX:
            raise NotFinite(
                f"The gradient of {where} is {value}; {self.skips} gradients in a row were not finite and none was "
                "sent. Lower the learning rate, clip gradients or look at the data."
            )
        logger.warning(
            "the gradient of %s is %s: this push is skipped (%d in a row, %d would end the worker)",
            *(where, value, self.skips, SKIPS_MAX),
        )
