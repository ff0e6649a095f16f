"""gRPC: calls, streams that stay open from one round to the next, and errors of gRPC translated to those of pyps."""

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
from pyps_client.transport import REPLIES, Parts, Take, Transport
from pyps_client.transport.threads import END_SECONDS, Future, Threads
from pyps_wire.common_pb2 import Receipt
from pyps_wire.contract import CONTROL_PORT, DATA_PORT, METHODS
from pyps_wire.errors import (
    METADATA_KEY,
    InvalidArgument,
    LimitExceeded,
    NoRoom,
    NotAuthenticated,
    ProtocolMismatch,
    PypsError,
    ServerUnavailable,
    from_status,
)
from pyps_wire.framing import join, split

T = TypeVar("T")
Reply = TypeVar("Reply", bound=Message)
Metadata = tuple[tuple[str, str], ...]

# The server allows no more frequent pings.
KEEPALIVE_SECONDS = 60
KEEPALIVE_TIMEOUT_SECONDS = 20
# An idle connection ends after once to twice that, before the server ends it: then gRPC would write a line to stderr.
IDLE_SECONDS = 30

_NO_HOST = "the host name cannot be resolved"
_NOT_GRPC = f"what answers there is not gRPC: expected a server's data port ({DATA_PORT} by default)"
LATE = "no answer within the call's deadline"

# gRPC's own codes for a failed connection: the server may have done the call.
_LOST = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL")

# Up to this size two copies cost less than a search for the payload in Python.
COPIED_BYTES_MAX = 1 << 16


class GrpcChannel(Transport):
    """A gRPC channel to one server. Calls raise the server's own error, LinkLost or Busy."""

    name = "grpc"
    # Whether the server has answered, here or on a channel before: then TLS files that fail may be replaced later.
    was_heard = False

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
        """Whether the token's file holds another token by now."""
        return self.credentials.newest() != self.credentials

    def call(self, method: str, request: Message, reply: type[Reply], *, timeout_seconds: float) -> Reply:
        """Make a call of one request and one reply, and wait for it."""
        answer: Reply = self._started(self._unary(method, request, reply), request, timeout_seconds)
        self.was_heard = True
        return answer

    def start(
        self, method: str, request: Message, reply: type[Reply], *, timeout_seconds: float
    ) -> Callable[[], Reply]:
        """Start such a call, and return what waits for its reply."""
        begun = self._started(self._unary(method, request, reply).future, request, timeout_seconds)
        return lambda: self._own_errors(begun.result)

    def round(self, method: str, parts: Parts, take: Take) -> bool:
        if method == "Pull":
            self._pull(parts, take)
            return True
        # A stream stays open; after any failure the next round opens another.
        stream = self._streams.get(method) or self._stream(method)
        answering = Future(partial(stream.round, parts, take))
        try:
            self._threads.start(answering)
            if not answering.wait(parts.timeout_seconds):
                raise LinkLost(LATE)
            if answering.error is not None:
                answering.value()
        except BaseException as error:
            with self._lock:
                if self._streams.get(method) is stream:
                    del self._streams[method]
            stream.close()
            # No thread may write into the caller's vectors after the return.
            answering.wait(END_SECONDS)
            if isinstance(error, grpc.RpcError):
                raise self._end_of_stream(error) from None
            raise
        return True

    def _pull(self, parts: Parts, take: Take) -> None:
        [(request, _)] = parts.messages
        start: Any = self._grpc.unary_stream(METHODS["Pull"], request_serializer=type(request).SerializeToString)
        call = self._started(start, request, parts.timeout_seconds)
        try:
            for message in call:
                take(*_parsed(message, REPLIES["Pull"]))
        except grpc.RpcError as error:
            raise self._end_of_stream(error) from None
        finally:
            call.cancel()

    def send(self, method: str, requests: Iterable[bytes], reply: type[Reply], *, timeout_seconds: float) -> Reply:
        """Make a call of many requests and one reply."""
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
            METHODS[method], request_serializer=type(request).SerializeToString, response_deserializer=reply.FromString
        )

    def _stream(self, method: str) -> Stream:
        with self._lock:
            start: Any = partial(self._grpc.stream_stream(METHODS[method]), metadata=self._metadata)
            stream = Stream(lambda frames: self._own_errors(partial(start, frames)), REPLIES[method])
            return self._streams.setdefault(method, stream)

    def _end_of_stream(self, error: Any) -> PypsError | LinkLost:
        verdict = self._translated(error)
        # Sizes were compared at Hello, so the limit is the server's memory for calls under way.
        return Busy(str(verdict)) if isinstance(verdict, LimitExceeded) and not isinstance(verdict, NoRoom) else verdict

    def _started(self, start: Any, request: Any, timeout_seconds: float) -> Any:
        return self._own_errors(partial(start, request, timeout=timeout_seconds, metadata=self._metadata))

    def _own_errors(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except grpc.RpcError as error:
            raise self._translated(error) from None
        except (ValueError, grpc.FutureCancelledError):
            raise LinkLost("the channel was closed") from None

    def _translated(self, error: Any) -> PypsError | LinkLost:
        """Return the server's own error if it gave one, and LinkLost if gRPC failed."""
        status, details = error.code().name, error.details() or ""
        name = next((str(value) for key, value in error.trailing_metadata() or () if key == METADATA_KEY), None)
        verdict: PypsError | LinkLost
        if name == ServerUnavailable.__name__ or (name is None and status in _LOST):
            verdict = LinkLost(_reason(status, details))
        elif name is None and status == "UNIMPLEMENTED":
            return ProtocolMismatch(
                f"{self.address} speaks gRPC but is no pyps data port ({details}). Name the data port (by default "
                f"{DATA_PORT}), not the control port ({CONTROL_PORT})."
            )
        else:
            verdict = from_status(status, f"{details} (server {self.address})", name)
        if isinstance(verdict, NotAuthenticated) and self.is_outdated:
            return LinkLost("the token has changed")
        if isinstance(verdict, LinkLost):
            # Files that could be read for this channel, and cannot be now, are being replaced.
            with contextlib.suppress(InvalidArgument, OSError):
                if refusal := self.credentials.refusal(self.address, details):
                    return LinkLost(refusal) if self.was_heard else NotAuthenticated(refusal)
        return verdict


def open_channel(address: str, credentials: Credentials, options: list[tuple[str, int]]) -> grpc.Channel:
    """Open a gRPC channel, by TLS where a CA is named. Raises InvalidArgument for files that are no PEM files."""
    if not credentials.tls_ca:
        if credentials.token:
            _warn_of_token(address)
        return grpc.insecure_channel(address, options=options)
    # This checks the files: gRPC would fail later, and say less.
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
    """Return the metadata of each call: the token."""
    return (("authorization", f"Bearer {credentials.token}"),) if credentials.token else ()


class Stream:
    """A call that sends and receives messages, round after round, on threads of its own.

    A main thread that waited in grpcio would hang after Ctrl-C: a signal handler's error leaves grpcio's locks held.
    """

    def __init__(self, begin: Callable[[Iterator[bytes]], Any], reply: Any) -> None:
        self._begin = begin
        self._reply = reply
        self._rounds: queue.SimpleQueue[Parts | None] = queue.SimpleQueue()
        # Errors from making a message.
        self._failures: list[Exception] = []
        self._call: Any = None
        self._closed = False

    def round(self, parts: Parts, take: Take) -> None:
        """Send messages, each made when the one before is sent; meanwhile pass replies to `take` until it returns True.

        Raises grpc.RpcError, or an error from making a message; after any exception the stream must be closed.
        """
        if self._call is None:
            self._call = self._begin(self._frames())
            fork.kept_alive.add(self._call)
            if self._closed:
                self.close()
        self._rounds.put(parts)
        try:
            while not take(*_parsed(next(self._call), self._reply)):
                continue
        except (StopIteration, grpc.RpcError) as error:
            if self._failures:
                raise self._failures[0] from None
            raise (LinkLost("the server ended the stream") if isinstance(error, StopIteration) else error) from None

    def _frames(self) -> Iterator[bytes]:
        while (parts := self._rounds.get()) is not None:
            try:
                for message, payload in parts.messages:
                    yield join(message, payload)
            except Exception as error:
                # The server ends the call, as after the last frame, and `round` raises this error.
                self._failures.append(error)
                return

    def close(self) -> None:
        """Cancel the call, on any thread."""
        self._closed = True
        self._rounds.put(None)
        if self._call is not None:
            self._call.cancel()
            fork.kept_alive.discard(self._call)


def _parsed(message: bytes, kind: Any) -> tuple[Any, memoryview]:
    """Return a message without its payload, and the payload in place."""
    if len(message) <= COPIED_BYTES_MAX:
        reply = kind.FromString(message)
        return reply, memoryview(reply.payload if kind is not Receipt else b"")
    header, payload = split(message)
    return kind.FromString(header), payload


def _reason(status: str, details: str) -> str:
    known = {
        "connection refused": "connection refused, nothing listens there",
        **dict.fromkeys(("dns resolution failed", "errors resolving", "name resolution"), _NO_HOST),
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
        # The server bounds messages; bounds here would be a second setting to raise.
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
        # Share no connections with other channels of this process, and look up no service configuration.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.service_config_disable_resolution", 1),
        # We send pushes again ourselves: gRPC need not keep copies for retries.
        ("grpc.enable_retries", 0),
    ]
