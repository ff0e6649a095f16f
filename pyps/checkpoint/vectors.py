"""A coordinator's vectors in a checkpoint: vectors.safetensors and their part of the manifest.

What a coordinator that comes back cannot compute anew is kept: the gradient at the accepted point, "shard-000012.g",
and the history, "shard-000012.s7". The accepted point itself is what the checkpoint holds as the shards' parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pyps.checkpoint.tensor_file import TensorFile, Writable
from pyps.checksum import checksum_of
from pyps.core.instructions import Precision
from pyps.core.program import Standing
from pyps.core.vector_machine import MachineState, VectorMachine

VECTORS = "vectors.safetensors"
_DTYPES: Mapping[Precision, np.dtype[Any]] = {
    Precision.FLOAT32: np.dtype("<f4"),
    Precision.FLOAT64: np.dtype("<f8"),
}
# Reads a tensor by name, type and checksum.
ReadTensor: TypeAlias = Callable[[str, np.dtype[Any], str], npt.NDArray[Any]]


class VectorsWriter:
    """Appends a machine's vectors to a checkpoint, shard by shard; to be used within `VectorMachine.durable`."""

    def __init__(self, machine: VectorMachine, file: Writable, lengths: Mapping[int, int]) -> None:
        """`lengths` are the shards' numbers of parameters, in the order in which they will come."""
        self._machine = machine
        self._state = machine.state()
        kept = self._state.standing.kept
        names = [(shard_id, name) for shard_id in lengths for name in kept]
        self._file = TensorFile(
            file,
            {_name(shard_id, name): (lengths[shard_id],) for shard_id, name in names},
            dtypes={_name(shard_id, name): _DTYPES[kept[name]] for shard_id, name in names},
        )
        self._checksums: dict[str, str] = {}

    def add(self, shard_id: int) -> None:
        """Writes the vectors of the next shard."""
        for name, values in self._machine.vectors_to_keep(shard_id).items():
            self._file.write(_name(shard_id, name), values)
            self._checksums[_name(shard_id, name)] = checksum_of(values)

    def entry(self) -> dict[str, Any]:
        """What the manifest says of it, once all shards are written."""
        state, standing = self._state, self._state.standing
        return {
            "coordinator_epoch": state.coordinator_epoch,
            "iteration": state.iteration,
            "state": state.text,
            "vectors": {name: precision.name for name, precision in standing.vectors.items()},
            "history": {"oldest": standing.oldest, "newest": standing.newest},
            "checksums": self._checksums,
        }


def machine_state_from(entry: Mapping[str, Any]) -> MachineState:
    """Returns what the manifest tells of a machine, without the vectors."""
    history = entry["history"]
    vectors = {name: Precision[precision] for name, precision in entry["vectors"].items()}
    standing = Standing(vectors, history["oldest"], history["newest"])
    return MachineState(entry["coordinator_epoch"], entry["iteration"], entry["state"], standing)


def with_vectors(
    state: MachineState, entry: Mapping[str, Any], shard_ids: Iterable[int], read: ReadTensor
) -> MachineState:
    """Returns the state with the vectors that the manifest's entry names, as `read` gives them."""
    vectors = {
        shard_id: {
            name: read(_name(shard_id, name), _DTYPES[precision], entry["checksums"][_name(shard_id, name)])
            for name, precision in state.standing.kept.items()
        }
        for shard_id in shard_ids
    }
    return dataclasses.replace(state, vectors=vectors)


def _name(shard_id: int, vector: str) -> str:
    return f"shard-{shard_id:06d}.{vector}"
