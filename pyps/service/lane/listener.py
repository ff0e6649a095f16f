"""The lane's listening socket: who may open one, how many there are, and when one is cut."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from pyps import logs
from pyps.config import ConfigError
from pyps.run.handshake import Greeting
from pyps.service.calls import Call
from pyps.service.hosting import address_of, busy_port
from pyps.service.lane.connection import Connection
from pyps.service.tickets import Tickets
from pyps.service.transport import Host, Service, Transport
from pyps_wire import lane_pb2
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.contract import LANE_PORT, METHODS
from pyps_wire.errors import NotAllowed, ServerUnavailable

AUTO, OFF = "auto", "off"
BACKLOG = 128
# Each has two threads; further workers go by gRPC.
LANES_MAX = 64
# Callers that have not shown a ticket come beside them: all workers at once, and some others. One more takes the place
# of the one that came first.
STRANGERS_MAX = LANES_MAX + 16
# How often the lanes are looked at.
LOOK_SECONDS = 1.0
# Workers whose last way this was are compared with those that the run still lists, where they are more.
USED_KEPT = 256

log = logs.get("pyps.service")


class Tcp(Transport):
    """Serves workers over lanes, as many as there are threads for."""

    name = "tcp"

    def __init__(self, host: Host):
        super().__init__(host)
        self._tickets = Tickets()
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        # Guarded by _lock where threads see it, and whose each is: all that are here, the earliest first.
        self._connections: dict[Connection, None] = {}
        # Guarded by _lock. Workers whose last way here was a lane, with the incarnation that used it.
        self._used: dict[str, int] = {}
        # Whether it takes no callers for the moment.
        self._paused = False
        # Told once a look.
        self._warnings = logs.Crowd(log)
        self._looking: asyncio.Task[None] | None = None
        self._pull: Any = None

    @property
    def facts(self) -> Mapping[str, str]:
        if self._socket is None:
            return {"lane": "not offered"}
        return {"lane": address_of(self._host.config.host, self._socket.getsockname()[1])}

    def bind(self) -> str:
        config = self._host.config
        if config.lane_port == OFF:
            return ""
        if config.lane_port == AUTO:
            ports = [LANE_PORT, 0] if config.port else [0]
        else:
            ports = [int(config.lane_port)]
        for port in ports:
            self._socket = self._socket or _listening(config.host, port)
        if self._socket is None:
            raise ConfigError(busy_port(config.host, ports[-1], field="lane_port"))
        return ""

    async def start(self, services: Sequence[Service], address: str) -> None:
        if self._socket is None:
            return
        details = _Details()
        handlers = [service.handlers().service(details) for service in services]
        self._pull = next(handler for handler in handlers if handler is not None).unary_stream
        self._listen()
        self._looking = asyncio.create_task(self._look_after())

    def let_go(self) -> None:
        for connection in list(self._connections):
            if connection.is_stalled:
                connection.finish()

    async def stop(self, seconds: float) -> None:
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        if self._looking is not None:
            self._looking.cancel()
        deadline = time.monotonic() + seconds
        connections = list(self._connections)
        for connection in connections:
            connection.finish()
        for connection in connections:
            await asyncio.to_thread(connection.join, deadline - time.monotonic())
            connection.shut()

    async def offer(self, greeting: Greeting) -> wire.HelloReply:
        worker_id = greeting.worker_id
        with self._lock:
            if not greeting.observer and (worker_id, greeting.incarnation) not in self._lanes():
                # Whoever lost its lane goes on by another way, unless it opens one again.
                self._used.pop(worker_id, None)
            if len(self._used) > USED_KEPT:
                listed = {member.worker_id for member in self._host.run.membership.all()}
                self._used = {name: incarnation for name, incarnation in self._used.items() if name in listed}
            is_full = self._is_full(worker_id)
        if self._socket is None or is_full:
            return wire.HelloReply()
        ticket = b"" if greeting.observer else self._tickets.issue(worker_id, greeting.incarnation)
        return wire.HelloReply(lane=wire.LaneOffer(port=self._socket.getsockname()[1], ticket=ticket))

    def used_by(self, worker_id: str, incarnation: int) -> bool:
        return self._used.get(worker_id) == incarnation

    def _lanes(self) -> list[tuple[str, int]]:
        """Whose lanes are open: worker and incarnation. With _lock held."""
        senders = [connection.sender for connection in self._connections]
        return [(sender.worker_id, sender.incarnation) for sender in senders if sender is not None]

    def _is_full(self, worker_id: str) -> bool:
        """Whether others have all the lanes that there may be. With _lock held."""
        return sum(name != worker_id for name, _ in self._lanes()) >= LANES_MAX

    def _admit(self, connection: Connection, request: lane_pb2.LaneOpen) -> None:
        """Takes a worker in, on its lane's thread."""
        sender = request.sender
        with self._lock:
            if connection not in self._connections:
                raise ServerUnavailable("the caller was cut before its lane was open")
            try:
                self._host.run.membership.require_own(sender.worker_id, sender.incarnation, sender.secret)
                self._host.run.require_named(sender.run_id)
                self._tickets.redeem(request.ticket, sender.worker_id, sender.incarnation)
            except NotAllowed as error:
                told = "callers at the lane showed what is not theirs, or was used"
                self._warnings.note(told, newest=connection.peer, reason=error)
                raise
            for other in self._connections:
                # A worker has one; its earlier one is lost, though the system has not said so yet.
                if other.sender is not None and other.sender.worker_id == sender.worker_id:
                    other.shut()
            if self._is_full(sender.worker_id):
                raise ServerUnavailable(f"this server has {LANES_MAX} lanes already, its most: go by gRPC")
            self._used[sender.worker_id] = sender.incarnation
            connection.sender = sender

    async def _answer_pull(self, request: bytes, connection: Connection) -> None:
        call = Call(connection, self._host.awaited)  # type: ignore[arg-type]
        try:
            await self._pull(request, call)
        finally:
            call.close()

    def _on_caller(self) -> None:
        assert self._socket is not None
        try:
            end, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # No descriptors are left, most likely: the next look tries again.
            log.warning("a caller at the lane could not be taken in", reason=error.strerror)
            asyncio.get_running_loop().remove_reader(self._socket)
            self._paused = True
            return
        end.setblocking(True)
        with self._lock:
            self._take_in(end)

    def _take_in(self, end: socket.socket) -> None:
        """Begins a lane, for which the earliest stranger may have to go. With _lock held."""
        strangers = [connection for connection in self._connections if connection.sender is None]
        if len(strangers) >= STRANGERS_MAX:
            self._cut_stranger(strangers[0])
        try:
            connection = Connection(
                end,
                tls=self._host.tls,
                run=self._host.run,
                budget=self._host.budget,
                admit=self._admit,
                pull=self._answer_pull,
                on_closed=self._forget,
                warnings=self._warnings,
            )
        except RuntimeError as error:
            # No thread is left.
            log.warning("a caller at the lane could not be taken in", reason=str(error))
            end.close()
            return
        self._connections[connection] = None

    def _cut_stranger(self, stranger: Connection) -> None:
        """Cuts a caller that showed no ticket, which it can no longer do. With _lock held."""
        self._warnings.note("callers at the lane that showed no ticket were cut", newest=stranger.peer)
        stranger.shut()
        del self._connections[stranger]

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._connections.pop(connection, None)

    async def _look_after(self) -> None:
        """Cuts the lanes of callers that are silent for too long, or gone."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            for connection in list(self._connections):
                if connection.is_overdue(now):
                    self._cut(connection)
                elif connection.idle and self._is_forgotten(connection):
                    connection.shut()
            self._warnings.tell()
            if self._paused:
                self._paused = False
                self._listen()

    def _cut(self, connection: Connection) -> None:
        """Cuts a caller that holds its lane up for too long."""
        with self._lock:
            if connection.sender is None:
                self._cut_stranger(connection)
                return
        newest = connection.sender.worker_id
        self._warnings.note("lanes were cut whose workers sent or took too little for too long", newest=newest)
        connection.shut()

    def _is_forgotten(self, connection: Connection) -> bool:
        sender = connection.sender
        assert sender is not None
        member = self._host.run.membership.get(sender.worker_id)
        return member is None or not member.alive or member.incarnation != sender.incarnation

    def _listen(self) -> None:
        assert self._socket is not None
        asyncio.get_running_loop().add_reader(self._socket, self._on_caller)


class _Details(grpc.HandlerCallDetails):
    """What a service is asked for."""

    method = METHODS["Pull"]
    invocation_metadata = ()


def _listening(host: str, port: int) -> socket.socket | None:
    """A socket bound there; None where it cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        end = socket.socket(family, kind, protocol)
    except OSError:
        return None
    try:
        # Connections that ended a moment ago hold no port.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        end.setblocking(False)
        end.bind(address)
        end.listen(BACKLOG)
    except OSError:
        end.close()
        return None
    return end
