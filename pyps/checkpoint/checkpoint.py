"""One checkpoint of one server: a folder with its shards, complete or worthless.

checkpoint-00000007/
  parameters.safetensors   the shards' parameters, float32, by name "shard-000012"
  slots.safetensors        the optimizer's arrays beside them: "shard-000012.accumulator"; if the rule has any
  ledger.jsonl             one line a shard: which pushes were answered and how, and which still wait
  manifest.json            written last: everything else, and the checksums of all this
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors
from safetensors import safe_open

from pyps import __version__
from pyps.checkpoint.disk import Disk
from pyps.checkpoint.tensor_file import TensorFile
from pyps.core.arrays import Floats
from pyps.core.ledger import LedgerState
from pyps.core.shard import Shard, ShardState
from pyps.core.update_rules import find
from pyps.plain import contribution_from_plain, contribution_to_plain
from pyps.run.settings import RuleSettings
from pyps_wire.errors import PypsError
from pyps_wire.partition import Model, Tensor

FORMAT_VERSION = 1
PARAMETERS = "parameters.safetensors"
SLOTS = "slots.safetensors"
LEDGER = "ledger.jsonl"
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
    protocol: str
    staleness: str

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
            "protocol": self.protocol,
            "staleness": self.staleness,
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
            protocol=plain["protocol"],
            staleness=plain["staleness"],
        )


@dataclass(frozen=True)
class RestoredRun:
    """A run as read from a checkpoint. `header.epoch` is the last one in use: serve under the next."""

    header: RunHeader
    shards: Mapping[int, ShardState]
    # Examples behind the gradients that each shard took.
    examples: Mapping[int, int]


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
        examples = {shard_id: shard["examples"] for shard_id, shard in self._shards.items()}
        return RestoredRun(self.header, states, examples)

    def _state(self, shard: Mapping[str, Any], parameters: Floats, slots: dict[str, Floats], line: bytes) -> ShardState:
        if zlib.crc32(line) != int(shard["checksums"]["ledger"], 16):
            raise CheckpointDamaged(
                f"{self.path / LEDGER} holds other bytes for shard {shard['shard_id']} than were written"
            )
        plain = json.loads(line)
        pending = tuple(contribution_from_plain(contribution) for contribution in plain["pending"])
        return ShardState(shard["version"], parameters, slots, LedgerState.from_json(plain["ledger"]), pending)

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

    def _array(self, tensors: Any, file_name: str, name: str, checksum: str) -> Floats:
        try:
            values: Floats = tensors.get_tensor(name)
        except safetensors.SafetensorError as error:
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


def write(
    path: Path,
    header: RunHeader,
    shards: Mapping[int, Shard],
    *,
    examples: Mapping[int, int],
    disk: Disk,
) -> None:
    """Writes a checkpoint's files into an empty folder, the manifest last; returns when they are on the disk.

    Shards are copied one at a time, each under its lock, and written before the next: they may be of
    different moments, which is what asynchronous workers see anyway, and memory grows by one shard.
    """
    slot_names = find(header.optimizer.rule).slot_names
    entries = []
    with contextlib.ExitStack() as stack:
        names = [PARAMETERS, *([SLOTS] if slot_names else []), LEDGER]
        files = {name: stack.enter_context(disk.create(path / name)) for name in names}
        parameters = TensorFile(
            _Appender(disk, files[PARAMETERS]),
            {_name(shard_id): (shard.length,) for shard_id, shard in shards.items()},
            metadata={"format": "pyps shards", "run_id": header.run_id},
        )
        slots = None
        if slot_names:
            shapes = {
                f"{_name(shard_id)}.{name}": (shard.length,)
                for shard_id, shard in shards.items()
                for name in slot_names
            }
            slots = TensorFile(_Appender(disk, files[SLOTS]), shapes)
        for shard_id, shard in shards.items():
            state = shard.state()
            parameters.write(_name(shard_id), state.parameters)
            checksums = {"parameters": checksum_of(state.parameters)}
            for name in slot_names:
                assert slots is not None
                slots.write(f"{_name(shard_id)}.{name}", state.slots[name])
                checksums[name] = checksum_of(state.slots[name])
            line = _ledger_line(state)
            disk.write(files[LEDGER], line + b"\n")
            checksums["ledger"] = f"{zlib.crc32(line):08x}"
            entries.append(
                {
                    "shard_id": shard_id,
                    "version": state.version,
                    "num_parameters": shard.length,
                    "examples": examples.get(shard_id, 0),
                    "checksums": checksums,
                }
            )
        for file in files.values():
            disk.sync(file)
        sizes = {name: file.tell() for name, file in files.items()}
    _write_manifest(path, {**header.to_json(), "shards": entries, "files": sizes}, disk)


def checksum_of(values: Floats) -> str:
    """CRC-32 of the values' bytes, in hexadecimal."""
    return f"{zlib.crc32(np.ascontiguousarray(values).data):08x}"


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
def _opened(path: Path) -> Iterator[Any]:
    try:
        tensors = safe_open(str(path), framework="np")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error}") from None
    with tensors as opened:
        yield opened
