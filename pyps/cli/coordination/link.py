"""A coordinator's way to the servers of its run: every call goes on through lost connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from google.protobuf.message import Message

from pyps.cli.coordination.traffic import Traffic, TrafficMeter
from pyps_client import log
from pyps_client.channel import Channel
from pyps_client.connection import CALL_SECONDS, Connection
from pyps_client.handshake import Handshake
from pyps_client.launch import Launch
from pyps_client.retry import RetryPolicy
from pyps_client.servers import Operation, Servers
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import BadRequest, ModelMismatch, PypsError, ServerUnavailable
from pyps_wire.parameter_server_pb2 import HelloReply

Reply = TypeVar("Reply", bound=Message)
T = TypeVar("T")

PROTOCOL = "sandblaster"
HELLO_SECONDS = 20.0


class ServerRestarted(Exception):
    """A server was restored from a checkpoint: what the coordinator had made there since is gone."""


class Link:
    """Connections to all servers of a run, as an observer: a coordinator never counts as a worker."""

    def __init__(self, launch: Launch) -> None:
        log.prepare()
        self.launch = launch
        self._handshake = Handshake(launch)
        self._servers = Servers(launch, rejoin=self._rejoin)
        self._closing = threading.Event()
        self._meter = TrafficMeter()
        # The servers' epochs, in their order: one more with every restore.
        self._epochs: list[int] = []

    def join(self) -> None:
        """Waits for the servers and for the run's first parameters.

        Raises WaitTimedOut where no worker brings them, ModelMismatch where not all servers were named, and BadRequest
        where their protocol is another.
        """
        replies = self._handshake.join(self._servers.connections, None, self._closing)
        first = replies[0]
        if first.num_servers != len(self.launch.servers):
            raise ModelMismatch(
                f"the run is spread over {first.num_servers} servers, {len(self.launch.servers)} were named: name them "
                "all, in order"
            )
        for connection, reply in zip(self._servers, replies, strict=True):
            _require_protocol(connection.name, reply)
        self.note_epochs()

    def note_epochs(self) -> None:
        """Takes the servers as they are now: later restores count."""
        self._epochs = [connection.epoch for connection in self._servers]

    @property
    def sender(self) -> Sender:
        """The coordinator as its messages name it."""
        return self._handshake.sender

    @property
    def num_servers(self) -> int:
        return len(self._servers.connections)

    @property
    def traffic(self) -> Traffic:
        """Everything said since the beginning."""
        return self._meter.total

    def name(self, server: int) -> str:
        """A server for people: "server 1 (127.0.0.1:7620)"."""
        return self._servers.connections[server].name

    def ask_all(
        self, method: str, requests: Sequence[Message], reply: type[Reply], *, timeout_seconds: float = CALL_SECONDS
    ) -> list[Reply]:
        """Sends each server its request, all at once; returns the answers in the servers' order."""
        operations = [self._operation(method, request, reply, timeout_seconds) for request in requests]
        return self._looking_for_restarts(lambda: self._servers.on_all(operations))

    def ask_others(
        self, method: str, requests: Sequence[Message], reply: type[Reply], *, timeout_seconds: float = CALL_SECONDS
    ) -> list[Reply]:
        """Sends each server but the first its request, all at once; returns the answers in the servers' order."""
        operations: list[Operation[Reply | None]] = [lambda *_: None]
        operations += [self._operation(method, request, reply, timeout_seconds) for request in requests]
        answers = self._looking_for_restarts(lambda: self._servers.on_all(operations))
        return [answer for answer in answers if answer is not None]

    def ask(
        self,
        server: int,
        method: str,
        request: Message,
        reply: type[Reply],
        *,
        timeout_seconds: float = CALL_SECONDS,
    ) -> Reply:
        """Sends one server a request."""
        operation = self._operation(method, request, reply, timeout_seconds)
        return self._looking_for_restarts(lambda: self._persist(self._servers.connections[server], operation))

    def greet(self) -> None:
        """Asks all servers whether they are there, and waits for one that is not. Raises ServerRestarted."""

        def hello(connection: Connection) -> Operation[None]:
            return lambda channel, _: self._rejoin(connection, channel, HELLO_SECONDS)

        self._servers.on_all([hello(connection) for connection in self._servers])

    def close(self) -> None:
        """Frees the connections."""
        self._closing.set()
        self._servers.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _operation(self, method: str, request: Message, reply: type[Reply], timeout_seconds: float) -> Operation[Reply]:
        def call(channel: Channel, _: threading.Event) -> Reply:
            answer = channel.call(method, request, reply, timeout_seconds=timeout_seconds)
            self._meter.count(request, answer, of_instructions=method == "Execute")
            return answer

        return call

    def _persist(self, connection: Connection, operation: Operation[T]) -> T:
        policy = RetryPolicy(self.launch.loss_wait_seconds, "loss_wait_seconds")
        return connection.persist(operation, rejoin=self._rejoin, stop=self._closing, policy=policy)

    def _rejoin(self, connection: Connection, channel: Channel, timeout_seconds: float) -> None:
        self._handshake.rejoin(connection, channel, timeout_seconds)
        if self._epochs and connection.epoch != self._epochs[connection.index]:
            raise ServerRestarted(f"{connection.name} was restored from a checkpoint")

    def _looking_for_restarts(self, ask: Callable[[], T]) -> T:
        """Asks, and looks behind a refusal: gRPC may have connected anew to a server that was restored, unnoticed."""
        try:
            return ask()
        except ServerUnavailable:
            raise
        except PypsError as refusal:
            self._greet_after(refusal)
            raise

    def _greet_after(self, refusal: PypsError) -> None:
        try:
            self.greet()
        except PypsError:
            # A server that is gone too is no better news than the refusal.
            raise refusal from None


def _require_protocol(name: str, reply: HelloReply) -> None:
    if reply.protocol != PROTOCOL:
        raise BadRequest(
            f"the protocol of {name} is {reply.protocol!r}, and a coordinator needs {PROTOCOL!r}: start the servers "
            f"with --protocol {PROTOCOL}, or use `pyps sandblaster`"
        )
