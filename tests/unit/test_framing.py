"""Frames: the generated classes, pyps_wire.framing and the native parser each read what any of them writes."""

from random import Random

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyps import _kernels
from pyps_wire.codecs import BFLOAT16, FLOAT16, FLOAT32
from pyps_wire.common_pb2 import ModelSpec, TensorSpec
from pyps_wire.errors import InvalidArgument, MalformedFrame
from pyps_wire.framing import PAYLOAD_FIELD, join, split
from pyps_wire.parameter_server_pb2 import ExchangeReply, HelloRequest, InitializeRequest, Parameters, PushRequest

# Protobuf's wire encodings, written byte by byte so that they can be unusual: numbers in more bytes than they need.

VARINT, FIXED64, BYTES, GROUP, GROUP_END, FIXED32 = range(6)


def varint(value, size_min=1):
    """Encodes in at least `size_min` bytes; leading zero groups are valid."""
    encoded = []
    while value >= 0x80 or len(encoded) + 1 < size_min:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def tag(number, wire_type, size_min=1):
    return varint(number << 3 | wire_type, size_min)


def bytes_field(number, content, *, tag_size=1, length_size=1):
    return tag(number, BYTES, tag_size) + varint(len(content), length_size) + content


def group(number, inside=b""):
    return tag(number, GROUP) + inside + tag(number, GROUP_END)


def nested(depth):
    return tag(1, GROUP) * depth + tag(1, GROUP_END) * depth


# Valid messages, as lists of fields: each with what it holds where it is a payload.

uint64 = st.integers(0, 2**64 - 1)
sizes = st.integers(1, 5)  # protobuf's own parsers read no longer tags and lengths.
payload_contents = st.binary(max_size=80)
payloads = st.builds(
    lambda content, t, n: (bytes_field(PAYLOAD_FIELD, content, tag_size=t, length_size=n), content),
    payload_contents,
    sizes,
    sizes,
)
varint_fields = st.builds(
    lambda number, value, size, tag_size: tag(number, VARINT, tag_size) + varint(value, size),
    st.sampled_from([2, 3, 4, 5, 6, 7, 8, 10, 11, 12]),  # PushRequest's own.
    uint64,
    st.integers(1, 10),
    sizes,
)
# Numbers that PushRequest lacks; the payload's own number under another wire type is as unknown as they.
unknown_numbers = st.sampled_from([13, 99, 101, 2047, 2**29 - 1])
not_payloads = unknown_numbers | st.just(PAYLOAD_FIELD)
unknown_plain = st.one_of(
    st.builds(lambda n, v: tag(n, VARINT) + varint(v), not_payloads, uint64),
    st.builds(lambda n, v: tag(n, FIXED64) + v, not_payloads, st.binary(min_size=8, max_size=8)),
    st.builds(lambda n, v: tag(n, FIXED32) + v, not_payloads, st.binary(min_size=4, max_size=4)),
    st.builds(bytes_field, unknown_numbers, st.binary(max_size=200)),
)
# Inside a group a field with the payload's number is not the payload.
groups = st.recursive(
    unknown_plain | payloads.map(lambda payload: payload[0]),
    lambda inner: st.builds(group, not_payloads, st.lists(inner, max_size=3).map(b"".join)),
    max_leaves=6,
).map(lambda inside: group(50, inside))
others = st.one_of(varint_fields, unknown_plain, groups).map(lambda encoded: (encoded, None))
messages = st.lists(others | payloads, max_size=12)
ALL_KINDS = [
    (bytes_field(1, bytes_field(1, b"run")), None),
    (tag(2, VARINT) + varint(300, 10), None),
    (bytes_field(PAYLOAD_FIELD, b"first", tag_size=5, length_size=5), b"first"),
    (group(50, group(51, tag(7, FIXED32) + b"1234") + bytes_field(PAYLOAD_FIELD, b"inside")), None),
    (tag(99, FIXED64) + b"12345678", None),
    (bytes_field(PAYLOAD_FIELD, b"last" * 50), b"last" * 50),
]


def encoded(fields):
    return b"".join(field for field, _ in fields)


# Readers: each gives header and payload, or raises MalformedFrame.


def native_split(message, number=PAYLOAD_FIELD):
    try:
        header, offset, size = _kernels.split_frame(message, number)
    except ValueError as error:
        assert str(error).startswith("malformed message at byte ")
        raise MalformedFrame(str(error)) from None
    assert 0 <= offset <= offset + size <= len(message)
    return header, bytes(message[offset : offset + size])


def read(message):
    """What both make of a message, None where they refuse it; they agree on every one."""
    results = []
    for reader in (split, native_split):
        try:
            header, payload = reader(message)
            results.append((bytes(header), bytes(payload)))
        except MalformedFrame:
            results.append(None)
    assert results[0] == results[1], message
    return results[0]


def parsed(message):
    try:
        whole = PushRequest.FromString(message)
    except DecodeError:
        return None
    payload = whole.payload
    whole.ClearField("payload")
    return whole.SerializeToString(deterministic=True), payload


def read_and_parsed(message):
    """What the readers make of a message, the header parsed by the generated class; None where any refuses."""
    result = read(message)
    if result is None or (header := parsed(result[0])) is None:
        return None
    assert not header[1]
    return header[0], result[1]


@given(messages, st.integers(0, 7))
def test_every_valid_encoding_is_split_and_read_as_protobuf_reads_it(fields, offset):
    message = encoded(fields)
    header = b"".join(field for field, payload in fields if payload is None)
    payloads_found = [payload for _, payload in fields if payload is not None]

    assert read(message) == (header, payloads_found[-1] if payloads_found else b"")
    assert parsed(message) is not None
    assert read_and_parsed(message) == parsed(message)
    # The header is a message without a payload, and a message may lie anywhere in a larger buffer.
    assert read(header) == (header, b"")
    assert native_split(memoryview(bytes(offset) + message)[offset:]) == read(message)


@settings(max_examples=50)
@given(messages)
@example(ALL_KINDS)
def test_every_truncation_is_refused_but_behind_a_field(fields):
    message, ends = encoded(fields), {0}
    for field, _ in fields:
        ends.add(max(ends) + len(field))
    for cut in range(len(message) + 1):
        assert (read(message[:cut]) is not None) == (cut in ends)
        assert read_and_parsed(message[:cut]) == parsed(message[:cut]), cut


mangled = st.builds(
    lambda fields, place, put_there: encoded(fields)[:place] + put_there + encoded(fields)[place + 1 :],
    messages,
    st.integers(0, 80),
    st.binary(min_size=1, max_size=3),
)


@settings(max_examples=300)
@given(st.binary(max_size=60) | mangled)
@example(b"\xa2\x06\x85\x80\x80\x80\x80\x80\x80\x80\x80\x00abcde")  # A length in ten bytes.
@example(b"\xa2\x06\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\x80\x80\x80\x80\x80\x01")
@example(b"\xff\xff\xff\xff\x7f")
@example(nested(100))
@example(nested(101))
@example(b"\x0e")
def test_mangled_bytes_are_read_alike_and_never_otherwise_than_by_protobuf(message):
    compare(message)


@pytest.mark.extended
def test_a_million_mangled_frames_are_read_alike_and_never_otherwise_than_by_protobuf():
    random, whole = Random(7), encoded(ALL_KINDS)
    for _ in range(1_000_000):
        message = bytearray(whole[: random.randint(1, 2 * len(whole))])
        for _ in range(random.randint(1, 3)):
            message[random.randrange(len(message))] = random.randrange(256)
        compare(bytes(message))


def compare(message):
    result, expected = read(message), parsed(message)
    if result is not None:
        assert expected is None or read_and_parsed(message) == expected, message
    elif expected is not None:
        # Field number 0 is no valid encoding, yet protobuf's C parser passes over it inside unknown groups.
        with pytest.raises(MalformedFrame, match="field number 0"):
            split(message)


# Reason and byte of each refusal: the native parser's words, and ours where they differ.
MALFORMED = [
    (b"\x00\x01", "byte 0: field number 0", "byte 0, field number 0"),
    (tag(1, 6) + b"\x00", "byte 0: wire type 6", "byte 0, wire type 6"),
    (b"\x08\x01" + tag(2, 7), "byte 2: wire type 7", "byte 2, wire type 7"),
    (b"\x08\x01\x80", "byte 2: truncated tag", "byte 2, tag truncated"),
    (tag(1, VARINT, 6) + b"\x00", "byte 0: tag of more than 5 bytes", "byte 0, tag truncated or longer than 5"),
    (varint(1 << 32 | 1 << 3) + b"\x00", "byte 0: tag does not fit 32 bits", "byte 0, field number"),
    (b"\x08", "byte 1: truncated varint", "byte 1, varint truncated"),
    (b"\x08\xff\xff", "byte 1: truncated varint", "byte 1, varint truncated"),
    (b"\x08" + varint(1, 11), "byte 1: varint of more than 10 bytes", "byte 1, varint truncated or longer than 10"),
    (tag(1, FIXED32) + bytes(3), "byte 1: truncated fixed32", "byte 1, fixed32 of 4 bytes where 3 are left"),
    (tag(1, FIXED64) + bytes(7), "byte 1: truncated fixed64", "byte 1, fixed64 of 8 bytes where 7 are left"),
    (tag(1, BYTES), "byte 1: truncated length", "byte 1, length truncated"),
    (bytes_field(1, b"", length_size=11), "byte 1: length of more than 10 bytes", "byte 1, length truncated or longer"),
    (
        tag(1, BYTES) + b"\x05abcd",
        "byte 1: length 5 where 4 bytes are left",
        "byte 2, value of 5 bytes where 4 are left",
    ),
    (
        tag(PAYLOAD_FIELD, BYTES) + varint(2**64 - 1) + bytes(4),
        "byte 2: length 18446744073709551615 where 4 bytes are left",
        "byte 12, value of 18446744073709551615 bytes where 4 are left",
    ),
    (b"\x08\x01" + tag(2, GROUP), "byte 2: group without an end", "byte 3, group without an end"),
    (tag(1, GROUP_END), "byte 0: end of a group that was not begun", "byte 0, end of a group that was not begun"),
    (tag(1, GROUP) + tag(2, GROUP_END), "byte 1: end of another group", "byte 1, end of a group that was not begun"),
    (tag(1, GROUP) + b"\x08", "byte 2: truncated varint", "byte 2, varint truncated"),
    (nested(101), "byte 100: groups nested more than 100 deep", "byte 100, groups nested more than 100 deep"),
]


def test_malformed_messages_are_refused_with_reason_and_byte():
    for message, native_words, our_words in MALFORMED:
        for reader, words in ((native_split, native_words), (split, our_words)):
            with pytest.raises(MalformedFrame) as refusal:
                reader(message)
                pytest.fail(f"{message!r} is read; expected a refusal: {words}")
            assert f"at {words}" in str(refusal.value), message


def test_payloads_may_be_absent_or_empty_and_are_not_copied():
    assert _kernels.split_frame(b"", 15) == (b"", 0, 0)
    assert _kernels.split_frame(bytes_field(15, b"") + b"\x08\x01", 15) == (b"\x08\x01", 2, 0)
    assert split(PushRequest(sequence=3).SerializeToString()) == (b"\x10\x03", b"")
    assert read(nested(100)) == (nested(100), b"")
    message = join(b"", b"numbers")
    assert split(message)[1].obj is message


def test_fields_are_counted_without_reading_them():
    tensor = TensorSpec(name="x", shape=(1, 300, 2**40), offset=(7,))
    one = HelloRequest(model=ModelSpec(tensors=[tensor] * 2), parts=(1, 2)).SerializeToString()
    tree = {8: {1: {2: None, 5: None}}, 15: None}
    # A message that comes in pieces is one, and numbers need not be packed.
    assert _kernels.count_fields(one * 2 + b"\x78\x07", tree) == (2 * (3 + 6 + 8 + 1 + 2) + 1, [2, 4, 12, 4, 5])
    assert _kernels.count_fields(one, {}) == (2, [])
    with pytest.raises(ValueError, match="length 2 where 1 bytes are left"):
        _kernels.count_fields(bytes_field(8, b"\x0a\x02\x00"), tree)


def test_wrong_field_numbers_and_buffers_are_refused():
    for number in (0, -1, 2**29):
        words = f"field_number is {number}; expected 1 to 536870911"
        with pytest.raises(ValueError, match=words):
            _kernels.split_frame(b"", number)
        with pytest.raises(ValueError, match=words):
            _kernels.new_frame(0, number, 1, FLOAT32)
    with pytest.raises(TypeError, match="message is of type str"):
        _kernels.split_frame("text", 15)
    with pytest.raises(ValueError, match="message is not C-contiguous"):
        _kernels.split_frame(memoryview(bytes(8))[::2], 15)


def test_every_message_with_a_payload_goes_both_ways():
    values = np.arange(7, dtype=np.float32)
    for message_class in (InitializeRequest, PushRequest, Parameters, ExchangeReply):
        header = message_class(codec=1)
        message = message_class.FromString(join(header, values))
        assert message.payload == values.tobytes()
        assert message.codec == 1
        assert read(message.SerializeToString()) == (header.SerializeToString(), values.tobytes())
        field = message_class.DESCRIPTOR.fields_by_name["payload"]
        assert field.number == PAYLOAD_FIELD == max(f.number for f in message_class.DESCRIPTOR.fields)


def test_the_native_writer_appends_one_payload_field_as_ours_does():
    header = tag(3, VARINT) + varint(77)
    for length in (0, 1, 31, 32, 33, 100_000):
        values = np.arange(length, dtype=np.float32)
        for codec in (FLOAT32, FLOAT16, BFLOAT16):
            payload = _kernels.encode(values, codec)
            for number in (1, 15, 16, PAYLOAD_FIELD, 2**29 - 1):
                message, offset = _kernels.new_frame(len(header), number, length, codec)
                _kernels.ShardKernel("sgd", values, {}).write((message, offset, codec))
                assert _kernels.write_header(message, len(header), header)

                # gRPC sends bytes only: given any other buffer it lets the caller wait.
                assert type(message) is bytes
                assert message == header + bytes_field(number, payload), (length, codec, number)
                assert native_split(message, number) == (header, payload), (length, codec, number)
            assert join(header, payload) == header + bytes_field(PAYLOAD_FIELD, payload), (length, codec)


def test_join_takes_any_contiguous_buffer_and_no_other():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert split(join(b"", memoryview(values)))[1] == values.tobytes()
    with pytest.raises(InvalidArgument, match="contiguous"):
        join(b"", values[:, ::2])
