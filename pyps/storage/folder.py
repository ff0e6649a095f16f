"""All checkpoints of one server: numbered folders in a folder that one server owns at a time.

checkpoint-00000006/   complete ones; the newest few are kept
checkpoint-00000007/
forgotten-00000005/    checkpoints of runs that `pyps reset` made the server forget; never read, never removed
epoch                  the last epoch that a server with this folder served under
.lock                  held by the running server
.writing-…, .old-…     unfinished work of a server that was killed; removed by the next
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

from pyps import logs
from pyps.run_header import RestoredRun, Snapshot
from pyps.storage.checkpoint import Checkpoint, CheckpointDamaged, CheckpointError, write
from pyps.storage.disk import FILE_MODE, FOLDER_MODE, Disk

log = logs.get("pyps.checkpoint")

_NAME = re.compile(r"checkpoint-(\d+)")
_USED_NAME = re.compile(r"(?:checkpoint|forgotten)-(\d+)")


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint just written."""

    path: Path
    num_bytes: int
    seconds: float


class CheckpointFolder:
    """A server's checkpoint folder, owned until closed or until the process ends. Any thread may use it."""

    def __init__(
        self,
        path: Path,
        *,
        keep: int = 3,
        disk: Disk | None = None,
        notify: Callable[[str, bool], object] = lambda text, is_warning: None,
    ):
        """Take the folder. Raises CheckpointError when it cannot be used or another server has it.

        `notify` is called with a sentence when checkpoints cannot be written (a warning), and when they can again.
        """
        self.path = path
        self._notify = notify
        self._keep = keep
        self._disk = disk or Disk()
        self._lock_file = _take(path)
        self._saving = threading.Lock()
        # The checkpoint that this server wrote or resumed from last; None before the first.
        self.newest: Path | None = None
        # Unix time of the last one written; before it, of the start.
        self.saved_at = time.time()
        # Why the last try to write one failed, empty where it did not, and how many failed.
        self.failure = ""
        self.failures = 0
        for leftover in [*path.glob(".writing-*"), *path.glob(".old-*")]:
            self._disk.remove_folder(leftover)

    def require_empty(self) -> None:
        """Raise CheckpointError when there are checkpoints: a new run must not be mixed with an old one."""
        if paths := checkpoint_paths(self.path):
            raise CheckpointError(
                f"the checkpoint folder {self.path} holds {_described(paths[0])}: "
                "go on from it with --resume, or name another folder"
            )

    def resume(self) -> RestoredRun | None:
        """Read the newest whole checkpoint and claim the next epoch; None without any checkpoint.

        Damaged ones are skipped, with a log line each. Raises CheckpointError when all are damaged.
        """
        paths = checkpoint_paths(self.path)
        if not paths:
            return None
        for path in paths:
            try:
                checkpoint = Checkpoint(path)
                restored = checkpoint.load()
            except CheckpointDamaged as error:
                log.error("checkpoint ignored", path=path, reason=error)
                continue
            self.newest = path
            log.info("checkpoint read", path=path, run_id=checkpoint.header.run_id, version=checkpoint.version_max)
            return self._claim_epoch(restored)
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
            paths = checkpoint_paths(self.path)
            reset(run_id)
            if validate_only:
                return
            self.newest = None
            # The newest last: a process that ends midway has either forgotten the run or not.
            for path in reversed(paths):
                aside = path.with_name(path.name.replace("checkpoint", "forgotten"))
                try:
                    self._disk.rename(path, aside)
                    self._disk.sync_folder(self.path)
                except OSError as error:
                    raise CheckpointError(
                        f"run {run_id!r} is forgotten, but its checkpoint {path} could not be renamed: "
                        f"{error.strerror}; rename it before this server is started with --resume"
                    ) from None
                log.info("checkpoint set aside", run=run_id, path=aside)

    def close(self) -> None:
        self._lock_file.close()

    def _write(self, snapshot: Snapshot) -> Saved:
        started = time.monotonic()
        temporary: Path | None = None
        try:
            self._retake_if_replaced()
            number = max(_numbers(self.path, _USED_NAME), default=0) + 1
            temporary = self.path / f".writing-{number:08d}"
            final = self.path / f"checkpoint-{number:08d}"
            self._disk.make_folder(temporary)
            num_bytes, versions = write(temporary, snapshot, disk=self._disk)
            self._disk.sync_folder(temporary)
            self._disk.rename(temporary, final)
            self._disk.sync_folder(self.path)
        except (OSError, MemoryError) as error:
            if temporary is not None:
                self._disk.remove_folder(temporary)
            reason = error.strerror if isinstance(error, OSError) else "the memory does not suffice"
            kept = self.newest is not None and self.newest.exists()
            survivor = f"{self.newest} stays the newest" if kept else "there is none before it"
            raise CheckpointError(f"no checkpoint could be written in {self.path}: {reason}; {survivor}") from None
        self.newest, self.saved_at = final, time.time()
        for shard_id, version in versions.items():
            snapshot.shards[shard_id].durable_version = version
        self._remove_old()
        saved = Saved(final, num_bytes, time.monotonic() - started)
        log.info("checkpoint written", path=final, bytes=saved.num_bytes, seconds=saved.seconds)
        return saved

    def _retake_if_replaced(self) -> None:
        """Take the folder again where it was removed and made again, as a volume that is mounted again."""
        lock = self.path / ".lock"
        if not self.path.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder is gone, make it again")
        if not lock.exists() or not os.path.samestat(lock.stat(), os.fstat(self._lock_file.fileno())):
            taken = _take(self.path)
            self._lock_file.close()
            self._lock_file = taken

    def _remove_old(self) -> None:
        try:
            for path in checkpoint_paths(self.path)[self._keep :]:
                # Renamed first: a process that ends midway leaves no checkpoint without its files.
                doomed = path.with_name(f".old-{path.name}")
                self._disk.rename(path, doomed)
                self._disk.remove_folder(doomed)
        except (OSError, CheckpointError) as error:
            # The new one is written all the same.
            log.warning("an old checkpoint could not be removed", folder=self.path, reason=error)

    def _claim_epoch(self, restored: RestoredRun) -> RestoredRun:
        """Note, durably, that the next epoch is taken: two lives of a server never serve under one epoch."""
        epochs = [restored.header.epoch]
        with contextlib.suppress(OSError, ValueError):
            epochs.append(int((self.path / "epoch").read_text(encoding="utf-8")))
        for path in checkpoint_paths(self.path):
            with contextlib.suppress(CheckpointDamaged):
                epochs.append(Checkpoint(path).header.epoch)
        temporary = self.path / ".writing-epoch"
        temporary.unlink(missing_ok=True)
        try:
            with self._disk.create(temporary) as file:
                self._disk.write(file, f"{max(epochs) + 1}\n".encode())
                self._disk.sync(file)
            self._disk.rename(temporary, self.path / "epoch")
            self._disk.sync_folder(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path / 'epoch'} cannot be written: {error.strerror}") from None
        return replace(restored, header=replace(restored.header, epoch=max(epochs)))


def newest(path: Path) -> Checkpoint | None:
    """Return the newest checkpoint in a folder whose manifest is whole, or None. Takes no lock."""
    for checkpoint_path in checkpoint_paths(path):
        try:
            return Checkpoint(checkpoint_path)
        except CheckpointDamaged as error:
            log.warning("checkpoint ignored", path=checkpoint_path, reason=error)
    return None


def checkpoint_paths(path: Path) -> list[Path]:
    """Return the checkpoints in a folder, whole or not, newest first. Raises CheckpointError."""
    try:
        numbers = sorted(_numbers(path, _NAME), reverse=True)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {path} cannot be listed: {error.strerror}; make it readable first"
        ) from None
    return [path / f"checkpoint-{number:08d}" for number in numbers]


def _numbers(path: Path, name: re.Pattern[str]) -> list[int]:
    matches = (name.fullmatch(entry.name) for entry in path.iterdir() if entry.is_dir())
    return [int(match[1]) for match in matches if match]


def _described(path: Path) -> str:
    try:
        checkpoint = Checkpoint(path)
    except CheckpointDamaged:
        return f"{path.name}, which is damaged"
    return (
        f"{path.name} of run {checkpoint.header.run_id!r} at version {checkpoint.version_max}, "
        f"written {checkpoint.written}"
    )


def _take(path: Path) -> FileIO:
    """Make the folder where it is missing and lock it; the lock ends with the returned file."""
    with contextlib.ExitStack() as undo:
        try:
            path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            # No link is followed: who may write in the folder must not make the server write elsewhere.
            descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
            file = undo.enter_context(FileIO(descriptor, "r+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            # Its entries must be readable, too.
            next(path.iterdir(), None)
        except BlockingIOError:
            owner = file.read().decode(errors="replace").strip() or "another process"
            raise CheckpointError(
                f"the checkpoint folder {path} is in use by {owner}: give each server a folder of its own"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint folder {path} cannot be used: {error.strerror}; name one with room that this server "
                "may read and write"
            ) from None
        undo.pop_all()
    return file
