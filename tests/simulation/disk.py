"""A disk in memory, which loses at a crash what was not synced, is full at times, and is slow."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import PurePath
from random import Random
from types import SimpleNamespace
from typing import Any

from pyps.storage.disk import Disk
from tests.simulation.world import Process, World

# What Python's buffered files hand over to the system.
BUFFER_BYTES = 8192


class File:
    def __init__(self) -> None:
        self.data = bytearray()
        # As the disk has it for sure.
        self.synced = b""

    def crash(self, random: Random) -> None:
        """Keep what was synced, and any part of the rest."""
        if len(self.data) > len(self.synced):
            kept = random.choice((0, len(self.data) - len(self.synced), random.randrange(len(self.data) + 1)))
            del self.data[len(self.synced) + kept :]
            if kept and random.random() < 0.3:
                # Its length is known, its content never came.
                self.data[len(self.synced) :] = bytes(len(self.data) - len(self.synced))


class Folder:
    def __init__(self) -> None:
        self.entries: dict[str, File | Folder] = {}
        self._synced: dict[str, File | Folder] = {}
        # What changed since: the name that is gone, and the one that came.
        self._changes: list[tuple[str, str, File | Folder | None]] = []

    def change(self, gone: str, came: str, node: File | Folder | None) -> None:
        if gone:
            self.entries.pop(gone, None)
        if node is not None:
            self.entries[came] = node
        self._changes.append((gone, came, node))

    def sync(self) -> None:
        self._synced, self._changes = dict(self.entries), []

    def crash(self, random: Random) -> None:
        """Keep any of the changes that were not synced; each happened or did not."""
        changes, self.entries = self._changes, dict(self._synced)
        all_or_none = random.random() if random.random() < 0.5 else None
        for gone, came, node in changes:
            if (random.random() if all_or_none is None else all_or_none) < 0.5:
                if gone:
                    node = self.entries.pop(gone, None)
                if came and node is not None:
                    self.entries[came] = node
        self.sync()
        for node in self.entries.values():
            node.crash(random)


class Writing:
    """A file that was opened for writing: the system gets its bytes late, as from Python's buffer."""

    def __init__(self, file: File):
        self.file = file
        self._buffer = bytearray()

    def write(self, data: bytes | memoryview) -> int:
        self._buffer += data
        if len(self._buffer) > BUFFER_BYTES:
            self.flush()
        return len(data)

    def flush(self) -> None:
        self.file.data += self._buffer
        self._buffer.clear()

    def tell(self) -> int:
        return len(self.file.data) + len(self._buffer)

    def close(self) -> None:
        self.flush()

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SimDisk(Disk):
    """A process's disk. Before each operation the process may die, others go on, or there is no room."""

    def __init__(self, root: Folder, process: Process, before: Callable[[str, str], bool]):
        """`before` gets each operation and a name, and returns whether the disk is full."""
        self._root, self._process, self._before = root, process, before

    def _operate(self, operation: str, name: str = "") -> None:
        world = World.active
        self._process.check()
        full = self._before(operation, name)
        self._process.check()
        if full and operation in ("create", "write", "sync", "make_folder"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if world.thread is not None:
            world.park(None, self._process.random.expovariate(300.0))

    def _found(self, path: PurePath) -> Any:
        node: File | Folder | None = self._root
        for part in path.parts[1:]:
            node = node.entries.get(part) if isinstance(node, Folder) else None
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return node

    def create(self, path: PurePath) -> Any:
        self._operate("create", path.name)
        folder, file = self._found(path.parent), File()
        if path.name in folder.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        folder.change("", path.name, file)
        return Writing(file)

    def write(self, file: Any, data: bytes | memoryview) -> None:
        self._operate("write")
        file.write(data)

    def sync(self, file: Any) -> None:
        self._operate("sync")
        file.flush()
        file.file.synced = bytes(file.file.data)

    def make_folder(self, path: PurePath) -> None:
        self._operate("make_folder", path.name)
        folder = self._found(path.parent)
        if path.name not in folder.entries:
            folder.change("", path.name, Folder())

    def sync_folder(self, path: PurePath) -> None:
        self._operate("sync_folder", path.name)
        self._found(path).sync()

    def rename(self, old: PurePath, new: PurePath) -> None:
        self._operate("rename", new.name)
        self._found(new.parent).change(old.name, new.name, self._found(old))

    def remove(self, path: PurePath) -> None:
        self._operate("remove", path.name)
        folder = self._found(path.parent)
        if path.name in folder.entries:
            folder.change(path.name, "", None)

    def read(self, path: PurePath) -> bytes:
        return bytes(self._found(path).data)

    def sizes(self, folder: PurePath) -> dict[str, int]:
        entries = self._found(folder).entries.items()
        return {name: len(node.data) if isinstance(node, File) else -1 for name, node in entries}

    def own(self, folder: PurePath) -> Any:
        made = self._root.entries.setdefault(folder.name, Folder())
        self._root.sync()
        is_another = lambda: self._root.entries.get(folder.name) is not made  # noqa: E731
        return SimpleNamespace(require=is_another, close=lambda: None, give_back=lambda: None)
