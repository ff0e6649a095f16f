"""The flat vectors that a worker reads and writes, one a parameter group: their check, their slices, their encoding."""

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
# One a group, in the type in which they are sent.
Vectors = Sequence[npt.NDArray[Any]]
# Ranges of a shard, as start and length; an empty tuple for the whole shard.
Extents = tuple[tuple[int, int], ...]

# This number of gradients in a row with NaN or infinity ends a worker.
SKIPS_MAX = 10


def dtype_of(codec: Codec, *, converted: bool) -> np.dtype[Any]:
    """Return the type of vectors for a codec: its own, or float32 if they are converted or it has none."""
    return FLOAT32.dtype if converted or codec.dtype is None else codec.dtype


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
    """Return the values in these ranges, one range after the other; without a copy if they are all values."""
    if not extents:
        return values
    return np.concatenate([values[start : start + length] for start, length in extents])


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


class Encoder:
    """Encodes a worker's pushes, each shard once a push: a retry sends the same bytes.

    Under a stateful codec, what an encoding loses is added to the next gradient of the same shard (error feedback),
    unless the server refused the payload. Threads may encode different shards at the same time.
    """

    def __init__(self, codec: Codec, converter: Converter = NUMPY) -> None:
        self.codec = codec
        self.converter = converter
        self._push: object = None
        # Of that push, by shard: the ranges, the payload, and what the encoding lost.
        self._encoded: dict[int, tuple[Extents, memoryview, Vector]] = {}
        # By shard: what encodings lost, for the next gradient.
        self._residuals: dict[int, Vector] = {}

    def begin(self, push: object) -> None:
        if push is not self._push:
            self._push, self._encoded = push, {}

    def payload(self, values: npt.NDArray[Any], shard: ShardRange, extents: Extents) -> memoryview:
        """Return the shard's payload in this push: its values in these ranges."""
        if self.codec.dtype is not None:
            # The same each time: to keep it would cost more memory than to encode it again costs time.
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
