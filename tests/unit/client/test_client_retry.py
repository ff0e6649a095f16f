"""How a missing server is waited for; all lines about its silence count by one clock, and tell of all that are lost."""

import contextlib
import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyps_client import lease
from pyps_client.launch import Launch
from pyps_client.lease import Lease
from pyps_client.retry import LinkLost, Outage, RetryPolicy, Wait
from pyps_client.transport.connection import Connection, Servers
from pyps_client.transport.grpc import GrpcChannel
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import RunFinished, ServerUnavailable
from pyps_wire.parameter_server_pb2 import HeartbeatRequest, HelloReply
from support import DEADLINE_SECONDS, server_port, wait_until

QUICK = RetryPolicy(0.05, "start_wait_seconds", pause_first_seconds=0.001, report_first_seconds=0)


def begin(policy: RetryPolicy = QUICK, stop: threading.Event | None = None) -> Wait:
    return policy.begin("server 1 (host:7610)", stop=stop or threading.Event(), advice="Look there. ")


def test_past_its_deadline_a_wait_names_server_seconds_problem_and_setting():
    wait = begin()

    with pytest.raises(
        ServerUnavailable,
        match=r"Waited \d+ s for server 1 \(host:7610\): connection refused. Look there. "
        r"Raise start_wait_seconds \(PYPS_START_WAIT_SECONDS\)",
    ):
        while True:
            # Some are whole sentences.
            wait.pause("connection refused.")


def test_closing_ends_a_pause_at_once():
    stop = threading.Event()
    stop.set()

    with pytest.raises(RunFinished, match="was closed while it waited for server 1"):
        begin(RetryPolicy(600, "x", pause_first_seconds=600), stop).pause("connection refused")


def test_progress_restarts_the_deadline():
    wait = begin(RetryPolicy(60, "x"))
    wait._started -= 59

    wait.restart()

    assert wait.remaining_seconds > 30


PATIENT = RetryPolicy(60, "loss_wait_seconds", pause_first_seconds=0, report_first_seconds=0)


def test_an_outage_begins_with_the_first_failed_attempt_and_ends_with_an_answer():
    outage = Outage()
    assert outage.note_failure("server 0", "reset", at=5.0) == 5.0
    assert outage.note_failure("server 0", "refused", at=7.0) == 5.0
    assert outage.note_failure("server 0", "no answer", at=4.0) == 4.0, "an attempt made before, told of later"
    outage.note_answer("server 0")
    assert outage.note_failure("server 0", "reset", at=9.0) == 9.0


def test_an_outage_of_several_servers_is_one_line_ever_more_rarely(caplog):
    now = 0.0
    outage = Outage(lambda: now)
    told: dict[float, str] = {}

    def attempts(seconds: int, names: str, *, waits: bool = True) -> None:
        nonlocal now
        for _ in range(seconds):
            now += 1.0
            for name in names:
                outage.note_failure(name, "reset", at=now)
                outage.log(name, first_seconds=1.0, left_seconds=600 - now if waits else None)
            told.update((now, record.getMessage()) for record in caplog.records)
            caplog.clear()

    attempts(100, "abc")
    assert list(told) == [2, 12, 32, 72]
    assert told[2] == "waiting for a, b, c: reset; for 1 s so far, at most 598 s more"

    # One more is lost, which is news; one that is back and lost again is none, nor are those that are back while others
    # are not.
    told.clear()
    attempts(3, "abcd")
    outage.note_answer("a")
    attempts(20, "abcde")
    for name in "abc":
        outage.note_answer(name)
    assert list(told) == [102, 112], "the fifth not so soon after the fourth"
    assert told[102] == "waiting for a, b, c, d: reset; for 101 s so far, at most 498 s more"
    attempts(100, "de", waits=False)
    assert list(told) == [102, 112, 192]
    assert told[192] == "no word from d, e: reset; for 91 s so far"
    now += 7
    outage.note_answer("d")
    outage.note_answer("e")
    assert caplog.messages == ["a, b, c, d, e are there after 229 s"]

    # As if nothing had been.
    caplog.clear()
    attempts(30, "d")
    assert [at - 230 for at in told if at > 230] == [2, 12]


def test_threads_that_wait_for_lost_servers_log_one_line(caplog):
    servers = Servers(Launch(servers=("one:1", "two:1", "three:1")), rejoin=lambda *_: None)
    back = threading.Event()
    lost = threading.Barrier(3)

    def operation(*_: object) -> None:
        if not back.is_set():
            if not caplog.records:
                with contextlib.suppress(threading.BrokenBarrierError):
                    lost.wait(DEADLINE_SECONDS)
                    lost.abort()
            raise LinkLost("the connection was reset")

    with ThreadPoolExecutor(1) as pool:
        all_of_them = pool.submit(servers.on_all, [operation] * 3)
        wait_until(lambda: "waiting for" in caplog.text, what="a line")
        back.set()
        all_of_them.result(DEADLINE_SECONDS)
    servers.close()

    lines = [re.sub(r"\d+ s", "N s", message) for message in caplog.messages]
    which = [f"server {index} ({address})" for index, address in enumerate(("one:1", "two:1", "three:1"))]
    assert [len(lines), *(name in line for line in lines for name in which)] == [2, *[True] * 6]
    assert "are there after N s" in lines[1]


def test_an_answered_heartbeat_does_not_end_another_threads_wait(caplog):
    outage = Outage()
    wait = PATIENT.begin("server 0", stop=threading.Event(), outage=outage)
    for _ in range(3):
        wait.pause("it has no memory to spare")
        outage.note_answer("server 0")
    assert len(caplog.messages) == 1
    wait.end()
    assert len(caplog.messages) == 2

    # Whoever gives up leaves it to others to hear of it.
    given_up = PATIENT.begin("server 0", stop=threading.Event(), outage=outage)
    given_up.pause("the connection was reset")
    given_up.give_up()
    outage.note_answer("server 0")
    assert caplog.messages[-1] == "server 0 is there after 0 s"


def test_a_wait_counts_from_the_failure_and_has_its_deadline(caplog):
    outage = Outage()
    outage.note_failure("server 0", "no answer", at=time.monotonic() - 100)
    wait = PATIENT.begin("server 0", stop=threading.Event(), outage=outage)

    wait.pause("connection refused")
    assert wait.remaining_seconds > 30
    wait.end()

    seconds = [
        int(number) for record in caplog.records for number in re.findall(r"(?:for|after) (\d+) s", record.getMessage())
    ]
    assert len(seconds) == 2 and all(100 <= one < 130 for one in seconds)
    now = time.monotonic()
    assert outage.note_failure("server 0", "reset", at=now) == now, "the server is there"
    # And so does progress begin a new silence.
    outage.note_failure("server 0", "reset", at=now - 100)
    PATIENT.begin("server 0", stop=threading.Event(), outage=outage).restart()
    assert outage.note_failure("server 0", "reset", at=time.monotonic()) >= now


def test_heartbeats_take_a_new_channel_after_each_loss(monkeypatch):
    made: list[GrpcChannel] = []
    dial = Connection._dial

    def dialled(self: Connection, address: str) -> GrpcChannel:
        made.append(dial(self, address))
        return made[-1]

    monkeypatch.setattr(Connection, "_dial", dialled)
    launch = Launch(servers=(f"127.0.0.1:{server_port()}",), transport="grpc")
    beats = Lease(Sender(), launch=launch, request=HeartbeatRequest, on_reply=lambda *answer: None)
    beats.greeted(Connection(0, launch=launch), HelloReply(heartbeat_seconds=0.01))
    try:
        wait_until(lambda: len(made) > 2, what="a channel after each loss")
    finally:
        beats.end()


def test_heartbeats_and_waits_agree(monkeypatch, caplog):
    monkeypatch.setattr(lease, "SILENCE_SECONDS", 1.0)
    launch = Launch(servers=(f"127.0.0.1:{server_port()}",))
    connection = Connection(0, launch=launch)
    beats = Lease(Sender(), launch=launch, request=HeartbeatRequest, on_reply=lambda *answer: None)
    beats.greeted(connection, HelloReply(heartbeat_seconds=0.05))
    try:
        wait_until(lambda: "no word from" in caplog.text, what="the heartbeat's line")
        wait = PATIENT.begin(connection.name, stop=threading.Event(), outage=connection.outage)
        wait.pause("connection refused")
        wait.end()
    finally:
        beats.end()
        connection.close()
    [there] = re.findall(r"is there after (\d+) s", caplog.text)
    [silent, *_] = re.findall(r"; for (\d+) s so far", caplog.text)
    assert int(there) >= int(silent) >= 1


def test_a_place_is_told_when_the_server_moves_and_not_at_each_look_for_its_standby(caplog):
    caplog.set_level(logging.INFO)
    with contextlib.closing(Connection(0, launch=Launch(servers=("127.0.0.1:1",)))) as connection:
        connection.note_standby("127.0.0.1:2")
        looked = []
        for _ in range(4):
            looked.append(connection.channel and connection.address)
            connection.cancel()
    assert [address[-1] for address in looked] == ["1", "2", "1", "2"]
    assert "now" not in caplog.text
