"""The service that workers call, without a network: threads, mutex, memory and keepalive of its calls."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from pyps.config import resolve
from pyps.core.store import Store
from pyps.roles import Role
from pyps.run.handshake import Greeting
from pyps.run.run import Run
from pyps.service import convert, hosting
from pyps.service.calls import Call, WaitingCalls
from pyps.service.executor import KernelExecutor
from pyps.service.health import Health
from pyps.service.limits import ByteBudget
from pyps.service.parameter_server import ParameterServer
from pyps.service.pulling import serve_pull
from pyps.service.pushing import serve_stream
from pyps.service.security import Access
from pyps.service.serializations import ReplyFrame, Serializations, Wanted
from pyps.service.transport import Host
from pyps.service.waiting import VersionWait
from pyps.service.work_queue import lease_portion
from pyps.work import DataSpec
from pyps_client.transport import grpc as channel
from pyps_wire import common_pb2 as common
from pyps_wire import framing
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.contract import PROTOCOL_VERSION
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import Model, Tensor
from pyps_wire.work_pb2 import LeaseReply, LeaseRequest
from shards import serving


class Watched(Run):
    """A run that notes on which threads it hears Hello."""

    def __init__(self) -> None:
        super().__init__(resolve({"optimizer": "sgd:learning_rate=1"}, {}, warn=print))
        self.threads: list[threading.Thread] = []

    def hello(self, greeting: Greeting) -> int:
        self.threads.append(threading.current_thread())
        return super().hello(greeting)


def greeting_with(num_tensors: int) -> bytes:
    """A worker's Hello with that many small tensors."""
    model = Model(tuple(Tensor(f"tensor.{number}", (2, 3)) for number in range(num_tensors)))
    return wire.HelloRequest(
        sender=common.Sender(run_id="r", worker_id="a", incarnation=time.time_ns()),
        protocol_version=PROTOCOL_VERSION,
        role=common.ROLE_WORKER,
        num_servers=1,
        model=model.to_proto(),
    ).SerializeToString()


def host_of(
    run: Run,
    executor: KernelExecutor,
    *,
    budget: ByteBudget | None = None,
    serializations: Serializations | None = None,
) -> Host:
    """Return what a server around that run has."""
    access, kept = Access(run.config), serializations or Serializations()
    return Host(
        run.config, access, None, run, executor, budget or ByteBudget(2**20), WaitingCalls(1), Health(), kept, None
    )


def test_a_large_model_is_read_and_checked_off_the_event_loop():
    for num_tensors, on_the_loop in ((10, True), (2000, False)):
        run, context = Watched(), SimpleNamespace(role=Role.WORKER)
        executor = KernelExecutor(1)
        service = ParameterServer(host_of(run, executor), control_address="")
        answer = asyncio.run(service.Hello(greeting_with(num_tensors), context))  # type: ignore[arg-type]
        executor.shutdown()
        assert wire.HelloReply.FromString(answer).initialize
        assert [thread is threading.current_thread() for thread in run.threads] == [on_the_loop], num_tensors


def test_a_gradient_keeps_no_more_of_its_message_than_it_is_charged_for():
    for spare, kept in [(100, True), (1 << 20, False)]:
        message = bytes(spare) + b"\x00\x00\x80\x3f" * 16
        gradient = convert.plan_from(wire.PushRequest(codec=1, kind=1), memoryview(message)[spare:]).gradient
        assert bytes(gradient.payload) == message[spare:]
        assert (memoryview(gradient.payload).obj is message) == kept, spare


def test_both_ends_ping_alike_and_no_client_pings_more_often_than_the_server_allows():
    client = dict(channel._options(use_proxy=False))
    server = dict(hosting._common_options())

    for option in ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.keepalive_permit_without_calls"):
        assert client[option] == server[option]
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"] == 60_000


SENDER = common.Sender(run_id="r", worker_id="a", incarnation=1)
WAIT_SECONDS = 60.0


class Listener:
    def __init__(self) -> None:
        self.taken: list[wire.Parameters] = []

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        pass

    async def write(self, message: bytes) -> None:
        self.taken.append(wire.Parameters.FromString(message))


@pytest.fixture
def work() -> Iterator[KernelExecutor]:
    made = KernelExecutor(1)
    yield made
    made.shutdown()


@pytest.mark.parametrize("length, counts", [(16_000, False), (17_000, True)])
def test_what_is_short_both_ways_takes_nothing_of_the_budget_and_longer_messages_do(length, counts, work):
    run, answers = serving(model=Model((Tensor("w", (length,)),))), []

    class Caller(Listener):
        async def read(self) -> Any:
            header = wire.PushRequest(sender=SENDER, sequence=1, kind=1, codec=1, epoch=run.content.epoch, num_shards=1)
            return grpc.aio.EOF if answers else framing.join(header, bytes(4 * length))

        async def write(self, message: bytes) -> None:
            answers.append(message)

    async def scene() -> None:
        host = host_of(run, work, budget=ByteBudget(1))
        await serve_stream(host, Call(Caller(), host.waiting, host.budget), exchanges=True)  # type: ignore[arg-type]

    with pytest.raises(InvalidArgument, match="max-in-flight-bytes") if counts else nullcontext():
        asyncio.run(scene())
    assert [len(each) > 4 * length for each in answers] == ([] if counts else [True])


def test_all_shards_of_a_pull_under_one_mutex_are_read_while_it_is_held(work):
    run, listener, held = serving(protocol="asgd"), Listener(), list[bool]()
    mutex = run.mutex

    class Watching(Serializations):
        def take(self, wanted: Wanted, *, worker_id: str) -> ReplyFrame | None:
            held.append(mutex.locked())
            return super().take(wanted, worker_id=worker_id)

    async def scene() -> None:
        host = host_of(run, work, serializations=Watching())
        await serve_pull(host, Call(listener, host.waiting, host.budget), request.SerializeToString())  # type: ignore[arg-type]

    wants = [wire.PullRequest.Want(shard_id=shard_id, held_version=-1) for shard_id in range(2)]
    request = wire.PullRequest(sender=SENDER, role=common.ROLE_WORKER, wants=wants, codec=common.CODEC_FLOAT32)
    asyncio.run(scene())
    assert (held, len(listener.taken)) == ([True, True], 2)


def test_a_call_whose_caller_is_gone_takes_nothing_back_when_it_gets_the_mutex(work):
    run, listener = serving(protocol="asgd"), Listener()
    run.work.open(DataSpec("train", 6, 3), worker_id="a")
    assert run.mutex is not None
    wants = [wire.PullRequest.Want(shard_id=shard_id, held_version=-1) for shard_id in range(2)]
    request = wire.PullRequest(
        sender=SENDER,
        role=common.ROLE_WORKER,
        wants=wants,
        portion=LeaseRequest(sender=SENDER),
        epoch=run.content.epoch,
    )
    request.codec = common.CODEC_FLOAT32

    async def scene() -> LeaseReply:
        with run.mutex:
            host = host_of(run, work)
            call = Call(listener, host.waiting, host.budget)  # type: ignore[arg-type]
            late = asyncio.create_task(serve_pull(host, call, request.SerializeToString()))
            await asyncio.sleep(0)
            async with asyncio.timeout(WAIT_SECONDS):
                while not work._pool._work_queue.empty() or not work._pool._threads:
                    await asyncio.sleep(0.01)
            late.cancel()
            await asyncio.wait([late])
            # The caller has lost its connection, and asks again.
            answer = await lease_portion(run, work, LeaseRequest(sender=SENDER))
        assert answer.outcome == LeaseReply.OUTCOME_LEASED
        return answer

    leased = asyncio.run(scene())
    # The thread that waited for the mutex is done.
    work.shutdown()
    assert not listener.taken
    deliver = partial(run.work.deliver, "a", 1, [leased.portion.lease_id], example_count=3, now=run.clock())
    assert deliver().accepted


def test_a_hello_neither_reads_nor_writes_the_runs_model_once_it_is_known(monkeypatch):
    """20 microseconds a tensor, and that for every worker."""
    model = Model(tuple(Tensor(f"tensor.{number}", (2, 3)) for number in range(100)))
    run, request = serving(model=model), wire.HelloRequest.FromString(greeting_with(100))
    greeting = convert.greeting_from(request)

    def reply() -> wire.HelloReply:
        return convert.hello_reply(run, greeting, 0, control_address="", offers=())

    first = reply()
    assert Model.from_proto(first.model) == model
    assert convert.greeting_from(request, run.content.model).model is run.content.model
    for name in ("to_proto", "from_proto"):
        monkeypatch.setattr(Model, name, lambda *_: pytest.fail("the model was read or written again"))
    assert reply() == first
    assert convert.greeting_from(request, run.content.model).model is run.content.model


def test_a_pull_of_many_shards_looks_at_each_once(monkeypatch, work):
    count, looks = 400, list[int]()
    is_ready = VersionWait.is_ready

    def look(waits: VersionWait, shard: Store) -> bool:
        looks.append(shard.shard_id)
        return is_ready(waits, shard)

    monkeypatch.setattr(VersionWait, "is_ready", look)
    run, listener = (
        serving(model=Model(tuple(Tensor(f"w{number}", (1,), number) for number in range(count)))),
        Listener(),
    )
    wants = [wire.PullRequest.Want(shard_id=shard_id, held_version=0, min_version=1) for shard_id in range(count)]
    request = wire.PullRequest(
        sender=SENDER, role=common.ROLE_WORKER, epoch=run.content.epoch, wants=wants, wait_milliseconds=60_000
    )

    async def scene() -> None:
        host = host_of(run, work)
        call = Call(listener, host.waiting, host.budget)  # type: ignore[arg-type]
        pulling = asyncio.create_task(serve_pull(host, call, request.SerializeToString()))
        # Shard by shard, the last first.
        for shard_id in reversed(range(count)):
            await asyncio.sleep(0)
            push = wire.PushRequest(
                sender=SENDER, shard_id=shard_id, sequence=1, kind=1, codec=1, epoch=run.content.epoch
            )
            run.push(convert.plan_from(push, memoryview(bytes(4))), run_id="r")
        async with asyncio.timeout(WAIT_SECONDS):
            await pulling

    asyncio.run(scene())
    assert sorted(parameters.shard_id for parameters in listener.taken) == list(range(count))
    assert len(looks) <= 2 * count
