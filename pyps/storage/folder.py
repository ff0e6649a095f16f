"""All checkpoints of one server: numbered manifests in a folder that one server owns at a time.

checkpoint-00000006.json    complete ones; the newest few are kept
checkpoint-00000007.json
forgotten-00000005.json     checkpoints of runs that `pyps reset` made the server forget; never read, never removed
shards/                     the files that they name
epoch                       the last epoch that a server with this folder, or its standby, may have served under
standby                     where the server's standby is found, its run, and the epoch in which it follows
.lock                       held by the running server
.writing-…                  unfinished work of a server that was killed; removed by the next
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from pyps import logs
from pyps.config import is_address
from pyps.run_header import RestoredRun, Snapshot
from pyps.storage.checkpoint import (
    EPOCH_MAX,
    SHARDS,
    Checkpoint,
    CheckpointDamaged,
    CheckpointError,
    Writer,
    files_of,
)
from pyps.storage.disk import UNFINISHED, Disk, InUse, Ownership
from pyps.storage.object_store import disk_of

log = logs.get("pyps.checkpoint")

# Without the ending it is a folder of an earlier format.
_NAME = re.compile(r"checkpoint-(\d+)(?:\.json)?")
_USED_NAME = re.compile(r"(?:checkpoint|forgotten)-(\d+)(?:\.json)?")


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint just written."""

    path: Path
    # Of the shards that had moved.
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StandbyNote:
    """The standby of a folder's server that could take over, as it was last."""

    address: str
    # The run that it followed, and in which epoch.
    run_id: str
    epoch: int


class CheckpointFolder:
    """A server's checkpoint folder, owned until closed or until the process ends. Any thread may use it."""

    def __init__(
        self,
        path: Path,
        *,
        keep: int = 3,
        disk: Disk | None = None,
        notify: Callable[[str, bool], object] = lambda text, is_warning: None,
        later: bool = False,
    ):
        """Take the folder, `later` with the first checkpoint. Raises CheckpointError if another server has it.

        `notify` is called with a sentence when checkpoints cannot be written (a warning), and when they can again.
        """
        self.path = path
        self._notify = notify
        self._keep = keep
        self._disk = disk or disk_of(path)
        self._writer = Writer(path, self._disk)
        self._saving = threading.Lock()
        # The checkpoint that this server wrote or resumed from last; None before the first.
        self.newest: Path | None = None
        # The epoch of the checkpoint that was resumed: this one was served under, others may only have been claimed.
        self.resumed_epoch = 0
        # Unix time of the last one written; before it, of the start.
        self.saved_at = time.time()
        # Why the last try to write one failed, empty where it did not, and how many failed.
        self.failure = ""
        self.failures = 0
        self._ownership: Ownership | None = None
        if not later:
            self._own()

    def _own(self) -> Ownership:
        path = self.path
        try:
            self._ownership = ownership = self._disk.own(path)
        except InUse as error:
            follow = ""
            with contextlib.suppress(CheckpointError):
                if (note := self.standby) is not None:
                    follow = f", or, if its standby there has taken over, follow that: --standby-of {note.address}"
            raise CheckpointError(
                f"the checkpoint folder {path} is in use by {error}: give each server a folder of its own{follow}"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint folder {path} cannot be used: {error.strerror}; name one with room that this server "
                "may read and write"
            ) from None
        self._remove_unnamed()
        return ownership

    def require_empty(self) -> None:
        """Raise CheckpointError when there are checkpoints: a new run must not be mixed with an old one."""
        if paths := checkpoint_paths(self.path, self._disk):
            raise CheckpointError(
                f"the checkpoint folder {self.path} holds {_described(paths[0], self._disk)}: "
                "go on from it with --resume, or name another folder"
            )

    def resume(self) -> RestoredRun | None:
        """Read the newest whole checkpoint and claim the next epoch; None without any checkpoint.

        Damaged ones are skipped, with a log line each. Raises CheckpointError when all are damaged.
        """
        paths = checkpoint_paths(self.path, self._disk)
        if not paths:
            return None
        for path in paths:
            try:
                checkpoint = Checkpoint(path, self._disk)
                restored = checkpoint.load()
            except CheckpointDamaged as error:
                log.error("checkpoint ignored", path=path, reason=error)
                continue
            self.newest, self.resumed_epoch = path, restored.header.epoch
            tell = log.info if path == paths[0] else log.warning
            words = "checkpoint read" if path == paths[0] else "the run goes back to an older checkpoint"
            tell(words, path=path, run_id=checkpoint.header.run_id, version=checkpoint.version_max)
            return self.claim_epoch(restored)
        raise CheckpointError(
            f"none of the {len(paths)} checkpoints in {self.path} can be used (the log says why for each): "
            "restore the files, or name another folder"
        )

    def save(self, take: Callable[[], Snapshot]) -> Saved:
        """Write a checkpoint of what `take` returns, then remove the oldest beyond what is kept.

        Raises CheckpointError when it cannot; older ones stay. A failure is reported once, until one is written again.
        """
        # Taken under the lock: a run that is being forgotten is not written once more.
        with self._saving:
            snapshot = take()
            try:
                saved = self._write(snapshot)
            except CheckpointError as error:
                if not self.failure:
                    self._notify(f"{error}; the run goes on", True)
                self.failure = str(error)
                self.failures += 1
                raise
            if self.failure:
                self._notify(f"checkpoints can be written again: {saved.path}", False)
            self.failure = ""
            return saved

    def forget(self, run_id: str, *, reset: Callable[[str], object], validate_only: bool = False) -> None:
        """Reset the run and set its checkpoints aside, so that no later start resumes it; none is removed.

        Raises what `reset` raises, and CheckpointError when a checkpoint cannot be renamed, or, before anything is
        reset, when they cannot be listed. With `validate_only`, `reset` changes nothing either.
        """
        with self._saving:
            paths = checkpoint_paths(self.path, self._disk)
            reset(run_id)
            if validate_only:
                return
            self.newest = None
            try:
                self.set_aside(paths)
            except CheckpointError as error:
                raise CheckpointError(f"run {run_id!r} is forgotten, but its {error}") from None

    def next_path(self) -> Path:
        """Return the path of the next checkpoint. Raises OSError."""
        number = max(_numbers(self._disk.sizes(self.path), _USED_NAME), default=0) + 1
        return self.path / f"checkpoint-{number:08d}.json"

    def set_aside(self, paths: Iterable[Path]) -> None:
        """Rename checkpoints, so that no later start resumes them; none is removed. Raises CheckpointError."""
        # The newest last: a process that ends midway has either forgotten the run or not.
        for path in sorted(paths):
            aside = path.with_name(path.name.replace("checkpoint", "forgotten"))
            try:
                self._disk.rename(path, aside)
                self._disk.sync_folder(self.path)
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint {path} could not be renamed: {error.strerror}; rename it before this server is "
                    "started with --resume"
                ) from None
            log.info("checkpoint set aside", path=aside)

    def prune(self, keep: int, *, set_aside: bool = False) -> int:
        """Remove all but the newest `keep` checkpoints and the files that no other names; return how many went.

        Those that are set aside stay, unless `set_aside`. Raises OSError, and CheckpointError where they cannot be
        listed.
        """
        doomed = checkpoint_paths(self.path, self._disk)[keep:]
        if set_aside:
            doomed += [self.path / name for name in self._disk.sizes(self.path) if name.startswith("forgotten-")]
        # The oldest first: a process that ends midway leaves the newest.
        for path in reversed(doomed):
            self._disk.remove(path)
        if doomed:
            # A name must not come back without its files.
            self._disk.sync_folder(self.path)
        self._remove_unnamed()
        return len(doomed)

    def close(self, *, gives_way: bool = False) -> None:
        """Give the folder up; `gives_way`: to the server that has taken over, which may have owned it before."""
        if self._ownership is not None:
            if gives_way:
                self._ownership.give_back()
            self._ownership.close()

    def _write(self, snapshot: Snapshot) -> Saved:
        started = time.monotonic()
        ownership = self._ownership or self._own()
        try:
            if ownership.require():
                self._writer.forget()
            path = self.next_path()
            num_bytes = self._writer.write(path, snapshot, require=ownership.require)
        except (OSError, MemoryError, InUse) as error:
            self._remove_unnamed()
            reason = str(error) if isinstance(error, InUse) else "the memory does not suffice"
            reason = str(error.strerror) if isinstance(error, OSError) else reason
            raise CheckpointError(
                f"no checkpoint could be written in {self.path}: {reason}; {self._survivor()}"
            ) from None
        self.newest, self.saved_at = path, time.time()
        try:
            self.prune(self._keep)
        except (OSError, CheckpointError) as error:
            # The new one is written all the same.
            log.warning("an old checkpoint could not be removed", folder=self.path, reason=error)
        saved = Saved(path, num_bytes, time.monotonic() - started)
        log.info("checkpoint written", path=path, bytes=saved.num_bytes, seconds=saved.seconds)
        return saved

    def _survivor(self) -> str:
        try:
            if self.newest is not None and self.newest.name in self._disk.sizes(self.path):
                return f"{self.newest} stays the newest"
        except FileNotFoundError:
            # The folder is gone.
            pass
        except OSError:
            return f"{self.newest} was written before it"
        return "there is none before it"

    def _remove_unnamed(self) -> None:
        """Remove what is unfinished, and the files of shards that no checkpoint names, as far as that is possible."""
        try:
            if self._ownership is not None:
                self._ownership.require()
            names = self._disk.sizes(self.path)
            files = self._disk.sizes(self.path / SHARDS) if SHARDS in names else {}
            # The notes of an epoch and a standby may be under way on other threads.
            notes = {f"{UNFINISHED}epoch", f"{UNFINISHED}standby"}
            unfinished = [self.path / name for name in names if name.startswith(UNFINISHED) and name not in notes]
            unfinished += [self.path / SHARDS / name for name in files if name.startswith(UNFINISHED)]
            for path in unfinished:
                self._disk.remove(path)
            manifests = [name for name in names if _USED_NAME.fullmatch(name) and name.endswith(".json")]
            named = set().union(*(files_of(self.path / name, self._disk) for name in manifests))
            for file in sorted(files.keys() - named):
                self._disk.remove(self.path / SHARDS / file)
        except (FileNotFoundError, InUse):
            # The folder is gone, or another server writes there.
            return
        except (OSError, CheckpointDamaged) as error:
            # What a damaged checkpoint names is not known.
            log.warning("files that no checkpoint needs may be left", folder=self.path, reason=error)

    def claim_epoch(self, restored: RestoredRun) -> RestoredRun:
        """Note, durably, that the next epoch is taken: two lives of a server never serve under one epoch."""
        try:
            # A standby's is not made before.
            self._disk.make_folder(self.path)
            epoch = max(restored.header.epoch, epoch_of(self.path, self._disk))
            self._disk.put(self.path / "epoch", [f"{epoch + 1}\n".encode()])
            self._disk.sync_folder(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path / 'epoch'} cannot be written: {error.strerror}") from None
        return replace(restored, header=replace(restored.header, epoch=epoch))

    @property
    def standby(self) -> StandbyNote | None:
        """The standby of this folder's server; None where none could take over.

        Raises CheckpointError where the note cannot be read.
        """
        path, lines = self.path / "standby", [""]
        try:
            lines = self._disk.read(path).decode().split("\n")
            problem = f"it holds {lines!r:.100}"
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            problem = str(error)
        address, run_id, epoch, *_ = [*lines, "", ""]
        if not is_address(address) or not re.fullmatch(r"\d{1,20}", epoch):
            raise CheckpointError(
                f"{path} should name the standby of this folder's server, as host:port, the run that it follows, and "
                f"the epoch, a line each, and cannot be used: {problem}. Write that, or remove the file if no standby "
                "has taken over"
            )
        return StandbyNote(address, run_id, int(epoch))

    def note_standby(self, note: StandbyNote | None) -> bool:
        """Note, durably, where the standby of the server's run is: a later life asks it before it serves.

        The next epoch is the standby's, which may have no folder to claim it in. Return whether all that is done.
        """
        try:
            if note is not None:
                epoch = max(note.epoch + 1, epoch_of(self.path, self._disk))
                self._disk.put(self.path / "epoch", [f"{epoch}\n".encode()])
                self._disk.put(self.path / "standby", [f"{note.address}\n{note.run_id}\n{note.epoch}\n".encode()])
            else:
                self._disk.remove(self.path / "standby")
            self._disk.sync_folder(self.path)
        except (OSError, CheckpointError):
            return False
        return True


def newest(path: Path, disk: Disk | None = None) -> Checkpoint | None:
    """Return the newest checkpoint in a folder whose manifest and files are there, or None. Takes no lock."""
    for checkpoint_path in checkpoint_paths(path, disk):
        try:
            checkpoint = Checkpoint(checkpoint_path, disk)
            checkpoint.require_files()
        except CheckpointDamaged as error:
            log.warning("checkpoint ignored", path=checkpoint_path, reason=error)
        else:
            return checkpoint
    return None


def epoch_of(path: Path, disk: Disk | None = None) -> int:
    """Return the largest epoch that a server with this folder may have served under. Raises CheckpointError."""
    disk = disk or disk_of(path)
    try:
        epochs = [noted_epoch(path, disk)]
    except CheckpointDamaged as error:
        # More than the starts of any server, of which none takes less than a second.
        epochs = [int(time.time())]
        log.warning("an epoch is taken by the clock", reason=error, epoch=epochs[0])
    for checkpoint_path in checkpoint_paths(path, disk):
        with contextlib.suppress(CheckpointDamaged):
            epochs.append(Checkpoint(checkpoint_path, disk).header.epoch)
    return max(epochs)


def noted_epoch(path: Path, disk: Disk | None = None) -> int:
    """Return the epoch in the folder's file, else 0. Raises CheckpointDamaged, or CheckpointError where unreadable."""
    file = path / "epoch"
    try:
        data = (disk or disk_of(path)).read(file)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}; make it readable first") from None
    if (number := re.fullmatch(rb"\s*(\d{1,20})\s*", data)) is None or int(number[1]) > EPOCH_MAX:
        raise CheckpointDamaged(f"{file} is damaged: it holds no epoch; the next server takes one by the clock")
    return int(number[1])


def checkpoint_paths(path: Path, disk: Disk | None = None, *, set_aside: bool = False) -> list[Path]:
    """Return the checkpoints in a folder, with those set aside too, newest first. Raises CheckpointError."""
    pattern = _USED_NAME if set_aside else _NAME
    try:
        names = [name for name in (disk or disk_of(path)).sizes(path) if pattern.fullmatch(name)]
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {path} cannot be listed: {error.strerror}; make it readable first"
        ) from None
    return [path / name for name in sorted(names, key=lambda name: _numbers([name], pattern), reverse=True)]


def _numbers(names: Iterable[str], pattern: re.Pattern[str]) -> list[int]:
    return [int(match[1]) for match in map(pattern.fullmatch, names) if match]


def _described(path: Path, disk: Disk) -> str:
    try:
        checkpoint = Checkpoint(path, disk)
    except CheckpointDamaged:
        return f"{path.name}, which is damaged"
    return (
        f"{path.name} of run {checkpoint.header.run_id!r} at version {checkpoint.version_max}, "
        f"written {checkpoint.written}"
    )
