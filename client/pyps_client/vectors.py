"""The flat vectors that a worker reads and writes, one per parameter group: checked, cut, and made what travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client.log import logger
from pyps_wire.codecs import FLOAT32, Codec
from pyps_wire.errors import NotFinite, WrongSize
from pyps_wire.partition import Model, ShardRange

Vector = npt.NDArray[np.float32]
# One a group, in whatever type they travel.
Vectors = Sequence[npt.NDArray[Any]]
# Ranges of a shard, each from where and how long; an empty tuple for all of it.
Extents = tuple[tuple[int, int], ...]

# So many gradients in a row with NaN or infinity end a worker that makes nothing else.
SKIPS_MAX = 10


def dtype_of(codec: Codec, *, converted: bool) -> np.dtype[Any]:
    """Return the type of vectors in this codec: float32 where they are converted, or where it has no words."""
    return FLOAT32.dtype if converted or codec.dtype is None else codec.dtype


def check_vectors(
    vectors: Sequence[npt.NDArray[Any]], model: Model, dtype: np.dtype[Any], *, what: str, writable: bool = False
) -> None:
    """Raise WrongSize for vectors that do not fit the model's groups; nothing is converted silently."""
    if len(vectors) != model.num_groups:
        raise WrongSize(
            f"{what}: {len(vectors)} vectors were given for {model.num_groups} parameter groups; give one each."
        )
    for group, (vector, size) in enumerate(zip(vectors, model.group_sizes, strict=True)):
        if vector.shape != (size,) or vector.dtype != dtype:
            raise WrongSize(
                f"{what}: the vector of group {group} is {vector.dtype}{list(vector.shape)}; expected {dtype}[{size}]."
            )
        if not vector.flags.c_contiguous or (writable and not vector.flags.writeable):
            raise WrongSize(
                f"{what}: the vector of group {group} must be contiguous{' and writable' if writable else ''}."
            )


def part_of(vectors: Sequence[npt.NDArray[Any]], shard: ShardRange) -> npt.NDArray[Any]:
    """Return the shard's slice of its group's vector, not copied."""
    return vectors[shard.group][shard.offset : shard.offset + shard.length]


def values_at(values: npt.NDArray[Any], extents: Extents) -> npt.NDArray[Any]:
    """Return the values in these ranges, end to end; not copied where they are all."""
    if not extents:
        return values
    return np.concatenate([values[start : start + length] for start, length in extents])


class Converter:
    """Converts float32 to payloads and back, by numpy. Several threads may call it at once."""

    def encode(self, values: npt.NDArray[np.float32], codec: Codec) -> memoryview:
        return codec.encode(values)

    def decode(self, payload: memoryview, codec: Codec, place: npt.NDArray[np.float32]) -> None:
        codec.decode_into(payload, place)

    def encoded(self, values: npt.NDArray[Any], codec: Codec) -> memoryview:
        """Return contiguous values as a payload: float32 is converted, words of the codec stay as they are."""
        return values.view(np.uint8).data if values.dtype == codec.dtype else self.encode(values, codec)


NUMPY = Converter()


class Encoder:
    """Encodes a worker's pushes, each shard once a push: a retry sends the same bytes.

    Under a stateful codec what an encoding loses is added to the next gradient of the same shard (error feedback). It
    counts once a server has taken the payload: a refused push leaves no trace here, as it leaves none there.

    Threads may encode different shards at once.
    """

    def __init__(self, codec: Codec, converter: Converter = NUMPY) -> None:
        self.codec = codec
        self.converter = converter
        self._push: object = None
        # Of that push, by shard: its ranges, the payload, and the values that it lost.
        self._encoded: dict[int, tuple[Extents, memoryview, Vector]] = {}
        # By shard, what was lost so far.
        self._residuals: dict[int, Vector] = {}

    def begin(self, push: object) -> None:
        if push is not self._push:
            self._push, self._encoded = push, {}

    def payload(self, values: npt.NDArray[Any], shard: ShardRange, extents: Extents) -> memoryview:
        """Return the shard's payload of the push under way: its values in these ranges, () for all of them."""
        if self.codec.dtype is not None:
            # Words are the same each time, and cost more memory than time.
            return self.converter.encoded(values, self.codec)
        known = self._encoded.get(shard.shard_id)
        if known is not None and known[0] == extents:
            return known[1]
        residual = self._residuals.get(shard.shard_id)
        if residual is not None:
            values = values + values_at(residual, extents)
        payload = self.converter.encode(values, self.codec)
        lost = values - self.codec.decode(payload, values.size) if self.codec.stateful else values[:0]
        self._encoded[shard.shard_id] = extents, payload, lost
        return payload

    def taken(self, shard: ShardRange) -> None:
        extents, _, lost = self._encoded.get(shard.shard_id) or ((), b"", None)
        if lost is None or not self.codec.stateful:
            return
        if not extents:
            self._residuals[shard.shard_id] = lost
            return
        residual = self._residuals.setdefault(shard.shard_id, np.zeros(shard.length, np.float32))
        for start, length in extents:
            residual[start : start + length], lost = lost[:length], lost[length:]


def first_non_finite(values: npt.NDArray[Any], codec: Codec) -> int | None:
    """Return the flat index of the first NaN or infinity; None where all are finite."""
    flat = values.reshape(-1)
    if flat.dtype.kind != "f":
        flat = codec.decode(flat.view(np.uint8).data, flat.size)
    # A finite sum proves finite terms, in one pass without memory. The sum of finite terms may overflow: then
    # look closer.
    with np.errstate(all="ignore"):
        if np.isfinite(np.sum(flat, dtype=np.float32 if flat.dtype == np.float16 else None)):
            return None
    suspects = np.flatnonzero(~np.isfinite(flat))
    return int(suspects[0]) if suspects.size else None


class FiniteGuard:
    """Counts skipped gradients. Mixed precision overflows now and then; many in a row are a fault."""

    def __init__(self) -> None:
        # In a row, and in all.
        self.skips = 0
        self.skips_total = 0

    def passed(self) -> None:
        self.skips = 0

    def skipped(self, name: str, index: tuple[int, ...], value: float) -> None:
        """Note a gradient that is not sent, with a warning. Raises NotFinite after too many in a row."""
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
