"""The two files of one shard's update log while they are written: lines, and payloads beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import numpy as np

from pyps import logs
from pyps.checkpoint import RunHeader
from pyps.checkpoint.disk import create
from pyps.checksum import quick_checksum_of
from pyps.core.arrays import Floats
from pyps.core.gradient import Gradient
from pyps.core.receipt import Receipt
from pyps.core.roster import Roster
from pyps.core.shard import Shard
from pyps.core.update import Update
from pyps.plain import contribution_to_plain, push_to_plain, update_to_plain
from pyps.update_log.lines import FORMAT, UpdateLogError, encode

log = logs.get("pyps.update_log")

Payload = Floats | bytes | memoryview


class Budget:
    """Bytes of payloads that may still be written, for all shards together. May be used from any thread."""

    def __init__(self, bytes_max: int):
        self._bytes_max = bytes_max
        self._lock = Lock()
        # Guarded by _lock.
        self._left = bytes_max
        self._exhausted = False

    def take(self, num_bytes: int) -> bool:
        """Whether there is room; once there was none there is none for good, so that a log ends at one place."""
        with self._lock:
            if self._exhausted:
                return False
            self._left -= num_bytes
            self._exhausted = self._left < 0
            first_refusal = self._exhausted
        if first_refusal:
            log.warning(
                "gradients are no longer logged: the next would exceed --log-gradients-max-bytes; a replay ends here",
                bytes_max=self._bytes_max,
            )
        return not first_refusal


class ShardFiles:
    """Appends to the files. Guarded by its shard's lock."""

    def __init__(self, path: Path, budget: Budget | None):
        """Makes the files; `budget` None keeps no payloads. Raises OSError or UpdateLogError."""
        self._lines = _create(path)
        self.path = Path(self._lines.name)
        self._budget = budget
        self._payloads = create(self.path.with_suffix(".payloads")) if budget is not None else None
        self._offset = 0
        self._roster: Roster | None = None
        # A push whose update is being made.
        self._push: dict[str, Any] | None = None
        self._failed = False

    def begin(self, header: RunHeader, shard: Shard) -> None:
        """Writes the shard as it is. Raises OSError."""
        state = shard.state()
        values = {"parameters": state.parameters, **{f"slot {name}": slot for name, slot in state.slots.items()}}
        pending = [memoryview(waiting.gradient.payload) for waiting in state.pending]
        places = self._keep([*values.values(), *pending])
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
                "ledger": state.ledger.to_json(),
                "pending": [contribution_to_plain(waiting) for waiting in state.pending],
                "slots": list(state.slots),
                "payloads": places,
            }
        )

    def push(self, gradient: Gradient, receipt: Receipt, roster: Roster) -> None:
        """Writes a push, as soon as its update is made where it makes one."""
        with self._ending_on_error():
            self._note(roster)
            places = self._keep([gradient.payload])
            line = {"event": "push", **push_to_plain(gradient, receipt), "payload": places[0] if places else None}
            if receipt.version_after > receipt.version_before:
                self._push = line
            else:
                self._append(line)

    def change(self, line: Mapping[str, Any], roster: Roster) -> None:
        """Writes what changes the shard beside pushes."""
        with self._ending_on_error():
            self._note(roster)
            self._append(line)

    def update(self, update: Update, checksum: str) -> None:
        """Writes what an update has made of which gradients, behind the push that brought it about."""
        push, self._push = self._push, None
        cause = push or {"event": "update", "version": update.version}
        self.write({**cause, "update": update_to_plain(update), "checksum": checksum})

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes a line."""
        with self._ending_on_error():
            self._append(line)

    def close(self) -> None:
        """Gives the files back."""
        for file in filter(None, (self._lines, self._payloads)):
            with contextlib.suppress(OSError):
                file.close()

    def _note(self, roster: Roster) -> None:
        """Writes who counts, where that has changed since the last line that asked."""
        if roster != self._roster:
            coming = {"coming": roster.coming} if roster.coming else {}
            self._append({"event": "roster", "workers": roster.workers, "missing": roster.missing, **coming})
            self._roster = roster

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._failed:
            return
        self._lines.write(encode(line))
        # What was answered is in the file even if the server is killed the next moment.
        self._lines.flush()

    def _keep(self, payloads: Iterable[Payload]) -> list[dict[str, Any]] | None:
        """Writes payloads and says where they lie; None where they are not kept."""
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


def _create(path: Path) -> BinaryIO:
    """Opens a new file; a name that an earlier life of the server took is not taken again."""
    for number in range(1, 10_000):
        try:
            free = path if number == 1 else path.with_stem(f"{path.stem}.{number}")
            return create(free)
        except FileExistsError:
            continue
    raise UpdateLogError(f"{path} and 9,998 like it exist already: name another --update-log")
