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
from pyps_client.launch import Launch
from pyps_client.lease import Lease
from pyps_client.log import logger
from pyps_client.pull import Holdings, IncomingPull, LeaseCall, LongPoll, Receiver, Versions, read, receivers
from pyps_client.push import Plan, Pushes
from pyps_client.replica.group import ALONE, Group, agreed, led, own_partition
from pyps_client.run_state import View, warn_of_differences
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

# For so long a worker that ends waits for a server that is lost, or silent.
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
        """`initial` gives one float32 vector a group, or what makes a shard's numbers as they are sent; only called
        where this worker is elected to initialise.

        `parts`: those of the model's that this process holds, all by default. `model` and `optimizer` are of the whole;
        the groups, and all vectors, are those of these parts. `peers`: the processes of this worker's replica, all of
        which connect, push and proceed in the same order: those calls are collective. InvalidArgument where several are
        to hold all of the model, or where a server does not know one of the launch's codecs.
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
        if self._pull_codec.stateful:
            raise InvalidArgument(
                f"codec {self._pull_codec.name} carries state from push to push: pull in another (parameter_codec)"
            )
        # Not before: what is refused leaves no server.
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
            greeted=lambda connection, reply: self._lease.greeted(connection, reply),
        )
        self._guard = ForkGuard()
        self._servers = Servers(launch, rejoin=self._rejoin)
        # These are made of the run's partition, when the run is joined.
        self.partition: Partition
        self._holder: Connection | None
        self._holdings: Holdings
        self._pushes: Pushes
        self._sharing: Sharing
        self.view = View(peers)
        sender = self._handshake.sender
        self._receivers: list[Receiver] = []
        self._closing = threading.Event()
        self._hello: HelloReply | None = None
        self._lease = Lease(sender, launch=launch, peers=peers, request=self._heartbeat_request, heard=self._heard)
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._scalars: dict[str, float] = {}

    def connect(self) -> None:
        """Join the run; wait for servers and for its parameters, or send the first ones where elected."""
        if self._hello is not None:
            return
        # Its last pushes would be refused as those of an earlier process, if it has the same name.
        leave.wait_for_leaving()
        leave.expect(self)
        self._lease.watch()
        try:
            self._join()
        except BaseException as error:
            self.close(*leave.cause_of(error))
            raise

    def next_rates(self) -> dict[int, float]:
        """Return group -> step size of its next update before staleness, as the servers last said."""
        rates = self.view.state.next_rates
        return {shard.group: rates[shard.shard_id] for shard in self.partition.shards if shard.shard_id in rates}

    def _join(self) -> None:
        handshake, servers = self._handshake, self._servers
        replies = handshake.join(servers.connections, self._initial, self._closing)
        assert handshake.partition is not None
        self._servers.keep(handshake.contacts)
        self.partition = partition = handshake.partition
        holders = [each for each in servers if partition.of_server(each.index)]
        # Where there are no other processes, and no other servers that hold parameters.
        self._holder = holders[0] if len(holders) == self._peers.count == 1 else None
        self._holdings = Holdings(partition)
        self._pushes = Pushes(
            self._holdings,
            sender=self.sender,
            encoder=self._encoder,
            connections=servers.connections,
            peers=self._peers,
        )
        self._sharing = Sharing(self.launch, partition, servers.connections, self.sender)
        for connection, reply in zip(self._servers, replies, strict=True):
            self._note_hello(connection, reply)
        warn_of_differences(replies, [connection.index for connection in self._servers])
        self._hello = first = replies[0]
        self.view.meet(pull_needed=True)
        logger.info(
            "%s joined run %s on %s (%s, %s, staleness %s)",
            *(self.sender.worker_id, first.run_id, ", ".join(connection.address for connection in self._servers)),
            *(first.optimizer.rule, first.protocol, first.staleness),
        )

    def lend(self, gradient_buffers: int = 1, *, converter: Converter | None = None) -> Lent:
        """Make vectors for this worker's gradients and parameters, zeroed; once a session, after `connect`.

        A server on this machine may share their memory: then a `push`, `exchange` or `pull` of these very arrays moves
        nothing; a copy or another view goes in messages.

        With a converter, private vectors are float32 whatever the codecs, and are converted when they are sent.
        """
        self._check_open()
        self._encoder.converter = converter or self._encoder.converter
        layout = Layout(self.model, self._codec, self._pull_codec, gradient_buffers, converts=converter is not None)
        self._servers.on_all([partial(self._greet_where_stale, each) for each in self._servers])
        lent = self._sharing.lend(layout)
        self._receivers = self._receivers_into(lent.parameters)
        return lent

    def tell_landed(self, on_landed: Callable[[ShardRange], object]) -> None:
        """Call `on_landed` for each shard that a message brings into the lent parameters, at once, on any thread."""
        for receiver in self._receivers:
            receiver.on_landed = on_landed

    def push(self, gradients: Vectors, **described: Any) -> list[Receipt]:
        """Push gradients alone, described by fields of `Plan`."""
        return self.exchange(Plan(gradients, **described))

    def exchange(self, plan: Plan) -> list[Receipt]:
        """Push to all servers at once, and receive newer parameters into the plan's, if it names some.

        Returns:
            A receipt for each pushed shard, by shard id. A shard may be REJECTED: see the receipt's reason, and
            `pull_needed`. A shard whose round waits for other workers brings nothing: `pull_needed` then, and `pull`
            waits.

        Raises:
            RunFinished: The run is over.

        No other thread may pull meanwhile.
        """
        self._check_open()
        state = self.view.state
        if state.finished:
            raise RunFinished(f"Run {self.run_id!r} is finished: its servers take no more gradients. Pulls still work.")
        into, lent_index, receivers = plan.parameters, plan.lent_index, None
        if lent_index is None:
            lent_index = self._sharing.gradients(plan.gradients)
            if into is not None and not self._sharing.are_parameters(into):
                # Both go by one transport.
                lent_index = None
        if into is not None:
            receivers = self._receivers if plan.lent_index is not None else self._receivers_into(into)
        sent_at = time.monotonic()
        pushes = self._pushes.outgoing(
            plan,
            clock=self.clock if plan.clock is None else plan.clock,
            clip_norm=state.terms.clip_norm,
            receivers=receivers,
            lent_index=lent_index,
        )
        receipts: list[Receipt] = []
        for connection, push, answers in zip(
            self._servers.connections, pushes, self._servers.on_all(pushes), strict=True
        ):
            epoch = self.view.answered(connection.index, answers, sent_at=sent_at, version=push.version)
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

    def norm(self, plan: Plan) -> float:
        """Return the norm of a push of all processes of the replica, all of which call it."""
        return self._pushes.norm(plan)

    def pull(
        self, vectors: Vectors, *, min_versions: Mapping[int, int] | None = None, wait_seconds: float | None = None
    ) -> set[int]:
        """Write parameters newer than `held_versions` into `vectors` (one a group); return the changed shards' ids.

        `vectors` are float32, or of the pull codec's type. Waits for the versions in the receipts of earlier pushes (a
        round's end), or for `min_versions` (shard id -> version, {} for none) instead. WaitTimedOut, after
        `wait_seconds`, by default the launch's, names the other workers.
        """
        self._check_open()
        indices = [connection.index for connection in self._servers]
        changed = read(
            *(self._servers, self._handshake.sender, ROLE_WORKER, self._receivers_into(vectors)),
            poll=LongPoll(self.launch.wait_seconds if wait_seconds is None else wait_seconds),
            min_versions=[self._holdings.awaited(i) if min_versions is None else min_versions for i in indices],
            lent=self._sharing.are_parameters(vectors),
        )
        self.view.pulled(self._holdings.largest_version)
        return changed

    def with_parameters(self, vectors: Vectors) -> LeaseCall:
        """Return a call that leases a portion, and pulls the parameters of that moment into `vectors`.

        GET of Zhang et al. 2013 (of one moment under `mutex=whole`), for a run on one server; `vectors` as for `pull`.
        Without a portion no parameters come.
        """
        self._check_open()
        connection, receiver = self._servers.connections[0], self._receivers_into(vectors)[0]
        lent = self._sharing.are_parameters(vectors)

        def lease(channel: GrpcChannel, request: LeaseRequest, stop: threading.Event) -> LeaseReply:
            pull = IncomingPull(
                *(self.sender, ROLE_WORKER, receiver),
                connection=connection,
                min_versions={},
                # The request has its own limit for the wait.
                poll=LongPoll(0.0),
                lent=lent,
                portion=request,
            )
            pull(channel, stop)
            return pull.lease

        return lease

    def snapshot(self, vectors: Sequence[Vector]) -> Versions:
        """Write the present parameters into `vectors` (one a group, float32), and return their versions.

        For evaluation: each shard is of one version; it waits for nothing and leaves `held_versions` alone.
        """
        self._check_open()
        holdings = Holdings(self.partition)
        into = receivers(self._servers, vectors, holdings, codec=FLOAT32)
        read(self._servers, self._handshake.sender, ROLE_OBSERVER, into, poll=LongPoll(0.0))
        return holdings.versions

    def proceed(self) -> None:
        """Wait until the next step may begin; no call is made unless the protocol in force paces workers.

        Call it between two steps, before the pull, with `clock` counted up. Of a replica the leader asks, and all wait.
        WaitTimedOut names the other workers.
        """
        self._check_open()
        if self.view.state.finished or not self.view.state.terms.ask_to_proceed:
            return
        question = LongPoll(self.launch.wait_seconds).proceed(self._handshake.sender, clock=self.clock)
        asks = led(self._peers, lambda: self._servers.on_first(question).ask_to_proceed)
        self.view.granted(ask_to_proceed=asks)

    def meet(self) -> None:
        """Bring a replica's processes to one state of the run: for a step without a push that does."""
        self._check_open()
        self.view.meet(pull_needed=self._holdings.pull_needed(self._servers.connections))

    def ask_first(self, operation: Operation[T], *, each: bool = False) -> T:
        """Run an operation of another service on server 0, again after each loss of its connection.

        Of a replica the leader does, and all get its result; with `each` all processes do, and raise one error or none.
        """
        self._check_open()
        one_view = agreed if each else led
        return one_view(self._peers, lambda: self._servers.on_first(operation))

    def ask_all(self, operations: Sequence[Operation[T]]) -> list[T]:
        """Run one operation a server, in the servers' order, all at once; raise the first failure."""
        self._check_open()
        return self._servers.on_all(operations)

    @property
    def sender(self) -> Sender:
        """This worker in its messages; with the run's name after `connect`."""
        return self._handshake.sender

    @property
    def held_versions(self) -> Versions:
        """A copy of shard id -> version of the newest pull (-1: none), with the servers' epochs."""
        return self._holdings.versions

    @property
    def epoch(self) -> int:
        """Grows with every restore of any server."""
        return sum(connection.epoch for connection in self._servers)

    @property
    def pull_needed(self) -> bool:
        """Whether a pull is needed before the next gradient: one of the held parameters would be refused.

        So it is while a round waits for others, after a gradient that came too late, and after a server's restore. In a
        replica it is so on all processes where it was on one when the last push ended.
        """
        if self._peers.count > 1:
            return self.view.state.pull_agreed
        return self._holdings.pull_needed(self._servers.connections)

    @property
    def run_id(self) -> str:
        """The run's name, known after `connect`."""
        return self._handshake.sender.run_id

    @property
    def transport(self) -> str:
        """The transport of lent vectors: "shm" (shared with all servers), "tcp", "grpc" or "mixed"."""
        return self._sharing.transport

    @property
    def checks_first(self) -> bool:
        """Whether the server checks a lent push for NaN and infinity before it applies any of it.

        So it is where one server shares the memory of all parameters: it refuses all shards of such a push as
        NOT_FINITE. Elsewhere the worker has to check, or some shards may be applied and others refused. A push is
        checked here if shared memory is lost before it is sent (see Outgoing).
        """
        return self._holder is not None and self._holder.checks_first

    @property
    def goes_by_calls(self) -> bool:
        """Whether lent gradients go to all servers in messages, one a shard, and not through shared memory."""
        return not any(connection.is_local for connection in self._servers)

    @property
    def protocol(self) -> str:
        """The protocol in force ("async"), as server 0 last reported it after `connect`."""
        return self.view.state.terms.protocol

    @property
    def batch_size(self) -> int:
        """Examples in a minibatch, by the servers' schedule; 0 where they have none."""
        return self.view.state.terms.batch_size

    @property
    def accumulate(self) -> int:
        """Minibatches that the protocol sums in a push; 0 leaves it to the worker."""
        return self.view.state.terms.accumulate

    @property
    def ask_to_proceed(self) -> bool:
        """Whether the protocol in force grants steps one by one, so that `proceed` asks and may wait."""
        return self.view.state.terms.ask_to_proceed

    @property
    def current_version_only(self) -> bool:
        """Whether the protocol refuses gradients of older versions, so that no gradient must be computed ahead."""
        return self.view.state.terms.current_version_only

    @property
    def gives_out_data(self) -> bool:
        """Whether the protocol in force hands out data and parameters under one mutex (asgd, on one server)."""
        name, _, settings = self.protocol.partition(":")
        return name == "asgd" and "mutex=shard" not in settings

    @property
    def global_step(self) -> int:
        """Updates of the whole run: the largest shard version seen so far."""
        return self.view.state.global_step

    @property
    def num_workers(self) -> int:
        """Live workers, as the servers last said."""
        return self.view.state.num_workers

    @property
    def finished(self) -> bool:
        """Whether the run is over: pulls still work, a push raises RunFinished."""
        return self.view.state.finished

    @property
    def refused(self) -> dict[str, int]:
        """Refused shards by the reason's name: {"STALE": 3}."""
        return self.view.refusals.counts

    def report(self, **scalars: float) -> None:
        """Set figures of this worker (loss=0.3), which the next heartbeat carries to the servers."""
        with self._lock:
            self._scalars |= {name: float(value) for name, value in scalars.items()}

    def hurry(self) -> None:
        """Wait for lost and silent servers for seconds only from now on, whatever the launch says: the worker ends."""
        self._servers.hurry(END_SECONDS)
        self._lease.hurry(END_SECONDS)

    def close(self, cause: str = "finished", message: str = "") -> None:
        """Leave the run ("finished", or "failed" and why). A second call does nothing."""
        leave.check_cause(cause)
        if self._guard.in_child or self._closing.is_set():
            return
        self._closing.set()
        self._lease.settle()
        leave.forget(self)
        self._servers.give_up()
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
        return receivers(
            self._servers, vectors, self._holdings, codec=self._pull_codec, converter=self._encoder.converter
        )

    def _rejoin(self, connection: Connection, channel: GrpcChannel, timeout_seconds: float) -> None:
        self._note_hello(connection, self._handshake.rejoin(connection, channel, timeout_seconds))

    def _greet_where_stale(self, connection: Connection, channel: GrpcChannel, _: threading.Event) -> None:
        if self._sharing.is_stale(connection):
            self._rejoin(connection, channel, CALL_SECONDS)

    def _check_open(self) -> None:
        if self._guard.generation != fork.generation:
            self._guard.check()
        if self._peers is not ALONE:
            self._lease.check()
        if self._closing.is_set():
            raise RunFinished("The client was closed: make a new one to go on.")
        if self._hello is None:
            raise InvalidArgument("The session is not connected: call connect() before pushing or pulling.")

    def _note_hello(self, connection: Connection, reply: HelloReply) -> None:
        self.view.greeted(connection.index, reply)
        self._sharing.greeted(connection, reply)

    def _heartbeat_request(self) -> HeartbeatRequest:
        sender = self.sender
        if self._hello is None:
            # A run that is yet to be initialized goes by no name.
            sender = Sender(worker_id=sender.worker_id, incarnation=sender.incarnation, secret=sender.secret)
        with self._lock:
            return HeartbeatRequest(sender=sender, clock=self.clock, scalars=self._scalars)

    def _heard(self, connection: Connection, reply: HeartbeatReply, asked_at: float) -> None:
        connection.epoch = max(connection.epoch, reply.epoch)
        self.view.reminded(connection.index, reply, asked_at=asked_at)
        if not reply.known:
            again = self._handshake.hello if self._hello is None else self._rejoin
            again(connection, connection.channel, HELLO_SECONDS)
