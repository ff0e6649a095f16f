"""Every file operation of checkpoints, in one place, so that a test can stop between any two, or replace the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import BinaryIO

# A model, and what it was trained from, is its owner's.
FOLDER_MODE = 0o700
FILE_MODE = 0o600
# Files that are being written. Those of a process that was killed stay until the next takes the folder.
UNFINISHED = ".writing-"


class InUse(Exception):
    """A folder belongs to another process, which the text names."""


def create(path: Path) -> BinaryIO:
    """Open a new file for writing, which only its owner may read."""
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, FILE_MODE))


class Disk:
    """Files on this machine's disks. Every method raises OSError where it cannot."""

    def create(self, path: Path) -> BinaryIO:
        return create(path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Return when the file's content is on the disk."""
        file.flush()
        os.fsync(file.fileno())

    def make_folder(self, path: Path) -> None:
        """Make the folder where it is missing, and those above it."""
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)

    def sync_folder(self, path: Path) -> None:
        """Return when the folder's list of names is on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def sizes(self, folder: Path) -> dict[str, int]:
        """Return the size of each entry of a folder by its name, -1 for a folder in it."""
        with os.scandir(folder) as entries:
            return {entry.name: -1 if entry.is_dir() else entry.stat().st_size for entry in entries}

    def put(self, path: Path, buffers: Iterable[bytes | memoryview]) -> None:
        """Write a file, which appears whole and on the disk, or not at all; its name lasts once its folder is synced.

        Raise OSError or MemoryError; nothing of the file is left then.
        """
        temporary = path.with_name(UNFINISHED + path.name)
        try:
            self.remove(temporary)
            with self.create(temporary) as file:
                for data in buffers:
                    self.write(file, data)
                self.sync(file)
            self.rename(temporary, path)
        except (OSError, MemoryError):
            with contextlib.suppress(OSError):
                self.remove(temporary)
            raise

    def own(self, folder: Path) -> Ownership:
        """Make a folder where it is missing, and take it for this process. Raises InUse."""
        return Ownership(folder)


class Ownership:
    """A folder that no other process owns, until it is closed or the process ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = _locked(folder)

    def give_back(self) -> None:
        """Leave the folder to the process that had it before, if that lives: a lock is free once it is closed."""

    def require(self) -> bool:
        """Take the folder again where it was removed and made again, as a volume that is mounted again.

        Return whether it is another one. Raise InUse where another process was faster.
        """
        lock = self._folder / ".lock"
        if not self._folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder is gone, make it again")
        if lock.exists() and os.path.samestat(lock.stat(), os.fstat(self._file.fileno())):
            return False
        taken = _locked(self._folder)
        self._file.close()
        self._file = taken
        return True

    def close(self) -> None:
        self._file.close()


def _locked(folder: Path) -> FileIO:
    """Make the folder where it is missing and lock it; the lock ends with the returned file."""
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    # No link is followed: who may write in the folder must not make the server write elsewhere.
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    with contextlib.ExitStack() as undo:
        file = undo.enter_context(FileIO(descriptor, "r+"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(file.read().decode(errors="replace").strip() or "another process") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        # Its entries must be readable, too.
        next(folder.iterdir(), None)
        undo.pop_all()
    return file
