"""The way to a server on the worker's own machine: requests over a Unix socket, numbers in memory that both see."""

from __future__ import annotations

import contextlib
import socket
import struct
import weakref

from google.protobuf.message import DecodeError

from pyps_client.fork import at_fork
from pyps_client.lent import Lending
from pyps_client.retry import SIGNAL_SECONDS, Busy, LocalLost
from pyps_client.segment import Memory, Segment
from pyps_client.transport import Link, Transport
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import LimitExceeded, PypsError, ServerUnavailable, from_status
from pyps_wire.local_pb2 import LocalReply, LocalRequest
from pyps_wire.parameter_server_pb2 import HelloReply, LocalTransport

ATTACH_SECONDS = 10.0
_LENGTH = struct.Struct("<I")
# A C program's struct timeval.
_TIME = struct.Struct("ll")
_READ_BYTES = 1 << 16


class LocalLink(Link):
    """One attached socket."""

    transport = "shm"

    def __init__(self, connected: socket.socket, *, name: str) -> None:
        super().__init__()
        self._socket = connected
        self._name = name
        self._timeout_seconds = 0.0
        _links.add(self)

    @classmethod
    def attach(cls, offer: LocalTransport, lending: Lending, sender: Sender, *, name: str) -> LocalLink:
        """Connects and hands the segment over. Raises LinkLost or a PypsError that says why it cannot be."""
        assert isinstance(lending.segment, Segment)
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link = cls(connected, name=name)
        try:
            connected.settimeout(ATTACH_SECONDS)
            connected.connect("\0" + offer.address[1:] if offer.address.startswith("@") else offer.address)
            link._allow(ATTACH_SECONDS)
            # The first byte carries the descriptor; the message follows.
            message = _framed(lending.attach_request(sender, offer.ticket))
            sent = socket.send_fds(connected, [message], [lending.segment.fd])
            if sent < len(message):
                # Not for nothing: an empty send to an end that has answered and closed fails, and hides its answer.
                connected.sendall(message[sent:])
            reply = link._reply()
            if reply.WhichOneof("reply") != "attached" or reply.attached.nonce != lending.segment.nonce:
                raise LocalLost("the process behind the socket does not see this worker's memory")
        except OSError as error:
            link.close()
            raise LocalLost(error.strerror or str(error)) from None
        except BaseException:
            link.close()
            raise
        return link

    def end(self) -> None:
        super().end()
        if self.lost:
            # Looked at after the release: who closes the link meanwhile finds it free, or has set this before.
            self._close_socket()

    def request(self, request: LocalRequest, *, timeout_seconds: float) -> LocalReply:
        try:
            self._allow(timeout_seconds)
            self._socket.sendall(_framed(request))
            return self._reply()
        except BlockingIOError:
            self.close()
            raise LocalLost("no answer within the call's deadline") from None
        except OSError as error:
            self.close()
            raise LocalLost(error.strerror or str(error)) from None
        except (PypsError, Busy):
            raise
        except BaseException:
            # A reply may be under way still, which the next request must not take for its own.
            self.close()
            raise

    def close(self) -> None:
        # A thread that waits for a reply closes the socket when its turn ends.
        self.lost = True
        with contextlib.suppress(OSError):
            # It may not be connected, or the other end may have closed it.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._close_socket()

    def forget(self) -> None:
        """In a forked child: lets go of the socket, which stays its parent's."""
        self.lost = True
        self._socket.close()

    def _close_socket(self) -> None:
        """Closes the socket, unless it is somebody's turn: that ends with this too."""
        if self._turn.acquire(blocking=False):
            self._socket.close()
            self._turn.release()

    def _allow(self, timeout_seconds: float) -> None:
        """Sets how long the socket may wait: by the system's own means, since Python's cost a call each time."""
        if timeout_seconds == self._timeout_seconds:
            return
        self._timeout_seconds = timeout_seconds
        self._socket.setblocking(True)
        for direction, seconds in (
            (socket.SO_RCVTIMEO, min(timeout_seconds, SIGNAL_SECONDS)),
            (socket.SO_SNDTIMEO, timeout_seconds),
        ):
            microseconds = max(round(seconds * 1e6), 1)
            self._socket.setsockopt(socket.SOL_SOCKET, direction, _TIME.pack(*divmod(microseconds, 1_000_000)))

    def _receive(self) -> bytes:
        """What comes next; BlockingIOError when nothing does for as long as the socket may wait."""
        waited_seconds = 0.0
        while True:
            try:
                return self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                waited_seconds += SIGNAL_SECONDS
                if waited_seconds >= self._timeout_seconds:
                    raise

    def _reply(self) -> LocalReply:
        data = self._receive()
        while len(data) < _LENGTH.size or len(data) < _LENGTH.size + _LENGTH.unpack_from(data)[0]:
            more = self._receive()
            if not more:
                self.close()
                raise LocalLost("the server closed the local connection")
            data += more
        try:
            reply = LocalReply.FromString(data[_LENGTH.size :])
        except DecodeError:
            self.close()
            raise LocalLost("the server's answer is no message of the contract") from None
        if reply.WhichOneof("reply") != "failure":
            return reply
        failure = reply.failure
        if failure.name == ServerUnavailable.__name__:
            raise LocalLost(failure.details)
        error = from_status(failure.status, f"{failure.details} ({self._name})", failure.name or None)
        raise Busy(str(error)) if isinstance(error, LimitExceeded) else error


class SharedMemory(Transport):
    """Memory that worker and server share, where they run on one machine; gRPC for all else."""

    shares = True

    def __init__(self, *, insists: bool) -> None:
        self.insists = insists

    def memory(self, num_bytes: int) -> Memory:
        return Segment(num_bytes)

    def offer(self, reply: HelloReply, address: str) -> LocalTransport | None:
        return reply.local if reply.HasField("local") else None

    def attach(self, offer: LocalTransport, lending: Lending, sender: Sender, *, name: str) -> Link:
        return LocalLink.attach(offer, lending, sender, name=name)


def _framed(request: LocalRequest) -> bytes:
    message = request.SerializeToString()
    return _LENGTH.pack(len(message)) + message


_links: weakref.WeakSet[LocalLink] = weakref.WeakSet()


def _after_fork() -> None:
    for link in list(_links):
        link.forget()


at_fork(after_in_child=_after_fork)
