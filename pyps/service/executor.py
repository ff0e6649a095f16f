"""Where kernels run: little work on the event loop, the rest on threads, in jobs and in stages of jobs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias, TypeVar

# Work is counted in parameters: how few bytes they travel in says nothing of the time that an update takes.
#
# Kernels on fewer parameters run on the event loop: handing them to a thread would cost more than they do.
INLINE_PARAMETERS_MAX = 65_536
# Parameters in many places take longer than as many in one: about so many more for each place.
EXTENT_PARAMETERS = 1024

T = TypeVar("T")
Job: TypeAlias = Callable[[], object]


class KernelExecutor:
    """Runs a server's kernel work so that the event loop is never held up for long."""

    def __init__(self, threads: int, *, logged: bool = False):
        """`logged` where each push is written to a disk, for which an event loop must not wait."""
        self.threads = threads
        self.inline_parameters_max = 0 if logged else INLINE_PARAMETERS_MAX
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kernel")

    def is_little(self, num_parameters: int) -> bool:
        """Whether work on that many parameters may be done on the event loop.

        Gradients that wait at a shard count too: whoever takes the shard's lock may have to wait for their update, or
        to make it.
        """
        return num_parameters < self.inline_parameters_max

    async def compute(self, num_parameters: int, work: Callable[[], T]) -> T:
        """Run work on that many parameters: here when it is little, else on a thread."""
        return work() if self.is_little(num_parameters) else await self.begin(work)

    def begin(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Lets a thread begin with work; its error is not missed where nobody waits for it any more."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(_look_at_error)
        return future

    def hand_over(self, work: Job) -> None:
        """Lets a thread do work that nobody waits for."""
        if not self.submit(work):
            work()

    def submit(self, work: Job) -> bool:
        """Lets a thread do work; False where the server ends, and its threads have gone."""
        try:
            self._pool.submit(work)
        except RuntimeError:
            return False
        return True

    async def run_stages(self, *stages: Sequence[Job], on_end: Job) -> None:
        """Runs jobs in stages and raises the first error; a stage begins when all jobs of the one before are done.

        Cancelled, it lets nothing begin any more. `on_end` is called when no job is under way any more and none will
        begin, from any thread.
        """
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def end() -> None:
            on_end()
            # The server may have ended meanwhile, and the loop with it.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, ended)

        run = _Stages(stages, executor=self, on_end=end)
        run.begin()
        try:
            await ended
        except asyncio.CancelledError as error:
            run.abandon(error)
            raise
        if run.error is not None:
            raise run.error

    def run_together(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Runs jobs that touch nothing in common, in this thread and in those that are free.

        Returns what they return, in their order, once all have ended; raises an error of one. It never waits for a
        thread to become free, so that it may be called where all threads wait for their like.
        """
        results: dict[int, T] = {}
        ended = threading.Event()

        def do(index: int) -> None:
            results[index] = jobs[index]()

        run = _Stages([[partial(do, index) for index in range(len(jobs))]], executor=self, on_end=ended.set)
        run.begin(beside_caller=True)
        ended.wait()
        if run.error is not None:
            raise run.error
        return [results[index] for index in range(len(jobs))]

    def shutdown(self) -> None:
        """Waits until all work is done and takes no more."""
        self._pool.shutdown()


class _Stages:
    """Jobs on several threads at once; whichever thread ends a stage begins the next, without a detour.

    No thread waits for another: one that finds no job left goes back to its pool. An error lets no stage begin.
    """

    def __init__(self, stages: Sequence[Sequence[Job]], *, executor: KernelExecutor, on_end: Job):
        self._executor = executor
        self._on_end = on_end
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        # Guarded by _lock: jobs that nobody has begun, jobs that are not done, stages to come.
        self._left: list[Job] = []
        self._num_open = 0
        self._stages = [list(reversed(stage)) for stage in reversed(stages) if stage]

    def begin(self, *, beside_caller: bool = False) -> None:
        """Lets threads begin, and the caller work beside them until nothing is left to begin."""
        if self._begin_stage():
            threads = self._executor.threads
            if beside_caller:
                self._help(min(threads, self._num_open - 1), present=True)
                self._work()
            else:
                self._help(min(threads, self._num_open), present=False)

    def abandon(self, error: BaseException) -> None:
        """Lets no job begin any more."""
        with self._lock:
            self.error = self.error or error
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
            if self.error is None and self._stages:
                self._left = self._stages.pop()
                self._num_open = len(self._left)
                return True
        self._on_end()
        return False

    def _help(self, count: int, *, present: bool) -> None:
        """Lets so many threads take jobs; `present` says that one does already."""
        for _ in range(count):
            if not self._executor.submit(self._work):
                # The server ends: whoever is at it does the rest.
                if not present:
                    self._work()
                return

    def _work(self) -> None:
        while (job := self._take()) is not None:
            try:
                job()
            except BaseException as error:
                self.error = self.error or error
            if self._is_last() and self._begin_stage():
                self._help(min(self._executor.threads, self._num_open) - 1, present=True)

    def _take(self) -> Job | None:
        with self._lock:
            return self._left.pop() if self._left else None

    def _is_last(self) -> bool:
        with self._lock:
            self._num_open -= 1
            return self._num_open == 0


def _look_at_error(future: asyncio.Future[T]) -> None:
    if not future.cancelled():
        future.exception()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
