"""The Unix socket at which workers of this machine call."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
from pathlib import Path

from pyps.config import ConfigError

AUTO, OFF = "auto", "off"
# Calls that wait to be accepted.
BACKLOG = 1024
# The kernel's bound on a socket's path, its closing zero left out.
PATH_BYTES_MAX = 107
# process, user and group, as the kernel tells them of the caller.
_PEER = struct.Struct("3i")
_PATTERN = "pyps-*.sock"


class Listener:
    """A listening socket that is gone when its server is."""

    def __init__(self, end: socket.socket, address: str, path: Path | None):
        self.socket = end
        # What callers are told: a path or, after an '@', an abstract name.
        self.address = address
        self._path = path

    @classmethod
    def open(cls, where: str) -> Listener | None:
        """Listens at an abstract name ("auto") or in a folder; None where it is "off" or this system has neither.

        ConfigError says what is wrong with the folder.
        """
        if where == OFF or sys.platform != "linux":
            return None
        name = f"pyps-{secrets.token_hex(8)}"
        return cls._abstract(name) if where == AUTO else cls._in_folder(Path(where).absolute(), name)

    @classmethod
    def _abstract(cls, name: str) -> Listener:
        # It has no file: nothing is left behind, however the server ends.
        end = _make_socket()
        end.bind(b"\0" + name.encode())
        end.listen(BACKLOG)
        return cls(end, f"@{name}", None)

    @classmethod
    def _in_folder(cls, folder: Path, name: str) -> Listener:
        path = folder / f"{name}.sock"
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise ConfigError(
                f"--local-socket is {folder}, which is no folder to write in: name one that servers and workers share, "
                f"or say {AUTO} or {OFF}"
            )
        if len(os.fsencode(path)) > PATH_BYTES_MAX:
            raise ConfigError(
                f"--local-socket names {folder}: the socket's path there would have {len(os.fsencode(path))} bytes, "
                f"and the system takes {PATH_BYTES_MAX}: name a folder with a shorter path"
            )
        _remove_stale(folder)
        end = _make_socket()
        # It gets its name once it listens: whoever meets one that refuses may take it for a dead server's.
        hidden = path.with_name(f".{name}")
        end.bind(os.fspath(hidden))
        hidden.chmod(0o600)
        end.listen(BACKLOG)
        hidden.rename(path)
        return cls(end, os.fspath(path), path)

    def close(self) -> None:
        """Listens no longer; may be called again."""
        self.socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def is_own_user(end: socket.socket) -> bool:
    """Whether the caller runs as this process's user or as root: nobody else may share memory with it."""
    _, user, _ = _PEER.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return user in (0, os.geteuid())


def _make_socket() -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.setblocking(False)
    return end


def _remove_stale(folder: Path) -> None:
    """Removes the sockets of servers that were killed."""
    for path in folder.glob(_PATTERN):
        with _make_socket() as probe, contextlib.suppress(OSError):
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
