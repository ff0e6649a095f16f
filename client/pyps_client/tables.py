"""The tables of a run: rows by id that lie on the servers, pulled and pushed beside the model's parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pyps_client.kept import KeptPushes
from pyps_client.log import logger
from pyps_client.pull import Held, LongPoll
from pyps_client.retry import LinkLost
from pyps_client.run_state import OUTDATED
from pyps_client.transport import Incoming, Parts, Payload
from pyps_client.transport.connection import Connection, Servers, call_seconds
from pyps_client.transport.grpc import GrpcChannel
from pyps_wire.codecs import FLOAT32, Codec
from pyps_wire.common_pb2 import (
    OUTCOME_REJECTED,
    PAYLOAD_KIND_GRADIENT,
    PAYLOAD_KIND_NOTHING,
    ROLE_WORKER,
    Receipt,
    Sender,
)
from pyps_wire.errors import LimitExceeded, WaitTimedOut, WrongSize
from pyps_wire.parameter_server_pb2 import Parameters, PullRequest, PushRequest
from pyps_wire.partition import Partition, ShardRange
from pyps_wire.rows import Ids, bucket_of

Rows = npt.NDArray[np.float32]
# Ids are spread over places by another hash than over shards.
SALT = 0x9E3779B97F4A7C15
# Of each table, the rows whose encodings' errors are kept.
KEPT_ROWS = 2**16
# Ids of a request: a server takes 2.7 MiB of them.
PULLED_ROWS = 2**18
# Numbers of its rows: a server holds them at once.
PULLED_NUMBERS = 2**25
# Of a push, beside its payload.
HEADER_BYTES = 2**12


# Rows, and by shard the version of them.
Pulled: TypeAlias = tuple[Rows, dict[int, int]]


@dataclass(frozen=True)
class Gradients:
    """The gradients of some of a table's rows."""

    # Ascending, each once.
    ids: Ids
    # A row for each id.
    rows: Rows
    # By shard, the version at which the rows were pulled.
    versions: Mapping[int, int]

    def of(self, index: npt.NDArray[np.intp]) -> tuple[Ids, Rows]:
        return self.ids[index], self.rows[index]


class Tables:
    """Pulls and pushes rows of all tables of a run. One thread may push while another pulls."""

    def __init__(
        self,
        whole: Partition,
        *,
        servers: Servers,
        sender: Sender,
        kept: Mapping[int, KeptPushes],
        next_sequence: Callable[[], int],
        gradient_codec: Codec,
        parameter_codec: Codec,
        wait_seconds: float,
        current_only: Callable[[], bool],
        message_bytes_max: int,
    ) -> None:
        names = {group: tensor.name for group, tensor in whole.model.tables.items()}
        self._shards: dict[str, list[ShardRange]] = {name: [] for name in names.values()}
        for shard in whole.shards:
            if shard.group in names:
                self._shards[names[shard.group]].append(shard)
        self.dims = {tensor.name: tensor.shape[1] for tensor in whole.model.tables.values()}
        self._server_of = {shard.shard_id: whole.server_of(shard.shard_id) for shard in whole.shards}
        of_servers: dict[int, list[ShardRange]] = {}
        for shard in (shard for shards in self._shards.values() for shard in shards):
            of_servers.setdefault(self._server_of[shard.shard_id], []).append(shard)
        self.held = {index: Held(shards) for index, shards in of_servers.items()}
        self._servers, self._sender, self._kept = servers, sender, kept
        self._next_sequence = next_sequence
        self._encoders = {name: _RowEncoder(gradient_codec, dim) for name, dim in self.dims.items()}
        self._pull_codec = parameter_codec
        self._wait_seconds, self._message_bytes_max = wait_seconds, message_bytes_max
        # Whether servers refuse gradients of other versions than the newest.
        self.current_only = current_only
        self._gathering = threading.Lock()
        # Guarded by _gathering.
        self._gathered: dict[str, list[Gradients]] = {}
        self._prefetches: SimpleQueue[tuple[str, Ids, Future[Pulled]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __deepcopy__(self, memo: object) -> Tables:
        """Return these: a copy of a model looks up the same run's rows."""
        return self

    def __reduce__(self) -> Any:
        """Pickle as None: in another process a model has to join the run."""
        return type(None), ()

    def prefetch(self, name: str, ids: Ids) -> Future[Pulled]:
        """Pull rows of a table on a thread, together with what else is to be prefetched then."""
        # A forked child has none.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._prefetch, name="pyps rows", daemon=True)
            self._thread.start()
        future: Future[Pulled] = Future()
        self._prefetches.put((name, ids, future))
        return future

    def close(self) -> None:
        """End the thread once it has pulled what was to be prefetched."""
        self._prefetches.put(None)

    def _prefetch(self) -> None:
        while (first := self._prefetches.get()) is not None:
            waiting = [first]
            with suppress(Empty):
                while (more := self._prefetches.get_nowait()) is not None:
                    waiting.append(more)
                self._prefetches.put(None)
            while waiting:
                # Of one table twice, the second time later.
                batch = {name: (ids, future) for name, ids, future in reversed(waiting)}
                waiting = [each for each in waiting if each[2] is not batch[each[0]][1]]
                try:
                    found = self.pull({name: ids for name, (ids, _) in batch.items()})
                except BaseException as error:
                    for _, future in batch.values():
                        future.set_exception(error)
                else:
                    for name, (_, future) in batch.items():
                        future.set_result(found[name])

    def pull(self, wanted: Mapping[str, Ids]) -> dict[str, Pulled]:
        """Return the rows of the ids of each table, in their order, and by shard the version of them.

        Waits for the rounds that have this worker's gradients, as a pull of parameters does.
        """
        found: dict[str, Pulled]
        found = {name: (np.empty((ids.size, self.dims[name]), np.float32), {}) for name, ids in wanted.items()}
        dim = max((self.dims[name] for name in wanted), default=1)
        num_pulled = max(1, min(PULLED_ROWS, PULLED_NUMBERS // dim) // max(1, len(wanted)))
        for begin in range(0, max((ids.size for ids in wanted.values()), default=0), num_pulled):
            piece = slice(begin, begin + num_pulled)
            self._pull({name: (ids[piece], found[name][0][piece], found[name][1]) for name, ids in wanted.items()})
        return found

    def _pull(self, wanted: Mapping[str, tuple[Ids, Rows, dict[int, int]]]) -> None:
        places: dict[int, dict[int, _Place]] = {index: {} for index in self.held}
        for name, (ids, rows, versions) in wanted.items():
            for shard, index in self._split(name, ids):
                place = _Place(ids if index is None else ids[index], index, rows, versions)
                if place.ids.size:
                    places[self._server_of[shard.shard_id]][shard.shard_id] = place
        codec, poll = self._pull_codec, LongPoll(self._wait_seconds)
        self._on_servers(
            lambda index, connection: _Pull(connection, self._sender, self.held[index], places[index], codec, poll)
        )

    def newest(self, name: str, ids: Ids) -> npt.NDArray[np.int64]:
        """Return for each id the newest version of its shard that this worker has heard of."""
        versions = [self._newest(shard_id) for shard_id in self.shard_ids(name)]
        return np.array(versions, np.int64)[self.buckets(name, ids)]

    def are_outdated(self, versions: Mapping[int, int]) -> bool:
        """Whether servers would refuse gradients at these versions."""
        return self.current_only() and any(at < self._newest(shard_id) for shard_id, at in versions.items())

    def _newest(self, shard_id: int) -> int:
        held = self.held[self._server_of[shard_id]]
        return max(held.versions[shard_id], held.wanted.get(shard_id, 0))

    def buckets(self, name: str, ids: Ids) -> npt.NDArray[np.intp]:
        """Return for each id which of its table's shards has it."""
        return bucket_of(ids, len(self._shards[name])).astype(np.intp)

    def shard_ids(self, name: str) -> list[int]:
        return [shard.shard_id for shard in self._shards[name]]

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs of the versions; those of different ones cannot be compared."""
        return tuple(held.epoch for held in self.held.values())

    @property
    def gathers(self) -> bool:
        """Whether gradients wait for the next push."""
        return bool(self._gathered)

    def gather(self, name: str, gradients: Gradients) -> None:
        """Add gradients of a table to those of the next push. One thread may gather while another pushes."""
        with self._gathering:
            self._gathered.setdefault(name, []).append(gradients)

    def push(self, *, clock: int, example_count: int = 0) -> list[Receipt]:
        """Push what has gathered; every shard of every table gets a message, since a round waits for each worker."""
        with self._gathering:
            gathered, self._gathered = self._gathered, {}
        gradients = {name: merged(parts) for name, parts in gathered.items()}
        sequence = self._next_sequence()
        messages: dict[int, list[tuple[PushRequest, memoryview]]] = {index: [] for index in self.held}
        for name in self._shards:
            given = gradients.get(name)
            ids = np.empty(0, np.int64) if given is None else given.ids
            for shard, index in self._split(name, ids):
                server = self._server_of[shard.shard_id]
                held = self.held[server]
                message = PushRequest(
                    sender=self._sender,
                    sequence=sequence,
                    shard_id=shard.shard_id,
                    epoch=held.epoch,
                    clock=clock,
                    example_count=example_count,
                    kind=PAYLOAD_KIND_NOTHING,
                    num_shards=len(held.shards),
                    base_version=max(0, held.versions[shard.shard_id]),
                )
                payload = memoryview(b"")
                num_rows = ids.size if index is None else index.size
                if given is not None and num_rows:
                    message.kind, message.num_rows = PAYLOAD_KIND_GRADIENT, num_rows
                    encoder = self._encoders[name]
                    message.codec = encoder.codec  # type: ignore[assignment]
                    # Rows may be of the server's life before, whose versions went further.
                    message.base_version = min(given.versions[shard.shard_id], message.base_version)
                    payload = encoder.encode(*((given.ids, given.rows) if index is None else given.of(index)))
                    if payload.nbytes > self._message_bytes_max - HEADER_BYTES:
                        raise LimitExceeded(
                            f"The gradients of {num_rows} rows of table {name!r} to server {server} have "
                            f"{payload.nbytes} bytes; it takes messages of {self._message_bytes_max}: raise its "
                            "--max-message-bytes, make the minibatch smaller, or push in another gradient_codec."
                        )
                messages[server].append((message, payload))
        answers = self._on_servers(
            lambda index, connection: _Push(
                connection, self.held[index], sequence, messages[index], self._kept.get(index)
            )
        )
        return [receipt for of_server in answers for receipt in of_server]

    def _split(self, name: str, ids: Ids) -> Iterator[tuple[ShardRange, npt.NDArray[np.intp] | None]]:
        """Yield each shard of a table with the places of its ids; None for all of them."""
        shards = self._shards[name]
        if len(shards) == 1:
            yield shards[0], None
            return
        buckets = bucket_of(ids, len(shards))
        for bucket, shard in enumerate(shards):
            yield shard, np.flatnonzero(buckets == bucket)

    def _on_servers(self, operation: Callable[[int, Connection], Callable[[GrpcChannel, Event], Any]]) -> list[Any]:
        """Run an operation on all servers that have a part of a table, by their numbers and connections."""
        return self._servers.on_all(
            [
                operation(each.index, each) if each.index in self.held else lambda channel, stop: []
                for each in self._servers.connections
            ]
        )


@dataclass(eq=False)
class _Place:
    """Where the rows of one shard go."""

    ids: Ids
    index: npt.NDArray[np.intp] | None
    rows: Rows
    versions: dict[int, int]

    def write(self, shard_id: int, version: int, numbers: Rows) -> None:
        rows = numbers.reshape(self.ids.size, -1)
        self.rows[... if self.index is None else self.index] = rows
        self.versions[shard_id] = min(version, self.versions.get(shard_id, version))


@dataclass(eq=False)
class _Pull:
    """Pulls rows from one server; after a loss all of them, since those that came may be of its life before."""

    connection: Connection
    sender: Sender
    held: Held
    places: dict[int, _Place]
    codec: Codec
    poll: LongPoll

    def __call__(self, channel: GrpcChannel, stop: Event) -> None:
        waiting = dict(self.places)
        while waiting:
            awaited = self.held.wanted
            epoch = self.held.newest_epoch
            waits = any(shard_id in awaited for shard_id in waiting)
            request = PullRequest(
                sender=self.sender,
                role=ROLE_WORKER,
                epoch=epoch,
                codec=self.codec,  # type: ignore[arg-type]
                wait_milliseconds=round(self.poll.call_seconds * 1000) if waits else 0,
            )
            num_bytes = 0
            for shard_id, place in waiting.items():
                request.wants.add(
                    shard_id=shard_id, held_version=-1, min_version=awaited.get(shard_id, 0), ids=place.ids.tobytes()
                )
                num_bytes += 8 * place.ids.size + self.codec.max_bytes(place.ids.size * place.rows.shape[1])

            def take(reply: Parameters, payload: Payload, waiting: dict[int, _Place] = waiting) -> bool:
                place = waiting.get(reply.shard_id)
                if place is None or payload is None:
                    raise LinkLost(f"rows of shard {reply.shard_id} came, which were not asked for")
                self._take(reply, payload, place)
                del waiting[reply.shard_id]
                return False

            parts = Parts([(request, b"")], request.wait_milliseconds / 1000 + call_seconds(num_bytes), waits=waits)
            try:
                self.connection.round(channel, "Pull", parts, take)
            except WaitTimedOut as unanswered:
                self.poll.go_on(unanswered, stop=stop)

    def _take(self, reply: Parameters, payload: memoryview | Incoming, place: _Place) -> None:
        count = place.ids.size * place.rows.shape[1]
        if payload.nbytes != self.codec.max_bytes(count):
            raise WrongSize(f"{payload.nbytes} bytes of rows of shard {reply.shard_id}; expected {count} numbers.")
        if isinstance(payload, Incoming):
            stays = place.index is None and self.codec.dtype == np.float32
            buffer = (place.rows if stays else np.empty(payload.nbytes, np.uint8)).data.cast("B")
            payload.receive(buffer)
            payload = buffer
        if reply.epoch != self.held.epoch:
            self.held.enter_epoch(reply.epoch)
            self.connection.epoch = max(self.connection.epoch, reply.epoch)
        place.write(reply.shard_id, reply.version, self.codec.decode(payload, count))
        self.held.versions[reply.shard_id] = max(reply.version, self.held.versions[reply.shard_id])


@dataclass(eq=False)
class _Push:
    """Pushes rows to one server; after a loss it sends again what has no receipt."""

    connection: Connection
    held: Held
    sequence: int
    messages: Sequence[tuple[PushRequest, memoryview]]
    kept: KeptPushes | None
    receipts: dict[int, Receipt] = field(default_factory=dict)

    def __call__(self, channel: GrpcChannel, stop: Event) -> list[Receipt]:
        kept, waiting = self.kept, {m.shard_id: (m, p) for m, p in self.messages if m.shard_id not in self.receipts}
        if not waiting:
            return [*self.receipts.values()]
        epoch = waiting[next(iter(waiting))][0].epoch
        if kept is not None and kept.epoch != epoch:
            kept.await_rounds(channel, stop, waiting, epoch=kept.epoch)
            for shard_id, (message, _) in waiting.items():
                message.epoch, message.resent_staleness = kept.epoch, kept.staleness(shard_id)
            epoch = kept.epoch

        def take(receipt: Receipt, _: Payload) -> bool:
            if receipt.sequence == self.sequence and receipt.shard_id in waiting:
                message, payload = waiting[receipt.shard_id]
                if kept is not None:
                    keeps = kept.keeps and receipt.outcome != OUTCOME_REJECTED and message.num_rows > 0
                    kept.note(receipt, epoch=epoch, message=message if keeps else None, payload=payload)
                    receipt.epoch = epoch
                del waiting[receipt.shard_id]
                self.receipts[receipt.shard_id] = receipt
                self._note(receipt)
            return not waiting

        num_bytes = sum(payload.nbytes for _, payload in waiting.values())
        before = len(self.receipts)
        try:
            self.connection.round(channel, "Push", Parts(list(waiting.values()), call_seconds(num_bytes)), take)
        except LinkLost as lost:
            lost.answered = len(self.receipts) - before
            raise
        if waiting:
            raise LinkLost(f"{len(waiting)} shards were left without a receipt")
        return [*self.receipts.values()]

    def _note(self, receipt: Receipt) -> None:
        version = receipt.min_version
        if receipt.reason in OUTDATED:
            version = max(version, receipt.version_before)
            logger.warning("a push to a table was not taken: %s", receipt.message)
        self.held.want(receipt.shard_id, version, epoch=receipt.epoch)
        self.held.versions[receipt.shard_id] = max(receipt.version_after, self.held.versions[receipt.shard_id])


class RowCache:
    """Rows of a table that the worker keeps, each as long as it is not too many versions old.

    An id has one place, so two ids may put each other out.
    """

    def __init__(self, tables: Tables, name: str, *, rows_max: int, versions_max: int) -> None:
        self._tables, self._name, self._versions_max = tables, name, versions_max
        self._ids = np.zeros(rows_max, np.int64)
        self._rows = np.empty((rows_max, tables.dims[name]), np.float32)
        # Of an empty place less than any.
        self._versions = np.full(rows_max, -(2**62), np.int64)
        self._epochs: tuple[int, ...] = ()

    def look(self, ids: Ids) -> tuple[npt.NDArray[np.bool_], Rows, dict[int, int]]:
        """Return which rows are here, a row for each id with those filled in, and by shard their oldest version."""
        if self._tables.epochs != self._epochs:
            self._versions[:], self._epochs = -(2**62), self._tables.epochs
        places, oldest = self._places(ids), dict[int, int]()
        versions = self._versions[places]
        least = self._tables.newest(self._name, ids) - (0 if self._tables.current_only() else self._versions_max)
        found = (self._ids[places] == ids) & (versions >= least)
        rows = np.empty((ids.size, self._rows.shape[1]), np.float32)
        rows[found] = self._rows[places[found]]
        buckets = self._tables.buckets(self._name, ids)[found]
        for bucket in np.unique(buckets).tolist():
            oldest[self._tables.shard_ids(self._name)[bucket]] = int(versions[found][buckets == bucket].min())
        return found, rows, oldest

    def put(self, ids: Ids, rows: Rows, versions: Mapping[int, int]) -> None:
        """Keep rows as of the versions of their shards."""
        places = self._places(ids)
        of_shards = np.array([versions.get(shard_id, -1) for shard_id in self._tables.shard_ids(self._name)], np.int64)
        self._ids[places], self._rows[places] = ids, rows
        self._versions[places] = of_shards[self._tables.buckets(self._name, ids)]

    def _places(self, ids: Ids) -> npt.NDArray[np.intp]:
        return bucket_of(ids, self._ids.size, SALT).astype(np.intp)


class _RowEncoder:
    """Encodes rows. What an encoding of few bits lacks is added to the same row's next gradient, as for vectors.

    So much is kept of the rows pushed last: an id has one place, so two ids may put each other out.
    """

    def __init__(self, codec: Codec, dim: int) -> None:
        # Of other encodings rows would share blocks.
        by_row = not codec.sparse and codec.max_bytes(2 * dim) == 2 * codec.max_bytes(dim)
        self.codec: Codec = codec if by_row else FLOAT32
        num_kept = KEPT_ROWS if self.codec.stateful else 0
        self._ids, self._lost = np.zeros(num_kept, np.int64), np.zeros((num_kept, dim), np.float32)

    def encode(self, ids: Ids, rows: Rows) -> memoryview:
        """Return the payload: the ids, then the rows."""
        rows = np.ascontiguousarray(rows, np.float32)
        if not self.codec.stateful:
            return memoryview(b"".join((ids.data, self.codec.encode(rows.reshape(-1)))))
        places, lost = bucket_of(ids, KEPT_ROWS, SALT), np.empty_like(rows)
        residual = np.where((self._ids[places] == ids)[:, None], self._lost[places], np.float32(0))
        payload = self.codec.encode_feedback(rows.reshape(-1), residual.reshape(-1), lost.reshape(-1))
        self._ids[places], self._lost[places] = ids, lost
        return memoryview(b"".join((ids.data, payload)))


def merged(parts: Sequence[Gradients]) -> Gradients:
    """Return the sum of gradients of a table, and by shard the oldest of their versions."""
    if len(parts) == 1:
        return parts[0]
    ids = np.unique(np.concatenate([part.ids for part in parts]))
    rows, versions = np.zeros((ids.size, parts[0].rows.shape[1]), np.float32), dict[int, int]()
    for part in parts:
        rows[np.searchsorted(ids, part.ids)] += part.rows
        for shard_id, version in part.versions.items():
            versions[shard_id] = min(version, versions.get(shard_id, version))
    return Gradients(ids, rows, versions)
