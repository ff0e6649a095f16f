"""Runs one task a server at the same time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


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

    def run(self, tasks: Sequence[Callable[[threading.Event], T]]) -> list[T]:
        """Runs the tasks, the first on the calling thread, and returns their results in order.

        Each task gets an event that is set when another failed or the crew was closed: a task that waits
        should end then. The first failure is raised.
        """
        if len(tasks) == 1:
            # With one server that is all there ever is, and nobody else's failure could end it.
            return [tasks[0](self._closed)]
        failed = threading.Event()
        with self._lock:
            self._running.add(failed)
            if self._closed.is_set():
                failed.set()
        jobs = [_Job(task, failed) for task in tasks]
        for job in jobs[1:]:
            self._start(job)
        try:
            if jobs:
                jobs[0].execute()
            for job in jobs:
                job.done.wait()
        except BaseException:
            # Ctrl-C in the calling thread: the others end by themselves.
            failed.set()
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
        self.done = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None
        # Place among the failures: 0 for the one that set `failed`, which is the cause of the others.
        self.order = 0

    def execute(self) -> None:
        try:
            self.result = self._task(self._failed)
        except Exception as error:
            self.error = error
            self.order = 1 if self._failed.is_set() else 0
            self._failed.set()
        finally:
            self.done.set()
