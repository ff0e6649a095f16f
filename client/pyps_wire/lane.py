"""Messages of a lane (lane.proto): numbers are sent from their own memory and received into their place."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from pyps_wire.errors import LimitExceeded

if TYPE_CHECKING:
    from typing_extensions import Buffer

# A message's kind, the length of its header, and of its payload.
PREFIX = struct.Struct("<III")
OPEN, PUSH, EXCHANGE, PULL, END, FAILURE = range(1, 7)

# A worker that waits for an answer learns so soon that a server has closed its lane while the link was cut.
KEEPALIVE_SECONDS = 10
# As gRPC: what is sent over a link that was cut is repeated ever less often, and so long after it is there again.
UNANSWERED_SECONDS = 20

# One receive brings so much: all of a small message. What it brings of a large payload is copied once more.
_AHEAD_BYTES = 2**16
# So much is encrypted or decrypted in one go: many records, which still lie in a core's cache when they are sent.
_SECURED_BYTES = 2**18
# What TLS itself has to answer, as to new keys, goes with the next message sent. Nobody honest asks for so much.
_ANSWERS_BYTES_MAX = 2**14
# Where TCP_INFO has the milliseconds since data came last (linux/tcp.h).
_SILENT_AT = 52


class LaneClosed(Exception):
    """The other end has closed the lane."""


class Lane:
    """One end of a lane, whose socket blocks. One thread may send while another receives."""

    def __init__(self, end: socket.socket, *, waited: Callable[[], None] = lambda: None):
        """`waited` is called while a message is under way: after each part, and at the socket's time limit. It may
        raise."""
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Routers drop connections that are idle for long.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            for pause in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                end.setsockopt(socket.IPPROTO_TCP, pause, KEEPALIVE_SECONDS)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNANSWERED_SECONDS)
        self._socket = end
        self._waited = waited
        # Received bytes that are not taken yet lie between these.
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._start = self._stop = 0

    def handshake(self) -> None:
        """Wait until both ends are authenticated, before any message. Without TLS the ticket does that."""

    @property
    def is_empty(self) -> bool:
        """Whether all received bytes are taken."""
        return self._start == self._stop

    @property
    def has_more(self) -> bool:
        """Whether `fill` has bytes to take without the socket."""
        return not self.is_empty

    @property
    def begun(self) -> tuple[int, int, int] | None:
        """Return the kind of the message that has begun, and the lengths of header and payload; None without one."""
        if self._stop - self._start < PREFIX.size:
            return None
        return PREFIX.unpack_from(self._ahead, self._start)

    @property
    def is_large(self) -> bool:
        """Whether the message that has begun is too long for `whole`: `receive` takes it."""
        begun = self.begun
        return begun is not None and PREFIX.size + begun[1] + begun[2] > len(self._ahead)

    def fill(self) -> None:
        """Take the received bytes, without waiting. BlockingIOError where there are none, LaneClosed at the end."""
        num_bytes = self._stop - self._start
        if self._start:
            self._ahead[:num_bytes] = bytes(self._ahead[self._start : self._stop])
            self._start, self._stop = 0, num_bytes
        if num_bytes < len(self._ahead):
            self._stop += self._received(self._ahead[num_bytes:], socket.MSG_DONTWAIT)

    def whole(self) -> tuple[int, bytes, memoryview] | None:
        """Return the next message, kind, header and payload, if `fill` has brought all of it."""
        start = self._start + PREFIX.size
        if start > self._stop:
            return None
        kind, header_bytes, payload_bytes = PREFIX.unpack_from(self._ahead, self._start)
        end = start + header_bytes + payload_bytes
        if end > self._stop:
            return None
        self._start = end
        header = bytes(self._ahead[start : start + header_bytes])
        return kind, header, memoryview(bytes(self._ahead[start + header_bytes : end]))

    def send_now(self, kind: int, header: bytes, payload: Buffer = b"") -> memoryview:
        """Send as much of a small message as goes without waiting; return the rest, which is for `flush`."""
        return self._sent_now(b"".join((PREFIX.pack(kind, len(header), memoryview(payload).nbytes), header, payload)))

    def flush(self, rest: Buffer) -> None:
        """Send the rest of a message as `send_now` returned it."""
        view = memoryview(rest)
        while view:
            view = view[Lane._sent(self, [view]) :]

    def send(self, kind: int, header: bytes, payload: Buffer = b"") -> None:
        """Send a message; its payload must not change meanwhile."""
        view = memoryview(payload).cast("B")
        first = PREFIX.pack(kind, len(header), view.nbytes) + header
        sent = 0
        while sent < len(first):
            sent += self._sent([memoryview(first)[sent:], view])
        sent -= len(first)
        while sent < view.nbytes:
            sent += self._sent([view[sent:]])

    def wait(self) -> None:
        """Wait for the first bytes of a message."""
        while self.is_empty:
            self._start = 0
            self._stop = self._received(self._ahead)

    def receive(self, *, header_bytes_max: int) -> tuple[int, bytes, int]:
        """Return the next message without its payload: kind, header, and the payload's length. Take the payload next.

        LimitExceeded where the header is longer than it may be.
        """
        kind, header_bytes, payload_bytes = PREFIX.unpack(self._take(PREFIX.size))
        if header_bytes > header_bytes_max:
            raise LimitExceeded(
                f"a lane's message has a header of {header_bytes} bytes; expected at most {header_bytes_max}"
            )
        return kind, self._take(header_bytes), payload_bytes

    def receive_into(self, place: memoryview) -> None:
        """Fill the place with bytes of a payload."""
        at = min(self._stop - self._start, place.nbytes)
        place[:at] = self._ahead[self._start : self._start + at]
        self._start += at
        while at < place.nbytes:
            at += self._received(place[at:], socket.MSG_WAITALL)
            if at < place.nbytes:
                self._waited()

    def silent_seconds(self) -> float:
        """Return for how many seconds nothing was received, as the system reports it; 0 where it does not."""
        with suppress(AttributeError, OSError):
            told = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SILENT_AT + 4)
            return float(struct.unpack_from("I", told, _SILENT_AT)[0]) / 1000
        return 0.0

    def shut(self) -> None:
        """Let every operation on the lane fail, on any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def shut_reading(self) -> None:
        """Receive no more messages; messages may still be sent."""
        self._socket.shutdown(socket.SHUT_RD)

    def end(self) -> None:
        """Send no more, and discard received bytes until the other end closes.

        A lane closed with bytes unread is reset, and the last message would be lost with it.
        """
        self._socket.shutdown(socket.SHUT_WR)
        while self._socket.recv_into(self._ahead):
            continue

    def close(self) -> None:
        """Close the socket; no thread may use it any more."""
        self._socket.close()

    def _take(self, count: int) -> bytes:
        taken = bytes(self._ahead[self._start : min(self._start + count, self._stop)])
        self._start += len(taken)
        while len(taken) < count:
            self.wait()
            more = bytes(self._ahead[: min(count - len(taken), self._stop)])
            self._start, taken = len(more), taken + more
            if len(taken) < count:
                self._waited()
        return taken

    def _sent(self, views: list[memoryview]) -> int:
        while True:
            try:
                return self._socket.sendmsg(views)
            except BlockingIOError:
                self._waited()

    def _sent_now(self, message: bytes) -> memoryview:
        try:
            return memoryview(message)[self._socket.send(message, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return memoryview(message)

    def _received(self, place: memoryview, flags: int = 0) -> int:
        while True:
            try:
                count = self._socket.recv_into(place, 0, flags)
            except BlockingIOError:
                if flags & socket.MSG_DONTWAIT:
                    raise
                self._waited()
                continue
            if count == 0:
                raise LaneClosed
            return count


class SecureLane(Lane):
    """A lane by TLS, which is computed in memory: its socket blocks, and may be shut, as that of any lane."""

    def __init__(
        self,
        end: socket.socket,
        context: ssl.SSLContext,
        *,
        server_hostname: str | None = None,
        waited: Callable[[], None] = lambda: None,
    ):
        """The server's end without a `server_hostname`, else the end of who expects that server."""
        super().__init__(end, waited=waited)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_hostname is None, server_hostname=server_hostname
        )
        # OpenSSL lets one thread at once use a connection. Held while it computes, never while it waits.
        self._computing = threading.Lock()
        self._records = memoryview(bytearray(_SECURED_BYTES))

    def handshake(self) -> None:
        is_done = False
        while not is_done:
            try:
                with suppress(ssl.SSLWantReadError):
                    self._tls.do_handshake()
                    is_done = True
            finally:
                # Where it fails, what tells the other end why.
                self.flush(self._outgoing.read())
            if not is_done:
                self._receive_records()

    @property
    def has_more(self) -> bool:
        return not self.is_empty or bool(self._incoming.pending or self._tls.pending())

    def _sent(self, views: list[memoryview]) -> int:
        with self._computing:
            room = _SECURED_BYTES
            for view in views:
                if piece := view[:room]:
                    # All of it: memory has room.
                    room -= self._tls.write(piece)
            records = self._outgoing.read()
        self.flush(records)
        return _SECURED_BYTES - room

    def _sent_now(self, message: bytes) -> memoryview:
        with self._computing:
            self._tls.write(message)
            records = self._outgoing.read()
        return super()._sent_now(records)

    def _received(self, place: memoryview, flags: int = 0) -> int:
        at, has_tried = 0, False
        while True:
            with self._computing, suppress(ssl.SSLWantReadError):
                while at < place.nbytes:
                    # A count, which the stubs do not know.
                    count: int = self._tls.read(place.nbytes - at, place[at:])  # type: ignore[assignment]
                    if count == 0 and at == 0:
                        # By TLS's own message, after which every read says so.
                        raise LaneClosed
                    if count == 0:
                        break
                    at += count
            if self._outgoing.pending > _ANSWERS_BYTES_MAX:
                raise LaneClosed
            if at:
                return at
            if has_tried and flags & socket.MSG_DONTWAIT:
                # Others have their turn: what comes may hold no message without end.
                raise BlockingIOError
            self._receive_records(flags)
            has_tried = True

    def _receive_records(self, flags: int = 0) -> None:
        count = super()._received(self._records, flags & socket.MSG_DONTWAIT)
        # It may be a part of a record.
        self._waited()
        with self._computing:
            self._incoming.write(self._records[:count])
