"""Joining a run: Hello, the election of an initialiser, and Hello again after a lost connection."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence

from pyps_client.channel import Channel
from pyps_client.connection import ADVICE, CALL_SECONDS, Connection
from pyps_client.initialization import Initialization, Lease, Values
from pyps_client.launch import Launch
from pyps_client.log import logger
from pyps_client.retry import LinkLost, RetryPolicy
from pyps_client.shareable import check_shareable
from pyps_client.version import SOFTWARE
from pyps_wire.codecs import CODECS, item_size
from pyps_wire.common_pb2 import (
    CODEC_FLOAT32,
    ROLE_OBSERVER,
    ROLE_WORKER,
    RUN_STATE_DRAINING,
    RUN_STATE_EMPTY,
    RUN_STATE_INITIALIZING,
    OptimizerSettings,
    Sender,
)
from pyps_wire.contract import FEATURES, PROTOCOL_VERSION
from pyps_wire.errors import (
    LimitExceeded,
    PypsError,
    RunFinished,
    RunMismatch,
    ServerUnavailable,
    StateLost,
    Superseded,
    WaitTimedOut,
)
from pyps_wire.parameter_server_pb2 import HelloReply, HelloRequest
from pyps_wire.partition import Partition

# A message's fields beside the payload take less.
_HEADER_BYTES_MAX = 4096

_WITHOUT_PARAMETERS = (RUN_STATE_EMPTY, RUN_STATE_INITIALIZING)


class Handshake:
    """Introduces one caller to the servers of a run: a worker with a model, or an observer without."""

    def __init__(
        self,
        launch: Launch,
        *,
        partition: Partition | None = None,
        optimizer: OptimizerSettings | None = None,
        device: str = "",
        codec: int = CODEC_FLOAT32,
    ) -> None:
        """`codec`: how a worker's gradients travel."""
        self.launch = launch
        # Who speaks; the run's name is learned at the latest when joined.
        self.sender = Sender(run_id=launch.run_id, worker_id=launch.worker_id, incarnation=time.time_ns())
        self._partition = partition
        self._optimizer = optimizer
        self._device = device
        self._codec = codec
        self._start = RetryPolicy(launch.start_wait_seconds, "start_wait_seconds")

    def join(
        self,
        connections: Sequence[Connection],
        initial: Callable[[], Values] | None,
        stop: threading.Event,
    ) -> list[HelloReply]:
        """Joins all servers, server 0 first, waiting for what is not there yet; initialises where elected."""
        if self.launch.transport == "shm" and self._partition is not None:
            self._check_shareable(connections, self._partition, stop)
        first = self._await_parameters(connections, initial, stop)
        self.sender.run_id = first.run_id
        return [first] + [self._hello_of_rest(connection, stop) for connection in connections[1:]]

    def rejoin(self, connection: Connection, channel: Channel, timeout_seconds: float) -> HelloReply:
        """Says Hello again to a server of the joined run, which may have been restarted meanwhile."""
        reply = self.hello(connection, channel, timeout_seconds)
        if reply.state in _WITHOUT_PARAMETERS:
            raise self.state_lost(connection)
        return reply

    def hello(
        self, connection: Connection, channel: Channel, timeout_seconds: float, *, asks_only: bool = False
    ) -> HelloReply:
        """Says Hello once, as an observer where it only asks.

        LimitExceeded where the server takes no message as long as the model's shards.
        """
        request = self._request(connection.index)
        if asks_only:
            request.role = ROLE_OBSERVER
        reply = channel.call("Hello", request, HelloReply, timeout_seconds=timeout_seconds)
        if reply.state == RUN_STATE_DRAINING:
            raise LinkLost("the server is shutting down")
        if self._partition is not None:
            _check_limits(connection, reply, self._partition, codec=self._codec)
        connection.epoch = reply.epoch
        return reply

    def state_lost(self, connection: Connection) -> StateLost:
        """The error for a server of the run that came back without its parameters."""
        return StateLost(
            f"{connection.name} lost its part of run {self.sender.run_id!r}: it holds no parameters (any "
            "more), while other "
            "servers or workers do. Start it with --resume and its --checkpoint-dir, or begin anew: `pyps "
            "reset` on every "
            "server, then start the workers again."
        )

    def _check_shareable(self, connections: Sequence[Connection], plan: Partition, stop: threading.Event) -> None:
        """Ends a worker that could share no memory before any server has heard of it: ServerUnavailable."""
        for connection in connections:
            if not plan.of_server(connection.index):
                continue
            try:
                reply = self._hello_patiently(connection, stop, asks_only=True)
            except (ServerUnavailable, RunFinished):
                raise
            except PypsError as error:
                # The worker's own Hello has the verdict.
                logger.debug("before joining: %s", error)
                continue
            check_shareable(connection.name, reply)

    def _await_parameters(
        self,
        connections: Sequence[Connection],
        initial: Callable[[], Values] | None,
        stop: threading.Event,
    ) -> HelloReply:
        """Says Hello to server 0 until the run has parameters, sending them itself where elected."""
        connection = connections[0]
        initialiser = RetryPolicy(self._start.wait_seconds, self._start.setting, pause_first_seconds=0.2)
        wait = initialiser.begin(f"the first parameters on {connection.name}", stop=stop)
        while True:
            reply = self._hello_patiently(connection, stop)
            if reply.run_id and not self.sender.run_id:
                self.sender.run_id = reply.run_id
            if reply.state not in _WITHOUT_PARAMETERS:
                return reply
            if reply.initialize and initial is not None:
                problem = self._initialize(connections, reply, initial, stop)
                if not problem:
                    continue
            else:
                problem = "no worker has finished sending them"
            wait.pause(problem, WaitTimedOut)

    def _initialize(
        self,
        connections: Sequence[Connection],
        elected: HelloReply,
        initial: Callable[[], Values],
        stop: threading.Event,
    ) -> str:
        """Sends the first parameters to all servers. Returns what went wrong where trying again may help."""
        assert self._partition is not None and self._optimizer is not None
        # The run gets its name when server 0 has its parameters; until then another worker's name may win.
        sender = Sender()
        sender.CopyFrom(self.sender)
        sender.run_id = sender.run_id or f"run-{secrets.token_hex(4)}"
        logger.info("initialising run %s on %s", sender.run_id, ", ".join(self.launch.servers))
        turn = Initialization(
            sender,
            term=elected.term,
            partition=self._partition,
            optimizer=self._optimizer,
            values=initial(),
        )
        first = connections[0]
        with Lease(elected, lambda: self.hello(first, first.channel, CALL_SECONDS)) as lease:
            for connection in connections[1:]:
                self._compare_limits(connection, stop)
            try:
                for connection in reversed(connections):
                    self._send_patiently(turn, connection, lease, stop)
            except (Superseded, RunMismatch):
                try:
                    if lease.held():
                        raise
                except LinkLost as lost:
                    return str(lost)
                return "another worker was elected to initialise the run meanwhile"
        self.sender.run_id = sender.run_id
        return ""

    def _compare_limits(self, connection: Connection, stop: threading.Event) -> None:
        """Asks a server for its limits before anything is sent to any: LimitExceeded, as `hello`."""
        try:
            # Not as a member: what one that did not finish has left is replaced only where no worker is.
            self._hello_patiently(connection, stop, asks_only=True)
        except (LimitExceeded, ServerUnavailable):
            raise
        except PypsError as error:
            # Initialize has the verdict.
            logger.debug("before the first parameters: %s", error)

    def _send_patiently(
        self, turn: Initialization, connection: Connection, lease: Lease, stop: threading.Event
    ) -> None:
        """Sends a server its first parameters, waiting for it where it is not there yet."""
        wait = self._start.begin(connection.name, stop=stop, advice=ADVICE)
        while True:
            lease.check()
            channel = connection.channel
            try:
                turn.send_to(connection, channel)
            except LinkLost as lost:
                connection.renew(channel)
                wait.pause(str(lost))
            else:
                wait.end()
                return

    def _hello_of_rest(self, connection: Connection, stop: threading.Event) -> HelloReply:
        reply = self._hello_patiently(connection, stop)
        if reply.state in _WITHOUT_PARAMETERS:
            raise self.state_lost(connection)
        return reply

    def _hello_patiently(self, connection: Connection, stop: threading.Event, *, asks_only: bool = False) -> HelloReply:
        """Says Hello until there is a verdict, or the time for a start is over."""
        wait = self._start.begin(connection.name, stop=stop, advice=ADVICE)
        while True:
            channel = connection.channel
            try:
                reply = self.hello(connection, channel, wait.call_seconds, asks_only=asks_only)
            except LinkLost as lost:
                connection.renew(channel)
                wait.pause(str(lost))
            else:
                wait.end()
                return reply

    def _request(self, server_index: int) -> HelloRequest:
        request = HelloRequest(
            sender=self.sender,
            protocol_version=PROTOCOL_VERSION,
            features=FEATURES,
            software=SOFTWARE,
            role=ROLE_OBSERVER if self._partition is None else ROLE_WORKER,
            server_index=server_index,
            num_servers=len(self.launch.servers),
            codecs=CODECS.values(),
            host=socket.gethostname(),
            process_id=os.getpid(),
            device=self._device,
        )
        if self._partition is not None and self._optimizer is not None:
            request.model.CopyFrom(self._partition.model.to_proto())
            request.optimizer.CopyFrom(self._optimizer)
            request.fingerprint = self._partition.fingerprint
        return request


def _check_limits(connection: Connection, reply: HelloReply, partition: Partition, *, codec: int) -> None:
    """Refuses a server that takes no message as long as the model's shards, pushed in that codec or pulled."""
    longest = max((shard.length for shard in partition.of_server(connection.index)), default=0)
    needed = longest * max(item_size(codec), item_size(CODEC_FLOAT32)) + _HEADER_BYTES_MAX
    if 0 < reply.limits.message_bytes_max < needed:
        raise LimitExceeded(
            f"{connection.name} takes messages of {reply.limits.message_bytes_max} bytes, a shard of this model needs "
            f"{needed}: raise its --max-message-bytes, or lower the model's shard_size ({partition.model.shard_size})."
        )
