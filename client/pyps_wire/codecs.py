"""Encodings of a payload's numbers: a codec is one object, which both ends look up here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np

from pyps_wire.errors import InvalidArgument, WrongSize

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray
    from typing_extensions import Buffer


class Codec(int):
    """An encoding of numbers. As an integer it is its number in the contract."""

    name: str
    # Returns the most bytes that so many numbers take. No method, since it is called for every message.
    max_bytes: Callable[[int], int]
    # numpy's type, if each number is written alone, as a word of fixed size: only such a payload may be split at any
    # number, or be in shared memory. None if numbers share bytes, such as a scale.
    dtype: np.dtype[Any] | None = None
    # Whether the worker (`pyps_client.vectors.Encoder`) adds an encoding's error to the shard's next gradient.
    stateful = False
    # The share of that error which is added.
    feedback = 1.0
    # Whether a payload holds some of the numbers only; the others decode to 0.
    sparse = False

    def __new__(cls, number: int, name: str, max_bytes: Callable[[int], int]) -> Self:
        """`number`: the value in the contract's enum Codec."""
        codec = super().__new__(cls, number)
        codec.name, codec.max_bytes = name, max_bytes
        return codec

    def __repr__(self) -> str:
        return self.name

    def encode(self, values: NDArray[np.float32]) -> memoryview:
        """Return the bytes of contiguous values. NaN stays NaN: servers scan for it."""
        raise NotImplementedError

    def decode_into(self, payload: Buffer, place: NDArray[np.float32]) -> None:
        """Write the numbers of the payload into a contiguous array. Raises InvalidArgument for a malformed payload."""
        raise NotImplementedError

    def decode(self, payload: Buffer, count: int) -> NDArray[np.float32]:
        """Return the numbers of the payload as float32; do not write to them."""
        place = np.empty(count, np.float32)
        self.decode_into(payload, place)
        return place

    def add_into(self, payload: Buffer, place: NDArray[np.float32]) -> None:
        """Add the numbers of the payload to a contiguous array, each rounded once."""
        place += self.decode(payload, place.size)

    def require_divisible(self) -> None:
        """Raise InvalidArgument where a payload cannot be split at any number."""
        if self.dtype is None:
            raise InvalidArgument(
                f"{self.name} does not write each number by itself, so it can neither be split nor lie in shared "
                "memory: send it by gRPC or a lane"
            )

    def fits(self, num_bytes: int, count: int) -> bool:
        """Return whether a payload of so many bytes may hold so many numbers."""
        return num_bytes == self.max_bytes(count) or (self.dtype is None and num_bytes < self.max_bytes(count))

    def require_count(self, payload: Buffer, count: int) -> None:
        """Raise WrongSize where the payload's size rules out so many numbers."""
        size = memoryview(payload).nbytes
        if not self.fits(size, count):
            expected = f"{'' if self.dtype else 'at most '}{self.max_bytes(count)} bytes"
            raise WrongSize(f"the payload is {size} bytes long; {count} parameters as {self.name} are {expected}")


class WordCodec(Codec):
    """Each number alone, in a type of numpy's, little-endian, without padding."""

    dtype: np.dtype[Any]

    def __new__(cls, number: int, name: str, dtype: str) -> Self:
        words = np.dtype(dtype)
        codec = super().__new__(cls, number, name, partial(mul, words.itemsize))
        codec.dtype = words
        return codec

    def encode(self, values: NDArray[np.float32]) -> memoryview:
        """Round to nearest, ties to even. Under float32 the bytes are the array's own, not a copy."""
        if values.dtype != np.float32 or not values.flags.c_contiguous:
            raise InvalidArgument(f"encode takes a contiguous float32 array, not {values.dtype} {values.strides}")
        return self._words(values).reshape(-1).view(np.uint8).data

    def decode_into(self, payload: Buffer, place: NDArray[np.float32]) -> None:
        self.require_count(payload, place.size)
        np.copyto(place, np.frombuffer(memoryview(payload), self.dtype))

    def decode(self, payload: Buffer, count: int) -> NDArray[np.float32]:
        """Return the numbers as float32; under float32 a view of the payload, at any alignment."""
        if self.dtype != np.float32:
            return super().decode(payload, count)
        self.require_count(payload, count)
        values: NDArray[np.float32] = np.frombuffer(memoryview(payload), np.float32)
        values.flags.writeable = False
        return values

    def _words(self, values: NDArray[np.float32]) -> NDArray[Any]:
        with np.errstate(over="ignore"):  # Numbers beyond float16's range become infinity.
            return values.astype(self.dtype, copy=False)


class _Bfloat16(WordCodec):
    """The upper half of a float32. numpy knows no such type: its bits travel as unsigned integers."""

    def decode_into(self, payload: Buffer, place: NDArray[np.float32]) -> None:
        self.require_count(payload, place.size)
        np.left_shift(np.frombuffer(memoryview(payload), self.dtype), 16, out=place.view(np.uint32), dtype=np.uint32)

    def _words(self, values: NDArray[np.float32]) -> NDArray[Any]:
        bits = values.view(np.uint32)
        # Half of the last place kept, less one when that place is even, carries exactly when rounding up is due.
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
        not_a_number = np.isnan(values)
        if not_a_number.any():
            # Without its low bits a NaN may be an infinity: set the quiet bit.
            rounded = np.where(not_a_number, (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
        return rounded.astype(np.uint16)


class Int8(Codec):
    """Blocks of 32 numbers: a byte with the exponent of their scale, as in a float32, and a signed byte each.

    The scale is the least power of two that is at least a 127th of the largest magnitude. The number is scale * byte.
    """

    stateful = True
    block = 32

    def encode(self, values: NDArray[np.float32]) -> memoryview:
        blocks = np.zeros(-(-values.size // self.block) * self.block, np.float32)
        blocks[: values.size] = values
        blocks = blocks.reshape(-1, self.block)
        largest = np.abs(blocks).max(axis=1, initial=0.0) / np.float32(127.0)
        finite = np.isfinite(largest)
        exponents = np.where(finite, (largest.view(np.uint32) + np.uint32(0x7FFFFF)) >> np.uint32(23), np.uint32(255))
        payload = np.empty((len(blocks), 1 + self.block), np.uint8)
        payload[:, 0] = exponents
        # A block with NaN or infinity has an infinite scale.
        inverse = ((np.uint32(254) - np.where(finite, exponents, np.uint32(127))) << np.uint32(23)).view(np.float32)
        with np.errstate(invalid="ignore"):
            numbers = np.rint(blocks * inverse[:, None])
        payload[:, 1:] = np.where(finite[:, None], numbers, np.float32(1.0)).astype(np.int8).view(np.uint8)
        return payload.reshape(-1)[: self.max_bytes(values.size)].data

    def decode_into(self, payload: Buffer, place: NDArray[np.float32]) -> None:
        self.require_count(payload, place.size)
        whole = np.zeros(-(-place.size // self.block) * (1 + self.block), np.uint8)
        whole[: memoryview(payload).nbytes] = np.frombuffer(memoryview(payload), np.uint8)
        blocks = whole.reshape(-1, 1 + self.block)
        scales = (blocks[:, :1].astype(np.uint32) << np.uint32(23)).view(np.float32)
        with np.errstate(invalid="ignore"):
            place[:] = (blocks[:, 1:].view(np.int8) * scales).reshape(-1)[: place.size]

    def fits(self, num_bytes: int, count: int) -> bool:
        return num_bytes == self.max_bytes(count)


FLOAT32 = WordCodec(1, "float32", "<f4")
FLOAT16 = WordCodec(2, "float16", "<f2")
BFLOAT16 = _Bfloat16(3, "bfloat16", "<u2")
INT8 = Int8(4, "int8", lambda count: count + -(-count // Int8.block))

# All codecs, by number.
CODECS: dict[int, Codec] = {codec: codec for codec in (FLOAT32, FLOAT16, BFLOAT16, INT8)}


def codec_names() -> list[str]:
    return [codec.name for codec in CODECS.values()]


def codec_of(name: str) -> Codec:
    for codec in CODECS.values():
        if codec.name == name:
            return codec
    raise InvalidArgument(f"there is no codec {name!r}; choose one of {', '.join(codec_names())}")


def codec_numbered(number: int) -> Codec:
    """Return the codec of a message's number. Raises InvalidArgument."""
    if number not in CODECS:
        known = ", ".join(f"{codec.name} ({int(codec)})" for codec in CODECS.values())
        raise InvalidArgument(f"codec is {number}; expected {known}")
    return CODECS[number]
