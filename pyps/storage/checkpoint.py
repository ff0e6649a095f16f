"""One checkpoint of one server: a manifest that names a file for each shard, complete or worthless.

checkpoint-00000007.json                          the manifest, written last: the run and the checksums of the files
shards/shard-000012.epoch-3.version-70.00000006   a shard's state (`shard_file.py`), as checkpoint 6 wrote it
shards/positions.00000006                         where the workers' data stood (`position_file.py`), likewise

A file is never changed, and what has not moved is not written again: later checkpoints name the same file. A table's
file may have only the rows that were updated since an earlier file, which the manifest names with it.

The gradient at the accepted point and the history are what a restarted coordinator cannot compute again. The accepted
point itself is the shards' parameters here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pyps import __version__
from pyps.core.arrays import Floats
from pyps.core.store import ShardState
from pyps.core.vectors.machine import MachineState, VectorMachine
from pyps.core.vectors.program import VectorTable
from pyps.run_header import PositionsState, RestoredRun, RunHeader, Snapshot
from pyps.storage import position_file
from pyps.storage.disk import Disk
from pyps.storage.object_store import disk_of
from pyps.storage.shard_file import pack, unpack
from pyps_wire.errors import PypsError

FORMAT_VERSION = 6
SHARDS = "shards"
# Of a shard: each one is a pass over its rows when they are read.
FILES_MAX = 16
# More is damage: each life of a server takes one.
EPOCH_MAX = 2**62
_NUMBER_MAX = 2**63 - 1


class CheckpointError(PypsError):
    """A checkpoint cannot be written or used."""

    status = "FAILED_PRECONDITION"


class CheckpointDamaged(CheckpointError):
    """A checkpoint is incomplete or not what was written. An older one may be whole."""

    status = "DATA_LOSS"


class FileEntry(NamedTuple):
    """What a manifest says of a file."""

    file: str
    num_bytes: int
    # CRC-32 of the file.
    checksum: int


class ShardEntry(NamedTuple):
    """What a manifest says of a shard."""

    shard_id: int
    version: int
    file: str
    num_bytes: int
    checksum: int
    # Of a table: the first one has all rows then, each other one those updated since the one before, and so has `file`.
    earlier: tuple[FileEntry, ...] = ()

    @property
    def files(self) -> list[FileEntry]:
        return [*self.earlier, FileEntry(*self[2:5])]


class Checkpoint:
    """A checkpoint whose manifest was found whole; the shards' files are verified when they are read."""

    def __init__(self, path: Path, disk: Disk | None = None):
        """Read the manifest. Raises CheckpointDamaged."""
        self.path = path
        self._disk = disk or disk_of(path)
        manifest = _read_manifest(path, self._disk)
        with _understanding(path):
            self.header = header = RunHeader.from_json(manifest)
            _require_numbers(header.epoch, header.server_index, most=EPOCH_MAX)
            for behaviour in (header.behaviour, header.configured):
                _require_numbers(behaviour["epoch_examples"])
            _require_texts(header.run_id, header.model.name, *(tensor.name for tensor in header.model.tensors))
            self.written: str = manifest["written"]
            _require_texts(self.written)
            shards, self._positions = _entries(manifest)
            self.shards = {entry.shard_id: entry for entry in shards}
            if sorted(self.shards) != [one.shard_id for one in header.partition.of_server(header.server_index)]:
                raise ValueError(f"the shards of server {header.server_index} are others")
            self.work: dict[str, Any] | None = manifest.get("work")
            machine = manifest.get("vector_machine")
            # Without the vectors, which are with the shards.
            self.machine = None if machine is None else _machine_state(machine)

    @property
    def versions(self) -> dict[int, int]:
        return {shard_id: entry.version for shard_id, entry in self.shards.items()}

    @property
    def version_max(self) -> int:
        return max(self.versions.values(), default=0)

    @property
    def iteration(self) -> int:
        """The coordinator's iteration of which everything is; 0 without one."""
        return 0 if self.machine is None else self.machine.iteration

    @property
    def num_bytes(self) -> int:
        """The size of the files."""
        return sum(entry.num_bytes for entry in self._files)

    @property
    def _files(self) -> list[FileEntry]:
        return _files(self.shards.values(), self._positions)

    def require_files(self) -> None:
        """Raise CheckpointDamaged where a file is missing or has another size; reads none."""
        folder = self.path.parent / SHARDS
        try:
            sizes = self._disk.sizes(folder) if self._files else {}
        except OSError as error:
            raise CheckpointDamaged(f"{folder} cannot be listed: {error.strerror}") from None
        for entry in self._files:
            if entry.file not in sizes:
                raise CheckpointDamaged(f"{folder / entry.file} is missing")
            if sizes[entry.file] != entry.num_bytes:
                raise CheckpointDamaged(
                    f"{folder / entry.file} has {sizes[entry.file]} bytes, written were {entry.num_bytes}"
                )

    def read(self) -> Iterator[tuple[int, ShardState, dict[str, Floats]]]:
        """Yield each shard's number, state and a coordinator's vectors, verified. Raises CheckpointDamaged."""
        return ((shard_id, *self.read_shard(shard_id)) for shard_id in self.shards)

    def read_shard(self, shard_id: int) -> tuple[ShardState, dict[str, Floats]]:
        """Return a shard's state and a coordinator's vectors, verified. Raises CheckpointDamaged."""
        entry = self.shards[shard_id]
        rows = None
        for file in entry.files:
            path, data = self._read(file)
            with _understanding(path):
                state, vectors = unpack(data)
                if rows is not None and state.rows is not None:
                    state = dataclasses.replace(state, rows=rows.updated_by(state.rows, num_rows=state.num_rows))
                rows = state.rows
        with _understanding(path):
            sizes = {values.size for values in (state.parameters, *state.slots.values(), *vectors.values())}
            place = self.header.partition.shard(shard_id)
            length = place.length if state.rows is None else 0
            if (sizes, state.version) != ({length}, entry.version) or (
                (state.rows is not None) != (place.group in self.header.model.tables)
            ):
                raise ValueError(f"{sizes} numbers of version {state.version}")
            return state, vectors

    def read_positions(self) -> PositionsState:
        """Return where the workers' data stood, verified. Raises CheckpointDamaged."""
        if self._positions is None:
            return {}
        path, data = self._read(self._positions)
        with _understanding(path):
            return position_file.unpack(data)

    def _read(self, entry: FileEntry) -> tuple[Path, bytes]:
        path = self.path.parent / SHARDS / entry.file
        try:
            data = self._disk.read(path)
        except OSError as error:
            raise CheckpointDamaged(f"{path} cannot be read: {error.strerror}") from None
        if (len(data), zlib.crc32(data)) != (entry.num_bytes, entry.checksum):
            raise CheckpointDamaged(f"{path} holds other bytes than were written")
        return path, data

    def load(self) -> RestoredRun:
        """Read and verify everything. Raises CheckpointDamaged."""
        states, vectors = {}, {}
        for shard_id, state, of_shard in self.read():
            states[shard_id], vectors[shard_id] = state, of_shard
        machine = None if self.machine is None else dataclasses.replace(self.machine, vectors=vectors)
        return RestoredRun(self.header, states, self.work, machine, positions=self.read_positions())


def files_of(path: Path, disk: Disk) -> set[str]:
    """Return the names of the files that a checkpoint needs. Raises CheckpointDamaged."""
    with _understanding(path):
        shards, positions = _entries(_read_manifest(path, disk))
        return {entry.file for entry in _files(shards, positions)}


def _files(shards: Iterable[ShardEntry], positions: FileEntry | None) -> list[FileEntry]:
    return [*(file for entry in shards for file in entry.files), *([] if positions is None else [positions])]


@contextlib.contextmanager
def _understanding(path: Path) -> Iterator[None]:
    """Raise CheckpointDamaged for whatever fails: under a right checksum values may be absurd, too."""
    try:
        yield
    except (CheckpointDamaged, MemoryError):
        raise
    except Exception as error:
        raise CheckpointDamaged(f"{path} cannot be understood: {error!r:.300}") from None


def _require_numbers(*numbers: int, most: int = _NUMBER_MAX) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number <= most:
            raise ValueError(f"{number!r:.50}, expected a number from 0 to {most}")


def _require_texts(*texts: str) -> None:
    for text in texts:
        if type(text) is not str:
            raise TypeError(f"{text!r:.50}, expected a text")


def _entries(manifest: Mapping[str, Any]) -> tuple[list[ShardEntry], FileEntry | None]:
    shards = [
        ShardEntry(**{**entry, "earlier": tuple(FileEntry(**file) for file in entry.get("earlier", ()))})
        for entry in manifest["shards"]
    ]
    positions = FileEntry(**manifest["positions"]) if "positions" in manifest else None
    for shard in shards:
        _require_numbers(shard.shard_id, shard.version)
    for entry in _files(shards, positions):
        _require_numbers(entry.num_bytes, entry.checksum)
        if re.fullmatch(r"[a-z0-9.-]+", entry.file) is None:
            raise ValueError(f"a file {entry.file!r:.50}")
    return shards, positions


def _read_manifest(path: Path, disk: Disk) -> dict[str, Any]:
    try:
        manifest = json.loads(disk.read(path), parse_int=_number)
    except IsADirectoryError:
        raise CheckpointDamaged(
            f"{path} is a folder: a checkpoint of format version 4 or earlier, this software reads {FORMAT_VERSION}; "
            "export it with the version that wrote it"
        ) from None
    except OSError as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} is no JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.pop("checksum", None) != _checksum(manifest):
        raise CheckpointDamaged(f"{path} is not what was written: its checksum differs")
    if (version := manifest.get("format_version")) != FORMAT_VERSION:
        raise CheckpointDamaged(f"{path} has format version {version}, this software reads {FORMAT_VERSION}")
    return manifest


def _number(digits: str) -> int:
    if abs(number := int(digits)) >= 2**64:
        raise ValueError(f"a number of {len(digits)} digits")
    return number


def _checksum(manifest: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):08x}"


class Writer:
    """Writes the checkpoints of one server, each shard again only where it has moved. One thread at a time."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        # Of each shard what was last written, and the `moves` that it had made before.
        self._written: dict[int, tuple[tuple[int, int, int], ShardEntry]] = {}
        self._positions: FileEntry | None = None

    def forget(self) -> None:
        """Write each shard again, as into a new folder."""
        self._written, self._positions = {}, None

    def write(self, path: Path, snapshot: Snapshot, *, require: Callable[[], bool]) -> int:
        """Write the files of shards that moved, then the manifest; return when all is on the disk.

        Return the bytes written but for the manifest. Raises OSError or MemoryError, and what `require` raises: it is
        the folder's `Ownership.require`, called when the files are written.

        Shards are copied one at a time, each under its lock, and written before the next: they may be of different
        moments, as asynchronous workers see them anyway, and memory grows by one shard. A coordinator's vectors are of
        one iteration on all shards, and so are the parameters then.
        """
        folder = self._folder / SHARDS
        self._disk.make_folder(folder)
        sizes = self._disk.sizes(folder)
        # A machine that no coordinator has used has nothing to keep.
        machine = snapshot.machine if snapshot.machine is not None and snapshot.machine.coordinator_epoch else None
        entries: list[ShardEntry] = []
        written: dict[int, tuple[tuple[int, int, int], ShardEntry]] = {}
        num_bytes, state = 0, None
        with contextlib.ExitStack() as stack:
            if machine is not None:
                stack.enter_context(machine.durable())
                state = machine.state()
            for shard_id, shard in snapshot.shards.items():
                # Read before the copy: a push in between has the shard written once more.
                moves = (shard.epoch, shard.version, shard.moves)
                before, entry = self._written.get(shard_id, (None, None))
                files = entry.files if entry is not None else []
                whole = bool(files) and all(sizes.get(file.file) == file.num_bytes for file in files)
                if entry is None or before != moves or machine is not None or not whole:
                    # Files of increments as large as the first one, or many, are worth writing anew.
                    increments = sum(file.num_bytes for file in files[1:])
                    same = shard.has_rows and whole and before is not None and before[0] == shard.epoch
                    grows = same and len(files) < FILES_MAX and increments < files[0].num_bytes
                    earlier = tuple(files) if grows else ()
                    after = entry.version if entry is not None and earlier else 0
                    kept = _kept(shard_id, shard.state(rows_after=after), machine)
                    entry = put_shard(path, shard_id, shard.epoch, *kept, self._disk, earlier=earlier)
                    num_bytes += entry.num_bytes
                entries.append(entry)
                written[shard_id] = moves, entry
        positions = put_positions(path, snapshot.positions, self._disk, before=self._positions, sizes=sizes)
        num_bytes += 0 if positions is None or positions is self._positions else positions.num_bytes
        if require():
            raise OSError(errno.ESTALE, "the folder was made again meanwhile")
        work = snapshot.work
        put_manifest(path, snapshot.header, entries, self._disk, machine=state, work=work, positions=positions)
        self._written, self._positions = written, positions
        for shard_id, ((_, _, num_moves), entry) in written.items():
            shard = snapshot.shards[shard_id]
            shard.durable_version, shard.durable_moves = entry.version, num_moves
        return num_bytes


def _kept(shard_id: int, state: ShardState, machine: VectorMachine | None) -> tuple[ShardState, Mapping[str, Floats]]:
    """Return what a checkpoint keeps of a shard, and of a coordinator's vectors there."""
    if machine is None:
        return state, {}
    # What the shard holds may be a trial: the accepted point is what a restored run goes on from.
    point = machine.parameters_to_keep(shard_id)
    state = state if point is None else dataclasses.replace(state, parameters=point)
    return state, machine.vectors_to_keep(shard_id)


def put_shard(
    path: Path,
    shard_id: int,
    epoch: int,
    state: ShardState,
    vectors: Mapping[str, Floats],
    disk: Disk,
    *,
    earlier: tuple[FileEntry, ...] = (),
) -> ShardEntry:
    """Write a shard's file for the checkpoint at `path`; return its entry. Raises OSError or MemoryError.

    `earlier`: the files with the rows of a table that the state lacks.
    """
    number = path.stem.rpartition("-")[2]
    name, checksum = f"shard-{shard_id:06d}.epoch-{epoch}.version-{state.version}.{number}", 0
    buffers = pack(state, vectors)
    for buffer in buffers:
        checksum = zlib.crc32(buffer, checksum)
    disk.put(path.parent / SHARDS / name, buffers)
    return ShardEntry(shard_id, state.version, name, sum(buffer.nbytes for buffer in buffers), checksum, earlier)


def put_positions(
    path: Path,
    positions: PositionsState,
    disk: Disk,
    *,
    before: FileEntry | None = None,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> FileEntry | None:
    """Write the positions' file for the checkpoint at `path`, unless that `before` is there and holds the same.

    Return its entry, None without positions. Raises OSError or MemoryError.
    """
    if not positions:
        return None
    buffers, checksum = position_file.pack(positions), 0
    for buffer in buffers:
        checksum = zlib.crc32(buffer, checksum)
    entry = FileEntry(f"positions.{path.stem.rpartition('-')[2]}", sum(map(len, buffers)), checksum)
    if before is not None and before[1:] == entry[1:] and sizes.get(before.file) == before.num_bytes:
        return before
    disk.put(path.parent / SHARDS / entry.file, buffers)
    return entry


def put_manifest(
    path: Path,
    header: RunHeader,
    entries: Iterable[ShardEntry],
    disk: Disk,
    *,
    machine: MachineState | None,
    work: Mapping[str, Any] | None,
    positions: FileEntry | None,
) -> None:
    """Write the manifest once all files that it names are on the disk. Raises OSError or MemoryError."""
    disk.sync_folder(path.parent / SHARDS)
    # The folder of shards may be new.
    disk.sync_folder(path.parent)
    disk.put(path, [_manifest(header, entries, machine, work, positions)])
    disk.sync_folder(path.parent)


def _plain(entry: ShardEntry) -> dict[str, Any]:
    plain = entry._asdict()
    if not plain.pop("earlier"):
        return plain
    return {**plain, "earlier": [file._asdict() for file in entry.earlier]}


def _manifest(
    header: RunHeader,
    entries: Iterable[ShardEntry],
    machine: MachineState | None,
    work: Mapping[str, Any] | None,
    positions: FileEntry | None,
) -> bytes:
    manifest = {
        "format": "pyps checkpoint",
        "format_version": FORMAT_VERSION,
        "software": f"pyps {__version__}",
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        **header.to_json(),
        "shards": [_plain(entry) for entry in entries],
    }
    if machine is not None:
        manifest["vector_machine"] = _machine_entry(machine)
    if positions is not None:
        manifest["positions"] = positions._asdict()
    if work is not None:
        # As it will be read: the manifest's checksum is of that.
        manifest["work"] = json.loads(json.dumps(work))
    manifest["checksum"] = _checksum(manifest)
    return json.dumps(manifest, indent=1).encode()


def _machine_entry(state: MachineState) -> dict[str, Any]:
    """Return what the manifest says of a coordinator's vectors."""
    return {
        "coordinator_epoch": state.coordinator_epoch,
        "iteration": state.iteration,
        "state": state.text,
        "vectors": sorted(state.table.names),
        "history": {"oldest": state.table.oldest, "newest": state.table.newest},
    }


def _machine_state(entry: Mapping[str, Any]) -> MachineState:
    history = entry["history"]
    table = VectorTable(frozenset(entry["vectors"]), history["oldest"], history["newest"])
    return MachineState(entry["coordinator_epoch"], entry["iteration"], entry["state"], table)
