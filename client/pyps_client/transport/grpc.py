"""gRPC: calls, streams that stay open from one round to the next, and its errors told in ours."""

from __future__ import annotations

import _thread
import math
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from pyps_client import fork
from pyps_client.credentials import Credentials
from pyps_client.log import logger
from pyps_client.retry import Busy, LinkLost
from pyps_client.transport import Channel, Reply, Take, Transport
from pyps_wire.contract import CONTROL_PORT, DATA_PORT, METHODS
from pyps_wire.errors import (
    METADATA_KEY,
    LimitExceeded,
    NotAuthenticated,
    ProtocolMismatch,
    PypsError,
    ServerUnavailable,
    from_status,
)

try:
    from grpc._cython import cygrpc  # type: ignore[attr-defined]
except ImportError:
    cygrpc = None

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

# The server allows pings this often; more often it would answer "too many pings".
KEEPALIVE_SECONDS = 60
KEEPALIVE_TIMEOUT_SECONDS = 20

# Up to this size a message that is alone is sent in one operation with the wait for its answer.
SMALL_BYTES = 1 << 16

# A watch sleeps no longer than this while nothing is under way, so that a deadline set meanwhile is not missed by more.
NAP_SECONDS = 5.0

# Codes with which gRPC itself reports trouble on the way, while the server's verdict is unknown.
_LOST = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL")
_CODES = {code.value[0]: code for code in grpc.StatusCode}
# The operations of a stream.
_OPENED, _GREETED, _SENT, _RECEIVED, _ENDED = range(5)


class Grpc(Transport):
    """gRPC, by which all goes as calls."""

    def channel(self, address: str, credentials: Credentials, *, use_proxy: bool) -> Channel:
        return GrpcChannel(address, credentials, use_proxy=use_proxy)


class GrpcChannel(Channel):
    """A channel of gRPC's; a new one resolves the address again."""

    transport = "grpc"

    def __init__(self, address: str, credentials: Credentials, *, use_proxy: bool) -> None:
        self.address = address
        self.credentials = credentials.newest()
        self._metadata = metadata_of(self.credentials)
        self._grpc = open_channel(address, self.credentials, _options(use_proxy))
        fork.kept_alive.add(self._grpc)
        self._lock = threading.Lock()
        # By method; changed under _lock, and read without.
        self._streams: dict[str, DirectStream | QueuedStream] = {}

    def call(self, method: str, request: Message, reply: type[Reply], *, timeout_seconds: float) -> Reply:
        return self._started(self._unary(method, request, reply), request, timeout_seconds)  # type: ignore[no-any-return]

    def start(
        self, method: str, request: Message, reply: type[Reply], *, timeout_seconds: float
    ) -> Callable[[], Reply]:
        begun = self._started(self._unary(method, request, reply).future, request, timeout_seconds)
        return lambda: self._told(begun.result)

    def exchange(
        self, frames: Iterator[bytes], take: Take, *, timeout_seconds: float, method: str = "Exchange"
    ) -> None:
        # On a stream that stays open; after any failure the next round opens another.
        stream = self._streams.get(method) or self._open_stream(method)
        try:
            stream.round(frames, take, timeout_seconds=timeout_seconds)
        except BaseException as error:
            with self._lock:
                if self._streams.get(method) is stream:
                    del self._streams[method]
            stream.close()
            if isinstance(error, grpc.RpcError):
                raise self._end_of_stream(error) from None
            raise

    def trickle(self, frames: Iterator[bytes], take: Take, *, timeout_seconds: float) -> None:
        # On a stream where a thread of grpcio's own waits for frames.
        with self._lock:
            before = self._streams.get("Exchange")
            if not isinstance(before, QueuedStream):
                open_one = partial(QueuedStream, self._grpc, METHODS["Exchange"], self._metadata)
                self._streams["Exchange"] = self._told(open_one)
        if isinstance(before, DirectStream):
            before.close()
        self.exchange(frames, take, timeout_seconds=timeout_seconds)

    def read(self, method: str, request: Message, *, timeout_seconds: float) -> Iterator[bytes]:
        start: Any = self._grpc.unary_stream(METHODS[method], request_serializer=type(request).SerializeToString)
        answered = 0
        call = self._started(start, request, timeout_seconds)
        try:
            for message in call:
                answered += 1
                yield message
        except grpc.RpcError as error:
            raise self._end_of_stream(error, answered) from None
        finally:
            call.cancel()

    def send(self, method: str, requests: Iterable[bytes], reply: type[Reply], *, timeout_seconds: float) -> Reply:
        start: Any = self._grpc.stream_unary(METHODS[method], response_deserializer=reply.FromString)
        return self._started(start, iter(requests), timeout_seconds)  # type: ignore[no-any-return]

    def close(self) -> None:
        with self._lock:
            streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.close()
        self._grpc.close()
        fork.kept_alive.discard(self._grpc)

    def _unary(self, method: str, request: Message, reply: type[Reply]) -> Any:
        return self._grpc.unary_unary(
            METHODS[method],
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )

    def _open_stream(self, method: str) -> DirectStream | QueuedStream:
        with self._lock:
            stream = self._streams.get(method)
            if stream is None:
                open_one = partial(open_stream, self._grpc, METHODS[method], self._metadata)
                stream = self._streams[method] = self._told(open_one)
            return stream

    def _end_of_stream(self, error: Any, answered: int = 0) -> PypsError | LinkLost:
        verdict = self._translated(error)
        if isinstance(verdict, LimitExceeded):
            # Sizes were compared at Hello: what is exceeded is the server's memory for calls under way.
            verdict = Busy(str(verdict))
        if isinstance(verdict, LinkLost):
            verdict.answered = answered
        return verdict

    def _started(self, start: Any, request: Any, timeout_seconds: float) -> Any:
        return self._told(partial(start, request, timeout=timeout_seconds, metadata=self._metadata))

    def _told(self, ask: Callable[[], T]) -> T:
        """What comes of it, in our own errors."""
        try:
            return ask()
        except grpc.RpcError as error:
            raise self._translated(error) from None
        except (ValueError, grpc.FutureCancelledError):
            raise LinkLost("the channel was closed") from None

    def _translated(self, error: Any) -> PypsError | LinkLost:
        verdict = _translate(error, self.address)
        if isinstance(verdict, NotAuthenticated) and self.credentials.newest() != self.credentials:
            return LinkLost("the token has changed")
        told = error.details() or ""
        refusal = self.credentials.refusal(self.address, told) if isinstance(verdict, LinkLost) else ""
        return NotAuthenticated(refusal) if refusal else verdict


def open_channel(address: str, credentials: Credentials, options: list[tuple[str, int]]) -> grpc.Channel:
    """A channel of gRPC's: by TLS where there is a CA to know the server by. BadRequest for files of no use."""
    if not credentials.tls_ca:
        return grpc.insecure_channel(address, options=options)
    # Of a file that is none gRPC would tell later, and in other words.
    credentials.context()
    paths = credentials.tls_ca, credentials.tls_key, credentials.tls_cert
    files = [Path(path).read_bytes() if path else None for path in paths]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*files), options=options)


def metadata_of(credentials: Credentials) -> Metadata:
    """What each call carries."""
    return (("authorization", f"Bearer {credentials.token}"),) if credentials.token else ()


class StreamEnded(grpc.RpcError):
    """The stream ended before its round did."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        super().__init__(details)
        self._told = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._told[0]

    def details(self) -> str:
        return self._told[1]

    def trailing_metadata(self) -> Any:
        return self._told[2]


def open_stream(channel: grpc.Channel, path: str, metadata: Metadata) -> DirectStream | QueuedStream:
    """Starts a call that takes messages and answers with messages, in the best way that this grpcio has."""
    core = getattr(channel, "_channel", None)
    if cygrpc is not None and hasattr(core, "segregated_call"):
        try:
            return DirectStream(core, path, metadata)
        except Exception as error:
            if not _is_of_grpcio(error):
                raise
            # Or the channel was closed, of which the stable interface tells.
            logger.debug("grpcio %s has no direct stream: %r", grpc.__version__, error)
    return QueuedStream(channel, path, metadata)


class DirectStream:
    """A stream driven by the caller's own thread alone. One round at a time.

    grpcio's stable interface iterates requests on one thread and waits for events on another: four hand-overs in a
    round of one message, which cost more than the message. What it is built from, and its single-threaded calls
    use too, needs none; `QueuedStream` is there in case that changes.
    """

    def __init__(self, core: Any, path: str, metadata: Metadata) -> None:
        self._turn = threading.Lock()
        # Made for nothing but to know now, not amid a round, that they can be.
        _ = cygrpc.SendMessageOperation(b"", 0), cygrpc.ReceiveMessageOperation(0)
        begin = (
            ((cygrpc.SendInitialMetadataOperation(metadata, 0),), _OPENED),
            ((cygrpc.ReceiveStatusOnClientOperation(0),), _ENDED),
            ((cygrpc.ReceiveInitialMetadataOperation(0),), _GREETED),
        )
        self._call = core.segregated_call(0, path.encode(), None, None, metadata, None, begin, None)
        fork.kept_alive.add(self._call)
        # Operations begun whose ends have not been fetched: as long as there is one there is something to wait for.
        self._due = {_OPENED, _ENDED, _GREETED}
        self._end: StreamEnded | None = None
        self._watchdog = Watchdog(self._expire)

    def round(self, frames: Iterator[bytes], take: Take, *, timeout_seconds: float) -> None:
        """Sends the frames, each made when the one before has left, and hands replies to `take` until it says so.

        Sending and reading go on at the same time. Raises grpc.RpcError; after any exception the stream is of no use.
        """
        watchdog, due = self._watchdog, self._due
        with self._turn:
            watchdog.deadline = time.monotonic() + timeout_seconds
            if not watchdog.started:
                watchdog.start(timeout_seconds)
            try:
                upcoming = next(frames, None)
                if upcoming is not None and len(upcoming) <= SMALL_BYTES and _SENT not in due and _RECEIVED not in due:
                    first, upcoming = upcoming, next(frames, None)
                    sending = cygrpc.SendMessageOperation(first, 0)
                    if upcoming is None:
                        # All there is, and short: sent in one operation with the wait for its answer.
                        self._begin((sending, cygrpc.ReceiveMessageOperation(0)), _RECEIVED)
                    else:
                        self._begin((sending,), _SENT)
                while True:
                    if upcoming is not None and _SENT not in due:
                        self._begin((cygrpc.SendMessageOperation(upcoming, 0),), _SENT)
                        # Made while the one before it leaves.
                        upcoming = next(frames, None)
                    if _RECEIVED not in due:
                        self._begin((cygrpc.ReceiveMessageOperation(0),), _RECEIVED)
                    event = self._fetch()
                    message = event.batch_operations[-1].message() if event.tag == _RECEIVED else None
                    if message is not None:
                        if take(message):
                            break
                    elif event.tag in (_RECEIVED, _ENDED):
                        raise self._ended()
            except Exception as error:
                if isinstance(error, StreamEnded) or not _is_of_grpcio(error):
                    raise
                raise _given_up(error) from None
            watchdog.deadline = math.inf

    def close(self) -> None:
        """Gives up the call; from any thread, also amid a round."""
        self._watchdog.end()
        try:
            # gRPC does nothing where it has let go of the call itself.
            self._call.cancel(grpc.StatusCode.CANCELLED.value[0], "the client gave up")
            # Amid a round its own thread fetches what is due; a signal's handler may run in that very thread.
            if self._turn.acquire(blocking=False):
                try:
                    self._ended()
                finally:
                    self._turn.release()
        except Exception as error:
            if not _is_of_grpcio(error):
                raise
            _given_up(error)
        fork.kept_alive.discard(self._call)

    def _begin(self, operations: tuple[Any, ...], tag: int) -> None:
        begun = False
        try:
            # Noted before it is begun: a signal must not come between.
            self._due.add(tag)
            begun = self._call.operate(operations, tag)
        finally:
            if not begun:
                self._due.discard(tag)
        if not begun:
            # The call is over; its end says why.
            raise self._ended()

    def _fetch(self) -> Any:
        """Waits for the end of one operation, and notes the call's own.

        An exception is a signal's: gRPC may have let go of the call and its queue, or of this event alone. Nothing can
        be told to be due then, and to wait for what is not would never end, or use memory that was freed.
        """
        try:
            event = self._call.next_event()
            self._due.discard(event.tag)
        except BaseException:
            self._due.clear()
            raise
        if event.tag == _ENDED:
            end = event.batch_operations[0]
            code = _CODES.get(end.code(), grpc.StatusCode.UNKNOWN)
            self._end = StreamEnded(code, end.details() or "", end.trailing_metadata())
        return event

    def _ended(self) -> StreamEnded:
        """Fetches all that is due, so that nothing of the call is left; only once it has ended, or was given up."""
        while self._due:
            self._fetch()
        return self._end or StreamEnded(grpc.StatusCode.CANCELLED, "the stream was closed")

    def _expire(self) -> None:
        self._call.cancel(grpc.StatusCode.DEADLINE_EXCEEDED.value[0], "no answer in time")


class QueuedStream:
    """A stream by grpcio's stable interface, which iterates over the frames on a thread of its own."""

    def __init__(self, channel: grpc.Channel, path: str, metadata: Metadata) -> None:
        self._turn = threading.Lock()
        self._rounds: queue.SimpleQueue[Iterator[bytes] | None] = queue.SimpleQueue()
        start: Any = channel.stream_stream(path)
        self._call = start(_frames_of(self._rounds), metadata=metadata)
        fork.kept_alive.add(self._call)
        self._expired = False
        self._watchdog = Watchdog(self._expire)

    def round(self, frames: Iterator[bytes], take: Take, *, timeout_seconds: float) -> None:
        with self._turn:
            self._watchdog.deadline = time.monotonic() + timeout_seconds
            if not self._watchdog.started:
                self._watchdog.start(timeout_seconds)
            self._rounds.put(frames)
            try:
                while not take(next(self._call)):
                    continue
            except StopIteration:
                raise StreamEnded(grpc.StatusCode.OK, "") from None
            except grpc.RpcError:
                if self._expired:
                    raise StreamEnded(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time") from None
                raise
            self._watchdog.deadline = math.inf

    def close(self) -> None:
        self._watchdog.end()
        self._rounds.put(None)
        self._call.cancel()
        fork.kept_alive.discard(self._call)

    def _expire(self) -> None:
        self._expired = True
        self._call.cancel()


def _frames_of(rounds: queue.SimpleQueue[Iterator[bytes] | None]) -> Iterator[bytes]:
    while (frames := rounds.get()) is not None:
        yield from frames


def _is_of_grpcio(error: Exception) -> bool:
    """Whether grpcio raised it, or our use of its private parts, as with another one than this was written for.

    Whoever makes frames or takes replies may raise the same, and so may a signal's handler, amid anything.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__"))
    return module == __name__ or module.partition(".")[0] == "grpc"


def _given_up(error: Exception) -> StreamEnded:
    """Has every stream go the public way, live ones by failing too; the end of this, whose round is tried again."""
    global cygrpc
    if cygrpc is not None:
        cygrpc = None
        logger.warning("grpcio %s: the direct stream failed (%r): the slower way from now on", grpc.__version__, error)
    return StreamEnded(grpc.StatusCode.UNAVAILABLE, "the direct stream failed")


class Watchdog:
    """Calls `expire` when a round lasts longer than it was given, on a thread of its own that mostly sleeps.

    To begin and to end a round costs an assignment: the thread looks at the deadline when the one that it saw last
    has passed.
    """

    def __init__(self, expire: Callable[[], None]) -> None:
        """`expire` is a method, held weakly: its object's end is the watch's."""
        # When the round under way is to be over.
        self.deadline = math.inf
        self.started = False
        self._expire = weakref.WeakMethod(expire)
        self._ended = threading.Event()

    def start(self, seconds: float) -> None:
        """Begins to look at the deadline, which is so far away."""
        # A signal's handler that raises amid the start of a threading.Thread breaks both: the new thread, and what
        # it raised. After this call the watch runs, whatever is raised; a second one would do no harm.
        _thread.start_new_thread(_watch, (weakref.ref(self), self._ended, min(seconds, NAP_SECONDS)))
        self.started = True

    def end(self) -> None:
        """Ends the watch for good."""
        self._ended.set()

    def look(self) -> float:
        """How long the thread may sleep now; calls `expire` where the deadline has passed, once."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            self.deadline = math.inf
            expire = self._expire()
            if expire is not None:
                expire()
        return min(max(left, 0.0), NAP_SECONDS)


def _watch(watchdog: weakref.ref[Watchdog], ended: threading.Event, seconds: float) -> None:
    while not ended.wait(seconds):
        watched = watchdog()
        if watched is None:
            return
        seconds = watched.look()
        del watched


def _translate(error: Any, address: str) -> PypsError | LinkLost:
    """The server's own error where it gave a verdict, LinkLost where only gRPC spoke."""
    status, details = error.code().name, error.details() or ""
    if status == "OK":
        return LinkLost("the server ended the stream")
    name = next((str(value) for key, value in error.trailing_metadata() or () if key == METADATA_KEY), None)
    if name == ServerUnavailable.__name__ or (name is None and status in _LOST):
        return LinkLost(_reason(status, details))
    if name is None and status == "UNIMPLEMENTED":
        return ProtocolMismatch(
            f"{address} speaks gRPC but is no pyps data port ({details}). Name the data port (by default {DATA_PORT}), "
            f"not the control port ({CONTROL_PORT})."
        )
    return from_status(status, f"{details} (server {address})", name)


def _reason(status: str, details: str) -> str:
    """gRPC's long-winded details in a few words, where the cause is a known one."""
    known = {
        "connection refused": "connection refused, nothing listens there",
        "dns resolution failed": "the host name cannot be resolved",
        "errors resolving": "the host name cannot be resolved",
        "name resolution": "the host name cannot be resolved",
        "no route to host": "no route to the host",
        "network is unreachable": "the network is unreachable",
        "connection reset": "the connection was reset",
        "socket closed": "the connection was closed",
    }
    for sign, words in known.items():
        if sign in details.lower():
            return words
    if status == "DEADLINE_EXCEEDED":
        return "no answer within the call's deadline"
    return f"{details or 'no details'} ({status})"


def _options(use_proxy: bool) -> list[tuple[str, int]]:
    return [
        # The server states and enforces the bounds on messages; here they would only be a second setting to raise.
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", int(use_proxy)),
        # No sharing of connections with other channels of this process, nor lookups of service configurations.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.service_config_disable_resolution", 1),
        # Pushes are sent again by us, from the buffers: gRPC need not keep copies for retries of its own.
        ("grpc.enable_retries", 0),
    ]
