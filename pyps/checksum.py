"""Short names for a shard's bits: equal parameters have equal ones, and a difference shows."""

from __future__ import annotations

import zlib

import numpy as np

from pyps.core.arrays import Floats

# Words of 8 bytes beside each other in the quick checksum's table.
_COLUMNS = 512


def checksum_of(values: Floats) -> str:
    """CRC-32 of the values' bytes, in hexadecimal: what `pyps status` and checkpoints show."""
    return f"{zlib.crc32(np.ascontiguousarray(values).data):08x}"


def quick_checksum_of(values: Floats) -> str:
    """A checksum of contiguous values for every update, in hexadecimal, at a tenth of CRC-32's cost.

    The bytes are read as rows of 512 unsigned 64-bit words; the columns are summed modulo 2**64, and the sums and the
    rest that fills no row are hashed by CRC-32. Any one word that differs is noticed.
    """
    whole = values.size // (2 * _COLUMNS) * (2 * _COLUMNS)
    sums = np.add.reduce(values[:whole].view(np.uint64).reshape(-1, _COLUMNS), axis=0)
    return f"{zlib.crc32(values[whole:].data, zlib.crc32(sums.data)):08x}"
