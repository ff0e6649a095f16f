"""Shared memory, for workers of this machine: the Unix socket at which they call, who may, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from pyps import logs
from pyps.config import ConfigError
from pyps.run.handshake import Greeting
from pyps.service.shm.connection import Connection
from pyps.service.shm.requests import Requests
from pyps.service.shm.segment import Attachment, Segment
from pyps.service.shm.sharers import Sharers
from pyps.service.tickets import Tickets
from pyps.service.transport import Host, Service, Transport
from pyps_wire import local_pb2 as local
from pyps_wire import parameter_server_pb2 as wire

AUTO, OFF = "auto", "off"
# Calls that wait to be accepted.
BACKLOG = 1024
# The kernel's bound on a socket's path, its closing zero left out.
PATH_BYTES_MAX = 107
# process, user and group, as the kernel tells them of the caller.
_PEER = struct.Struct("3i")
_PATTERN = "pyps-*.sock"
# Callers that have not attached yet, beside one for each worker that may be alive.
STRANGERS_SPARE = 16
# How often the connections are looked at: those whose worker is gone or holds the server up are closed.
LOOK_SECONDS = 1.0

log = logs.get("pyps.service")


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


class SharedMemory(Transport):
    """Serves workers that share their memory with this process."""

    name = "shm"

    def __init__(self, host: Host):
        super().__init__(host)
        self._tickets = Tickets()
        self._requests = Requests(host.run, work=host.work, budget=host.budget)
        self._sharers = Sharers(host.run)
        self._listener: Listener | None = None
        self._connections: set[Connection] = set()
        # Whether it takes no callers for the moment.
        self._paused = False
        self._looking: asyncio.Task[None] | None = None

    @property
    def facts(self) -> Mapping[str, str]:
        return {"shared memory": f"at {self._listener.address}" if self._listener is not None else "not offered"}

    @property
    def shared_bytes(self) -> int:
        return self._sharers.shared_bytes

    def used_by(self, worker_id: str, incarnation: int) -> bool:
        return self._sharers.used_by(worker_id, incarnation)

    async def offer(self, greeting: Greeting) -> wire.HelloReply:
        worker_id, listener = greeting.worker_id, self._listener
        if not greeting.observer:
            for connection in list(self._connections):
                if connection.is_hung_up and connection in self._sharers.of(worker_id):
                    connection.close()
            await self._sharers.quiet(worker_id)
            self._sharers.greeted(worker_id)
        if listener is None:
            return wire.HelloReply()
        # To one who only asks whether memory could be shared: where, and no ticket.
        ticket = b"" if greeting.observer else self._tickets.issue(worker_id, greeting.incarnation)
        return wire.HelloReply(local=wire.LocalTransport(address=listener.address, ticket=ticket))

    async def start(self, services: Sequence[Service], address: str) -> None:
        self._listener = Listener.open(self._host.config.local_socket)
        if self._listener is not None:
            self._listen()
            self._looking = asyncio.create_task(self._look_after())

    async def stop(self, seconds: float) -> None:
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener.socket)
        self._listener.close()
        if self._looking is not None:
            self._looking.cancel()
        if tasks := [connection.task for connection in self._connections if connection.task is not None]:
            await asyncio.wait(tasks, timeout=max(seconds, 0.0))
        for connection in list(self._connections):
            connection.close()

    def _on_caller(self) -> None:
        assert self._listener is not None
        try:
            end, _ = self._listener.socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # No descriptors are left, most likely: the next look tries again.
            log.warning("a local caller could not be taken in", reason=error.strerror)
            asyncio.get_running_loop().remove_reader(self._listener.socket)
            self._paused = True
            return
        strangers = sum(connection.attachment is None for connection in self._connections)
        if strangers >= STRANGERS_SPARE + self._host.config.max_workers or not is_own_user(end):
            log.warning("a local caller was turned away", strangers=strangers, own_user=is_own_user(end))
            end.close()
            return
        end.setblocking(False)
        connection = Connection(
            end,
            requests=self._requests,
            message_bytes_max=self._host.config.max_message_bytes,
            attach=self._attach,
            on_attached=self._sharers.take,
            on_closed=self._on_closed,
        )
        self._connections.add(connection)

    async def _attach(self, request: local.LocalAttach, descriptor: int) -> Attachment:
        """Takes a worker's memory in; the descriptor can be closed afterwards."""
        sender = request.sender
        self._host.run.membership.require_own(sender.worker_id, sender.incarnation, sender.secret)
        self._host.run.require_named(sender.run_id)
        self._tickets.redeem(request.ticket, sender.worker_id, sender.incarnation)
        map_it = partial(Segment, descriptor, num_bytes=request.segment_bytes, hand_over=self._host.work.hand_over)
        return await self._requests.attach(request, map_it)

    def _on_closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._sharers.drop(connection)

    async def _look_after(self) -> None:
        """Closes the connections of callers that are silent for too long, or gone."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for connection in list(self._connections):
                if (
                    connection.is_overdue(loop.time())
                    # Behind a further request that is not heard while one is worked on.
                    or (connection.task is not None and connection.is_hung_up)
                    or (connection.idle and self._is_forgotten(connection))
                ):
                    connection.close()
            if self._paused:
                self._paused = False
                self._listen()

    def _is_forgotten(self, connection: Connection) -> bool:
        attachment = connection.attachment
        if attachment is None:
            return False
        member = self._host.run.membership.get(attachment.worker_id)
        return member is None or not member.alive or member.incarnation != attachment.incarnation

    def _listen(self) -> None:
        assert self._listener is not None
        asyncio.get_running_loop().add_reader(self._listener.socket, self._on_caller)
