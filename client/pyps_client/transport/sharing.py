"""Sharing a session's vectors with the servers on its machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from operator import is_

from pyps_client.launch import Launch
from pyps_client.retry import LinkLost, LocalLost
from pyps_client.transport import NO_LANE, NO_OFFER, TICKET_SECONDS
from pyps_client.transport.connection import Connection
from pyps_client.transport.memory import Layout, Lent, Segment
from pyps_client.vectors import Vectors
from pyps_wire.common_pb2 import Sender
from pyps_wire.contract import GRADIENT_BUFFERS_MAX
from pyps_wire.errors import InvalidArgument, PypsError
from pyps_wire.parameter_server_pb2 import HelloReply, LocalTransport
from pyps_wire.partition import Partition


class Sharing:
    """One session's vectors, and the servers that share their memory. The others take messages; the log says why."""

    def __init__(
        self,
        launch: Launch,
        partition: Partition,
        connections: Sequence[Connection],
        sender: Sender,
        *,
        keeps_lanes: bool = False,
    ) -> None:
        """`keeps_lanes`: whether large messages go to servers that share the memory, too."""
        self._launch = launch
        self._keeps_lanes = keeps_lanes
        # To servers that hold shards.
        self._connections = [connection for connection in connections if partition.of_server(connection.index)]
        # The server that holds all shards, where it is one.
        self.holder = self._connections[0] if len(self._connections) == 1 else None
        self._sender = sender
        self._lent: Lent | None = None
        # Where the vectors are shared: their segment, and the request to attach it, but for the ticket.
        self._shared: tuple[Segment, Layout] | None = None
        # By server index: the newest Hello's offer, and its time.
        self._offers: dict[int, tuple[LocalTransport | None, float]] = {}

    def lend(self, layout: Layout) -> Lent:
        """Make the vectors, in memory shared with each server that offers it; once a session."""
        if self._lent is not None:
            raise InvalidArgument(
                "This session has lent its vectors already: keep what lend() returned, or make another."
            )
        if not 1 <= layout.gradient_buffers <= GRADIENT_BUFFERS_MAX:
            raise InvalidArgument(
                f"gradient_buffers is {layout.gradient_buffers}; expected 1 to {GRADIENT_BUFFERS_MAX} of them."
            )
        segment = self._segment(layout) if self._launch.dialer.shares else None
        if segment is not None:
            self._shared = segment, layout
            attached = [self._attach(connection) for connection in self._connections]
            if not any(attached):
                self._shared = segment = None
        self._lent = layout.vectors(segment)
        return self._lent

    def greeted(self, connection: Connection, reply: HelloReply) -> None:
        """Keep a server's offer; a server that was lost shares the same memory again."""
        offer = reply.local if self._launch.dialer.shares and reply.HasField("local") else None
        self._offers[connection.index] = offer, time.monotonic()
        if self._lent is not None and self._shared is not None and connection in self._connections:
            self._attach(connection)

    def is_stale(self, connection: Connection) -> bool:
        """Return whether another Hello is needed before memory is shared, since tickets are valid for seconds."""
        offer, offered_at = self._offers[connection.index]
        return offer is not None and time.monotonic() > offered_at + TICKET_SECONDS

    def gradients(self, vectors: Vectors) -> int | None:
        """Return the index of these gradients among the session's; None for others."""
        if self._lent is not None:
            for index, lent in enumerate(self._lent.gradients):
                if _same(vectors, lent):
                    return index
        return None

    def are_parameters(self, vectors: Vectors) -> bool:
        return self._lent is not None and _same(vectors, self._lent.parameters)

    @property
    def transport(self) -> str:
        """The name of the transport of the session's vectors, or "mixed"."""
        names = {connection.transport for connection in self._connections}
        return "mixed" if len(names) > 1 else names.pop()

    def _segment(self, layout: Layout) -> Segment | None:
        """Return memory to share; None where no server would share it, or the system has none."""
        offered = [connection for connection in self._connections if self._offers[connection.index][0]]
        reason = NO_OFFER
        if offered:
            try:
                for codec in layout.codecs:
                    codec.require_divisible()
                return Segment(layout.num_bytes)
            except InvalidArgument as refused:
                reason = str(refused)
            except OSError as error:
                reason = f"{layout.num_bytes} bytes of memory to share cannot be had ({error})"
        for connection in self._connections:
            self._refuse(connection, reason if connection in offered else NO_OFFER)
        return None

    def _attach(self, connection: Connection) -> bool:
        """Share the memory with a server; return False where messages serve instead."""
        if connection.link is not None:
            self._attached(connection)
            return True
        assert self._shared is not None
        segment, layout = self._shared
        try:
            offer, _ = self._offers[connection.index]
            if offer is None:
                raise LocalLost(NO_OFFER)
            request = layout.attach_request(self._sender, offer.ticket)
            connection.attach(partial(self._launch.dialer.attach, offer, segment, request, name=connection.name))
        except (LinkLost, PypsError) as problem:
            self._refuse(connection, str(problem))
            return False
        self._attached(connection)
        connection.left_unchecked = connection is self.holder
        connection.route.log("shared memory")
        return True

    def _attached(self, connection: Connection) -> None:
        if not self._keeps_lanes:
            connection.drop_lane()

    def _refuse(self, connection: Connection, reason: str) -> None:
        """Let messages serve from now on; raise where the launch forbids it."""
        if self._launch.dialer.insists:
            raise self._launch.dialer.refusal(connection.name, reason)
        connection.detach()
        connection.route.no_memory = f"no memory is shared ({reason.rstrip('.')})"
        # A lane logs it once it is open.
        if connection.lane is None:
            connection.route.log("gRPC", NO_LANE, connection.route.no_memory)


def _same(vectors: Vectors, lent: Vectors) -> bool:
    return vectors is lent or (len(vectors) == len(lent) and all(map(is_, vectors, lent)))
