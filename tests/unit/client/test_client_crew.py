"""Tasks that run at the same time, one a server."""

from __future__ import annotations

import threading

import pytest

from pyps_client.crew import Crew


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
