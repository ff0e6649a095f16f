"""Tasks that run at the same time, one a server."""

from __future__ import annotations

import threading

import pytest

from pyps_client.crew import Crew


def test_results_come_in_order_and_tasks_run_at_once() -> None:
    crew = Crew()
    meeting = threading.Barrier(3)

    def task(_: threading.Event) -> int:
        return meeting.wait(timeout=10)

    assert sorted(crew.run([task] * 3)) == [0, 1, 2]
    assert crew.run([lambda _, i=i: i for i in range(5)]) == list(range(5))  # type: ignore[misc]
    crew.close()


def test_two_callers_do_not_wait_for_each_other() -> None:
    crew = Crew()
    meeting = threading.Barrier(4)

    def task(_: threading.Event) -> int:
        return meeting.wait(timeout=10)

    other = threading.Thread(target=crew.run, args=([task, task],))
    other.start()
    crew.run([task, task])
    other.join()
    crew.close()


def test_the_cause_is_raised_and_the_others_are_told_to_end() -> None:
    crew = Crew()

    def fail(_: threading.Event) -> None:
        raise ValueError("the cause")

    def wait(stop: threading.Event) -> None:
        assert stop.wait(10)
        raise RuntimeError("a consequence")

    with pytest.raises(ValueError, match="the cause"):
        crew.run([wait, fail])
    crew.close()


def test_closing_ends_waiting_tasks() -> None:
    crew = Crew()
    started = threading.Event()

    def wait(stop: threading.Event) -> bool:
        started.set()
        return stop.wait(10)

    threading.Thread(target=lambda: started.wait(10) and crew.close()).start()

    assert crew.run([wait]) == [True]


def test_threads_are_used_again() -> None:
    crew = Crew()
    crew.run([lambda _: None] * 2)
    before = threading.active_count()

    for _ in range(20):
        crew.run([lambda _: None] * 2)

    assert threading.active_count() <= before + 1
    crew.close()


def test_ctrl_c_leaves_when_the_others_have_ended() -> None:
    crew = Crew()
    waiting = threading.Barrier(3)
    cut = threading.Event()
    ended: list[bool] = []

    def interrupted(_: threading.Event) -> None:
        waiting.wait(10)
        raise KeyboardInterrupt

    def wait(stop: threading.Event) -> None:
        waiting.wait(10)
        assert cut.wait(10)
        ended.append(stop.is_set())

    with pytest.raises(KeyboardInterrupt):
        crew.run([interrupted, wait, wait], cut=cut.set)

    assert ended == [True, True]
    crew.close()


def test_ctrl_c_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyps_client.crew.END_SECONDS", 0.3)
    crew = Crew()
    waiting = threading.Barrier(2)
    release = threading.Event()

    def interrupted(_: threading.Event) -> None:
        waiting.wait(10)
        raise KeyboardInterrupt

    def deaf(_: threading.Event) -> None:
        waiting.wait(10)
        release.wait(20)

    with pytest.raises(KeyboardInterrupt):
        crew.run([interrupted, deaf])

    assert not release.is_set()
    release.set()
    crew.close()


def test_a_task_that_nobody_has_begun_is_not_begun_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew()
    begun: list[int] = []

    def interrupt(job: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(crew, "_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        crew.run([lambda _, i=i: begun.append(i) for i in range(3)])  # type: ignore[misc]

    assert begun == []
    crew.close()
