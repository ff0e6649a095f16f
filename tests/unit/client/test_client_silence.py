"""All lines about a server that does not answer count by one clock."""

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
from pyps_client.retry import RetryPolicy, Silence
from pyps_wire.parameter_server_pb2 import HeartbeatRequest
from support import wait_until

POLICY = RetryPolicy(60, "loss_wait_seconds", pause_first_seconds=0, report_first_seconds=0)


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
    wait = POLICY.begin("server 0", stop=threading.Event(), silence=silence)

    wait.pause("connection refused")
    wait.end()

    seconds = [
        int(number) for record in caplog.records for number in re.findall(r"(?:for|after) (\d+) s", record.getMessage())
    ]
    assert len(seconds) == 2 and all(100 <= one < 130 for one in seconds)
    assert wait.remaining_seconds > 30
    now = time.monotonic()
    assert silence.begin(now) == now, "the server is there"


def test_progress_begins_a_new_silence() -> None:
    silence = Silence()
    silence.begin(time.monotonic() - 100)
    wait = POLICY.begin("server 0", stop=threading.Event(), silence=silence)
    wait.restart()
    now = time.monotonic()
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
        wait = POLICY.begin(connection.name, stop=threading.Event(), silence=connection.silence)
        wait.pause("connection refused")
        wait.end()
    finally:
        beats.end()
        connection.close()
    [there] = re.findall(r"is there after (\d+) s", caplog.text)
    [silent, *_] = re.findall(r"has not answered for (\d+) s", caplog.text)
    assert int(there) >= int(silent) >= 1
