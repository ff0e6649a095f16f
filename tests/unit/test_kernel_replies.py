"""Replies that an update writes, and payloads that change while they are applied."""

import threading
from itertools import product

import numpy as np
import pytest

import kernel_values
from kernel_values import WORDS, apply, assert_refused, at_offset, payload_of, wide_values
from pyps import _kernels
from pyps_wire import framing
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.codecs import BFLOAT16, FLOAT16, FLOAT32
from pyps_wire.framing import PAYLOAD_FIELD
from support import wait_until

F = np.float32
# The last is long enough for its reply to go past the caches.
LENGTHS = [0, 1, 7, 8, 9, 1023, 1024, 1025, 4097, 200_003]
BLOCK = 1024
CASES = list(product(WORDS, LENGTHS))

instruction_set = kernel_values.instruction_set


def update(length, gradients, **arguments):
    """Applies the gradients to fresh arrays; returns what was left out, parameters and accumulator."""
    p, a = wide_values(length, 1), np.ones(length, F)
    left_out = apply("adagrad", p, a, gradients, weight_decay=0.01, **arguments)
    return left_out, p, a


def test_a_reply_holds_the_parameters_that_the_update_made():
    for codec, length in CASES:
        gradients = [(payload_of(length, BFLOAT16, 2), BFLOAT16, 0.5)]
        _, p, a = update(length, gradients)
        expected = _kernels.encode(p, codec)
        for offset in [*range(9), 63, 64, 65]:
            buffer = bytearray(b"\xaa" * (offset + len(expected) + 5))

            left_out, replied, accumulator = update(length, gradients, reply=(buffer, offset, codec))

            assert left_out == 0
            assert np.array_equal(replied, p) and np.array_equal(accumulator, a), (codec, length, offset)
            assert buffer == b"\xaa" * offset + expected + b"\xaa" * 5, (codec, length, offset)


def parameters_written(values, reply):
    _kernels.ShardKernel("sgd", values, {}).write(reply)


def test_a_shard_writes_what_encode_returns():
    for codec, length in CASES:
        values = wide_values(length, 1)
        buffer = bytearray(7 + len(_kernels.encode(values, codec)))

        parameters_written(values, (buffer, 7, codec))

        assert buffer[7:] == _kernels.encode(values, codec), (codec, length)


def test_a_frame_that_a_kernel_filled_is_a_message():
    for codec, length in CASES:
        header = wire.Parameters(shard_id=3, version=5, codec=codec).SerializeToString()
        # No room to spare, as little as padding takes, and more than a length of one byte can say.
        for spare in (0, 2, 3, 4, 100, 130, 200, 10_000):
            room = len(header) + spare
            frame, offset = _kernels.new_frame(room, PAYLOAD_FIELD, length, codec)

            _, p, _ = update(length, [(payload_of(length, FLOAT32, 2), FLOAT32, 1.0)], reply=(frame, offset, codec))
            assert _kernels.write_header(frame, room, header)

            assert header + frame[room:] == framing.join(header, frame[offset:]), (codec, length)
            assert framing.split(frame)[1] == frame[offset:], (codec, length)
            message = wire.Parameters.FromString(frame)
            assert (message.shard_id, message.version, message.codec) == (3, 5, codec)
            assert message.payload == frame[offset:] == _kernels.encode(p, codec), (codec, length)


def test_a_header_that_does_not_fit_its_room_is_left_out():
    for room in (0, 3, 5):
        frame, _ = _kernels.new_frame(room, PAYLOAD_FIELD, 1, FLOAT32)
        before = frame[:room]
        assert not _kernels.write_header(frame, room, b"\x08\x01\x08\x01") and frame[:room] == before
    with pytest.raises(ValueError, match="fewer than its room of 100"):
        _kernels.write_header(b"frame", 100, b"")


def test_a_guarded_update_of_finite_numbers_is_the_same():
    """Alone and in a sum, at any byte."""
    for codec, length in CASES:
        alone = [(at_offset(payload_of(length, codec, 2), 3), codec, 0.3)]
        for gradients in (alone, [*alone, (payload_of(length, FLOAT16, 3), FLOAT16, -2.0)]):
            plain, guarded = update(length, gradients), update(length, gradients, guarded=True)

            assert guarded[0] == 0
            assert all(map(np.array_equal, plain[1:], guarded[1:])), (codec, length, len(gradients))


def test_a_block_that_is_not_finite_is_left_out():
    length, bad, skipped = 3 * BLOCK + 100, BLOCK + 7, slice(BLOCK, 2 * BLOCK)
    for codec, value in product(WORDS, (np.nan, np.inf, -np.inf)):
        values = wide_values(length, 2)
        values[bad] = value
        gradients = [(_kernels.encode(values, codec), codec, 1.0)]
        buffer = bytearray(4 * length)

        left_out, p, a = update(length, gradients, guarded=True, reply=(buffer, 0, FLOAT32))

        sound = np.where(np.isfinite(values), values, F(0))
        _, p_sound, a_sound = update(length, [(_kernels.encode(sound, codec), codec, 1.0)])
        p_sound[skipped], a_sound[skipped] = wide_values(length, 1)[skipped], 1
        assert left_out == BLOCK, (codec, value)
        assert np.array_equal(p, p_sound) and np.array_equal(a, a_sound), (codec, value)
        assert buffer == p.tobytes(), (codec, value)


def test_what_is_left_out_of_one_gradient_is_not_left_out_of_the_others():
    length = 2 * BLOCK
    broken, sound = np.full(length, 4, F), np.full(length, 1, F)
    broken[-1] = np.nan
    for gradients in ([broken, sound, sound], [sound, broken, sound], [sound, sound, broken]):
        p = np.zeros(length, F)

        left_out = apply("sgd", p, [(g, FLOAT32, 1.0) for g in gradients], rate=1.0, guarded=True)

        assert left_out == BLOCK
        assert p.tolist() == [-6.0] * BLOCK + [-2.0] * BLOCK


def test_left_out_is_summed_over_gradients_and_the_short_last_block():
    length = BLOCK + 10
    nan = np.full(length, np.nan, F)

    left_out = apply("sgd", p := np.ones(length, F), [(nan, FLOAT32, 1.0)] * 3, rate=1.0, guarded=True)

    assert left_out == 3 * length
    assert (p == 1).all()


def test_parameters_stay_finite_whatever_is_written_to_the_payload_meanwhile():
    length = 1 << 16
    gradient, p, a = np.ones(length, F), np.zeros(length, F), np.ones(length, F)
    done = threading.Event()

    def spoil():
        while not done.is_set():
            gradient[::97] = np.nan
            gradient[::97] = 1.0

    def spoiled() -> bool:
        return apply("adagrad", p, a, [(gradient, FLOAT32, 1.0)], guarded=True) > 0

    thread = threading.Thread(target=spoil)
    thread.start()
    try:
        # Else nothing was tried: on a busy machine the two may take turns for long.
        wait_until(spoiled, what="a payload that was spoiled amid an update")
        for _ in range(400):
            spoiled()
    finally:
        done.set()
        thread.join()

    assert np.isfinite(p).all() and np.isfinite(a).all()


# What is refused, before anything is written.

REFUSED = [
    (bytearray(16), TypeError, "reply is of type bytearray; expected None or a tuple"),
    ((bytearray(16), 0), TypeError, "reply is of type tuple; expected None or a tuple"),
    ((5, 0, 1), TypeError, "reply's buffer is of type int; expected a new bytes object"),
    ((memoryview(bytes(16)), 0, 1), TypeError, "reply's buffer is of type memoryview"),
    ((memoryview(bytearray(32))[::2], 0, 1), TypeError, "reply's buffer is of type memoryview"),
    ((bytearray(16), None, 1), TypeError, "reply's offset is of type NoneType"),
    ((bytearray(15), 0, 1), ValueError, "15 bytes; 4 values of float32 take 16 from byte 0 on"),
    ((bytearray(16), 1, 1), ValueError, "16 bytes; 4 values of float32 take 16 from byte 1 on"),
    ((bytearray(16), -1, 1), ValueError, "from byte -1 on"),
    ((bytearray(16), 2**62, 1), ValueError, "reply holds 16 bytes"),
    ((bytearray(8), 1, 3), ValueError, "4 values of bfloat16 take 8 from byte 1 on"),
    ((bytearray(16), 0, 0), ValueError, "codec is 0; expected float32"),
]


def test_replies_that_do_not_fit_are_refused():
    p = np.ones(4, F)
    for reply, error, words in REFUSED:
        assert_refused(lambda r=reply: apply("sgd", p, [(p.copy(), FLOAT32, 1.0)], reply=r), error, words)
        assert_refused(lambda r=reply: parameters_written(p, r), error, words)
    assert_refused(lambda: parameters_written(p, None), TypeError, "reply is None; expected a tuple")

    assert (p == 1).all()


def test_a_frame_beyond_two_gigabytes_is_refused():
    for count in (2**29, 2**40):
        with pytest.raises(ValueError, match="2 GiB"):
            _kernels.new_frame(0, PAYLOAD_FIELD, count, FLOAT32)
