"""Vectors that are lent to a worker's program: where a server runs on the worker's machine, both see them."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps_client.launch import Launch
from pyps_client.retry import LinkLost, LocalLost
from pyps_client.transport import NO_LANE, NO_OFFER, TICKET_SECONDS
from pyps_client.transport.connection import Connection
from pyps_client.vectors import Vectors, dtype_of
from pyps_wire.codecs import Codec
from pyps_wire.common_pb2 import Sender
from pyps_wire.contract import GRADIENT_BUFFERS_MAX
from pyps_wire.errors import InvalidArgument, PypsError
from pyps_wire.local_pb2 import LocalRequest, LocalVectors
from pyps_wire.parameter_server_pb2 import HelloReply, LocalTransport
from pyps_wire.partition import Model, Partition

# Vectors begin at multiples of a page: so a GPU's driver may pin them, and no two share a line of cache.
ALIGNMENT_BYTES = 4096
# Numbers begin behind a page that holds only a segment's nonce.
HEAD_BYTES = mmap.PAGESIZE


class Memory:
    """Memory for lent vectors, of this process alone: a forked child has a copy."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        # Where a system cannot fork, its memory is of one process anyway.
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._memory = mmap.mmap(-1, num_bytes, **flags)

    def vector(self, offset: int, size: int, dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """The numbers that begin `offset` bytes from the start. The mapping lasts as long as such a vector."""
        return np.frombuffer(self._memory, dtype, size, offset)


@dataclass(frozen=True)
class Lent:
    """The flat vectors of one session, one a parameter group; valid as long as somebody holds one of them."""

    # Where parameters arrive: in the type of the pull codec (float32, float16, or uint16, bfloat16's bits), or float32.
    parameters: list[npt.NDArray[Any]]
    # Where gradients leave from, in the push codec's type or float32: as many such lists as were asked for.
    gradients: list[list[npt.NDArray[Any]]]
    # True where no other process sees the memory: a forked child has a copy of its own.
    private: bool = False
    # The codec in which float32 gradients travel; None where all travel as they lie.
    converted_to: Codec | None = None


class Layout:
    """Which vectors are lent: the model's groups, in what types, how often; and where in a segment they lie."""

    def __init__(
        self, model: Model, codec: Codec, pull_codec: Codec, gradient_buffers: int, *, converts: bool = False
    ) -> None:
        """`converts`: vectors that no other process sees are float32, converted on their way."""
        self.model = model
        self.codec = codec
        self.gradient_buffers = gradient_buffers
        self.converts = converts
        # Those of each list of vectors: the gradients', then the parameters'.
        self.codecs = [codec] * gradient_buffers + [pull_codec]
        # Where each vector begins, list by list, and the size of all.
        self.offsets: list[list[int]] = []
        self.num_bytes = HEAD_BYTES
        for each in self.codecs:
            self.offsets.append([])
            for size in model.group_sizes:
                self.offsets[-1].append(self.num_bytes)
                self.num_bytes += -(-each.max_bytes(size) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Lending:
    """What one session has lent, in its own memory or in a segment."""

    def __init__(self, layout: Layout, segment: Memory | None = None) -> None:
        """In a segment of `layout.num_bytes`; without one in the process's own memory."""
        self.segment = segment
        self._layout = layout
        converts = layout.converts and segment is None
        lists: list[list[npt.NDArray[Any]]] = []
        for codec, offsets in zip(layout.codecs, layout.offsets, strict=True):
            dtype = dtype_of(codec, converted=converts)
            places = zip(layout.model.group_sizes, offsets, strict=True)
            lists.append(
                [segment.vector(place, size, dtype) if segment else _aligned(size, dtype) for size, place in places]
            )
        converted_to = layout.codec if converts else None
        self.lent = Lent(lists[-1], lists[:-1], private=segment is None, converted_to=converted_to)

    def attach_request(self, sender: Sender, ticket: bytes) -> LocalRequest:
        """Says to a server where in the segment everything lies."""
        assert self.segment is not None
        vectors = [
            LocalVectors(codec=codec, offsets=offsets)  # type: ignore[arg-type]
            for codec, offsets in zip(self._layout.codecs, self._layout.offsets, strict=True)
        ]
        request = LocalRequest()
        request.attach.sender.CopyFrom(sender)
        request.attach.ticket = ticket
        request.attach.segment_bytes = self.segment.num_bytes
        request.attach.gradients.extend(vectors[:-1])
        request.attach.parameters.CopyFrom(vectors[-1])
        return request


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
        # By server index, what the last Hello said, and when.
        self._offers: dict[int, LocalTransport | None] = {}
        self._offered_at: dict[int, float] = {}

    def lend(self, layout: Layout) -> Lending:
        """Lends vectors, in memory that is shared with every server that offers it; once a session."""
        if self._lending is not None:
            raise InvalidArgument(
                "This session has lent its vectors already: keep what lend() returned, or make another."
            )
        if not 1 <= layout.gradient_buffers <= GRADIENT_BUFFERS_MAX:
            raise InvalidArgument(
                f"gradient_buffers is {layout.gradient_buffers}; expected 1 to {GRADIENT_BUFFERS_MAX} of them."
            )
        lending = self._shared(layout)
        if lending is not None:
            attached = [self._attach(connection, lending) for connection in self._connections]
        if lending is None or not any(attached):
            lending = Lending(layout)
        self._lending = lending
        return lending

    def greeted(self, connection: Connection, reply: HelloReply) -> None:
        """Notes a server's offer; one that had been lost and came back is handed the same memory again."""
        self._offers[connection.index] = self._launch.way.offer(reply, connection.address)
        self._offered_at[connection.index] = time.monotonic()
        lending = self._lending
        if lending is not None and lending.segment is not None and connection in self._connections:
            self._attach(connection, lending)

    def is_stale(self, connection: Connection) -> bool:
        """Whether a server that is to be handed memory has to be greeted anew, since tickets hold for seconds."""
        aged = time.monotonic() > self._offered_at[connection.index] + TICKET_SECONDS
        return aged and self._offers[connection.index] is not None

    def gradients(self, vectors: Vectors) -> int | None:
        """Which of the lent gradients these are; None for others."""
        if self._lending is not None:
            for index, lent in enumerate(self._lending.lent.gradients):
                if _same(vectors, lent):
                    return index
        return None

    def are_parameters(self, vectors: Vectors) -> bool:
        """Whether these are the lent parameters."""
        return self._lending is not None and _same(vectors, self._lending.lent.parameters)

    @property
    def transport(self) -> str:
        """The way of lent vectors, by its transport's name, or "mixed"."""
        names = {connection.transport for connection in self._connections}
        return "mixed" if len(names) > 1 else names.pop()

    def _shared(self, layout: Layout) -> Lending | None:
        """Vectors in a segment; None where nobody would see it, or it cannot be had."""
        if not self._launch.way.shares:
            return None
        offered = [connection for connection in self._connections if self._offers.get(connection.index)]
        reason = NO_OFFER
        if offered:
            try:
                for codec in layout.codecs:
                    codec.require_divisible()
                return Lending(layout, self._launch.way.memory(layout.num_bytes))
            except InvalidArgument as refused:
                reason = str(refused)
            except OSError as error:
                reason = f"{layout.num_bytes} bytes of memory to share cannot be had ({error})"
        for connection in self._connections:
            self._refuse(connection, reason if connection in offered else NO_OFFER)
        return None

    def _attach(self, connection: Connection, lending: Lending) -> bool:
        """Hands the memory to a server; False where its gradients and parameters go by gRPC instead."""
        if connection.link is not None:
            connection.drop_lane()
            return True
        try:
            offer = self._offers.get(connection.index)
            if offer is None:
                raise LocalLost(NO_OFFER)
            connection.attach(partial(self._launch.way.attach, offer, lending, self._sender, name=connection.name))
        except (LinkLost, PypsError) as problem:
            self._refuse(connection, str(problem))
            return False
        connection.drop_lane()
        connection.left_to_look = len(self._connections) == 1
        connection.told.tell("shared memory")
        return True

    def _refuse(self, connection: Connection, reason: str) -> None:
        """Lets a server's vectors go by its channel from now on; raises where the launch forbids it.

        A lane says so once it is open.
        """
        if self._launch.way.insists:
            raise self._launch.way.refusal(connection.name, reason)
        connection.detach()
        connection.told.no_memory = f"no memory is shared ({reason.rstrip('.')})"
        if connection.channel.lane is None:
            connection.told.tell("gRPC", NO_LANE, connection.told.no_memory)


def _same(vectors: Vectors, lent: Vectors) -> bool:
    return vectors is lent or (len(vectors) == len(lent) and all(map(is_, vectors, lent)))


def _aligned(size: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    num_bytes = size * dtype.itemsize
    block = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -block.ctypes.data % ALIGNMENT_BYTES
    return block[start : start + num_bytes].view(dtype)
