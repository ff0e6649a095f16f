"""The port for lanes, and their number."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from pyps.config import ConfigError
from pyps.run.handshake import Greeting
from pyps.service.hosting import address_of, busy_port, listening_socket
from pyps.service.lane.connection import Connection
from pyps.service.listener import AUTO, OFF, Listener
from pyps.service.transport import Host
from pyps_wire import lane_pb2
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.contract import LANE_PORT
from pyps_wire.errors import ServerUnavailable

BACKLOG = 128
# Each may have two threads; further workers go by gRPC.
LANES_MAX = 64


class Tcp(Listener):
    """Serves workers over lanes."""

    name = "tcp"
    place = "the lane"
    # All workers at once, and some others. Each may have a thread.
    unauthenticated_max = LANES_MAX + 16

    def __init__(self, host: Host):
        super().__init__(host)
        self._threads = ThreadPoolExecutor(2 * LANES_MAX + self.unauthenticated_max, thread_name_prefix="lane")

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
            self._socket = self._socket or listening_socket(config.host, port, backlog=BACKLOG)
        if self._socket is None:
            raise ConfigError(busy_port(config.host, ports[-1], field="lane_port"))
        return ""

    def let_go(self) -> None:
        for caller in list(self._callers):
            if isinstance(caller, Connection) and caller.is_stalled:
                caller.take_no_more()

    async def stop(self, seconds: float) -> None:
        await super().stop(seconds)
        self._threads.shutdown(wait=False)

    async def offer(self, greeting: Greeting) -> wire.HelloReply:
        worker_id = greeting.worker_id
        if not greeting.observer:
            self._note_hello(worker_id)
        if self._socket is None or self._is_full(worker_id):
            return wire.HelloReply()
        ticket = b"" if greeting.observer else self._tickets.issue(worker_id, greeting.incarnation)
        return wire.HelloReply(lane=wire.LaneOffer(port=self._socket.getsockname()[1], ticket=ticket))

    def _is_full(self, worker_id: str) -> bool:
        workers = [caller.worker for caller in self._callers]
        return sum(worker is not None and worker[0] != worker_id for worker in workers) >= LANES_MAX

    def _admit(self, connection: Connection, request: lane_pb2.LaneOpen) -> None:
        self._require_admitted(connection, request.sender, request.ticket)
        if self._is_full(request.sender.worker_id):
            raise ServerUnavailable(f"this server has {LANES_MAX} lanes already, its most: go by gRPC")
        self._take_over(request.sender)

    def _connect(self, end: socket.socket) -> Connection:
        end.setblocking(True)
        return Connection(
            end,
            self._host,
            self._threads,
            admit=self._admit,
            on_closed=self._forget,
            warnings=self._warnings,
        )
