"""gRPC: calls, streams that stay open from one round to the next, and its errors told in ours."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import queue
import threading
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
from pyps_client.transport.threads import END_SECONDS, Future, Threads
from pyps_wire.contract import CONTROL_PORT, DATA_PORT, METHODS
from pyps_wire.errors import (
    METADATA_KEY,
    InvalidArgument,
    LimitExceeded,
    NotAuthenticated,
    ProtocolMismatch,
    PypsError,
    ServerUnavailable,
    from_status,
)

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

# The server allows pings this often; more often it would answer "too many pings".
KEEPALIVE_SECONDS = 60
KEEPALIVE_TIMEOUT_SECONDS = 20
# An idle connection, as beside a lane, ends after once to twice that, before the server ends it: of that gRPC would
# write a line to standard error.
IDLE_SECONDS = 30

_NOT_GRPC = f"what answers there is not gRPC: expected a server's data port ({DATA_PORT} by default)"
LATE = "no answer within the call's deadline"

# Codes with which gRPC itself reports trouble on the way, while the server's verdict is unknown.
_LOST = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL")


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
        self._threads = Threads()
        # By method; changed under _lock, and read without.
        self._streams: dict[str, Stream] = {}

    @property
    def is_outdated(self) -> bool:
        return self.credentials.newest() != self.credentials

    def call(self, method: str, request: Message, reply: type[Reply], *, timeout_seconds: float) -> Reply:
        answer: Reply = self._started(self._unary(method, request, reply), request, timeout_seconds)
        self.was_heard = True
        return answer

    def start(
        self, method: str, request: Message, reply: type[Reply], *, timeout_seconds: float
    ) -> Callable[[], Reply]:
        begun = self._started(self._unary(method, request, reply).future, request, timeout_seconds)
        return lambda: self._told(begun.result)

    def exchange(
        self, frames: Iterator[bytes], take: Take, *, timeout_seconds: float, method: str = "Exchange"
    ) -> None:
        # On a stream that stays open; after any failure the next round opens another.
        stream = self._streams.get(method) or self._stream(method)
        answering = Future(partial(stream.round, frames, take))
        try:
            self._threads.start(answering)
            if not answering.wait(timeout_seconds):
                raise LinkLost(LATE)
            if answering.error is not None:
                answering.value()
        except BaseException as error:
            with self._lock:
                if self._streams.get(method) is stream:
                    del self._streams[method]
            stream.close()
            # Nobody may write into the caller's vectors once this has left.
            answering.wait(END_SECONDS)
            if isinstance(error, grpc.RpcError):
                raise self._end_of_stream(error) from None
            raise

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
        self._threads.close()
        self._grpc.close()
        fork.kept_alive.discard(self._grpc)

    def _unary(self, method: str, request: Message, reply: type[Reply]) -> Any:
        return self._grpc.unary_unary(
            METHODS[method],
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )

    def _stream(self, method: str) -> Stream:
        with self._lock:
            start: Any = partial(self._grpc.stream_stream(METHODS[method]), metadata=self._metadata)
            return self._streams.setdefault(method, Stream(lambda frames: self._told(partial(start, frames))))

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
        if isinstance(verdict, NotAuthenticated) and self.is_outdated:
            return LinkLost("the token has changed")
        if isinstance(verdict, LinkLost):
            # The files could be used when the channel was made: where they cannot now, they are being renewed.
            with contextlib.suppress(InvalidArgument, OSError):
                if refusal := self.credentials.refusal(self.address, error.details() or ""):
                    return LinkLost(refusal) if self.was_heard else NotAuthenticated(refusal)
        return verdict


def open_channel(address: str, credentials: Credentials, options: list[tuple[str, int]]) -> grpc.Channel:
    """A channel of gRPC's: by TLS where there is a CA to know the server by. InvalidArgument for files of no use."""
    if not credentials.tls_ca:
        if credentials.token:
            _warn_of_token(address)
        return grpc.insecure_channel(address, options=options)
    # Of a file that is none gRPC would tell later, and in other words.
    credentials.context()
    paths = credentials.tls_ca, credentials.tls_key, credentials.tls_cert
    files = [Path(path).read_bytes() if path else None for path in paths]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*files), options=options)


@functools.cache
def _warn_of_token(address: str) -> None:
    host = address.rpartition(":")[0].strip("[]")
    try:
        is_near = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_near = host == "localhost"
    if not is_near:
        logger.warning(
            "the token goes to %s in the clear, and to whoever answers there: set tls_ca (PYPS_TLS_CA), or leave the "
            "token out where the server asks for none",
            address,
        )


def metadata_of(credentials: Credentials) -> Metadata:
    """What each call carries."""
    return (("authorization", f"Bearer {credentials.token}"),) if credentials.token else ()


class Stream:
    """A call that takes messages and answers with messages, round after round, on threads beside the caller's.

    grpcio waits by Python code, in which a signal's handler that raises leaves locks behind that nobody lets go: of
    Ctrl-C a main thread in there would never hear the end.
    """

    def __init__(self, begin: Callable[[Iterator[bytes]], Any]) -> None:
        self._begin = begin
        self._rounds: queue.SimpleQueue[Iterator[bytes] | None] = queue.SimpleQueue()
        # What was raised where a frame was to be made.
        self._failures: list[Exception] = []
        self._call: Any = None
        self._closed = False

    def round(self, frames: Iterator[bytes], take: Take) -> None:
        """Sends the frames, each made when the one before has left, and hands replies to `take` until it says so.

        Sending and reading go on at the same time. Raises grpc.RpcError, or what making a frame raises; after any
        exception the stream is of no use.
        """
        if self._call is None:
            self._call = self._begin(_frames_of(self._rounds, self._failures))
            fork.kept_alive.add(self._call)
            if self._closed:
                self.close()
        self._rounds.put(frames)
        try:
            while not take(next(self._call)):
                continue
        except (StopIteration, grpc.RpcError) as error:
            if self._failures:
                raise self._failures[0] from None
            raise (LinkLost("the server ended the stream") if isinstance(error, StopIteration) else error) from None

    def close(self) -> None:
        """Gives up the call; from any thread, also amid a round."""
        self._closed = True
        self._rounds.put(None)
        if self._call is not None:
            self._call.cancel()
            fork.kept_alive.discard(self._call)


def _frames_of(rounds: queue.SimpleQueue[Iterator[bytes] | None], failures: list[Exception]) -> Iterator[bytes]:
    while (frames := rounds.get()) is not None:
        try:
            yield from frames
        except Exception as error:
            # Of which grpcio would tell in its own words. The server ends the call, as after the last frame.
            failures.append(error)
            return


def _translate(error: Any, address: str) -> PypsError | LinkLost:
    """The server's own error where it gave a verdict, LinkLost where only gRPC spoke."""
    status, details = error.code().name, error.details() or ""
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
        "failed parsing http/2": _NOT_GRPC,
        "http1.x server": _NOT_GRPC,
    }
    for sign, words in known.items():
        if sign in details.lower():
            return words
    if status == "DEADLINE_EXCEEDED":
        return LATE
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
        ("grpc.client_idle_timeout_ms", IDLE_SECONDS * 1000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", int(use_proxy)),
        # No sharing of connections with other channels of this process, nor lookups of service configurations.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.service_config_disable_resolution", 1),
        # Pushes are sent again by us, from the buffers: gRPC need not keep copies for retries of its own.
        ("grpc.enable_retries", 0),
    ]
