import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from pyps_client.transport.threads import Future, Threads
from pyps_wire.errors import RunFinished
from support import wait_until


def begun(threads: Threads, job: Callable[[], Any]) -> Future[Any]:
    future = Future(job)
    threads.start(future)
    return future


def test_the_first_failure_is_raised_and_ends_the_other_tasks():
    threads = Threads()

    def fail(_: threading.Event) -> None:
        raise ValueError("the cause")

    def wait(stop: threading.Event) -> None:
        assert stop.wait(60)
        raise RuntimeError("a consequence")

    with pytest.raises(ValueError, match="the cause"):
        threads.run([wait, fail])
    threads.close()


def test_ctrl_c_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr("pyps_client.transport.threads.END_SECONDS", 0.3)
    threads = Threads()
    waiting = threading.Barrier(2)
    release = threading.Event()

    def interrupted(_: threading.Event) -> None:
        waiting.wait(60)
        raise KeyboardInterrupt

    def deaf(_: threading.Event) -> None:
        waiting.wait(60)
        release.wait(60)

    with pytest.raises(KeyboardInterrupt):
        threads.run([interrupted, deaf])

    assert not release.is_set()
    release.set()
    threads.close()


def test_value_returns_a_jobs_result_or_raises_its_error_and_the_thread_is_reused():
    threads, release = Threads(), threading.Event()
    ran_on: list[threading.Thread] = []

    def job() -> bool:
        ran_on.append(threading.current_thread())
        return release.wait(60)

    future = begun(threads, job)
    assert not future.done()
    assert not future.wait(0.01)
    release.set()
    assert future.value() is True
    assert future.done()
    for error in (ValueError("no"), KeyboardInterrupt("no")):
        wait_until(lambda: threads._num_idle == 1, what="the thread to be idle")

        def fail(error: BaseException = error) -> bool:
            ran_on.append(threading.current_thread())
            raise error

        with pytest.raises(type(error), match="no"):
            begun(threads, fail).value()
    assert len(set(ran_on)) == 1
    threads.close()


def test_jobs_run_after_close():
    """A worker that takes leave makes its last calls when no other begin: they must not wait for threads that ended."""
    threads, release = Threads(), threading.Event()
    under_way = begun(threads, lambda: release.wait(60))
    threads.close()
    release.set()
    assert under_way.value()

    def told_to_end(stop: threading.Event) -> None:
        assert stop.is_set()
        raise RunFinished("the end")

    with pytest.raises(RunFinished):
        threads.run([told_to_end] * 3)
    assert begun(threads, lambda: 3).value() == 3


class InterruptedQueue:
    """Raises as Ctrl-C does, before or after it takes the next job."""

    def __init__(self, jobs: SimpleQueue[Any], *, takes: bool) -> None:
        self._jobs, self._takes = jobs, takes
        self.get = jobs.get

    def put(self, job: Any) -> None:
        if self._takes:
            self._jobs.put(job)
        raise KeyboardInterrupt


@pytest.mark.parametrize("takes", [False, True])
def test_a_job_whose_start_ctrl_c_interrupts_runs_or_is_over(takes):
    threads = Threads()
    assert begun(threads, lambda: 1).value() == 1
    wait_until(lambda: threads._num_idle == 1, what="the thread to be idle")
    interrupted: Future[int] = Future(lambda: 2)
    jobs = threads._jobs
    threads._jobs = InterruptedQueue(jobs, takes=takes)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        threads.start(interrupted)
    threads._jobs = jobs
    assert interrupted.wait(60)
    assert interrupted.value() in ((2, None) if takes else (None,))
    assert begun(threads, lambda: 3).value() == 3
    threads.close()
