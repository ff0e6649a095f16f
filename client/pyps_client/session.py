"""A worker's connection to all servers of a run: handshake, pushes, pulls, heartbeats, leave-taking."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy.typing as npt

from pyps_client import departure, uncaught
from pyps_client.channel import Channel
from pyps_client.connection import Connection
from pyps_client.crew import Crew
from pyps_client.fork import ForkGuard
from pyps_client.handshake import Handshake
from pyps_client.heartbeat import Heartbeat
from pyps_client.launch import Launch
from pyps_client.log import logger
from pyps_client.pulling import Held, IncomingPull
from pyps_client.pushing import OutgoingPush, present_shards
from pyps_client.retry import RetryPolicy
from pyps_client.vectors import Vector, check_vectors
from pyps_client.versions import Versions
from pyps_wire.codecs import codec_of, dtype_of, item_size
from pyps_wire.common_pb2 import (
    CODEC_FLOAT32,
    REASON_FINISHED,
    ROLE_WORKER,
    RUN_STATE_FINISHED,
    OptimizerSettings,
    Receipt,
)
from pyps_wire.errors import BadRequest, LimitExceeded, RunFinished, WrongSize
from pyps_wire.parameter_server_pb2 import HeartbeatReply, HeartbeatRequest, HelloReply, PushRequest
from pyps_wire.partition import Model, partition

T = TypeVar("T")

# How long a Hello from the heartbeat's thread may take.
HELLO_SECONDS = 10.0

# A message's fields beside the payload take less.
_HEADER_BYTES_MAX = 4096


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
        self._loss = RetryPolicy(launch.loss_wait_seconds, "loss_wait_seconds")
        self._guard = ForkGuard()
        self._connections = [Connection(index, launch=launch) for index in range(len(launch.servers))]
        self._held = [Held(self.partition.of_server(connection.index)) for connection in self._connections]
        self._crew = Crew()
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
        replies = self._handshake.join(self._connections, self._initial, self._closing)
        for connection, reply in zip(self._connections, replies, strict=True):
            self._check_limits(connection, reply)
            self._note_hello(reply)
        self._hello = first = replies[0]
        self._heartbeat = Heartbeat(
            self._connections,
            first.heartbeat_seconds or 5.0,
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
    ) -> list[Receipt]:
        """Pushes a gradient to all servers at once and returns the receipts, by shard id.

        `vectors`: one a group: float32, float16, or uint16 (the bits of bfloat16), as the codec says.
        `present`: one flag a tensor, in the model's order; absent tensors are not sent at all, and neither is
        a shard with nothing present. `base_versions`: a `held_versions` taken when the parameters were pulled
        that the gradient was computed on (the oldest, where several are summed; `newest_base_versions` then
        the newest); None for those held now. A shard may be REJECTED: see the receipt's reason; after
        REASON_EPOCH `pull_needed` is true. Raises RunFinished when the run had ended before.
        """
        self._check_open()
        if self._finished:
            raise RunFinished(f"Run {self.run_id!r} is finished: its servers take no more gradients. Pulls still work.")
        check_vectors(vectors, self.model, dtype_of(self._codec), what="pushed gradient")
        if present is not None and len(present) != len(self.model.tensors):
            raise WrongSize(
                f"present has {len(present)} flags; expected one for each of {len(self.model.tensors)} tensors."
            )
        base = self.held_versions if base_versions is None else base_versions
        newest = base if newest_base_versions is None else newest_base_versions
        epochs = base.epochs if isinstance(base, Versions) else self.held_versions.epochs
        header = self._push_header(example_count, minibatch_count)
        pushes = []
        for connection in self._connections:
            shards = present_shards(self.partition, connection.index, present)
            self._check_bases((shard.shard_id for shard, _ in shards), base, newest)
            own = PushRequest()
            own.CopyFrom(header)
            own.epoch = epochs[connection.index]
            pushes.append(OutgoingPush(own, shards, vectors, base_versions=base, newest_base_versions=newest))
        receipts = [receipt for replies in self._on_all(pushes) for receipt in replies]
        self._note_receipts(receipts)
        return sorted(receipts, key=lambda receipt: receipt.shard_id)

    def pull(
        self,
        vectors: Sequence[Vector],
        *,
        min_versions: Mapping[int, int] | None = None,
        wait_seconds: float | None = None,
    ) -> set[int]:
        """Writes what is newer than `held_versions` into `vectors` (one a group); returns changed shard ids.

        `min_versions`: shard id to the version to wait for, `wait_seconds` at the longest; then WaitTimedOut.
        """
        self._check_open()
        check_vectors(vectors, self.model, dtype_of(CODEC_FLOAT32), what="pulled parameters", writable=True)
        pulls = [
            IncomingPull(
                *(self._handshake.sender, ROLE_WORKER, vectors),
                partition=self.partition,
                connection=connection,
                held=held,
                min_versions=min_versions or {},
                wait_seconds=(wait_seconds or 0.0) if min_versions else 0.0,
            )
            for connection, held in zip(self._connections, self._held, strict=True)
        ]
        changed = set().union(*self._on_all(pulls))
        self._note_version(max(self.held_versions.values(), default=0))
        return changed

    @property
    def held_versions(self) -> Versions:
        """A copy of shard id -> version that was last pulled (-1: nothing), with the servers' epochs."""
        pairs = (pair for held in self._held for pair in held.versions.copy().items())
        return Versions(pairs, epochs=[held.epoch for held in self._held])

    @property
    def epoch(self) -> int:
        """Grows with every restore of any server."""
        return sum(connection.epoch for connection in self._connections)

    @property
    def pull_needed(self) -> bool:
        """True when a server was restored since the last pull: it would refuse gradients of what is held."""
        pairs = zip(self._connections, self._held, strict=True)
        # A server without a shard sends nothing that could bring its epoch here.
        return any(held.versions and connection.epoch != held.epoch for connection, held in pairs)

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
        """The aggregation protocol in force ("async"), known after `connect`."""
        return self._hello.protocol if self._hello else ""

    @property
    def staleness(self) -> str:
        """The staleness policy in force ("divide"), known after `connect`."""
        return self._hello.staleness if self._hello else ""

    def report(self, **scalars: float) -> None:
        """Sets figures of this worker (loss=0.3) that the next heartbeat carries to the servers."""
        with self._lock:
            self._scalars.update({name: float(value) for name, value in scalars.items()})

    def close(self, cause: str = "finished", message: str = "") -> None:
        """Leaves the run ("finished", or "failed" and why). A second call does nothing."""
        if self._guard.in_child or self._closing.is_set():
            return
        self._closing.set()
        departure.forget(self)
        self._crew.close()
        if self._heartbeat is not None:
            self._heartbeat.end()
        if self._hello is not None:
            departure.leave(self._connections, self._handshake.sender, cause, message)
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> Session:
        self.connect()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(*departure.cause_of(error))

    def _on_all(self, operations: Sequence[Callable[[Channel], T]]) -> list[T]:
        """Runs one operation a server, at the same time, each through losses of its connection."""

        def persist(connection: Connection, operation: Callable[[Channel], T], stop: threading.Event) -> T:
            return connection.persist(operation, rejoin=self._rejoin, stop=stop, policy=self._loss)

        pairs = zip(self._connections, operations, strict=True)
        return self._crew.run([partial(persist, connection, operation) for connection, operation in pairs])

    def _rejoin(self, connection: Connection, channel: Channel, timeout_seconds: float) -> None:
        self._note_hello(self._handshake.rejoin(connection, channel, timeout_seconds))

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

    def _check_bases(self, shard_ids: Iterable[int], base: Mapping[int, int], newest: Mapping[int, int]) -> None:
        for shard_id in shard_ids:
            if min(base.get(shard_id, -1), newest.get(shard_id, -1)) < 0:
                raise BadRequest(f"A push needs parameters pulled before: no version of shard {shard_id} is held.")

    def _check_limits(self, connection: Connection, reply: HelloReply) -> None:
        longest = max((shard.length for shard in self.partition.of_server(connection.index)), default=0)
        needed = longest * max(item_size(self._codec), item_size(CODEC_FLOAT32)) + _HEADER_BYTES_MAX
        if 0 < reply.limits.message_bytes_max < needed:
            raise LimitExceeded(
                f"{connection.name} takes messages of {reply.limits.message_bytes_max} bytes, a shard of "
                "this model needs "
                f"{needed}: raise its --max-message-bytes, or lower the model's shard_size "
                f"({self.model.shard_size})."
            )

    def _check_open(self) -> None:
        self._guard.check()
        if self._closing.is_set():
            raise RunFinished("The client was closed: make a new one to go on.")
        if self._hello is None:
            raise BadRequest("The session is not connected: call connect() before pushing or pulling.")

    def _note_hello(self, reply: HelloReply) -> None:
        self._note_version(max((shard.version for shard in reply.shards), default=0))
        if reply.state == RUN_STATE_FINISHED:
            self._finished = True

    def _note_receipts(self, receipts: Sequence[Receipt]) -> None:
        for receipt in receipts:
            connection = self._connections[self.partition.shard(receipt.shard_id).server_index]
            connection.epoch = max(connection.epoch, receipt.epoch)
            self._num_workers = receipt.num_workers or self._num_workers
            if receipt.reason == REASON_FINISHED:
                self._finished = True
        self._note_version(max((receipt.version_after for receipt in receipts), default=0))

    def _note_version(self, version: int) -> None:
        with self._lock:
            self._global_step = max(self._global_step, version)

    def _heartbeat_request(self) -> HeartbeatRequest:
        with self._lock:
            return HeartbeatRequest(sender=self._handshake.sender, clock=self.clock, scalars=self._scalars)

    def _heard(self, connection: Connection, reply: HeartbeatReply) -> None:
        """Acts on a heartbeat's answer."""
        connection.epoch = max(connection.epoch, reply.epoch)
        self._note_version(reply.version)
        if reply.state == RUN_STATE_FINISHED or reply.command == HeartbeatReply.COMMAND_STOP:
            self._finished = True
        if not reply.known:
            self._rejoin(connection, connection.channel, HELLO_SECONDS)
