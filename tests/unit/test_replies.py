"""The replies of one stream: their order, what runs ahead of them, their errors and callers who take none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from pyps.service import replies as module
from pyps.service.calls import Writer
from pyps.service.limits import ByteBudget
from pyps.service.replies import Replies
from pyps.service.workbench import INLINE_BYTES_MAX, Workbench
from pyps_wire.errors import BadRequest, LimitExceeded, WaitTimedOut

MUCH, LITTLE = INLINE_BYTES_MAX, 10
WAIT_SECONDS = 20.0


class Caller:
    """The far end of a call: it takes messages, or none until it is let."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.taken: list[bytes] = []
        self._listens = asyncio.Event()
        if not deaf:
            self._listens.set()

    async def write(self, message: bytes) -> None:
        await self._listens.wait()
        self.taken.append(message)

    def listen(self) -> None:
        self._listens.set()

    def stop_listening(self) -> None:
        self._listens.clear()


def played(scene: Callable[[Workbench, ByteBudget], Coroutine[Any, Any, None]]) -> ByteBudget:
    """Plays a scene on an event loop with two threads; returns the budget, of which nothing may be held any more."""
    budget = ByteBudget(2**30)
    with ThreadPoolExecutor(2) as threads:

        async def play() -> None:
            async with asyncio.timeout(WAIT_SECONDS):
                await scene(Workbench(threads), budget)

        asyncio.run(play())
    assert budget.bytes_held == 0
    return budget


async def add(replies: Replies, shard_id: int, job: Callable[[], list[bytes]], num_bytes: int = MUCH) -> None:
    await replies.add(shard_id, job, num_bytes=num_bytes, held_bytes=num_bytes, shards=())


def test_replies_keep_the_order_of_their_messages_whatever_is_done_first() -> None:
    async def scene(work: Workbench, budget: ByteBudget) -> None:
        caller, second_is_done = Caller(), threading.Event()

        def first() -> list[bytes]:
            assert second_is_done.wait(WAIT_SECONDS)
            return [b"first"]

        def second() -> list[bytes]:
            second_is_done.set()
            return [b"second", b"and more"]

        async with Replies(caller, work, budget, ahead_max=3) as replies:  # type: ignore[arg-type]
            await add(replies, 0, first)
            await add(replies, 1, second)
            # Little work waits for its turn too.
            await add(replies, 2, lambda: [b"third"], LITTLE)
        assert caller.taken == [b"first", b"second", b"and more", b"third"]

    played(scene)


def test_little_work_with_nothing_under_way_is_done_where_it_is_asked_for() -> None:
    async def scene(work: Workbench, budget: ByteBudget) -> None:
        caller, here = Caller(), threading.get_ident()
        async with Replies(caller, work, budget, ahead_max=3) as replies:  # type: ignore[arg-type]
            for size in (LITTLE, MUCH):
                await add(replies, 0, lambda: [b"here" if threading.get_ident() == here else b"elsewhere"], size)
        assert caller.taken == [b"here", b"elsewhere"]

    played(scene)


def test_a_shards_jobs_run_one_after_the_other() -> None:
    async def scene(work: Workbench, budget: ByteBudget) -> None:
        caller, running = Caller(), threading.Semaphore(1)

        def job(number: int) -> list[bytes]:
            assert running.acquire(blocking=False), "two jobs of one shard at once"
            try:
                return [bytes([number])]
            finally:
                running.release()

        async with Replies(caller, work, budget, ahead_max=9) as replies:  # type: ignore[arg-type]
            for number in range(50):
                await add(replies, 7, lambda number=number: job(number))  # type: ignore[misc]
        assert caller.taken == [bytes([number]) for number in range(50)]

    played(scene)


def test_a_job_on_all_shards_goes_before_a_later_one_on_any() -> None:
    async def scene(work: Workbench, budget: ByteBudget) -> None:
        caller, done = Caller(), []

        def slow() -> list[bytes]:
            running.set()
            # Another thread is free for the second job.
            assert not overtaken.wait(0.1)
            done.append("all")
            return [b"all"]

        def second() -> list[bytes]:
            overtaken.set()
            done.append("one")
            return [b"one"]

        running, overtaken = threading.Event(), threading.Event()
        async with Replies(caller, work, budget, ahead_max=3) as replies:  # type: ignore[arg-type]
            await add(replies, module.ALL_SHARDS, slow)
            await add(replies, 3, second)
        assert (done, caller.taken) == (["all", "one"], [b"all", b"one"])

    played(scene)


def test_no_more_runs_ahead_than_there_is_room_for() -> None:
    async def scene(work: Workbench, budget: ByteBudget, *, held_elsewhere: int, ahead: int) -> None:
        caller, num_added = Caller(deaf=True), 0

        async def read() -> None:
            nonlocal num_added
            async with Replies(caller, work, budget, ahead_max=3) as replies:  # type: ignore[arg-type]
                for number in range(8):
                    await add(replies, number, lambda: [b"reply"])
                    num_added += 1
                    await replies.room()

        with budget.holding(held_elsewhere):
            reader = asyncio.create_task(read())
            while num_added < ahead:
                await asyncio.sleep(0)
            assert budget.bytes_held == held_elsewhere + ahead * MUCH
            # Whatever else may happen now does not need this caller.
            for _ in range(100):
                await asyncio.sleep(0)
            assert num_added == ahead
            caller.listen()
            await reader
        assert len(caller.taken) == 8

    played(partial(scene, held_elsewhere=0, ahead=3))
    played(partial(scene, held_elsewhere=module.AHEAD_BYTES_MAX, ahead=1))


def test_an_error_ends_the_call_after_the_answers_before_it() -> None:
    async def scene(work: Workbench, budget: ByteBudget) -> None:
        caller, fails = Caller(), threading.Event()

        def slow() -> list[bytes]:
            assert fails.wait(WAIT_SECONDS)
            return [b"good"]

        def bad() -> list[bytes]:
            fails.set()
            raise BadRequest("the second push is bad")

        with pytest.raises(BadRequest, match="the second push is bad"):
            async with Replies(caller, work, budget, ahead_max=3) as replies:  # type: ignore[arg-type]
                await add(replies, 0, slow)
                await add(replies, 1, bad)
                await add(replies, 2, lambda: [b"too late"])
                # As a reader that waits for the next message.
                await asyncio.Event().wait()
        assert caller.taken == [b"good"]

    played(scene)


def test_an_error_of_the_reader_comes_after_what_is_under_way() -> None:
    async def scene(work: Workbench, budget: ByteBudget) -> None:
        caller = Caller()
        with pytest.raises(BadRequest, match="malformed"):
            async with Replies(caller, work, budget, ahead_max=3) as replies:  # type: ignore[arg-type]
                await add(replies, 0, lambda: [b"good"])
                raise BadRequest("malformed")
        assert caller.taken == [b"good"]

    played(scene)


def test_a_cancelled_call_gives_back_what_it_held() -> None:
    async def scene(work: Workbench, budget: ByteBudget) -> None:
        async def call() -> None:
            async with Replies(Caller(deaf=True), work, budget, ahead_max=3) as replies:  # type: ignore[arg-type]
                for number in range(3):
                    await add(replies, number, lambda: [b"reply"])
                await replies.none_under_way()

        task = asyncio.create_task(call())
        while budget.bytes_held < 3 * MUCH:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    played(scene)


def test_what_the_budget_has_no_room_for_is_not_done() -> None:
    async def scene(work: Workbench, budget: ByteBudget) -> None:
        budget.hold(1)
        for held_bytes, error in ((budget.bytes_max, LimitExceeded), (budget.bytes_max + 1, BadRequest)):
            with pytest.raises(error, match="--max-in-flight-bytes"):
                async with Replies(Caller(), work, budget, ahead_max=3) as replies:  # type: ignore[arg-type]
                    undone = partial(pytest.fail, "it was done")
                    await replies.add(0, undone, num_bytes=1, held_bytes=held_bytes, shards=())
        budget.release(1)

    played(scene)


def test_a_caller_that_takes_nothing_loses_its_call() -> None:
    async def scene(work: Workbench, budget: ByteBudget) -> None:
        writer = Writer(Caller(deaf=True), wait_seconds=0.05)  # type: ignore[arg-type]
        with pytest.raises(WaitTimedOut, match=r"the caller took no reply for 0\.05 s: call again"):
            await writer.send(b"reply")
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0

    played(scene)


def test_the_watch_over_slow_callers_counts_each_message_anew() -> None:
    async def scene(work: Workbench, budget: ByteBudget) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        loop.time = lambda: now  # type: ignore[method-assign]
        caller = Caller()
        writer = Writer(caller, wait_seconds=4.0)  # type: ignore[arg-type]
        for _ in range(4):
            caller.stop_listening()
            sending = asyncio.create_task(writer.send(b"reply"))
            await asyncio.sleep(0)
            now += 3.5
            for _ in range(5):
                await asyncio.sleep(0)
            caller.listen()
            await sending
        assert caller.taken == [b"reply"] * 4
        writer.close()

    played(scene)
