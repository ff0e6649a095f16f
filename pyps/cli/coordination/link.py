"""A coordinator's way to the servers: its calls, what it learns from server 0, and what all of it weighs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from types import TracebackType
from typing import Any, TypeVar

from google.protobuf.message import Message

from pyps.cli.control import Control
from pyps_client import log
from pyps_client.join import Handshake
from pyps_client.launch import Launch
from pyps_client.retry import RetryPolicy, Wait
from pyps_client.transport import Channel
from pyps_client.transport.connection import CALL_SECONDS, Connection, Operation, Servers
from pyps_wire import inspector_pb2 as pb
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import BadRequest, ModelMismatch, PypsError, ServerUnavailable, WaitTimedOut
from pyps_wire.parameter_server_pb2 import HelloReply
from pyps_wire.work_pb2 import GetWorkRequest, WorkProgress


@dataclass(frozen=True)
class Traffic:
    """Messages and their bytes, both ways, without gRPC's own. A message and its answer count as one.

    Greetings are not counted, nor what is asked at control ports: they have no part in any iteration's figures.
    """

    # Of instructions on vectors: as many for a small model as for a large one.
    instruction_messages: int = 0
    instruction_bytes: int = 0
    # Of passes over the data set: 8 bytes a staged sum, and progress, which has a line a worker and is told of more
    # often in a pass that takes longer.
    pass_messages: int = 0
    pass_bytes: int = 0

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


class TrafficMeter:
    """Adds up messages. Any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = Traffic()

    @property
    def total(self) -> Traffic:
        return self._total

    def count(self, request: Message, reply: Message, *, of_instructions: bool) -> None:
        """Counts one call."""
        one = (1, request.ByteSize() + reply.ByteSize())
        with self._lock:
            self._total += Traffic(*one) if of_instructions else Traffic(0, 0, *one)


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

    def address(self, server: int) -> str:
        """Where a server was found last."""
        return self._servers.connections[server].address

    def ask_all(
        self,
        method: str,
        requests: Sequence[Message | None],
        reply: type[Reply],
        *,
        timeout_seconds: float = CALL_SECONDS,
    ) -> list[Reply]:
        """Sends each server its request, all at once; returns the answers in the servers' order. None asks nothing."""
        operations: list[Operation[Reply | None]] = [
            self._operation(method, request, reply, timeout_seconds) if request is not None else lambda *_: None
            for request in requests
        ]
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

    def work(self) -> WorkProgress:
        """Where the work stands, as server 0 tells; it is waited for where it is gone for a while."""
        work: WorkProgress = self._inspect("GetWork", GetWorkRequest())
        return work

    def num_workers(self) -> int:
        """Workers that are alive, as server 0 tells."""
        status: pb.Status = self._inspect("GetStatus", pb.GetStatusRequest())
        return status.workers_alive

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

    def _inspect(self, method: str, request: Any) -> Any:
        policy = RetryPolicy(self.launch.loss_wait_seconds, "loss_wait_seconds")
        wait: Wait | None = None
        while True:
            try:
                # Made anew for each try: a server that comes back may have another control port.
                with Control(self._servers.connections[0].address, token=self.launch.token) as control:
                    reply = control.call(method, request)
            except (ServerUnavailable, WaitTimedOut) as error:
                wait = wait or policy.begin(self.name(0), stop=self._closing)
                wait.pause(str(error))
                continue
            if wait is not None:
                wait.end()
            return reply

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
            # A server that is gone too is no better news than the refusal.
            with suppress(PypsError):
                self.greet()
            raise refusal from None


def _require_protocol(name: str, reply: HelloReply) -> None:
    if reply.protocol != PROTOCOL:
        raise BadRequest(
            f"the protocol of {name} is {reply.protocol!r}, and a coordinator needs {PROTOCOL!r}: start the servers "
            f"with --protocol {PROTOCOL}, or use `pyps sandblaster`"
        )
