"""A shard's state as one safetensors file, which is a row of buffers here: checkpoints and servers pass it on.

parameters, slot.accumulator...   float32
vector.g, vector.s7...            float32: a coordinator's gradient and history; if there was one
ledger                            whose pushes were answered, and how: compressed (`core/ledger.py`)
pending                           the payloads of the gradients that wait, end to end
in the metadata                   "state": the other values and what is said of those gradients, in JSON
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import numpy as np

from pyps.core.arrays import Floats, aligned_copy
from pyps.core.ledger import LedgerState
from pyps.core.store import ShardState
from pyps.storage.plain import contribution_from_plain, contribution_to_plain, split_payloads

_SLOT, _VECTOR = "slot.", "vector."
_NUMBERS = ("version", "examples", "learning_rate", "momentum")


def pack(state: ShardState, vectors: Mapping[str, Floats] | None = None) -> list[memoryview]:
    """Return the buffers of the file in order; those of the arrays share their memory."""
    floats = {
        "parameters": state.parameters,
        **{f"{_SLOT}{name}": slot for name, slot in state.slots.items()},
        **{f"{_VECTOR}{name}": vector for name, vector in (vectors or {}).items()},
    }
    payloads = [memoryview(waiting.gradient.payload).cast("B") for waiting in state.pending]
    ledger = memoryview(state.ledger.to_bytes())
    plain = {
        **{name: getattr(state, name) for name in _NUMBERS},
        "pending": [contribution_to_plain(waiting) for waiting in state.pending],
    }
    header: dict[str, object] = {"__metadata__": {"format": "pyps shard", "state": json.dumps(plain)}}
    end = 0
    sizes = {**{name: values.size for name, values in floats.items()}, "ledger": ledger.nbytes}
    sizes["pending"] = sum(payload.nbytes for payload in payloads)
    for name, size in sizes.items():
        kind, width = ("F32", 4) if name in floats else ("U8", 1)
        header[name] = {"dtype": kind, "shape": [size], "data_offsets": [end, end + width * size]}
        end += width * size
    # The format: the header's length, the header, padded so that values begin at a multiple of 8, then the values.
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    arrays = [np.ascontiguousarray(values, "<f4").view(np.uint8).data for values in floats.values()]
    return [memoryview(struct.pack("<Q", len(text)) + text), *arrays, ledger, *payloads]


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
    floats = {
        name: aligned_copy(np.frombuffer(place, "<f4"))
        for name, place in places.items()
        if header[name]["dtype"] == "F32"
    }
    pending = plain.pop("pending")
    payloads = split_payloads(pending, bytes(places["pending"]))
    state = ShardState(
        parameters=floats["parameters"],
        slots=_named(_SLOT, floats),
        ledger=LedgerState.from_bytes(places["ledger"]),
        pending=tuple(map(contribution_from_plain, pending, payloads)),
        **plain,
    )
    return state, _named(_VECTOR, floats)


def _named(prefix: str, arrays: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the arrays whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
