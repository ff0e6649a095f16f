"""Writes a run's update log: what happens to each shard, in the order in which it happens."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from pyps.checkpoint import RunHeader
from pyps.checkpoint.disk import FOLDER_MODE
from pyps.checksum import checksum_of, quick_checksum_of
from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient
from pyps.core.receipt import Receipt
from pyps.core.roster import Roster
from pyps.core.shard import Shard
from pyps.core.update import Update
from pyps.update_log.lines import UpdateLogError
from pyps.update_log.shard_files import Budget, ShardFiles


class UpdateLog:
    """The log of a run's shards: their recorder. Called under a shard's lock, from several at once.

    What was answered is in the files even if the server is killed the next moment. Files that cannot be written
    end with one error in the server's log; the run goes on, that shard unlogged.
    """

    def __init__(self, folder: Path, *, log_gradients: bool = False, payload_bytes_max: int = 2**63):
        """Makes the folder. Raises UpdateLogError when it cannot be used.

        `payload_bytes_max` bounds what `log_gradients` keeps, the first parameters and slots included, over all
        shards and for the life of this object; beyond it no gradient is kept any more, with one warning.
        """
        try:
            folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise UpdateLogError(f"the update log's folder {folder} cannot be used: {error.strerror}") from None
        self._folder = folder
        self._budget = Budget(payload_bytes_max) if log_gradients else None
        self._shards: Mapping[int, Shard] = {}
        # Each is used under its shard's lock only, once the shards serve.
        self._files: dict[int, ShardFiles] = {}

    def begin(self, header: RunHeader, shards: Mapping[int, Shard]) -> None:
        """Opens the files of each shard. To be called before the shards serve."""
        self.end()
        self._shards = dict(shards)
        name = re.sub(r"[^A-Za-z0-9_-]", "_", header.run_id) or "run"
        folder = self._folder / f"{name}.epoch-{header.epoch}"
        # Those of earlier lives of the server.
        before = set(folder.iterdir()) if folder.is_dir() else None
        try:
            folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            for shard_id, shard in shards.items():
                self._files[shard_id] = ShardFiles(folder / f"shard-{shard_id:06d}.jsonl", self._budget)
                self._files[shard_id].begin(header, shard)
        except OSError as error:
            self._discard(folder, before)
            raise UpdateLogError(f"the update log in {folder} cannot be written: {error.strerror}") from None

    def _discard(self, folder: Path, before: set[Path] | None) -> None:
        """Leaves nothing of a log that could not be begun: a replay of the whole folder would stumble over it."""
        for files in self._files.values():
            files.close()
        self._files, self._shards = {}, {}
        with contextlib.suppress(OSError):
            for path in set(folder.iterdir()) - (before or set()):
                path.unlink()
            if before is None:
                folder.rmdir()

    def pushed(self, shard_id: int, gradient: Gradient, receipt: Receipt, roster: Roster) -> None:
        """Logs a push; the update that it makes comes into the same line."""
        if files := self._files.get(shard_id):
            files.push(gradient, receipt, roster)

    def completed(self, shard_id: int, roster: Roster, version: int) -> None:
        """Logs that waiting gradients become updates because other workers count."""
        if files := self._files.get(shard_id):
            files.change({"event": "complete", "version": version}, roster)

    def configured(
        self,
        shard_id: int,
        behaviour: Behaviour | None,
        learning_rate: float | None,
        roster: Roster,
        version: int,
    ) -> None:
        """Logs a change of what is in force."""
        if files := self._files.get(shard_id):
            change = {
                "event": "configure",
                "version": version,
                "behaviour": None if behaviour is None else behaviour.texts,
                "learning_rate": learning_rate,
                # What waits at the end of a run is not settled any more.
                "finished": self._shards[shard_id].finished,
            }
            files.change(change, roster)

    def updated(self, shard_id: int, update: Update, parameters: Floats) -> None:
        """Logs the version that an update made, what it was made of, and a checksum of its parameters."""
        if files := self._files.get(shard_id):
            files.update(update, quick_checksum_of(parameters))

    def pulled(self, shard_id: int, worker_id: str, version: int) -> None:
        """Logs a pull."""
        if files := self._files.get(shard_id):
            files.write({"event": "pull", "worker_id": worker_id, "version": version})

    def end(self) -> None:
        """Notes each shard's final version and CRC-32, and closes the files. Pushes must have stopped."""
        for shard_id, shard in self._shards.items():
            version, checksum = shard.read(lambda version, values: (version, checksum_of(values)))
            if files := self._files.get(shard_id):
                files.write({"event": "end", "version": version, "checksum": checksum})
        for files in self._files.values():
            files.close()
        self._files, self._shards = {}, {}
