"""Joining a run: Hello, the election of the worker that creates the run and its work, Hello again after a loss."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar
from zlib import crc32

from pyps_client.launch import Launch
from pyps_client.log import logger
from pyps_client.replica.group import ALONE, Group, agreed, led, own_partition
from pyps_client.retry import SIGNAL_SECONDS, LinkLost, RetryPolicy
from pyps_client.transport.connection import ADVICE, CALL_SECONDS, Connection, call_seconds
from pyps_client.transport.grpc import GrpcChannel
from pyps_client.vectors import Vector, check_vectors, part_of
from pyps_client.version import SOFTWARE
from pyps_wire.codecs import CODECS, FLOAT32, Codec
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
    ModelMismatch,
    NameHeld,
    PypsError,
    RunFinished,
    RunMismatch,
    ServerUnavailable,
    StateLost,
    Superseded,
    WaitTimedOut,
)
from pyps_wire.framing import join
from pyps_wire.parameter_server_pb2 import HelloReply, HelloRequest, InitializeReply, InitializeRequest
from pyps_wire.partition import Model, Partition, ShardRange

T = TypeVar("T")

# A run's first parameters: one vector a group, or a function that computes a shard's numbers when they are sent.
Values = Sequence[Vector] | Callable[[ShardRange], Vector]

# All fields of a message but the payload take less.
_HEADER_BYTES_MAX = 4096

WITHOUT_PARAMETERS = (RUN_STATE_EMPTY, RUN_STATE_INITIALIZING)


class Handshake:
    """Says Hello to the servers of a run, for a worker with a model, or an observer without one."""

    def __init__(
        self,
        launch: Launch,
        *,
        partition: Partition | None = None,
        parts: Sequence[int] = (),
        optimizer: OptimizerSettings | None = None,
        device: str = "",
        codecs: tuple[Codec, Codec] = (FLOAT32, FLOAT32),
        peers: Group = ALONE,
        on_hello: Callable[[Connection, HelloReply], None] = lambda connection, reply: None,
    ) -> None:
        """`partition`: the slices and placement, if this worker creates the run; None for an observer.

        `parts`: the parts of the model that the caller holds; () for all. `codecs`: of gradients and of parameters.
        `on_hello` is called with each reply to a worker's Hello, on any thread: now the server expects heartbeats.
        """
        self.launch = launch
        worker_id = f"{peers.name}/{peers.index}" if peers.name else launch.worker_id
        self.sender = Sender(
            run_id=launch.run_id, worker_id=worker_id, incarnation=time.time_ns(), secret=launch.worker_key.encode()
        )
        self._is_worker = partition is not None
        self._parts = parts
        self._peers = peers
        # The run's partition; until it is known, the one that this worker would create.
        self.whole = partition
        # The caller's parts of it.
        self.partition = partition and own_partition(partition, parts, peers)
        self._joined = False
        # Where the data of the worker stood whose place this one takes; b"" for none.
        self.data_position = b""
        # Whether it leaves the run's first parameters to worker 0.
        self._yields = launch.worker_index not in (None, 0)
        self._optimizer = optimizer
        self._device = device
        self._codecs = codecs
        self._on_hello = on_hello
        self._stop = threading.Event()
        self._start = RetryPolicy(launch.start_wait_seconds, "start_wait_seconds")

    def join(
        self, connections: Sequence[Connection], initial: Callable[[], Values] | None, stop: threading.Event
    ) -> list[HelloReply]:
        """Join the servers, server 0 first, waiting for them and for the run; create the run if elected.

        Return the replies of `contacts`; `whole`, `partition` and the sender's run_id are the run's then. All processes
        of a replica call this, and all raise an error of one. `stop` ends waits.
        """
        self._stop = stop
        # All processes have one incarnation, so that a later life of one replaces all.
        self.sender.incarnation, key = self._peers.broadcast((self.sender.incarnation, self.launch.worker_key))
        self.sender.secret = key.encode()
        if self.launch.dialer.insists and self.partition is not None:
            agreed(self._peers, partial(self._check_transport, connections, self.partition))
        first = self._await_parameters(connections, initial)
        replies = agreed(self._peers, partial(self._greet_all, connections, first))
        if initial is not None and self.partition is not None:
            # Of the server to which the leader sends its own.
            shards = [self.partition.of_server(index) for index in self.contacts]
            position = next(reply.data_position for reply, held in zip(replies, shards, strict=True) if held)
            self.data_position = self._peers.broadcast(position)
            if self._peers.index == 0:
                self._tell_what_differs(replies, initial)
        return replies

    @property
    def contacts(self) -> list[int]:
        """The servers that this process calls, 0 first: an observer calls all, a worker those of its parts' shards.

        The leader, or a worker of one process, calls those without any shards, too: they belong to the run.
        """
        own, whole = self.partition, self.whole
        if own is None or whole is None or not self._is_worker:
            return list(range(len(self.launch.servers)))
        leads = self._peers.index == 0
        return [
            index
            for index in range(whole.num_servers)
            if index == 0 or own.of_server(index) or (leads and (not whole.of_server(index) or whole.model.tables))
        ]

    def rejoin(self, connection: Connection, channel: GrpcChannel, timeout_seconds: float) -> HelloReply:
        """Say Hello again to a server of the joined run, which may have been restarted meanwhile."""
        return self._checked(connection, self.hello(connection, channel, timeout_seconds))

    def hello(
        self, connection: Connection, channel: GrpcChannel, timeout_seconds: float, *, as_observer: bool = False
    ) -> HelloReply:
        """Say Hello once; refuse a server that cannot serve this caller."""
        request = self._request(connection.index)
        if as_observer:
            request.role = ROLE_OBSERVER
        reply = channel.call("Hello", request, HelloReply, timeout_seconds=timeout_seconds)
        if reply.state == RUN_STATE_DRAINING:
            connection.note_standby(reply.standby)
            words = f"{reply.standby} serves the run in its place" if reply.standby else "the server is shutting down"
            raise LinkLost(words)
        if request.role == ROLE_WORKER:
            connection.greeted(self.sender, reply)
        connection.answered(reply)
        if request.role == ROLE_WORKER:
            self._on_hello(connection, reply)
        if self._is_worker and self.partition is not None:
            _check_limits(connection, reply, self.partition, self._codecs)
        if self._joined and self.whole is not None and reply.placement:
            found, joined = (reply.fingerprint, tuple(reply.placement)), self.whole
            if found != (joined.fingerprint, joined.servers):
                raise ModelMismatch(
                    f"{connection.name} slices the model of run {self.sender.run_id!r} otherwise than when this worker "
                    "joined, or has placed its shards otherwise: start the worker again."
                )
        return reply

    def hello_patiently(self, connection: Connection, *, as_observer: bool = False) -> HelloReply:
        """Say Hello until the server answers or refuses, for the launch's `start_wait_seconds` at most."""
        return self._patiently(connection, partial(self.hello, connection, as_observer=as_observer))

    def _checked(self, connection: Connection, reply: HelloReply) -> HelloReply:
        """Return the server's reply; raise StateLost if the server has no parameters, while the run has."""
        if reply.state not in WITHOUT_PARAMETERS:
            return reply
        raise StateLost(
            f"{connection.name} lost its part of run {self.sender.run_id!r}: it holds no parameters (any more), while "
            "other servers or workers do. Start it with --resume and its --checkpoint-dir, or start over: `pyps reset` "
            "on every server, then start the workers again."
        )

    def _patiently(self, connection: Connection, attempt: Callable[[GrpcChannel, float], T]) -> T:
        """Try until the server answers; each attempt gets the channel and its own deadline."""
        wait = self._start.begin(connection.name, stop=self._stop, advice=ADVICE)
        while True:
            channel = None
            try:
                channel = connection.channel
                result = attempt(channel, wait.call_seconds)
            except LinkLost as lost:
                connection.renew(channel)
                wait.pause(str(lost))
            except NameHeld as held:
                wait.pause(str(held), NameHeld)
            else:
                wait.end()
                return result

    def _observe(self, connection: Connection, *raised: type[PypsError]) -> HelloReply | None:
        """Return the reply to a Hello as an observer, of which the server keeps nothing; raise only these refusals.

        A worker's own Hello follows, and meets any other refusal again.
        """
        try:
            # Not as a worker: an unfinished initialisation is replaced only where no worker is alive.
            return self.hello_patiently(connection, as_observer=True)
        except raised:
            raise
        except PypsError as error:
            logger.debug("before joining: %s", error)
            return None

    def _check_transport(self, connections: Sequence[Connection], plan: Partition) -> None:
        """Raise ServerUnavailable where the required transport fails, before any server knows of the worker."""
        for connection in connections:
            if plan.of_server(connection.index):
                reply = self._observe(connection, ServerUnavailable, RunFinished)
                if reply is not None and (reason := self.launch.dialer.hindrance(reply)):
                    raise self.launch.dialer.refusal(connection.name, reason)

    def _await_parameters(
        self, connections: Sequence[Connection], initial: Callable[[], Values] | None
    ) -> HelloReply | None:
        """Wait until the run has parameters, and send them where elected; the leader gets server 0's last reply."""
        connection = connections[0]
        initialiser = RetryPolicy(self._start.wait_seconds, self._start.setting, pause_first_seconds=0.2)
        wait = initialiser.begin(f"the first parameters on {connection.name}", stop=self._stop)
        yields_until = None

        def hello_of_leader() -> HelloReply:
            reply = self.hello_patiently(connection)
            reply.run_id = self.sender.run_id or reply.run_id
            reply.initialize &= reply.state in WITHOUT_PARAMETERS and initial is not None
            if reply.initialize:
                # The run gets its name when server 0 has its parameters; until then another worker's name may win.
                self.sender.run_id = reply.run_id
                reply.run_id = reply.run_id or f"run-{secrets.token_hex(4)}"
            return reply

        entered = False
        while True:
            reply = led(self._peers, hello_of_leader)
            ready = reply.state not in WITHOUT_PARAMETERS
            if not (ready or entered):
                # From now on the servers notice a lost process. The leader has said Hello already.
                agreed(self._peers, lambda: self.hello_patiently(connection) if self._peers.index > 0 else None)
                entered = True
            if not reply.initialize:
                self.sender.run_id = self.sender.run_id or reply.run_id
            if ready:
                return reply if self._peers.index == 0 else None
            yields_until = yields_until or time.monotonic() + wait.remaining_seconds / 2
            if reply.initialize and initial is not None:
                if self.launch.worker_index and self._peers.index == 0:
                    logger.warning(
                        "worker 0 sent no parameters (it has not come, or ended): the run begins with those of %s",
                        self._peers.name or self.sender.worker_id,
                    )
                problem = self._initialize(connections, reply, initial)
                if not problem:
                    continue
            else:
                problem = "no worker has finished sending them"
                if self._yields and reply.state == RUN_STATE_EMPTY:
                    left = max(0.0, yields_until - time.monotonic())
                    problem = f"worker 0, which sends them, has not come; in {left:.0f} s another worker may"
                    self._yields = left > 0
            led(self._peers, partial(wait.pause, problem, WaitTimedOut))

    def _initialize(self, connections: Sequence[Connection], elected: HelloReply, initial: Callable[[], Values]) -> str:
        """Send the first parameters to all servers, server 0 last, once all processes have sent theirs to the others.

        `elected`: server 0's reply, with the run's name. The leader keeps the election's lease meanwhile.
        Returns what went wrong where trying again may help.
        """
        assert self.partition is not None and self.whole is not None and self._optimizer is not None
        sender = Sender()
        sender.CopyFrom(self.sender)
        sender.run_id = elected.run_id
        logger.info("initialising run %s on %s", sender.run_id, ", ".join(self.launch.servers))
        opening = InitializeRequest(
            sender=sender,
            term=elected.term,
            model=self.whole.model.to_proto(),
            optimizer=self._optimizer,
            num_servers=self.whole.num_servers,
            shard_lengths=self.whole.lengths,
            placement=self.whole.servers,
            replica=self._peers.name,
        )
        plan, contacts = self.partition, self.contacts
        turn = agreed(self._peers, lambda: Initialization(opening, plan, initial()))
        first, *others = [connection for connection in connections if connection.index in contacts]
        seconds = elected.initialize_lease_seconds
        lease = InitializeLease(elected.term, seconds, lambda: self.hello(first, first.channel, CALL_SECONDS))
        with lease if self._peers.index == 0 else contextlib.nullcontext():
            # All limits are checked before anything is sent.
            agreed(self._peers, lambda: [self._observe(other, LimitExceeded, ServerUnavailable) for other in others])
            try:
                agreed(self._peers, lambda: self._send(turn, others[::-1], lease))
                agreed(self._peers, lambda: self._send(turn, [first], lease))
            except (Superseded, RunMismatch):
                problem = led(self._peers, lease.loss)
                if not problem:
                    raise
                return problem
        self.sender.run_id = sender.run_id
        return ""

    def _send(self, turn: Initialization, connections: Sequence[Connection], lease: InitializeLease) -> None:
        for connection in connections:
            # The leader sends the run's name to server 0 even if that holds nothing.
            if connection.index == 0 and self._peers.index > 0 and not turn.partition.of_server(0):
                continue

            def attempt(channel: GrpcChannel, _: float, to: Connection = connection) -> None:
                lease.check()
                turn.send_to(to, channel)

            self._patiently(connection, attempt)

    def _tell_what_differs(self, replies: Sequence[HelloReply], initial: Callable[[], Values]) -> None:
        """Log that the run did not begin with this worker's own parameters, where that is so."""
        assert self.partition is not None
        origin, by = replies[0].origin, "begun by "
        shards = [each for reply in replies for each in reply.shards if each.HasField("first_crc")]
        crcs = {each.shard_id: each.first_crc for each in shards}
        if not crcs or origin == by + (self._peers.name or self.sender.worker_id):
            return
        values = value_of(initial())
        if any(crc32(values(shard).data) != crcs.get(shard.shard_id) for shard in self.partition.shards):
            # Of worker 0, or of one without a number, somebody may have meant the parameters to be the run's.
            level = logging.WARNING if origin.startswith(by) and not self.launch.worker_index else logging.INFO
            words = "this worker's own parameters differ from those of run %s, %s, which replace them"
            logger.log(level, words, self.sender.run_id, origin)

    def _greet_all(self, connections: Sequence[Connection], first: HelloReply | None) -> list[HelloReply]:
        """Take the run's tables over from server 0, and say Hello to the other contacts."""
        leader, *others = connections
        first = first or self._checked(leader, self.hello_patiently(leader))
        self.sender.run_id = first.run_id
        model = Model.from_proto(first.model) if self.whole is None else self.whole.model
        if model.name and first.model.name and model.name != first.model.name:
            logger.warning(
                "this worker's model is %s, that of run %s was %s where the run was created: they train one set of "
                "parameters, as their names and shapes are equal. Give each of two models servers of its own",
                *(model.name, first.run_id, first.model.name),
            )
        self.whole = Partition.of_tables(
            model, first.shard_lengths, servers=first.placement, num_servers=first.num_servers
        )
        self.partition = own_partition(self.whole, self._parts, self._peers)
        self._joined, contacts = True, self.contacts
        return [first, *(self._checked(each, self.hello_patiently(each)) for each in others if each.index in contacts)]

    def _request(self, server_index: int) -> HelloRequest:
        request = HelloRequest(
            sender=self.sender,
            protocol_version=PROTOCOL_VERSION,
            features=FEATURES,
            software=SOFTWARE,
            role=ROLE_WORKER if self._is_worker else ROLE_OBSERVER,
            server_index=server_index,
            num_servers=len(self.launch.servers),
            codecs=CODECS.values(),  # type: ignore[arg-type]
            gradient_codec=self._codecs[0],  # type: ignore[arg-type]
            parameter_codec=self._codecs[1],  # type: ignore[arg-type]
            host=socket.gethostname(),
            process_id=os.getpid(),
            device=self._device,
            replica=self._peers.name,
            yields=self._is_worker and self._yields,
            worker_index=self.launch.worker_index if self._is_worker else None,
        )
        if self._is_worker and self.whole is not None and self._optimizer is not None:
            request.model.MergeFromString(self.whole.model.spec)
            request.optimizer.CopyFrom(self._optimizer)
            if self._joined:
                request.fingerprint = self.whole.fingerprint
            if self.partition is not self.whole:
                request.parts.extend(sorted(set(self._parts)))
        return request


class Initialization:
    """Sends the first parameters of the shards of one process of an elected worker."""

    def __init__(self, opening: InitializeRequest, partition: Partition, values: Values) -> None:
        """`opening`: the first message to each server, without the server's index."""
        if not callable(values):
            check_vectors(values, partition.model, FLOAT32.dtype, what="initial parameters")
        self.partition = partition
        self._opening = opening
        self._values = value_of(values)

    def send_to(self, connection: Connection, channel: GrpcChannel) -> None:
        """Send a server its shards. Server 0 must be last, since its reply makes the run ready for all workers."""
        opening, shards = self._opening, self.partition.of_server(connection.index)

        def frames() -> Iterator[bytes]:
            """Yield the opening, then a message a shard, each made when gRPC can send it."""
            yield opening.SerializeToString() + InitializeRequest(server_index=connection.index).SerializeToString()
            sender, term = opening.sender, opening.term
            for shard in shards:
                header = InitializeRequest(sender=sender, term=term, shard_id=shard.shard_id, codec=CODEC_FLOAT32)
                yield join(header, self._values(shard).data)

        seconds = call_seconds(4 * sum(shard.length for shard in shards))
        connection.epoch = channel.send("Initialize", frames(), InitializeReply, timeout_seconds=seconds).epoch


class InitializeLease:
    """Keeps an election's lease by regular Hellos to server 0, and notices when another worker is elected."""

    def __init__(self, term: int, lease_seconds: float, hello: Callable[[], HelloReply]) -> None:
        self._term = term
        self._interval_seconds = lease_seconds / 3
        self._hello = hello
        self._ended = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._keep, name="pyps-initialize-lease", daemon=True)

    def check(self) -> None:
        """Raise Superseded if another worker is elected."""
        if self._lost:
            raise Superseded("another worker was elected to initialise the run")

    def __enter__(self) -> InitializeLease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        while self._thread.is_alive():
            self._thread.join(SIGNAL_SECONDS)

    def loss(self) -> str:
        """Say Hello to server 0; return why this worker is no longer elected, "" if it is."""
        try:
            if not self._lost:
                reply = self._hello()
                self._lost = not reply.initialize or reply.term != self._term
        except LinkLost as lost:
            return str(lost)
        return "another worker was elected to initialise the run meanwhile" if self._lost else ""

    def _keep(self) -> None:
        while not (self._lost or self._ended.wait(self._interval_seconds)):
            try:
                self.loss()
            except PypsError:
                self._lost = True


def value_of(values: Values) -> Callable[[ShardRange], Vector]:
    """Return a function of a shard's values."""
    return values if callable(values) else partial(part_of, values)


def model_of_run(launch: Launch) -> Model | None:
    """Return the run's whole model, from server 0; None if it has no parameters yet.

    Waits for the server, and does not join the run.
    """
    connection = Connection(0, launch=launch)
    try:
        reply = Handshake(launch).hello_patiently(connection)
    finally:
        connection.close()
    return None if reply.state in WITHOUT_PARAMETERS else Model.from_proto(reply.model)


def _check_limits(connection: Connection, reply: HelloReply, partition: Partition, codecs: tuple[Codec, Codec]) -> None:
    """Raise LimitExceeded if the server accepts no messages as long as the model's shards."""
    here = connection.index
    lengths = [shard.length for shard in partition.of_server(here)]
    if reply.shard_lengths:
        lengths = [n for n, server in zip(reply.shard_lengths, reply.placement, strict=True) if server == here]
    longest = max(lengths, default=0)
    needed = max(codec.max_bytes(longest) for codec in (*codecs, FLOAT32)) + _HEADER_BYTES_MAX
    if 0 < reply.limits.message_bytes_max < needed:
        raise LimitExceeded(
            f"{connection.name} takes messages of {reply.limits.message_bytes_max} bytes, a shard of this model needs "
            f"{needed}: raise its --max-message-bytes, or lower the model's shard_size ({partition.model.shard_size})."
        )
