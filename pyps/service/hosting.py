"""gRPC servers as this project runs them: their options and their ports."""

from __future__ import annotations

import resource
import socket
from collections.abc import Mapping, Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc

from pyps.config import ConfigError, flag_name
from pyps.service.calls import Awaited, MessageReader
from pyps.service.limits import ByteBudget
from pyps.service.reflection import add_reflection
from pyps.service.security import Access
from pyps.service.tls import Tls
from pyps.service.transport import Host, Service, Transport
from pyps_wire.contract import PARAMETER_SERVER, VECTOR_MACHINE, WORK_QUEUE, messages_of

# Questions are short.
CONTROL_BYTES_MAX = 64 * 2**10
# A worker has a handful of calls under way on its connection, each of which may make the server hold a message.
_CALLS_PER_CONNECTION_MAX = 32
# Observers and commands come beside the workers; commands alone to the control port.
_MORE_CONNECTIONS = 64
_CONTROL_CONNECTIONS_MAX = 256
# Who says nothing after connecting, and who makes no call for so long, holds a place that others need. A worker gives
# heartbeats more often, and ends its other connection by itself, as beside a lane, within a minute without a call;
# whoever is cut off connects anew with its next call.
_HANDSHAKE_MS = 5_000
_IDLE_MS = 10_000
_DATA_IDLE_MS = 90_000
_IDLE_HEARTBEATS = 12
# Messages that may be late at once on the control port.
_CONTROL_LATE_MAX = 64
# Beyond the longest message: so much is taken in to say what was wrong with it.
_TOO_LONG_BYTES = 2**20
# Health checks that have begun, on a port where gRPC takes in messages of any call as large as a tensor's.
_OPEN_READS_MAX = 16
# Clients ping an idle connection every 60 s; the server allows twice that pace before it calls it abuse.
_PING_INTERVAL_MIN_MS = 30_000
_KEEPALIVE_MS = 60_000
_KEEPALIVE_TIMEOUT_MS = 20_000
# As much as a message: on a slow link with full queues a sender goes on while its next message is asked for. A gigabit
# with 20 ms of queue makes 0.65 rounds a second of 102.4 MB each way with 256 KiB of it; 0.77, 0.90 and 1.06 with 1, 2
# and 4 MiB (benchmarks/link.py). Four workers' peak of memory grows by 25 MB (benchmarks/rounds.py).
_LOOKAHEAD_BYTES = 2**22

Options = list[tuple[str, int]]


def make_control_server(access: Access, *, budget: ByteBudget) -> grpc.aio.Server:
    """A server for small calls, on a port of its own: large messages stand in nobody's way there."""
    options = [
        ("grpc.max_receive_message_length", CONTROL_BYTES_MAX),
        ("grpc.max_allowed_incoming_connections", _connections(_CONTROL_CONNECTIONS_MAX, files_share=8)),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
    ]
    return _make_server(MessageReader(access, Awaited(_CONTROL_LATE_MAX), budget), options)


def _connections(count: int, *, files_share: int) -> int:
    """So many connections, or fewer where each would leave no file for a checkpoint."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return count if files_max == resource.RLIM_INFINITY else max(1, min(count, files_max // files_share))


def _make_server(reader: MessageReader, options: Options) -> grpc.aio.Server:
    return grpc.aio.server(interceptors=[reader], options=[*_common_options(), *options])


def handlers_of(service: str, servicer: object) -> grpc.GenericRpcHandler:
    """Return the handlers of a service of unary calls, which are methods of these names of an object."""
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name), request.FromString, reply.SerializeToString)
        for name, (request, reply) in messages_of(service).items()
        if hasattr(servicer, name)
    }
    return grpc.method_handlers_generic_handler(service, handlers)


def bind(server: grpc.aio.Server, host: str, port: int, *, tls: Tls | None, field: str) -> str:
    """Binds a port, with `tls` for TLS alone, and returns its address.

    ConfigError names the port and the setting when it is taken.
    """
    try:
        # gRPC would tell of a port that is taken in lines of its own, which say less.
        if not _can_listen(host, port):
            bound = 0
        elif tls is None:
            bound = server.add_insecure_port(address_of(host, port))
        else:
            bound = server.add_secure_port(address_of(host, port), tls.credentials())
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise ConfigError(busy_port(host, port, field=field))
    return address_of(host, bound)


def _can_listen(host: str, port: int) -> bool:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: connections that ended a moment ago hold no port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


def busy_port(host: str, port: int, *, field: str) -> str:
    """What to say of a port that cannot be bound."""
    if port == 0:
        return f"cannot listen on {host}: it is no address of this machine; choose another with --host"
    return (
        f"cannot listen on {address_of(host, port)}: port {port} is taken by another program, or {host} is "
        f"no address of this machine; choose another with {flag_name(field)} or --host"
    )


def address_of(host: str, port: int) -> str:
    """host:port, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _common_options() -> Options:
    return [
        # Without this a second server would silently share the port and take half of the traffic.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", _CALLS_PER_CONNECTION_MAX),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_INTERVAL_MIN_MS),
        # The server pings too: a machine that vanished must not leave calls behind.
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]


class Grpc(Transport):
    """gRPC, over which every call of the contract goes: the way of all workers that have no nearer one."""

    name = "grpc"

    def __init__(self, host: Host):
        super().__init__(host)
        self._address = ""

    @property
    def facts(self) -> Mapping[str, str]:
        return {"data": self._address}

    def bind(self) -> str:
        host = self._host
        config = host.config
        options = [
            # gRPC's own limit stands above ours, so that a message somewhat too long gets our answer, which names the
            # setting, and one far too long is never held.
            ("grpc.max_receive_message_length", config.max_message_bytes + _TOO_LONG_BYTES),
            ("grpc.max_send_message_length", -1),
            # A worker has one, and may have left another behind that has yet to end.
            (
                "grpc.max_allowed_incoming_connections",
                _connections(2 * config.max_workers + _MORE_CONNECTIONS, files_share=2),
            ),
            (
                "grpc.max_connection_idle_ms",
                max(_DATA_IDLE_MS, round(_IDLE_HEARTBEATS * 1000 * config.heartbeat_seconds)),
            ),
            # A message is taken in once it is asked for, and so much of the next. Left to itself gRPC would take in
            # what it believes to be under way, several messages of each caller.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
        ]
        open_awaited = Awaited(_OPEN_READS_MAX, at_once=True)
        reader = MessageReader(host.access, host.awaited, host.budget, open_awaited=open_awaited)
        self._server = _make_server(reader, options)
        self._address = bind(self._server, config.host, config.port, tls=host.tls, field="port")
        return self._address

    async def start(self, services: Sequence[Service], address: str) -> None:
        self._server.add_generic_rpc_handlers(tuple(service.handlers() for service in services))
        health_pb2_grpc.add_HealthServicer_to_server(self._host.health, self._server)
        add_reflection(self._server, [PARAMETER_SERVER, WORK_QUEUE, VECTOR_MACHINE, health.SERVICE_NAME])
        await self._server.start()

    async def stop(self, seconds: float) -> None:
        await self._server.stop(0.1)

    def used_by(self, worker_id: str, incarnation: int) -> bool:
        return True
