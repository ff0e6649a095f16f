"""split_frame and join_frame over every kind of protobuf encoding, and over what is none."""

import struct
from dataclasses import dataclass

import numpy as np
import pytest
from google.protobuf import empty_pb2, wrappers_pb2
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from pyps import _kernels
from wire_encodings import BYTES, FIXED32, FIXED64, GROUP, GROUP_END, VARINT, bytes_field, group, tag, varint

PAYLOAD = 15  # The payload's field number; its tag takes one byte.

split = _kernels.split_frame


@dataclass(frozen=True)
class Field:
    encoded: bytes
    payload: bytes | None = None  # What it holds when it is a payload field.


sizes = st.integers(1, 10)
numbers = st.one_of(st.integers(1, 20), st.integers(1, 2**29 - 1))
other_numbers = numbers.filter(lambda number: number != PAYLOAD)
varints = st.builds(varint, st.integers(0, 2**64 - 1), sizes)
contents = st.binary(max_size=300)


def plain_fields(numbers):
    """Fields of every wire type that are no payload and no group."""
    return st.one_of(
        st.builds(lambda n, size, v: tag(n, VARINT, size) + v, numbers, st.integers(1, 5), varints),
        st.builds(lambda n, v: tag(n, FIXED64) + v, numbers, st.binary(min_size=8, max_size=8)),
        st.builds(lambda n, v: tag(n, FIXED32) + v, numbers, st.binary(min_size=4, max_size=4)),
        st.builds(bytes_field, other_numbers, contents, length_size=sizes),
    )


# Inside a group a field with the payload's number is none of ours.
grouped_fields = st.recursive(
    plain_fields(numbers) | st.builds(bytes_field, numbers, contents),
    lambda inner: st.builds(group, numbers, st.lists(inner, max_size=4).map(b"".join)),
    max_leaves=8,
)
groups = st.builds(group, numbers, st.lists(grouped_fields, max_size=4).map(b"".join))
payloads = st.builds(
    lambda content, tag_size, size: Field(
        tag(PAYLOAD, BYTES, tag_size) + varint(len(content), size) + content, content
    ),
    contents,
    st.integers(1, 5),
    sizes,
)
messages = st.lists(st.one_of((plain_fields(numbers) | groups).map(Field), payloads), max_size=12)


def join(fields):
    return b"".join(field.encoded for field in fields)


@given(messages)
def test_the_last_payload_is_found_and_all_else_is_header(fields):
    message = join(fields)
    header_expected = b"".join(field.encoded for field in fields if field.payload is None)
    found = [field.payload for field in fields if field.payload is not None]

    header, offset, size = split(message, PAYLOAD)

    assert header == header_expected
    if found:
        assert message[offset : offset + size] == found[-1]
    else:
        assert (offset, size) == (len(message), 0)


@given(messages)
def test_splitting_the_header_again_changes_nothing(fields):
    header, _, _ = split(join(fields), PAYLOAD)

    assert split(header, PAYLOAD) == (header, len(header), 0)


@given(messages, st.integers(0, 7))
def test_a_slice_of_a_larger_buffer_is_a_message(fields, offset):
    message = join(fields)

    assert split(memoryview(bytes(offset) + message)[offset:], PAYLOAD) == split(message, PAYLOAD)


@settings(max_examples=50)
@given(messages)
def test_every_truncation_is_a_message_or_one_clear_error(fields):
    message = join(fields)
    ends = {0}
    for field in fields:
        ends.add(max(ends) + len(field.encoded))
    for length in range(len(message) + 1):
        try:
            header, offset, size = split(message[:length], PAYLOAD)
        except ValueError as error:
            assert str(error).startswith("malformed message at byte ")
            assert length not in ends
        else:
            assert length in ends
            assert offset + size <= length
            assert len(header) + size <= length


@given(st.binary(max_size=200), st.sampled_from([1, 2, PAYLOAD, 2**29 - 1]))
def test_random_bytes_are_a_message_or_one_clear_error(blob, number):
    try:
        header, offset, size = split(blob, number)
    except ValueError as error:
        assert str(error).startswith("malformed message at byte ")
    else:
        assert offset + size <= len(blob)
        assert len(header) + size <= len(blob)


@given(st.binary(max_size=60) | messages.map(join))
def test_what_protobuf_itself_accepts_is_accepted_and_means_the_same(blob):
    """BytesValue has one field, number 1, of type bytes."""
    try:
        message = wrappers_pb2.BytesValue.FromString(blob)
    except DecodeError:
        return

    header, offset, size = split(blob, 1)

    assert blob[offset : offset + size] == message.value
    assert wrappers_pb2.BytesValue.FromString(header).value == b""
    empty_pb2.Empty.FromString(header)


# One example of each refusal, and of each thing on its border that is no error.

MALFORMED = {
    "field number 0": (b"\x00\x01", "byte 0: field number 0"),
    "wire type 6": (tag(1, 6) + b"\x00", "byte 0: wire type 6"),
    "wire type 7": (b"\x08\x01" + tag(2, 7), "byte 2: wire type 7"),
    "truncated tag": (b"\x08\x01\x80", "byte 2: truncated tag"),
    "tag of six bytes": (tag(1, VARINT, 6) + b"\x00", "byte 0: tag of more than 5 bytes"),
    "tag above 32 bits": (varint(1 << 32 | 1 << 3) + b"\x00", "byte 0: tag does not fit 32 bits"),
    "no varint": (b"\x08", "byte 1: truncated varint"),
    "truncated varint": (b"\x08\xff\xff", "byte 1: truncated varint"),
    "varint of eleven bytes": (b"\x08" + varint(1, 11), "byte 1: varint of more than 10 bytes"),
    "truncated fixed32": (tag(1, FIXED32) + bytes(3), "byte 1: truncated fixed32"),
    "truncated fixed64": (tag(1, FIXED64) + bytes(7), "byte 1: truncated fixed64"),
    "no length": (tag(1, BYTES), "byte 1: truncated length"),
    "length of eleven bytes": (bytes_field(1, b"", length_size=11), "byte 1: length of more than 10 bytes"),
    "length beyond the end": (
        tag(1, BYTES) + varint(5) + bytes(4),
        "byte 1: length 5 where 4 bytes are left",
    ),
    "huge length": (
        tag(PAYLOAD, BYTES) + varint(2**64 - 1) + bytes(4),
        "byte 1: length 18446744073709551615 where 4 bytes are left",
    ),
    "group without an end": (b"\x08\x01" + tag(2, GROUP), "byte 2: group without an end"),
    "end without a group": (tag(1, GROUP_END), "byte 0: end of a group that was not begun"),
    "end of another group": (tag(1, GROUP) + tag(2, GROUP_END), "byte 1: end of another group"),
    "truncated inside a group": (tag(1, GROUP) + b"\x08", "byte 2: truncated varint"),
}


@pytest.mark.parametrize("message, words", MALFORMED.values(), ids=MALFORMED)
def test_malformed_messages_are_refused_with_reason_and_byte(message, words):
    with pytest.raises(ValueError, match="malformed message at " + words):
        split(message, PAYLOAD)


def test_an_empty_message_has_no_payload():
    assert split(b"", PAYLOAD) == (b"", 0, 0)


def test_a_present_but_empty_payload_has_an_offset():
    assert split(bytes_field(PAYLOAD, b"") + b"\x08\x01", PAYLOAD) == (b"\x08\x01", 2, 0)


def test_groups_may_be_nested_one_hundred_deep_and_no_deeper():
    def nested(depth):
        return tag(1, GROUP) * depth + tag(1, GROUP_END) * depth

    assert split(nested(100), PAYLOAD)[0] == nested(100)
    with pytest.raises(ValueError, match="byte 100: groups nested more than 100 deep"):
        split(nested(101), PAYLOAD)


@pytest.mark.parametrize("number", [0, -1, 2**29])
def test_a_field_number_out_of_range_is_refused(number):
    with pytest.raises(ValueError, match=f"field_number is {number}; expected 1 to 536870911"):
        split(b"", number)
    with pytest.raises(ValueError, match=f"field_number is {number}; expected 1 to 536870911"):
        _kernels.join_frame(b"", number, np.zeros(1, np.float32))


def test_a_message_must_be_a_buffer():
    with pytest.raises(TypeError, match="message is of type str"):
        split("text", PAYLOAD)
    with pytest.raises(ValueError, match="message is not C-contiguous"):
        split(memoryview(bytes(8))[::2], PAYLOAD)


# Joining.


@pytest.mark.parametrize("codec", [_kernels.FLOAT32, _kernels.FLOAT16, _kernels.BFLOAT16])
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 100_000])
@pytest.mark.parametrize("number", [1, 15, 16, 2**29 - 1])
def test_join_frame_appends_one_payload_field(number, length, codec):
    header = tag(3, VARINT) + varint(77)
    values = np.arange(length, dtype=np.float32)

    message = _kernels.join_frame(header, number, values, codec)

    # gRPC sends bytes only: given any other buffer it lets the caller wait.
    assert type(message) is bytes
    assert message == header + bytes_field(number, _kernels.encode(values, codec))
    split_header, offset, size = split(message, number)
    assert split_header == header
    assert message[offset : offset + size] == _kernels.encode(values, codec)


def test_join_frame_writes_float32_unless_told_otherwise():
    values = np.array([1.5, -2], np.float32)

    assert _kernels.join_frame(b"", 1, values) == bytes_field(1, struct.pack("<2f", 1.5, -2))


def test_protobuf_reads_what_join_frame_writes():
    values = np.arange(5000, dtype=np.float32)

    message = wrappers_pb2.BytesValue.FromString(_kernels.join_frame(b"", 1, values))

    assert message.value == values.tobytes()
