"""Rounds on a call that stays open, over real gRPC servers: pyps_client.transport.grpc."""

import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from pyps_client.credentials import Credentials
from pyps_client.retry import Busy, LinkLost
from pyps_client.transport import Parts, Payload
from pyps_client.transport.grpc import GrpcChannel
from pyps_wire.common_pb2 import Receipt
from pyps_wire.contract import PARAMETER_SERVER
from pyps_wire.errors import METADATA_KEY, LimitExceeded, PypsError, UnknownWorker
from pyps_wire.framing import split
from pyps_wire.parameter_server_pb2 import ExchangeReply, PushRequest
from support import PythonProcess

MEBIBYTE = 1 << 20


class EchoServer:
    """Answers each payload with itself; `b"fail NAME"` ends the call with that error, b"hush" is not answered."""

    def __init__(self) -> None:
        self.calls = 0
        self.hushed: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
        # More threads than calls: a stream that was given up holds its own until the server notices.
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1)])
        handlers = {
            "Exchange": grpc.stream_stream_rpc_method_handler(self._exchange),
            "Push": grpc.stream_stream_rpc_method_handler(self._push),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PARAMETER_SERVER, handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()

    def _push(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in self._exchange(messages, context):
            yield Receipt(message=bytes(split(message)[1]).decode()).SerializeToString()

    def _exchange(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        self.calls += 1
        for frame in messages:
            message = bytes(split(frame)[1])
            if message.startswith(b"fail"):
                error = {"UnknownWorker": UnknownWorker, "LimitExceeded": LimitExceeded}[message.split()[1].decode()]
                context.set_trailing_metadata(((METADATA_KEY, error.__name__),))
                context.abort(getattr(grpc.StatusCode, error.status), "as was asked for")
            if message == b"end":
                return
            if message == b"hush":
                ended = threading.Event()
                context.add_callback(ended.set)
                self.hushed.put(ended)
                continue
            yield frame


@pytest.fixture
def server() -> Iterator[EchoServer]:
    made = EchoServer()
    yield made
    made.close()


@pytest.fixture
def channel(server: EchoServer) -> Iterator[GrpcChannel]:
    made = GrpcChannel(server.address, Credentials(token="secret"), use_proxy=False)
    yield made
    made.close()


def parts(payloads: Iterable[bytes], seconds: float = 20.0) -> Parts:
    return Parts(((PushRequest(), payload) for payload in payloads), seconds)


def echo(channel: GrpcChannel, *payloads: bytes, seconds: float = 20.0, push: bool = False) -> list[bytes]:
    replies: list[bytes] = []

    def take(reply: Receipt | ExchangeReply, payload: Payload) -> bool:
        assert isinstance(payload, memoryview)
        replies.append(reply.message.encode() if isinstance(reply, Receipt) else bytes(payload))
        return len(replies) == len(payloads)

    assert channel.round("Push" if push else "Exchange", parts(payloads, seconds), take)
    return replies


def test_many_rounds_are_one_call(server, channel):
    for number in range(20):
        message = str(number).encode()
        assert echo(channel, message, message * 2) == [message, message * 2]
    assert server.calls == 1


def test_pushes_have_a_call_of_their_own_while_an_exchange_runs(server, channel):
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(echo, channel, b"hush")
        server.hushed.get(timeout=20)
        for number in range(3):
            assert echo(channel, b"%d" % number, push=True) == [b"%d" % number]
        assert not asking.done()
        with pytest.raises(UnknownWorker):
            echo(channel, b"fail UnknownWorker", push=True)
        assert echo(channel, b"after", push=True) == [b"after"]
        assert server.calls == 3, "one of exchanges, and one of pushes before and after the verdict"
        channel.close()
        with pytest.raises(LinkLost):
            asking.result(20)
    with pytest.raises(LinkLost, match="the channel was closed"):
        echo(channel, b"too late")


def test_frames_are_made_when_there_is_room_for_them_while_replies_are_read(channel):
    """They are more than both ends' windows hold: to send all before reading would never end."""
    made: list[int] = []
    taken: list[int] = []
    ahead: list[int] = []

    def frames() -> Iterator[bytes]:
        for number in range(24):
            made.append(number)
            yield bytes([number]) * (4 * MEBIBYTE)

    def take(_: object, payload: Payload) -> bool:
        assert isinstance(payload, memoryview)
        taken.append(payload[0])
        ahead.append(len(made) - len(taken))
        return len(taken) == 24

    channel.round("Exchange", parts(frames(), 60), take)
    assert taken == list(range(24))
    assert max(ahead) < 16


@pytest.mark.parametrize(
    ("message", "error"), [(b"fail UnknownWorker", UnknownWorker), (b"fail LimitExceeded", Busy), (b"end", LinkLost)]
)
def test_a_verdict_ends_round(server, channel, message, error):
    assert echo(channel, b"before") == [b"before"]
    with pytest.raises(error):
        echo(channel, b"first", message, b"last", b"never answered")
    assert echo(channel, b"after") == [b"after"]
    assert server.calls == 2


def test_a_round_that_lasts_too_long_is_a_loss(server, channel):
    assert echo(channel, b"quick", seconds=20.0) == [b"quick"]
    with pytest.raises(LinkLost, match="no answer within the call's deadline"):
        echo(channel, b"hush", seconds=0.3)
    assert server.hushed.get(timeout=20).wait(20), "the server learns that its call is over"
    assert echo(channel, b"again", seconds=20.0) == [b"again"]


def test_an_error_in_taking_a_reply_ends_the_call(server, channel):
    def take(*_: object) -> bool:
        raise PypsError("never seen such a thing")

    with pytest.raises(PypsError, match="never seen"):
        channel.round("Exchange", parts([b"strange"]), take)
    assert echo(channel, b"after") == [b"after"]
    assert server.calls == 2


def test_a_frame_that_cannot_be_made_ends_the_round(channel):
    def frames() -> Iterator[bytes]:
        yield b"first"
        raise PypsError("the vectors are gone")

    with pytest.raises(PypsError, match="the vectors are gone"):
        channel.round("Exchange", parts(frames()), lambda *_: False)
    assert echo(channel, b"after") == [b"after"]


# Rounds without a pause, each with a signal at some instant of it, also where gRPC has fetched an event just then.
INTERRUPTED = """
import random, signal, sys
from pyps_client.credentials import Credentials
from pyps_client.transport import Parts
from pyps_client.transport.grpc import GrpcChannel
from pyps_wire.parameter_server_pb2 import PushRequest

class Alarm(Exception):
    pass

def ring(*_):
    raise Alarm

random.seed(0)
signal.signal(signal.SIGALRM, ring)
channel = GrpcChannel(sys.argv[1], Credentials(), use_proxy=False)
interrupted = 0
while interrupted < 150:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.01))
        while True:
            replies = []
            parts = Parts([(PushRequest(), b"x"), (PushRequest(), b"y")], 20)
            channel.round("Exchange", parts, lambda _, payload: replies.append(bytes(payload)) or len(replies) == 2)
            assert replies == [b"x", b"y"]
    except Alarm:
        interrupted += 1
channel.close()
print("closed")
"""


def test_signals_at_any_instant_leave_neither_a_hang_nor_a_crash(server):
    with PythonProcess("-c", INTERRUPTED, server.address) as process:
        assert process.wait() == 0, process.output()
        assert process.output() == "closed\n"
