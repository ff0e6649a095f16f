"""Messages with one large payload, written and read around it.

A frame is a message whose payload field comes last: the header's bytes, the payload field's tag and length,
the payload. That is a valid protobuf encoding, so that the generated classes read it and are read by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyps_wire.errors import BadRequest, MalformedFrame

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from typing_extensions import Buffer

# The payload's field number in every message that carries one.
PAYLOAD_FIELD = 100

_VARINT, _FIXED64, _BYTES, _GROUP_START, _GROUP_END, _FIXED32 = range(6)
_PAYLOAD_TAG_NUMBER = PAYLOAD_FIELD << 3 | _BYTES
_TAG_BYTES_MAX = 5
_VARINT_BYTES_MAX = 10
_GROUP_DEPTH_MAX = 100  # protobuf's own limit


def join(header: Message | bytes, payload: Buffer) -> bytes:
    """Returns the message with `header`'s fields and this payload, which is copied once.

    The header holds no payload itself; as bytes it is a serialized message.
    """
    if not isinstance(header, bytes):
        header = header.SerializeToString()
    view = memoryview(payload)
    if not view.c_contiguous:
        raise BadRequest("a payload must be contiguous in memory; copy it first (numpy.ascontiguousarray)")
    # The length's varint, made here: this is on the path of every push.
    left, length = view.nbytes, bytearray()
    while left >= 0x80:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    length.append(left)
    return b"".join((header, _PAYLOAD_TAG, length, view))


def split(message: bytes) -> tuple[bytes, memoryview]:
    """Returns the message without its payload, for the generated class to parse, and the payload in place.

    Every valid encoding is read: any order of fields, unknown fields, groups, overlong lengths. Of several
    payloads the last counts, as protobuf rules. Of none the payload is empty.
    """
    reader = _Reader(message)
    view = memoryview(message)
    header: list[memoryview] = []
    header_start = 0
    payload = view[:0]
    while reader.offset < reader.size:
        start = reader.offset
        tag = reader.varint(_TAG_BYTES_MAX, "tag")
        if tag == _PAYLOAD_TAG_NUMBER:
            header.append(view[header_start:start])
            payload = view[slice(*reader.skip_bytes())]
            header_start = reader.offset
        else:
            reader.skip(tag, start)
    header.append(view[header_start:])
    return b"".join(header), payload


class _Reader:
    """Reads forward through a message; each read advances within it or raises MalformedFrame."""

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.size = len(message)
        self.offset = 0

    def skip(self, tag: int, tag_offset: int) -> None:
        """Skips the value behind a tag; a group with all that it holds."""
        open_groups: list[int] = []  # A list, since a hostile message may nest deeper than Python recurses.
        self._skip_one(tag, tag_offset, open_groups)
        while open_groups:
            tag_offset = self.offset
            if tag_offset == self.size:
                raise _malformed("group without an end", tag_offset)
            self._skip_one(self.varint(_TAG_BYTES_MAX, "tag"), tag_offset, open_groups)

    def _skip_one(self, tag: int, tag_offset: int, open_groups: list[int]) -> None:
        field, wire_type = tag >> 3, tag & 7
        if tag >> 32 or field == 0:
            raise _malformed(f"field number {field}", tag_offset)
        if wire_type == _VARINT:
            self.varint(_VARINT_BYTES_MAX, "varint")
        elif wire_type == _FIXED64:
            self._advance(8, "fixed64")
        elif wire_type == _BYTES:
            self.skip_bytes()
        elif wire_type == _GROUP_START:
            if len(open_groups) == _GROUP_DEPTH_MAX:
                raise _malformed(f"groups nested more than {_GROUP_DEPTH_MAX} deep", tag_offset)
            open_groups.append(field)
        elif wire_type == _GROUP_END:
            if not open_groups or open_groups.pop() != field:
                raise _malformed("end of a group that was not begun last", tag_offset)
        elif wire_type == _FIXED32:
            self._advance(4, "fixed32")
        else:
            raise _malformed(f"wire type {wire_type}", tag_offset)

    def skip_bytes(self) -> tuple[int, int]:
        """Skips a length-delimited value and returns where it begins and ends."""
        length = self.varint(_VARINT_BYTES_MAX, "length")
        start = self.offset
        self._advance(length, "value")
        return start, self.offset

    def varint(self, bytes_max: int, what: str) -> int:
        """Reads a varint of at most that many bytes; bits beyond 64 are cut off, as protobuf does."""
        value = 0
        for place, byte in enumerate(self.message[self.offset : self.offset + bytes_max]):
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                self.offset += place + 1
                return value & 0xFFFF_FFFF_FFFF_FFFF
        raise _malformed(f"{what} truncated or longer than {bytes_max} bytes", self.offset)

    def _advance(self, count: int, what: str) -> None:
        if count > self.size - self.offset:
            left = self.size - self.offset
            raise _malformed(f"{what} of {count} bytes where {left} are left", self.offset)
        self.offset += count


def _malformed(reason: str, offset: int) -> MalformedFrame:
    return MalformedFrame(f"the message is no valid protobuf: at byte {offset}, {reason}")


# As a varint, which takes two bytes.
_PAYLOAD_TAG = bytes((_PAYLOAD_TAG_NUMBER & 0x7F | 0x80, _PAYLOAD_TAG_NUMBER >> 7))
