"""Records every push and pull of a run, payloads too, one file a shard, and replays such a file bit for bit.

A file is a line naming the format, then entries: the sizes of a JSON header and of a payload, a CRC-32 over
both, header, payload. The first entry ("begin") holds the shard as it was, then come "push" and "pull" in the
order in which they happened, and after an orderly exit an "end" with the final checksum.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pyps import logs
from pyps.checkpoint import RunHeader
from pyps.checkpoint.checkpoint import checksum_of
from pyps.core import aggregation, staleness, update_rules
from pyps.core.arrays import Floats
from pyps.core.gradient import Gradient
from pyps.core.ledger import Ledger, LedgerState
from pyps.core.receipt import Outcome, Receipt
from pyps.core.shard import Shard
from pyps.plain import (
    contribution_from_plain,
    contribution_to_plain,
    gradient_from_plain,
    gradient_to_plain,
    receipt_from_plain,
    receipt_to_plain,
)
from pyps_wire.errors import PypsError

FORMAT_LINE = b"pyps record 1\n"
# Bytes of the header, bytes of the payload, CRC-32 of both.
_SIZES = struct.Struct("<IQI")

log = logs.get("pyps.record")


class RecordError(PypsError):
    """Raised when a record cannot be written or read; the message says which and why."""

    status = "FAILED_PRECONDITION"


@dataclass(frozen=True, slots=True)
class Pushed:
    """A gradient that came, and how it was answered."""

    gradient: Gradient
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Pulled:
    """A worker was given the parameters of a version."""

    worker_id: str
    version: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The recording ended in order, with the shard so."""

    version: int
    checksum: str


Event = Pushed | Pulled | Ended


class Recorder:
    """Appends what happens to a run's shards to files. Called under a shard's lock, from several at once.

    A file that cannot be written ends with one error in the log; the run goes on, that shard unrecorded.
    """

    def __init__(self, folder: Path):
        """Makes the folder. Raises RecordError when it cannot be used."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"the record folder {folder} cannot be used: {error.strerror}") from None
        self._folder = folder
        self._shards: Mapping[int, Shard] = {}
        # Each is used under its shard's lock only, once the shards serve.
        self._files: dict[int, BinaryIO] = {}

    def begin(self, header: RunHeader, shards: Mapping[int, Shard]) -> None:
        """Opens a file for each shard. To be called before the shards serve."""
        self.end()
        self._shards = dict(shards)
        name = re.sub(r"[^A-Za-z0-9_-]", "_", header.run_id) or "run"
        folder = self._folder / f"{name}.epoch-{header.epoch}"
        try:
            folder.mkdir(exist_ok=True)
            for shard_id, shard in shards.items():
                file = self._files[shard_id] = _create(folder / f"shard-{shard_id:06d}.log")
                file.write(FORMAT_LINE)
                _write(file, *_beginning(header, shard))
        except OSError as error:
            raise RecordError(f"the record in {folder} cannot be written: {error.strerror}") from None

    def pushed(self, shard_id: int, gradient: Gradient, receipt: Receipt) -> None:
        """Appends a push and its receipt."""
        header = {
            "event": "push",
            "gradient": gradient_to_plain(gradient),
            "receipt": receipt_to_plain(receipt),
        }
        self._append(shard_id, header, gradient.payload)

    def pulled(self, shard_id: int, worker_id: str, version: int) -> None:
        """Appends a pull."""
        self._append(shard_id, {"event": "pull", "worker_id": worker_id, "version": version})

    def end(self) -> None:
        """Notes each shard's final version and checksum, and closes the files. Pushes must have stopped."""
        for shard_id, shard in self._shards.items():
            version, checksum = shard.read(lambda version, values: (version, checksum_of(values)))
            self._append(shard_id, {"event": "end", "version": version, "checksum": checksum})
        for file in self._files.values():
            file.close()
        self._files, self._shards = {}, {}

    def _append(self, shard_id: int, header: Mapping[str, Any], payload: bytes | memoryview = b"") -> None:
        file = self._files.get(shard_id)
        if file is None:
            return
        try:
            _write(file, header, payload)
        except OSError as error:
            del self._files[shard_id]
            with contextlib.suppress(OSError):
                file.close()
            log.error("recording of a shard ended", shard=shard_id, path=file.name, reason=error.strerror)


class Record:
    """One shard's recorded file: how the shard began, and what happened to it."""

    def __init__(self, path: Path):
        """Opens the file and reads its beginning. Raises RecordError when there is none, or half of one."""
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise RecordError(f"{path} cannot be read: {error.strerror}") from None
        try:
            self._beginning, self._first_values = self._read_beginning()
        except BaseException:
            self._file.close()
            raise
        self.shard_id: int = self._beginning["shard_id"]
        self.run = RunHeader.from_json(self._beginning["run"])

    def shard(self) -> Shard:
        """The shard as it was at the beginning."""
        begin = self._beginning
        names: Sequence[str] = begin["slots"]
        values: Floats = np.frombuffer(self._first_values, dtype="<f4")
        parameters, *slots = np.split(values, len(names) + 1)
        return Shard(
            self.shard_id,
            parameters,
            rule=update_rules.find(self.run.optimizer.rule),
            hyperparameters=begin["hyperparameters"],
            aggregation=aggregation.parse(self.run.protocol),
            staleness=staleness.parse(self.run.staleness),
            epoch=self.run.epoch,
            version=begin["version"],
            slots=dict(zip(names, slots, strict=True)) or None,
            ledger=Ledger(LedgerState.from_json(begin["ledger"])),
            pending=tuple(contribution_from_plain(plain) for plain in begin["pending"]),
        )

    def events(self) -> Iterator[Event]:
        """Yields what happened, once, in order. Ends early where a killed server left half an entry."""
        with self._file:
            while (entry := self._next()) is not None:
                header, payload = entry
                if header["event"] == "push":
                    gradient = gradient_from_plain(header["gradient"], payload)
                    yield Pushed(gradient, receipt_from_plain(header["receipt"]))
                elif header["event"] == "pull":
                    yield Pulled(header["worker_id"], header["version"])
                else:
                    yield Ended(header["version"], header["checksum"])

    def _read_beginning(self) -> tuple[dict[str, Any], bytes]:
        try:
            format_line = self._file.read(len(FORMAT_LINE))
        except OSError as error:
            raise RecordError(f"{self.path} cannot be read: {error.strerror}") from None
        if format_line != FORMAT_LINE:
            raise RecordError(f"{self.path} is no record: it does not begin with {FORMAT_LINE!r}")
        entry = self._next()
        if entry is None or entry[0]["event"] != "begin":
            raise RecordError(f"{self.path} ends before the shard's first parameters")
        return entry

    def _next(self) -> tuple[dict[str, Any], bytes] | None:
        sizes = self._file.read(_SIZES.size)
        if len(sizes) < _SIZES.size:
            return None
        header_bytes, payload_bytes, checksum = _SIZES.unpack(sizes)
        header, payload = self._file.read(header_bytes), self._file.read(payload_bytes)
        if len(header) + len(payload) < header_bytes + payload_bytes:
            return None
        if zlib.crc32(payload, zlib.crc32(header)) != checksum:
            place = self._file.tell() - header_bytes - payload_bytes
            raise RecordError(f"{self.path} is damaged: the entry at byte {place} is not what was written")
        return json.loads(header), payload


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came out of a replay."""

    path: Path
    run_id: str
    epoch: int
    shard_id: int
    version: int
    updates: int
    pulls: int
    checksum: str
    # The checksum at the orderly end of the recording; None where there was none.
    recorded_checksum: str | None
    # The first push that was answered otherwise than recorded, in words; empty where none was.
    difference: str

    @property
    def faithful(self) -> bool:
        """Whether everything came out as recorded; a record without an end is judged by its receipts."""
        return not self.difference and self.recorded_checksum in (None, self.checksum)


def replay(path: Path) -> Replayed:
    """Applies a record's pushes in order, through the same core and kernels; compares receipts and bits."""
    record = Record(path)
    shard = record.shard()
    updates = pulls = 0
    recorded_checksum, difference = None, ""
    for event in record.events():
        if isinstance(event, Pulled):
            pulls += 1
        elif isinstance(event, Ended):
            recorded_checksum = event.checksum
        else:
            receipt = shard.push(event.gradient, num_workers=event.receipt.num_workers)
            updates += receipt.outcome is Outcome.APPLIED
            if receipt != event.receipt and not difference:
                difference = f"recorded {event.receipt}, replayed {receipt}"
    return Replayed(
        path=path,
        run_id=record.run.run_id,
        epoch=record.run.epoch,
        shard_id=record.shard_id,
        version=shard.version,
        updates=updates,
        pulls=pulls,
        checksum=shard.read(lambda _, values: checksum_of(values)),
        recorded_checksum=recorded_checksum,
        difference=difference,
    )


def record_paths(folder: Path) -> list[Path]:
    """The records in a folder and the folders in it, in order."""
    return sorted(folder.rglob("shard-*.log"))


def _beginning(header: RunHeader, shard: Shard) -> tuple[dict[str, Any], bytes]:
    state = shard.state()
    plain = {
        "event": "begin",
        "run": header.to_json(),
        "shard_id": shard.shard_id,
        "version": state.version,
        "hyperparameters": dict(shard.hyperparameters),
        "slots": list(state.slots),
        "ledger": state.ledger.to_json(),
        "pending": [contribution_to_plain(contribution) for contribution in state.pending],
    }
    return plain, b"".join(values.tobytes() for values in (state.parameters, *state.slots.values()))


def _create(path: Path) -> BinaryIO:
    """Opens a new file; a name that an earlier life of the server took is not taken again."""
    for number in range(1, 10_000):
        try:
            free = path if number == 1 else path.with_stem(f"{path.stem}.{number}")
            return free.open("xb")
        except FileExistsError:
            continue
    raise RecordError(f"{path} and 9,998 like it exist already: name another --record-dir")


def _write(file: BinaryIO, header: Mapping[str, Any], payload: bytes | memoryview = b"") -> None:
    text = json.dumps(header).encode()
    checksum = zlib.crc32(payload, zlib.crc32(text))
    file.write(_SIZES.pack(len(text), memoryview(payload).nbytes, checksum) + text)
    file.write(payload)
    # What was answered is in the file even if the server is killed the next moment.
    file.flush()
