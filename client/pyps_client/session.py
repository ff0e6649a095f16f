"""A worker's connection to all servers of a run: handshake, pushes, pulls, heartbeats, leave-taking."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy.typing as npt

from pyps_client import departure, uncaught
from pyps_client.channel import Channel
from pyps_client.connection import Connection
from pyps_client.fork import ForkGuard
from pyps_client.handshake import Handshake, check_limits
from pyps_client.heartbeat import Heartbeat
from pyps_client.holdings import Holdings
from pyps_client.launch import Launch
from pyps_client.learning_rates import LearningRates
from pyps_client.log import logger
from pyps_client.parking import Parking
from pyps_client.proceeding import Proceeding
from pyps_client.pushing import OutgoingPush, check_bases, check_push, norm_of, pushed_parts
from pyps_client.refusals import Refusals
from pyps_client.servers import Servers
from pyps_client.terms import Terms, warn_of_differences
from pyps_client.vectors import Vector, check_vectors
from pyps_client.versions import Versions
from pyps_wire.codecs import codec_of, dtype_of
from pyps_wire.common_pb2 import (
    CODEC_FLOAT32,
    PAYLOAD_KIND_GRADIENT,
    REASON_FINISHED,
    ROLE_OBSERVER,
    ROLE_WORKER,
    RUN_STATE_FINISHED,
    OptimizerSettings,
    Receipt,
    Role,
)
from pyps_wire.errors import BadRequest, RunFinished
from pyps_wire.parameter_server_pb2 import HeartbeatReply, HeartbeatRequest, HelloReply, PushRequest
from pyps_wire.partition import Model, partition

# How long a Hello from the heartbeat's thread may take.
HELLO_SECONDS = 10.0


class Session:
    """One worker's membership in a run, over all of its servers.

    One thread may push while another pulls. Buffers that were handed in must rest until the call returns: a
    push may be sent again after a lost connection. Nothing here looks for NaN;
    `pyps_client.finite.FiniteGuard` does, before.
    """

    def __init__(
        self,
        model: Model,
        optimizer: OptimizerSettings,
        *,
        launch: Launch,
        initial: Callable[[], Sequence[Vector]],
        codec: str | None = None,
        device: str = "",
    ) -> None:
        """`initial` gives one float32 vector a group; only called where this worker is elected to initialise.

        `codec` is "float32", "float16" or "bfloat16": how pushed vectors are written. None takes the
        launch's.
        """
        uncaught.install()
        self.launch = launch
        self.model = model
        self.partition = partition(model, num_servers=len(launch.servers))
        # The worker's own count of steps, sent with pushes and heartbeats. Whoever drives the session counts
        # it up.
        self.clock = 0
        self._codec = codec_of(codec or launch.codec)
        self._initial = initial
        self._handshake = Handshake(launch, partition=self.partition, optimizer=optimizer, device=device)
        self._guard = ForkGuard()
        self._servers = Servers(launch, rejoin=self._rejoin)
        self._holdings = Holdings(self.partition)
        self._terms = Terms()
        self._rates = LearningRates(len(launch.servers), num_groups=model.num_groups)
        self._refusals = Refusals()
        self._closing = threading.Event()
        self._hello: HelloReply | None = None
        self._heartbeat: Heartbeat | None = None
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._sequence = 0
        self._scalars: dict[str, float] = {}
        self._global_step = 0
        self._num_workers = 0
        self._finished = False

    def connect(self) -> None:
        """Joins the run, waiting for servers and for the initialiser; initialises where elected."""
        if self._hello is not None:
            return
        connections = self._servers.connections
        replies = self._handshake.join(connections, self._initial, self._closing)
        for connection, reply in zip(connections, replies, strict=True):
            check_limits(connection, reply, self.partition, codec=self._codec)
            self._note_hello(connection, reply)
        warn_of_differences(replies)
        self._hello = first = replies[0]
        self._heartbeat = Heartbeat(
            *(connections, first.heartbeat_seconds or 5.0),
            launch=self.launch,
            request=self._heartbeat_request,
            heard=self._heard,
        )
        self._heartbeat.start()
        departure.expect(self)
        logger.info(
            "%s joined run %s on %s (%s, %s, staleness %s)",
            *(self.launch.worker_id, first.run_id, ", ".join(self.launch.servers)),
            *(first.optimizer.rule, first.protocol, first.staleness),
        )

    def push(
        self,
        vectors: Sequence[npt.NDArray[Any]],
        *,
        present: Sequence[bool] | None = None,
        example_count: int = 0,
        minibatch_count: int = 1,
        base_versions: Mapping[int, int] | None = None,
        newest_base_versions: Mapping[int, int] | None = None,
        kinds: Sequence[int] | None = None,
        learning_rates: Mapping[int, float] | None = None,
    ) -> list[Receipt]:
        """Pushes a gradient to all servers at once and returns the receipts, one for each shard pushed, by shard id.

        `vectors`: one a group: float32, float16, or uint16 (the bits of bfloat16), as the codec says.
        `present`: one flag a tensor, in the model's order; numbers of absent tensors are not sent, and a shard
        with nothing present only says so. `base_versions`: a `held_versions` taken when the parameters were
        pulled that the gradient was computed on (the oldest, where several are summed; `newest_base_versions`
        then the newest); None for those held now. `kinds`: a PayloadKind a group, gradients by default.
        `learning_rates`: new ones by group, from the worker that owns the schedule.
        A shard may be REJECTED: see the receipt's reason, and `pull_needed`. Raises RunFinished after the run's end.
        """
        self._check_open()
        if self._finished:
            raise RunFinished(f"Run {self.run_id!r} is finished: its servers take no more gradients. Pulls still work.")
        kinds = kinds or [PAYLOAD_KIND_GRADIENT] * self.model.num_groups
        check_push(self.model, vectors, codec=self._codec, present=present, kinds=kinds)
        self._rates.change(learning_rates)
        base = self.held_versions if base_versions is None else base_versions
        newest = base if newest_base_versions is None else newest_base_versions
        check_bases(self.partition, base, newest)
        epochs = base.epochs if isinstance(base, Versions) else self.held_versions.epochs
        settled = [self._holdings.settled(server) for server in range(len(epochs))]
        parts = [pushed_parts(self.partition, *of, present=present) for of in enumerate(settled)]
        header = self._push_header(example_count, minibatch_count)
        if self._terms.clip_norm > 0:
            header.gradient_norm = norm_of(chain(*parts), vectors, codec=self._codec, kinds=kinds)
        pushes = []
        for server, epoch in enumerate(epochs):
            header.epoch = epoch
            push = OutgoingPush(
                *(header, parts[server], vectors),
                base_versions=base,
                newest_base_versions=newest,
                kinds=kinds,
                learning_rates=self._rates.owed(server, epoch=epoch),
            )
            pushes.append(push)
        answers = self._servers.on_all(pushes)
        for server, epoch in enumerate(epochs):
            self._rates.answered(server, epoch=epoch, receipts=answers[server])
        receipts = sorted(chain(*answers), key=lambda receipt: receipt.shard_id)
        self._note_receipts(receipts)
        return receipts

    def pull(
        self,
        vectors: Sequence[Vector],
        *,
        min_versions: Mapping[int, int] | None = None,
        wait_seconds: float | None = None,
    ) -> set[int]:
        """Writes what is newer than `held_versions` into `vectors` (one a group); returns changed shard ids.

        Waits for the versions that the receipts of earlier pushes named (a round's end), or for
        `min_versions` (shard id to version, {} for none) instead; at the longest `wait_seconds`, the launch's
        by default. Then WaitTimedOut names those who were waited for.
        """
        self._check_open()
        parking = Parking(self.launch.wait_seconds if wait_seconds is None else wait_seconds)
        changed = self._read(ROLE_WORKER, vectors, self._holdings, parking=parking, min_versions=min_versions)
        self._note_version(max(self.held_versions.values(), default=0))
        return changed

    def snapshot(self, vectors: Sequence[Vector]) -> Versions:
        """Writes the parameters as they are now into `vectors` (one a group), each shard of one version.

        For evaluation: waits for nothing, and leaves `held_versions` alone. Returns the snapshot's versions.
        """
        self._check_open()
        holdings = Holdings(self.partition)
        self._read(ROLE_OBSERVER, vectors, holdings, parking=Parking(0.0), min_versions={})
        return holdings.versions

    def proceed(self) -> None:
        """Waits until the next step may begin. No call is made where the protocol in force does not ask for it.

        To be called between two steps, before the pull, with `clock` counted up. Raises WaitTimedOut, naming
        those who were waited for, after the launch's `wait_seconds`.
        """
        self._check_open()
        if self._finished or not self._terms.ask_to_proceed:
            return
        parking = Parking(self.launch.wait_seconds)
        question = Proceeding(self._handshake.sender, clock=self.clock, parking=parking)
        reply = self._servers.on_first(question)
        self._terms.ask_to_proceed = reply.ask_to_proceed

    @property
    def held_versions(self) -> Versions:
        """A copy of shard id -> version that was last pulled (-1: nothing), with the servers' epochs."""
        return self._holdings.versions

    @property
    def epoch(self) -> int:
        """Grows with every restore of any server."""
        return sum(connection.epoch for connection in self._servers)

    @property
    def pull_needed(self) -> bool:
        """True when gradients of what is held would be refused: a pull has to come before the next is computed.

        So it is when a round waits for others, when the last gradient came too late, and after a server's
        restore.
        """
        pairs = zip(self._servers, self._holdings.of_server, strict=True)
        # A server without a shard sends nothing that could bring its epoch here.
        return any(held.versions and (connection.epoch != held.epoch or held.wanted) for connection, held in pairs)

    @property
    def global_step(self) -> int:
        """Updates of the whole run: the largest shard version seen so far."""
        return self._global_step

    @property
    def num_workers(self) -> int:
        """Live workers, as the servers last said."""
        return self._num_workers

    @property
    def finished(self) -> bool:
        """True when the run is over: pulls still work, a push raises RunFinished."""
        return self._finished

    @property
    def run_id(self) -> str:
        """The run's name, known after `connect`."""
        return self._handshake.sender.run_id

    @property
    def protocol(self) -> str:
        """The protocol in force ("async"), known after `connect`. It may change while the run goes on."""
        return self._terms.protocol

    @property
    def staleness(self) -> str:
        """The staleness policy in force ("divide"); as `protocol`."""
        return self._terms.staleness

    @property
    def batch_size(self) -> int:
        """Examples in a minibatch, as the servers' schedule asks for them now; 0 where they have none."""
        return self._terms.batch_size

    @property
    def accumulate(self) -> int:
        """Minibatches that the protocol wants summed in a push; 0 leaves it to the worker."""
        return self._terms.accumulate

    @property
    def ask_to_proceed(self) -> bool:
        """Whether the protocol in force grants steps one by one, so that `proceed` asks and may wait."""
        return self._terms.ask_to_proceed

    @property
    def current_version_only(self) -> bool:
        """Whether the protocol refuses gradients of older versions, so that nobody must compute ahead."""
        return self._terms.current_version_only

    @property
    def refused(self) -> dict[str, int]:
        """Pushed shards that servers did not take, by the reason's name: {"STALE": 3}."""
        return self._refusals.counts

    def report(self, **scalars: float) -> None:
        """Sets figures of this worker (loss=0.3) that the next heartbeat carries to the servers."""
        with self._lock:
            self._scalars |= {name: float(value) for name, value in scalars.items()}

    def close(self, cause: str = "finished", message: str = "") -> None:
        """Leaves the run ("finished", or "failed" and why). A second call does nothing."""
        if self._guard.in_child or self._closing.is_set():
            return
        self._closing.set()
        departure.forget(self)
        self._servers.give_up()
        if self._heartbeat is not None:
            self._heartbeat.end()
        if self._hello is not None:
            departure.leave(self._servers.connections, self._handshake.sender, cause, message)
        self._servers.close()

    def __enter__(self) -> Session:
        self.connect()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(*departure.cause_of(error))

    def _read(
        self,
        role: Role,
        vectors: Sequence[Vector],
        holdings: Holdings,
        *,
        parking: Parking,
        min_versions: Mapping[int, int] | None,
    ) -> set[int]:
        check_vectors(vectors, self.model, dtype_of(CODEC_FLOAT32), what="pulled parameters", writable=True)
        who = (self._handshake.sender, role)
        return self._servers.read(
            *(*who, vectors, holdings), partition=self.partition, parking=parking, min_versions=min_versions
        )

    def _rejoin(self, connection: Connection, channel: Channel, timeout_seconds: float) -> None:
        self._note_hello(connection, self._handshake.rejoin(connection, channel, timeout_seconds))

    def _push_header(self, example_count: int, minibatch_count: int) -> PushRequest:
        with self._lock:
            self._sequence += 1
            sequence = self._sequence
        return PushRequest(
            sender=self._handshake.sender,
            sequence=sequence,
            codec=self._codec,
            example_count=example_count,
            minibatch_count=minibatch_count,
            clock=self.clock,
        )

    def _check_open(self) -> None:
        self._guard.check()
        if self._closing.is_set():
            raise RunFinished("The client was closed: make a new one to go on.")
        if self._hello is None:
            raise BadRequest("The session is not connected: call connect() before pushing or pulling.")

    def _note_hello(self, connection: Connection, reply: HelloReply) -> None:
        self._note_version(max((shard.version for shard in reply.shards), default=0))
        if reply.state == RUN_STATE_FINISHED:
            self._finished = True
        if connection.index == 0:
            self._terms.greeted(reply)

    def _note_receipts(self, receipts: Sequence[Receipt]) -> None:
        """Acts on the servers' answers to a push."""
        self._holdings.note(receipts)
        for receipt in receipts:
            connection = self._servers.connections[self.partition.shard(receipt.shard_id).server_index]
            connection.epoch = max(connection.epoch, receipt.epoch)
            self._num_workers = receipt.num_workers or self._num_workers
            if receipt.reason == REASON_FINISHED:
                self._finished = True
            if connection.index == 0:
                self._terms.answered(receipt)
        self._refusals.note(receipts)
        self._note_version(max((receipt.version_after for receipt in receipts), default=0))

    def _note_version(self, version: int) -> None:
        with self._lock:
            self._global_step = max(self._global_step, version)

    def _heartbeat_request(self) -> HeartbeatRequest:
        with self._lock:
            return HeartbeatRequest(sender=self._handshake.sender, clock=self.clock, scalars=self._scalars)

    def _heard(self, connection: Connection, reply: HeartbeatReply) -> None:
        connection.epoch = max(connection.epoch, reply.epoch)
        self._note_version(reply.version)
        if connection.index == 0:
            self._terms.reminded(reply)
        if reply.state == RUN_STATE_FINISHED or reply.command == HeartbeatReply.COMMAND_STOP:
            self._finished = True
        if not reply.known:
            self._rejoin(connection, connection.channel, HELLO_SECONDS)
