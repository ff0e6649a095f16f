"""Protobuf's wire encodings, written byte by byte so that they can be unusual: values in more bytes than they need."""

VARINT, FIXED64, BYTES, GROUP, GROUP_END, FIXED32 = range(6)


def varint(value: int, size_min: int = 1) -> bytes:
    """Encodes in at least `size_min` bytes; leading zero groups are valid."""
    encoded = []
    while value >= 0x80 or len(encoded) + 1 < size_min:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def tag(number: int, wire_type: int, size_min: int = 1) -> bytes:
    return varint(number << 3 | wire_type, size_min)


def bytes_field(number: int, content: bytes, *, tag_size: int = 1, length_size: int = 1) -> bytes:
    return tag(number, BYTES, tag_size) + varint(len(content), length_size) + content


def group(number: int, inside: bytes = b"") -> bytes:
    return tag(number, GROUP) + inside + tag(number, GROUP_END)
