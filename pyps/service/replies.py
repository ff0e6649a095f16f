"""The replies of one stream: made on several threads at once, sent in the order of their messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeAlias

from pyps.core.shard import Shard
from pyps.service.calls import Context, Writer
from pyps.service.limits import ByteBudget
from pyps.service.workbench import Workbench

# What streams may hold together before each has one job at a time: three of large messages and their replies.
AHEAD_BYTES_MAX = 24 * 2**20

# Does a message's work and returns what it is answered with.
Job: TypeAlias = Callable[[], list[bytes]]


class Replies:
    """Jobs begun one after the other, whose messages are sent in that order. A context manager, for one call.

    A job that is little runs at once, without task or thread, where none is under way. Else it runs on a thread, beside
    those of other shards and after those of its own, while the caller of `add` goes on. The first job that fails ends
    the block with its error, after the messages of those before it.
    """

    def __init__(self, context: Context, work: Workbench, budget: ByteBudget, *, ahead_max: int):
        """At most `ahead_max` jobs have not been answered while there is `room`."""
        self._writer = Writer(context)
        self._work = work
        self._budget = budget
        self._ahead_max = ahead_max
        self._group = asyncio.TaskGroup()
        # By shard, in the order in which they began.
        self._under_way: dict[int, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Replies:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            # What was done before the error is still answered.
            await self.none_under_way()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._writer.close()

    async def add(self, shard_id: int, job: Job, *, num_bytes: int, held_bytes: int, shards: Iterable[Shard]) -> None:
        """Begins a job on `num_bytes` under these shards' locks; until it is answered the budget holds `held_bytes`.

        Raises LimitExceeded where the budget has no room for them; the job is not done then.
        """
        self._budget.hold(held_bytes)
        if not self._under_way and self._work.is_little(num_bytes, shards):
            try:
                for message in job():
                    await self._writer.send(message)
            finally:
                self._budget.release(held_bytes)
            return
        try:
            await self._end_of(shard_id)
        except BaseException:
            self._budget.release(held_bytes)
            raise
        before = next(reversed(self._under_way.values()), None)
        answer = self._work.begin(job)
        delivery = self._group.create_task(self._deliver(answer, before))
        self._under_way[shard_id] = delivery

        def ended(_: asyncio.Task[None]) -> None:
            answer.cancel()
            self._budget.release(held_bytes)
            del self._under_way[shard_id]

        # Not in the task, which does not even begin where it is cancelled soon enough.
        delivery.add_done_callback(ended)

    async def room(self) -> None:
        """Waits until another job may be added.

        Where streams together hold much, each has one at a time: the others keep the processors and the link at work.
        Nobody waits for another stream.
        """
        while self._under_way and not self._may_go_ahead():
            await self._end_of(next(iter(self._under_way)))

    def _may_go_ahead(self) -> bool:
        return len(self._under_way) < self._ahead_max and self._budget.bytes_held < AHEAD_BYTES_MAX

    async def none_under_way(self) -> None:
        """Waits until all jobs are answered."""
        while self._under_way:
            await self._end_of(next(reversed(self._under_way)))

    async def _end_of(self, shard_id: int) -> None:
        if shard_id in self._under_way:
            await asyncio.wait((self._under_way[shard_id],))

    async def _deliver(self, answer: asyncio.Future[list[bytes]], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        messages = await answer
        messages.reverse()
        while messages:
            # What was sent is free before the next is.
            await self._writer.send(messages.pop())
