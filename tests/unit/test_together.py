"""Jobs shared out among threads: all of them done, in order, whether threads are free or not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyps.service.together import run_together

WAIT_SECONDS = 60.0


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_results_come_in_the_order_of_the_jobs(executor: ThreadPoolExecutor) -> None:
    assert run_together(executor, [lambda i=i: i * i for i in range(50)]) == [i * i for i in range(50)]
    assert run_together(executor, []) == []


def test_jobs_run_side_by_side_where_threads_are_free(executor: ThreadPoolExecutor) -> None:
    barrier = threading.Barrier(3)

    places = run_together(executor, [lambda: barrier.wait(WAIT_SECONDS)] * 3)

    assert sorted(places) == [0, 1, 2]


def test_jobs_are_done_where_no_thread_ever_becomes_free(executor: ThreadPoolExecutor) -> None:
    release = threading.Event()
    for _ in range(2):
        executor.submit(release.wait, WAIT_SECONDS)
    try:
        assert run_together(executor, [lambda i=i: i for i in range(5)]) == list(range(5))
    finally:
        release.set()


def test_threads_that_all_share_out_jobs_do_not_wait_for_each_other(executor: ThreadPoolExecutor) -> None:
    outer = [lambda: sum(run_together(executor, [lambda: 1] * 5)) for _ in range(4)]

    assert run_together(executor, outer) == [5] * 4


def test_an_error_of_a_job_is_raised_once_all_have_ended(executor: ThreadPoolExecutor) -> None:
    def fail() -> int:
        raise ValueError("job 3")

    with pytest.raises(ValueError, match="job 3"):
        run_together(executor, [lambda: 1, lambda: 2, fail])


def test_jobs_are_done_after_the_threads_have_gone() -> None:
    executor = ThreadPoolExecutor(2)
    executor.shutdown()

    assert run_together(executor, [lambda: 1, lambda: 2]) == [1, 2]
