"""Small workers for tests of the server, on the generated stubs and on the local socket."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from pyps.core.arrays import Floats
from pyps_wire import common_pb2 as common
from pyps_wire import local_pb2 as local
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.contract import METHODS, PARAMETER_SERVER, PROTOCOL_VERSION, stub_of
from pyps_wire.errors import METADATA_KEY, from_status
from pyps_wire.partition import Model, Partition, Tensor, partition
from support import DEADLINE_SECONDS, AnyServer

T = TypeVar("T")

HARDSYNC = ("--protocol", "hardsync", "--staleness", "none")
SMALL = Model((Tensor("layer.weight", (10, 3)), Tensor("layer.bias", (7,))))
_INCARNATIONS = itertools.count(time.time_ns())

CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Every channel its own connection, as in separate processes.
    ("grpc.use_local_subchannel_pool", 1),
]


def secret_of(worker_id: str) -> bytes:
    """Return a worker's secret: the same in each of its lives, and for all processes of a replica."""
    return hashlib.sha256(worker_id.partition("/")[0].encode()).hexdigest()[:32].encode()


def sgd(learning_rate: float = 1.0, *, groups: int = 1) -> common.OptimizerSettings:
    """Plain SGD: with learning rate 1 an update is a subtraction."""
    group = common.GroupSettings(hyperparameters={"learning_rate": learning_rate})
    return common.OptimizerSettings(rule="sgd", groups=[group] * groups)


def fill(message: Any, fields: Mapping[str, Any]) -> None:
    """Set a message's fields, of whatever kind."""
    for name, value in fields.items():
        if isinstance(value, int | str | bytes):
            setattr(message, name, value)
        elif isinstance(value, list | tuple):
            message.ClearField(name)
            getattr(message, name).extend(value)
        else:
            getattr(message, name).CopyFrom(value)


class WireWorker:
    def __init__(
        self,
        address: str,
        worker_id: str = "a",
        *,
        run_id: str = "run-1",
        model: Model = SMALL,
        optimizer: common.OptimizerSettings | None = None,
        token: str | None = None,
        server_index: int = 0,
        num_servers: int = 1,
        parts: Sequence[int] = (),
        replica: str = "",
    ):
        """`parts` are the parts of the model that it holds, by default all; `replica` is its replica."""
        self.channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.stub = stub_of(PARAMETER_SERVER, self.channel)
        self.model = model
        self.plan: Partition = partition(model, num_servers=num_servers)
        self.optimizer = optimizer if optimizer is not None else sgd(groups=model.num_groups)
        self.sender = common.Sender(
            run_id=run_id, worker_id=worker_id, incarnation=next(_INCARNATIONS), secret=secret_of(worker_id)
        )
        self.metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
        self.server_index, self.num_servers = server_index, num_servers
        self.parts, self.replica = list(parts), replica
        self.own = self.plan.of_parts(parts) if parts else self.plan
        self.epoch = 0
        self._sequences = itertools.count(1)

    def __enter__(self) -> WireWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def hello(self, **fields: object) -> wire.HelloReply:
        request = wire.HelloRequest(
            sender=self.sender,
            protocol_version=PROTOCOL_VERSION,
            software="test",
            role=common.ROLE_WORKER,
            server_index=self.server_index,
            num_servers=self.num_servers,
            model=self.model.to_proto(),
            optimizer=self.optimizer,
        )
        fill(request, {"parts": self.parts, "replica": self.replica, **fields})
        reply: wire.HelloReply = self.stub.Hello(request, timeout=DEADLINE_SECONDS, metadata=self.metadata)
        self.epoch = reply.epoch
        return reply

    def initialize_messages(self, term: int, value: float = 0.0) -> Iterator[wire.InitializeRequest]:
        yield wire.InitializeRequest(
            sender=self.sender,
            term=term,
            model=self.model.to_proto(),
            optimizer=self.optimizer,
            server_index=self.server_index,
            num_servers=self.num_servers,
            shard_lengths=self.plan.lengths,
            placement=self.plan.servers,
            replica=self.replica,
        )
        for shard in self.own.of_server(self.server_index):
            yield wire.InitializeRequest(
                sender=self.sender,
                term=term,
                shard_id=shard.shard_id,
                codec=common.CODEC_FLOAT32,
                payload=np.full(shard.length, value, np.float32).tobytes(),
            )

    def initialize(self, term: int, value: float = 0.0) -> wire.InitializeReply:
        return self.stub.Initialize(
            self.initialize_messages(term, value), timeout=DEADLINE_SECONDS, metadata=self.metadata
        )

    def join(self, value: float = 0.0) -> wire.HelloReply:
        """Say Hello, and initialise the run if elected."""
        reply = self.hello()
        if reply.initialize:
            self.initialize(reply.term, value)
        return reply

    def push_request(
        self, values: Floats | float, shard_id: int = 0, base_version: int = 0, **fields: object
    ) -> wire.PushRequest:
        """Return one shard of a push; a number fills the whole shard."""
        length = self.plan.shard(shard_id).length
        gradient = np.full(length, values, np.float32) if isinstance(values, int | float) else values
        request = wire.PushRequest(
            sender=self.sender,
            sequence=next(self._sequences),
            shard_id=shard_id,
            base_version=base_version,
            epoch=self.epoch,
            codec=common.CODEC_FLOAT32,
            kind=common.PAYLOAD_KIND_GRADIENT,
            example_count=1,
            payload=gradient.tobytes(),
        )
        for name, value in fields.items():
            setattr(request, name, value)
        return request

    def push(self, *requests: wire.PushRequest) -> list[common.Receipt]:
        return list(self.stub.Push(iter(requests), timeout=DEADLINE_SECONDS, metadata=self.metadata))

    def push_step(
        self, values: float, base_versions: Mapping[int, int] | int = 0, **fields: object
    ) -> list[common.Receipt]:
        """Push all of its shards on this server, under one sequence number."""
        sequence, shards = next(self._sequences), self.own.of_server(self.server_index)
        requests = [
            self.push_request(
                values,
                shard.shard_id,
                base_versions if isinstance(base_versions, int) else base_versions.get(shard.shard_id, 0),
                sequence=sequence,
                num_shards=len(shards),
                **fields,
            )
            for shard in shards
        ]
        return self.push(*requests)

    def train(
        self, num_steps: int, *, value: float = 1.0, clock: int = 0, wait_seconds: float = 30.0
    ) -> list[common.Receipt]:
        """Take steps as a client does: proceed where required, pull, push; return all receipts."""
        receipts: list[common.Receipt] = []
        ask, min_versions = self.hello().ask_to_proceed, dict[int, int]()
        for step in range(clock, clock + num_steps):
            if ask:
                self.proceed(step, wait_seconds=wait_seconds)
            wants = [
                wire.PullRequest.Want(
                    shard_id=shard.shard_id, held_version=-1, min_version=min_versions.get(shard.shard_id, 0)
                )
                for shard in self.plan.of_server(self.server_index)
            ]
            versions = {shard.shard_id: shard.version for shard in self.pull(wants, wait_seconds=wait_seconds)}
            answers = self.push_step(value, versions, clock=step)
            ask = answers[-1].ask_to_proceed
            min_versions = {receipt.shard_id: receipt.min_version for receipt in answers}
            receipts += answers
        return receipts

    def proceed(self, clock: int, *, wait_seconds: float = 30.0) -> wire.ProceedReply:
        return self.stub.Proceed(
            self.proceed_request(clock, wait_seconds), timeout=wait_seconds + DEADLINE_SECONDS, metadata=self.metadata
        )

    def proceed_request(self, clock: int, wait_seconds: float = 30.0) -> wire.ProceedRequest:
        return wire.ProceedRequest(sender=self.sender, clock=clock, wait_milliseconds=round(wait_seconds * 1000))

    def push_frames(self, frames: Iterable[bytes]) -> list[common.Receipt]:
        call = self.channel.stream_stream(METHODS["Push"])
        replies: Iterable[bytes] = call(iter(frames), timeout=DEADLINE_SECONDS, metadata=self.metadata)
        return [common.Receipt.FromString(reply) for reply in replies]

    def pull(
        self,
        wants: Sequence[wire.PullRequest.Want] = (),
        *,
        wait_seconds: float = 0.0,
        timeout: float = DEADLINE_SECONDS,
        **fields: int,
    ) -> list[wire.Parameters]:
        """Pull the shards that are newer than those held."""
        request = wire.PullRequest(
            sender=self.sender,
            role=common.ROLE_WORKER,
            epoch=self.epoch,
            codec=common.CODEC_FLOAT32,
            wants=wants,
            wait_milliseconds=round(wait_seconds * 1000),
            **fields,
        )
        return list(self.stub.Pull(request, timeout=timeout, metadata=self.metadata))

    def observe(self) -> list[wire.Parameters]:
        """Pull everything as an observer."""
        request = wire.PullRequest(sender=self.sender, role=common.ROLE_OBSERVER)
        return list(self.stub.Pull(request, timeout=DEADLINE_SECONDS, metadata=self.metadata))

    def heartbeat(self, **fields: int) -> wire.HeartbeatReply:
        request = wire.HeartbeatRequest(sender=self.sender, **fields)
        return self.stub.Heartbeat(request, timeout=DEADLINE_SECONDS, metadata=self.metadata)

    def leave(self, cause: int = wire.LeaveRequest.CAUSE_FINISHED) -> wire.LeaveReply:
        request = wire.LeaveRequest(sender=self.sender, cause=cause)
        return self.stub.Leave(request, timeout=DEADLINE_SECONDS, metadata=self.metadata)


def parked_pull(worker: WireWorker, min_version: int, seconds: float = 100.0) -> grpc.Call:
    """Start a pull of shard 0 that waits for a version."""
    want = wire.PullRequest.Want(shard_id=0, held_version=min_version - 1, min_version=min_version)
    request = wire.PullRequest(
        sender=worker.sender, epoch=worker.epoch, wants=[want], wait_milliseconds=round(seconds * 1000)
    )
    return worker.stub.Pull(request, timeout=seconds + 10)


# Numbers of a model that is more than the buffers between server and worker ever take.
UNREAD = 16_000_000


def unread_pull(worker: WireWorker) -> grpc.Call:
    """Begin a pull of a model of so many numbers, which nobody reads: it holds up the drain."""
    pull = worker.stub.Pull(wire.PullRequest(sender=worker.sender, role=common.ROLE_OBSERVER), timeout=100)
    next(pull)
    return pull


def values_of(parameters: wire.Parameters) -> Floats:
    """Return the numbers of a pulled shard."""
    return np.frombuffer(parameters.payload, np.float32)


def refusal_of(call: Callable[..., object], *arguments: object, **keywords: object) -> tuple[str, str | None, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **keywords)
    error = caught.value
    name = dict(error.trailing_metadata() or ()).get(METADATA_KEY)
    return error.code().name, name, error.details()


# Several workers of one run at once.

# A worker that is killed is forgotten within six seconds. No shorter: those that live must be heard on a busy machine.
QUICK_LEASES = ("--heartbeat-seconds", "0.3", "--lease-seconds", "6")


@contextlib.contextmanager
def crew(server: AnyServer, num_workers: int, **fields: object) -> Iterator[list[WireWorker]]:
    """Yield workers "w0", "w1" and so on, all members of a run that serves."""
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(WireWorker(server.data, f"w{index}", **fields))  # type: ignore[arg-type]
            for index in range(num_workers)
        ]
        for worker in workers:
            worker.join()
        for worker in workers:
            assert worker.hello().state == common.RUN_STATE_READY
        yield workers


@contextlib.contextmanager
def beating(workers: Iterable[WireWorker], seconds: float = 0.2) -> Iterator[None]:
    """Send heartbeats for the workers meanwhile, as their clients would."""
    workers, ends = list(workers), threading.Event()

    def beat() -> None:
        while not ends.wait(seconds):
            for worker in workers:
                worker.heartbeat()

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        yield
    finally:
        ends.set()
        heart.join(DEADLINE_SECONDS)


def at_once(calls: Iterable[Callable[[], T]], deadline_seconds: float = DEADLINE_SECONDS) -> list[T]:
    calls = list(calls)
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(deadline_seconds) for future in futures]


# Workers that share their memory with one server.

LENGTH = struct.Struct("<I")
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def make_segment(num_bytes: int, *, seals: int = SEALS) -> int:
    """Return the descriptor of a memfd, allocated in full."""
    descriptor = os.memfd_create("pyps-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    os.posix_fallocate(descriptor, 0, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class LocalSocket:
    """A connection to a server's local socket, one message at a time."""

    def __init__(self, address: str):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(DEADLINE_SECONDS)
        self.socket.connect("\0" + address[1:] if address.startswith("@") else address)

    def send(self, request: local.LocalRequest, *descriptors: int) -> None:
        message = request.SerializeToString()
        frame = LENGTH.pack(len(message)) + message
        if descriptors:
            frame = frame[socket.send_fds(self.socket, [frame], list(descriptors)) :]
        if frame:
            self.socket.sendall(frame)

    def receive(self) -> local.LocalReply:
        """Return the next reply; EOFError if the server has closed the connection."""
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return local.LocalReply.FromString(self._exactly(length))

    def ask(self, request: local.LocalRequest, *descriptors: int) -> local.LocalReply:
        """Return the reply to a request; raise a refusal as the error that it names."""
        self.send(request, *descriptors)
        reply = self.receive()
        if reply.HasField("failure"):
            raise from_status(reply.failure.status, reply.failure.details, reply.failure.name)
        return reply

    @property
    def is_closed_by_the_server(self) -> bool:
        """Wait for the server's next byte; return True if it closes the connection instead."""
        return self.socket.recv(1, socket.MSG_PEEK) == b""

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                raise EOFError("the server closed the connection")
            data += more
        return data


class Layout:
    """The places of a model's vectors in a segment: each begins a page, behind a page for the nonce."""

    def __init__(self, model: Model, gradients: int):
        self._model, self.num_bytes = model, mmap.PAGESIZE
        self.gradients = [self._vectors() for _ in range(gradients)]
        self.parameters = self._vectors()

    def _vectors(self) -> local.LocalVectors:
        offsets = []
        for size in self._model.group_sizes:
            offsets.append(self.num_bytes)
            self.num_bytes += -(-4 * size // mmap.PAGESIZE) * mmap.PAGESIZE
        return local.LocalVectors(codec=common.CODEC_FLOAT32, offsets=offsets)


class LocalWorker(WireWorker):
    """A worker that shares memory: Hello and other calls go over gRPC, rounds through the local socket."""

    def __init__(self, address: str, worker_id: str = "a", *, gradients: int = 1, **options: Any):
        """`gradients` is how many sets of gradient vectors it has."""
        super().__init__(address, worker_id, **options)
        self.layout = Layout(self.own.model, gradients)
        self.offer = wire.LocalTransport()
        self.descriptor = make_segment(self.layout.num_bytes)
        self.memory = mmap.mmap(self.descriptor, self.layout.num_bytes)
        self.nonce = secrets.randbits(64)
        self.memory[:8] = self.nonce.to_bytes(8, "little")
        self.gradients = [self._arrays(vectors) for vectors in self.layout.gradients]
        self.parameters = self._arrays(self.layout.parameters)
        self.versions: dict[int, int] = {}
        self.link: LocalSocket | None = None

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.detach()
        os.close(self.descriptor)

    def hello(self, **fields: object) -> wire.HelloReply:
        reply = super().hello(**fields)
        self.offer = reply.local
        return reply

    def attach_request(self, **fields: object) -> local.LocalRequest:
        if not (self.offer.ticket or "ticket" in fields):
            self.hello()
        attach = local.LocalAttach(
            sender=self.sender,
            ticket=self.offer.ticket,
            segment_bytes=self.layout.num_bytes,
            gradients=self.layout.gradients,
            parameters=self.layout.parameters,
        )
        fill(attach, fields)
        if attach.ticket == self.offer.ticket:
            # It is good once.
            self.offer.ticket = b""
        return local.LocalRequest(attach=attach)

    def attach(self) -> LocalSocket:
        """Connect and attach the memory; the server reads its nonce."""
        self.link = LocalSocket(self.offer.address)
        reply = self.link.ask(self.attach_request(), self.descriptor)
        assert reply.attached.nonce == self.nonce
        return self.link

    def detach(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None

    def begin(self) -> None:
        self.join()
        self.attach()
        self.pull_here()

    def exchange_request(
        self,
        shard_ids: Sequence[int] | None = None,
        *,
        pull: bool = True,
        gradients: int = 0,
        each: Mapping[str, object] | None = None,
    ) -> local.LocalRequest:
        """Return a push of these shards, by default all, at the versions held; `each` is set in every part."""
        mine = [shard.shard_id for shard in self.own.of_server(self.server_index)]
        sequence = next(self._sequences)
        exchange = local.LocalExchange(gradients=gradients, pull=pull)
        for shard_id in mine if shard_ids is None else shard_ids:
            fields: dict[str, Any] = {
                "sequence": sequence,
                "shard_id": shard_id,
                "base_version": self.versions.get(shard_id, 0),
                "held_version": self.versions.get(shard_id, -1),
                "epoch": self.epoch,
                "kind": common.PAYLOAD_KIND_GRADIENT,
                "example_count": 1,
                "num_shards": len(mine),
                **(each or {}),
            }
            exchange.shards.add(**fields)
        return local.LocalRequest(exchange=exchange)

    def exchange(self, shard_ids: Sequence[int] | None = None, **options: Any) -> list[wire.ExchangeReply]:
        """Push the gradient vectors, and note the versions that come back."""
        return self.exchanged(self.exchange_request(shard_ids, **options))

    def exchanged(self, request: local.LocalRequest) -> list[wire.ExchangeReply]:
        replies = list(self.link.ask(request).exchanged.replies)
        for reply in replies:
            if reply.codec:
                self.versions[reply.receipt.shard_id] = reply.version
        return replies

    def pull_request(
        self, min_versions: Mapping[int, int] | None = None, *, wait_seconds: float = 20.0
    ) -> local.LocalRequest:
        wants = [
            wire.PullRequest.Want(
                shard_id=shard.shard_id,
                held_version=self.versions.get(shard.shard_id, -1),
                min_version=(min_versions or {}).get(shard.shard_id, 0),
            )
            for shard in self.own.of_server(self.server_index)
        ]
        request = wire.PullRequest(epoch=self.epoch, wants=wants, wait_milliseconds=round(wait_seconds * 1000))
        return local.LocalRequest(pull=local.LocalPull(request=request))

    def pull_here(self, min_versions: Mapping[int, int] | None = None, **options: Any) -> list[wire.Parameters]:
        """Pull newer parameters into the memory; return what was written."""
        shards = list(self.link.ask(self.pull_request(min_versions, **options)).pulled.shards)
        self.versions.update({shard.shard_id: shard.version for shard in shards})
        return shards

    def _arrays(self, vectors: local.LocalVectors) -> list[npt.NDArray[Any]]:
        return [
            np.frombuffer(self.memory, np.float32, size, offset)
            for size, offset in zip(self.own.model.group_sizes, vectors.offsets, strict=True)
        ]


@contextmanager
def local_worker(address: str, worker_id: str = "a", **options: Any) -> Iterator[LocalWorker]:
    """A worker that has joined, attached its memory and holds the parameters."""
    with LocalWorker(address, worker_id, **options) as worker:
        worker.begin()
        yield worker


def maps_of(pid: int) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines() if "memfd:" in line]


def _files_of(pid: int) -> Iterator[tuple[Path, str]]:
    """Yield what a process has open: the descriptor and what it is of."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield descriptor, os.fspath(descriptor.readlink())


def descriptors_of(pid: int) -> list[str]:
    """Return what a process has open that concerns local workers: memfds and sockets."""
    return [target for _, target in _files_of(pid) if "memfd:" in target or target.startswith("socket:")]


def segments_of(pid: int) -> set[int]:
    """Return the memfds that a process maps or has open, by inode: no two at a time share one."""
    found = {int(line.split()[4]) for line in maps_of(pid)}
    for descriptor, target in _files_of(pid):
        if "memfd:" in target:
            with contextlib.suppress(FileNotFoundError):
                found.add(descriptor.stat().st_ino)
    return found
