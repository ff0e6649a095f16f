"""A coordinator's connections to the servers: its calls, their traffic, and queries to server 0."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from pyps.control import Control
from pyps_client import log
from pyps_client.join import Handshake
from pyps_client.launch import Launch
from pyps_client.retry import RetryPolicy, Wait
from pyps_client.transport.connection import CALL_SECONDS, Connection, Operation, Servers
from pyps_client.transport.grpc import GrpcChannel
from pyps_wire import inspector_pb2 as pb
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import InvalidArgument, PypsError, ServerUnavailable, WaitTimedOut
from pyps_wire.parameter_server_pb2 import HelloReply
from pyps_wire.work_pb2 import GetWorkRequest, WorkProgress


@dataclass(frozen=True)
class Traffic:
    """Messages and their bytes in both directions, without gRPC's own. A message and its answer count as one.

    Greetings and calls to control ports are not counted.
    """

    # Of instructions on vectors: the same for every model.
    instruction_messages: int = 0
    instruction_bytes: int = 0
    # Of passes over the data set: 8 bytes a stage, and progress with a line a worker, more of it in a slower pass.
    pass_messages: int = 0
    pass_bytes: int = 0

    @classmethod
    def of(cls, method: str, request: Message, reply: Message) -> Traffic:
        one = (1, request.ByteSize() + reply.ByteSize())
        return cls(*one) if method == "Execute" else cls(0, 0, *one)

    @property
    def messages(self) -> int:
        return self.instruction_messages + self.pass_messages

    @property
    def bytes(self) -> int:
        return self.instruction_bytes + self.pass_bytes

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(*(now - before for now, before in zip(astuple(self), astuple(earlier), strict=True)))

    def __str__(self) -> str:
        return f"{self.instruction_bytes:,} bytes of instructions and {self.pass_bytes:,} of passes sent and received"


Reply = TypeVar("Reply", bound=Message)
T = TypeVar("T")

PROTOCOL = "sandblaster"
HELLO_SECONDS = 20.0


class ServerRestarted(Exception):
    """A server was restored from a checkpoint: what the coordinator executed there since is lost."""


class Link:
    """Connections to all servers of a run, as an observer: a coordinator is no worker."""

    def __init__(self, launch: Launch) -> None:
        log.prepare()
        self.launch = launch
        self._handshake = Handshake(launch)
        self._servers = Servers(launch, rejoin=self._rejoin)
        self._closing = threading.Event()
        # Any thread adds to it, under the lock.
        self.traffic, self._traffic_lock = Traffic(), threading.Lock()
        # The servers' epochs, in order: one more with every restore.
        self._epochs: list[int] = []

    def join(self) -> None:
        """Wait for the servers and for the run's first parameters.

        Raises:
            WaitTimedOut: No worker sends parameters.
            ModelMismatch: Not all servers were named.
            InvalidArgument: The servers run another protocol.
        """
        replies = self._handshake.join(self._servers.connections, None, self._closing)
        for connection, reply in zip(self._servers.connections, replies, strict=True):
            _require_protocol(connection.name, reply)
        self.note_epochs()

    def note_epochs(self) -> None:
        """Take the servers' current epochs: `ServerRestarted` is for later restores."""
        self._epochs = [connection.epoch for connection in self._servers.connections]

    @property
    def sender(self) -> Sender:
        return self._handshake.sender

    @property
    def num_servers(self) -> int:
        return len(self._servers.connections)

    def connection(self, server: int) -> Connection:
        return self._servers.connections[server]

    def ask_all(
        self,
        method: str,
        requests: Sequence[Message | None],
        reply: type[Reply],
        *,
        timeout_seconds: float = CALL_SECONDS,
    ) -> list[Reply]:
        """Send each server its request, in parallel; return the answers in order. A server with None gets no call."""
        operations: list[Operation[Reply | None]] = [
            self._operation(method, request, reply, timeout_seconds) if request is not None else lambda *_: None
            for request in requests
        ]
        answers = self._checked_for_restarts(lambda: self._servers.on_all(operations))
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
        """Send one server a request; return its answer."""
        requests = [request if index == server else None for index in range(self.num_servers)]
        [answer] = self.ask_all(method, requests, reply, timeout_seconds=timeout_seconds)
        return answer

    def greet(self) -> None:
        """Wait until all servers answer. Raises ServerRestarted."""

        def hello(connection: Connection) -> Operation[None]:
            return lambda channel, _: self._rejoin(connection, channel, HELLO_SECONDS)

        self._servers.on_all([hello(connection) for connection in self._servers.connections])

    def work(self) -> WorkProgress:
        """Return the progress of the work from server 0; wait while it does not answer."""
        work: WorkProgress = self._inspect("GetWork", GetWorkRequest())
        return work

    def num_workers(self) -> int:
        """Return the number of live workers from server 0; wait while it does not answer."""
        status: pb.Status = self._inspect("GetStatus", pb.GetStatusRequest())
        return status.workers_alive

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._servers.close()

    def _inspect(self, method: str, request: Any) -> Any:
        policy = RetryPolicy(self.launch.loss_wait_seconds, "loss_wait_seconds")
        wait: Wait | None = None
        while True:
            try:
                # A new connection for each attempt: a restarted server may have another control port.
                with Control(self.connection(0).address, token=self.launch.token) as control:
                    reply = control.call(method, request)
            except (ServerUnavailable, WaitTimedOut) as error:
                wait = wait or policy.begin(self.connection(0).name, stop=self._closing)
                wait.pause(str(error))
                continue
            if wait is not None:
                wait.end()
            return reply

    def _operation(self, method: str, request: Message, reply: type[Reply], timeout_seconds: float) -> Operation[Reply]:
        def call(channel: GrpcChannel, _: threading.Event) -> Reply:
            answer = channel.call(method, request, reply, timeout_seconds=timeout_seconds)
            with self._traffic_lock:
                self.traffic += Traffic.of(method, request, answer)
            return answer

        return call

    def _rejoin(self, connection: Connection, channel: GrpcChannel, timeout_seconds: float) -> None:
        self._handshake.rejoin(connection, channel, timeout_seconds)
        if self._epochs and connection.epoch != self._epochs[connection.index]:
            raise ServerRestarted(f"{connection.name} was restored from a checkpoint")

    def _checked_for_restarts(self, call: Callable[[], T]) -> T:
        """Return the answer; after a refusal, raise ServerRestarted if gRPC had reconnected to a restored server."""
        try:
            return call()
        except ServerUnavailable:
            raise
        except PypsError as refusal:
            # If a server does not answer either, the refusal says more.
            with suppress(PypsError):
                self.greet()
            raise refusal from None


def _require_protocol(name: str, reply: HelloReply) -> None:
    if reply.protocol != PROTOCOL:
        raise InvalidArgument(
            f"the protocol of {name} is {reply.protocol!r}, and a coordinator needs {PROTOCOL!r}: start the servers "
            f"with --protocol {PROTOCOL}, or use `pyps sandblaster`"
        )
