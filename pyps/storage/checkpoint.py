"""One checkpoint of one server: a folder with its shards, complete or worthless.

checkpoint-00000007/
  parameters.safetensors   the shards' parameters, float32, by name "shard-000012"
  slots.safetensors        the optimizer's arrays: "shard-000012.accumulator"; if the rule has any
  ledger.jsonl             one line a shard: whose pushes were answered, and which gradients still wait
  receipts.bin             how they were answered, end to end in the order of the lines, packed by `core/ledger.py`
  pending.bin              the payloads of the gradients that wait, likewise
  vectors.safetensors      a coordinator's gradient and history: "shard-000012.g", "shard-000012.s7"; if there was one
  manifest.json            written last: everything else, and the checksums of all this

The gradient at the accepted point and the history are what a restarted coordinator cannot compute again. The accepted
point itself is the shards' parameters here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pyps import __version__
from pyps.core.arrays import Floats, aligned_zeros
from pyps.core.ledger import LedgerState
from pyps.core.rules import find
from pyps.core.store import ShardState, Store
from pyps.core.vectors.machine import MachineState, VectorMachine
from pyps.core.vectors.program import VectorTable
from pyps.run_header import RestoredRun, RunHeader, Snapshot
from pyps.storage.disk import Disk
from pyps.storage.plain import checksum_of, contribution_from_plain, contribution_to_plain, split_payloads
from pyps_wire.errors import PypsError

FLOAT32 = np.dtype("<f4")


def tensors_header(lengths: Mapping[str, int], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the beginning of a safetensors file; the values of its float32 tensors follow in this order.

    The format: 8 bytes little-endian length of the header, the header in JSON (name to dtype, shape, offsets), padded
    with spaces to a multiple of 8, then the tensors' bytes in the order of the header, without holes.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, length in lengths.items():
        end = offset + FLOAT32.itemsize * length
        header[name] = {"dtype": "F32", "shape": [length], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


# As in the library.
_HEADER_BYTES_MAX = 100_000_000


class TensorReader:
    """Reads tensors of a safetensors file straight into arrays as shards need them.

    The library would map the file as well, which counts as the model's memory once more.
    """

    def __init__(self, file: BufferedIOBase):
        """Read the header. Raises ValueError where it is none."""
        self._file = file
        size = int.from_bytes(file.read(8), "little")
        if size > _HEADER_BYTES_MAX:
            raise ValueError(f"a header of {size} bytes")
        try:
            header = json.loads(file.read(size))
        except RecursionError:
            raise ValueError("a header that is nested too deeply") from None
        if not isinstance(header, dict):
            raise ValueError("a header that is no object")
        self._header = header
        self._start = 8 + size

    def read(self, name: str) -> Floats:
        """Return the values of a float32 tensor in one row. Raises ValueError where the file does not hold them."""
        try:
            kind, (begin, end) = self._header[name]["dtype"], self._header[name]["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise ValueError("there is no such tensor") from None
        size = FLOAT32.itemsize
        if kind != "F32" or not (type(begin) is type(end) is int and 0 <= begin <= end and (end - begin) % size == 0):
            raise ValueError(f"it is {kind!r} from {begin!r} to {end!r}, not float32")
        self._file.seek(0, 2)
        if self._start + end > self._file.tell():
            raise ValueError("the file ends before it")
        values = aligned_zeros((end - begin) // size)
        self._file.seek(self._start + begin)
        if self._file.readinto(values.view(np.uint8).data) != end - begin:
            raise ValueError("the file ends before it")
        return values


FORMAT_VERSION = 4
MANIFEST = "manifest.json"


class CheckpointError(PypsError):
    """A checkpoint cannot be written or used."""

    status = "FAILED_PRECONDITION"


class CheckpointDamaged(CheckpointError):
    """A checkpoint is incomplete or not what was written. An older one may be whole."""

    status = "DATA_LOSS"


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointDamaged(f"{path} has no {MANIFEST}: it was never completed") from None
    except OSError as error:
        raise CheckpointDamaged(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{file} is no JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.pop("checksum", None) != _checksum(manifest):
        raise CheckpointDamaged(f"{file} is not what was written: its checksum differs")
    if manifest["format_version"] != FORMAT_VERSION:
        raise CheckpointDamaged(
            f"{path} has format version {manifest['format_version']}, this software reads {FORMAT_VERSION}"
        )
    return manifest


def _checksum(manifest: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):08x}"


PARAMETERS = "parameters.safetensors"
SLOTS = "slots.safetensors"
LEDGER = "ledger.jsonl"
RECEIPTS = "receipts.bin"
PENDING = "pending.bin"
VECTORS = "vectors.safetensors"


class Checkpoint:
    """A checkpoint on disk whose manifest was found whole; its arrays are verified when they are read."""

    def __init__(self, path: Path):
        """Read the manifest. Raises CheckpointDamaged."""
        self.path = path
        manifest = _read_manifest(path)
        try:
            self.header = RunHeader.from_json(manifest)
            self.written: str = manifest["written"]
            self._shards: dict[int, dict[str, Any]] = {shard["shard_id"]: shard for shard in manifest["shards"]}
            self._work: dict[str, Any] | None = manifest.get("work")
            machine = manifest.get("vector_machine")
            self._machine = None if machine is None else _machine_state(machine)
            # Of each tensor, by its name.
            self._checksums: dict[str, str] = {} if machine is None else machine["checksums"]
            for shard_id, shard in self._shards.items():
                of_shard = {"": shard["checksums"]["parameters"], **shard["checksums"]}
                self._checksums |= {_name(shard_id, array): checksum for array, checksum in of_shard.items()}
            sizes: dict[str, int] = manifest["files"]
        except (KeyError, TypeError, ValueError, PypsError) as error:
            raise CheckpointDamaged(f"{path / MANIFEST} cannot be understood: {error!r}") from None
        for name, size in sizes.items():
            with _opened(path / name) as file:
                found = file.seek(0, os.SEEK_END)
            if found != size:
                raise CheckpointDamaged(f"{path / name} has {found} bytes, written were {size}")

    @property
    def versions(self) -> dict[int, int]:
        return {shard_id: shard["version"] for shard_id, shard in self._shards.items()}

    @property
    def version_max(self) -> int:
        return max(self.versions.values(), default=0)

    def parameters(self) -> Iterator[tuple[int, Floats]]:
        """Yield each shard's number and parameters, verified."""
        for shard_id, arrays in self._arrays(PARAMETERS, [""]):
            yield shard_id, arrays[""]

    def load(self) -> RestoredRun:
        """Read and verify everything. Raises CheckpointDamaged."""
        parameters = dict(self.parameters())
        slot_names = find(self.header.optimizer.rule).slot_names
        slots = dict(self._arrays(SLOTS, slot_names)) if slot_names else {}
        machine = self._machine
        if machine is not None:
            machine = dataclasses.replace(machine, vectors=dict(self._arrays(VECTORS, machine.table.kept)))
        with _opened(self.path / LEDGER) as file:
            lines = file.read().splitlines()
        if len(lines) != len(self._shards):
            raise CheckpointDamaged(f"{self.path / LEDGER} has {len(lines)} lines for {len(self._shards)} shards")
        states = {
            shard_id: self._state(shard, parameters[shard_id], slots.get(shard_id, {}), line)
            for (shard_id, shard), line in zip(self._shards.items(), lines, strict=True)
        }
        return RestoredRun(self.header, states, self._work, machine)

    def _state(self, shard: Mapping[str, Any], parameters: Floats, slots: dict[str, Floats], line: bytes) -> ShardState:
        plain = json.loads(self._verified(line, shard, LEDGER))
        pending, payloads = plain["pending"], split_payloads(plain["pending"], self._bytes(shard, PENDING))
        return ShardState(
            version=shard["version"],
            parameters=parameters,
            slots=slots,
            ledger=LedgerState.from_plain(plain["ledger"], self._bytes(shard, RECEIPTS)),
            pending=tuple(map(contribution_from_plain, pending, payloads)),
            examples=shard["examples"],
            learning_rate=shard["learning_rate"],
            momentum=shard["momentum"],
        )

    def _bytes(self, shard: Mapping[str, Any], name: str) -> bytes:
        """Return the bytes that the file holds for the shard, verified."""
        place = shard[Path(name).stem]
        with _opened(self.path / name) as file:
            file.seek(place["offset"])
            return self._verified(file.read(place["bytes"]), shard, name)

    def _verified(self, data: bytes, shard: Mapping[str, Any], name: str) -> bytes:
        if zlib.crc32(data) != int(shard["checksums"][Path(name).stem], 16):
            raise CheckpointDamaged(
                f"{self.path / name} holds other bytes for shard {shard['shard_id']} than were written"
            )
        return data

    def _arrays(self, file_name: str, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Floats]]]:
        """Yield each shard's number and its arrays in the file by name, verified."""
        with _opened(self.path / file_name) as file:
            tensors = TensorReader(file)
            for shard_id in self._shards:
                yield shard_id, {name: self._array(tensors, file_name, _name(shard_id, name)) for name in names}

    def _array(self, tensors: TensorReader, file_name: str, name: str) -> Floats:
        try:
            values = tensors.read(name)
        except (OSError, ValueError) as error:
            raise CheckpointDamaged(f"{self.path / file_name} does not give {name}: {error}") from None
        found, checksum = checksum_of(values), self._checksums[name]
        if found != checksum:
            raise CheckpointDamaged(
                f"{self.path / file_name} holds {name} with checksum {found}, written was {checksum}"
            )
        return values


def write(path: Path, snapshot: Snapshot, *, disk: Disk) -> tuple[int, dict[int, int]]:
    """Write a checkpoint's files into an empty folder, the manifest last, and wait until they are on the disk.

    Return the size in bytes of all files but the manifest, and each shard's version.

    Shards are copied one at a time, each under its lock, and written before the next: they may be of different
    moments, as asynchronous workers see them anyway, and memory grows by one shard. A coordinator's vectors are of one
    iteration on all shards, and so are the parameters then.
    """
    # A machine that no coordinator has used has nothing to keep.
    machine = snapshot.machine if snapshot.machine is not None and snapshot.machine.coordinator_epoch else None
    arrays: dict[str, Sequence[str]] = {PARAMETERS: [""]}
    if slot_names := find(snapshot.header.optimizer.rule).slot_names:
        arrays[SLOTS] = slot_names
    with contextlib.ExitStack() as stack:
        state = None
        if machine is not None:
            stack.enter_context(machine.durable())
            state = machine.state()
            arrays[VECTORS] = state.table.kept
        files = {name: stack.enter_context(disk.create(path / name)) for name in (*arrays, LEDGER, RECEIPTS, PENDING)}
        for name, of_file in arrays.items():
            lengths = {_name(i, array): shard.length for i, shard in snapshot.shards.items() for array in of_file}
            run = {"format": "pyps shards", "run_id": snapshot.header.run_id} if name == PARAMETERS else None
            disk.write(files[name], tensors_header(lengths, run))
        writer = _Writer(files, disk, machine)
        entries = [writer.add(shard_id, shard) for shard_id, shard in snapshot.shards.items()]
        for file in files.values():
            disk.sync(file)
        sizes = {name: file.tell() for name, file in files.items()}
    manifest = {
        "format": "pyps checkpoint",
        "format_version": FORMAT_VERSION,
        "software": f"pyps {__version__}",
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        **snapshot.header.to_json(),
        "shards": entries,
        "files": sizes,
    }
    if state is not None:
        manifest["vector_machine"] = _machine_entry(state, writer.vector_checksums)
    if snapshot.work is not None:
        # As it will be read: the manifest's checksum is of that.
        manifest["work"] = json.loads(json.dumps(snapshot.work))
    manifest["checksum"] = _checksum(manifest)
    with disk.create(path / MANIFEST) as file:
        disk.write(file, json.dumps(manifest, indent=1).encode())
        disk.sync(file)
    return sum(sizes.values()), {entry["shard_id"]: entry["version"] for entry in entries}


class _Writer:
    """Appends shards to a checkpoint's files, in their order."""

    def __init__(self, files: Mapping[str, BinaryIO], disk: Disk, machine: VectorMachine | None):
        self._files = files
        self._disk = disk
        self._machine = machine
        self.vector_checksums: dict[str, str] = {}

    def add(self, shard_id: int, shard: Store) -> dict[str, Any]:
        """Write the next shard and return its entry in the manifest."""
        state = shard.state()
        parameters = state.parameters
        if self._machine is not None:
            for name, values in self._machine.vectors_to_keep(shard_id).items():
                self.vector_checksums[_name(shard_id, name)] = self._append(VECTORS, values)
            # What the shard holds may be a trial: the accepted point is what a restored run goes on from.
            point = self._machine.parameters_to_keep(shard_id)
            parameters = parameters if point is None else point
        checksums = {"parameters": self._append(PARAMETERS, parameters)}
        for name, slot in state.slots.items():
            checksums[name] = self._append(SLOTS, slot)
        ledger, receipts = state.ledger.to_plain()
        pending = [contribution_to_plain(contribution) for contribution in state.pending]
        line = json.dumps({"ledger": ledger, "pending": pending}).encode()
        self._disk.write(self._files[LEDGER], line + b"\n")
        checksums["ledger"] = f"{zlib.crc32(line):08x}"
        places = {}
        payloads = [contribution.gradient.payload for contribution in state.pending]
        for name, pieces in ((RECEIPTS, [receipts]), (PENDING, payloads)):
            file, key, checksum = self._files[name], Path(name).stem, 0
            offset = file.tell()
            for piece in pieces:
                self._disk.write(file, piece)
                checksum = zlib.crc32(piece, checksum)
            places[key], checksums[key] = {"offset": offset, "bytes": file.tell() - offset}, f"{checksum:08x}"
        return {
            "shard_id": shard_id,
            "version": state.version,
            "num_parameters": parameters.size,
            "examples": state.examples,
            "learning_rate": state.learning_rate,
            "momentum": state.momentum,
            **places,
            "checksums": checksums,
        }

    def _append(self, name: str, values: Floats) -> str:
        """Write an array and return its checksum."""
        self._disk.write(self._files[name], np.ascontiguousarray(values, dtype=FLOAT32).data.cast("B"))
        return checksum_of(values)


def _machine_entry(state: MachineState, checksums: Mapping[str, str]) -> dict[str, Any]:
    """Return what the manifest says of a coordinator's vectors."""
    return {
        "coordinator_epoch": state.coordinator_epoch,
        "iteration": state.iteration,
        "state": state.text,
        "vectors": sorted(state.table.names),
        "history": {"oldest": state.table.oldest, "newest": state.table.newest},
        "checksums": checksums,
    }


def _machine_state(entry: Mapping[str, Any]) -> MachineState:
    history = entry["history"]
    table = VectorTable(frozenset(entry["vectors"]), history["oldest"], history["newest"])
    return MachineState(entry["coordinator_epoch"], entry["iteration"], entry["state"], table)


def _name(shard_id: int, array: str = "") -> str:
    return f"shard-{shard_id:06d}" + (f".{array}" if array else "")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file of a checkpoint; raise CheckpointDamaged where the file, or what the block reads, cannot be read."""
    try:
        with path.open("rb") as file:
            yield file
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointDamaged(f"{path} cannot be read: {reason}") from None
