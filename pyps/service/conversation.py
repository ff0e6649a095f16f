"""One caller's requests and their answers, in order, over any transport: gRPC, a lane or shared memory.

transport reads ──▶ take(request) ──▶ work, here or on threads ──▶ _release ──▶ transport writes
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pyps.service.executor import Job, KernelExecutor
from pyps.service.limits import Account
from pyps.service.standby.feed import Feed
from pyps.service.waiting import VersionWait

if TYPE_CHECKING:
    from pyps.service.shm.segment import Segment

# The bytes that all callers together may hold before each has one request at a time: three large messages and their
# answers.
AHEAD_BYTES_MAX = 24 * 2**20
# All shards; no shard has this number.
ALL_SHARDS = -1

# Sends an answer; returns an awaitable if it could not be sent at once.
Write: TypeAlias = Callable[[Any], Awaitable[object] | None]


class Request:
    """A caller's request: its work, and then the answers to it."""

    # The shard; earlier requests on it go first.
    shard_id: int = ALL_SHARDS
    # How many parameters its work may touch. All gradients that wait at a shard may become one update with it.
    num_parameters: int
    # Its part of the bytes in flight until it is answered, and how much of that its account holds already.
    held_bytes: int = 0
    bytes_held: int = 0
    # The versions that it waits for before its work.
    waits: VersionWait | None = None
    # What its stages touch. It is held while they run.
    memory: Segment

    def work(self) -> list[Any]:
        """Do the work in this thread and return the answers."""
        for stage in self.stages():
            for job in stage:
                job()
        return self.answers()

    def stages(self) -> Sequence[Sequence[Job]]:
        """Return the work for several threads; a stage's jobs may run in parallel. Empty if only `work` does it."""
        return ()

    def answers(self) -> list[Any]:
        """Return the answers, once all stages are done."""
        return []


class _Begun(NamedTuple):
    """A request that has not been answered yet."""

    shard_id: int
    answers: asyncio.Future[list[Any]]
    held_bytes: int


class Conversation:
    """Answers requests in the order in which they are taken. For the event loop, except `answer`.

    Little work is done in `take`, without task or thread, when no request is under way. Other work runs on threads, in
    parallel with requests on other shards and after those on its own, while further requests are taken.

    More than one request at a time needs it as a context manager, which ends when all requests are answered. The first
    request that fails ends the block with its error, after the answers to earlier requests.
    """

    def __init__(
        self, executor: KernelExecutor, account: Account, write: Write, *, ahead_max: int, feed: Feed | None = None
    ):
        """At most `ahead_max` requests are under way at once. Answers wait until the standby of the `feed` has it."""
        self.account = account
        # Requests under way, in order.
        self.under_way: deque[_Begun] = deque()
        self._executor = executor
        self._write = write
        self._ahead_max = ahead_max
        self._feed = feed or Feed()
        self._group = asyncio.TaskGroup()
        # Sends the answers of what is under way: one task for all, since a task costs as much as a message's copy.
        self._delivery: asyncio.Task[None] | None = None
        self._one_sent = asyncio.Event()

    async def __aenter__(self) -> Conversation:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            # Earlier requests are still answered: without the error the group waits for them.
            kind = error = trace = None
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            while self.under_way:
                begun = self.under_way.popleft()
                begun.answers.cancel()
                self.account.release(begun.held_bytes)

    def take(self, request: Request) -> Awaitable[object] | None:
        """Work on a request and answer it; await what this returns before taking the next.

        Raises LimitExceeded, with nothing done, if its bytes have no room.
        """
        if (
            self.under_way
            or request.held_bytes
            or request.waits is not None
            or request.num_parameters >= self._executor.inline_parameters_max
        ):
            return self._take_long(request)
        return self._release(request.work())

    def start(self, work: Awaitable[None]) -> None:
        """Run a coroutine in a task of its own; its error ends the block."""
        self._group.create_task(work)  # type: ignore[arg-type]

    async def none_under_way(self) -> None:
        """Wait until all requests are answered."""
        while self.under_way:
            await self._end_of_one()

    def answer(self, request: Request, send: Callable[[Any], None]) -> None:
        """Work on a request and send its answers, on a thread that may wait, while no other request is under way.

        Raises as `take`.
        """
        more_bytes = request.held_bytes - request.bytes_held
        self.account.hold(more_bytes)
        try:
            answers = request.work()
            if self._feed.holds:
                self._feed.wait_here()
            for answer in answers:
                send(answer)
        finally:
            self.account.release(more_bytes)

    async def _take_long(self, request: Request) -> None:
        await self._begin(request)
        del request
        # If callers together hold much, each has one request at a time: the others keep processors and links busy. No
        # caller waits for another.
        while self.under_way and (
            len(self.under_way) >= self._ahead_max or self.account.budget.bytes_held >= AHEAD_BYTES_MAX
        ):
            await self._end_of_one()

    async def _begin(self, request: Request) -> None:
        if request.waits is not None:
            await request.waits.all()
        account, held_bytes, stages = self.account, request.held_bytes, request.stages()
        account.hold(held_bytes - request.bytes_held)
        try:
            if not self.under_way and self._executor.is_little(request.num_parameters):
                await self._send(request.work())
                account.release(held_bytes)
                return
            if stages:
                request.memory.hold()
            else:
                while any(begun.shard_id in (request.shard_id, ALL_SHARDS) for begun in self.under_way):
                    await self._end_of_one()
                begun = _Begun(request.shard_id, self._executor.begin(request.work), held_bytes)
        except BaseException:
            account.release(held_bytes)
            raise
        if not stages:
            self.under_way.append(begun)
            if self._delivery is None:
                self._delivery = self._group.create_task(self._deliver())
            return

        def end() -> None:
            # Not before the last job is done, also after the caller has gone.
            request.memory.let_go()
            account.release(held_bytes)

        await self._executor.run_stages(*stages, on_end=end)
        await self._send(request.answers())

    async def _end_of_one(self) -> None:
        """Wait until one more request is answered. If the delivery fails instead, the group cancels this."""
        self._one_sent.clear()
        await self._one_sent.wait()

    async def _deliver(self) -> None:
        while self.under_way:
            await self._send(await self.under_way[0].answers)
            self.account.release(self.under_way.popleft().held_bytes)
            self._one_sent.set()
        # Before another task runs: the next request begins another delivery.
        self._delivery = None

    async def _send(self, answers: list[Any]) -> None:
        if (sent := self._release(answers)) is not None:
            await sent

    def _release(self, answers: list[Any]) -> Awaitable[object] | None:
        """Send the answers to a request whose work is done; await what this returns.

        Every answer passes here or through `answer`, between its push and its reply: there it waits for the standby.
        """
        if self._feed.holds and (received := self._feed.wait()) is not None:
            return self._release_when(received, answers)
        if len(answers) == 1:
            return self._write(answers[0])
        return self._release_each(answers)

    async def _release_when(self, received: asyncio.Future[None], answers: list[Any]) -> None:
        await received
        await self._release_each(answers)

    async def _release_each(self, answers: list[Any]) -> None:
        answers.reverse()
        while answers:
            # The memory of an answer is free before the next is sent.
            if (sent := self._write(answers.pop())) is not None:
                await sent
