"""A worker's call for a portion that gets to ask late, since it had to wait for the model's mutex."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pyps.run import Run
from pyps.service.leasing import LeaseCall
from pyps.service.limits import ByteBudget
from pyps.service.pulling import PullStream
from pyps.service.serializations import Serializations
from pyps.service.workbench import Workbench
from pyps.work import DataSpec, Leased
from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.work_pb2 import LeaseRequest
from run_crew import serving as serve

SENDER = common.Sender(run_id="r", worker_id="a", incarnation=1)
WAIT_SECONDS = 60.0


class Listener:
    """The far end of a call: it takes messages."""

    def __init__(self) -> None:
        self.taken: list[wire.Parameters] = []

    async def write(self, message: bytes) -> None:
        self.taken.append(wire.Parameters.FromString(message))


def serving() -> Run:
    """A run of two shards under one mutex, with the worker "a" and a data set of two portions."""
    run = serve(protocol="asgd")
    run.work.open(DataSpec("train", 6, 3), worker_id="a")
    return run


def get(run: Run, work: Workbench, listener: Listener) -> PullStream:
    """A call for a portion and the parameters in one."""
    wants = [wire.PullRequest.Want(shard_id=shard_id, held_version=-1) for shard_id in range(2)]
    request = wire.PullRequest(
        sender=SENDER, role=common.ROLE_WORKER, wants=wants, portion=LeaseRequest(sender=SENDER), epoch=run.epoch
    )
    request.codec = common.CODEC_FLOAT32
    return PullStream(run, work, ByteBudget(2**20), listener, request, serializations=Serializations())  # type: ignore[arg-type]


async def until_asked(threads: ThreadPoolExecutor) -> None:
    """Lets whoever waits for a thread have it."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not threads._work_queue.empty() or not threads._threads:
            await asyncio.sleep(0.01)


def test_a_call_whose_caller_is_gone_takes_nothing_back_when_it_gets_the_mutex() -> None:
    run, listener = serving(), Listener()
    assert run.whole is not None

    async def scene(threads: ThreadPoolExecutor) -> Leased:
        work = Workbench(threads)
        with run.whole.held():
            late = asyncio.create_task(get(run, work, listener).serve())
            await asyncio.sleep(0)
            await until_asked(threads)
            late.cancel()
            await asyncio.wait([late])
            # The caller has lost its connection, and asks anew.
            answer = await LeaseCall(run, work, LeaseRequest(sender=SENDER)).answer()
        assert isinstance(answer, Leased)
        return answer

    with ThreadPoolExecutor(1) as threads:
        leased = asyncio.run(scene(threads))
    # The thread that waited for the mutex is done.
    assert not listener.taken
    deliver = partial(run.work.deliver, "a", 1, [leased.lease_id], example_count=3, now=run.clock())
    assert deliver().accepted
