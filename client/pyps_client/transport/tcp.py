"""The lane: one TCP connection to a server for large messages, beside gRPC for all else."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable

from google.protobuf.message import DecodeError, Message

from pyps_client.credentials import Credentials
from pyps_client.fork import at_fork
from pyps_client.retry import SIGNAL_SECONDS, Busy, LinkLost, LocalLost
from pyps_client.transport import LINKS_LOST_MAX, NO_LANE, TICKET_SECONDS, Channel, Lane, Parts, Reply, TakeParts
from pyps_client.transport.grpc import Grpc, GrpcChannel
from pyps_client.transport.threads import Future, Threads
from pyps_wire import lane
from pyps_wire.common_pb2 import ROLE_WORKER, Sender
from pyps_wire.errors import LimitExceeded, PypsError, ServerUnavailable, from_status
from pyps_wire.lane_pb2 import LaneOpen
from pyps_wire.local_pb2 import LocalFailure
from pyps_wire.parameter_server_pb2 import HelloReply, HelloRequest, LaneOffer

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


class Tcp(Grpc):
    """A lane where a server offers one that can be reached; gRPC for all else."""

    def channel(self, address: str, credentials: Credentials, *, use_proxy: bool) -> Channel:
        return LaneChannel(self, address, credentials, use_proxy=use_proxy)


class OnlyTcp(Tcp):
    """The same, for a worker that ends rather than go without."""

    insists = True

    def hindrance(self, reply: HelloReply) -> str:
        return "" if reply.HasField("lane") else NO_LANE

    def refusal(self, server: str, reason: str) -> ServerUnavailable:
        return ServerUnavailable(f"transport is 'tcp', but there is no lane to {server}: {reason}. {ADVICE}.")


class LaneChannel(GrpcChannel):
    """A channel of gRPC's, with a lane as the server's answer to Hello says."""

    def __init__(self, way: Tcp, address: str, credentials: Credentials, *, use_proxy: bool) -> None:
        super().__init__(address, credentials, use_proxy=use_proxy)
        self._way = way

    @property
    def transport(self) -> str:  # type: ignore[override]
        return "grpc" if self.lane is None else "tcp"

    def call(self, method: str, request: Message, reply: type[Reply], *, timeout_seconds: float) -> Reply:
        answer = super().call(method, request, reply, timeout_seconds=timeout_seconds)
        if isinstance(request, HelloRequest) and isinstance(answer, HelloReply) and request.role == ROLE_WORKER:
            self._hear(request.sender, answer)
        return answer

    def close(self) -> None:
        if self.lane is not None:
            self.lane.close()
        super().close()

    def go_without(self, reason: str) -> None:
        """Lets gRPC serve from now on, and says so. Raises LocalLost where the worker insists."""
        if self._way.insists:
            raise LocalLost(f"{reason.rstrip('.')}. {ADVICE}")
        self.lane = None
        self.told.tell("gRPC", reason, self.told.no_memory)

    def _hear(self, sender: Sender, reply: HelloReply) -> None:
        if not reply.HasField("lane"):
            if self._way.insists:
                raise self._way.refusal(self.address, NO_LANE)
            if self.lane is not None:
                self.lane.close()
                self.lane = None
            if self.told.way == A_LANE or not self._way.shares:
                # Else who lends vectors knows first whether memory is shared.
                self.told.tell("gRPC", NO_LANE, self.told.no_memory)
        elif isinstance(self.lane, TcpLane) and not self.lane.is_closed:
            self.lane.offered(reply.lane)
        else:
            num_lost = self.lane.num_lost if isinstance(self.lane, TcpLane) else 0
            self.lane = TcpLane(self, sender, reply.lane, num_lost=num_lost)
            if num_lost >= LINKS_LOST_MAX and not self._way.insists:
                self.go_without(f"the lane at port {reply.lane.port} was lost again and again")


class TcpLane(Lane):
    """A lane of one channel. It is opened when it is first used, and never again without another Hello."""

    def __init__(self, channel: LaneChannel, sender: Sender, offer: LaneOffer, *, num_lost: int = 0) -> None:
        # How many lanes, this one and those before it, were lost since a message last came by one.
        self.num_lost = num_lost
        self._channel = channel
        self._sender = Sender()
        self._sender.CopyFrom(sender)
        self._turn = threading.Lock()
        self._threads = Threads()
        self._deadline = 0.0
        # While it is open.
        self._wire: lane.Lane | None = None
        self.is_closed = False
        self.offered(offer)

    def offered(self, offer: LaneOffer) -> None:
        """Notes what the newest Hello brought."""
        self._offer, self._offered_at = offer, time.monotonic()

    def begin(self) -> bool:
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if self._wire is None:
                self._open()
                if self.is_closed:
                    # Who closed it may have found nothing to shut yet.
                    raise LocalLost("the lane was closed")
        except BaseException:
            self.end()
            raise
        if self._wire is None:
            self.end()
            return False
        return True

    def end(self) -> None:
        self._turn.release()
        if self.is_closed:
            # Looked at after the release: who closes the lane meanwhile finds it free, or has set this before.
            self.close()

    def round(
        self,
        method: str,
        messages: Iterable[Parts],
        take: TakeParts,
        *,
        is_small: bool,
        timeout_seconds: float,
        lost: Callable[[], object] = lambda: None,
    ) -> None:
        wire, kind = self._wire, _KINDS[method]
        assert wire is not None
        self._deadline = time.monotonic() + timeout_seconds
        sending: Future[None] | None = None
        failure: Exception | None = None
        try:
            if is_small:
                # Both directions fit into what the system keeps for a connection.
                _send(wire, kind, messages)
            else:
                sending = self._threads.submit(lambda: _send(wire, kind, messages))
            while True:
                answer, header, payload_bytes = wire.receive(header_bytes_max=HEADER_BYTES_MAX)
                if answer == lane.FAILURE:
                    failure = verdict_of(LocalFailure.FromString(header), f"server {self._channel.address}")
                    if kind != lane.PULL:
                        raise failure
                    # The lane is sound.
                    break
                is_last = answer == lane.END or take(header, payload_bytes, wire.receive_into)
                self.num_lost = 0
                if is_last:
                    break
        except BaseException as error:
            # What is under way still must not be taken for the answer to what comes next.
            self._lose(wire)
            if sending is not None:
                # Nobody may read the numbers any more once this has left.
                lost()
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

    def _open(self) -> None:
        """Opens it with the ticket of the last Hello; where it cannot be had, gRPC serves."""
        ticket, self._offer.ticket = self._offer.ticket, b""
        if self.is_closed or not ticket or time.monotonic() > self._offered_at + TICKET_SECONDS:
            # Hello brings another.
            raise LocalLost("the lane is to be opened anew")
        host, port = self._channel.address.rpartition(":")[0].strip("[]"), self._offer.port
        try:
            self._wire = self._opened(host, port, ticket)
        except (OSError, lane.LaneClosed, DecodeError, LinkLost, PypsError) as error:
            reason = str(_lost(error)) if isinstance(error, (OSError, lane.LaneClosed)) else str(error)
            credentials = self._channel.credentials
            if isinstance(error, ssl.SSLError):
                reason = credentials.explained(f"{host}:{port}", error)
            elif isinstance(error, lane.LaneClosed) and not credentials.tls_ca:
                reason += " at once, as by a server that takes TLS only: set tls_ca (PYPS_TLS_CA) if it does"
            self._channel.go_without(f"no lane at port {port}: {reason}")
        else:
            self._channel.told.tell(A_LANE, self._channel.told.no_memory)

    def _opened(self, host: str, port: int, ticket: bytes) -> lane.Lane:
        credentials = self._channel.credentials
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
                raise verdict_of(LocalFailure.FromString(header), f"server {self._channel.address}")
            if answer != lane.OPEN:
                raise LocalLost("another program answers there")
        except BaseException:
            end.close()
            raise
        _open.add(wire)
        return wire

    def _lose(self, wire: lane.Lane) -> None:
        self.is_closed = True
        wire.shut()

    def _waited(self) -> None:
        if time.monotonic() >= self._deadline:
            raise LocalLost("no answer within the call's deadline")


def verdict_of(failure: LocalFailure, server: str) -> Exception:
    """What a server's refusal is to be raised as."""
    if failure.name == ServerUnavailable.__name__:
        return LocalLost(failure.details)
    error = from_status(failure.status, f"{failure.details} ({server})", failure.name or None)
    return Busy(str(error)) if isinstance(error, LimitExceeded) else error


def _send(wire: lane.Lane, kind: int, messages: Iterable[Parts]) -> None:
    try:
        for header, payload in messages:
            wire.send(kind, header, payload)
    except BaseException:
        # Who waits for the answers is told.
        wire.shut()
        raise


def _lost(error: Exception) -> LocalLost:
    if isinstance(error, OSError):
        return LocalLost(error.strerror or str(error))
    return LocalLost("the lane was closed" if isinstance(error, lane.LaneClosed) else "no message of the contract came")


_open: weakref.WeakSet[lane.Lane] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child: lets go of the sockets, which stay its parent's."""
    for wire in list(_open):
        wire.close()


at_fork(after_in_child=_after_fork)
