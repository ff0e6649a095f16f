"""The calls to one server: what every transport makes of them, and gRPC, its options and its errors told in ours."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import grpc
from google.protobuf.message import Message

from pyps_client import fork
from pyps_client.open_stream import OpenStream, StreamEnded, Take, open_stream
from pyps_client.retry import Busy, LinkLost
from pyps_wire.contract import CONTROL_PORT, DATA_PORT, METHODS
from pyps_wire.errors import (
    METADATA_KEY,
    LimitExceeded,
    ProtocolMismatch,
    PypsError,
    ServerUnavailable,
    from_status,
)

Reply = TypeVar("Reply", bound=Message)

# The server allows pings this often; more often it would answer "too many pings".
KEEPALIVE_SECONDS = 60
KEEPALIVE_TIMEOUT_SECONDS = 20

# Codes with which gRPC itself reports trouble on the way, while the server's verdict is unknown.
_LOST = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL")


class Channel(ABC):
    """A connection of its own to one server. Calls raise the server's own error, LinkLost or Busy."""

    # The transport, by its name.
    transport: ClassVar[str]
    address: str

    @abstractmethod
    def call(self, method: str, request: Message, reply: type[Reply], *, timeout_seconds: float) -> Reply:
        """Calls a method with one request and one reply."""

    @abstractmethod
    def start(self, method: str, request: Message, reply: type[Reply], *, timeout_seconds: float) -> Any:
        """Begins such a call and returns a future of its reply; gRPC's has gRPC's errors."""

    @abstractmethod
    def stream(self, method: str, requests: Iterable[bytes], *, timeout_seconds: float) -> Iterator[bytes]:
        """Sends messages from an iterator, on another thread, and yields the answers as bytes."""

    @abstractmethod
    def exchange(self, frames: Iterator[bytes], take: Take, *, timeout_seconds: float) -> None:
        """Sends one round of `Exchange`, and hands the answers to `take` until it says that all are there.

        One round at a time.
        """

    @abstractmethod
    def read(self, method: str, request: Message, *, timeout_seconds: float) -> Iterator[bytes]:
        """Sends one request and yields the answers as bytes."""

    @abstractmethod
    def send(self, method: str, requests: Iterable[bytes], reply: type[Reply], *, timeout_seconds: float) -> Reply:
        """Sends messages from an iterator and returns the one reply."""

    @abstractmethod
    def close(self) -> None:
        """Ends all calls and the connection."""


class GrpcChannel(Channel):
    """A channel of gRPC's; a new one resolves the address again."""

    transport = "grpc"

    def __init__(self, address: str, *, token: str, use_proxy: bool) -> None:
        self.address = address
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._grpc = grpc.insecure_channel(address, options=_options(use_proxy))
        fork.keep_alive(self._grpc)
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._stream: OpenStream | None = None

    def call(self, method: str, request: Message, reply: type[Reply], *, timeout_seconds: float) -> Reply:
        start: Any = self._grpc.unary_unary(
            METHODS[method],
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        reply_message: Reply = self._verdict(start, request, timeout_seconds)
        return reply_message

    def start(self, method: str, request: Message, reply: type[Reply], *, timeout_seconds: float) -> Any:
        start: Any = self._grpc.unary_unary(
            METHODS[method],
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        return start.future(request, timeout=timeout_seconds, metadata=self._metadata)

    def stream(self, method: str, requests: Iterable[bytes], *, timeout_seconds: float) -> Iterator[bytes]:
        start: Any = self._grpc.stream_stream(METHODS[method])
        return self._answers(start, iter(requests), timeout_seconds)

    def exchange(self, frames: Iterator[bytes], take: Take, *, timeout_seconds: float) -> None:
        # On a stream that stays open; after any failure the next round opens another.
        try:
            stream = self._open_stream()
        except ValueError:
            raise LinkLost("the channel was closed") from None
        try:
            stream.run(frames, take, timeout_seconds=timeout_seconds)
        except StreamEnded as ended:
            self._forget(stream)
            verdict = _verdict_of(ended.code, ended.details, ended.metadata, self.address)
            raise (Busy(str(verdict)) if isinstance(verdict, LimitExceeded) else verdict) from None
        except BaseException:
            self._forget(stream)
            raise

    def read(self, method: str, request: Message, *, timeout_seconds: float) -> Iterator[bytes]:
        start: Any = self._grpc.unary_stream(METHODS[method], request_serializer=type(request).SerializeToString)
        return self._answers(start, request, timeout_seconds)

    def send(self, method: str, requests: Iterable[bytes], reply: type[Reply], *, timeout_seconds: float) -> Reply:
        start: Any = self._grpc.stream_unary(METHODS[method], response_deserializer=reply.FromString)
        reply_message: Reply = self._verdict(start, iter(requests), timeout_seconds)
        return reply_message

    def close(self) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self._grpc.close()
        fork.let_go(self._grpc)

    def _open_stream(self) -> OpenStream:
        with self._lock:
            if self._stream is None:
                self._stream = open_stream(self._grpc, METHODS["Exchange"], self._metadata)
            return self._stream

    def _forget(self, stream: OpenStream) -> None:
        with self._lock:
            if self._stream is stream:
                self._stream = None
        stream.close()

    def _verdict(self, start: Any, request: Any, timeout_seconds: float) -> Any:
        try:
            return start(request, timeout=timeout_seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self.address) from None
        except ValueError:
            raise LinkLost("the channel was closed") from None

    def _answers(self, start: Any, request: Any, timeout_seconds: float) -> Iterator[bytes]:
        answered = 0
        try:
            call = start(request, timeout=timeout_seconds, metadata=self._metadata)
        except ValueError:
            raise LinkLost("the channel was closed") from None
        try:
            for message in call:
                answered += 1
                yield message
        except grpc.RpcError as error:
            verdict = translate(error, self.address, answered=answered)
            if isinstance(verdict, LimitExceeded):
                # Sizes were compared at Hello: what is exceeded is the server's memory for calls under way.
                verdict = Busy(str(verdict), answered=answered)
            raise verdict from None
        finally:
            call.cancel()


def problem_of(call: Any) -> Exception | None:
    """What went wrong with a call that `Channel.start` began, once it is over; None for nothing."""
    try:
        problem: Exception | None = call.exception()
    except grpc.FutureCancelledError as error:
        return error
    return problem


def translate(error: Any, address: str, *, answered: int = 0) -> PypsError | LinkLost:
    """The server's own error where it gave a verdict, LinkLost where only gRPC spoke."""
    return _verdict_of(error.code(), error.details() or "", error.trailing_metadata(), address, answered=answered)


def _verdict_of(
    code: grpc.StatusCode, details: str, metadata: Any, address: str, *, answered: int = 0
) -> PypsError | LinkLost:
    status = code.name
    if code is grpc.StatusCode.OK:
        return LinkLost("the server ended the stream", answered=answered)
    name = next((str(value) for key, value in metadata or () if key == METADATA_KEY), None)
    if name == ServerUnavailable.__name__ or (name is None and status in _LOST):
        return LinkLost(_reason(status, details), answered=answered)
    if name is None and status == "UNIMPLEMENTED":
        return ProtocolMismatch(
            f"{address} speaks gRPC but is no pyps data port ({details}). Name the data port (by default "
            f"{DATA_PORT}), "
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
        # The server states and enforces the bounds on messages; here they would only be a second setting to
        # raise.
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", int(use_proxy)),
        # No sharing of connections with other channels of this process, nor lookups of service
        # configurations.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.service_config_disable_resolution", 1),
        # Pushes are sent again by us, from the buffers: gRPC need not keep copies for retries of its own.
        ("grpc.enable_retries", 0),
    ]
