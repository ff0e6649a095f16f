"""Which servers see a worker's lent vectors in their own memory, and how they come to."""

from __future__ import annotations

from collections.abc import Sequence

from pyps_client.connection import Connection
from pyps_client.launch import Launch
from pyps_client.lent import Layout, Lending, segment_bytes
from pyps_client.log import logger
from pyps_client.retry import LinkLost
from pyps_client.shareable import NO_OFFER, cannot_share
from pyps_client.vectors import Vectors
from pyps_wire.common_pb2 import Sender
from pyps_wire.contract import GRADIENT_BUFFERS_MAX
from pyps_wire.errors import BadRequest, PypsError
from pyps_wire.parameter_server_pb2 import HelloReply, LocalTransport
from pyps_wire.partition import Partition


class Sharing:
    """One session's lent vectors, and the local links to servers that share them.

    Where one cannot be had, that server's gradients and parameters go by gRPC; what is said of it is one line.
    """

    def __init__(self, launch: Launch, partition: Partition, connections: Sequence[Connection], sender: Sender) -> None:
        self._launch = launch
        # Those that matter: to servers that hold shards.
        self._connections = [connection for connection in connections if partition.of_server(connection.index)]
        self._sender = sender
        self._lending: Lending | None = None
        # By server index, what the last Hello said.
        self._offers: dict[int, LocalTransport] = {}

    def lend(self, layout: Layout) -> Lending:
        """Lends vectors, in memory that is shared with every server that offers it; once a session."""
        if self._lending is not None:
            raise BadRequest("This session has lent its vectors already: keep what lend() returned, or make another.")
        if not 1 <= layout.gradient_buffers <= GRADIENT_BUFFERS_MAX:
            raise BadRequest(
                f"gradient_buffers is {layout.gradient_buffers}; expected 1 to {GRADIENT_BUFFERS_MAX} of them."
            )
        lending = self._shared(layout)
        if lending is not None:
            attached = [self._attach(connection, lending) for connection in self._connections]
            if any(attached):
                self._lending = lending
                return lending
        self._lending = Lending(layout)
        return self._lending

    def greeted(self, connection: Connection, reply: HelloReply) -> None:
        """Notes a server's offer; one that had been lost and came back is handed the same memory again."""
        self._offers.pop(connection.index, None)
        if (offer := self._launch.way.offer(reply, connection.address)) is not None:
            self._offers[connection.index] = offer
        lending = self._lending
        if lending is not None and lending.segment is not None and connection in self._connections:
            self._attach(connection, lending)

    def gradients(self, vectors: Vectors) -> int | None:
        """Which of the lent gradients these are; None for others."""
        return None if self._lending is None else self._lending.index_of(vectors)

    def are_parameters(self, vectors: Vectors) -> bool:
        """Whether these are the lent parameters."""
        return self._lending is not None and self._lending.are_parameters(vectors)

    @property
    def transport(self) -> str:
        """The way of lent vectors, by its transport's name, or "mixed"."""
        names = {(connection.link or connection.channel).transport for connection in self._connections}
        return "mixed" if len(names) > 1 else names.pop()

    @property
    def checks_first(self) -> bool:
        """Whether one server sees all that is pushed, before it applies any.

        Where the link is lost before a push is sent, the push is looked through here (see OutgoingPush).
        """
        return len(self._connections) == 1 and self._connections[0].is_local

    def _shared(self, layout: Layout) -> Lending | None:
        """Vectors in a segment; None where nobody would see it, or it cannot be had."""
        if not self._launch.way.shares:
            return None
        offered = [connection for connection in self._connections if connection.index in self._offers]
        if not offered:
            self._refuse(self._connections[0], NO_OFFER)
            return None
        try:
            for codec in layout.lists():
                codec.require_divisible()
            return Lending(layout, self._launch.way.memory(segment_bytes(layout)))
        except BadRequest as refused:
            self._refuse(offered[0], str(refused))
            return None
        except OSError as error:
            self._refuse(offered[0], f"{segment_bytes(layout)} bytes of memory to share cannot be had ({error})")
            return None

    def _attach(self, connection: Connection, lending: Lending) -> bool:
        """Hands the memory to a server; False where its gradients and parameters go by gRPC instead."""
        if connection.link is not None:
            return True
        offer = self._offers.get(connection.index)
        if offer is None:
            self._refuse(connection, NO_OFFER)
            return False
        try:
            connection.attach(offer, lending, self._sender)
        except (LinkLost, PypsError) as problem:
            self._refuse(connection, str(problem))
            return False
        connection.left_to_look = len(self._connections) == 1
        logger.info("sharing memory with %s", connection.name)
        return True

    def _refuse(self, connection: Connection, reason: str) -> None:
        """Says why a server's vectors go by gRPC from now on; raises where the launch forbids it."""
        if self._launch.way.insists:
            raise cannot_share(connection.name, reason)
        connection.detach()
        logger.info("gradients and parameters go to and from %s by gRPC: %s", connection.name, reason)
