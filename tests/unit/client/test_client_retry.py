"""How a missing server is waited for."""

from __future__ import annotations

import random
import re
import threading

import pytest

from pyps_client.retry import RetryPolicy, Wait
from pyps_wire.errors import RunFinished, ServerUnavailable, WaitTimedOut

QUICK = RetryPolicy(0.05, "start_wait_seconds", pause_first_seconds=0.001, report_first_seconds=0, report_seconds=0.01)


def begin(policy: RetryPolicy = QUICK, stop: threading.Event | None = None) -> Wait:
    return policy.begin("server 1 (host:7610)", stop=stop or threading.Event(), advice="Look there. ")


def test_past_its_deadline_a_wait_names_server_seconds_problem_and_setting() -> None:
    wait = begin()

    with pytest.raises(
        ServerUnavailable,
        match=r"Waited \d+ s for server 1 \(host:7610\): connection refused. Look there. "
        r"Raise start_wait_seconds \(PYPS_START_WAIT_SECONDS\)",
    ):
        while True:
            wait.pause("connection refused")


def test_the_error_may_be_another() -> None:
    with pytest.raises(WaitTimedOut):
        begin(RetryPolicy(0, "x")).pause("nobody came", WaitTimedOut)


def test_lines_tell_what_is_waited_for_and_how_long_still(caplog: pytest.LogCaptureFixture) -> None:
    wait = begin(RetryPolicy(9, "x", pause_first_seconds=0, report_first_seconds=0))

    wait.pause("connection refused")
    wait.pause("connection refused")
    wait.end()

    waiting, there = (record.getMessage() for record in caplog.records)
    assert "waiting for server 1 (host:7610): connection refused" in waiting
    assert re.search(r"at most [1-9] s more", waiting)
    assert re.fullmatch(r"server 1 \(host:7610\) is there after \d s", there)


def test_a_long_pause_does_not_put_off_the_next_line(caplog: pytest.LogCaptureFixture) -> None:
    policy = RetryPolicy(
        *(600, "x"), pause_first_seconds=600, pause_max_seconds=600, report_first_seconds=0.01, report_seconds=0.01
    )
    wait = begin(policy)

    for _ in range(3):
        wait.pause("connection refused")

    assert len(caplog.records) >= 2


def test_closing_ends_a_pause_at_once() -> None:
    stop = threading.Event()
    stop.set()

    with pytest.raises(RunFinished, match="was closed while it waited for server 1"):
        begin(RetryPolicy(600, "x", pause_first_seconds=600), stop).pause("connection refused")


def test_progress_starts_the_deadline_anew() -> None:
    wait = begin(RetryPolicy(60, "x"))
    wait._started -= 59

    wait.restart()

    assert wait.remaining_seconds > 30


def test_jitter_leaves_the_programs_seed_alone() -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)

    begin().pause("x")

    assert random.random() == expected
