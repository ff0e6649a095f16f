"""Encodings of a payload's numbers: a codec is one object, which both ends look up here."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np

from pyps_wire import native
from pyps_wire.errors import InvalidArgument, WrongSize

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray
    from typing_extensions import Buffer


class Codec(int):
    """An encoding of numbers. As an integer it is its number in the contract."""

    name: str
    # The name with the setting, if it has one.
    text: str
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
    # Whether a worker's pulls follow a published copy (`pyps.core.published`): payloads are differences to add.
    published = False

    def __new__(cls, number: int, name: str, max_bytes: Callable[[int], int]) -> Self:
        """`number`: the value in the contract's enum Codec."""
        codec = super().__new__(cls, number)
        codec.name, codec.text, codec.max_bytes = name, name, max_bytes
        return codec

    def pushes(self) -> bool:
        """Return whether gradients go in it."""
        return self.stateful or not self.published

    def pulls(self) -> bool:
        """Return whether parameters go in it."""
        return self.published or not self.stateful

    def with_setting(self, text: str) -> Self:
        """Return the codec with another setting, "ratio=0.01": the encoder's alone. Raises InvalidArgument."""
        raise InvalidArgument(f"codec {self.name} has no settings, but {text!r} was given")

    def __repr__(self) -> str:
        return self.name

    def encode(self, values: NDArray[np.float32]) -> memoryview:
        """Return the bytes of contiguous values. NaN stays NaN: servers scan for it."""
        raise NotImplementedError

    def encode_feedback(
        self, values: NDArray[np.float32], residual: NDArray[np.float32], lost: NDArray[np.float32]
    ) -> memoryview:
        """Return the bytes of feedback * residual + values, and write to `lost` what they lack of it.

        Contiguous arrays of one size; `lost` overlaps neither of the others. Each operation rounds once.
        """
        np.multiply(residual, np.float32(self.feedback), out=lost)
        lost += values
        payload = self.encode(lost)
        with np.errstate(invalid="ignore"):
            lost -= self.decode(payload, lost.size)
        return payload

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

    def encode_difference(self, values: NDArray[np.float32], held: NDArray[np.float32]) -> memoryview:
        """Move `held` towards the values by a difference, and return its payload, which `add_into` adds elsewhere."""
        with np.errstate(all="ignore"):
            payload = self.encode(values - held)
            self.add_into(payload, held)
        return payload

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


class BlockCodec(Codec):
    """Blocks of numbers that share something, such as a scale. A block may hold numbers of two tensors.

    An encoding's error is added to the next gradient, which makes up for a scale that suits one of them only.
    """

    stateful = True
    published = True
    # The numbers of a block.
    block: int

    @property
    def _is_native(self) -> bool:
        """Whether the library serves: a codec of a newcomer's is numpy's alone, whatever class it extends."""
        return native.functions is not None and self in native.BLOCK_CODECS

    def encode(self, values: NDArray[np.float32]) -> memoryview:
        if not self._is_native:
            return self._encode(values)
        payload = np.empty(self.max_bytes(values.size), np.uint8)
        native.functions.encode(payload.ctypes.data, native.address(values, values.size), self, values.size)
        return payload.data

    def encode_feedback(
        self, values: NDArray[np.float32], residual: NDArray[np.float32], lost: NDArray[np.float32]
    ) -> memoryview:
        if not self._is_native:
            return super().encode_feedback(values, residual, lost)
        payload = np.empty(self.max_bytes(values.size), np.uint8)
        arrays = [native.address(each, values.size) for each in (values, residual, lost)]
        native.functions.encode_feedback(payload.ctypes.data, *arrays[:2], self.feedback, arrays[2], self, values.size)
        return payload.data

    def encode_difference(self, values: NDArray[np.float32], held: NDArray[np.float32]) -> memoryview:
        if not self._is_native:
            return super().encode_difference(values, held)
        payload = np.empty(self.max_bytes(values.size), np.uint8)
        arrays = [native.address(each, values.size) for each in (values, held)]
        native.functions.encode_difference(payload.ctypes.data, *arrays, self, values.size)
        return payload.data

    def decode_into(self, payload: Buffer, place: NDArray[np.float32]) -> None:
        self.require_count(payload, place.size)
        if not self._is_native:
            self._decode_into(payload, place)
        else:
            native.functions.decode(
                native.address(place, place.size), native.address_of_bytes(payload), self, place.size
            )

    def add_into(self, payload: Buffer, place: NDArray[np.float32]) -> None:
        if not self._is_native:
            super().add_into(payload, place)
            return
        self.require_count(payload, place.size)
        native.functions.add(native.address(place, place.size), native.address_of_bytes(payload), self, place.size)

    def _encode(self, values: NDArray[np.float32]) -> memoryview:
        raise NotImplementedError

    def _decode_into(self, payload: Buffer, place: NDArray[np.float32]) -> None:
        raise NotImplementedError

    def fits(self, num_bytes: int, count: int) -> bool:
        return num_bytes == self.max_bytes(count)

    def _blocks(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the values one block a row, the last filled up with zeros."""
        blocks = np.zeros((-(-values.size // self.block), self.block), np.float32)
        blocks.reshape(-1)[: values.size] = values
        return blocks


class _ScaledCodec(BlockCodec):
    """Blocks of 32 numbers: a byte with the exponent of their scale, as in a float32, and each number as a multiple.

    The scale is the least power of two of which no number is more than `limit` times as large. A block with NaN or
    infinity has an infinite scale.
    """

    block = 32
    limit: float

    def _scaled(self, values: NDArray[np.float32]) -> tuple[NDArray[np.uint32], NDArray[np.bool_], NDArray[np.float32]]:
        """Return the exponent of each block, whether its numbers are finite, and the numbers divided by the scale."""
        blocks = self._blocks(values)
        largest = np.abs(blocks).max(axis=1, initial=0.0) / np.float32(self.limit)
        finite = np.isfinite(largest)
        exponents = np.where(finite, (largest.view(np.uint32) + np.uint32(0x7FFFFF)) >> np.uint32(23), np.uint32(255))
        inverse = ((np.uint32(254) - np.where(finite, exponents, np.uint32(127))) << np.uint32(23)).view(np.float32)
        return exponents, finite, blocks * inverse[:, None]

    def _scales(self, exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
        return (exponents.astype(np.uint32) << np.uint32(23)).view(np.float32)


class Int8(_ScaledCodec):
    """Blocks of 32 numbers: a byte with the exponent of their scale, as in a float32, and a signed byte each.

    The scale is the least power of two that is at least a 127th of the largest magnitude. The number is scale * byte.
    """

    limit = 127.0

    def _encode(self, values: NDArray[np.float32]) -> memoryview:
        exponents, finite, scaled = self._scaled(values)
        payload = np.empty((len(scaled), 1 + self.block), np.uint8)
        payload[:, 0] = exponents
        numbers = np.where(finite[:, None], np.rint(scaled), np.float32(1.0))
        payload[:, 1:] = numbers.astype(np.int8).view(np.uint8)
        return payload.reshape(-1)[: self.max_bytes(values.size)].data

    def _decode_into(self, payload: Buffer, place: NDArray[np.float32]) -> None:
        whole = np.zeros(-(-place.size // self.block) * (1 + self.block), np.uint8)
        whole[: memoryview(payload).nbytes] = np.frombuffer(memoryview(payload), np.uint8)
        blocks = whole.reshape(-1, 1 + self.block)
        with np.errstate(invalid="ignore", over="ignore"):
            place[:] = (blocks[:, 1:].view(np.int8) * self._scales(blocks[:, :1])).reshape(-1)[: place.size]


class Int4(_ScaledCodec):
    """Blocks of 32 numbers: a byte with the exponent of their scale, as in a float32, and four bits each.

    The highest bit is the sign, the others choose 0, 0.5, 1, 1.5, 2, 3, 4 or 6 times the scale: floating point with two
    bits of exponent and one of mantissa (E2M1). The scale is the least power of two that is at least a 7th of the
    largest magnitude: 7 becomes 6, which is no further off than 5 may be. Byte j has number j in its lower half and
    number j + 16 in its upper half. The mean squared error is 0.5 to 0.6 of that of the whole multiples from -7 to 7,
    on gradients of a transformer as on normal numbers.
    """

    limit = 7.0
    MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
    # From each on, the next magnitude is nearer. A tie goes to the magnitude of an even index.
    BORDERS = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    BORDERS[::2] = np.nextafter(BORDERS[::2], np.float32(np.inf))

    def _encode(self, values: NDArray[np.float32]) -> memoryview:
        exponents, finite, scaled = self._scaled(values)
        codes = np.searchsorted(self.BORDERS, np.abs(scaled), side="right").astype(np.uint8)
        codes = np.where(finite[:, None], codes | np.signbit(scaled).view(np.uint8) << 3, np.uint8(1))
        payload = np.empty((len(scaled), 1 + self.block // 2), np.uint8)
        payload[:, 0] = exponents
        payload[:, 1:] = codes[:, :16] | codes[:, 16:] << 4
        return payload.reshape(-1).data

    def _decode_into(self, payload: Buffer, place: NDArray[np.float32]) -> None:
        blocks = np.frombuffer(memoryview(payload), np.uint8).reshape(-1, 1 + self.block // 2)
        codes = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)
        # -0 is written as 8, and read as 0.
        numbers = np.concatenate([self.MAGNITUDES, 0 - self.MAGNITUDES])[codes]
        with np.errstate(invalid="ignore", over="ignore"):
            place[:] = (numbers * self._scales(blocks[:, :1])).reshape(-1)[: place.size]


class OneBit(BlockCodec):
    """Blocks of 1,024 numbers: the mean of those >= 0 and the mean of those < 0 as bfloat16, and a bit each (Seide et
    al. 2014).

    Bit k of the 32-bit word j is 1 where number 32 * k + j is < 0. Sums are float32, number i in lane i modulo 32; the
    lanes are added in order in float64: one value wherever it is computed.
    """

    # Means lose too much of it for a copy that follows steady moves: each difference would be larger than the last.
    published = False
    block = 1024

    def _encode(self, values: NDArray[np.float32]) -> memoryview:
        blocks = self._blocks(values)
        negative = blocks < 0
        counts = np.full(len(blocks), self.block)
        counts[-1:] -= blocks.size - values.size
        num_negative = negative.sum(axis=1)
        payload = np.empty((len(blocks), 2 + self.block // 16), np.uint16)
        for side, num in enumerate((counts - num_negative, num_negative)):
            sums = _lane_sums(np.where(negative == side, blocks, np.float32(0.0)))
            payload[:, side] = _levels(sums / np.maximum(num, 1))
        bits = negative.reshape(-1, 32, 32).astype(np.uint32) << np.arange(32, dtype=np.uint32)[:, None]
        payload[:, 2:] = np.bitwise_or.reduce(bits, axis=1).view(np.uint16)
        return payload.reshape(-1).view(np.uint8).data

    def _decode_into(self, payload: Buffer, place: NDArray[np.float32]) -> None:
        blocks = np.frombuffer(memoryview(payload), np.uint8).reshape(-1, 4 + self.block // 8)
        levels = BFLOAT16.decode(blocks[:, :4].tobytes(), 2 * len(blocks)).reshape(-1, 2)
        words = np.frombuffer(blocks[:, 4:].tobytes(), "<u4").reshape(-1, 1, 32)
        negative = (words >> np.arange(32, dtype=np.uint32)[:, None] & np.uint32(1)).reshape(-1, self.block)
        place[:] = np.where(negative, levels[:, 1:], levels[:, :1]).reshape(-1)[: place.size]


class Delta(Codec):
    """The numbers that differ from those held, as they are: for models of which an update changes a small part.

    A bit for each block of 64 numbers, the first the lowest of its byte: whether any number differs. Then 64 bits for
    each such block, and the numbers, as float32. Of a gradient, the numbers that differ from 0.
    """

    published = True
    block = 64

    def encode(self, values: NDArray[np.float32]) -> memoryview:
        return self.encode_difference(values, np.zeros_like(values))

    def encode_difference(self, values: NDArray[np.float32], held: NDArray[np.float32]) -> memoryview:
        differs = np.zeros(-(-values.size // self.block) * self.block, np.bool_)
        np.not_equal(values.view(np.uint32), held.view(np.uint32), out=differs[: values.size])
        blocks = differs.reshape(-1, self.block)
        is_changed = blocks.any(axis=1)
        bits = [np.packbits(each, bitorder="little") for each in (is_changed, blocks[is_changed])]
        # Places found first: a mask as an index takes six times as long where many numbers differ.
        changed = values.take(np.flatnonzero(differs[: values.size]))
        payload = np.concatenate([*bits, changed.view(np.uint8)])
        np.copyto(held, values)
        return payload.data

    def decode_into(self, payload: Buffer, place: NDArray[np.float32]) -> None:
        place.fill(0.0)
        self.add_into(payload, place)

    def add_into(self, payload: Buffer, place: NDArray[np.float32]) -> None:
        """Write the numbers of the payload over those of a contiguous array."""
        self.require_count(payload, place.size)
        read = np.frombuffer(memoryview(payload), np.uint8)
        begin = -(-place.size // (8 * self.block))
        is_changed = np.unpackbits(read[:begin], bitorder="little").view(np.bool_)
        end = begin + np.count_nonzero(is_changed) * self.block // 8
        differs = np.zeros((is_changed.size, self.block), np.uint8)
        bits, numbers = np.unpackbits(read[begin:end], bitorder="little"), read[end:]
        if read.size < end or numbers.size != 4 * np.count_nonzero(bits):
            raise InvalidArgument(f"{read.size} bytes are not {self.name}: its bits tell of another number of numbers")
        differs[is_changed] = bits.reshape(-1, self.block)
        flat = differs.reshape(-1).view(np.bool_)
        if flat[place.size :].any():
            raise InvalidArgument(f"{self.name} has a number beyond the {place.size} that there are")
        place[np.flatnonzero(flat)] = np.frombuffer(numbers.data, np.float32)


class SparseCodec(Codec):
    """Some numbers of each chunk of 4,096; the others decode to 0 and stay in the worker's residual.

    A chunk is the number of its entries as 16 bits, its levels if it has any, the entries, and the values. An entry is
    a byte: a number of places to pass over before the next value, or 255, to pass over 255 places without a value. What
    is written says by itself how to read it: settings are the encoder's alone.
    """

    stateful = sparse = True
    chunk = 4096
    # The name of the codec's setting, its value, and the largest.
    setting: str
    value: float
    value_max: float
    # How many bfloat16 a chunk has before its entries.
    num_levels: int
    # The bits of a value.
    bits: int

    def __new__(cls, number: int, name: str, value: float) -> Self:
        codec = super().__new__(cls, number, name, cls._max_bytes)
        codec.value = value
        codec.text = f"{name}:{cls.setting}={value:g}"
        return codec

    @classmethod
    def _max_bytes(cls, count: int) -> int:
        """Each number, an entry for each 255 places, and the bytes at the head and the end of a chunk."""
        return count + -(-count * cls.bits // 8) + -(-count // cls.chunk) * (2 + 2 * cls.num_levels + 17)

    def with_setting(self, text: str) -> Self:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name != self.setting or not 0 < number <= self.value_max:
            raise InvalidArgument(
                f"the setting of {self.name} is {text!r}; expected {self.setting}= and a number above 0, at most "
                f"{self.value_max:g}, as in {self.text!r}"
            )
        return type(self)(int(self), self.name, number)

    @property
    def _is_native(self) -> bool:
        """Whether the library serves: a codec of a newcomer's is numpy's alone, whatever class it extends."""
        return native.functions is not None and self in native.SPARSE_CODECS

    def encode(self, values: NDArray[np.float32]) -> memoryview:
        if self._is_native:
            return self._encode_native(values, None, None)
        chunks = [self._encode(values[start : start + self.chunk]) for start in range(0, values.size, self.chunk)]
        return memoryview(b"".join(chunks))

    def encode_feedback(
        self, values: NDArray[np.float32], residual: NDArray[np.float32], lost: NDArray[np.float32]
    ) -> memoryview:
        if not self._is_native:
            return super().encode_feedback(values, residual, lost)
        return self._encode_native(values, *(native.address(each, values.size) for each in (residual, lost)))

    def _encode_native(self, values: NDArray[np.float32], residual: int | None, lost: int | None) -> memoryview:
        """Encode by the library; the last two are addresses."""
        room = np.empty(self.max_bytes(values.size), np.uint8)
        arguments = native.address(values, values.size), residual, self.feedback, lost, self, self.value, values.size
        num_bytes = native.functions.encode_sparse(room.ctypes.data, *arguments)
        return room[:num_bytes].copy().data

    def _encode(self, chunk: NDArray[np.float32]) -> bytes:
        places = self._places(chunk)
        levels, numbers = self._written(chunk, places)
        gaps = np.diff(places, prepend=-1) - 1
        ends = np.cumsum(gaps // 255 + 1)
        entries = np.full(ends[-1] if ends.size else 0, 255, np.uint8)
        entries[ends - 1] = gaps % 255
        return b"".join([np.uint16(entries.size).tobytes(), levels.tobytes(), entries.tobytes(), numbers.tobytes()])

    def decode_into(self, payload: Buffer, place: NDArray[np.float32]) -> None:
        self.require_count(payload, place.size)
        if self._is_native:
            payload = memoryview(payload)
            arguments = (
                native.address(place, place.size),
                native.address_of_bytes(payload),
                payload.nbytes,
                self,
                place.size,
            )
            if native.functions.decode_sparse(*arguments):
                return
        # Of a malformed payload it says what is wrong.
        place.fill(0.0)
        rest = np.frombuffer(memoryview(payload), np.uint8)
        for start in range(0, place.size, self.chunk):
            rest = self._decode_into(rest, place[start : start + self.chunk])
        if rest.size:
            raise InvalidArgument(f"{rest.size} bytes follow the last chunk of a payload in {self.name}")

    def _decode_into(self, rest: NDArray[np.uint8], place: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Write a chunk's values; return what follows it."""
        num_entries = int(rest[0]) + 256 * int(rest[1]) if rest.size > 1 else 0
        head = 2 + 2 * self.num_levels
        entries = rest[head : head + num_entries].astype(np.intp)
        is_value = entries < 255
        places = (np.cumsum(entries + is_value) - 1)[is_value]
        end = head + num_entries + -(-places.size * self.bits // 8)
        if rest.size < max(head, end) or (places.size and places[-1] >= place.size):
            raise InvalidArgument(
                f"a payload in {self.name} ends within a chunk, or goes beyond the numbers of its chunk"
            )
        levels = BFLOAT16.decode(rest[2:head].tobytes(), self.num_levels)
        place[places] = self._read(levels, rest[head + num_entries : end], places.size)
        return rest[end:]

    def _places(self, chunk: NDArray[np.float32]) -> NDArray[np.intp]:
        """Return the places of the numbers that are sent: the largest magnitudes, of equal ones the first."""
        num = max(1, round(chunk.size * self.value))
        magnitudes = chunk.view(np.uint32) & np.uint32(0x7FFFFFFF)
        least = np.partition(magnitudes, chunk.size - num)[chunk.size - num]
        larger = np.flatnonzero(magnitudes > least)
        equal = np.flatnonzero(magnitudes == least)[: num - larger.size]
        return np.sort(np.concatenate([larger, equal]))

    def _written(self, chunk: NDArray[np.float32], places: NDArray[np.intp]) -> tuple[NDArray[np.uint16], NDArray[Any]]:
        """Return the chunk's levels and its values, as they are written."""
        raise NotImplementedError

    def _read(self, levels: NDArray[np.float32], values: NDArray[np.uint8], count: int) -> NDArray[np.float32]:
        raise NotImplementedError


class TopK(SparseCodec):
    """The share `ratio` of each chunk that is largest in magnitude, as bfloat16."""

    setting, value_max = "ratio", 1.0
    feedback = 0.95
    num_levels, bits = 0, 16

    def _written(self, chunk: NDArray[np.float32], places: NDArray[np.intp]) -> tuple[NDArray[np.uint16], NDArray[Any]]:
        return np.empty(0, np.uint16), np.frombuffer(BFLOAT16.encode(chunk[places]), np.uint8)

    def _read(self, levels: NDArray[np.float32], values: NDArray[np.uint8], count: int) -> NDArray[np.float32]:
        return BFLOAT16.decode(values.tobytes(), count)


class TopK2Bit(SparseCodec):
    """The share `ratio` of each chunk that is largest in magnitude, in two bits a number.

    The lower bit chooses one of two levels, the mean magnitude of the kept numbers that are at most their mean, and of
    those above it; the upper bit is the sign. Sums are float64, in order.
    """

    setting, value_max = "ratio", 1.0
    feedback = 0.95
    num_levels, bits = 2, 2
    # Of the four values of a byte.
    _SHIFTS = np.array([0, 2, 4, 6], np.uint8)

    def _written(self, chunk: NDArray[np.float32], places: NDArray[np.intp]) -> tuple[NDArray[np.uint16], NDArray[Any]]:
        kept = chunk[places]
        magnitudes = np.abs(kept).astype(np.float64)
        upper = magnitudes > _mean(magnitudes)
        levels = np.array([_mean(magnitudes[~upper]), _mean(magnitudes[upper])], np.float32)
        codes = np.zeros(-(-kept.size // 4) * 4, np.uint8)
        codes[: kept.size] = upper | np.signbit(kept) << 1
        return _levels(levels), np.bitwise_or.reduce(codes.reshape(-1, 4) << self._SHIFTS, axis=1)

    def _read(self, levels: NDArray[np.float32], values: NDArray[np.uint8], count: int) -> NDArray[np.float32]:
        codes = (values[:, None] >> self._SHIFTS & 3).reshape(-1)[:count]
        numbers: NDArray[np.float32] = np.concatenate([levels, -levels])[codes]
        return numbers


class Threshold(SparseCodec):
    """A sign for each number of at least `tau` times its chunk's mean magnitude, which it decodes to (Strom 2015).

    Sums are those of `onebit`.
    """

    setting, value_max = "tau", 1000.0
    num_levels, bits = 1, 1

    def _places(self, chunk: NDArray[np.float32]) -> NDArray[np.intp]:
        magnitudes = np.abs(chunk)
        level = self._level_of(magnitudes)
        # A level that is NaN takes all: servers have to see it.
        return np.flatnonzero(~(magnitudes < level) & (level != 0))

    def _level_of(self, magnitudes: NDArray[np.float32]) -> np.float32:
        padded = np.zeros((1, self.chunk), np.float32)
        padded[0, : magnitudes.size] = magnitudes
        level = np.float32(self.value * (_lane_sums(padded)[0] / magnitudes.size))
        return np.float32(BFLOAT16.decode(_levels(np.array([level])).tobytes(), 1)[0])

    def _written(self, chunk: NDArray[np.float32], places: NDArray[np.intp]) -> tuple[NDArray[np.uint16], NDArray[Any]]:
        level = self._level_of(np.abs(chunk))
        return _levels(np.array([level])), np.packbits(np.signbit(chunk[places]), bitorder="little")

    def _read(self, levels: NDArray[np.float32], values: NDArray[np.uint8], count: int) -> NDArray[np.float32]:
        return np.where(np.unpackbits(values, count=count, bitorder="little"), -levels, levels)


def _lane_sums(blocks: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the sum of each row: float32, number i in lane i modulo 32; the lanes are added in order in float64."""
    lanes, sums = np.zeros((len(blocks), 32), np.float32), np.zeros(len(blocks))
    with np.errstate(invalid="ignore", over="ignore"):
        for numbers in np.moveaxis(blocks.reshape(len(blocks), blocks.shape[1] // 32, 32), 1, 0):
            lanes += numbers
        for lane in lanes.T:
            sums += lane
    return sums


def _mean(numbers: NDArray[np.float64]) -> np.float64:
    """Return the mean, summed in order; 0 of none."""
    return np.cumsum(numbers)[-1] / numbers.size if numbers.size else np.float64(0.0)


def _levels(numbers: NDArray[Any]) -> NDArray[np.uint16]:
    """Return the bits of numbers as bfloat16. Processors differ in the sign of NaN."""
    with np.errstate(over="ignore"):
        levels = numbers.astype(np.float32)
    levels[np.isnan(levels)] = np.nan
    return np.frombuffer(BFLOAT16.encode(levels), np.uint16)


FLOAT32 = WordCodec(1, "float32", "<f4")
FLOAT16 = WordCodec(2, "float16", "<f2")
BFLOAT16 = _Bfloat16(3, "bfloat16", "<u2")
INT8 = Int8(4, "int8", lambda count: count + -(-count // 32))
INT4 = Int4(5, "int4", lambda count: 17 * -(-count // 32))
ONEBIT = OneBit(6, "onebit", lambda count: 132 * -(-count // 1024))
THRESHOLD = Threshold(7, "threshold", 3.0)
TOPK = TopK(8, "topk", 0.01)
TOPK2BIT = TopK2Bit(9, "topk2bit", 1 / 64)
DELTA = Delta(10, "delta", lambda count: 4 * count + -(-count // 512) + 8 * -(-count // 64))

# All codecs, by number.
CODECS: dict[int, Codec] = {
    codec: codec for codec in (FLOAT32, FLOAT16, BFLOAT16, INT8, INT4, ONEBIT, THRESHOLD, TOPK, TOPK2BIT, DELTA)
}


def _all(codec: Codec) -> bool:
    return True


def codec_of(text: str, taken: Callable[[Codec], bool] = _all, *, what: str = "codec") -> Codec:
    """Return the codec of a name, or of a name with a setting: "topk:ratio=0.01". Raises InvalidArgument."""
    name, _, setting = text.partition(":")
    known = {codec.name: codec for codec in CODECS.values() if taken(codec)}
    if name not in known:
        raise InvalidArgument(f"{what} is {name!r}; expected one of {', '.join(known)}")
    return known[name].with_setting(setting) if setting else known[name]


def codec_numbered(number: int, taken: Callable[[Codec], bool] = _all, *, what: str = "codec") -> Codec:
    """Return the codec of a message's number. Raises InvalidArgument."""
    codec = CODECS.get(number)
    if codec is None or not taken(codec):
        known = ", ".join(f"{codec.name} ({int(codec)})" for codec in CODECS.values() if taken(codec))
        raise InvalidArgument(f"{what} is {number if codec is None else codec.name}; expected {known}")
    return codec
