"""pyps_client.transport.shared_memory over real sockets: turns, replies in pieces, losses."""

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pyps_client.retry import Busy, LocalLost
from pyps_client.transport import Parts
from pyps_client.transport.memory import Layout, Segment
from pyps_client.transport.shared_memory import SharedMemory, SharedMemoryLink
from pyps_wire.codecs import FLOAT32
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import PypsError, UnknownWorker, WaitTimedOut
from pyps_wire.local_pb2 import LocalReply, LocalRequest
from pyps_wire.parameter_server_pb2 import LocalTransport
from pyps_wire.partition import Model, Tensor

LENGTH = struct.Struct("<I")
PULL = LocalRequest()
PULL.pull.SetInParent()
PULLED = LocalReply()
PULLED.pulled.SetInParent()


@pytest.fixture
def ends() -> Iterator[tuple[SharedMemoryLink, socket.socket]]:
    near, far = socket.socketpair()
    link = SharedMemoryLink(near, name="server 0")
    yield link, far
    link.close()
    far.close()


def framed(reply: LocalReply) -> bytes:
    message = reply.SerializeToString()
    return LENGTH.pack(len(message)) + message


def refusal(status: str, name: str) -> LocalReply:
    reply = LocalReply()
    reply.failure.status, reply.failure.name, reply.failure.details = status, name, "no"
    return reply


def ask(link: SharedMemoryLink, seconds: float = 20.0) -> list[Any]:
    replies: list[Any] = []
    assert link.round("Pull", Parts((), seconds, request=PULL), lambda reply, _: bool(replies.append(reply)))
    return replies


def test_requests_are_framed_and_replies_may_come_in_pieces(ends):
    link, far = ends
    reply = LocalReply()
    for shard_id in range(20_000):
        reply.pulled.shards.add(shard_id=shard_id, version=3)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, link)
        (length,) = LENGTH.unpack(far.recv(LENGTH.size))
        assert LocalRequest.FromString(far.recv(length)) == PULL
        message = framed(reply)
        for piece in (message[:2], message[2:100], message[100:]):
            far.sendall(piece)
        assert asking.result(20) == list(reply.pulled.shards)


REFUSALS: list[tuple[str, str, type[Exception]]] = [
    ("FAILED_PRECONDITION", "UnknownWorker", UnknownWorker),
    ("DEADLINE_EXCEEDED", "WaitTimedOut", WaitTimedOut),
    ("RESOURCE_EXHAUSTED", "LimitExceeded", Busy),
    ("INTERNAL", "", PypsError),
    ("UNAVAILABLE", "ServerUnavailable", LocalLost),
]


def test_a_refusal_raises_its_error_and_keeps_the_link(ends):
    link, far = ends
    for status, name, error in REFUSALS:
        far.sendall(framed(refusal(status, name)))
        with pytest.raises(error, match="no"):
            ask(link)
        if error is not LocalLost:
            far.sendall(framed(PULLED))
            assert ask(link) == []


@pytest.mark.parametrize("answer", [b"", b"\x05\0", LENGTH.pack(3) + b"\xff\xff\xff"])
def test_an_end_without_an_answer_is_a_loss(ends, answer):
    link, far = ends
    far.sendall(answer)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(LocalLost):
        ask(link)
    assert link.lost


def test_silence_is_a_loss(ends):
    link, _ = ends
    with pytest.raises(LocalLost, match="no answer within the call's deadline"):
        ask(link, 0.05)
    assert link.lost


@pytest.mark.parametrize(
    ("begun", "words"),
    [(b"\x05\0", "within the call's deadline"), (LENGTH.pack(2**32 - 1), "an answer of 4294967295 bytes")],
)
def test_an_answer_has_deadline_and_bound(ends, begun, words):
    link, far = ends
    far.sendall(begun)
    # There is no more to wait for: whoever does not look finds the link closed.
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(LocalLost, match=words):
        ask(link, 1e-6)
    assert link.lost


def test_closing_ends_a_request_under_way(ends):
    link, far = ends
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, link)
        assert far.recv(LENGTH.size)
        link.close()
        with pytest.raises(LocalLost):
            asking.result(20)


def test_a_link_closed_at_a_turns_end_keeps_no_socket(ends):
    link, far = ends

    class ClosedMeanwhile:
        """The turn, at whose release another thread has just tried to close the link."""

        def __init__(self, turn: threading.Lock) -> None:
            self._turn = turn

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            return self._turn.acquire(blocking, timeout)

        def release(self) -> None:
            if not link.lost:
                link.close()
            self._turn.release()

    far.sendall(framed(PULLED))
    link._turn = ClosedMeanwhile(link._turn)  # type: ignore[assignment, arg-type]
    ask(link)
    assert link._socket.fileno() == -1


def test_other_requests_wait_for_a_quick_one_but_not_for_a_held_one(ends):
    link, far = ends

    def pull(*, waits: bool) -> bool:
        return link.round("Pull", Parts((), 20.0, request=PULL, waits=waits), lambda *_: False)

    with ThreadPoolExecutor(2) as pool:
        for waits in (True, False):
            first = pool.submit(pull, waits=waits)
            assert far.recv(1 << 16)
            second = pool.submit(pull, waits=False)
            if waits:
                assert not second.result(20)
            far.sendall(framed(PULLED))
            assert first.result(20)
        assert far.recv(1 << 16)
        far.sendall(framed(PULLED))
        assert second.result(20)


def test_a_process_that_does_not_see_the_memory_is_refused():
    layout = Layout(Model((Tensor("a", (10,)),)), FLOAT32, FLOAT32, 1)
    segment = Segment(layout.num_bytes)
    request = layout.attach_request(Sender(), b"t")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("")
    listener.listen()
    offer = LocalTransport(address="@" + listener.getsockname()[1:].decode(), ticket=b"t")

    def liar() -> None:
        far, _ = listener.accept()
        with far:
            far.recv(1 << 16)
            reply = LocalReply()
            reply.attached.nonce = 1
            far.sendall(framed(reply))

    thread = threading.Thread(target=liar)
    thread.start()
    with pytest.raises(LocalLost, match="does not see this worker's memory"):
        SharedMemory().attach(offer, segment, request, name="server 0")
    thread.join(20)
    listener.close()
    with pytest.raises(LocalLost, match="refused"):
        SharedMemory().attach(offer, segment, request, name="server 0")
