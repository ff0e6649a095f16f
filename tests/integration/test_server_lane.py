"""The lane as a stranger to pyps_client speaks it: its messages, who may open one, and what becomes of bad bytes."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import numpy as np
import psutil
import pytest

from pyps.service.conversation import AHEAD_BYTES_MAX
from pyps.service.lane.connection import MESSAGE_SECONDS, Connection, Tcp, _Burst
from pyps.service.limits import ByteBudget
from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.codecs import TOPK
from pyps_wire.lane import Lane
from pyps_wire.lane_pb2 import LaneOpen
from pyps_wire.local_pb2 import LocalFailure
from pyps_wire.partition import Model, Tensor
from support import DEADLINE_SECONDS, ServerThread, Start, configure, inspect, wait_until
from wire_worker import WireWorker

OPEN, PUSH, EXCHANGE, PULL, END, FAILURE = range(1, 7)
PREFIX = struct.Struct("<III")


class RawLane:
    """A connection to a server's lane."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), DEADLINE_SECONDS)

    def send(self, kind: int, header: bytes, payload: bytes = b"") -> None:
        self.socket.sendall(PREFIX.pack(kind, len(header), len(payload)) + header + payload)

    def receive(self) -> tuple[int, bytes, bytes]:
        kind, *lengths = PREFIX.unpack(self._take(PREFIX.size))
        header, payload = map(self._take, lengths)
        return kind, header, payload

    def refusal(self) -> str:
        """The error that the server sends before it closes, its name first; empty where it only closes."""
        try:
            kind, header, _ = self.receive()
        except (EOFError, ConnectionResetError):
            return ""
        assert kind == FAILURE
        failure = LocalFailure.FromString(header)
        with pytest.raises((EOFError, ConnectionResetError)):
            self.receive()
        return f"{failure.name}: {failure.details}"

    def open(self, sender: common.Sender, ticket: bytes) -> RawLane:
        self.send(OPEN, LaneOpen(sender=sender, ticket=ticket).SerializeToString())
        return self

    def _take(self, count: int) -> bytes:
        taken = b""
        while len(taken) < count:
            more = self.socket.recv(count - len(taken))
            if not more:
                raise EOFError
            taken += more
        return taken

    def __enter__(self) -> RawLane:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.socket.close()


@pytest.fixture
def server(start_server: Start) -> ServerThread:
    return start_server()


@pytest.fixture
def worker(server: ServerThread) -> Iterator[WireWorker]:
    with WireWorker(server.data) as joined:
        joined.join(1.0)
        yield joined


def open_lane(worker: WireWorker) -> RawLane:
    offer = worker.hello().lane
    lane = RawLane(offer.port).open(worker.sender, offer.ticket)
    assert lane.receive() == (OPEN, b"", b"")
    return lane


def apart(request: wire.PushRequest) -> tuple[bytes, bytes]:
    payload = request.payload
    request.ClearField("payload")
    return request.SerializeToString(), payload


def versions(server: ServerThread) -> list[int]:
    return [shard.version for shard in inspect(server.control, "ListShards").shards]


def test_pushes_exchanges_and_pulls_are_those_of_the_contract(server, worker):
    with open_lane(worker) as lane:
        lane.send(PUSH, *apart(worker.push_request(0.25)))
        kind, header, payload = lane.receive()
        assert (kind, common.Receipt.FromString(header).version_after, payload) == (PUSH, 1, b"")
        # The second before the first is answered.
        for base in (1, 2):
            lane.send(EXCHANGE, *apart(worker.push_request(0.25, base_version=base)))
        for base in (1, 2):
            kind, header, payload = lane.receive()
            reply = wire.ExchangeReply.FromString(header)
            assert (kind, reply.version, reply.receipt.version_after) == (EXCHANGE, base + 1, base + 1)
            np.testing.assert_array_equal(np.frombuffer(payload, np.float32), np.float32(0.75 - 0.25 * base))
        pull = wire.PullRequest(sender=worker.sender, role=common.ROLE_WORKER)
        lane.send(PULL, pull.SerializeToString())
        kind, header, payload = lane.receive()
        assert (kind, wire.Parameters.FromString(header).version) == (PULL, 3)
        np.testing.assert_array_equal(np.frombuffer(payload, np.float32), np.float32(0.25))
        assert lane.receive() == (END, b"", b"")
        [listed] = inspect(server.control, "ListWorkers").workers
        assert listed.transport == "tcp"


def test_a_pull_that_is_refused_leaves_the_lane_and_a_push_ends_it(server, worker):
    with open_lane(worker) as lane:
        wants = [wire.PullRequest.Want(shard_id=0, held_version=0, min_version=9)]
        for codec, name in ((common.CODEC_UNSPECIFIED, "WaitTimedOut"), (TOPK, "InvalidArgument")):
            own = {"sender": worker.sender, "epoch": worker.epoch, "codec": codec}
            lane.send(PULL, wire.PullRequest(**own, wants=wants, wait_milliseconds=1).SerializeToString())
            kind, header, _ = lane.receive()
            assert (kind, LocalFailure.FromString(header).name) == (FAILURE, name)
        header, payload = apart(worker.push_request(1.0))
        lane.send(PUSH, header, payload[4:])
        # What comes behind it is not applied.
        lane.send(PUSH, *apart(worker.push_request(1.0)))
        assert lane.refusal().startswith("WrongSize")
    assert versions(server) == [0]


def test_a_lane_takes_the_messages_of_its_own_worker_alone(server, worker):
    pull = wire.PullRequest(sender=worker.sender, role=common.ROLE_WORKER)
    with WireWorker(server.data, "b") as other:
        for kind, header, payload in ((PUSH, *apart(worker.push_request(1.0))), (PULL, pull.SerializeToString(), b"")):
            with open_lane(other) as lane:
                lane.send(kind, header, payload)
                assert lane.refusal().startswith("NotAllowed: the message is of worker 'a'")
    assert versions(server) == [0]


def test_a_ticket_is_of_one_worker_for_one_use_and_a_short_time(server, worker, monkeypatch, capfd):
    offer = worker.hello().lane
    stranger = common.Sender(run_id="run-1", worker_id="b", incarnation=worker.sender.incarnation)
    earlier = common.Sender()
    earlier.CopyFrom(worker.sender)
    earlier.incarnation -= 1

    def refused(sender: common.Sender, ticket: bytes) -> bool:
        with RawLane(offer.port).open(sender, ticket) as lane:
            return lane.refusal().startswith(f"NotAllowed: the ticket is not of worker {sender.worker_id!r}, was used")

    assert refused(worker.sender, b"") and refused(worker.sender, b"x" * 16)
    assert refused(stranger, offer.ticket)
    with RawLane(offer.port).open(earlier, offer.ticket) as lane:
        assert lane.refusal().startswith("Superseded: ")
    for secret in (b"", b"0" * 16, worker.sender.secret[:-1]):
        nobody = common.Sender(run_id="run-1", worker_id="a", incarnation=worker.sender.incarnation, secret=secret)
        with RawLane(offer.port).open(nobody, offer.ticket) as lane:
            assert lane.refusal().startswith("NotAllowed: the call is in the name of worker 'a'")
    elsewhere = common.Sender()
    elsewhere.CopyFrom(worker.sender)
    elsewhere.run_id = "run-2"
    with RawLane(offer.port).open(elsewhere, offer.ticket) as lane:
        assert lane.refusal().startswith("RunMismatch: this server holds run 'run-1'")
    with RawLane(offer.port).open(worker.sender, offer.ticket) as lane:
        assert lane.receive() == (OPEN, b"", b"")
    assert refused(worker.sender, offer.ticket)
    unused = worker.hello().lane.ticket
    worker.sender.incarnation += 1
    worker.hello()
    assert refused(worker.sender, unused), "a later life shows an earlier one's"
    monkeypatch.setattr("pyps.service.listener.TICKET_SECONDS", 0.0)
    assert refused(worker.sender, worker.hello().lane.ticket)
    server.wait_for_output("callers at the lane showed what is not theirs, or was used count=")
    # One who only asks gets none.
    assert worker.hello(role=common.ROLE_OBSERVER).lane.ticket == b""
    assert "ticket" not in "".join(capfd.readouterr())


def test_an_earlier_life_s_ticket_cuts_no_lane_of_the_later(server):
    with WireWorker(server.data, "c") as former:
        former.join(1.0)
        offer = former.hello().lane
        with WireWorker(server.data, "c") as worker, open_lane(worker) as lane:
            with RawLane(offer.port).open(former.sender, offer.ticket) as refused:
                assert refused.refusal().startswith("Superseded: ")
            lane.send(PUSH, *apart(worker.push_request(1.0)))
            assert lane.receive()[0] == PUSH


def test_a_bad_first_message_ends_its_connection_alone(server, worker):
    offer = worker.hello().lane
    shown = LaneOpen(sender=worker.sender, ticket=offer.ticket).SerializeToString()
    generator = random.Random(0)
    firsts = [
        b"GET / HTTP/1.1\r\nHost: pyps\r\n\r\n",
        PREFIX.pack(OPEN, 2**32 - 1, 2**32 - 1),
        PREFIX.pack(OPEN, len(shown), 4) + shown,
        PREFIX.pack(PUSH, len(shown), 0) + shown,
        PREFIX.pack(OPEN, 3, 0) + b"\xff\xff\xff",
        *(generator.randbytes(generator.randrange(12, 300)) for _ in range(50)),
    ]
    for first in firsts:
        with RawLane(offer.port) as lane:
            lane.socket.sendall(first)
            lane.socket.shutdown(socket.SHUT_WR)
            lane.refusal()
    with RawLane(offer.port).open(worker.sender, offer.ticket) as lane:
        assert lane.receive() == (OPEN, b"", b"")
    assert versions(server) == [0]


@pytest.mark.parametrize(
    ("prefix", "error"),
    [
        (PREFIX.pack(PUSH, 10, 2**32 - 1), "LimitExceeded: the message is 4294967305 bytes"),
        (
            PREFIX.pack(PUSH, 10**7, 10),
            "LimitExceeded: a lane's message has a header of 10000000 bytes; expected at most",
        ),
        (PREFIX.pack(OPEN, 10, 0), "InvalidArgument: a lane's message has kind 1"),
        (PREFIX.pack(PULL, 10, 10), "InvalidArgument: a lane's Pull has a payload of 10 bytes; expected none"),
        (PREFIX.pack(77, 10, 10), "InvalidArgument: a lane's message has kind 77"),
        (PREFIX.pack(PUSH, 10, 10), "MalformedFrame"),
    ],
)
def test_an_impossible_message_is_refused_before_it_takes_memory(worker, prefix, error):
    with open_lane(worker) as lane:
        lane.socket.sendall(prefix + b"\xff" * 10)
        if error == "MalformedFrame":
            # A small message is read once all of it has come.
            lane.socket.sendall(bytes(10))
        assert lane.refusal().startswith(error)


class Mangler:
    """Sends mangled messages to a server, and counts them and the updates that were acknowledged."""

    def __init__(self, worker: WireWorker, other: WireWorker, generator: random.Random) -> None:
        self._worker, self._other, self._generator = worker, other, generator
        self._ticket_used = b""
        self.num_sent = self.num_applied = 0

    def go_on(self) -> None:
        """Asks for lanes that it may not have; opens one, and goes on there until a message is the last."""
        generator, offer = self._generator, self._worker.hello().lane
        others = self._other.hello().lane.ticket
        for _ in range(generator.randrange(12)):
            ticket = generator.choice((b"", others, self._ticket_used, generator.randbytes(16)))
            shown = LaneOpen(sender=self._worker.sender, ticket=ticket).SerializeToString()
            first = bytearray(PREFIX.pack(OPEN, len(shown), 0) + shown)
            if generator.random() < 0.2:
                first[:] = generator.randbytes(generator.randrange(300))
            self._bend(first, 0, generator.randrange(4))
            with RawLane(offer.port) as lane:
                self._send_the_last(lane, first)
                lane.refusal()
            self.num_sent += 1
        with RawLane(offer.port).open(self._worker.sender, offer.ticket) as lane:
            assert lane.receive() == (OPEN, b"", b"")
            self._ticket_used = offer.ticket
            self._send_the_last(lane, b"".join([*map(self._pushed, range(generator.randrange(12))), self._broken()]))
            self._take_answers(lane)

    def _pushed(self, base_version: int) -> bytes:
        """A message that ends where it says; its header is bent now and then, its numbers mostly."""
        header, payload = apart(self._worker.push_request(1.0, base_version=base_version))
        message = bytearray(
            PREFIX.pack(self._generator.choice((PUSH, EXCHANGE)), len(header), len(payload)) + header + payload
        )
        self._bend(message, PREFIX.size + len(header), self._generator.randrange(4))
        if self._generator.random() < 0.1:
            self._bend(message, PREFIX.size, 1)
        return bytes(message)

    def _broken(self) -> bytes:
        """One that may end elsewhere, or asks for parameters."""
        message = bytearray(self._pushed(0))
        if self._generator.random() < 0.3:
            pull = wire.PullRequest(sender=self._worker.sender, role=common.ROLE_WORKER).SerializeToString()
            message = bytearray(PREFIX.pack(PULL, len(pull), 0) + pull)
        else:
            del message[self._generator.choice((len(message), self._generator.randrange(len(message)))) :]
        self._bend(message, 0, self._generator.randrange(3))
        return bytes(message)

    def _bend(self, message: bytearray, start: int, count: int) -> None:
        for _ in range(count if len(message) > start else 0):
            message[self._generator.randrange(start, len(message))] = self._generator.randrange(256)

    def _send_the_last(self, lane: RawLane, message: bytes) -> None:
        # The server may have closed it amid this.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            lane.socket.sendall(message)
            lane.socket.shutdown(socket.SHUT_WR)

    def _take_answers(self, lane: RawLane) -> None:
        kind = 0
        with contextlib.suppress(EOFError, ConnectionResetError):
            while kind != FAILURE:
                kind, header, _ = lane.receive()
                assert kind in (PUSH, EXCHANGE, PULL, END, FAILURE), kind
                self.num_sent += kind in (PUSH, EXCHANGE)
                if kind in (PUSH, EXCHANGE):
                    reply = common.Receipt() if kind == PUSH else wire.ExchangeReply()
                    reply.ParseFromString(header)
                    receipt = reply if isinstance(reply, common.Receipt) else reply.receipt
                    self.num_applied += receipt.outcome == common.OUTCOME_APPLIED and not receipt.duplicate
        # What was no answered push, the end of the lane if nothing else.
        self.num_sent += 1


# A million by hand: LANE_MESSAGES=1000000 pytest -s -o timeout=0 -m extended tests/integration/test_server_lane.py
# With MALLOC_ARENA_MAX=1 too, memory does not grow from the first thousands on.
COUNTS = [1000, pytest.param(int(os.environ.get("LANE_MESSAGES", "20000")), marks=pytest.mark.extended)]


@pytest.mark.parametrize("count", COUNTS)
def test_mangled_messages_are_answered_or_refused(server, worker, count):
    process, began = psutil.Process(), time.monotonic()
    resident = 0
    with WireWorker(server.data, "b") as other:
        mangler = Mangler(worker, other, random.Random(count))
        while mangler.num_sent < count:
            mangler.go_on()
            if not resident and mangler.num_sent > count // 2:
                resident = process.memory_info().rss
    grown = process.memory_info().rss - resident

    assert versions(server) == [mangler.num_applied]
    assert 0 < mangler.num_applied < mangler.num_sent
    seconds = time.monotonic() - began
    print(f"{mangler.num_sent} messages in {seconds:.0f} s; resident {resident} bytes, then {grown} more")
    assert grown < 16 * 2**20
    wait_until(lambda: not inspect(server.control, "GetMemory").in_flight_bytes, what="all memory to be free")
    assert "bug" not in server.output()


def test_under_load_a_lane_has_one_message_at_a_time():
    budget = ByteBudget(2**30)
    burst = _Burst(budget)
    with budget.account("b").holding(AHEAD_BYTES_MAX), ThreadPoolExecutor(1) as pool:
        assert burst.may_receive()
        second = pool.submit(burst.may_receive)
        try:
            wait_until(lambda: burst._room._value == 0, what="the wait for the first's answer")
            assert not second.done()
            burst.answered()
            assert second.result(DEADLINE_SECONDS)
        finally:
            burst.end()


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receive all messages on threads, as large ones."""
    monkeypatch.setattr("pyps_wire.lane._AHEAD_BYTES", 64)


THREE_SHARDS = Model((Tensor("x", (48,)),), shard_size=16)


@pytest.mark.usefixtures("all_large")
def test_large_messages_of_a_push_are_answered_until_one_is_refused_or_of_another_kind(start_server):
    server = start_server()
    pull = wire.PullRequest(role=common.ROLE_WORKER)
    with WireWorker(server.data, model=THREE_SHARDS) as worker:
        worker.join(1.0)
        pull.sender.CopyFrom(worker.sender)
        with open_lane(worker) as lane:
            # A pull comes before the push is whole.
            for shard_id in (0, 1):
                lane.send(EXCHANGE, *apart(worker.push_request(0.25, shard_id, sequence=50, num_shards=3)))
            lane.send(PULL, pull.SerializeToString())
            assert [lane.receive()[0] for _ in range(6)] == [EXCHANGE, EXCHANGE, PULL, PULL, PULL, END]
            # The rest, and another push, of which one message is cut short.
            lane.send(EXCHANGE, *apart(worker.push_request(0.25, 2, sequence=50, num_shards=3)))
            lane.send(EXCHANGE, *apart(worker.push_request(0.25, 0, base_version=1, sequence=51, num_shards=3)))
            header, payload = apart(worker.push_request(0.25, 1, base_version=1, sequence=51, num_shards=3))
            lane.send(EXCHANGE, header, payload[4:])
            lane.send(EXCHANGE, *apart(worker.push_request(0.25, 2, base_version=1, sequence=51, num_shards=3)))
            for version in (1, 2):
                kind, header, payload = lane.receive()
                assert (kind, wire.ExchangeReply.FromString(header).version) == (EXCHANGE, version)
                np.testing.assert_array_equal(np.frombuffer(payload, np.float32), np.float32(1 - 0.25 * version))
            assert lane.refusal().startswith("WrongSize")
        wait_until(lambda: not inspect(server.control, "GetMemory").in_flight_bytes, what="its memory to be free")
    assert versions(server) == [2, 1, 1]


@pytest.mark.usefixtures("all_large")
def test_a_push_is_applied_as_a_whole_when_one_mutex_came_into_force_before_it(start_server):
    server = start_server("--staleness", "none")
    with WireWorker(server.data, model=THREE_SHARDS) as worker:
        worker.join(1.0)
        with open_lane(worker) as lane:
            for sequence in (50, 51):
                for shard_id in range(3):
                    push = worker.push_request(0.25, shard_id, sequence - 50, sequence=sequence, num_shards=3)
                    lane.send(EXCHANGE, *apart(push))
                    if sequence == 50:
                        assert lane.receive()[0] == EXCHANGE
                configure(server, protocol="asgd")
            assert [lane.receive()[0] for _ in range(3)] == [EXCHANGE] * 3
            lane.send(EXCHANGE, *apart(worker.push_request(0.25, 0, 2, sequence=52, num_shards=3)))
            lane.socket.shutdown(socket.SHUT_WR)
            with pytest.raises((EOFError, ConnectionResetError)):
                lane.receive()
    # A part alone changes nothing.
    assert versions(server) == [2, 2, 2]


@pytest.mark.usefixtures("all_large")
def test_a_worker_that_is_forgotten_amid_a_push_loses_its_lane(start_server):
    server = start_server()
    with WireWorker(server.data, model=THREE_SHARDS) as worker:
        worker.join(1.0)
        with open_lane(worker) as lane:
            lane.send(EXCHANGE, *apart(worker.push_request(0.25, 0, sequence=50, num_shards=3)))
            assert lane.receive()[0] == EXCHANGE
            worker.leave()
            assert lane.refusal() == ""


@pytest.mark.usefixtures("all_large")
def test_lanes_that_are_reset_after_a_refusal_log_no_traceback(start_server, caplog):
    server = start_server()
    with WireWorker(server.data, model=THREE_SHARDS) as worker:
        worker.join(1.0)
        for sequence in range(50, 250):
            with open_lane(worker) as lane:
                header, payload = apart(worker.push_request(0.25, 0, sequence=sequence, num_shards=3))
                lane.send(EXCHANGE, header, payload[4:])
                assert lane.receive()[0] == FAILURE
                lane.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: not inspect(server.control, "GetMemory").in_flight_bytes, what="its memory to be free")
        wait_until(lambda: not any("lane receives" in thread.name for thread in threading.enumerate()), what="the end")
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.usefixtures("all_large")
def test_a_push_for_which_no_thread_is_left_ends_its_lane(start_server, monkeypatch):
    server = start_server()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("lane receives"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with WireWorker(server.data, model=THREE_SHARDS) as worker:
        worker.join(1.0)
        with open_lane(worker) as lane:
            monkeypatch.setattr(threading.Thread, "start", refuse)
            lane.send(EXCHANGE, *apart(worker.push_request(0.25, 0, sequence=50, num_shards=3)))
            assert lane.refusal() == ""


def test_a_pull_ends_with_a_lane_whose_answers_cannot_be_sent(start_server, monkeypatch):
    # So that the answers to pushes are sent by a task of the conversation.
    monkeypatch.setattr("pyps.service.pushing.SHORT_BYTES", 0)
    monkeypatch.setattr("pyps.service.executor.KernelExecutor.is_little", lambda executor, count: False)
    send_now = Lane.send_now

    def fail(lane: Lane, kind: int, header: bytes, payload: bytes = b"") -> memoryview:
        if kind == PUSH:
            raise BrokenPipeError
        return send_now(lane, kind, header, payload)

    monkeypatch.setattr(Lane, "send_now", fail)
    server = start_server()
    with WireWorker(server.data) as worker, WireWorker(server.data, "b") as other:
        worker.join()
        other.join()
        wants = [wire.PullRequest.Want(shard_id=0, min_version=3)]
        pull = wire.PullRequest(sender=worker.sender, epoch=worker.epoch, wants=wants, wait_milliseconds=60_000)
        with open_lane(worker) as lane:
            lane.send(PULL, pull.SerializeToString())
            lane.send(PUSH, *apart(worker.push_request(0.25)))
            assert lane.refusal() == ""
        for _ in range(2):
            other.push(other.push_request(0.25))
        other.observe()
        assert versions(server) == [3]
        assert not inspect(server.control, "GetMemory").in_flight_bytes


def test_a_lane_that_closes_before_the_end_of_a_pull_is_sent_logs_no_traceback(start_server, monkeypatch, caplog):
    sends, let_go, pulled = threading.Event(), threading.Event(), []
    send_now, serve_pull = Lane.send_now, Connection._serve_pull

    def fail(lane: Lane, rest: memoryview) -> None:
        sends.set()
        assert let_go.wait(DEADLINE_SECONDS)
        raise BrokenPipeError

    def fail_at_once(lane: Lane) -> None:
        let_go.set()
        wait_until(lambda: not pulled[0]._blocking, what="the end of the thread that sends")

    monkeypatch.setattr(Connection, "_serve_pull", lambda *given: (pulled.append(given[0]), serve_pull(*given))[1])
    monkeypatch.setattr(Lane, "send_now", lambda *given: memoryview(b"rest") if given[1] == END else send_now(*given))
    monkeypatch.setattr(Lane, "flush", fail)
    server = start_server()
    with WireWorker(server.data) as worker:
        worker.join()
        with open_lane(worker) as lane:
            lane.send(PULL, wire.PullRequest(sender=worker.sender, epoch=worker.epoch).SerializeToString())
            assert sends.wait(DEADLINE_SECONDS)
            monkeypatch.setattr(Lane, "shut", fail_at_once)
        wait_until(pulled[0]._task.done, what="the lane to be closed")
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.usefixtures("all_large")
def test_a_slow_sender_is_disconnected(server, worker, monkeypatch):
    monkeypatch.setattr("pyps.service.lane.connection.OPEN_SECONDS", 0.2)
    monkeypatch.setattr("pyps.service.lane.connection.MESSAGE_SECONDS", 0.2)
    offer = worker.hello().lane
    with RawLane(offer.port) as silent, open_lane(worker) as slow:
        header, payload = apart(worker.push_request(1.0))
        slow.socket.sendall(PREFIX.pack(PUSH, len(header), len(payload)) + header + payload[:-1])
        wait_until(lambda: inspect(server.control, "GetMemory").in_flight_bytes, what="the message to be held")
        assert silent.refusal() == slow.refusal() == ""
        server.wait_for_output("callers at the lane that showed no ticket were cut off count=1 newest=127.0.0.1")
        server.wait_for_output("sent or took too little for too long and were cut off count=1 newest=a")
    wait_until(lambda: not inspect(server.control, "GetMemory").in_flight_bytes, what="its memory to be free")
    assert versions(server) == [0]


def test_a_slow_sender_of_a_small_message_is_disconnected(server, worker, monkeypatch):
    monkeypatch.setattr("pyps.service.lane.connection.MESSAGE_SECONDS", 0.2)
    with open_lane(worker) as slow:
        header, payload = apart(worker.push_request(1.0))
        slow.socket.sendall(PREFIX.pack(PUSH, len(header), len(payload)) + header + payload[:-1])
        assert slow.refusal() == ""
    assert versions(server) == [0]


def test_who_takes_no_answers_is_disconnected(start_server, monkeypatch):
    monkeypatch.setattr("pyps.service.calls.WRITE_SECONDS", 0.2)
    monkeypatch.setattr("pyps.service.lane.connection.BYTES_PER_SECOND_MIN", 1e12)
    server = start_server()
    # More than the system keeps for a connection.
    model = Model((Tensor("layer.weight", (1_000_000,)),))
    with WireWorker(server.data, model=model) as worker, ThreadPoolExecutor() as aside:
        worker.join()
        with open_lane(worker) as lane:

            def send() -> None:
                with contextlib.suppress(OSError):
                    for _ in range(16):
                        lane.send(EXCHANGE, *apart(worker.push_request(1.0)))

            sending = aside.submit(send)
            server.wait_for_output("sent or took too little for too long and were cut off count=1 newest=a")
            sending.result(DEADLINE_SECONDS)
        wait_until(lambda: not inspect(server.control, "GetMemory").in_flight_bytes, what="its memory to be free")


def begin_push(server: ServerThread, worker: WireWorker, lane: RawLane) -> bytes:
    """Sends all of a push but the end that it returns."""
    header, payload = apart(worker.push_request(1.0))
    lane.socket.sendall(PREFIX.pack(PUSH, len(header), len(payload)) + header + payload[:-1])
    wait_until(lambda: inspect(server.control, "GetMemory").in_flight_bytes, what="the message to be held")
    return payload[-1:]


@pytest.mark.usefixtures("all_large")
def test_half_a_message_delays_no_end(server, worker, monkeypatch):
    monkeypatch.setattr("pyps.service.lane.connection.STALL_SECONDS", 0.1)
    with open_lane(worker) as lane:
        begin_push(server, worker, lane)
        began = time.monotonic()
        assert server.stop() == 0
    assert time.monotonic() - began < 4


@pytest.mark.usefixtures("all_large")
def test_the_last_message_is_answered(server, worker, monkeypatch):
    monkeypatch.setattr("pyps.service.lane.connection.STALL_SECONDS", 60.0)
    with open_lane(worker) as lane, ThreadPoolExecutor() as aside:
        rest = begin_push(server, worker, lane)
        ended = aside.submit(server.stop)
        server.wait_for_output("server ends")
        lane.socket.sendall(rest)
        assert lane.refusal().startswith("ServerUnavailable: this server is shutting down")
        lane.socket.close()
        assert ended.result(DEADLINE_SECONDS) == 0


@pytest.mark.usefixtures("all_large")
def test_a_large_message_has_more_time(server, worker, monkeypatch):
    monkeypatch.setattr("pyps.service.lane.connection.BYTES_PER_SECOND_MIN", 0.001)
    header, payload = apart(worker.push_request(1.0))
    is_overdue, looks = Connection.is_overdue, []

    def is_overdue_later(connection: Connection, now: float) -> bool:
        looks.append(is_overdue(connection, now + 1.5 * MESSAGE_SECONDS))
        return looks[-1]

    with open_lane(worker) as lane:
        lane.socket.sendall(PREFIX.pack(PUSH, len(header), len(payload)) + header + payload[:-1])
        wait_until(lambda: inspect(server.control, "GetMemory").in_flight_bytes, what="the message to be held")
        monkeypatch.setattr(Connection, "is_overdue", is_overdue_later)
        wait_until(lambda: looks, what="a look at the lane")
        assert not any(looks)
        lane.socket.sendall(payload[-1:])
        assert lane.receive()[0] == PUSH


def test_beyond_the_bound_no_lane_is_offered(server, worker, monkeypatch):
    monkeypatch.setattr("pyps.service.lane.connection.LANES_MAX", 1)
    with open_lane(worker), WireWorker(server.data, "b") as other:
        assert not other.hello().HasField("lane")
        # It may come again itself: one that is open is its own, and ends.
        with open_lane(worker) as again:
            again.send(PUSH, *apart(worker.push_request(1.0)))
            assert again.receive()[0] == PUSH


def test_callers_without_ticket_block_no_lane(worker, monkeypatch):
    monkeypatch.setattr(Tcp, "unauthenticated_max", 2)
    port = worker.hello().lane.port
    with RawLane(port) as first, RawLane(port) as second, open_lane(worker) as lane:
        assert first.refusal() == ""
        lane.send(PUSH, *apart(worker.push_request(1.0)))
        assert lane.receive()[0] == PUSH
        second.open(worker.sender, b"")
        assert second.refusal().startswith("NotAllowed")


def test_a_cut_caller_keeps_its_ticket(server, worker, monkeypatch):
    open_lane_of, read = Connection._open, threading.Event()

    def open_once_cut(connection: Connection) -> LaneOpen:
        request = open_lane_of(connection)
        read.set()
        callers = connection._admit.__self__._callers  # type: ignore[attr-defined]
        wait_until(lambda: connection not in callers, what="the caller to be cut off")
        return request

    offer = worker.hello().lane
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "_open", open_once_cut)
        with RawLane(offer.port).open(worker.sender, offer.ticket) as cut:
            assert read.wait(DEADLINE_SECONDS)
            # One more than may come without a ticket.
            patch.setattr(Tcp, "unauthenticated_max", 1)
            with RawLane(offer.port):
                assert cut.refusal() == ""
    [listed] = inspect(server.control, "ListWorkers").workers
    assert listed.transport != "tcp"
    with RawLane(offer.port).open(worker.sender, offer.ticket) as lane:
        assert lane.receive() == (OPEN, b"", b"")


def test_a_caller_without_a_thread_is_disconnected(server, worker, monkeypatch):
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("lane"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with RawLane(worker.hello().lane.port) as lane:
            assert lane.refusal() == ""
    server.wait_for_output("can't start new thread")
    with open_lane(worker) as lane:
        lane.send(PUSH, *apart(worker.push_request(1.0)))
        assert lane.receive()[0] == PUSH


def test_a_worker_that_is_forgotten_loses_its_lane(server, worker):
    with open_lane(worker) as lane:
        worker.leave()
        assert lane.refusal() == ""


def test_a_server_without_a_lane_offers_none_and_a_port_that_is_taken_is_named(start_server):
    with WireWorker(start_server("--lane-port", "off").data) as worker:
        assert not worker.hello().HasField("lane")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Exception, match=rf"port {port} is taken .*--lane-port"):
            start_server("--lane-port", str(port))
