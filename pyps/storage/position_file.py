"""Where each worker's data stands, as one file: a line of JSON, which says whose they are, then the positions."""

from __future__ import annotations

import json

from pyps.run_header import PositionsState


def pack(positions: PositionsState) -> list[bytes]:
    """Return the file's parts in order; the positions are not copied."""
    about = [
        [name, index, incarnation, [[sequence, len(position)] for sequence, position in newest]]
        for name, (index, incarnation, newest) in positions.items()
    ]
    return [
        json.dumps(about).encode() + b"\n",
        *(position for _, _, newest in positions.values() for _, position in newest),
    ]


def unpack(data: bytes) -> PositionsState:
    """Return what `pack` was given; raise whatever it may be where this is no such file."""
    at = data.index(b"\n") + 1
    positions = {}
    for name, index, incarnation, newest in json.loads(data[:at]):
        taken = []
        for sequence, length in newest:
            taken.append((int(sequence), data[at : at + length]))
            at += length
        positions[str(name)] = None if index is None else int(index), int(incarnation), tuple(taken)
    if at != len(data):
        raise ValueError(f"{len(data)} bytes, expected {at}")
    return positions
