"""Threads: one task a server, or a push while the next gradient is computed."""

from __future__ import annotations

import _thread
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from pyps_client import fork
from pyps_client.fork import ForkGuard
from pyps_client.retry import SIGNAL_SECONDS

T = TypeVar("T")

# How long cancelled tasks may take to end, and how often their waits are cancelled.
END_SECONDS = 3.0
CANCEL_SECONDS = 0.1


class Future(Generic[T]):
    """A job on another thread, and its result."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job: Callable[[], T] | None = job
        # Held by the thread that runs or cancels it.
        self._claim = _thread.allocate_lock()
        # Held until it is over: a bare lock, since an Event costs ten calls.
        self._under_way = _thread.allocate_lock()
        self._under_way.acquire()
        self._is_over = False
        self._result: T | None = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self._is_over

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait until the job has ended, or for so long; return whether it has ended."""
        until = time.monotonic() + seconds
        while not self._is_over and (left := until - time.monotonic()) > 0:
            if self._under_way.acquire(timeout=min(left, SIGNAL_SECONDS)):
                self._under_way.release()
        return self._is_over

    def value(self) -> T:
        """Wait until the job has ended, and return its result, or raise its error; once."""
        if not self._is_over:
            self.wait()
        if self.error is not None:
            error, self.error = self.error, None
            try:
                raise error
            finally:
                # Its traceback holds this frame, and the job's objects.
                del error
        result, self._result = self._result, None
        return result  # type: ignore[return-value]

    def run(self) -> None:
        """Run the job, unless it was cancelled or another thread runs it."""
        if not self._claim.acquire(blocking=False):
            return
        assert self._job is not None
        try:
            self._result = self._job()
        except BaseException as error:
            self.error = error
            if not isinstance(error, Exception):
                # A signal's error, such as KeyboardInterrupt, which the running thread must not miss.
                raise
        finally:
            self._end()

    def cancel(self) -> None:
        """End a job that no thread has begun; its value is None."""
        if self._claim.acquire(blocking=False):
            self._end()

    def _end(self) -> None:
        # It may hold big buffers.
        self._job = None
        self._is_over = True
        self._under_way.release()


class Threads:
    """Daemon threads, kept for reuse: they do not delay the interpreter's end, and a forked child has none."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self._guard = ForkGuard()
        self._jobs: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Guarded by _lock: the threads that wait for a job, but for those whose job is in the queue.
        self._num_idle = 0
        self._running: set[threading.Event] = set()

    def start(self, job: Future[Any]) -> None:
        """Start a job, which the caller keeps before: Ctrl-C may interrupt this call, and the job runs or is over."""
        if self._guard.generation != fork.generation:
            self._guard.check()
        try:
            with self._lock:
                has_idle = self._num_idle > 0
                self._num_idle -= has_idle
            if has_idle:
                self._jobs.put(job)
            else:
                # The job is an argument, not in the queue: so no idle thread of an ending caller is needed.
                threading.Thread(target=self._work, args=([job],), name="pyps", daemon=True).start()
        except BaseException:
            job.cancel()
            raise

    def run(
        self, tasks: Sequence[Callable[[threading.Event], T]], *, cancel: Callable[[], object] = lambda: None
    ) -> list[T]:
        """Run the tasks, the first on the calling thread; return their results in order, or raise the first failure.

        Each task gets an event that is set when another failed or this was closed: then it must end its waits.

        After Ctrl-C this returns only when all tasks have ended, or after END_SECONDS. Meanwhile the calling thread
        calls `cancel`, more than once, to make the calls fail for which tasks wait.
        """
        stop = threading.Event()
        failures: list[Exception] = []
        jobs = [Future(partial(_attempt, task, stop, failures)) for task in tasks]
        try:
            with self._lock:
                self._running.add(stop)
                if self.closed.is_set():
                    stop.set()
            for job in jobs[1:]:
                self.start(job)
            if jobs:
                jobs[0].run()
            for job in jobs:
                job.wait()
        except BaseException:
            stop.set()
            for job in jobs:
                job.cancel()
            deadline = time.monotonic() + END_SECONDS
            while not all(job.done() for job in jobs) and time.monotonic() < deadline:
                cancel()
                for job in jobs:
                    job.wait(CANCEL_SECONDS)
            raise
        finally:
            with self._lock:
                self._running.discard(stop)
        if failures:
            raise failures[0]
        return [job.value() for job in jobs]

    def close(self) -> None:
        """End the threads, each after its job, and the waits of tasks under way."""
        with self._lock:
            self.closed.set()
            for stop in self._running:
                stop.set()
            # No more than the idle threads: a later thread would take another.
            for _ in range(self._num_idle):
                self._jobs.put(None)
            self._num_idle = 0

    def _work(self, first: list[Future[Any]]) -> None:
        # Taken out of the list, since a thread keeps its arguments.
        job: Future[Any] | None = first.pop()
        while job is not None:
            with contextlib.suppress(BaseException):  # `value` raises it
                job.run()
            # The result may hold large buffers.
            del job
            with self._lock:
                if self.closed.is_set():
                    return
                self._num_idle += 1
            job = self._jobs.get()


def _attempt(task: Callable[[threading.Event], T], stop: threading.Event, failures: list[Exception]) -> T:
    try:
        return task(stop)
    except Exception as error:
        failures.append(error)
        stop.set()
        raise
