"""Jobs that one caller waits for, shared out among the threads that are free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

T = TypeVar("T")


def run_together(executor: Executor, jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Runs jobs that touch nothing in common, in this thread and in those of the executor that are free.

    Returns what they return, in their order, once all have ended; raises an error of one. It never waits for a thread
    to become free, so that it may be called where all threads wait for their like.
    """
    results: dict[int, T] = {}
    left = deque(range(len(jobs)))

    def work() -> None:
        while True:
            try:
                index = left.popleft()
            except IndexError:
                return
            results[index] = jobs[index]()

    helpers = _helpers(executor, work, count=len(jobs) - 1)
    try:
        work()
    finally:
        begun = [helper for helper in helpers if not helper.cancel()]
        wait(begun)
    for helper in begun:
        helper.result()
    return [results[index] for index in range(len(jobs))]


def _helpers(executor: Executor, work: Callable[[], None], *, count: int) -> list[Future[None]]:
    try:
        return [executor.submit(work) for _ in range(count)]
    except RuntimeError:
        # The server ends, and its threads have gone.
        return []
