"""Torch's conversion of shards: the bits of pyps_wire.codecs, at any alignment."""

import warnings
from itertools import product

import numpy as np

from pyps_client.torch.memory import TorchConverter
from pyps_wire.codecs import BFLOAT16, FLOAT16, FLOAT32

HALVES = [FLOAT16, BFLOAT16]
CONVERTER = TorchConverter()


def awkward_values() -> np.ndarray:
    """All kinds of numbers: ties, the smallest and largest, zeros, infinities, random bits that are no NaN."""
    random = np.random.default_rng(0)
    bits = np.concatenate(
        [
            random.integers(0, 2**32, 100_000, dtype=np.uint32),
            # Ties of bfloat16 and of float16, and their neighbours.
            (random.integers(0, 2**16, 50_000, dtype=np.uint32) << 16)
            + random.choice([0x7FFF, 0x8000, 0x8001], 50_000),
            (random.integers(0x38000000, 0x47800000, 50_000, dtype=np.uint32) & ~np.uint32(0x1FFF))
            + random.choice([0x0FFF, 0x1000, 0x1001], 50_000),
        ]
    ).astype(np.uint32)
    values = np.concatenate([bits.view(np.float32), np.array([0, -0.0, np.inf, -np.inf, 65519, 65520], np.float32)])
    return values[~np.isnan(values)]


def test_it_rounds_as_numpy_does_and_nan_stays_nan():
    values, nothing = awkward_values(), np.zeros(0, np.float32)
    nans = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF], np.uint32).view(np.float32)
    for codec in HALVES:
        assert bytes(CONVERTER.encode(values, codec)) == bytes(codec.encode(values))
        assert np.isnan(codec.decode(CONVERTER.encode(nans, codec), len(nans))).all()
        assert bytes(CONVERTER.encode(nothing, codec)) == b""
        CONVERTER.decode(memoryview(b""), codec, nothing)


def test_what_came_is_read_at_any_alignment():
    values = np.random.default_rng(1).standard_normal(1003).astype(np.float32)
    for codec, offset in product([FLOAT32, *HALVES], range(5)):
        message = bytes(offset) + bytes(codec.encode(values))
        vector = np.full(1010, 5.0, np.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            CONVERTER.decode(memoryview(message)[offset:], codec, vector[4:1007])
        np.testing.assert_array_equal(vector[4:1007], codec.decode(codec.encode(values), len(values)))
        assert set(vector[:4]) | set(vector[1007:]) == {5.0}
