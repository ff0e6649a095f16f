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
import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

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


class Writable(Protocol):
    def write(self, data: bytes | memoryview, /) -> Any: ...


FLOAT32 = np.dtype("<f4")


class TensorFile:
    """Writes a safetensors file of float32 tensors piece by piece: a model is never in memory twice.

    The format: 8 bytes little-endian length of the header, the header in JSON (name to dtype, shape, offsets), padded
    with spaces to a multiple of 8, then the tensors' bytes in the order of the header, without holes.
    """

    def __init__(
        self,
        file: Writable,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        metadata: Mapping[str, str] | None = None,
    ):
        self._file = file
        self._sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        self._missing = self._expected()
        self._name, self._left = next(self._missing, ("", 0))
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for name, shape in shapes.items():
            end = offset + FLOAT32.itemsize * self._sizes[name]
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, values: npt.NDArray[Any]) -> None:
        """Append values of the named tensor, all or the next part of them."""
        if not values.size:
            return
        assert name == self._name, f"{self._name!r} comes next, not {name!r}"
        assert values.size <= self._left, f"{name!r} has {self._left} values left, not {values.size}"
        self._file.write(np.ascontiguousarray(values, dtype=FLOAT32).reshape(-1).data.cast("B"))
        self._left -= values.size
        if not self._left:
            self._name, self._left = next(self._missing, ("", 0))

    @property
    def complete(self) -> bool:
        """Whether every value was written."""
        return not self._name

    def _expected(self) -> Iterator[tuple[str, int]]:
        # Tensors without values are never written.
        return ((name, size) for name, size in self._sizes.items() if size)


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


def _write_manifest(path: Path, body: dict[str, Any], disk: Disk) -> None:
    manifest = {
        "format": "pyps checkpoint",
        "format_version": FORMAT_VERSION,
        "software": f"pyps {__version__}",
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        **body,
    }
    manifest["checksum"] = _checksum(manifest)
    with disk.create(path / MANIFEST) as file:
        disk.write(file, json.dumps(manifest, indent=1).encode())
        disk.sync(file)


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
            self._files: dict[str, int] = manifest["files"]
            self._work: dict[str, Any] | None = manifest.get("work")
            self._machine: dict[str, Any] | None = manifest.get("vector_machine")
            self._machine_state = None if self._machine is None else _machine_state(self._machine)
        except (KeyError, TypeError, ValueError, PypsError) as error:
            raise CheckpointDamaged(f"{path / MANIFEST} cannot be understood: {error!r}") from None
        for name, size in self._files.items():
            _require_size(path / name, size)

    @property
    def shard_ids(self) -> tuple[int, ...]:
        return tuple(self._shards)

    @property
    def versions(self) -> dict[int, int]:
        return {shard_id: shard["version"] for shard_id, shard in self._shards.items()}

    @property
    def version_max(self) -> int:
        return max((shard["version"] for shard in self._shards.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """The size of all files but the manifest."""
        return sum(self._files.values())

    def parameters(self) -> Iterator[tuple[int, Floats]]:
        """Yield each shard's number and parameters, verified."""
        with _opened(self.path / PARAMETERS) as tensors:
            for shard_id, shard in self._shards.items():
                yield shard_id, self._array(tensors, PARAMETERS, _name(shard_id), shard["checksums"]["parameters"])

    def load(self) -> RestoredRun:
        """Read and verify everything. Raises CheckpointDamaged."""
        parameters = dict(self.parameters())
        slots = self._slots()
        states = {
            shard_id: self._state(shard, parameters[shard_id], slots[shard_id], line)
            for (shard_id, shard), line in zip(self._shards.items(), self._ledger_lines(), strict=True)
        }
        return RestoredRun(self.header, states, self._work, self._machine_with_vectors())

    def _state(self, shard: Mapping[str, Any], parameters: Floats, slots: dict[str, Floats], line: bytes) -> ShardState:
        if zlib.crc32(line) != int(shard["checksums"]["ledger"], 16):
            raise CheckpointDamaged(
                f"{self.path / LEDGER} holds other bytes for shard {shard['shard_id']} than were written"
            )
        plain = json.loads(line)
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
        path, place = self.path / name, shard[Path(name).stem]
        try:
            with path.open("rb") as file:
                file.seek(place["offset"])
                data = file.read(place["bytes"])
        except OSError as error:
            raise CheckpointDamaged(f"{path} cannot be read: {error.strerror}") from None
        if zlib.crc32(data) != int(shard["checksums"][path.stem], 16):
            raise CheckpointDamaged(f"{path} holds other bytes for shard {shard['shard_id']} than were written")
        return data

    def _slots(self) -> dict[int, dict[str, Floats]]:
        names = find(self.header.optimizer.rule).slot_names
        if not names:
            return {shard_id: {} for shard_id in self._shards}
        with _opened(self.path / SLOTS) as tensors:
            return {
                shard_id: {
                    name: self._array(tensors, SLOTS, _name(shard_id, name), shard["checksums"][name]) for name in names
                }
                for shard_id, shard in self._shards.items()
            }

    def _machine_with_vectors(self) -> MachineState | None:
        if self._machine is None or self._machine_state is None:
            return None
        checksums = self._machine["checksums"]
        with _opened(self.path / VECTORS) as tensors:
            vectors = {
                shard_id: {
                    name: self._array(tensors, VECTORS, full := _name(shard_id, name), checksums[full])
                    for name in self._machine_state.table.kept
                }
                for shard_id in self._shards
            }
        return dataclasses.replace(self._machine_state, vectors=vectors)

    def _array(self, tensors: TensorReader, file_name: str, name: str, checksum: str) -> Floats:
        try:
            values = tensors.read(name)
        except (OSError, ValueError) as error:
            raise CheckpointDamaged(f"{self.path / file_name} does not give {name}: {error}") from None
        found = checksum_of(values)
        if found != checksum:
            raise CheckpointDamaged(
                f"{self.path / file_name} holds {name} with checksum {found}, written was {checksum}"
            )
        return values

    def _ledger_lines(self) -> list[bytes]:
        try:
            lines = (self.path / LEDGER).read_bytes().splitlines()
        except OSError as error:
            raise CheckpointDamaged(f"{self.path / LEDGER} cannot be read: {error.strerror}") from None
        if len(lines) != len(self._shards):
            raise CheckpointDamaged(f"{self.path / LEDGER} has {len(lines)} lines for {len(self._shards)} shards")
        return lines


@dataclass(frozen=True, slots=True)
class Written:
    """The size of a checkpoint, and the version of each shard in it."""

    num_bytes: int
    versions: Mapping[int, int]


def write(path: Path, snapshot: Snapshot, *, disk: Disk) -> Written:
    """Write a checkpoint's files into an empty folder, the manifest last; return when they are on the disk.

    Shards are copied one at a time, each under its lock, and written before the next: they may be of different
    moments, as asynchronous workers see them anyway, and memory grows by one shard. A coordinator's vectors are of one
    iteration on all shards, and so are the parameters then.
    """
    header, shards, machine = snapshot.header, snapshot.shards, snapshot.machine
    # A machine that no coordinator has used has nothing to keep.
    machine = machine if machine is not None and machine.coordinator_epoch else None
    slot_names = find(header.optimizer.rule).slot_names
    names = [PARAMETERS, *([SLOTS] if slot_names else []), LEDGER, RECEIPTS, PENDING]
    names += [VECTORS] if machine else []
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(disk.create(path / name)) for name in names}
        if machine is not None:
            stack.enter_context(machine.durable())
        writer = _Writer(header, shards, files, disk, machine)
        entries = [writer.add(shard_id, shard) for shard_id, shard in shards.items()]
        for file in files.values():
            disk.sync(file)
        sizes = {name: file.tell() for name, file in files.items()}
    body = {**header.to_json(), "shards": entries, "files": sizes, **writer.machine_entry()}
    if snapshot.work is not None:
        # As it will be read: the manifest's checksum is of that.
        body["work"] = json.loads(json.dumps(snapshot.work))
    _write_manifest(path, body, disk)
    return Written(sum(sizes.values()), {entry["shard_id"]: entry["version"] for entry in entries})


class _Writer:
    """Appends shards to a checkpoint's files, in their order."""

    def __init__(
        self,
        header: RunHeader,
        shards: Mapping[int, Store],
        files: Mapping[str, BinaryIO],
        disk: Disk,
        machine: VectorMachine | None,
    ):
        self._files = files
        self._disk = disk
        self._machine = machine
        self._state = None if machine is None else machine.state()
        self._vector_checksums: dict[str, str] = {}

        def tensors(file: str, *arrays: str, **options: Any) -> TensorFile:
            shapes = {_name(i, array): (shard.length,) for i, shard in shards.items() for array in arrays}
            return TensorFile(_Appender(disk, files[file]), shapes, **options)

        self._parameters = tensors(PARAMETERS, "", metadata={"format": "pyps shards", "run_id": header.run_id})
        self._slots = tensors(SLOTS, *find(header.optimizer.rule).slot_names) if SLOTS in files else None
        self._vectors = None if self._state is None else tensors(VECTORS, *self._state.table.kept)

    def machine_entry(self) -> dict[str, Any]:
        """Return what the manifest says of a coordinator's vectors, once all shards are written."""
        if self._state is None:
            return {}
        state, table = self._state, self._state.table
        entry = {
            "coordinator_epoch": state.coordinator_epoch,
            "iteration": state.iteration,
            "state": state.text,
            "vectors": sorted(table.names),
            "history": {"oldest": table.oldest, "newest": table.newest},
            "checksums": self._vector_checksums,
        }
        return {"vector_machine": entry}

    def add(self, shard_id: int, shard: Store) -> dict[str, Any]:
        """Write the next shard and return its entry in the manifest."""
        state = shard.state()
        parameters = state.parameters
        if self._machine is not None and self._vectors is not None:
            for name, values in self._machine.vectors_to_keep(shard_id).items():
                self._vectors.write(_name(shard_id, name), values)
                self._vector_checksums[_name(shard_id, name)] = checksum_of(values)
            # What the shard holds may be a trial: the accepted point is what a restored run goes on from.
            point = self._machine.parameters_to_keep(shard_id)
            parameters = parameters if point is None else point
        self._parameters.write(_name(shard_id), parameters)
        checksums = {"parameters": checksum_of(parameters)}
        for name, slot in state.slots.items():
            assert self._slots is not None
            self._slots.write(_name(shard_id, name), slot)
            checksums[name] = checksum_of(slot)
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


def _machine_state(entry: Mapping[str, Any]) -> MachineState:
    history = entry["history"]
    table = VectorTable(frozenset(entry["vectors"]), history["oldest"], history["newest"])
    return MachineState(entry["coordinator_epoch"], entry["iteration"], entry["state"], table)


class _Appender:
    def __init__(self, disk: Disk, file: BinaryIO):
        self._disk = disk
        self._file = file

    def write(self, data: bytes | memoryview, /) -> None:
        self._disk.write(self._file, data)


def _name(shard_id: int, array: str = "") -> str:
    return f"shard-{shard_id:06d}" + (f".{array}" if array else "")


def _require_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error.strerror}") from None
    if found != size:
        raise CheckpointDamaged(f"{path} has {found} bytes, written were {size}")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TensorReader]:
    with contextlib.ExitStack() as stack:
        try:
            tensors = TensorReader(stack.enter_context(path.open("rb")))
        except (OSError, ValueError) as error:
            raise CheckpointDamaged(f"{path} cannot be read: {error}") from None
        yield tensors
