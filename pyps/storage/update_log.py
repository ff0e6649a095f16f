"""An update log: a line for every push and update of a run's shards, in their order.

One folder a run and epoch, in it two files a shard and one a server, whose lines have the time of day:

run-0.jsonl            of server 0: the run's events, the workers' waits and reports
shard-000003.jsonl     one line an event: the shard's beginning, pushes, updates, pulls, changes, its end
shard-000003.payloads  the first parameters and slots, then the gradients; only with --log-gradients
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain, count
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from pyps import logs
from pyps.core.arrays import Floats
from pyps.core.recorder import Completed, Configured, Event, Pulled, Pushed, Updated
from pyps.core.roster import Roster
from pyps.core.store import Store
from pyps.run_header import RunHeader
from pyps.storage.disk import FOLDER_MODE, create
from pyps.storage.plain import checksum_of, contribution_to_plain, push_to_plain, quick_checksum_of, update_to_plain
from pyps_wire.errors import PypsError

log = logs.get("pyps.update_log")

FORMAT = "pyps update log 4"
_CHECKSUM = b', "crc32": "'
# Lines about a run before its first parameters.
EARLY_MAX = 1000


class UpdateLogError(PypsError):
    """An update log cannot be written or read."""

    status = "FAILED_PRECONDITION"


def encode(plain: Mapping[str, Any]) -> bytes:
    """Return the line, with its checksum and end."""
    text = json.dumps(plain).encode()[:-1]
    return b'%s%s%08x"}\n' % (text, _CHECKSUM, zlib.crc32(text))


def decode(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line; None where the line is not what was written."""
    text, _, checksum = line.rpartition(_CHECKSUM)
    if checksum != b'%08x"}\n' % zlib.crc32(text):
        return None
    plain: dict[str, Any] = json.loads(text + b"}")
    return plain


class Budget:
    """Bytes of payloads that may still be written, for all shards together. May be used from any thread."""

    def __init__(self, bytes_max: int):
        self._bytes_max = bytes_max
        self._lock = Lock()
        # Guarded by _lock. Negative from the first refusal on, so that a log ends at one place.
        self._left = bytes_max

    def take(self, num_bytes: int) -> bool:
        """Return whether there is room; after one refusal there is none any more."""
        with self._lock:
            had_room = self._left >= 0
            self._left -= num_bytes
            has_room = self._left >= 0
        if had_room and not has_room:
            log.warning(
                "gradients are no longer logged: the next would exceed --log-gradients-max-bytes; a replay ends here",
                bytes_max=self._bytes_max,
            )
        return has_room


class LoggedUpdate(NamedTuple):
    """An update as its line in the log describes it."""

    version: int
    # Its rate and parts.
    update: Mapping[str, Any]
    # The quick checksum of the shard after it.
    checksum: str

    @classmethod
    def of(cls, event: Updated) -> LoggedUpdate:
        return cls(event.update.version, update_to_plain(event.update), quick_checksum_of(event.parameters))


class Lines:
    """A file of lines. For one thread at a time."""

    def __init__(self, path: Path):
        """Make the file, under a name that no earlier life took. Raises OSError."""
        names = chain([path], (path.with_stem(f"{path.stem}.{number}") for number in count(2)))
        self.path = next(name for name in names if not name.exists())
        self._file = create(self.path)

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line, with the present time where it has none. Raises OSError."""
        self._file.write(encode({"at": round(time.time(), 6), **line}))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class ShardFiles:
    """Appends to the files of one shard. Guarded by the turn of its `LoggedShard`."""

    def __init__(self, path: Path, shard: Store, budget: Budget | None):
        """Make the files, under a name that no earlier life took; `budget` None keeps no payloads. Raises OSError."""
        self._lines = Lines(path)
        self.path = self._lines.path
        self._shard = shard
        self._budget = budget
        self._payloads = create(self.path.with_suffix(".payloads")) if budget is not None else None
        self._offset = 0
        self._roster: Roster | None = None
        # Noted, and not written yet.
        self._events: list[Event | LoggedUpdate] = []
        self._failed = False

    def begin(self, header: RunHeader) -> None:
        """Write the shard as it is. Raises OSError."""
        shard, state = self._shard, self._shard.state()
        values = {"parameters": state.parameters, **{f"slot {name}": slot for name, slot in state.slots.items()}}
        rows = state.rows._asdict() if state.rows is not None else {}
        values |= {f"rows {name}": array for name, array in rows.items()}
        pending = [memoryview(waiting.gradient.payload) for waiting in state.pending]
        ledger, receipts = state.ledger.to_plain()
        places = self._write_payloads([*values.values(), *pending, receipts])
        self._append(
            {
                "event": "begin",
                "format": FORMAT,
                "run": header.to_json(),
                "shard_id": shard.shard_id,
                "version": state.version,
                "examples": state.examples,
                "learning_rate": state.learning_rate,
                "behaviour": shard.behaviour.texts,
                "hyperparameters": dict(shard.hyperparameters),
                "kind": shard.kind,
                "ledger": ledger,
                "pending": [contribution_to_plain(waiting) for waiting in state.pending],
                "slots": list(state.slots),
                "rows": {name: array.dtype.newbyteorder("<").str for name, array in rows.items()},
                "payloads": places,
            }
        )
        self._lines.flush()

    def record(self, event: Event) -> None:
        """Note an event, to be written when the shard's lock is free."""
        if isinstance(event, Updated) and not (self._events and isinstance(self._events[-1], Pushed)):
            # A push makes one update. Another call may make several, each of which changes what the one before made.
            self._events.append(LoggedUpdate.of(event))
        else:
            self._events.append(event)

    def write(self) -> None:
        """Write the noted events, a push in one line with its update."""
        events, self._events = self._events, []
        push: dict[str, Any] | None = None
        with self._ending_on_error():
            for event in events:
                if isinstance(event, Pushed | Completed | Configured):
                    self._write_roster(event.roster)
                match event:
                    case Pushed(_, gradient, receipt):
                        places = self._write_payloads([gradient.payload])
                        payload = places[0] if places else None
                        push = {"event": "push", **push_to_plain(gradient, receipt), "payload": payload}
                        if receipt.version_after == receipt.version_before:
                            self._append(push)
                            push = None
                    case Updated() | LoggedUpdate():
                        made = LoggedUpdate.of(event) if isinstance(event, Updated) else event
                        cause = push or {"event": "update", "version": made.version}
                        self._append({**cause, "update": made.update, "checksum": made.checksum})
                        push = None
                    case Completed():
                        self._append({"event": "complete", "version": event.version})
                    case Configured(_, behaviour, learning_rate, _, version, finished):
                        texts = None if behaviour is None else behaviour.texts
                        line = {"version": version, "behaviour": texts, "learning_rate": learning_rate}
                        self._append({"event": "configure", **line, "finished": finished})
                    case Pulled(_, worker_id, version):
                        self._append({"event": "pull", "worker_id": worker_id, "version": version})
            if events and not self._failed:
                # What was answered is in the file even if the server is killed the next moment.
                self._lines.flush()

    def end(self) -> None:
        """Write the shard's final version and CRC-32, and close the files."""
        version, checksum = self._shard.read(lambda version, values: (version, checksum_of(values)))
        with self._ending_on_error():
            self._append({"event": "end", "version": version, "checksum": checksum})
        self.close()

    def close(self) -> None:
        self._lines.close()
        if self._payloads is not None:
            with contextlib.suppress(OSError):
                self._payloads.close()

    def _write_roster(self, roster: Roster) -> None:
        """Write which workers are active, where that has changed since the last such line."""
        if roster != self._roster:
            coming = {"coming": roster.coming} if roster.coming else {}
            self._append({"event": "roster", "workers": roster.workers, "missing": roster.missing, **coming})
            self._roster = roster

    def _append(self, line: Mapping[str, Any]) -> None:
        if not self._failed:
            self._lines.append(line)

    def _write_payloads(self, payloads: Iterable[Floats | bytes | memoryview]) -> list[dict[str, Any]] | None:
        """Write payloads and return their places; None where they are not kept."""
        views = [np.frombuffer(payload, np.uint8).data for payload in payloads]
        total = sum(view.nbytes for view in views)
        if self._payloads is None or self._budget is None or self._failed or not self._budget.take(total):
            return None
        places = []
        for view in views:
            self._payloads.write(view)
            places.append({"offset": self._offset, "bytes": view.nbytes, "checksum": quick_checksum_of(view)})
            self._offset += view.nbytes
        self._payloads.flush()
        return places

    @contextlib.contextmanager
    def _ending_on_error(self) -> Any:
        try:
            yield
        except OSError as error:
            self._failed = True
            self.close()
            log.error("the update log of a shard ended", path=self.path, reason=error.strerror)


class UpdateLog:
    """The recorder of a run's shards. Any thread may call it, for one shard one thread at a time.

    What was answered is in the files even if the server is killed the next moment. Files that cannot be written
    end with one error in the server's log; the run goes on, that shard unlogged.
    """

    def __init__(self, folder: Path, *, log_gradients: bool = False, payload_bytes_max: int = 2**63):
        """Make the folder. Raises UpdateLogError.

        `payload_bytes_max` bounds what `log_gradients` keeps, the first parameters and slots included, over all
        shards and for the life of this object; beyond it no gradient is kept any more, with one warning.
        """
        try:
            folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise UpdateLogError(f"the update log's folder {folder} cannot be used: {error.strerror}") from None
        self._folder = folder
        self._budget = Budget(payload_bytes_max) if log_gradients else None
        self._files: dict[int, ShardFiles] = {}
        self._lock = Lock()
        # Guarded by _lock. None before a run begins, and where its file cannot be written.
        self._run: Lines | None = None
        self._early: deque[Mapping[str, Any]] = deque(maxlen=EARLY_MAX)

    def begin(self, header: RunHeader, shards: Mapping[int, Store]) -> None:
        """Open the files of each shard, before the shards serve."""
        self.end()
        name = re.sub(r"[^A-Za-z0-9_-]", "_", header.run_id) or "run"
        folder = self._folder / f"{name}.epoch-{header.epoch}"
        # Files of earlier lives of the server.
        before = set(folder.iterdir()) if folder.is_dir() else None
        try:
            folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            for shard_id, shard in shards.items():
                self._files[shard_id] = ShardFiles(folder / f"shard-{shard_id:06d}.jsonl", shard, self._budget)
                self._files[shard_id].begin(header)
            self._begin_run(folder, header)
        except OSError as error:
            self._discard(folder, before)
            raise UpdateLogError(f"the update log in {folder} cannot be written: {error.strerror}") from None

    def _discard(self, folder: Path, before: set[Path] | None) -> None:
        """Remove a log that could not be begun: a replay of the whole folder would fail at it."""
        for files in self._files.values():
            files.close()
        self._files = {}
        self._end_run()
        with contextlib.suppress(OSError):
            for path in set(folder.iterdir()) - (before or set()):
                path.unlink()
            if before is None:
                folder.rmdir()

    def record(self, event: Event) -> None:
        if files := self._files.get(event.shard_id):
            files.record(event)

    def write(self, shard_id: int) -> None:
        if files := self._files.get(shard_id):
            files.write()

    def end(self) -> None:
        """End each shard's log. Pushes must have stopped."""
        for files in self._files.values():
            files.end()
        self._files = {}
        self._end_run()

    def note(self, line: Mapping[str, Any]) -> None:
        """Write what happened to the run, or what a worker reports; before a run begins, keep it for the run."""
        with self._lock:
            if self._run is None:
                self._early.append({"at": round(time.time(), 6), **line})
                return
            try:
                self._run.append(line)
                self._run.flush()
            except OSError as error:
                self._run.close()
                log.error("the log of a run's events ended", path=self._run.path, reason=error.strerror)
                self._run = None

    def _begin_run(self, folder: Path, header: RunHeader) -> None:
        with self._lock:
            self._run = Lines(folder / f"run-{header.server_index}.jsonl")
            self._run.append({"event": "begin", "format": FORMAT, "server_index": header.server_index})
            while self._early:
                self._run.append(self._early.popleft())
            self._run.flush()

    def _end_run(self) -> None:
        with self._lock:
            if self._run is not None:
                self._run.close()
            self._run = None
