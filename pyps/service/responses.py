"""The replies of one stream: made on several threads at once, sent in the order of their messages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, TypeAlias

from pyps.service.calls import Call
from pyps.service.executor import KernelExecutor
from pyps.service.limits import Account

# What streams may hold together before each has one job at a time: three of large messages and their replies.
AHEAD_BYTES_MAX = 24 * 2**20

# Stands for all shards at once; no shard has this number.
ALL_SHARDS = -1

# Does a message's work and returns what it is answered with.
Job: TypeAlias = Callable[[], list[bytes]]


class Begun(NamedTuple):
    """A job that has not been answered yet."""

    shard_id: int
    answer: asyncio.Future[list[bytes]]
    held_bytes: int


class OrderedResponses:
    """Jobs begun one after the other, whose messages are sent in that order. A context manager, for one call.

    A job that is little runs at once, without task or thread, where none is under way. Else it runs on a thread, beside
    those of other shards and after those of its own, while the caller of `add` goes on. The first job that fails ends
    the block with its error, after the messages of those before it.
    """

    def __init__(self, call: Call, executor: KernelExecutor, account: Account, *, ahead_max: int):
        """At most `ahead_max` jobs have not been answered while there is `room`."""
        self._call = call
        self._executor = executor
        self._account = account
        self._ahead_max = ahead_max
        self._group = asyncio.TaskGroup()
        # In the order in which they began.
        self.under_way: deque[Begun] = deque()
        # Sends their messages, as long as there are any: one for all, since a task a message costs as much as its copy.
        self._delivery: asyncio.Task[None] | None = None
        self._one_sent = asyncio.Event()

    async def __aenter__(self) -> OrderedResponses:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            # What was done before the error is still answered: the group does not hear of it, and waits.
            kind = error = trace = None
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            while self.under_way:
                begun = self.under_way.popleft()
                begun.answer.cancel()
                self._account.release(begun.held_bytes)

    async def add(self, shard_id: int, job: Job, *, num_parameters: int, held_bytes: int) -> None:
        """Begin a job on `num_parameters`; until it is answered the account holds `held_bytes`.

        Raises LimitExceeded where there is no room for them; the job is not done then.
        """
        self._account.hold(held_bytes)
        if not self.under_way and self._executor.is_little(num_parameters):
            try:
                for message in job():
                    await self._call.write(message)
            finally:
                self._account.release(held_bytes)
            return
        try:
            while any(begun.shard_id in (shard_id, ALL_SHARDS) for begun in self.under_way):
                await self._end_of_one()
        except BaseException:
            self._account.release(held_bytes)
            raise
        self.under_way.append(Begun(shard_id, self._executor.begin(job), held_bytes))
        if self._delivery is None:
            self._delivery = self._group.create_task(self._deliver())

    async def room(self) -> None:
        """Waits until another job may be added.

        Where streams together hold much, each has one at a time: the others keep the processors and the link at work.
        Nobody waits for another stream.
        """
        while self.under_way and (
            len(self.under_way) >= self._ahead_max or self._account.budget.bytes_held >= AHEAD_BYTES_MAX
        ):
            await self._end_of_one()

    async def none_under_way(self) -> None:
        """Waits until all jobs are answered."""
        while self.under_way:
            await self._end_of_one()

    async def _end_of_one(self) -> None:
        """Waits until one more is answered. Where the delivery fails instead, the group cancels who waits."""
        self._one_sent.clear()
        await self._one_sent.wait()

    async def _deliver(self) -> None:
        while self.under_way:
            messages = await self.under_way[0].answer
            messages.reverse()
            while messages:
                # What was sent is free before the next is.
                await self._call.write(messages.pop())
            self._account.release(self.under_way.popleft().held_bytes)
            self._one_sent.set()
        # Noted before anybody else runs: who adds one now begins another. After an error nobody does.
        self._delivery = None
