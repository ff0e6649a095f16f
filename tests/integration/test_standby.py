"""A standby in this process: it follows with every bit and takes over, and its server gives way."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from certified import served, shown
from client_support import Reference, gradients_like, make_client, small_model
from pyps.certificates import Authority
from pyps.config import ServerConfig
from pyps.control import Control
from pyps.service.standby import follower
from pyps.service.standby.feed import BACKLOG_BYTES_MAX, Feed, Line
from pyps.service.standby.link import own_address
from pyps.storage.checkpoint import CheckpointError
from pyps.storage.folder import newest
from pyps_client.data import Portions
from pyps_wire import inspector_pb2 as pb
from pyps_wire import standby_pb2 as wire
from pyps_wire.common_pb2 import REASON_EPOCH, RUN_STATE_FINISHED
from pyps_wire.contract import METHODS
from pyps_wire.errors import ServerUnavailable
from support import DEADLINE_SECONDS, checksums, server_loop, shell, status_of, wait_for_event, wait_until

LEASE = ("--standby-lease-seconds", "2")
# Workers hear of a standby by heartbeats.
QUICK = ("--heartbeat-seconds", "0.1")
# By their names; the first belongs to another machine.
HOSTS = {"server-0": "203.0.113.1", "standby-0": "127.0.0.1"}


def follow(start_server, primary, *clients, flags=()):
    """Start a standby that has all shards, and of which the clients know, when this returns."""
    standby = start_server("--standby-of", primary.data, *LEASE, *QUICK, *flags)
    standby.wait_for_output("all shards are here")
    for client in clients:
        assert standby.data in client.session._servers.connections[0]._elsewhere
    return standby


class ByHand:
    """A standby's call of `Follow`, message by message."""

    def __init__(self, server, address="127.0.0.1:9", lease_seconds=5.0):
        self._said, self._heard, self._ended = queue.Queue(), queue.Queue(), Future()
        self._channel = grpc.insecure_channel(server.data, [("grpc.use_local_subchannel_pool", 1)])
        self._call = self._channel.stream_stream(METHODS["Follow"])(iter(self._said.get, None))
        self.say(address=address, lease_seconds=lease_seconds)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        try:
            for message in self._call:
                self._heard.put(message)
            self._ended.set_result("")
        except grpc.RpcError as error:
            self._ended.set_result(error.details())

    @property
    def has_heard(self):
        return not self._heard.empty()

    def say(self, message=None, **fields):
        self._said.put(message if message is not None else wire.FollowRequest(**fields).SerializeToString())

    def hear(self):
        return self._heard.get(timeout=DEADLINE_SECONDS)

    def refusal(self):
        return self._ended.result(DEADLINE_SECONDS)

    def close(self):
        self._said.put(None)
        self._call.cancel()
        self._channel.close()


@pytest.fixture
def by_hand():
    """Return a function that begins a call of a standby, which the test's end ends."""
    calls = []

    def begin(*arguments, **named):
        calls.append(ByHand(*arguments, **named))
        return calls[-1]

    yield begin
    for call in calls:
        call.close()


def test_a_second_standby_that_said_who_it_is_before_the_first_followed_is_refused(start_server, by_hand):
    primary = start_server(*QUICK)
    with make_client(primary.data) as client:
        slow = by_hand(primary)
        slow.hear()
        standby = follow(start_server, primary, client)
        slow.say(begin=True)
        assert f"this server has a standby, {standby.data}: it takes one" in slow.refusal()
        client.push(gradients_like(small_model(), 0))
        assert status_of(primary).standby.startswith(f"{standby.data} follows")


def test_of_two_calls_of_a_standby_at_once_one_is_served(start_server, by_hand):
    primary = start_server(*QUICK)
    with make_client(primary.data):
        first, *later = calls = [by_hand(primary, lease_seconds=1000.0) for _ in range(3)]
        for call in calls:
            call.hear()
        first.say(begin=True)
        first.hear()
        for call in later:
            call.say(begin=True)
        wait_until(lambda: any(call.has_heard for call in later), what="a call that goes on")

        def served():
            return [task for task in asyncio.all_tasks(server_loop()) if "Primary._send" in repr(task)]

        wait_until(lambda: len(served()) == 1, what="the end of the other calls")


@pytest.mark.parametrize(
    ("address", "lease_seconds", "words"),
    [
        ("nonsense", 1.0, "host:port"),
        ("", 1.0, "host:port"),
        ("[::]:abc", 1.0, "host:port"),
        ("127.0.0.1:65536", 1.0, "host:port"),
        ("a" * 100_000 + ":1", 1.0, "host:port"),
        *[("127.0.0.1:9", seconds, "lease") for seconds in (float("nan"), float("inf"), -1.0, 1e-300, 1e9)],
    ],
)
def test_a_standby_without_a_place_or_a_lease_is_refused_in_a_sentence(
    start_server, by_hand, address, lease_seconds, words
):
    refused = by_hand(start_server(), address, lease_seconds).refusal()
    assert words in refused and len(refused) < 300


BROKEN = [
    (False, b"\xff" * 100),
    (True, b"\xff" * 100),
    (True, wire.FollowRequest(again=[77]).SerializeToString()),
]


def test_what_is_no_message_of_a_standby_is_refused_and_the_server_goes_on(start_server, by_hand):
    primary = start_server(*QUICK)
    with make_client(primary.data) as client:
        for has_begun, message in BROKEN:
            call = by_hand(primary)
            call.hear()
            if has_begun:
                call.say(begin=True)
                call.hear()
            call.say(message)
            refused = call.refusal()
            assert "FollowRequest" in refused or "shard 77 is none of this server's" in refused
        client.push(gradients_like(small_model(), 0))
        assert "Traceback" not in primary.output()


def step_both(client, reference, gradients):
    """Push, once more where another server has refused it as one of an earlier life, and compare every bit."""
    reference.step(gradients)
    if {receipt.reason for receipt in client.push(gradients)} == {REASON_EPOCH}:
        client.pull()
        client.push(gradients)
    reference.check(client.pull())


def test_answers_wait_where_pushes_come_faster_than_a_standby_gets_its_first_copy():
    async def play():
        feed = Feed()
        feed.open()
        while not feed.holds:
            feed.add(Line({}, bytes(2**20)))
        assert feed.recorded == BACKLOG_BYTES_MAX // 2**20 + 1
        answer = feed.wait()
        while feed.holds:
            assert feed.take()
        assert feed.recorded - len(feed._queue) > BACKLOG_BYTES_MAX // 2**21
        feed.note_received(feed.recorded)
        assert answer.done() and not feed.guards

    asyncio.run(play())


@pytest.mark.parametrize("transport", ["grpc", "tcp", "shm"])
def test_a_standby_goes_on_with_the_same_bits_when_its_server_is_drained(start_server, transport):
    tensors = small_model()
    reference = Reference(tensors)
    primary = start_server(*QUICK)
    with make_client(primary.data, transport=transport) as client:
        for step in range(10):
            if step == 3:
                standby = follow(start_server, primary, client)
            if step == 6:
                drained = shell("drain", "--servers", primary.control)
                assert standby.data in drained
                assert primary.wait() == 0
            step_both(client, reference, gradients_like(tensors, step))
        assert status_of(standby).epoch == 1
        assert "took over" in status_of(standby).standby
        assert {version for version, _ in checksums(standby.control).values()} == {10}
        # No checkpoint holds what a standby has, so that workers keep it.
        assert status_of(standby).durable_version == 0


def test_an_operator_makes_a_standby_take_over_and_a_server_in_the_old_place_gives_way(start_server):
    tensors = small_model()
    reference = Reference(tensors)
    primary = start_server(*QUICK)
    with make_client(primary.data, run_id="r") as client:
        step_both(client, reference, gradients_like(tensors, 0))
        standby = follow(start_server, primary, client)
        told = shell("status", "--servers", standby.data)
        assert " standby " in told and "no run yet" not in told
        assert (status_of(standby).run_id, status_of(standby).version_max) == ("r", 1)
        shell("promote", "--servers", standby.data)
        assert primary.wait() == 0
        step_both(client, reference, gradients_like(tensors, 1))
        assert "serves already" in shell("promote", "--servers", standby.data, status=1)

        empty = start_server("--port", primary.data.rpartition(":")[2], "--run-id", "r")
        assert empty.wait() == 0
        assert f"{standby.data} has taken over run 'r' under epoch 1" in empty.output()


def test_a_standby_that_leaves_or_cannot_follow_is_done_without(start_server):
    primary = start_server(*QUICK)
    with make_client(primary.data) as client:
        standby = follow(start_server, primary, client)
        second = start_server("--standby-of", primary.data, *LEASE)
        assert second.wait() == 1
        assert f"this server has a standby, {standby.data}: it takes one" in second.output()

        assert standby.stop() == 0
        client.push(gradients_like(small_model(), 0))
        wait_for_event(primary, "standby", "the server goes on alone: its standby has left")
        assert "has no standby" in shell("drain", "--servers", primary.control, status=1)

    coordinated = start_server("--protocol", "sandblaster", "--run-id", "r")
    make_client(coordinated.data, run_id="r").close()
    refused = start_server("--standby-of", coordinated.data, *LEASE)
    assert refused.wait() == 1
    assert "coordinated by Sandblaster" in refused.output()


def test_a_standby_shows_operators_credentials_and_knows_what_portions_are_done(start_server, made, tmp_path):
    token = tmp_path / "token"
    token.write_text("a-token-of-workers")
    operators = tmp_path / "operators"
    operators.write_text("a-token-of-operators")
    flags = [*served(made / "sound", mutual=True), "--token-file", str(token), "--operator-token-file", str(operators)]
    primary = start_server(*QUICK, *flags)
    options = {"token": token.read_text(), **shown(made / "sound", mutual=True)}
    with make_client(primary.data, **options) as client:
        seen = []
        for number, batch in enumerate(Portions(range(40), client, batch_size=5, portion_batches=1)):
            seen += batch
            if number == 2:
                follow(start_server, primary, client, flags=flags)
            if number == 5:
                primary.stop()
            client.exchange(gradients_like(small_model(), number))
        # The portion that it had at the takeover is handed out again.
        assert set(seen) == set(range(40))
        assert len(seen) <= 45


def test_a_standby_on_every_interface_is_found_by_the_name_of_this_machine_in_its_certificate(tmp_path, monkeypatch):
    lookup = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **named: lookup(HOSTS[host], *more, **named))
    Authority(tmp_path, create=True).make_server(["server-0", "standby-0"], days=1)
    certified = ServerConfig(tls_cert=tmp_path / "server.crt", tls_key=tmp_path / "server.key")
    assert own_address(certified, "0.0.0.0:7610") == "standby-0:7610"
    assert own_address(certified, "127.0.0.1:7610") == "127.0.0.1:7610"
    assert own_address(ServerConfig(), "[::]:7610") == "[::]:7610"
    monkeypatch.setitem(HOSTS, "standby-0", "203.0.113.1")
    with pytest.raises(ServerUnavailable, match="is for server-0, standby-0, which is no address of this machine"):
        own_address(certified, "0.0.0.0:7610")


@pytest.mark.parametrize("first", ["server", "standby"])
def test_a_server_and_its_standby_that_are_ended_at_once_leave_a_checkpoint_of_all(start_server, tmp_path, first):
    kept = ("--checkpoint-dir", str(tmp_path))
    primary = start_server(*QUICK, *kept)
    with make_client(primary.data) as client:
        standby = follow(start_server, primary, client, flags=kept)
        for step in range(3):
            client.push(gradients_like(small_model(), step))
        own = standby._server._follower

        async def end():
            both = [primary, standby] if first == "server" else [standby, primary]
            both[0]._server.stop("a signal to all")
            while not (own._reason or own._leaves):
                await asyncio.sleep(0)
            both[1]._server.stop("a signal to all")

        asyncio.run_coroutine_threadsafe(end(), server_loop())
        assert (primary.wait(), standby.wait()) == (0, 0)
    assert {*newest(tmp_path).versions.values()} == {3}


@pytest.mark.parametrize("has_run", [True, False])
def test_a_standby_of_another_run_in_the_noted_place_is_no_standby_of_this_one(start_server, tmp_path, has_run):
    kept = ("--checkpoint-dir", str(tmp_path))
    if has_run:
        former = start_server(*kept)
        make_client(former.data, run_id="r").close()
        former.stop()
    primary = start_server(*QUICK)
    with make_client(primary.data, run_id="another") as client:
        standby = follow(start_server, primary, client)
        for _ in range(2):
            tmp_path.mkdir(exist_ok=True)
            (tmp_path / "standby").write_text(f"{standby.data}\nr\n0\n", encoding="utf-8")
            again = start_server(*kept, "--resume")
            wait_for_event(again, "standby", "the server goes on alone: what is at its standby's address")
            again.stop()
            if primary.running:
                assert "follows" in status_of(standby).standby
                shell("promote", "--servers", standby.control)
                primary.wait()


def test_a_server_that_begins_again_and_again_gives_way_to_a_standby_that_has_begun_again_too(start_server, tmp_path):
    first, second = (("--checkpoint-dir", str(tmp_path / name)) for name in ("first", "second"))
    primary = start_server(*QUICK, *first)
    with make_client(primary.data, run_id="r") as client:
        standby = follow(start_server, primary, client, flags=second)
        shell("save", "--servers", primary.control)
        assert (tmp_path / "first" / "epoch").read_text() == "1\n", "that of the standby, which may have no folder"
        shell("promote", "--servers", standby.control)
        primary.wait()
        client.push(gradients_like(small_model(), 0))
    standby.stop()
    back = start_server(*second, "--resume")
    (tmp_path / "first" / "standby").write_text(f"{back.data}\nr\n0\n", encoding="utf-8")
    # Each start that gave way has claimed one.
    (tmp_path / "first" / "epoch").write_text("9\n", encoding="utf-8")
    again = start_server(*first, "--resume")
    again.wait_for_output(f"{back.data} has taken over run 'r' under epoch 2")
    assert again.wait() == 0
    back.stop()
    alone = start_server(*first, "--resume")
    wait_for_event(alone, "standby", "the server goes on alone: its standby has ended")


@pytest.mark.parametrize(
    "note", [b"\xff\xfe\x00", b"", b"garbage", b"host:notaport\n", b"127.0.0.1:99999\nr\n0\n", b"127.0.0.1:1\nr\n"]
)
def test_a_damaged_note_of_the_standby_is_named(start_server, tmp_path, note):
    (tmp_path / "standby").write_bytes(note)
    with pytest.raises(CheckpointError, match=r"standby should name the standby .* remove the file if"):
        start_server("--checkpoint-dir", str(tmp_path), "--resume")


CHANGES = {
    "Configure": pb.ConfigureRequest(learning_rate=0.5),
    "Stop": pb.StopRequest(),
    "Reset": pb.ResetRequest(run_id="r"),
}


@pytest.mark.parametrize("call", [*CHANGES, "grpc", "tcp", "shm", "full"])
def test_a_change_or_a_push_is_answered_once_the_standby_has_it_and_holds_after_a_takeover(
    start_server, monkeypatch, call
):
    primary = start_server(*QUICK)
    # A lane answers so long a push on a thread.
    tensors, transport = {"w": np.ones(40_000, np.float32)}, call if call in ("tcp", "shm") else "grpc"
    client = make_client(primary.data, run_id="r", tensors=tensors, shard_size=2**16, transport=transport)
    control, applies = Control(primary.control, token="", timeout_seconds=30), threading.Event()
    with ThreadPoolExecutor(1) as pool, client, control:
        standby = follow(start_server, primary, client)
        feed = primary._server._host.feed
        if call == "full":
            # Nothing is applied, and there is no room for more.
            monkeypatch.setattr(follower, "BACKLOG_BYTES_MAX", 0)
            for thread in standby._server._follower._threads:
                thread.submit(applies.wait, 10)
        else:
            monkeypatch.setattr(feed, "note_received", lambda number: None)
        if call in CHANGES:
            answer = pool.submit(control.call, call, CHANGES[call])
        else:
            answer = pool.submit(client.push, tensors)
        with pytest.raises(TimeoutError):
            answer.result(0.3)
        assert feed.recorded > feed.received
        monkeypatch.undo()
        applies.set()
        server_loop().call_soon_threadsafe(feed.note_received, feed.recorded)
        answer.result(30)
        if call == "Reset":
            return
        primary.stop()
        wait_until(lambda: "took over" in status_of(standby).standby)
        status = status_of(standby)
        assert (status.learning_rates[0].current == 0.5) == (call == "Configure")
        assert (status.state == RUN_STATE_FINISHED) == (call == "Stop")
        assert status.version_min == (call not in CHANGES)


@pytest.mark.parametrize("told", ["before", "after"])
def test_the_place_in_the_data_is_the_standby_s_too(start_server, told):
    # From the fourth push on the gradient is too old.
    primary = start_server(*QUICK, "--staleness", "polynomial:rounds_max=2")
    first = make_client(primary.data, run_id="r")
    if told == "after":
        standby = follow(start_server, primary, first)
    for step in range(5):
        first.data_position = bytes([step, 255])
        first.push(gradients_like(small_model(), step))
    if told == "before":
        standby = follow(start_server, primary, first)
    first.close("failed")
    primary.stop()
    with make_client(standby.data, run_id="r") as second:
        assert second.restored_position == bytes([2, 255])


def test_a_standby_of_a_server_that_ends_without_a_run_ends_too(start_server):
    primary = start_server()
    standby = start_server("--standby-of", primary.data, *LEASE)
    wait_until(lambda: "is receiving" in status_of(primary).standby)
    primary.stop()
    assert standby.wait() == 1
    assert "ended before all shards were here" in standby.output()


def test_a_standby_that_stood_still_itself_follows_again(start_server):
    primary = start_server(*QUICK)
    with make_client(primary.data) as client:
        standby = follow(start_server, primary, client, flags=("--standby-lease-seconds", "0.5"))
        own = standby._server._follower
        server_loop().call_soon_threadsafe(time.sleep, 1.5)
        wait_until(lambda: own.has_taken_over or not own._is_whole)
        wait_until(lambda: own._is_whole)
        assert not own.has_taken_over


def test_a_standby_ends_with_the_job(start_server):
    primary = start_server(*QUICK, "--exit-when", "gone")
    with make_client(primary.data) as client:
        standby = follow(start_server, primary, client)
    assert (primary.wait(), standby.wait()) == (0, 0)


@pytest.mark.parametrize(("exit_when", "ended"), [("gone", "failed"), ("finished", "finished")])
def test_workers_that_ended_before_a_takeover_count_as_they_did_at_the_server(start_server, exit_when, ended):
    flags = ("--exit-when", exit_when, "--expected-workers", "3")
    primary = start_server(*QUICK, *flags)
    with make_client(primary.data, run_id="r", worker_id="stays") as client:
        first = make_client(primary.data, run_id="r", worker_id="ends")
        standby = follow(start_server, primary, client, flags=flags)
        shell("set", "--servers", primary.control, "--expected-workers", "2")
        first.close(ended)
        primary.stop()
        client.pull()
    assert standby.wait() == 0
