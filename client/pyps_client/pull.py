"""Pulls: the held versions, the receivers of newer parameters, and waits for other workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client.leave import keep_large_blocks
from pyps_client.log import logger
from pyps_client.retry import LinkLost
from pyps_client.run_state import OUTDATED
from pyps_client.transport import Incoming, Parts, Payload
from pyps_client.transport.connection import CALL_SECONDS, Connection, Servers, call_seconds
from pyps_client.transport.grpc import GrpcChannel
from pyps_client.vectors import NUMPY, Converter, Vectors, check_vectors, dtype_of, part_of
from pyps_wire.codecs import FLOAT32, Codec, codec_numbered
from pyps_wire.common_pb2 import CODEC_UNSPECIFIED, Receipt, Role, Sender
from pyps_wire.errors import PypsError, RunFinished, WaitTimedOut, WrongSize
from pyps_wire.local_pb2 import LocalPull, LocalRequest
from pyps_wire.parameter_server_pb2 import ExchangeReply, Parameters, ProceedReply, ProceedRequest, PullRequest
from pyps_wire.partition import Partition, ShardRange
from pyps_wire.work_pb2 import LeaseReply, LeaseRequest

# The longest wait of one call. Then the log names the workers that others wait for, and the next call follows.
PARK_SECONDS = 30.0

# Leases a portion from server 0.
LeaseCall = Callable[[GrpcChannel, LeaseRequest, threading.Event], LeaseReply]

# The allocator keeps the blocks of larger messages.
LARGE_BYTES = 1 << 20


class Versions(dict[int, int]):
    """Shard id -> held version, with each server's epoch, at one moment. Do not change it.

    A version means nothing without its epoch: after a restore a server counts again from an older one.
    """

    epochs: tuple[int, ...] = ()

    def copy(self) -> Versions:
        copied = Versions(self)
        copied.epochs = self.epochs
        return copied


class Held:
    """The held versions of one server's shards, and the versions to wait for, each of one epoch.

    One thread may note versions to wait for while another pulls.
    """

    def __init__(self, shards: Sequence[ShardRange]) -> None:
        self.epoch = 0
        self.versions = {shard.shard_id: -1 for shard in shards}
        self.shards = {shard.shard_id: shard for shard in shards}
        self._lock = threading.Lock()
        # Guarded by _lock: the versions to wait for, and their epoch. It is a later one than the held versions' after
        # pushes to a server that came back.
        self._wanted: dict[int, int] = {}
        self.newest_epoch = 0

    def enter_epoch(self, epoch: int) -> None:
        """Forget versions of another epoch: after a restore the server counts again from its checkpoint."""
        with self._lock:
            if epoch != self.epoch:
                self.epoch = epoch
                self.versions = dict.fromkeys(self.versions, -1)
                self._want_in(epoch)

    def want(self, shard_id: int, version: int, *, epoch: int) -> None:
        with self._lock:
            if version > 0 and epoch >= self.newest_epoch:
                self._want_in(epoch)
                self._wanted[shard_id] = max(version, self._wanted.get(shard_id, 0))

    def _want_in(self, epoch: int) -> None:
        if epoch != self.newest_epoch:
            self.newest_epoch, self._wanted = epoch, {}

    @property
    def wanted(self) -> dict[int, int]:
        """Shard id -> version to wait for, unless it is held already."""
        with self._lock:
            wanted, is_later = self._wanted.items(), self.newest_epoch != self.epoch
            return {shard_id: version for shard_id, version in wanted if is_later or self.versions[shard_id] < version}

    def answered(self, waited_for: Mapping[int, int]) -> None:
        """Forget versions for which a pull has waited: they have come, or the run is over."""
        with self._lock:
            for shard_id, version in waited_for.items():
                if self._wanted.get(shard_id, version + 1) <= version:
                    del self._wanted[shard_id]


class Holdings:
    """Held and wanted versions of all servers. One thread may note receipts while another pulls.

    A worker waits for the rounds that have its gradient. If the push came too late for another shard, that shard's
    round waits for this worker, and two workers could wait for each other for ever. So then the next pull waits for
    nothing, and the next push leaves out the shards whose rounds have this worker's gradient.
    """

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.of_server = [Held(partition.of_server(index)) for index in range(partition.num_servers)]
        self._server_of = {shard.shard_id: partition.server_of(shard.shard_id) for shard in partition.shards}
        # The shards for which the newest push was too late.
        self.late: frozenset[int] = frozenset()

    @property
    def versions(self) -> Versions:
        """A copy of the held versions, with the servers' epochs."""
        versions, epochs = Versions(), []
        for held in self.of_server:
            with held._lock:
                versions.update(held.versions.items())
                epochs.append(held.epoch)
        versions.epochs = tuple(epochs)
        return versions

    @property
    def largest_version(self) -> int:
        return max((max(held.versions.values(), default=0) for held in self.of_server), default=0)

    def note(self, receipts: Sequence[Receipt]) -> None:
        """Note the versions that the receipts of one push ask to wait for."""
        late: list[int] = []
        for receipt in receipts:
            version = receipt.min_version
            if receipt.reason in OUTDATED:
                late.append(receipt.shard_id)
                # The next gradient needs the present parameters.
                version = max(version, receipt.version_before)
            if version > 0:
                held = self.of_server[self._server_of[receipt.shard_id]]
                held.want(receipt.shard_id, version, epoch=receipt.epoch)
        self.late = frozenset(late)

    def are_behind(self, connections: Iterable[Connection]) -> bool:
        """Return whether held versions are of another epoch than the server's."""
        held = [(self.of_server[connection.index], connection.epoch) for connection in connections]
        # Only pulled shards bring an epoch.
        return any(each.versions and each.epoch != epoch for each, epoch in held)

    def pull_needed(self, connections: Iterable[Connection]) -> bool:
        """Return whether a held version is of another epoch or too old, so that its gradient would be refused."""
        for connection in connections:
            held = self.of_server[connection.index]
            # Only pulled shards bring an epoch.
            if held.versions and (connection.epoch != held.epoch or (held._wanted and held.wanted)):
                return True
        return False

    def awaited(self, server_index: int) -> Mapping[int, int]:
        """Return shard id -> version that a pull from that server waits for."""
        return {} if self.late else self.of_server[server_index].wanted

    def settled(self, server_index: int) -> Set[int]:
        """Return the server's shards whose rounds have this worker's gradient, after a push too late for others."""
        return self.of_server[server_index].wanted.keys() - self.late if self.late else frozenset()


class Receiver:
    """Writes one server's parameters into a caller's vectors, one a group."""

    def __init__(
        self, vectors: Sequence[npt.NDArray[Any]], held: Held, *, codec: Codec, name: str, converter: Converter = NUMPY
    ) -> None:
        """`codec`: the payloads' codec; the vectors are of its type, or float32. `name`: the server's name.

        Under a published codec differences are added to the vectors: nothing else may write to them.
        """
        self.held = held
        self.codec = codec
        # Called for each shard that a message has written, on any thread.
        self.on_landed: Callable[[ShardRange], object] | None = None
        self._name = name
        self._converter = converter
        self._places = {shard.shard_id: part_of(vectors, shard) for shard in held.shards.values()}

    @property
    def bytes_max(self) -> Callable[[int], int]:
        """Return the most bytes in which so many parameters arrive."""
        return (FLOAT32 if self.codec.published else self.codec).max_bytes

    def write(self, shard_id: int, reply: Parameters | ExchangeReply, payload: memoryview | Incoming) -> bool:
        """Copy, convert or receive a shard's parameters into their place.

        Return False for differences to other parameters than the held ones, which change nothing.
        """
        number: int = reply.codec
        codec = self.codec if number == self.codec else codec_numbered(number)
        place = self._places.get(shard_id)
        if place is None:
            raise PypsError(f"{self._name} sent shard {shard_id}, which it does not hold.")
        if codec.published:
            return self._add(shard_id, codec, reply, payload)
        num_bytes = payload.nbytes
        if num_bytes != codec.max_bytes(place.size) and not codec.fits(num_bytes, place.size):
            raise WrongSize(
                f"{self._name} sent {num_bytes} bytes of parameters of shard {shard_id}; expected "
                f"{codec.max_bytes(place.size)}."
            )
        is_same = place.dtype == codec.dtype
        if not is_same and place.dtype != np.float32:
            raise PypsError(f"{self._name} sent parameters as {codec.name}, not as requested: {place.dtype}.")
        if isinstance(payload, Incoming):
            buffer = (place.view(np.uint8) if is_same else np.empty(num_bytes, np.uint8)).data
            try:
                payload.receive(buffer)
            except BaseException:
                # The shard may be half written: it has no version until it is pulled again.
                self.held.versions[shard_id] = -1
                raise
            payload = buffer
        elif is_same:
            np.copyto(place, np.frombuffer(payload, codec.dtype))
        if not is_same:
            self._converter.decode(payload, codec, place)
        if self.on_landed is not None:
            self.on_landed(self.held.shards[shard_id])
        return True

    def _add(
        self, shard_id: int, codec: Codec, reply: Parameters | ExchangeReply, payload: memoryview | Incoming
    ) -> bool:
        """Add differences to a shard. An error leaves it without a version, or as it was."""
        place, versions, differences = self._places[shard_id], self.held.versions, reply.differences
        sizes, num_bytes = differences.sizes, payload.nbytes
        if sum(sizes) != num_bytes or not all(codec.fits(size, place.size) for size in sizes):
            raise WrongSize(
                f"{self._name} sent {num_bytes} bytes of differences of shard {shard_id}, of {list(sizes)} bytes; "
                f"expected {codec.max_bytes(place.size)} for each."
            )
        if isinstance(payload, Incoming):
            buffer = np.empty(num_bytes, np.uint8).data
            payload.receive(buffer)
            payload = buffer
        if versions[shard_id] != differences.since_version:
            # The answer to an earlier request. The next one says what is held now.
            return False
        try:
            end = 0
            for size in sizes:
                codec.add_into(payload[end : end + size], place)
                end += size
            versions[shard_id] = reply.version
        except BaseException:
            versions[shard_id] = -1
            raise
        if self.on_landed is not None:
            self.on_landed(self.held.shards[shard_id])
        return True


class LongPoll:
    """One wait for other workers, up to its deadline: repeated calls, which servers hold meanwhile."""

    def __init__(self, wait_seconds: float) -> None:
        self.wait_seconds = wait_seconds
        self._began = time.monotonic()
        self._logged_at = self._began

    @property
    def call_seconds(self) -> float:
        """How long the server may hold the next call; 0 past the deadline, for a last look at what has come."""
        return min(max(self._began + self.wait_seconds - time.monotonic(), 0.0), PARK_SECONDS)

    def go_on(self, unanswered: WaitTimedOut, *, stop: threading.Event) -> None:
        """Note a call that timed out. Raises WaitTimedOut past the deadline, RunFinished if `stop` is set."""
        now = time.monotonic()
        waited = now - self._began
        if stop.is_set():
            # After a failed call to another server, that call's error is raised instead.
            raise RunFinished("The client was closed while it waited for other workers.")
        if waited >= self.wait_seconds:
            raise WaitTimedOut(
                f"Waited {waited:.0f} s for other workers: {unanswered}. "
                "Raise wait_seconds (PYPS_WAIT_SECONDS) to wait longer."
            )
        # Several servers may report the same workers.
        if now - self._logged_at >= PARK_SECONDS / 2:
            self._logged_at = now
            logger.info(
                "waiting for other workers, %.0f s so far, at most %.0f s more: %s",
                *(waited, self.wait_seconds - waited, unanswered),
            )

    def proceed(self, sender: Sender, *, clock: int) -> Callable[[GrpcChannel, threading.Event], ProceedReply]:
        """Return the call to server 0 that waits until the next step may begin; it may be repeated after a loss."""

        def ask(channel: GrpcChannel, stop: threading.Event) -> ProceedReply:
            held = 0
            while True:
                seconds = self.call_seconds
                request = ProceedRequest(sender=sender, clock=clock, wait_milliseconds=round(seconds * 1000))
                try:
                    return channel.call("Proceed", request, ProceedReply, timeout_seconds=seconds + CALL_SECONDS)
                except WaitTimedOut as unanswered:
                    self.go_on(unanswered, stop=stop)
                    held += 1
                except LinkLost as lost:
                    lost.answered = held
                    raise

        return ask


@dataclass(eq=False)
class IncomingPull:
    """Pulls newer parameters from one server; after a loss only those that did not come yet."""

    sender: Sender
    role: Role
    receiver: Receiver
    connection: Connection
    # Returns for a server's index shard id -> version to wait for, up to the deadline of `poll`.
    awaited: Callable[[int], Mapping[int, int]]
    poll: LongPoll
    # Whether the vectors are lent.
    lent: bool = False
    # Lease a portion at the same moment; `lease` is the answer. Without a portion no parameters come.
    portion: LeaseRequest | None = None
    lease: LeaseReply = field(init=False, default_factory=LeaseReply)

    def __post_init__(self) -> None:
        self._held = self.receiver.held
        self._waiting = set(self._held.shards)
        self._changed: set[int] = set()
        self._min_versions: Mapping[int, int] = {}
        # The epoch of these, and of the versions in the request.
        self._epoch = 0

    def __call__(self, channel: GrpcChannel, stop: threading.Event) -> set[int]:
        answered = 0
        self._min_versions = self.awaited(self.connection.index)
        # Another round follows after a change of epoch, and after a call that timed out.
        while self._waiting:
            missing = sorted(self._waiting)
            request = self._request(missing)
            num_bytes = self.receiver.bytes_max(sum(self._held.shards[i].length for i in missing))
            if num_bytes > LARGE_BYTES:
                keep_large_blocks()
            waited_milliseconds = request.wait_milliseconds + request.portion.wait_milliseconds
            shares = self.lent and self.connection.is_local and not request.HasField("portion")
            parts = Parts(
                [(request, b"")],
                waited_milliseconds / 1000 + call_seconds(num_bytes),
                are_small=True,
                request=LocalRequest(pull=LocalPull(request=request)) if shares else None,
                waits=request.wait_milliseconds > 0,
            )
            before = len(self._changed)
            try:
                self.connection.round(channel, "Pull", parts, self._take)
            except WaitTimedOut as unanswered:
                self.poll.go_on(unanswered, stop=stop)
                answered += 1
                continue
            except LinkLost as lost:
                lost.answered = answered + len(self._changed) - before
                raise
            self._waiting.difference_update(missing)
        self._held.answered(self._min_versions)
        return self._changed

    def _take(self, reply: Parameters, payload: Payload) -> bool:
        if reply.HasField("lease"):
            self.lease, self.portion = reply.lease, None
        brings = reply.codec != CODEC_UNSPECIFIED
        if brings and (resend := self.connection.resend) is not None and resend.epoch < reply.epoch:
            # Its parameters lack this worker's last pushes.
            raise LinkLost("the server came back")
        if brings and (payload is None or self.receiver.write(reply.shard_id, reply, payload)):
            self._accept(reply)
        # The server says which reply is the last.
        return False

    def _request(self, missing: Sequence[int]) -> PullRequest:
        held, self._epoch = self._held.versions, self._held.newest_epoch
        if self._epoch != self._held.epoch:
            held = dict.fromkeys(held, -1)
        waits = any(self._min_versions.get(shard_id, 0) > held[shard_id] for shard_id in missing)
        request = PullRequest(
            sender=self.sender,
            role=self.role,
            epoch=self._epoch,
            codec=self.receiver.codec,  # type: ignore[arg-type]
            wait_milliseconds=round(self.poll.call_seconds * 1000) if waits else 0,
            portion=self.portion,
        )
        for shard_id in missing:
            request.wants.add(
                shard_id=shard_id,
                held_version=held[shard_id],
                min_version=self._min_versions.get(shard_id, 0),
            )
        return request

    def _accept(self, reply: Parameters) -> None:
        if reply.epoch != self._held.epoch:
            self._held.enter_epoch(reply.epoch)
            # A heartbeat may have reported a later restore meanwhile.
            self.connection.epoch = max(self.connection.epoch, reply.epoch)
            self._waiting = set(self._held.shards)
            if reply.epoch != self._epoch:
                # Versions of the former epoch mean nothing now.
                self._min_versions = {}
        if reply.shard_id not in self._held.versions:
            raise PypsError(f"{self.connection.name} sent shard {reply.shard_id}, which it does not hold.")
        self._held.versions[reply.shard_id] = reply.version
        self._waiting.discard(reply.shard_id)
        self._changed.add(reply.shard_id)


def receivers(
    servers: Servers, vectors: Vectors, holdings: Holdings, *, codec: Codec, converter: Converter = NUMPY
) -> list[Receiver]:
    """Return a receiver for each server's part of the vectors, which are float32 or of the codec's type."""
    dtype = dtype_of(codec, converted=bool(vectors) and vectors[0].dtype == np.float32)
    check_vectors(vectors, holdings.partition.model, dtype, what="pulled parameters", writable=True)
    return [
        Receiver(vectors, holdings.of_server[each.index], codec=codec, name=each.name, converter=converter)
        for each in servers.connections
    ]


def read(
    servers: Servers,
    sender: Sender,
    role: Role,
    receivers: Sequence[Receiver],
    *,
    poll: LongPoll,
    awaited: Callable[[int], Mapping[int, int]] = lambda server_index: {},
    lent: bool = False,
) -> set[int]:
    """Pull newer parameters, and return the changed shards' ids.

    `awaited`: as for `IncomingPull`.
    """
    pulls = [
        IncomingPull(sender, role, receiver, connection, awaited, poll, lent=lent)
        for connection, receiver in zip(servers.connections, receivers, strict=True)
    ]
    return set().union(*servers.on_all(pulls))
