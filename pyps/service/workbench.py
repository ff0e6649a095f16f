"""Where the data plane's work is done: little of it on the event loop, the rest on threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import TypeVar

from pyps.core.shard import Shard

# Kernels on fewer bytes run on the event loop: handing them to a thread would cost more than they do.
INLINE_BYTES_MAX = 65_536 * 4

T = TypeVar("T")


class Workbench:
    """Runs work so that the event loop is never held up for long."""

    def __init__(self, executor: Executor, *, logged: bool = False):
        """`logged` where each push is written to a disk, for which an event loop must not wait."""
        self.executor = executor
        self._inline_bytes_max = 0 if logged else INLINE_BYTES_MAX

    def is_little(self, num_bytes: int, shards: Iterable[Shard] = ()) -> bool:
        """Whether work on that many bytes, under these shards' locks, may be done on the event loop.

        Who takes a lock may have to wait for an update of all the gradients that wait there, or has to make it.
        """
        most = self._inline_bytes_max
        return num_bytes < most and num_bytes + sum([s.pending_bytes for s in shards]) < most

    async def compute(self, num_bytes: int, work: Callable[[], T], *, shards: Iterable[Shard] = ()) -> T:
        """Runs work on that many bytes: here when it is little, else on a thread."""
        return work() if self.is_little(num_bytes, shards) else await self.begin(work)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Runs work on a thread."""
        return await self.begin(work)

    def begin(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Lets a thread begin with work; its error is not missed where nobody waits for it any more."""
        future = asyncio.get_running_loop().run_in_executor(self.executor, work)
        future.add_done_callback(_look_at_error)
        return future

    def hand_over(self, work: Callable[[], object]) -> None:
        """Lets a thread do work that nobody waits for."""
        try:
            self.executor.submit(work)
        except RuntimeError:
            # The server ends, and its threads have gone.
            work()


def _look_at_error(future: asyncio.Future[T]) -> None:
    if not future.cancelled():
        future.exception()
