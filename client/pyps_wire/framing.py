"""Messages with one large payload, which protobuf's classes never copy.

A frame is a message whose payload field comes last: the header's bytes, the payload field's tag and length, the
payload. This is valid protobuf, which the generated classes can read and write too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyps_wire.errors import InvalidArgument, MalformedFrame

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from typing_extensions import Buffer

# The payload's field number in every message that carries one.
PAYLOAD_FIELD = 100

_VARINT, _, _BYTES, _GROUP_START, _GROUP_END = range(5)
_FIXED = {1: (8, "fixed64"), 5: (4, "fixed32")}
_PAYLOAD_TAG_NUMBER = PAYLOAD_FIELD << 3 | _BYTES
_TAG_BYTES_MAX = 5
_VARINT_BYTES_MAX = 10
_GROUP_DEPTH_MAX = 100  # protobuf's own limit


def join(header: Message | bytes, payload: Buffer) -> bytes:
    """Return a message of the header's fields and the payload, which is copied once."""
    if not isinstance(header, bytes):
        header = header.SerializeToString()
    view = memoryview(payload)
    if not view.c_contiguous:
        raise InvalidArgument("a payload must be contiguous in memory; copy it first (numpy.ascontiguousarray)")
    # The length as a varint, without a call, since each push does this.
    left, length = view.nbytes, bytearray()
    while left >= 0x80:
        length.append(left & 0x7F | 0x80)
        left >>= 7
    length.append(left)
    return b"".join((header, _PAYLOAD_TAG, length, view))


def split(message: bytes) -> tuple[bytes, memoryview]:
    """Return the message without its payload, for the generated class to parse, and a view of the payload.

    Any valid encoding is accepted: any order of fields, unknown fields, groups, overlong lengths. Of several payloads
    the last is returned, as protobuf requires; without one the payload is empty.
    """
    view, size = memoryview(message), len(message)
    header: list[memoryview] = []
    payload = view[:0]
    open_groups: list[int] = []  # A list, since a hostile message may nest deeper than Python recurses.
    at = header_start = 0
    while at < size:
        tag_at = at
        tag, at = _varint(message, at, _TAG_BYTES_MAX, "tag")
        field, wire_type = tag >> 3, tag & 7
        if tag >> 32 or field == 0:
            raise _malformed(f"field number {field}", tag_at)
        count, what = _FIXED.get(wire_type, (0, "value"))
        if wire_type == _VARINT:
            _, at = _varint(message, at, _VARINT_BYTES_MAX, "varint")
        elif wire_type == _BYTES:
            count, at = _varint(message, at, _VARINT_BYTES_MAX, "length")
        elif wire_type == _GROUP_START:
            if len(open_groups) == _GROUP_DEPTH_MAX:
                raise _malformed(f"groups nested more than {_GROUP_DEPTH_MAX} deep", tag_at)
            open_groups.append(field)
        elif wire_type == _GROUP_END:
            if not open_groups or open_groups.pop() != field:
                raise _malformed("end of a group that was not begun last", tag_at)
        elif not count:
            raise _malformed(f"wire type {wire_type}", tag_at)
        if count > size - at:
            raise _malformed(f"{what} of {count} bytes where {size - at} are left", at)
        at += count
        if tag == _PAYLOAD_TAG_NUMBER and not open_groups:
            header.append(view[header_start:tag_at])
            payload, header_start = view[at - count : at], at
    if open_groups:
        raise _malformed("group without an end", at)
    header.append(view[header_start:])
    return b"".join(header), payload


def _varint(message: bytes, at: int, bytes_max: int, what: str) -> tuple[int, int]:
    """Return a varint of at most so many bytes, and where it ends; bits beyond 64 are dropped, as protobuf does."""
    if at < len(message) and (value := message[at]) < 0x80:
        # Nearly all varints have one byte.
        return value, at + 1
    value = 0
    for place, byte in enumerate(message[at : at + bytes_max]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + place + 1
    raise _malformed(f"{what} truncated or longer than {bytes_max} bytes", at)


def _malformed(reason: str, offset: int) -> MalformedFrame:
    return MalformedFrame(f"the message is no valid protobuf: at byte {offset}, {reason}")


# As a varint, which takes two bytes.
_PAYLOAD_TAG = bytes((_PAYLOAD_TAG_NUMBER & 0x7F | 0x80, _PAYLOAD_TAG_NUMBER >> 7))
