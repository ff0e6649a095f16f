"""The lane: one TCP connection to a server for large messages; gRPC carries all else."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time

from google.protobuf.message import DecodeError

from pyps_client.fork import tracked
from pyps_client.retry import SIGNAL_SECONDS, Busy, LinkLost, LocalLost
from pyps_client.transport import (
    LINKS_LOST_MAX,
    NO_LANE,
    REPLIES,
    TICKET_SECONDS,
    Dialer,
    Greeted,
    Incoming,
    Parts,
    Take,
    Transport,
)
from pyps_client.transport.threads import Future, Threads
from pyps_wire import lane
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import LimitExceeded, NoRoom, PypsError, ServerUnavailable, from_status
from pyps_wire.lane_pb2 import LaneOpen
from pyps_wire.local_pb2 import LocalFailure
from pyps_wire.parameter_server_pb2 import HelloReply, LaneOffer

A_LANE = "a lane"
ADVICE = (
    "Let the server have a --lane-port that this worker can reach; or set transport (PYPS_TRANSPORT), which is 'tcp', "
    "to 'auto'"
)
_KINDS = {"Push": lane.PUSH, "Exchange": lane.EXCHANGE, "Pull": lane.PULL}
# Who does not answer for so long is no lane: a firewall, or another program.
OPEN_SECONDS = 5.0
HEADER_BYTES_MAX = 1 << 22
# A C program's struct timeval.
_TIME = struct.Struct("ll")


class Tcp(Dialer):
    """A lane where a server offers one that can be reached."""

    def lane(self, greeted: Greeted, former: Transport | None) -> Transport | None:
        assert former is None or isinstance(former, TcpLane)
        route, offer = greeted.route, greeted.reply.lane
        if not greeted.reply.HasField("lane"):
            if self.insists:
                raise self.refusal(greeted.address, NO_LANE)
            if former is not None:
                former.close()
            if route.transport == A_LANE or not self.shares:
                # Else it is logged once it is known whether memory is shared.
                route.log("gRPC", NO_LANE, route.no_memory)
            return None
        if former is not None and not former.is_closed and not former.lost:
            former.offered(offer)
            return former
        num_lost = 0 if former is None or former.lost else former.num_lost
        lane = TcpLane(greeted, insists=self.insists, num_lost=num_lost)
        if num_lost >= LINKS_LOST_MAX and not self.insists:
            lane.give_up(f"the lane at port {offer.port} was lost again and again")
        return lane


class OnlyTcp(Tcp):
    """The same, for a worker that ends rather than go without."""

    insists = True

    def hindrance(self, reply: HelloReply) -> str:
        return "" if reply.HasField("lane") else NO_LANE

    def refusal(self, server: str, reason: str) -> ServerUnavailable:
        return ServerUnavailable(f"transport is 'tcp', but there is no lane to {server}: {reason}. {ADVICE}.")


class TcpLane(Transport):
    """One lane, opened by its first round, with the ticket of the newest Hello; a lost one needs another Hello."""

    name = "tcp"

    def __init__(self, greeted: Greeted, *, insists: bool = False, num_lost: int = 0) -> None:
        # How many lanes were lost, this one and those before it, since a message last came by one.
        self.num_lost = num_lost
        self._peer = greeted
        self._sender = Sender()
        self._sender.CopyFrom(greeted.sender)
        self._insists = insists
        self._turn = threading.Lock()
        self._threads = Threads()
        self._deadline = 0.0
        # While it is open.
        self._wire: lane.Lane | None = None
        self.is_closed = False
        self.offered(greeted.reply.lane)

    def offered(self, offer: LaneOffer) -> None:
        """Keep the offer of the newest Hello."""
        self._offer, self._offered_at = offer, time.monotonic()

    def round(self, method: str, parts: Parts, take: Take) -> bool:
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if self._wire is None and not self._open():
                return False
            self._do(method, parts, take)
        finally:
            self._turn.release()
            if self.is_closed:
                # Checked after the release: another thread that closes the lane finds it free, or has set this before.
                self.close()
        return True

    def give_up(self, reason: str) -> None:
        """Leave rounds to gRPC from now on, and log why. Raises LocalLost where the worker insists."""
        if self._insists:
            raise LocalLost(f"{reason.rstrip('.')}. {ADVICE}")
        self.lost = True
        route = self._peer.route
        route.log("gRPC", reason, route.no_memory)

    def _do(self, method: str, parts: Parts, take: Take) -> None:
        wire, kind, reply_of = self._wire, _KINDS[method], REPLIES[method].FromString
        assert wire is not None
        self._deadline = time.monotonic() + parts.timeout_seconds
        sending: Future[None] | None = None
        failure: Exception | None = None
        try:
            if parts.are_small:
                _send(wire, kind, parts)
            else:
                sending = Future(lambda: _send(wire, kind, parts))
                self._threads.start(sending)
            while True:
                answer, header, payload_bytes = wire.receive(header_bytes_max=HEADER_BYTES_MAX)
                if answer == lane.FAILURE:
                    failure = verdict_of(LocalFailure.FromString(header), f"server {self._peer.address}")
                    if kind != lane.PULL:
                        raise failure
                    # The lane is sound.
                    break
                if answer == lane.END:
                    self.num_lost = 0
                    break
                is_last = take(reply_of(header), Incoming(payload_bytes, wire.receive_into))
                self.num_lost = 0
                if is_last:
                    break
        except BaseException as error:
            # The next round must not take the rest of this one for its replies.
            self.is_closed = True
            wire.shut()
            if sending is not None:
                # No thread may read the numbers after the return.
                parts.abandon()
                sending.wait(OPEN_SECONDS)
                if sending.error is not None and not isinstance(sending.error, (OSError, LinkLost)):
                    raise sending.error from None
            if failure is None and isinstance(error, (OSError, lane.LaneClosed, DecodeError, LinkLost)):
                self.num_lost += 1
            if isinstance(error, lane.LaneClosed) and sending is not None and isinstance(sending.error, LinkLost):
                # It was closed here, as what was to be sent took too long.
                raise sending.error from None
            if isinstance(error, (OSError, lane.LaneClosed, DecodeError)):
                raise _lost(error) from None
            raise
        if failure is not None:
            raise failure

    def close(self) -> None:
        # A thread amid a round lets go of the socket when its turn ends.
        self.is_closed = True
        wire = self._wire
        if wire is not None:
            wire.shut()
        if self._turn.acquire(blocking=False):
            self._wire = None
            self._threads.close()
            if wire is not None:
                wire.close()
            self._turn.release()

    def _open(self) -> bool:
        """Open it with the ticket of the newest Hello; False where it cannot be opened."""
        if self.lost:
            return False
        ticket, self._offer.ticket = self._offer.ticket, b""
        if self.is_closed or not ticket or time.monotonic() > self._offered_at + TICKET_SECONDS:
            # Hello brings another.
            raise LocalLost("the lane is to be opened again")
        host, port = self._peer.address.rpartition(":")[0].strip("[]"), self._offer.port
        route, credentials = self._peer.route, self._peer.credentials
        try:
            self._wire = self._opened(host, port, ticket)
        except (OSError, lane.LaneClosed, DecodeError, LinkLost, PypsError) as error:
            reason = str(_lost(error)) if isinstance(error, (OSError, lane.LaneClosed)) else str(error)
            if isinstance(error, ssl.SSLError):
                reason = credentials.explained(f"{host}:{port}", error)
            elif isinstance(error, lane.LaneClosed) and not credentials.tls_ca:
                reason += " at once, as by a server that takes TLS only: set tls_ca (PYPS_TLS_CA) if it does"
            self.give_up(f"no lane at port {port}: {reason}")
            return False
        route.log(A_LANE, route.no_memory)
        if self.is_closed:
            # By a thread that found nothing to shut yet.
            raise LocalLost("the lane was closed")
        return True

    def _opened(self, host: str, port: int, ticket: bytes) -> lane.Lane:
        credentials = self._peer.credentials
        end = socket.create_connection((host, port), OPEN_SECONDS)
        try:
            end.setblocking(True)
            for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                # By the system's own means, since Python's cost a call each time.
                end.setsockopt(socket.SOL_SOCKET, direction, _TIME.pack(0, round(SIGNAL_SECONDS * 1e6)))
            if credentials.tls_ca:
                context = credentials.context()
                wire: lane.Lane = lane.SecureLane(end, context, server_hostname=host, waited=self._waited)
            else:
                wire = lane.Lane(end, waited=self._waited)
            self._deadline = time.monotonic() + OPEN_SECONDS
            wire.handshake()
            wire.send(lane.OPEN, LaneOpen(sender=self._sender, ticket=ticket).SerializeToString())
            answer, header, _ = wire.receive(header_bytes_max=HEADER_BYTES_MAX)
            if answer == lane.FAILURE:
                raise verdict_of(LocalFailure.FromString(header), f"server {self._peer.address}")
            if answer != lane.OPEN:
                raise LocalLost("another program answers there")
        except BaseException:
            end.close()
            raise
        _open.add(wire)
        return wire

    def _waited(self) -> None:
        if time.monotonic() >= self._deadline:
            raise LocalLost("no answer within the call's deadline")


def verdict_of(failure: LocalFailure, server: str) -> Exception:
    if failure.name == ServerUnavailable.__name__:
        return LocalLost(failure.details)
    error = from_status(failure.status, f"{failure.details} ({server})", failure.name or None)
    return Busy(str(error)) if isinstance(error, LimitExceeded) and not isinstance(error, NoRoom) else error


def _send(wire: lane.Lane, kind: int, parts: Parts) -> None:
    try:
        for message, payload in parts.messages:
            wire.send(kind, message.SerializeToString(), payload)
    except BaseException:
        # The thread that waits for replies ends.
        wire.shut()
        raise


def _lost(error: Exception) -> LocalLost:
    if isinstance(error, OSError):
        return LocalLost(error.strerror or str(error))
    return LocalLost("the lane was closed" if isinstance(error, lane.LaneClosed) else "no message of the contract came")


# In a forked child the sockets are closed, and stay its parent's.
_open = tracked(after_in_child=lane.Lane.close)
