"""Gradients, receipts and checksums as plain JSON values, for files: checkpoints and update logs."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from pyps.core.arrays import Floats
from pyps.core.gradient import Extent, Gradient
from pyps.core.protocols.base import Contribution
from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.staleness import Weighing
from pyps.core.update import Update
from pyps_wire.codecs import codec_numbered

# Written even where they have their default: people read a log for them.
_ALWAYS_WRITTEN = ("staleness", "weight", "rate")
# Words of 8 bytes in a row of the quick checksum's table.
_COLUMNS = 512


def push_to_plain(gradient: Gradient, receipt: Receipt) -> dict[str, Any]:
    """Return a gradient and its receipt in one flat dictionary, without fields at their defaults and the payload."""
    return {
        **gradient_to_plain(gradient),
        **_fields(receipt),
        "outcome": receipt.outcome.name.lower(),
        **({"reason": receipt.reason.name.lower()} if receipt.reason else {}),
    }


def push_from_plain(plain: Mapping[str, Any], payload: bytes | memoryview) -> tuple[Gradient, Receipt]:
    """Read what `push_to_plain` wrote, with the gradient's payload."""
    fields = {name: value for name, value in plain.items() if name in Receipt._fields}
    fields["outcome"] = Outcome[plain["outcome"].upper()]
    fields["reason"] = Reason[plain.get("reason", "unspecified").upper()]
    fields["waiting_for"] = tuple(plain.get("waiting_for", ()))
    return gradient_from_plain(plain, payload), Receipt(**fields)


def update_to_plain(update: Update) -> dict[str, Any]:
    """Return the rate of an update, and the sender and weight of each gradient in it."""
    return {
        "rate": update.rate,
        "parts": [
            {
                "worker_id": part.contribution.gradient.worker_id,
                "incarnation": part.contribution.gradient.incarnation,
                "sequence": part.contribution.gradient.sequence,
                "weight": update.weight(part),
                "rate_scale": update.rate_scale(part),
            }
            for part in update.parts
        ],
    }


def gradient_to_plain(gradient: Gradient) -> dict[str, Any]:
    """Return the gradient's fields, without those at their defaults and the payload, which is kept apart in bytes."""
    return {name: value for name, value in _fields(gradient).items() if name != "payload"}


def gradient_from_plain(plain: Mapping[str, Any], payload: bytes | memoryview) -> Gradient:
    fields = {name: value for name, value in plain.items() if name in Gradient._fields}
    extents = tuple(Extent(*extent) for extent in plain.get("extents", ()))
    return Gradient(**{**fields, "codec": codec_numbered(plain["codec"]), "extents": extents, "payload": payload})


def _fields(thing: Gradient | Receipt) -> dict[str, Any]:
    defaults = thing._field_defaults
    return {
        name: value
        for name, value in thing._asdict().items()
        if name not in defaults or value != defaults[name] or name in _ALWAYS_WRITTEN
    }


def contribution_to_plain(contribution: Contribution) -> dict[str, Any]:
    """Return a waiting gradient without its payload, which is kept apart; its number of bytes is in here."""
    return {
        "gradient": gradient_to_plain(contribution.gradient),
        "payload_bytes": memoryview(contribution.gradient.payload).nbytes,
        "staleness": contribution.staleness,
        "weighing": contribution.weighing._asdict(),
    }


def contribution_from_plain(plain: Mapping[str, Any], payload: bytes | memoryview) -> Contribution:
    gradient = gradient_from_plain(plain["gradient"], payload)
    return Contribution(gradient, plain["staleness"], Weighing(**plain["weighing"]))


def split_payloads(plains: Sequence[Mapping[str, Any]], payloads: bytes) -> list[bytes]:
    """Return the payloads of waiting gradients that lie end to end; ValueError where they are not all there."""
    ends = list(accumulate(plain["payload_bytes"] for plain in plains))
    if (ends[-1] if ends else 0) != len(payloads):
        raise ValueError(f"{len(payloads)} bytes of waiting gradients, expected {ends[-1] if ends else 0}")
    return [payloads[end - plain["payload_bytes"] : end] for plain, end in zip(plains, ends, strict=True)]


def checksum_of(values: Floats) -> str:
    """Return the CRC-32 of the values' bytes, in hexadecimal, which `pyps status` and checkpoints show."""
    return f"{zlib.crc32(np.ascontiguousarray(values).data):08x}"


def quick_checksum_of(data: Floats | bytes | memoryview) -> str:
    """Return a checksum of contiguous memory, in hexadecimal, at a tenth of CRC-32's cost: for every update.

    The bytes are read as rows of 512 unsigned 64-bit words; the columns are summed modulo 2**64, and the sums and
    the rest that fills no row are hashed by CRC-32. Any one word that differs is noticed.
    """
    octets = np.frombuffer(data, np.uint8)
    whole = octets.size // (8 * _COLUMNS) * (8 * _COLUMNS)
    sums = np.add.reduce(octets[:whole].view(np.uint64).reshape(-1, _COLUMNS), axis=0)
    return f"{zlib.crc32(octets[whole:].data, zlib.crc32(sums.data)):08x}"
