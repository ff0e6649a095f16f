"""gRPC servers as this project runs them: their options and their ports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import stat
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2_grpc

from pyps import logs
from pyps.config import ConfigError, flag_name
from pyps.service.calls import MessageReader, WaitingCalls
from pyps.service.limits import ByteBudget
from pyps.service.reflection import add_reflection
from pyps.service.security import Access
from pyps.service.tls import Tls
from pyps.service.transport import Transport
from pyps_wire.contract import messages_of

# Questions are short.
CONTROL_BYTES_MAX = 64 * 2**10
# A worker has a handful of calls under way on its connection, each of which may make the server hold a message.
_CALLS_PER_CONNECTION_MAX = 32
# For observers and commands, in addition to the workers.
_MORE_CONNECTIONS = 64
_CONTROL_CONNECTIONS_MAX = 256
# A connection without a handshake, or without a call, ends after this time. A worker sends heartbeats more often; with
# a lane it ends its other connection within a minute without a call. Clients connect again with their next call.
_HANDSHAKE_MS = 5_000
_IDLE_MS = 10_000
_DATA_IDLE_MS = 90_000
_IDLE_HEARTBEATS = 12
# Messages that may be late at once on the control port.
_CONTROL_LATE_MAX = 64
# How much more than the longest message is received, to say what is wrong with it.
_TOO_LONG_BYTES = 2**20
# Health checks that may be under way at the data port, where gRPC receives as large a message of any call.
_OPEN_READS_MAX = 16
# Clients ping an idle connection every 60 s; the server allows twice that pace before it calls it abuse.
_PING_INTERVAL_MIN_MS = 30_000
_KEEPALIVE_MS = 60_000
_KEEPALIVE_TIMEOUT_MS = 20_000
# As much as a message: on a slow link with full queues a sender need not wait until its next message is read. A gigabit
# with 20 ms of queue makes 0.65 rounds a second of 102.4 MB each way with 256 KiB of it; 0.77, 0.90 and 1.06 with 1, 2
# and 4 MiB (benchmarks/link.py). Four workers' peak of memory grows by 25 MB (benchmarks/rounds.py).
_LOOKAHEAD_BYTES = 2**22
# How often connections are counted, and the share of them that is kept free for newcomers.
_COUNT_SECONDS = 0.5
_FREE_SHARE = 4

log = logs.get("pyps.service")

Options = list[tuple[str, int]]


class Port:
    """One of gRPC's ports, with room for newcomers.

    gRPC refuses newcomers once it has as many connections as it may. Before that the port ends the oldest connections
    that have made no accepted call. gRPC does not list its connections: they are found among the process's files.
    """

    def __init__(self, reader: MessageReader, connections_max: int, options: Options):
        self._connections_max = connections_max
        limit = ("grpc.max_allowed_incoming_connections", connections_max)
        self.server = grpc.aio.server(interceptors=[reader], options=[*_common_options(), limit, *options])
        self._number = 0
        # Addresses whose connections have made a call, and since when the others were seen.
        self._known: set[str] = set()
        self._since: dict[str, float] = {}
        self._counting: asyncio.Task[None] | None = None
        reader.on_caller = self._on_caller

    def bind(self, host: str, port: int, *, tls: Tls | None, field: str) -> str:
        """Bind the port and return its address. ConfigError names the port and the setting when it is taken."""
        bound = 0
        # Tried first without gRPC, which would log a taken port itself, with less detail.
        if (probe := listening_socket(host, port)) is not None:
            probe.close()
            with contextlib.suppress(RuntimeError):
                address = address_of(host, port)
                bound = (
                    self.server.add_insecure_port(address)
                    if tls is None
                    else self.server.add_secure_port(address, tls.credentials())
                )
        if bound == 0:
            raise ConfigError(busy_port(host, port, field=field))
        self._number = bound
        return address_of(host, bound)

    async def start(self) -> None:
        await self.server.start()
        self._counting = asyncio.create_task(self._keep_room())

    async def stop(self) -> None:
        if self._counting is not None:
            self._counting.cancel()
        await self.server.stop(0.1)

    def _on_caller(self, peer: str) -> None:
        # "ipv4:127.0.0.1:51234", "ipv6:%5B::1%5D:51234"
        self._known.add(urllib.parse.unquote(peer).partition(":")[2])

    async def _keep_room(self) -> None:
        kept = self._connections_max - max(1, self._connections_max // _FREE_SHARE)
        while True:
            await asyncio.sleep(_COUNT_SECONDS)
            # Without a free file nothing can be listed; next time there may be one.
            with contextlib.suppress(OSError):
                files = [int(file.name) for file in Path("/proc/self/fd").iterdir()]
                if len(files) > kept or len(self._known) > 4 * self._connections_max:
                    self._end_oldest(files, kept)

    def _end_oldest(self, files: Sequence[int], kept: int) -> None:
        now, found = time.monotonic(), dict[str, int]()
        for file in files:
            with _socket_of(file) as end:
                if end is not None and (peer := self._peer_of(end)) is not None:
                    found[peer] = file
        self._known &= found.keys()
        self._since = {peer: self._since.get(peer, now) for peer in found if peer not in self._known}
        oldest = sorted(self._since, key=self._since.__getitem__)[: max(0, len(found) - kept)]
        for peer in oldest:
            with _socket_of(found[peer]) as end, contextlib.suppress(OSError):
                # The file may be another connection by now.
                if end is not None and self._peer_of(end) == peer:
                    end.shutdown(socket.SHUT_RDWR)
        if oldest:
            log.warning("connections that made no call were ended for others", count=len(oldest), newest=oldest[-1])

    def _peer_of(self, end: socket.socket) -> str | None:
        """Return the peer's address of a connection at this port; None for any other socket."""
        try:
            if end.family not in (socket.AF_INET, socket.AF_INET6) or end.getsockname()[1] != self._number:
                return None
            host, port, *_ = end.getpeername()
        except OSError:
            # It listens, or has ended.
            return None
        return address_of(str(host).removeprefix("::ffff:"), port)


@contextlib.contextmanager
def _socket_of(file: int) -> Iterator[socket.socket | None]:
    """Yield a copy of this process's socket of that number; None if the file is not a socket."""
    try:
        copy = os.dup(file)
    except OSError:
        yield None
        return
    if stat.S_ISSOCK(os.fstat(copy).st_mode):
        with socket.socket(fileno=copy) as end:
            yield end
    else:
        os.close(copy)
        yield None


def control_port(access: Access, *, budget: ByteBudget) -> Port:
    """Return a port for small calls, apart from large messages."""
    options = [("grpc.max_receive_message_length", CONTROL_BYTES_MAX), ("grpc.max_connection_idle_ms", _IDLE_MS)]
    reader = MessageReader(access, WaitingCalls(_CONTROL_LATE_MAX), budget)
    return Port(reader, _connections(_CONTROL_CONNECTIONS_MAX, files_share=8), options)


def _connections(count: int, *, files_share: int) -> int:
    """Return the number of connections: `count`, or fewer so that files are left for checkpoints."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return count if files_max == resource.RLIM_INFINITY else max(1, min(count, files_max // files_share))


def handlers_of(service: str, servicer: object, *, on_bytes: bool = False) -> grpc.GenericRpcHandler:
    """Return the handlers of a service: an object's methods of the same names, `on_bytes` or on messages."""
    handlers, messages = {}, messages_of(service)
    for method in descriptor_pool.Default().FindServiceByName(service).methods:
        if answer := getattr(servicer, method.name, None):
            sends, takes = (
                "stream" if many else "unary" for many in (method.client_streaming, method.server_streaming)
            )
            make = getattr(grpc, f"{sends}_{takes}_rpc_method_handler")
            request, reply = messages[method.name]
            handlers[method.name] = (
                make(answer) if on_bytes else make(answer, request.FromString, reply.SerializeToString)
            )
    return grpc.method_handlers_generic_handler(service, handlers)


def listening_socket(host: str, port: int, *, backlog: int = 1) -> socket.socket | None:
    """Return a socket that listens there; None where it cannot."""
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
        end.listen(backlog)
    except OSError:
        end.close()
        return None
    return end


def busy_port(host: str, port: int, *, field: str) -> str:
    if port == 0:
        return f"cannot listen on {host}: it is no address of this machine; choose another with --host"
    return (
        f"cannot listen on {address_of(host, port)}: port {port} is taken by another program, or {host} is "
        f"no address of this machine; choose another with {flag_name(field)} or --host"
    )


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _common_options() -> Options:
    return [
        # With it a second server would silently share the port and take half of the traffic.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", _CALLS_PER_CONNECTION_MAX),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_INTERVAL_MIN_MS),
        # The server pings too, to end the calls of a machine that vanished.
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]


class Grpc(Transport):
    """gRPC, which carries every call of the contract: the transport of all workers that have no faster one."""

    name = "grpc"

    _address = ""

    @property
    def facts(self) -> Mapping[str, str]:
        return {"data": self._address}

    def bind(self) -> str:
        host = self._host
        config = host.config
        options = [
            # gRPC's limit is above ours: a message somewhat too long gets our answer, which names the setting, and a
            # message far too long is never held.
            ("grpc.max_receive_message_length", config.max_message_bytes + _TOO_LONG_BYTES),
            ("grpc.max_send_message_length", -1),
            (
                "grpc.max_connection_idle_ms",
                max(_DATA_IDLE_MS, round(_IDLE_HEARTBEATS * 1000 * config.heartbeat_seconds)),
            ),
            # gRPC receives a message once it is read, and this much of the next. By default it would receive several
            # messages of each caller.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
        ]
        waiting_without_token = WaitingCalls(_OPEN_READS_MAX, at_once=True)
        reader = MessageReader(host.access, host.waiting, host.budget, waiting_without_token=waiting_without_token)
        # A worker has one, and may have left another that has yet to end.
        connections_max = _connections(2 * config.max_workers + _MORE_CONNECTIONS, files_share=2)
        self._port = Port(reader, connections_max, options)
        self._address = self._port.bind(config.host, config.port, tls=host.tls, field="port")
        return self._address

    async def start(self, services: Mapping[str, object], address: str) -> None:
        server = self._port.server
        server.add_generic_rpc_handlers(tuple(handlers_of(*service, on_bytes=True) for service in services.items()))
        health_pb2_grpc.add_HealthServicer_to_server(self._host.health, server)
        add_reflection(server, [*services, health.SERVICE_NAME])
        await self._port.start()

    async def stop(self, seconds: float) -> None:
        await self._port.stop()

    def used_by(self, worker_id: str, incarnation: int) -> bool:
        return True
