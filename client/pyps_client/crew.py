"""Runs one task a server at the same time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from pyps_client.retry import SIGNAL_SECONDS

T = TypeVar("T")

# How long tasks that were cut off may take to end, and how often they are cut off meanwhile.
END_SECONDS = 3.0
CUT_SECONDS = 0.1


class Crew:
    """Daemon threads, kept for reuse. Unlike a thread pool's, they do not hold up the interpreter's end."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._num_threads = 0
        self._running: set[threading.Event] = set()

    def run(
        self, tasks: Sequence[Callable[[threading.Event], T]], *, cut: Callable[[], object] = lambda: None
    ) -> list[T]:
        """Runs the tasks, the first on the calling thread, and returns their results in order.

        Each task gets an event that is set when another failed or the crew was closed: a task that waits
        should end then. The first failure is raised.

        Ctrl-C in the calling thread leaves only when the others have ended, or after END_SECONDS. `cut` makes what they
        wait for fail; it is called more than once, from the calling thread, with the event set.
        """
        if len(tasks) == 1:
            # With one server that is all there ever is, and nobody else's failure could end it.
            return [tasks[0](self._closed)]
        failed = threading.Event()
        jobs = [_Job(task, failed) for task in tasks]
        try:
            with self._lock:
                self._running.add(failed)
                if self._closed.is_set():
                    failed.set()
            for job in jobs[1:]:
                self._start(job)
            if jobs:
                jobs[0].execute()
            for job in jobs:
                while not job.done.wait(SIGNAL_SECONDS):
                    continue
        except BaseException:
            failed.set()
            _end(jobs, cut)
            raise
        finally:
            with self._lock:
                self._running.discard(failed)
        errors = [job for job in jobs if job.error is not None]
        if errors:
            first = min(errors, key=lambda job: job.order)
            assert first.error is not None
            raise first.error
        return [job.result for job in jobs]  # type: ignore[misc]

    def close(self) -> None:
        """Ends the idle threads, and the waits of tasks under way."""
        with self._lock:
            self._closed.set()
            for failed in self._running:
                failed.set()
            for _ in range(self._num_threads):
                self._jobs.put(None)
            self._num_threads = 0

    def _start(self, job: _Job[Any]) -> None:
        if not self._idle.acquire(blocking=False):
            with self._lock:
                self._num_threads += 1
                name = f"pyps-crew-{self._num_threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.execute()
            # The calling thread may hold big buffers in the task: keep none of it while idle.
            del job
            self._idle.release()


class _Job(Generic[T]):
    """One task, its result or error."""

    def __init__(self, task: Callable[[threading.Event], T], failed: threading.Event) -> None:
        self._task = task
        self._failed = failed
        # Held by who executes it, or sees to it that nobody will.
        self._claim = threading.Lock()
        self.done = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None
        # Place among the failures: 0 for the one that set `failed`, which is the cause of the others.
        self.order = 0

    def execute(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            self.result = self._task(self._failed)
        except Exception as error:
            self.error = error
            self.order = 1 if self._failed.is_set() else 0
            self._failed.set()
        finally:
            self.done.set()

    def call_off(self) -> None:
        """Ends a job that nobody has begun."""
        if self._claim.acquire(blocking=False):
            self.done.set()


def _end(jobs: Sequence[_Job[Any]], cut: Callable[[], object]) -> None:
    """Returns when no job is under way any more, or after END_SECONDS."""
    for job in jobs:
        job.call_off()
    deadline = time.monotonic() + END_SECONDS
    while not all(job.done.is_set() for job in jobs) and time.monotonic() < deadline:
        cut()
        for job in jobs:
            job.done.wait(CUT_SECONDS)
