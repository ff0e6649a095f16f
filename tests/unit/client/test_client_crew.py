"""Tasks that run at the same time, one a server."""

from __future__ import annotations

import threading

import pytest

from pyps_client.crew import Crew


def test_results_come_in_order_and_tasks_run_at_once() -> None:
    crew = Crew()
    meeting = threading.Barrier(4)

    def task(_: threading.Event) -> int:
        return meeting.wait(timeout=60)

    # Two callers do not wait for each other.
    other = threading.Thread(target=crew.run, args=([task, task],))
    other.start()
    assert len(set(crew.run([task] * 2))) == 2
    other.join()
    assert crew.run([lambda _, i=i: i for i in range(5)]) == list(range(5))  # type: ignore[misc]
    crew.close()


def test_the_cause_is_raised_and_the_others_are_told_to_end() -> None:
    crew = Crew()

    def fail(_: threading.Event) -> None:
        raise ValueError("the cause")

    def wait(stop: threading.Event) -> None:
        assert stop.wait(60)
        raise RuntimeError("a consequence")

    with pytest.raises(ValueError, match="the cause"):
        crew.run([wait, fail])
    crew.close()


def test_closing_ends_waiting_tasks() -> None:
    crew = Crew()
    started = threading.Event()

    def wait(stop: threading.Event) -> bool:
        started.set()
        return stop.wait(60)

    threading.Thread(target=lambda: started.wait(60) and crew.close()).start()

    assert crew.run([wait]) == [True]


def test_ctrl_c_leaves_when_the_others_have_ended() -> None:
    crew = Crew()
    waiting = threading.Barrier(3)
    cut = threading.Event()
    ended: list[bool] = []

    def interrupted(_: threading.Event) -> None:
        waiting.wait(60)
        raise KeyboardInterrupt

    def wait(stop: threading.Event) -> None:
        waiting.wait(60)
        assert cut.wait(60)
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
        waiting.wait(60)
        raise KeyboardInterrupt

    def deaf(_: threading.Event) -> None:
        waiting.wait(60)
        release.wait(60)

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
