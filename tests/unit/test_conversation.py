"""One caller's conversation: the order of its answers, what runs ahead, errors and callers that take no answer."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from pyps.core.membership import Member, Membership
from pyps.service import calls
from pyps.service import conversation as module
from pyps.service.calls import Call, WaitingCalls
from pyps.service.conversation import Conversation, Request
from pyps.service.executor import INLINE_PARAMETERS_MAX, KernelExecutor
from pyps.service.limits import HEADER_BYTES, ByteBudget
from pyps_wire.errors import InvalidArgument, LimitExceeded, WaitTimedOut
from pyps_wire.partition import Model, Tensor
from shards import serving

MUCH, LITTLE = INLINE_PARAMETERS_MAX, 10
WAIT_SECONDS = 20.0


class Caller:
    def __init__(self, *, deaf: bool = False) -> None:
        self.taken: list[bytes] = []
        self.listens = asyncio.Event()
        if not deaf:
            self.listens.set()

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        pass

    async def write(self, message: bytes) -> None:
        await self.listens.wait()
        self.taken.append(message)


class Scene:
    """A server's side of a call; of its budget nothing may be held at the end."""

    def __init__(self, threads: int) -> None:
        self.work, self.budget = KernelExecutor(threads), ByteBudget(2**30)

    def replies(self, caller: Caller, *, ahead_max: int = 3) -> Conversation:
        return Conversation(self.work, self.budget.account("a"), caller.write, ahead_max=ahead_max)


def played(act: Callable[[Scene], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that plays the scene on an event loop with two threads."""

    def test() -> None:
        scene = Scene(2)
        asyncio.run(asyncio.wait_for(act(scene), WAIT_SECONDS))
        scene.work.shutdown()
        assert scene.budget.bytes_held == 0

    return test


class Job(Request):
    def __init__(self, shard_id: int, job: Callable[[], list[bytes]], num_parameters: int, held_bytes: int) -> None:
        self.shard_id, self.num_parameters, self.held_bytes = shard_id, num_parameters, held_bytes
        self.work = job  # type: ignore[method-assign]


async def add(
    replies: Conversation,
    shard_id: int,
    job: Callable[[], list[bytes]],
    num_parameters: int = MUCH,
    *,
    held_bytes: int | None = None,
) -> None:
    held_bytes = num_parameters if held_bytes is None else held_bytes
    sent = replies.take(Job(shard_id, job, num_parameters, held_bytes))
    if sent is not None:
        await sent


@played
async def test_replies_keep_the_order_of_their_messages_whatever_is_done_first(scene: Scene) -> None:
    caller, second_is_done = Caller(), threading.Event()

    def first() -> list[bytes]:
        assert second_is_done.wait(WAIT_SECONDS)
        return [b"first"]

    def second() -> list[bytes]:
        second_is_done.set()
        return [b"second", b"and more"]

    async with scene.replies(caller) as replies:
        await add(replies, 0, first)
        await add(replies, 1, second)
        # Little work waits for its turn too.
        await add(replies, 2, lambda: [b"third"], LITTLE)
    assert caller.taken == [b"first", b"second", b"and more", b"third"]


@played
async def test_little_work_with_nothing_under_way_is_done_on_the_event_loop(scene: Scene) -> None:
    caller, here = Caller(), threading.get_ident()
    async with scene.replies(caller) as replies:
        for size in (LITTLE, MUCH):
            await add(replies, 0, lambda: [b"here" if threading.get_ident() == here else b"elsewhere"], size)
    assert caller.taken == [b"here", b"elsewhere"]


@played
async def test_a_shards_jobs_run_one_after_the_other(scene: Scene) -> None:
    caller, running = Caller(), threading.Semaphore(1)

    def job(number: int) -> list[bytes]:
        assert running.acquire(blocking=False), "two jobs of one shard at once"
        try:
            return [bytes([number])]
        finally:
            running.release()

    async with scene.replies(caller, ahead_max=9) as replies:
        for number in range(50):
            await add(replies, 7, lambda number=number: job(number))  # type: ignore[misc]
    assert caller.taken == [bytes([number]) for number in range(50)]


@played
async def test_a_job_on_all_shards_goes_before_a_later_one_on_any(scene: Scene) -> None:
    caller, done = Caller(), list[str]()

    def slow() -> list[bytes]:
        assert added.wait(WAIT_SECONDS)
        done.append("all")
        return [b"all"]

    def second() -> list[bytes]:
        done.append("one")
        return [b"one"]

    added = threading.Event()
    async with scene.replies(caller) as replies:
        await add(replies, module.ALL_SHARDS, slow)
        adding = asyncio.create_task(add(replies, 3, second))
        for _ in range(3):
            # The other thread is free: it would do the second job before this.
            await scene.work.begin(lambda: None)
        added.set()
        await adding
    assert (done, caller.taken) == (["all", "one"], [b"all", b"one"])


@played
async def test_no_more_runs_ahead_than_there_is_room_for(scene: Scene) -> None:
    for held_elsewhere, ahead in ((0, 3), (module.AHEAD_BYTES_MAX, 1)):
        caller, added = Caller(deaf=True), list[int]()

        async def read(caller: Caller, added: list[int]) -> None:
            async with scene.replies(caller) as replies:
                for number in range(8):
                    await add(replies, number, lambda: [b"reply"])
                    added.append(number)

        with scene.budget.account("b").holding(held_elsewhere):
            reader = asyncio.create_task(read(caller, added))
            while scene.budget.bytes_held < held_elsewhere + ahead * MUCH:
                await asyncio.sleep(0)
            # Whatever else may happen now does not need this caller.
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(added) == ahead - 1
            assert scene.budget.bytes_held == held_elsewhere + ahead * MUCH
            caller.listens.set()
            await reader
        assert len(caller.taken) == 8


@played
async def test_an_error_ends_the_call_after_the_answers_before_it(scene: Scene) -> None:
    caller, fails = Caller(), threading.Event()

    def slow() -> list[bytes]:
        assert fails.wait(WAIT_SECONDS)
        return [b"good"]

    def bad() -> list[bytes]:
        fails.set()
        raise InvalidArgument("the second push is bad")

    with pytest.raises(InvalidArgument, match="the second push is bad"):
        async with scene.replies(caller) as replies:
            await add(replies, 0, slow)
            await add(replies, 1, bad)
            await add(replies, 2, lambda: [b"too late"])
            # As a reader that waits for the next message.
            await asyncio.Event().wait()
    assert caller.taken == [b"good"]


@played
async def test_an_error_of_the_reader_comes_after_what_is_under_way(scene: Scene) -> None:
    caller = Caller()
    with pytest.raises(InvalidArgument, match="malformed"):
        async with scene.replies(caller) as replies:
            await add(replies, 0, lambda: [b"good"])
            raise InvalidArgument("malformed")
    assert caller.taken == [b"good"]


@played
async def test_a_cancelled_call_gives_back_what_it_held_and_begins_nothing_more(scene: Scene) -> None:
    free, begun = threading.Event(), list[int]()

    def job(number: int) -> list[bytes]:
        begun.append(number)
        free.wait(WAIT_SECONDS)
        return [b"reply"]

    async def call() -> None:
        async with scene.replies(Caller(deaf=True)) as replies:
            for number in range(3):
                await add(replies, number, partial(job, number))
            await replies.none_under_way()

    task = asyncio.create_task(call())
    while scene.budget.bytes_held < 3 * MUCH:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    free.set()
    scene.work.shutdown()
    assert 2 not in begun, "there are two threads"


@played
async def test_what_the_budget_has_no_room_for_is_not_done(scene: Scene) -> None:
    other = scene.budget.account("b")
    other.hold(1)
    for held_bytes, error in ((scene.budget.bytes_max, LimitExceeded), (scene.budget.bytes_max + 1, InvalidArgument)):
        with pytest.raises(error, match="--max-in-flight-bytes"):
            async with scene.replies(Caller()) as replies:
                undone = partial(pytest.fail, "it was done")
                await add(replies, 0, undone, 1, held_bytes=held_bytes)
    other.release(1)


def test_one_call_may_hold_all_and_several_of_one_caller_leave_a_share():
    budget = ByteBudget(1000)
    alone = budget.account("a")
    for _ in range(10):
        alone.hold(100)
    alone.release(1000)
    for greedy in "abc":
        with pytest.raises(LimitExceeded, match=f"held by calls of worker '{greedy}'"):
            while True:
                budget.account(greedy).hold(10)
        budget.account(greedy).hold(0)
    budget.account("honest").hold(100)


def test_each_worker_gets_a_shard_through_whatever_others_hold_by_however_many_names():
    run = serving("early")
    shard = 4 * max(shard.length for shard in run.content.shards.values()) + HEADER_BYTES
    budget = ByteBudget(40 * 3 * shard, run)
    # Twenty have a part that nobody else gets: observers, and the nineteen workers that joined first.
    for greedy in ("unknown", "", *(f"w{index}" for index in range(15))):
        if greedy.startswith("w"):
            run.membership.join(greedy, 1, now=run.clock())
        with pytest.raises(LimitExceeded, match="the others get their share"):
            while True:
                budget.account(greedy).hold(shard)
    # It holds on to what it has when it goes, and comes by another name.
    for index in range(15):
        run.leave("r", f"w{index}", 1, failed=False, message="")
        run.membership.join(f"x{index}", 1, now=run.clock())
        with pytest.raises(LimitExceeded):
            while True:
                budget.account(f"x{index}").hold(shard)
        budget.account(f"x{index}").hold(0)
    run.membership.join("late", 1, now=run.clock())
    for _ in range(3):
        budget.account("early").hold(shard)
    with pytest.raises(LimitExceeded):
        budget.account("early").hold(shard)


def test_a_message_under_pressure_scans_neither_workers_nor_shards(monkeypatch):
    run = serving("early", model=Model(tuple(Tensor(f"w{number}", (1,), number) for number in range(400))))
    for index in range(254):
        run.membership.join(f"w{index}", 1, now=run.clock())
    alive, scans = Membership.alive, list[Membership]()

    def count(membership: Membership) -> list[Member]:
        scans.append(membership)
        return alive(membership)

    monkeypatch.setattr(Membership, "alive", count)
    budget = ByteBudget(2**20, run)
    budget.account("early").hold(2**19)
    for _ in range(1000):
        with budget.account("w1").holding(100):
            pass
    assert len(scans) == 1
    # Another worker changes what is kept for whom.
    run.membership.join("late", 1, now=run.clock())
    budget.account("late").hold(100)
    assert len(scans) == 2


async def pass_seconds(clock: list[float], seconds: float) -> None:
    """Let time pass on a loop that is set by a clock."""
    asyncio.get_running_loop().time = lambda: clock[0]  # type: ignore[method-assign]
    # What has begun, has begun by now.
    await asyncio.sleep(0)
    clock[0] += seconds
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("held_share", "seconds"), [(0.4, calls.WRITE_SECONDS), (0.6, calls.CROWDED_WRITE_SECONDS)])
def test_a_caller_that_takes_nothing_loses_its_call(held_share, seconds):
    async def act() -> None:
        clock, budget = [asyncio.get_running_loop().time()], ByteBudget(1000)
        await pass_seconds(clock, 0)
        # What callers that read nothing hold is free sooner where it is much.
        with budget.account("b").holding(int(held_share * 1000)):
            writer = Call(Caller(deaf=True), WaitingCalls(1), budget)  # type: ignore[arg-type]
            sending = asyncio.create_task(writer.write(b"reply"))
            await pass_seconds(clock, seconds - 1)
            assert not sending.done()
            await pass_seconds(clock, calls.CROWDED_WRITE_SECONDS)
            with pytest.raises(WaitTimedOut, match=r"the caller took no reply for \d+ s: call again"):
                await sending
            assert sending.cancelling() == 0

    asyncio.run(act())


def test_the_limit_for_slow_callers_is_that_of_each_message():
    async def act() -> None:
        clock, caller = [asyncio.get_running_loop().time()], Caller()
        await pass_seconds(clock, 0)
        writer = Call(caller, WaitingCalls(1), ByteBudget(1))  # type: ignore[arg-type]
        for _ in range(4):
            caller.listens.clear()
            sending = asyncio.create_task(writer.write(b"reply"))
            await pass_seconds(clock, 0.9 * calls.WRITE_SECONDS)
            caller.listens.set()
            await sending
        assert caller.taken == [b"reply"] * 4
        writer.close()

    asyncio.run(act())
