"""Jobs on threads, in stages and in parallel: their order and their errors."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pyps.core.gradient import PayloadKind
from pyps.service.executor import INLINE_PARAMETERS_MAX, Job, KernelExecutor
from pyps.service.pushing import Message
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.codecs import CODECS, Codec
from pyps_wire.common_pb2 import Extent
from shards import make_shard, push, roster


def run(*stages: list[Job], threads: int = 4) -> list[str]:
    """Runs stages to their end on that many threads; returns what `on_end` has noted."""
    ends: list[str] = []
    executor = KernelExecutor(threads)
    asyncio.run(executor.run_stages(*stages, on_end=lambda: ends.append("end")))
    executor.shutdown()
    return ends


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_stage_begins_when_every_job_of_the_one_before_is_done(threads):
    done: list[str] = []
    lock = threading.Lock()

    def job(name: str, *, needs: int) -> Job:
        def work() -> None:
            with lock:
                assert len(done) >= needs
                done.append(name)

        return work

    ends = run([job("a", needs=0)] * 20, [job("b", needs=20)] * 20, [job("c", needs=40)], threads=threads)
    assert done == ["a"] * 20 + ["b"] * 20 + ["c"]
    assert ends == ["end"]


def test_jobs_of_a_stage_run_at_once():
    barrier = threading.Barrier(4)
    assert run([lambda: barrier.wait(20) and None] * 4) == ["end"]


def test_an_error_lets_no_further_stage_begin_and_is_raised_once_nothing_is_under_way():
    done: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run([fail, lambda: done.append(1)], [lambda: done.append(2)])
    assert done == [1]


def test_no_jobs_are_done_at_once():
    assert run([], []) == ["end"]


@pytest.mark.parametrize("num_taken", [1, 2])
def test_nothing_is_begun_once_nobody_waits_for_it_any_more(num_taken):
    """With `num_taken` of three jobs under way when the wait ends, on as many threads."""
    going, proceed, ended = threading.Semaphore(0), threading.Event(), threading.Event()
    begun: list[str] = []

    def work() -> None:
        begun.append("first stage")
        going.release()
        assert proceed.wait(20)

    async def give_up(executor: KernelExecutor) -> None:
        stages: list[list[Job]] = [[work] * 3, [lambda: begun.append("second stage")]]
        task = asyncio.create_task(executor.run_stages(*stages, on_end=ended.set))
        for _ in range(num_taken):
            await asyncio.to_thread(going.acquire, timeout=20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not ended.is_set()
        proceed.set()

    executor = KernelExecutor(num_taken)
    asyncio.run(give_up(executor))
    executor.shutdown()
    assert ended.is_set()
    assert begun == ["first stage"] * num_taken


def test_what_no_thread_has_taken_yet_ends_at_once():
    done: list[int] = []
    ends: list[str] = []
    occupied = threading.Event()

    async def give_up(executor: KernelExecutor) -> None:
        executor.hand_over(lambda: occupied.wait(20))
        stages: list[list[Job]] = [[lambda: done.append(1)] * 3]
        task = asyncio.create_task(executor.run_stages(*stages, on_end=lambda: ends.append("end")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ends == ["end"]
        occupied.set()

    executor = KernelExecutor(1)
    asyncio.run(give_up(executor))
    executor.shutdown()
    assert (done, ends) == ([], ["end"])


def test_with_the_threads_gone_the_caller_does_the_work():
    executor = KernelExecutor(2)
    executor.shutdown()
    done: list[int] = []
    stages: list[list[Job]] = [[lambda: done.append(1)] * 2, [lambda: done.append(2)]]
    asyncio.run(executor.run_stages(*stages, on_end=lambda: None))
    assert done == [1, 1, 2]
    assert executor.run_together([lambda: 1, lambda: 2]) == [1, 2]


WAIT_SECONDS = 60.0


@pytest.fixture
def executor() -> Iterator[KernelExecutor]:
    made = KernelExecutor(2)
    yield made
    made.shutdown()


def test_the_event_loop_has_nothing_to_report_of_jobs_whose_callers_are_gone(executor):
    reports: list[dict[str, object]] = []

    def fail() -> None:
        raise ValueError("nobody hears this")

    async def begin_and_go() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        free = threading.Event()
        cancelled, failed = executor.begin(lambda: free.wait(WAIT_SECONDS)), executor.begin(fail)
        cancelled.cancel()
        await asyncio.wait([cancelled, failed])
        free.set()

    asyncio.run(begin_and_go())
    gc.collect()
    assert reports == []


def test_results_come_in_the_order_of_the_jobs(executor):
    assert executor.run_together([lambda i=i: i * i for i in range(50)]) == [i * i for i in range(50)]
    assert executor.run_together([]) == []


def test_jobs_run_in_parallel(executor):
    barrier = threading.Barrier(2)
    assert sorted(executor.run_together([lambda: barrier.wait(WAIT_SECONDS)] * 2)) == [0, 1]


def test_an_error_of_a_job_is_raised_once_all_have_ended(executor):
    def fail() -> int:
        raise ValueError("job 3")

    with pytest.raises(ValueError, match="job 3"):
        executor.run_together([lambda: 1, lambda: 2, fail])


def test_a_push_of_few_bytes_is_as_much_work_as_the_parameters_that_it_changes(monkeypatch):
    bits = Codec(4711, "bits", lambda count: -(-count // 8))
    monkeypatch.setitem(CODECS, bits, bits)
    length, executor = INLINE_PARAMETERS_MAX, KernelExecutor(1)
    shards = {0: make_shard([0.0] * length), 1: make_shard([0.0] * (length // 2), protocol="hardsync")}
    push(shards[1], [1.0] * (length // 2), workers=roster("a", "b"))
    held: Any = SimpleNamespace(content=SimpleNamespace(shards=shards))

    def is_little(shard_id: int = 0, *, exchanges: bool = False, **fields: object) -> bool:
        request = wire.PushRequest(shard_id=shard_id, codec=bits, kind=PayloadKind.GRADIENT, **fields)
        message = Message(held, request, memoryview(b"\0"), exchanges=exchanges, received_bytes=1)
        return executor.is_little(message.num_parameters)

    few = [Extent(offset=8, length=8)]
    assert not is_little()
    assert is_little(extents=few)
    # The reply has all parameters, and a gradient that waits may have to be applied too.
    assert not is_little(extents=few, exchanges=True)
    assert not is_little(1)
    executor.shutdown()
