"""How a missing server is waited for; all lines about its silence count by one clock."""

from __future__ import annotations

import re
import threading
import time

import pytest

from pyps.launcher.ports import free_port
from pyps_client import heartbeat
from pyps_client.connection import Connection
from pyps_client.heartbeat import Heartbeat
from pyps_client.launch import Launch
from pyps_client.retry import RetryPolicy, Silence, Wait
from pyps_wire.errors import RunFinished, ServerUnavailable
from pyps_wire.parameter_server_pb2 import HeartbeatRequest
from support import wait_until

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


PATIENT = RetryPolicy(60, "loss_wait_seconds", pause_first_seconds=0, report_first_seconds=0)


def test_a_silence_begins_with_the_first_failed_attempt_and_ends_with_an_answer() -> None:
    silence = Silence()
    assert silence.begin(5.0) == 5.0
    assert silence.begin(7.0) == 5.0
    assert silence.begin(4.0) == 4.0, "an attempt made before, told of later"
    silence.end()
    assert silence.begin(9.0) == 9.0


def test_a_wait_counts_from_the_attempt_that_failed_before_it_but_has_its_whole_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    silence = Silence()
    silence.begin(time.monotonic() - 100)
    wait = PATIENT.begin("server 0", stop=threading.Event(), silence=silence)

    wait.pause("connection refused")
    wait.end()

    seconds = [
        int(number) for record in caplog.records for number in re.findall(r"(?:for|after) (\d+) s", record.getMessage())
    ]
    assert len(seconds) == 2 and all(100 <= one < 130 for one in seconds)
    assert wait.remaining_seconds > 30
    now = time.monotonic()
    assert silence.begin(now) == now, "the server is there"
    # And so does progress begin a new silence.
    silence.begin(now - 100)
    wait.restart()
    assert silence.begin(now) == now


def test_heartbeats_and_waits_agree_on_how_long_a_server_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "SILENCE_SECONDS", 1.0)
    launch = Launch(servers=(f"127.0.0.1:{free_port()}",))
    connection = Connection(0, launch=launch)
    beats = Heartbeat(launch=launch, request=HeartbeatRequest, heard=lambda *answer: None)
    beats.keep(connection, 0.05)
    try:
        wait_until(lambda: "has not answered for" in caplog.text, what="the heartbeat's line")
        wait = PATIENT.begin(connection.name, stop=threading.Event(), silence=connection.silence)
        wait.pause("connection refused")
        wait.end()
    finally:
        beats.end()
        connection.close()
    [there] = re.findall(r"is there after (\d+) s", caplog.text)
    [silent, *_] = re.findall(r"has not answered for (\d+) s", caplog.text)
    assert int(there) >= int(silent) >= 1
