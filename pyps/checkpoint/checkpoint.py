"""One checkpoint of one server: a folder with its shards, complete or worthless.

checkpoint-00000007/
  parameters.safetensors   the shards' parameters, float32, by name "shard-000012"
  slots.safetensors        the optimizer's arrays beside them: "shard-000012.accumulator"; if the rule has any
  ledger.jsonl             one line a shard: which pushes were answered and how, and which gradients still wait
  pending.bin              the payloads of the gradients that wait, end to end in the order of the lines
  manifest.json            written last: everything else, and the checksums of all this
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from pyps import __version__
from pyps.checkpoint.disk import Disk
from pyps.checkpoint.tensor_file import TensorFile, TensorReader
from pyps.checksum import checksum_of
from pyps.core.aggregation import Contribution
from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour, BehaviourTexts
from pyps.core.ledger import LedgerState
from pyps.core.shard import Shard, ShardState
from pyps.core.update_rules import find
from pyps.plain import contribution_from_plain, contribution_to_plain, split_payloads
from pyps.run.settings import RuleSettings
from pyps_wire.errors import PypsError
from pyps_wire.partition import Model, Tensor

FORMAT_VERSION = 2
PARAMETERS = "parameters.safetensors"
SLOTS = "slots.safetensors"
LEDGER = "ledger.jsonl"
PENDING = "pending.bin"
MANIFEST = "manifest.json"


class CheckpointError(PypsError):
    """Raised when a checkpoint cannot be written or used; the message says which and why."""

    status = "FAILED_PRECONDITION"


class CheckpointDamaged(CheckpointError):
    """Raised when a checkpoint is incomplete or not what was written. An older one may be whole."""

    status = "DATA_LOSS"


@dataclass(frozen=True)
class RunHeader:
    """What a run is, apart from its shards."""

    run_id: str
    epoch: int
    server_index: int
    num_servers: int
    model: Model
    optimizer: RuleSettings
    # As it is in force, and as the server was told at its start: a run may be changed while it goes on.
    behaviour: BehaviourTexts
    told: BehaviourTexts

    def with_epoch(self, epoch: int) -> RunHeader:
        """Returns the same header with another epoch."""
        return dataclasses.replace(self, epoch=epoch)

    def to_json(self) -> dict[str, Any]:
        """Returns the header in plain lists, dictionaries, numbers and strings."""
        tensors = [{"name": t.name, "shape": list(t.shape), "group": t.group} for t in self.model.tensors]
        groups = [dict(group) for group in self.optimizer.groups]
        return {
            "run_id": self.run_id,
            "epoch": self.epoch,
            "server_index": self.server_index,
            "num_servers": self.num_servers,
            "model": {"shard_size": self.model.shard_size, "tensors": tensors},
            "optimizer": {"rule": self.optimizer.rule, "groups": groups},
            "behaviour": dict(self.behaviour),
            "told": dict(self.told),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> RunHeader:
        """Returns the header that `to_json` gave."""
        model = plain["model"]
        tensors = tuple(Tensor(t["name"], tuple(t["shape"]), t["group"]) for t in model["tensors"])
        optimizer = plain["optimizer"]
        return cls(
            run_id=plain["run_id"],
            epoch=plain["epoch"],
            server_index=plain["server_index"],
            num_servers=plain["num_servers"],
            model=Model(tensors, model["shard_size"]),
            optimizer=RuleSettings.make(optimizer["rule"], tuple(optimizer["groups"])),
            behaviour=Behaviour.parse(**plain["behaviour"]).texts,
            told=Behaviour.parse(**plain["told"]).texts,
        )


@dataclass(frozen=True)
class RestoredRun:
    """A run as read from a checkpoint. `header.epoch` is the last one in use: serve under the next.

    The run that goes on from it takes its arrays over.
    """

    header: RunHeader
    shards: Mapping[int, ShardState]


class Checkpoint:
    """A checkpoint on disk whose manifest was found whole; its arrays are verified when they are read."""

    def __init__(self, path: Path):
        """Reads the manifest. Raises CheckpointDamaged when it is missing or not what was written."""
        self.path = path
        manifest = _read_manifest(path)
        try:
            self.header = RunHeader.from_json(manifest)
            self.written: str = manifest["written"]
            self._shards: dict[int, dict[str, Any]] = {shard["shard_id"]: shard for shard in manifest["shards"]}
            self._files: dict[str, int] = manifest["files"]
        except (KeyError, TypeError, ValueError, PypsError) as error:
            raise CheckpointDamaged(f"{path / MANIFEST} cannot be understood: {error!r}") from None
        for name, size in self._files.items():
            _require_size(path / name, size)

    @property
    def shard_ids(self) -> tuple[int, ...]:
        """The shards that are in here."""
        return tuple(self._shards)

    @property
    def versions(self) -> dict[int, int]:
        """The version of each shard, by the shard's id."""
        return {shard_id: shard["version"] for shard_id, shard in self._shards.items()}

    @property
    def version_max(self) -> int:
        """The largest version among the shards."""
        return max((shard["version"] for shard in self._shards.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """The size of all files that the manifest names."""
        return sum(self._files.values())

    def parameters(self) -> Iterator[tuple[int, Floats]]:
        """Yields each shard's number and parameters, verified."""
        with _opened(self.path / PARAMETERS) as tensors:
            for shard_id, shard in self._shards.items():
                yield (
                    shard_id,
                    self._array(tensors, PARAMETERS, _name(shard_id), shard["checksums"]["parameters"]),
                )

    def load(self) -> RestoredRun:
        """Reads and verifies everything. Raises CheckpointDamaged naming what is wrong."""
        parameters = dict(self.parameters())
        slots = self._slots()
        states = {
            shard_id: self._state(shard, parameters[shard_id], slots[shard_id], line)
            for (shard_id, shard), line in zip(self._shards.items(), self._ledger_lines(), strict=True)
        }
        return RestoredRun(self.header, states)

    def _state(self, shard: Mapping[str, Any], parameters: Floats, slots: dict[str, Floats], line: bytes) -> ShardState:
        if zlib.crc32(line) != int(shard["checksums"]["ledger"], 16):
            raise CheckpointDamaged(
                f"{self.path / LEDGER} holds other bytes for shard {shard['shard_id']} than were written"
            )
        plain = json.loads(line)
        return ShardState(
            version=shard["version"],
            parameters=parameters,
            slots=slots,
            ledger=LedgerState.from_json(plain["ledger"]),
            pending=self._pending(shard, plain["pending"]),
            examples=shard["examples"],
            learning_rate=shard["learning_rate"],
        )

    def _pending(self, shard: Mapping[str, Any], plains: Sequence[Mapping[str, Any]]) -> tuple[Contribution, ...]:
        place = shard["pending"]
        try:
            with (self.path / PENDING).open("rb") as file:
                file.seek(place["offset"])
                data = file.read(place["bytes"])
        except OSError as error:
            raise CheckpointDamaged(f"{self.path / PENDING} cannot be read: {error.strerror}") from None
        if zlib.crc32(data) != int(shard["checksums"]["pending"], 16):
            raise CheckpointDamaged(
                f"{self.path / PENDING} holds other bytes for shard {shard['shard_id']} than were written"
            )
        payloads = split_payloads(plains, data)
        return tuple(contribution_from_plain(plain, payload) for plain, payload in zip(plains, payloads, strict=True))

    def _slots(self) -> dict[int, dict[str, Floats]]:
        names = find(self.header.optimizer.rule).slot_names
        if not names:
            return {shard_id: {} for shard_id in self._shards}
        with _opened(self.path / SLOTS) as tensors:
            return {
                shard_id: {
                    name: self._array(tensors, SLOTS, f"{_name(shard_id)}.{name}", shard["checksums"][name])
                    for name in names
                }
                for shard_id, shard in self._shards.items()
            }

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


def write(path: Path, header: RunHeader, shards: Mapping[int, Shard], *, disk: Disk) -> None:
    """Writes a checkpoint's files into an empty folder, the manifest last; returns when they are on the disk.

    Shards are copied one at a time, each under its lock, and written before the next: they may be of
    different moments, which is what asynchronous workers see anyway, and memory grows by one shard.
    """
    slot_names = find(header.optimizer.rule).slot_names
    names = [PARAMETERS, *([SLOTS] if slot_names else []), LEDGER, PENDING]
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(disk.create(path / name)) for name in names}
        writer = _Writer(header, shards, files, disk)
        entries = [writer.add(shard_id, shard.state()) for shard_id, shard in shards.items()]
        for file in files.values():
            disk.sync(file)
        sizes = {name: file.tell() for name, file in files.items()}
    _write_manifest(path, {**header.to_json(), "shards": entries, "files": sizes}, disk)


class _Writer:
    """Appends shards to a checkpoint's files, in the order in which they were announced."""

    def __init__(self, header: RunHeader, shards: Mapping[int, Shard], files: Mapping[str, BinaryIO], disk: Disk):
        self._files = files
        self._disk = disk
        self._parameters = TensorFile(
            _Appender(disk, files[PARAMETERS]),
            {_name(shard_id): (shard.length,) for shard_id, shard in shards.items()},
            metadata={"format": "pyps shards", "run_id": header.run_id},
        )
        slot_names = find(header.optimizer.rule).slot_names
        shapes = {
            f"{_name(shard_id)}.{name}": (shard.length,) for shard_id, shard in shards.items() for name in slot_names
        }
        self._slots = TensorFile(_Appender(disk, files[SLOTS]), shapes) if slot_names else None
        self._pending_bytes = 0

    def add(self, shard_id: int, state: ShardState) -> dict[str, Any]:
        """Writes the next shard and returns its entry in the manifest."""
        self._parameters.write(_name(shard_id), state.parameters)
        checksums = {"parameters": checksum_of(state.parameters)}
        for name, slot in state.slots.items():
            assert self._slots is not None
            self._slots.write(f"{_name(shard_id)}.{name}", slot)
            checksums[name] = checksum_of(slot)
        line = _ledger_line(state)
        self._disk.write(self._files[LEDGER], line + b"\n")
        checksums["ledger"] = f"{zlib.crc32(line):08x}"
        offset, checksum = self._pending_bytes, 0
        for contribution in state.pending:
            payload = memoryview(contribution.gradient.payload)
            self._disk.write(self._files[PENDING], payload)
            self._pending_bytes += payload.nbytes
            checksum = zlib.crc32(payload, checksum)
        checksums["pending"] = f"{checksum:08x}"
        return {
            "shard_id": shard_id,
            "version": state.version,
            "num_parameters": state.parameters.size,
            "examples": state.examples,
            "learning_rate": state.learning_rate,
            "pending": {"offset": offset, "bytes": self._pending_bytes - offset},
            "checksums": checksums,
        }


class _Appender:
    def __init__(self, disk: Disk, file: BinaryIO):
        self._disk = disk
        self._file = file

    def write(self, data: bytes | memoryview, /) -> None:
        self._disk.write(self._file, data)


def _name(shard_id: int) -> str:
    return f"shard-{shard_id:06d}"


def _ledger_line(state: ShardState) -> bytes:
    pending = [contribution_to_plain(contribution) for contribution in state.pending]
    return json.dumps({"ledger": state.ledger.to_json(), "pending": pending}).encode()


def _write_manifest(path: Path, body: dict[str, Any], disk: Disk) -> None:
    manifest = {
        "format": "pyps checkpoint",
        "format_version": FORMAT_VERSION,
        "software": f"pyps {__version__}",
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        **body,
    }
    manifest["checksum"] = _manifest_checksum(manifest)
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
    except ValueError as error:
        raise CheckpointDamaged(f"{file} is no JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.pop("checksum", None) != _manifest_checksum(manifest):
        raise CheckpointDamaged(f"{file} is not what was written: its checksum differs")
    if manifest["format_version"] != FORMAT_VERSION:
        raise CheckpointDamaged(
            f"{path} has format version {manifest['format_version']}, this software reads {FORMAT_VERSION}"
        )
    return manifest


def _manifest_checksum(manifest: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):08x}"


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
