"""Workers of a few lines, straight on the generated stubs: what tests of the server speak."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.contract import METHODS, PROTOCOL_VERSION
from pyps_wire.errors import METADATA_KEY
from pyps_wire.parameter_server_pb2_grpc import ParameterServerStub
from pyps_wire.partition import Model, Partition, Tensor, partition
from support import DEADLINE_SECONDS, AnyServer

T = TypeVar("T")
Floats = npt.NDArray[np.float32]

SMALL = Model((Tensor("layer.weight", (10, 3)), Tensor("layer.bias", (7,))))
_INCARNATIONS = itertools.count(time.time_ns())

CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Every channel its own connection, as in separate processes.
    ("grpc.use_local_subchannel_pool", 1),
]


def sgd(learning_rate: float = 1.0, *, groups: int = 1) -> common.OptimizerSettings:
    """Plain SGD: with learning rate 1 an update is a subtraction."""
    group = common.GroupSettings(hyperparameters={"learning_rate": learning_rate})
    return common.OptimizerSettings(rule="sgd", groups=[group] * groups)


class WireWorker:
    """One worker of one server. A context manager that closes its channel."""

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
    ):
        self.channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.stub = ParameterServerStub(self.channel)
        self.model = model
        self.plan: Partition = partition(model, num_servers=num_servers)
        self.optimizer = optimizer if optimizer is not None else sgd(groups=model.num_groups)
        self.sender = common.Sender(run_id=run_id, worker_id=worker_id, incarnation=next(_INCARNATIONS))
        self.metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
        self.server_index, self.num_servers = server_index, num_servers
        self.epoch = 0
        self._sequences = itertools.count(1)

    def __enter__(self) -> WireWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def hello(self, **fields: object) -> wire.HelloReply:
        """Says Hello; `fields` replace what it says."""
        request = wire.HelloRequest(
            sender=self.sender,
            protocol_version=PROTOCOL_VERSION,
            software="test",
            role=common.ROLE_WORKER,
            server_index=self.server_index,
            num_servers=self.num_servers,
            model=self.model.to_proto(),
            optimizer=self.optimizer,
            fingerprint=self.plan.fingerprint,
        )
        for name, value in fields.items():
            if isinstance(value, int | str):
                setattr(request, name, value)
            elif isinstance(value, list | tuple):
                getattr(request, name).extend(value)
            else:
                getattr(request, name).CopyFrom(value)
        reply: wire.HelloReply = self.stub.Hello(request, timeout=DEADLINE_SECONDS, metadata=self.metadata)
        self.epoch = reply.epoch
        return reply

    def initialize_messages(self, term: int, value: float = 0.0) -> Iterator[wire.InitializeRequest]:
        """The messages that initialise every parameter with one value."""
        yield wire.InitializeRequest(
            sender=self.sender,
            term=term,
            model=self.model.to_proto(),
            optimizer=self.optimizer,
            server_index=self.server_index,
            num_servers=self.num_servers,
        )
        for shard in self.plan.of_server(self.server_index):
            yield wire.InitializeRequest(
                sender=self.sender,
                term=term,
                shard_id=shard.shard_id,
                codec=common.CODEC_FLOAT32,
                payload=np.full(shard.length, value, np.float32).tobytes(),
            )

    def initialize(self, term: int, value: float = 0.0) -> wire.InitializeReply:
        """Initialises every parameter with one value."""
        return self.stub.Initialize(
            self.initialize_messages(term, value), timeout=DEADLINE_SECONDS, metadata=self.metadata
        )

    def join(self, value: float = 0.0) -> wire.HelloReply:
        """Says Hello, and initialises the run where it is asked to."""
        reply = self.hello()
        if reply.initialize:
            self.initialize(reply.term, value)
        return reply

    def push_request(
        self, values: Floats | float, shard_id: int = 0, base_version: int = 0, **fields: object
    ) -> wire.PushRequest:
        """One shard of a push; a number stands for a whole shard of it."""
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
        """Sends the messages in one stream and returns their receipts."""
        return list(self.stub.Push(iter(requests), timeout=DEADLINE_SECONDS, metadata=self.metadata))

    def push_step(
        self, values: float, base_versions: Mapping[int, int] | None = None, **fields: object
    ) -> list[common.Receipt]:
        """One push of all of this server's shards, under one sequence number."""
        sequence, shards = next(self._sequences), self.plan.of_server(self.server_index)
        requests = [
            self.push_request(
                values,
                shard.shard_id,
                (base_versions or {}).get(shard.shard_id, 0),
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
        """Takes steps as a client should: asks where asked to, pulls what it is to wait for, pushes; all receipts."""
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
        """Asks for the step after `clock` steps and waits for the answer."""
        return self.stub.Proceed(
            self.proceed_request(clock, wait_seconds), timeout=wait_seconds + DEADLINE_SECONDS, metadata=self.metadata
        )

    def proceed_request(self, clock: int, wait_seconds: float = 30.0) -> wire.ProceedRequest:
        """The question for the step after `clock` steps."""
        return wire.ProceedRequest(sender=self.sender, clock=clock, wait_milliseconds=round(wait_seconds * 1000))

    def push_frames(self, frames: Iterable[bytes]) -> list[common.Receipt]:
        """Sends raw frames, as the real client does."""
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
        """Pulls the shards that are newer than those held."""
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
        """Pulls everything without being a worker."""
        request = wire.PullRequest(sender=self.sender, role=common.ROLE_OBSERVER)
        return list(self.stub.Pull(request, timeout=DEADLINE_SECONDS, metadata=self.metadata))

    def heartbeat(self, **fields: int) -> wire.HeartbeatReply:
        """Gives a sign of life."""
        request = wire.HeartbeatRequest(sender=self.sender, **fields)
        return self.stub.Heartbeat(request, timeout=DEADLINE_SECONDS, metadata=self.metadata)

    def leave(self, cause: int = wire.LeaveRequest.CAUSE_FINISHED) -> wire.LeaveReply:
        """Leaves the run."""
        request = wire.LeaveRequest(sender=self.sender, cause=cause)
        return self.stub.Leave(request, timeout=DEADLINE_SECONDS, metadata=self.metadata)


def parked_pull(worker: WireWorker, min_version: int, seconds: float = 100.0) -> grpc.Call:
    """Starts a pull of shard 0 that waits for a version."""
    want = wire.PullRequest.Want(shard_id=0, held_version=min_version - 1, min_version=min_version)
    request = wire.PullRequest(
        sender=worker.sender, epoch=worker.epoch, wants=[want], wait_milliseconds=round(seconds * 1000)
    )
    return worker.stub.Pull(request, timeout=seconds + 10)


def values_of(parameters: wire.Parameters) -> Floats:
    """The numbers of a pulled shard."""
    return np.frombuffer(parameters.payload, np.float32)


def refusal_of(call: Callable[..., object], *arguments: object, **keywords: object) -> tuple[str, str | None, str]:
    """The status, the pyps error and the text with which a call was refused."""
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
    """That many workers, "w0" first, all of them members of a run that serves."""
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
    """Gives signs of life for the workers, as their clients would."""
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
    """Makes the calls from a thread each; their results, in order."""
    calls = list(calls)
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(deadline_seconds) for future in futures]
