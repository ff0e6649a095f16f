"""The way to a server in the worker's own process: no socket, and numbers that both see."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message

from pyps_client.credentials import Credentials
from pyps_client.retry import SIGNAL_SECONDS, Busy, LinkLost, LocalLost
from pyps_client.transport import Channel, Link, Reply, Take, Transport
from pyps_client.transport.lent import Lending, Memory
from pyps_wire.common_pb2 import Sender
from pyps_wire.contract import METHODS
from pyps_wire.errors import LimitExceeded, PypsError, ServerUnavailable, from_status
from pyps_wire.in_process import SERVERS, End, Server
from pyps_wire.local_pb2 import LocalReply, LocalRequest
from pyps_wire.parameter_server_pb2 import HelloReply, LocalTransport

T = TypeVar("T")

ATTACH_SECONDS = 10.0


class InProcessChannel(Channel):
    """Calls to the server of this process that has that address, whichever it is at the time."""

    transport = "in_process"

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        # Guarded by _lock: what is under way.
        self._calls: set[Future[None]] = set()
        self._closed = False

    def call(self, method: str, request: Message, reply: type[Reply], *, timeout_seconds: float) -> Reply:
        return self.send(method, [request.SerializeToString()], reply, timeout_seconds=timeout_seconds)

    def start(
        self, method: str, request: Message, reply: type[Reply], *, timeout_seconds: float
    ) -> Callable[[], Reply]:
        # The server is quick: the call begins with the wait for its reply.
        return partial(self.call, method, request, reply, timeout_seconds=timeout_seconds)

    def exchange(
        self, frames: Iterator[bytes], take: Take, *, timeout_seconds: float, method: str = "Exchange"
    ) -> None:
        for message in self._answers(method, frames, timeout_seconds):
            take(message)

    def read(self, method: str, request: Message, *, timeout_seconds: float) -> Iterator[bytes]:
        return self._answers(method, [request.SerializeToString()], timeout_seconds)

    def send(self, method: str, requests: Iterable[bytes], reply: type[Reply], *, timeout_seconds: float) -> Reply:
        [message] = self._answers(method, requests, timeout_seconds, streams=False)
        return reply.FromString(message)

    def close(self) -> None:
        with self._lock:
            calls, self._calls, self._closed = self._calls, set(), True
        for call in calls:
            call.cancel()

    def _answers(
        self, method: str, requests: Iterable[bytes], timeout_seconds: float, *, streams: bool = True
    ) -> Iterator[bytes]:
        """The answers; an error tells how many had come. What exceeds a stream's limits may fit in later."""
        inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        with self._lock:
            if self._closed:
                raise LinkLost("the channel was closed")
            call = _server_at(self.address).call(METHODS[method], iter(requests), inbox.put)
            self._calls.add(call)
        call.add_done_callback(lambda _: inbox.put(None))
        deadline = time.monotonic() + timeout_seconds
        answered = 0
        try:
            while (message := _awaited(partial(inbox.get, True), deadline)) is not None:
                answered += 1
                yield message
            _outcome(call, self.address, deadline)
        except LimitExceeded as error:
            raise Busy(str(error), answered=answered) if streams else error from None
        except LinkLost as lost:
            lost.answered = answered
            raise
        finally:
            call.cancel()
            with self._lock:
                self._calls.discard(call)


class InProcessLink(Link):
    """Lent vectors that a server of this process reads and writes in place."""

    transport = "in_process"

    def __init__(self, end: End, address: str) -> None:
        super().__init__()
        self._end = end
        self._address = address

    def request(self, request: LocalRequest, *, timeout_seconds: float) -> LocalReply:
        try:
            return _outcome(self._end.request(request), self._address, time.monotonic() + timeout_seconds)
        except LimitExceeded as error:
            raise Busy(str(error)) from None
        except PypsError:
            raise
        except BaseException as error:
            # It may be worked on still, which the next request must not meet.
            self.close()
            if isinstance(error, LinkLost):
                raise LocalLost(str(error)) from None
            raise

    def close(self) -> None:
        self.lost = True
        self._end.hang_up()


class InProcess(Transport):
    """A server in the worker's own process: function calls, and memory that both see anyway."""

    shares = True

    def channel(self, address: str, credentials: Credentials, *, use_proxy: bool) -> Channel:
        return InProcessChannel(address)

    def memory(self, num_bytes: int) -> Memory:
        return Memory(num_bytes)

    def offer(self, reply: HelloReply, address: str) -> LocalTransport | None:
        return LocalTransport(address=address)

    def attach(self, offer: LocalTransport, lending: Lending, sender: Sender, *, name: str) -> Link:
        assert lending.segment is not None
        address, request = offer.address, lending.attach_request(sender, b"").attach
        attaching = _server_at(address).attach(request, lending.segment.whole)
        return InProcessLink(_outcome(attaching, address, time.monotonic() + ATTACH_SECONDS), address)


def _server_at(address: str) -> Server:
    server = SERVERS.get(address)
    if server is None:
        others = ", ".join(SERVERS) or "none"
        raise LinkLost(f"no server of this process answers at {address} (transport 'in_process'; there: {others})")
    return server


def _outcome(future: Future[T], address: str, deadline: float) -> T:
    """What came of it, in the client's errors; given up where it does not come in time."""
    try:
        return _awaited(future.result, deadline)
    except LinkLost:
        future.cancel()
        raise
    except CancelledError:
        raise LinkLost("the channel was closed") from None
    except ServerUnavailable as error:
        raise LinkLost(str(error)) from None
    except PypsError as error:
        raise from_status(error.status, f"{error} (server {address})", type(error).__name__) from None


def _awaited(wait: Callable[[float], T], deadline: float) -> T:
    """What `wait` returns, at the latest then."""
    while True:
        try:
            return wait(SIGNAL_SECONDS)
        except (TimeoutError, queue.Empty):
            if time.monotonic() >= deadline:
                raise LinkLost("no answer within the call's deadline") from None
