"""One worker's membership over all servers of a run: it joins, pushes, pulls, and leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from pyps_client import fork, leave
from pyps_client.fork import ForkGuard
from pyps_client.join import Handshake, Values
from pyps_client.kept import KeptPushes
from pyps_client.launch import Launch
from pyps_client.lease import Lease
from pyps_client.log import logger
from pyps_client.pull import Holdings, IncomingPull, LeaseCall, LongPoll, Receiver, Versions, read, receivers
from pyps_client.push import Plan, Pushes
from pyps_client.replica.group import ALONE, Group, agreed, led, own_partition
from pyps_client.run_state import Terms, View, warn_of_differences
from pyps_client.tables import Tables
from pyps_client.transport.connection import CALL_SECONDS, Connection, Operation, Servers
from pyps_client.transport.grpc import GrpcChannel
from pyps_client.transport.memory import Layout, Lent
from pyps_client.transport.sharing import Sharing
from pyps_client.vectors import Converter, Encoder, Vector, Vectors
from pyps_wire.codecs import FLOAT32, codec_of
from pyps_wire.common_pb2 import ROLE_OBSERVER, ROLE_WORKER, OptimizerSettings, Receipt, Sender
from pyps_wire.errors import InvalidArgument, RunFinished
from pyps_wire.parameter_server_pb2 import HeartbeatReply, HeartbeatRequest, HelloReply
from pyps_wire.partition import Model, Partition, ShardRange, partition
from pyps_wire.work_pb2 import LeaseReply, LeaseRequest

T = TypeVar("T")
_shard_id = attrgetter("shard_id")

# How long a Hello from the heartbeat's thread may take.
HELLO_SECONDS = 10.0

# How long a worker that ends waits for a server that is lost or silent.
END_SECONDS = 10.0

# Why a step is refused while another thread takes one.
ONE_THREAD = (
    "Another thread takes a step with this worker right now: this step was not taken, and its gradients are as they "
    "were. Take a worker's steps on one thread, or by turns (threading.Lock), or make a worker for each thread, with a "
    "model and a worker_id of its own."
)


class Worker:
    """One worker's membership in a run, over all of its servers.

    One thread may push while another pulls. Vectors must not change until the call returns: a push may be sent again
    after a loss. Nothing here checks for NaN; `pyps_client.vectors.FiniteGuard` does, before.
    """

    def __init__(
        self,
        model: Model,
        optimizer: OptimizerSettings,
        *,
        launch: Launch,
        initial: Callable[[], Values],
        parts: Sequence[int] = (),
        peers: Group | None = None,
        device: str = "",
    ) -> None:
        """`initial` returns the first parameters, if this worker is elected to send them.

        `model` and `optimizer` describe the whole model; `parts` names the parts that this process holds, all by
        default. All vectors are of these parts' groups. `peers`: the processes of this worker's replica, all of which
        connect, push and proceed in the same order: these calls are collective. Raises InvalidArgument where a process
        of several holds no part.
        """
        leave.install_where_asked()
        proposed = partition(model, num_servers=len(launch.servers))
        self.model = own_partition(proposed, parts, peers).model
        self._peers = peers = peers or ALONE
        # The worker's count of steps, sent with pushes and heartbeats; the caller counts it up.
        self.clock = 0
        self._codec = codec_of(launch.gradient_codec)
        self._encoder = Encoder(self._codec)
        self._pull_codec = codec_of(launch.parameter_codec)
        # Last, so that a refused worker starts no local server.
        self.launch = launch = launch.begun(peers.count)
        self._initial = initial
        self._handshake = Handshake(
            launch,
            partition=proposed,
            parts=parts,
            optimizer=optimizer,
            device=device,
            codecs=(self._codec, self._pull_codec),
            peers=peers,
            on_hello=lambda connection, reply: self._lease.greeted(connection, reply),
        )
        self._guard = ForkGuard()
        self._servers = Servers(launch, rejoin=self._rejoin)
        # These are made of the run's partition, when the run is joined.
        self.partition: Partition
        self._holdings: Holdings
        self._pushes: Pushes
        self._sharing: Sharing
        # By the index of each server to which pushes are sent again when it comes back.
        self._kept: dict[int, KeptPushes] = {}
        self.view = View(peers)
        # Into the lent parameters.
        self._receivers: list[Receiver] = []
        self._closing = threading.Event()
        self._joined = False
        self.tables: Tables | None = None
        # Whether all servers hold pushes whose scale follows; older software does not.
        self.holds_pushes = True
        self._lease = Lease(
            self.sender, launch=launch, peers=peers, request=self._heartbeat, on_reply=self._note_heartbeat
        )
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._scalars: dict[str, float] = {}

    def connect(self) -> None:
        """Join the run; wait for servers and for its parameters, or send the first ones where elected."""
        if self._joined:
            return
        # A worker of the same name that still leaves could no longer push once this one has said Hello.
        leave.wait_for_leaving()
        leave.expect(self)
        self._lease.watch()
        try:
            self._join()
        except BaseException as error:
            self.close(*leave.cause_of(error))
            raise

    @property
    def carries_residuals(self) -> bool:
        """True if what an encoding loses is added to the next gradient."""
        return self._codec.stateful

    def next_rates(self) -> dict[int, float]:
        """Return group -> step size of its next update, before staleness, as last reported."""
        rates = self.view.state.next_rates
        return {shard.group: rates[shard.shard_id] for shard in self.partition.shards if shard.shard_id in rates}

    def _join(self) -> None:
        handshake, servers = self._handshake, self._servers
        replies = handshake.join(servers.connections, self._initial, self._closing)
        assert handshake.partition is not None
        servers.keep(handshake.contacts)
        self.partition = partition = handshake.partition
        self._holdings = Holdings(partition)
        whole = handshake.whole
        assert whole is not None
        self._pushes = Pushes(
            self._holdings,
            sender=self.sender,
            encoder=self._encoder,
            connections=servers.connections,
            view=self.view,
            kept=self._kept,
            peers=self._peers,
        )
        # None where the run has no tables of rows.
        self.tables = (
            Tables(
                whole,
                servers=servers,
                sender=self.sender,
                kept=self._kept,
                next_sequence=self._pushes.next_sequence,
                gradient_codec=self._codec,
                parameter_codec=self._pull_codec if self._pull_codec.dtype is not None else FLOAT32,
                wait_seconds=self.launch.wait_seconds,
                current_only=lambda: self.view.state.terms.current_version_only,
                message_bytes_max=min(reply.limits.message_bytes_max for reply in replies),
            )
            if whole.model.tables
            else None
        )
        self._sharing = Sharing(
            *(self.launch, partition, servers.connections, self.sender), keeps_lanes=self.tables is not None
        )
        for connection, reply in zip(servers.connections, replies, strict=True):
            self._note_hello(connection, reply)
        warn_of_differences(replies, [connection.index for connection in servers.connections])
        self._joined, first = True, replies[0]
        self.view.meet(pull_needed=True)
        logger.info(
            "%s joined run %s on %s (%s, %s, staleness %s), %s",
            *(self.sender.worker_id, first.run_id, ", ".join(each.address for each in servers.connections)),
            *(first.optimizer.rule, first.protocol, first.staleness, first.origin or "begun before"),
        )

    def lend(self, gradient_buffers: int = 1, *, converter: Converter | None = None) -> Lent:
        """Make zeroed vectors for this worker's gradients and parameters; once a session, after `connect`.

        Servers on this machine share their memory: then a `push`, `exchange` or `pull` of these very arrays copies
        nothing. With a converter, vectors that are not shared are float32, and are converted when they are sent.
        """
        self._check_open()
        self._encoder.converter = converter or self._encoder.converter
        layout = Layout(self.model, self._codec, self._pull_codec, gradient_buffers, converts=converter is not None)
        self._servers.on_all([partial(self._renew_offer, each) for each in self._servers.connections])
        lent = self._sharing.lend(layout)
        self._receivers = self._receivers_into(lent.parameters)
        return lent

    def tell_landed(self, on_landed: Callable[[ShardRange], object]) -> None:
        """Call `on_landed` for each shard that a message has written into the lent parameters; on any thread."""
        for receiver in self._receivers:
            receiver.on_landed = on_landed

    def push(self, gradients: Vectors, **described: Any) -> list[Receipt]:
        """Push gradients without a pull; the other arguments are fields of `Plan`."""
        return self.exchange(Plan(gradients, **described))

    def exchange(self, plan: Plan) -> list[Receipt]:
        """Push to all servers at once, and write newer parameters into the plan's, if it names some.

        Gradients that gathered for tables are pushed before. No other thread may pull meanwhile. A shard whose round
        waits for other workers brings no parameters: then `pull_needed` is True, and `pull` waits for them.

        Returns:
            A receipt for each pushed shard, by shard id. A shard may be REJECTED, for the reason in its receipt.

        Raises:
            RunFinished: The run is over.
        """
        self._check_open()
        state = self.view.state
        if state.finished:
            raise RunFinished(f"Run {self.run_id!r} is finished: its servers take no more gradients. Pulls still work.")
        clock = self.clock if plan.clock is None else plan.clock
        if self.tables is not None:
            self.tables.push(clock=clock, example_count=plan.example_count)
        into, lent_index, receivers = plan.parameters, plan.lent_index, None
        if lent_index is None:
            lent_index = self._sharing.gradients(plan.gradients)
            if into is not None and not self._sharing.are_parameters(into):
                # One transport carries gradients and parameters.
                lent_index = None
        if into is not None:
            receivers = self._receivers if plan.lent_index is not None else self._receivers_into(into)
        sent_at = time.monotonic()
        pushes = self._pushes.outgoing(
            plan,
            clock=clock,
            clip_norm=state.terms.clip_norm,
            receivers=receivers,
            lent_index=lent_index,
        )
        receipts: list[Receipt] = []
        for push, answers in zip(pushes, self._servers.on_all(pushes), strict=True):
            connection = push.connection
            epoch = self.view.note_receipts(connection.index, answers, sent_at=sent_at, version=push.version)
            if epoch > connection.epoch:
                connection.epoch = epoch
            receipts += answers
        if len(receipts) > 1:
            receipts.sort(key=_shard_id)
        self._pushes.answered(pushes)
        self._holdings.note(receipts)
        if plan.gradient_norm is None and self._peers.count > 1:
            self.view.meet(pull_needed=self._holdings.pull_needed(self._servers.connections))
        return receipts

    def discard(self, plan: Plan) -> None:
        """Note that nothing of a push was applied, as servers held it and its scale never came."""
        self._encoder.discard(plan)

    def norm(self, plan: Plan) -> float:
        """Return the norm of a push over all processes of the replica, all of which call this."""
        return self._pushes.norm(plan)

    def residuals(self) -> dict[str, Any] | None:
        """Return what encodings of this worker's gradients lost and owe to its next ones, for `load_residuals`.

        Call it while no push is under way. None where the codec loses nothing for good, or nothing was pushed.
        """
        shards = self._encoder.state()
        return {"run_id": self.run_id, "shards": shards} if shards else None

    def load_residuals(self, saved: Mapping[str, Any]) -> None:
        """Go on with the residuals of an earlier life of this worker; those of another run are left."""
        self._check_open()
        if saved["run_id"] == self.run_id:
            self._encoder.load(saved["shards"], self.partition)

    def pull(
        self, vectors: Vectors, *, min_versions: Mapping[int, int] | None = None, wait_seconds: float | None = None
    ) -> set[int]:
        """Write parameters newer than `held_versions` into `vectors` (one a group); return the changed shards' ids.

        `vectors` are float32, or of the pull codec's type; under a published codec the lent ones. Waits for the ends of
        the rounds of earlier pushes, or for `min_versions` (shard id -> version, {} for none) instead. Raises
        WaitTimedOut, which names the other workers, after `wait_seconds`, by default the launch's.
        """
        self._check_open()
        changed = read(
            *(self._servers, self.sender, ROLE_WORKER, self._receivers_into(vectors)),
            poll=LongPoll(self.launch.wait_seconds if wait_seconds is None else wait_seconds),
            awaited=self._holdings.awaited if min_versions is None else lambda server_index: min_versions,
            lent=self._sharing.are_parameters(vectors),
        )
        self.view.note_pull(self._holdings.largest_version)
        return changed

    def with_parameters(self, vectors: Vectors) -> LeaseCall:
        """Return a call that leases a portion and, if there is one, pulls the present parameters into `vectors`.

        GET of Zhang et al. 2013 (of one moment under `mutex=whole`), for a run on one server; `vectors` as for `pull`.
        """
        self._check_open()
        connection, receiver = self._servers.connections[0], self._receivers_into(vectors)[0]

        def lease(channel: GrpcChannel, request: LeaseRequest, stop: threading.Event) -> LeaseReply:
            # The request has its own limit for the wait.
            poll = LongPoll(0.0)
            pull = IncomingPull(self.sender, ROLE_WORKER, receiver, connection, lambda _: {}, poll, portion=request)
            pull(channel, stop)
            return pull.lease

        return lease

    def snapshot(self, vectors: Sequence[Vector]) -> Versions:
        """Write the present parameters into `vectors` (one a group, float32), and return their versions.

        For evaluation: each shard is of one version; this waits for nothing and leaves `held_versions` alone.
        """
        self._check_open()
        holdings = Holdings(self.partition)
        into = receivers(self._servers, vectors, holdings, codec=FLOAT32)
        read(self._servers, self.sender, ROLE_OBSERVER, into, poll=LongPoll(0.0))
        return holdings.versions

    def proceed(self) -> None:
        """Wait until the next step may begin; no call is made unless the protocol in force paces workers.

        Call it between two steps, before the pull, with `clock` counted up. Only a replica's leader asks the server,
        and all its processes wait. Raises WaitTimedOut, which names the other workers.
        """
        self._check_open()
        if self.finished or not self.terms.ask_to_proceed:
            return
        question = LongPoll(self.launch.wait_seconds).proceed(self.sender, clock=self.clock)
        asks = led(self._peers, lambda: self._servers.on_first(question).ask_to_proceed)
        self.view.note_proceed(ask_to_proceed=asks)

    def meet(self) -> None:
        """Bring a replica's processes to one state of the run, in a step without a push, which does the same."""
        self._check_open()
        self.view.meet(pull_needed=self._holdings.pull_needed(self._servers.connections))

    def ask_first(self, operation: Operation[T], *, each: bool = False) -> T:
        """Run an operation of another service on server 0, again after each loss of its connection.

        A replica's leader runs it for all processes; with `each` every process does, and all raise the same error.
        """
        self._check_open()
        run = agreed if each else led
        return run(self._peers, lambda: self._servers.on_first(operation))

    def ask_all(self, operation_of: Callable[[tuple[ShardRange, ...]], Operation[T]]) -> list[T]:
        """Run an operation on each server of this process's, all at once; return the results, or raise the first error.

        `operation_of` makes it from the shards that this process has on the server.
        """
        self._check_open()
        of_servers = [self.partition.of_server(connection.index) for connection in self._servers.connections]
        return self._servers.on_all([operation_of(shards) for shards in of_servers])

    @property
    def sender(self) -> Sender:
        """The sender of this worker's messages; with the run's name after `connect`."""
        return self._handshake.sender

    @property
    def held_versions(self) -> Versions:
        """A copy of shard id -> held version (-1 for none), with the servers' epochs."""
        return self._holdings.versions

    @property
    def epoch(self) -> int:
        """Grows with every restore of any server."""
        return sum(connection.epoch for connection in self._servers.connections)

    @property
    def is_behind(self) -> bool:
        """Whether a server has come back since parameters were pulled from it."""
        return self._holdings.are_behind(self._servers.connections)

    @property
    def pull_needed(self) -> bool:
        """Whether a pull is needed before the next gradient, which would be refused otherwise.

        True while a round waits for other workers, after a gradient that came too late, and after a server's restore;
        in a replica, if it was True for one process when the last push ended.
        """
        if self._peers.count > 1:
            return self.view.state.pull_agreed
        return self._holdings.pull_needed(self._servers.connections)

    @property
    def run_id(self) -> str:
        """The run's name, known after `connect`."""
        return self._handshake.sender.run_id

    @property
    def restored_position(self) -> bytes:
        """The `data_position` of the last push of the worker whose place this one took; b"" for none."""
        return self._handshake.data_position

    @property
    def transport(self) -> str:
        """The transport of lent vectors: "shm" (shared with all servers), "tcp", "grpc" or "mixed"."""
        return self._sharing.transport

    @property
    def checks_first(self) -> bool:
        """Whether the server checks a lent push for NaN and infinity before it applies any of it.

        True where one server shares the memory of all parameters: it refuses all shards of such a push as NOT_FINITE.
        Elsewhere the worker has to check, or some shards may be applied and others refused. If shared memory is lost
        before a push is sent, `Outgoing` checks it.
        """
        holder = self._sharing.holder
        return holder is not None and self._peers.count == 1 and holder.is_local

    @property
    def goes_by_calls(self) -> bool:
        """Whether lent gradients go to all servers in messages, one a shard, and not through shared memory."""
        return not any(connection.is_local for connection in self._servers.connections)

    @property
    def terms(self) -> Terms:
        """The protocol in force and its settings, as server 0 last reported them after `connect`."""
        return self.view.state.terms

    @property
    def gives_out_data(self) -> bool:
        """Whether the protocol in force hands out data and parameters under one mutex (asgd, on one server)."""
        name, _, settings = self.terms.protocol.partition(":")
        return name == "asgd" and "mutex=shard" not in settings

    @property
    def global_step(self) -> int:
        """Updates of the whole run: the largest shard version seen so far."""
        return self.view.state.global_step

    @property
    def num_workers(self) -> int:
        """Live workers, as last reported."""
        return self.view.state.num_workers

    @property
    def finished(self) -> bool:
        """Whether the run is over: pulls still work, a push raises RunFinished."""
        return self.view.state.finished

    @property
    def refused(self) -> dict[str, int]:
        """Refused shards by the reason's name: {"STALE": 3}."""
        return dict(self.view.refused)

    def report(self, **scalars: float) -> None:
        """Set figures of this worker (loss=0.3), which the next heartbeat sends to the servers."""
        with self._lock:
            self._scalars |= {name: float(value) for name, value in scalars.items()}

    def hurry(self) -> None:
        """Wait for lost and silent servers for END_SECONDS only from now on: the worker ends."""
        self._servers.hurry(END_SECONDS)
        self._lease.hurry(END_SECONDS)

    def close(self, cause: str = "finished", message: str = "") -> None:
        """Leave the run, as "finished", or as "failed" with the reason. A second call does nothing."""
        leave.check_cause(cause)
        if self._guard.in_child or self._closing.is_set():
            return
        self._closing.set()
        self._lease.disarm()
        leave.forget(self)
        error = leave.undisturbed(partial(self._leave, cause, message))
        if error is not None:
            raise error

    def _leave(self, cause: str, message: str) -> None:
        self._servers.give_up()
        if self.tables is not None:
            self.tables.close()
        self._lease.leave(cause, message)
        self._servers.close()
        self.launch.end()

    def __enter__(self) -> Worker:
        self.connect()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(*leave.cause_of(error))

    def _receivers_into(self, vectors: Vectors) -> list[Receiver]:
        if self._receivers and self._sharing.are_parameters(vectors):
            return self._receivers
        if self._pull_codec.published and not self._sharing.are_parameters(vectors):
            raise InvalidArgument(
                f"Parameters come in {self._pull_codec.name} as differences to those held: pull into the lent vectors."
            )
        return receivers(
            self._servers, vectors, self._holdings, codec=self._pull_codec, converter=self._encoder.converter
        )

    def _rejoin(self, connection: Connection, channel: GrpcChannel, timeout_seconds: float) -> None:
        self._note_hello(connection, self._handshake.rejoin(connection, channel, timeout_seconds))

    def _renew_offer(self, connection: Connection, channel: GrpcChannel, _: threading.Event) -> None:
        if self._sharing.is_stale(connection):
            self._rejoin(connection, channel, CALL_SECONDS)

    def _check_open(self) -> None:
        if self._guard.generation != fork.generation:
            self._guard.check()
        if self._peers is not ALONE:
            self._lease.check()
        if self._closing.is_set():
            raise RunFinished("The client was closed: make a new one to go on.")
        if not self._joined:
            raise InvalidArgument("The session is not connected: call connect() before pushing or pulling.")

    def _note_hello(self, connection: Connection, reply: HelloReply) -> None:
        self.view.note_hello(connection.index, reply)
        self._sharing.greeted(connection, reply)
        self.holds_pushes = self.holds_pushes and "held_pushes" in reply.features
        keeps = "resend" in reply.features
        if connection.resend is None and (keeps or "resend_in_flight" in reply.features):
            connection.resend = self._kept[connection.index] = KeptPushes(
                connection,
                self._holdings.of_server[connection.index],
                *([self.tables.held[connection.index]] if self.tables and connection.index in self.tables.held else []),
                sender=self.sender,
                view=self.view,
                bytes_max=self.launch.resend_bytes_max // len(self._servers.connections),
                wait_seconds=self.launch.wait_seconds,
            )
        if connection.index in self._kept:
            self._kept[connection.index].wanted = keeps

    def _heartbeat(self) -> HeartbeatRequest:
        sender = self.sender
        if not self._joined:
            # Before its initialization a run has no name.
            sender = Sender(worker_id=sender.worker_id, incarnation=sender.incarnation, secret=sender.secret)
        with self._lock:
            return HeartbeatRequest(sender=sender, clock=self.clock, scalars=self._scalars)

    def _note_heartbeat(self, connection: Connection, reply: HeartbeatReply, asked_at: float) -> None:
        if reply.known:
            # A server that has begun again may have to give way to its standby, which serves under a smaller epoch.
            connection.epoch = max(connection.epoch, reply.epoch)
        connection.note_standby(reply.standby)
        self.view.note_heartbeat(connection.index, reply, asked_at=asked_at)
        # A server that has a standby now wants a push sent again that was under way when it ended.
        if not reply.known or (self._joined and reply.standby and connection.resend is None):
            again = self._rejoin if self._joined else self._handshake.hello
            again(connection, connection.channel, HELLO_SECONDS)
