"""File operations that make something durable, in one place, so that a test can stop between any two."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

# A model, and what it was trained from, is its owner's.
FOLDER_MODE = 0o700
FILE_MODE = 0o600


def create(path: Path) -> BinaryIO:
    """Open a new file for writing, which only its owner may read."""
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, FILE_MODE))


class Disk:
    def create(self, path: Path) -> BinaryIO:
        return create(path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Return when the file's content is on the disk."""
        file.flush()
        os.fsync(file.fileno())

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=FOLDER_MODE)

    def sync_folder(self, path: Path) -> None:
        """Return when the folder's list of names is on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove_folder(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
