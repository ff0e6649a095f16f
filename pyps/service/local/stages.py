"""Jobs on several threads at once, in stages: whichever thread ends a stage begins the next, without a detour."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from threading import Lock
from typing import TypeAlias

Job: TypeAlias = Callable[[], None]


class Stages:
    """The jobs of one request. A stage begins when all jobs of the one before are done; an error lets none begin.

    No thread waits for another: one that finds no job left goes back to its pool. Where nobody waits for the end any
    more, jobs that have begun are done and none else begins.
    """

    def __init__(self, stages: Sequence[Sequence[Job]], *, executor: Executor, threads: int):
        self._executor = executor
        self._threads = threads
        self._lock = Lock()
        # Guarded by _lock: jobs that nobody has begun, jobs that are not done, stages to come.
        self._left: list[Job] = []
        self._num_open = 0
        self._stages = [list(reversed(stage)) for stage in reversed(stages) if stage]
        self._error: BaseException | None = None
        self._on_end: Callable[[], None] = lambda: None

    async def run(self, *, on_end: Callable[[], None]) -> None:
        """Runs everything and raises the first error. Cancelled, it lets nothing begin any more.

        `on_end` is called when no job is under way any more and none will begin, from any thread.
        """
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def end() -> None:
            on_end()
            # The server may have ended meanwhile, and the loop with it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, ended)

        self._on_end = end
        if self._begin_stage():
            self._help(0)
        try:
            await ended
        except asyncio.CancelledError as error:
            self._abandon(error)
            raise
        if self._error is not None:
            raise self._error

    def _abandon(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            dropped = len(self._left)
            self._left.clear()
            self._num_open -= dropped
            # Else whoever is at the last job ends it.
            last = dropped > 0 and self._num_open == 0
        if last:
            self._on_end()

    def _begin_stage(self) -> bool:
        """Opens the next stage's jobs; False, and the end, where there is none to come."""
        with self._lock:
            if self._error is None and self._stages:
                self._left = self._stages.pop()
                self._num_open = len(self._left)
                return True
        self._on_end()
        return False

    def _help(self, num_present: int) -> None:
        """Lets further threads take jobs, beside those that do already."""
        try:
            for _ in range(min(self._threads, self._num_open) - num_present):
                self._executor.submit(self._work)
        except RuntimeError:
            # The server ends, and its threads have gone: whoever is at it does the rest.
            if num_present == 0:
                self._work()

    def _work(self) -> None:
        while (job := self._take()) is not None:
            try:
                job()
            except BaseException as error:
                self._error = self._error or error
            if self._is_last() and self._begin_stage():
                self._help(1)

    def _take(self) -> Job | None:
        with self._lock:
            return self._left.pop() if self._left else None

    def _is_last(self) -> bool:
        with self._lock:
            self._num_open -= 1
            return self._num_open == 0


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
