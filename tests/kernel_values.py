"""Inputs and codec references that the kernels' tests share."""

import numpy as np
import pytest

from pyps import _kernels

CODECS = {
    "float32": _kernels.FLOAT32,
    "float16": _kernels.FLOAT16,
    "bfloat16": _kernels.BFLOAT16,
}
# The last is beyond what the kernels fetch ahead, and beyond the bytes from which they write past the caches.
LENGTHS = [0, 1, 7, 8, 9, 4097, 140_003]

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
every_length = pytest.mark.parametrize("length", LENGTHS)


def decode_reference(payload, codec):
    if codec == _kernels.BFLOAT16:
        return (np.frombuffer(payload, np.uint16).astype(np.uint32) << 16).view(np.float32)
    dtype = np.float32 if codec == _kernels.FLOAT32 else np.float16
    return np.frombuffer(payload, dtype).astype(np.float32)


def encode_reference(values, codec):
    """Of finite values or infinities."""
    if codec == _kernels.FLOAT32:
        return values.tobytes()
    if codec == _kernels.FLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).tobytes()
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def bits(values):
    return values.view(np.uint32)


def wide_values(length, seed):
    """Normal values times powers of two, so that roundings of every kind occur; some are zero."""
    random = np.random.default_rng(seed)
    scale = np.exp2(random.integers(-20, 10, length)).astype(np.float32)
    values = random.standard_normal(length).astype(np.float32) * scale
    values[random.random(length) < 0.05] = 0
    return values


def payload_of(length, codec, seed):
    return encode_reference(wide_values(length, seed), codec)


def at_offset(payload, offset):
    return memoryview(bytes(offset) + payload)[offset:]


def read_only(array):
    array.flags.writeable = False
    return array


def misaligned(length):
    return np.frombuffer(bytearray(4 * length + 1), np.float32, offset=1)
