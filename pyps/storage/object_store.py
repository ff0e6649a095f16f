"""A disk of objects: any file system that fsspec knows by a URL, as S3.

There is no rename and nothing to sync: an object appears whole or not at all. Nor is there a lock: the last server that
takes a folder owns it, and the one before finds that when it saves next.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pyps import logs
from pyps.storage.disk import Disk, InUse, Ownership
from pyps_wire.errors import InvalidArgument

_OWNER = "owner"
# Until a store has to take the name of a folder's owner; s3fs itself tries for minutes.
ANSWER_SECONDS = 30

log = logs.get("pyps.checkpoint")


def disk_of(path: Path) -> Disk:
    """Return the disk that a path is on: this machine's, or what fsspec knows by a URL (s3://bucket/folder)."""
    return ObjectStore(path.parts[0][:-1]) if is_remote(path) else Disk()


def is_remote(path: Path) -> bool:
    """Return whether a path is a URL."""
    return len(path.parts) > 1 and re.fullmatch(r"[a-z][a-z0-9+.-]*:", path.parts[0]) is not None


class ObjectStore(Disk):
    """The objects under one protocol. Paths are URLs, of whose two slashes `Path` leaves one."""

    def __init__(self, protocol: str) -> None:
        try:
            # Only those who name such a path need the library.
            import fsspec

            options = {"auto_mkdir": True} if protocol == "file" else {}
            # Others write there, too.
            self._files: Any = fsspec.filesystem(protocol, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise InvalidArgument(f"{protocol}:// cannot be used: {error}; pip install 'pyps[fsspec]'") from None

    def create(self, path: Path) -> BinaryIO:
        raise NotImplementedError("objects are put as a whole")

    def make_folder(self, path: Path) -> None:
        """Nothing: an object is at a path without folders."""

    def sync_folder(self, path: Path) -> None:
        """Nothing: what was put is kept."""

    def rename(self, old: Path, new: Path) -> None:
        with _os_errors():
            self._files.cp_file(_url(old), _url(new))
            self._files.rm_file(_url(old))

    def remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError), _os_errors():
            self._files.rm_file(_url(path))

    def read(self, path: Path) -> bytes:
        with _os_errors():
            data: bytes = self._files.cat_file(_url(path))
            return data

    def sizes(self, folder: Path) -> dict[str, int]:
        with contextlib.suppress(FileNotFoundError), _os_errors():
            found = self._files.ls(_url(folder), detail=True)
            return {
                entry["name"].rstrip("/").rpartition("/")[2]: -1 if entry["type"] == "directory" else entry["size"]
                for entry in found
            }
        # A folder without objects is none.
        return {}

    def put(self, path: Path, buffers: Iterable[bytes | memoryview]) -> None:
        with _os_errors():
            self._files.pipe_file(_url(path), b"".join(buffers))

    def own(self, folder: Path) -> Ownership:
        log.info("asking for the folder of checkpoints", folder=folder, seconds_max=ANSWER_SECONDS)
        return _Owner(self, folder)

    def read_owner(self, path: Path) -> str:
        """Return the owner of a folder; "" for none."""
        with contextlib.suppress(FileNotFoundError), _os_errors():
            data: bytes = self._files.cat_file(_url(path), **self._deadline)
            return data.decode(errors="replace")
        return ""

    def put_owner(self, path: Path, owner: str) -> None:
        with _os_errors():
            self._files.pipe_file(_url(path), owner.encode(), **self._deadline)

    @property
    def _deadline(self) -> dict[str, float]:
        # Those without an event loop know none.
        return {"timeout": ANSWER_SECONDS} if self._files.async_impl else {}


class _Owner(Ownership):
    def __init__(self, store: ObjectStore, folder: Path) -> None:
        self._store = store
        self._path = folder / _OWNER
        self._text = f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(8)})"
        self._before = store.read_owner(self._path)
        store.put_owner(self._path, self._text)

    def require(self) -> bool:
        try:
            owner = self._store.read(self._path).decode(errors="replace")
        except FileNotFoundError:
            self._store.put_owner(self._path, self._text)
            return True
        if owner != self._text:
            raise InUse(f"{self._path.parent} was taken by {owner}")
        return False

    def give_back(self) -> None:
        with contextlib.suppress(OSError):
            if self._before and self._store.read_owner(self._path) == self._text:
                self._store.put_owner(self._path, self._before)

    def close(self) -> None:
        """Nothing: the next owner replaces this one."""


def _url(path: Path) -> str:
    protocol, *rest = path.parts
    return f"{protocol}//{'/' if protocol == 'file:' else ''}{'/'.join(rest)}"


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Raise OSError, with a reason, for whatever a library raises."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, f"No such object: {error}") from None
    except TimeoutError:
        raise OSError(errno.EIO, f"no answer in {ANSWER_SECONDS} s") from None
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
