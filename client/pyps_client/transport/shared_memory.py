"""Memory that a worker shares with a server on its machine; requests go over a Unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError

from pyps_client.fork import tracked
from pyps_client.retry import SIGNAL_SECONDS, Busy, LocalLost
from pyps_client.transport import NO_OFFER, Greeted, Parts, Take, Transport
from pyps_client.transport.memory import HEAD_BYTES, Segment
from pyps_client.transport.tcp import Tcp, verdict_of
from pyps_wire.errors import PypsError
from pyps_wire.local_pb2 import LocalReply, LocalRequest
from pyps_wire.parameter_server_pb2 import HelloReply, LocalTransport

ATTACH_SECONDS = 10.0
PROBE_SECONDS = 10.0
# How often a thread that waits for its turn checks whether the server holds the round under way.
LOOK_SECONDS = 0.005
_LENGTH = struct.Struct("<I")
# A C program's struct timeval.
_TIME = struct.Struct("ll")
# Linux's struct ucred: process, user, group.
_PEER = struct.Struct("3i")
_READ_BYTES = 1 << 16
# Some hundred bytes a shard.
REPLY_BYTES_MAX = 1 << 26


class SharedMemory(Tcp):
    """Shared memory with servers on the worker's machine; elsewhere a lane."""

    shares = True

    def attach(self, offer: LocalTransport, memory: Segment, request: LocalRequest, *, name: str) -> Transport:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link = SharedMemoryLink(connected, name=name)
        try:
            connected.settimeout(ATTACH_SECONDS)
            connected.connect(_path_of(offer))
            link.allow(ATTACH_SECONDS)
            # The first byte carries the descriptor; the message follows.
            data = request.SerializeToString()
            message = _LENGTH.pack(len(data)) + data
            sent = socket.send_fds(connected, [message], [memory.fd])
            if sent < len(message):
                # Never send nothing: to a server that has answered and closed that fails, and hides its answer.
                connected.sendall(message[sent:])
            reply = link.reply()
            if reply.WhichOneof("reply") != "attached" or reply.attached.nonce != memory.nonce:
                raise LocalLost("the process behind the socket does not see this worker's memory")
        except BaseException as error:
            link.close()
            if isinstance(error, OSError):
                raise _lost(error) from None
            raise
        return link

    def hindrance(self, reply: HelloReply) -> str:
        if not reply.HasField("local"):
            return NO_OFFER
        try:
            Segment(HEAD_BYTES)
        except OSError as error:
            return f"memory to share cannot be had ({error})"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(PROBE_SECONDS)
            try:
                probe.connect(_path_of(reply.local))
                _, user, _ = _PEER.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            except OSError as error:
                return error.strerror or str(error)
        # The rule of servers.
        if os.geteuid() not in (0, user):
            return f"it runs as user {user}, this worker as user {os.geteuid()}"
        return ""


class OnlySharedMemory(SharedMemory):
    """Shared memory for a worker that ends rather than use another transport; gRPC carries all other calls."""

    insists = True

    def lane(self, greeted: Greeted, former: Transport | None) -> Transport | None:
        return None


class SharedMemoryLink(Transport):
    """Requests without numbers to a server that shares the worker's memory, over one socket."""

    name = "shm"

    def __init__(self, connected: socket.socket, *, name: str) -> None:
        self._socket = connected
        self._server = name
        self._timeout_seconds = 0.0
        self._turn = threading.Lock()
        # Whether the server may hold the request under way.
        self._waits = False
        _links.add(self)

    def round(self, method: str, parts: Parts, take: Take) -> bool:
        was_lost = self.lost
        if was_lost:
            # An error, not False: the Hello that follows opens it again, or chooses another transport.
            raise LocalLost("the local connection was lost")
        if not self._turn.acquire(blocking=False):
            while not self._turn.acquire(timeout=LOOK_SECONDS):
                if self._waits:
                    return False
        self._waits = parts.waits
        try:
            assert parts.request is not None
            reply = self.request(parts.request, timeout_seconds=parts.timeout_seconds)
            kind = "pulled" if method == "Pull" else "exchanged"
            if reply.WhichOneof("reply") != kind:
                raise PypsError(f"{self._server} answered {method} with something else.")
            answers: Iterable[Any] = reply.pulled.shards if method == "Pull" else reply.exchanged.replies
            for answer in answers:
                take(answer.receipt if method == "Push" else answer, None)
        finally:
            self._waits = False
            self._turn.release()
            if self.lost:
                # Checked after the release: another thread that closes the link finds it free, or has set this before.
                self.close()
        return True

    def request(self, request: LocalRequest, *, timeout_seconds: float) -> LocalReply:
        """Send a request, with `_turn` held, and return its reply."""
        try:
            if timeout_seconds != self._timeout_seconds:
                self.allow(timeout_seconds)
            message = request.SerializeToString()
            self._socket.sendall(_LENGTH.pack(len(message)) + message)
            return self.reply()
        except (PypsError, Busy):
            raise
        except BaseException as error:
            # The next request must not get this one's reply.
            self.close()
            if isinstance(error, OSError):
                raise _lost(error) from None
            raise

    def close(self) -> None:
        # A thread that waits for a reply closes the socket when its turn ends.
        self.lost = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._turn.acquire(blocking=False):
            self._socket.close()
            self._turn.release()

    def allow(self, timeout_seconds: float) -> None:
        """Set how long the socket may wait, in the kernel: Python's own timeout costs a call for each read."""
        self._timeout_seconds = timeout_seconds
        self._socket.setblocking(True)
        for direction, seconds in (
            (socket.SO_RCVTIMEO, min(timeout_seconds, SIGNAL_SECONDS)),
            (socket.SO_SNDTIMEO, timeout_seconds),
        ):
            microseconds = max(round(seconds * 1e6), 1)
            self._socket.setsockopt(socket.SOL_SOCKET, direction, _TIME.pack(*divmod(microseconds, 1_000_000)))

    def reply(self) -> LocalReply:
        """Read a reply, or raise the server's error.

        Raises BlockingIOError if it is not complete in time. After this, and any error of the connection, the caller
        closes the link.
        """
        data, num_bytes, until = b"", _LENGTH.size, time.monotonic() + self._timeout_seconds
        while len(data) < num_bytes:
            if data and time.monotonic() >= until:
                raise BlockingIOError
            try:
                more = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                continue
            if not more:
                raise LocalLost("the server closed the local connection")
            data += more
            if len(data) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(data)
                if length > REPLY_BYTES_MAX:
                    raise LocalLost(
                        f"the server announced an answer of {length} bytes; at most {REPLY_BYTES_MAX} are allowed"
                    )
                num_bytes = _LENGTH.size + length
        try:
            reply = LocalReply.FromString(data[_LENGTH.size :])
        except DecodeError:
            raise LocalLost("the server's answer is no message of the contract") from None
        if reply.WhichOneof("reply") != "failure":
            return reply
        raise verdict_of(reply.failure, self._server)


def _lost(error: OSError) -> LocalLost:
    silent = isinstance(error, BlockingIOError)
    return LocalLost("no answer within the call's deadline" if silent else error.strerror or str(error))


def _path_of(offer: LocalTransport) -> str:
    """Where the server listens: a file, or a name of Linux's own."""
    return "\0" + offer.address[1:] if offer.address.startswith("@") else offer.address


def _forget_in_child(link: SharedMemoryLink) -> None:
    """Close the socket, which stays open in the parent."""
    link.lost = True
    link._socket.close()


_links = tracked(after_in_child=_forget_in_child)
