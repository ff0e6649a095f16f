"""Where kernels run: little work on the event loop, the rest on threads, as jobs or as stages of jobs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeAlias, TypeVar

# Work is counted in parameters: the bytes of an encoded gradient say nothing about the time of an update.

# Kernels on fewer parameters run on the event loop: handing them to a thread would cost more than they do.
INLINE_PARAMETERS_MAX = 65_536
# Parameters in several ranges take longer than as many in one: as if each range had about so many more.
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
        """Return whether work on that many parameters, gradients that wait included, may run on the event loop."""
        return num_parameters < self.inline_parameters_max

    async def compute(self, num_parameters: int, work: Callable[[], T]) -> T:
        """Run work on that many parameters: here when it is little, else on a thread."""
        return work() if self.is_little(num_parameters) else await self.begin(work)

    def begin(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Begin work on a thread. An error is not reported as lost if nothing waits for the work any more."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(look_at_error)
        return future

    def hand_over(self, work: Job) -> None:
        """Do work on a thread without waiting for it; do it here if the server ends and its threads have gone."""
        try:
            self._pool.submit(work)
        except RuntimeError:
            work()

    async def run_stages(self, *stages: Sequence[Job], on_end: Job) -> None:
        """Run jobs in stages and raise the first error; a stage begins when all jobs of the one before are done.

        When cancelled, no further job begins. Once no job runs and none will, `on_end` is called, on any thread.
        """
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def end() -> None:
            on_end()
            # The server, and with it the loop, may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, ended)

        run = _Stages(stages, executor=self, on_end=end)
        run.begin_stage()
        try:
            await ended
        except asyncio.CancelledError as error:
            run.cancel(error)
            raise
        if run.error is not None:
            raise run.error

    def run_together(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run independent jobs on the threads and return their results in order.

        Raise an error of one of them, once all have ended. Not for a caller on one of these threads: it waits for them.
        """
        futures = [Future[T]() for _ in jobs]
        for job, future in zip(jobs, futures, strict=True):
            self.hand_over(partial(_fulfil, future, job))
        wait(futures)
        return [future.result() for future in futures]

    def shutdown(self) -> None:
        """Wait until all work is done, and take no more."""
        self._pool.shutdown()


class _Stages:
    """Jobs in stages, on several threads in parallel; the thread that ends a stage begins the next.

    No thread waits for another: a thread that finds no job returns to its pool. After an error no stage begins.
    """

    def __init__(self, stages: Sequence[Sequence[Job]], *, executor: KernelExecutor, on_end: Job):
        self._executor = executor
        self._on_end = on_end
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        # Guarded by _lock: the stage's jobs that have not begun, how many are not done, and the stages after it.
        self._waiting: list[Job] = []
        self._num_open = 0
        self._stages = [list(reversed(stage)) for stage in reversed(stages) if stage]

    def begin_stage(self, *, threads_at_work: int = 0) -> None:
        """Begin the next stage on threads, some of which are at work already; after the last stage, end."""
        with self._lock:
            goes_on = self.error is None and bool(self._stages)
            if goes_on:
                self._waiting = self._stages.pop()
                self._num_open = len(self._waiting)
            num_threads = min(self._executor.threads, self._num_open) - threads_at_work
        if not goes_on:
            self._on_end()
            return
        for _ in range(num_threads):
            self._executor.hand_over(self._work)

    def cancel(self, error: BaseException) -> None:
        """Begin no further job. Unless none runs, the thread of the last job that does ends the stages."""
        with self._lock:
            self.error = self.error or error
            num_dropped = len(self._waiting)
            self._waiting.clear()
            self._num_open -= num_dropped
            ends_here = num_dropped > 0 and self._num_open == 0
        if ends_here:
            self._on_end()

    def _work(self) -> None:
        """Do jobs until none waits."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                job = self._waiting.pop()
            try:
                job()
            except BaseException as error:
                self.error = self.error or error
            with self._lock:
                self._num_open -= 1
                is_last = self._num_open == 0
            if is_last:
                self.begin_stage(threads_at_work=1)


def _fulfil(future: Future[T], job: Callable[[], T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)


def look_at_error(future: asyncio.Future[T]) -> None:
    """Mark a future's error as seen: asyncio reports any other when the future is dropped."""
    if not future.cancelled():
        future.exception()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
