"""Shared memory, for workers of this machine: the Unix socket at which they call, and the memory that they attach."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from pyps import logs
from pyps.config import ConfigError
from pyps.run.handshake import Greeting
from pyps.service.listener import AUTO, OFF, Caller, Listener
from pyps.service.shm.connection import Connection
from pyps.service.shm.segment import Attachment, Content, Segment, check_layout
from pyps.service.transport import Host
from pyps_wire import local_pb2 as local
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.errors import NotAllowed, NotInitialized, ServerUnavailable

# Calls that wait to be accepted.
BACKLOG = 1024
# The kernel's bound on a socket's path, its closing zero left out.
PATH_BYTES_MAX = 107
# The caller's process, user and group, as the kernel reports them.
_PEER = struct.Struct("3i")
_PATTERN = "pyps-*.sock"
# Callers that may wait to attach memory, in addition to one for each worker that may be alive.
UNAUTHENTICATED_SPARE = 16
# How long a worker's new Hello waits for an earlier request in its memory until it is refused; the worker waits longer.
UNUSED_SECONDS = 5.0

log = logs.get("pyps.service")


class SharedMemory(Listener):
    """Serves workers that share their memory with this process."""

    name = "shm"
    place = "the local socket"

    def __init__(self, host: Host):
        super().__init__(host)
        self.unauthenticated_max = UNAUTHENTICATED_SPARE + host.config.max_workers
        # The socket's path or, after an '@', its abstract name.
        self._address = ""
        # The memory of closed connections in which threads still work, with its worker.
        self._leaving: list[tuple[str, Segment]] = []

    @property
    def facts(self) -> Mapping[str, str]:
        return {"shared memory": f"at {self._address}" if self._address else "not offered"}

    async def start(self, services: Mapping[str, object], address: str) -> None:
        where, name = self._host.config.local_socket, f"pyps-{secrets.token_hex(8)}"
        if where != OFF:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.setblocking(False)
            # An abstract name has no file: nothing is left behind, however the server ends.
            self._address = f"@{name}" if where == AUTO else _path_in(Path(where).absolute(), name)
            _listen(self._socket, self._address)
        await super().start(services, address)

    async def stop(self, seconds: float) -> None:
        await super().stop(seconds)
        if self._address and not self._address.startswith("@"):
            Path(self._address).unlink(missing_ok=True)

    async def offer(self, greeting: Greeting) -> wire.HelloReply:
        worker_id = greeting.worker_id
        if not greeting.observer:
            for caller in self._connected(worker_id):
                if isinstance(caller, Connection) and caller.is_hung_up:
                    caller.shut()
            await self.wait_unused(worker_id)
            self._note_hello(worker_id)
        if not self._address:
            return wire.HelloReply()
        # Observers learn the address alone.
        ticket = b"" if greeting.observer else self._tickets.issue(worker_id, greeting.incarnation)
        return wire.HelloReply(local=wire.LocalTransport(address=self._address, ticket=ticket))

    async def wait_unused(self, worker_id: str) -> None:
        """Wait until no request of a worker's closed connections can touch its memory; ServerUnavailable if late."""
        memories = [memory for owner, memory in self._leaving if owner == worker_id and not memory.unused.done()]
        if not memories:
            return
        _, going_on = await asyncio.wait(
            [asyncio.wrap_future(memory.unused) for memory in memories], timeout=UNUSED_SECONDS
        )
        if going_on:
            raise ServerUnavailable(
                f"a request of {worker_id!r} that was cut off has worked in its memory for {UNUSED_SECONDS:g} s since: "
                "try again"
            )

    def _connect(self, end: socket.socket) -> Connection:
        if not is_own_user(end):
            raise NotAllowed("it is another user's process")
        end.setblocking(False)
        return Connection(end, self._host, attach=self._attach, on_closed=self._forget)

    async def _attach(self, connection: Connection, request: local.LocalAttach, descriptor: int) -> Attachment:
        sender = request.sender
        self._require_admitted(connection, sender, request.ticket)
        attachment = await self._map(request, descriptor)
        try:
            if connection.closed:
                raise ServerUnavailable("the caller hung up before its memory was attached")
            self._take_over(sender)
            connection.attachment = attachment
            await self.wait_unused(sender.worker_id)
        except BaseException:
            connection.attachment = None
            attachment.memory.close()
            self._used.pop(sender.worker_id, None)
            raise
        self._count()
        log.info("worker shares its memory", worker=sender.worker_id, segment_bytes=attachment.memory.num_bytes)
        return attachment

    async def _map(self, request: local.LocalAttach, descriptor: int) -> Attachment:
        """Map a worker's memory, laid out for the shards of the run."""
        run, sender = self._host.run, request.sender
        run.refuse_when_unavailable()
        # Read together, before anything changes.
        shards, plan, epoch = run.content.shards, run.content.partition, run.content.epoch
        # This renews the worker's lease, and refuses unauthenticated callers.
        run.shards_to_pull(
            sender.run_id, sender.worker_id, sender.incarnation, sender.secret, observer=False, shard_ids=()
        )
        if plan is None or run.content.shards is not shards:
            raise NotInitialized("the run was reset while its memory was attached: say Hello, then attach it again")
        member = run.membership.get(sender.worker_id)
        plan = plan.without_tables()
        own = plan.of_parts(member.parts) if member is not None and member.parts else plan
        content = Content(run.content.run_id, epoch, plan, own, run.content.server_index, shards)
        check_layout(request, content)
        work = self._host.work
        memory = await work.begin(
            partial(Segment, descriptor, num_bytes=request.segment_bytes, hand_over=work.hand_over)
        )
        return Attachment.make(request, memory, content)

    def _forget(self, caller: Caller) -> None:
        super()._forget(caller)
        self._leaving = [(owner, memory) for owner, memory in self._leaving if not memory.unused.done()]
        attachment = caller.attachment if isinstance(caller, Connection) else None
        if attachment is not None and not attachment.memory.unused.done():
            self._leaving.append((attachment.sender.worker_id, attachment.memory))
        self._count()

    def _count(self) -> None:
        attachments = (caller.attachment for caller in self._callers if isinstance(caller, Connection))
        self.shared_bytes = sum(each.memory.num_bytes for each in attachments if each is not None)


def _path_in(folder: Path, name: str) -> str:
    """Return the path of a socket in a folder, without the sockets of dead servers; ConfigError if it cannot be."""
    path = os.fspath(folder / f"{name}.sock")
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
    for other in folder.glob(_PATTERN):
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.setblocking(False)
            try:
                probe.connect(os.fspath(other))
            except ConnectionRefusedError:
                # Its server was killed.
                other.unlink(missing_ok=True)
    return path


def _listen(end: socket.socket, address: str) -> None:
    if address.startswith("@"):
        end.bind(b"\0" + address[1:].encode())
        end.listen(BACKLOG)
        return
    # The socket gets its name once it listens: another server removes a socket that refuses connections.
    path = Path(address)
    hidden = path.with_name(f".{path.stem}")
    end.bind(os.fspath(hidden))
    hidden.chmod(0o600)
    end.listen(BACKLOG)
    hidden.rename(path)


def is_own_user(end: socket.socket) -> bool:
    """Return whether the caller runs as this process's user or as root: no other user may share memory with it."""
    _, user, _ = _PEER.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return user in (0, os.geteuid())
