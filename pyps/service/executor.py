"""Where kernels run: little work on the event loop, the rest on threads, as jobs or as stages of jobs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias, TypeVar

# Work is counted in parameters: the bytes of an encoded gradient say nothing about the time of an update.
#
# Kernels on fewer parameters run on the event loop: handing them to a thread would cost more than they do.
INLINE_PARAMETERS_MAX = 65_536
# Parameters in many places take longer than as many in one: about so many more for each place.
EXTENT_PARAMETERS = 1024

T = TypeVar("T")
Job: TypeAlias = Callable[[], object]


class KernelExecutor:
    """Runs a server's kernel work without blocking the event loop for long."""

    def __init__(self, threads: int, *, logged: bool = False):
        """`logged`: each push is written to a disk, for which an event loop must not wait."""
        self.threads = threads
        self.inline_parameters_max = 0 if logged else INLINE_PARAMETERS_MAX
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kernel")

    def is_little(self, num_parameters: int) -> bool:
        """Return whether work on that many parameters may be done on the event loop.

        Gradients that wait at a shard count too: the work may have to make their update, or wait for it.
        """
        return num_parameters < self.inline_parameters_max

    async def compute(self, num_parameters: int, work: Callable[[], T]) -> T:
        """Run work on that many parameters: here when it is little, else on a thread."""
        return work() if self.is_little(num_parameters) else await self.begin(work)

    def begin(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Begin work on a thread; its error is not reported as lost where nothing waits for it any more."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(look_at_error)
        return future

    def hand_over(self, work: Job) -> None:
        """Do work that nothing waits for on a thread."""
        if not self.submit(work):
            work()

    def submit(self, work: Job) -> bool:
        """Do work on a thread; return False where the server ends, and its threads have gone."""
        try:
            self._pool.submit(work)
        except RuntimeError:
            return False
        return True

    async def run_stages(self, *stages: Sequence[Job], on_end: Job) -> None:
        """Run jobs in stages and raise the first error; a stage begins when all jobs of the one before are done.

        When cancelled no further job begins. `on_end` is called from any thread once no job runs and none will begin.
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
        """Run independent jobs, in this thread and in those that are free; return their results in order.

        Raises an error of one once all have ended. It never waits for a free thread, so that callers on all threads
        may use it at once.
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
        """Wait until all work is done, and take no more."""
        self._pool.shutdown()


class _Stages:
    """Jobs on several threads at once; the thread that ends a stage begins the next.

    No thread waits for another: one that finds no job left returns to its pool. After an error no stage begins.
    """

    def __init__(self, stages: Sequence[Sequence[Job]], *, executor: KernelExecutor, on_end: Job):
        self._executor = executor
        self._on_end = on_end
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        # Guarded by _lock: jobs that have not begun, jobs that are not done, stages to come.
        self._left: list[Job] = []
        self._num_open = 0
        self._stages = [list(reversed(stage)) for stage in reversed(stages) if stage]

    def begin(self, *, beside_caller: bool = False) -> None:
        """Begin on threads, with `beside_caller` on the caller's own too, until no job is left to begin."""
        if self._begin_stage():
            threads = self._executor.threads
            if beside_caller:
                self._help(min(threads, self._num_open - 1), present=True)
                self._work()
            else:
                self._help(min(threads, self._num_open), present=False)

    def abandon(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error
            dropped = len(self._left)
            self._left.clear()
            self._num_open -= dropped
            # Else the thread of the last job ends it.
            last = dropped > 0 and self._num_open == 0
        if last:
            self._on_end()

    def _begin_stage(self) -> bool:
        """Open the next stage's jobs; return False after the last stage, which ends the run."""
        with self._lock:
            if self.error is None and self._stages:
                self._left = self._stages.pop()
                self._num_open = len(self._left)
                return True
        self._on_end()
        return False

    def _help(self, count: int, *, present: bool) -> None:
        """Start so many threads on jobs; `present`: one is at work already."""
        for _ in range(count):
            if not self._executor.submit(self._work):
                # The server ends: the thread that is at work does the rest.
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


def look_at_error(future: asyncio.Future[T]) -> None:
    if not future.cancelled():
        future.exception()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
