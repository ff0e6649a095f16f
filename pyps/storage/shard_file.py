"""A shard's state as one safetensors file, which is a row of buffers here: checkpoints and servers pass it on.

parameters, slot.accumulator...   float32
vector.g, vector.s7...            float32: a coordinator's gradient and history; if there was one
rows.ids, rows.parameters...      a table's: its rows and candidates
ledger                            whose pushes were answered, and how: compressed (`core/ledger.py`)
pending                           the payloads of the gradients that wait, end to end
in the metadata                   "state": the other values and what is said of those gradients, in JSON
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from pyps.core.arrays import Floats, aligned_copy
from pyps.core.ledger import LedgerState
from pyps.core.store import Rows, ShardState
from pyps.storage.plain import contribution_from_plain, contribution_to_plain, split_payloads

_SLOT, _VECTOR, _ROWS = "slot.", "vector.", "rows."
_TYPES = {"F32": "<f4", "I64": "<i8", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1"}
_KINDS = {np.dtype(kind): name for name, kind in _TYPES.items()}
T = TypeVar("T")
_NUMBERS = ("version", "examples", "learning_rate", "momentum", "num_rows")


def pack(state: ShardState, vectors: Mapping[str, Floats] | None = None) -> list[memoryview]:
    """Return the buffers of the file in order; those of the arrays share their memory."""
    arrays: dict[str, Any] = {
        "parameters": state.parameters,
        **{f"{_SLOT}{name}": slot for name, slot in state.slots.items()},
        **{f"{_VECTOR}{name}": vector for name, vector in (vectors or {}).items()},
        **{f"{_ROWS}{name}": values for name, values in (state.rows._asdict() if state.rows else {}).items()},
    }
    payloads = [memoryview(waiting.gradient.payload).cast("B") for waiting in state.pending]
    ledger = memoryview(state.ledger.to_bytes())
    plain = {
        **{name: getattr(state, name) for name in _NUMBERS},
        "pending": [contribution_to_plain(waiting) for waiting in state.pending],
    }
    header: dict[str, object] = {"__metadata__": {"format": "pyps shard", "state": json.dumps(plain)}}
    end = 0
    shapes = {**{name: values.shape for name, values in arrays.items()}, "ledger": (ledger.nbytes,)}
    shapes["pending"] = (sum(payload.nbytes for payload in payloads),)
    for name, shape in shapes.items():
        kind = _KINDS[arrays[name].dtype.newbyteorder("<")] if name in arrays else "U8"
        num_bytes = np.dtype(_TYPES[kind]).itemsize * math.prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    # The format: the header's length, the header, padded so that values begin at a multiple of 8, then the values.
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    values = [np.ascontiguousarray(each, each.dtype.newbyteorder("<")).reshape(-1) for each in arrays.values()]
    return [
        memoryview(struct.pack("<Q", len(text)) + text),
        *(each.view(np.uint8).data for each in values),
        ledger,
        *payloads,
    ]


def unpack(data: bytes | memoryview) -> tuple[ShardState, dict[str, Floats]]:
    """Return the state and the coordinator's vectors of a file, in memory of their own.

    Raise ValueError, KeyError or TypeError where it is no such file; a checksum says whether it is what was written.
    """
    view = memoryview(data)
    start = 8 + int.from_bytes(view[:8], "little")
    try:
        header = json.loads(bytes(view[8:start]))
    except RecursionError:
        raise ValueError("a header that is nested too deeply") from None
    plain = json.loads(header.pop("__metadata__")["state"])
    places = {name: view[start:][slice(*tensor["data_offsets"])] for name, tensor in header.items()}
    arrays = {
        name: np.frombuffer(place, _TYPES[header[name]["dtype"]]).reshape(header[name]["shape"])
        for name, place in places.items()
    }
    rows = {name: arrays.pop(_ROWS + name).copy() for name in _named(_ROWS, arrays)}
    floats = {name: aligned_copy(values) for name, values in arrays.items() if values.dtype == np.float32}
    pending = plain.pop("pending")
    payloads = split_payloads(pending, bytes(places["pending"]))
    state = ShardState(
        parameters=floats["parameters"],
        slots=_named(_SLOT, floats),
        ledger=LedgerState.from_bytes(places["ledger"]),
        pending=tuple(map(contribution_from_plain, pending, payloads)),
        rows=Rows(**rows) if rows else None,
        **plain,
    )
    return state, _named(_VECTOR, floats)


def _named(prefix: str, arrays: Mapping[str, T]) -> dict[str, T]:
    """Return the arrays whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
