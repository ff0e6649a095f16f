"""Joining a run: Hello, the election of an initialiser, and Hello again after a lost connection."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from pyps_client.channel import Channel
from pyps_client.connection import ADVICE, Connection
from pyps_client.founding import Founding
from pyps_client.initialization import Initialization, Values
from pyps_client.launch import Launch
from pyps_client.log import logger
from pyps_client.peers import ALONE, Peers, agreed, led
from pyps_client.retry import LinkLost, RetryPolicy
from pyps_client.shareable import check_shareable
from pyps_client.version import SOFTWARE
from pyps_wire.codecs import CODECS, FLOAT32, Codec, codec_names
from pyps_wire.common_pb2 import (
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
    BadRequest,
    LimitExceeded,
    PypsError,
    RunFinished,
    ServerUnavailable,
    StateLost,
    WaitTimedOut,
)
from pyps_wire.parameter_server_pb2 import HelloReply, HelloRequest
from pyps_wire.partition import Partition

# A message's fields beside the payload take less.
_HEADER_BYTES_MAX = 4096

WITHOUT_PARAMETERS = (RUN_STATE_EMPTY, RUN_STATE_INITIALIZING)


class _Word(NamedTuple):
    """What the leader of a replica heard from server 0."""

    # The run's name; empty where it has none yet.
    run_id: str
    # Whether the run has parameters.
    ready: bool
    # Whether the replica is to send the first ones: under this name, in this term.
    elected: bool = False
    term: int = 0
    lease_seconds: float = 0.0


class Handshake:
    """Introduces one caller to the servers of a run: a worker with a model, or an observer without."""

    def __init__(
        self,
        launch: Launch,
        *,
        partition: Partition | None = None,
        optimizer: OptimizerSettings | None = None,
        device: str = "",
        codecs: tuple[Codec, Codec] = (FLOAT32, FLOAT32),
        whole: Partition | None = None,
        peers: Peers = ALONE,
        greeted: Callable[[Connection, HelloReply], None] = lambda connection, reply: None,
    ) -> None:
        """`codecs`: how a worker's gradients and the parameters travel. `peers`: the processes of the caller's replica.

        `greeted` gets each answer to a worker's Hello, on any thread: from then on the server expects signs of life.
        `whole`: the run's partition, where `partition`, the caller's own, is of some parts only.
        """
        self.launch = launch
        # Who speaks; the run's name is learned at the latest when joined.
        worker_id = f"{peers.name}/{peers.index}" if peers.name else launch.worker_id
        self.sender = Sender(run_id=launch.run_id, worker_id=worker_id, incarnation=time.time_ns())
        self._partition = partition
        self._whole = whole or partition
        self._peers = peers
        self._optimizer = optimizer
        self._device = device
        self._codecs = codecs
        self._greeted = greeted
        self._start = RetryPolicy(launch.start_wait_seconds, "start_wait_seconds")

    def join(
        self,
        connections: Sequence[Connection],
        initial: Callable[[], Values] | None,
        stop: threading.Event,
    ) -> list[HelloReply]:
        """Joins the servers, server 0 first, waiting for what is not there yet; initialises where elected.

        All processes of a replica call it; where it fails on one, that error is raised on all.
        """
        # All have one life: what one of them loses, all lose.
        self.sender.incarnation = self._peers.tell(self.sender.incarnation)
        if self.launch.way.insists and self._partition is not None:
            agreed(self._peers, partial(self._check_shareable, connections, self._partition, stop))
        first = self._await_parameters(connections, initial, stop)
        return agreed(self._peers, partial(self._greet_all, connections, first, stop))

    def rejoin(self, connection: Connection, channel: Channel, timeout_seconds: float) -> HelloReply:
        """Says Hello again to a server of the joined run, which may have been restarted meanwhile."""
        reply = self.hello(connection, channel, timeout_seconds)
        if reply.state in WITHOUT_PARAMETERS:
            raise self.state_lost(connection)
        return reply

    def hello(
        self, connection: Connection, channel: Channel, timeout_seconds: float, *, asks_only: bool = False
    ) -> HelloReply:
        """Says Hello once, as an observer where it only asks.

        BadRequest where the server does not know how numbers travel, LimitExceeded where it takes no message as long as
        the model's shards.
        """
        request = self._request(connection.index)
        if asks_only:
            request.role = ROLE_OBSERVER
        reply = channel.call("Hello", request, HelloReply, timeout_seconds=timeout_seconds)
        if reply.state == RUN_STATE_DRAINING:
            raise LinkLost("the server is shutting down")
        if request.role == ROLE_WORKER:
            self._greeted(connection, reply)
        if self._partition is not None:
            _check_codecs(connection, reply, self._codecs)
            _check_limits(connection, reply, self._partition, self._codecs)
        connection.epoch = reply.epoch
        return reply

    def hello_patiently(self, connection: Connection, stop: threading.Event, *, asks_only: bool = False) -> HelloReply:
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
                reply = self.hello_patiently(connection, stop, asks_only=True)
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
    ) -> HelloReply | None:
        """Waits until the run has parameters, by the leader's word, sending them where elected.

        Returns server 0's reply, where this process leads.
        """
        connection = connections[0]
        initialiser = RetryPolicy(self._start.wait_seconds, self._start.setting, pause_first_seconds=0.2)
        wait = initialiser.begin(f"the first parameters on {connection.name}", stop=stop)
        replies: list[HelloReply] = []

        def ask() -> _Word:
            replies.append(self.hello_patiently(connection, stop))
            return self._word_of(replies[-1], may_send=initial is not None)

        entered = False
        while True:
            word = led(self._peers, ask)
            if not (word.ready or entered):
                # The servers are to notice where one of them is lost while all wait for it.
                agreed(self._peers, partial(self._enter, connection, stop))
                entered = True
            if word.ready or not word.elected:
                self.sender.run_id = self.sender.run_id or word.run_id
            if word.ready:
                return replies[-1] if replies else None
            if word.elected and initial is not None:
                problem = self._initialize(connections, word, initial, stop)
                if not problem:
                    continue
            else:
                problem = "no worker has finished sending them"
            led(self._peers, partial(wait.pause, problem, WaitTimedOut))

    def _enter(self, connection: Connection, stop: threading.Event) -> None:
        """Says Hello to server 0 where the leader alone has done so yet."""
        if self._peers.index > 0:
            self.hello_patiently(connection, stop)

    def _word_of(self, reply: HelloReply, *, may_send: bool) -> _Word:
        """What the leader tells the others of server 0's reply."""
        ready = reply.state not in WITHOUT_PARAMETERS
        run_id = self.sender.run_id or reply.run_id
        if ready or not (reply.initialize and may_send):
            return _Word(run_id, ready)
        # The run gets its name when server 0 has its parameters; until then another worker's name may win.
        self.sender.run_id = run_id
        name = run_id or f"run-{secrets.token_hex(4)}"
        return _Word(name, ready, elected=True, term=reply.term, lease_seconds=reply.initialize_lease_seconds)

    def _initialize(
        self,
        connections: Sequence[Connection],
        elected: _Word,
        initial: Callable[[], Values],
        stop: threading.Event,
    ) -> str:
        """Sends the first parameters to all servers. Returns what went wrong where trying again may help."""
        assert self._partition is not None and self._optimizer is not None
        sender = Sender()
        sender.CopyFrom(self.sender)
        sender.run_id = elected.run_id
        logger.info("initialising run %s on %s", sender.run_id, ", ".join(self.launch.servers))
        make = partial(
            Initialization,
            sender,
            term=elected.term,
            partition=self._partition,
            whole=self._whole,
            optimizer=self._optimizer,
            replica=self._peers.name,
        )
        turn = agreed(self._peers, lambda: make(values=initial()))
        founding = Founding(self, peers=self._peers, start=self._start, stop=stop)
        problem = founding.run(turn, connections, term=elected.term, lease_seconds=elected.lease_seconds)
        if not problem:
            self.sender.run_id = sender.run_id
        return problem

    def _greet_all(
        self, connections: Sequence[Connection], first: HelloReply | None, stop: threading.Event
    ) -> list[HelloReply]:
        """Says Hello to the servers that have not heard it: all but server 0, or all."""
        replies = [first or self._hello_of_member(connections[0], stop)]
        self.sender.run_id = replies[0].run_id
        return replies + [self._hello_of_member(connection, stop) for connection in connections[1:]]

    def _hello_of_member(self, connection: Connection, stop: threading.Event) -> HelloReply:
        reply = self.hello_patiently(connection, stop)
        if reply.state in WITHOUT_PARAMETERS:
            raise self.state_lost(connection)
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
            codecs=CODECS.values(),  # type: ignore[arg-type]
            host=socket.gethostname(),
            process_id=os.getpid(),
            device=self._device,
            replica=self._peers.name,
        )
        if self._partition is not None and self._whole is not None and self._optimizer is not None:
            request.model.CopyFrom(self._whole.model.to_proto())
            request.optimizer.CopyFrom(self._optimizer)
            request.fingerprint = self._whole.fingerprint
            if self._partition is not self._whole:
                request.parts.extend(sorted(set(self._partition.model.group_parts)))
        return request


def _check_codecs(connection: Connection, reply: HelloReply, codecs: tuple[Codec, Codec]) -> None:
    """Refuses a server that does not say that it knows how gradients and parameters are to travel."""
    theirs = frozenset[int](reply.codecs)
    settings = (("gradients", "PYPS_CODEC"), ("parameters", "PYPS_PULL_CODEC"))
    for codec, (what, setting) in zip(codecs, settings, strict=True):
        if codec not in theirs:
            shared = ", ".join(mine.name for mine in CODECS.values() if mine in theirs) or "none of them"
            raise BadRequest(
                f"{connection.name} ({reply.software}) does not know codec {codec.name}, in which {what} are to travel "
                f"({setting}, or the argument for it). This worker knows {', '.join(codec_names())}; the server "
                f"{shared} of these: choose one that both know, or install one version of pyps on both."
            )


def _check_limits(connection: Connection, reply: HelloReply, partition: Partition, codecs: tuple[Codec, Codec]) -> None:
    """Refuses a server that takes no message as long as the model's shards, pushed or pulled in their codecs."""
    longest = max((shard.length for shard in partition.of_server(connection.index)), default=0)
    needed = max(codec.bytes_of(longest) for codec in (*codecs, FLOAT32)) + _HEADER_BYTES_MAX
    if 0 < reply.limits.message_bytes_max < needed:
        raise LimitExceeded(
            f"{connection.name} takes messages of {reply.limits.message_bytes_max} bytes, a shard of this model needs "
            f"{needed}: raise its --max-message-bytes, or lower the model's shard_size ({partition.model.shard_size})."
        )
