"""What a transport is to a worker: its calls to a server, and its lent vectors."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import ClassVar

from pyps_client.channel import Channel, GrpcChannel
from pyps_client.lent import Lending
from pyps_client.retry import LocalLost
from pyps_client.segment import Memory
from pyps_wire.common_pb2 import Sender
from pyps_wire.local_pb2 import LocalReply, LocalRequest
from pyps_wire.parameter_server_pb2 import HelloReply, LocalTransport

# How often a thread that waits for its turn looks whether that may take long.
LOOK_SECONDS = 0.005


class Link(ABC):
    """A way for lent vectors, which the server sees too: requests without numbers.

    Requests and replies alternate, so one thread at a time has it.
    """

    # The transport, by its name.
    transport: ClassVar[str]

    def __init__(self) -> None:
        self._turn = threading.Lock()
        # Whether the request under way is one that the server holds until it is time.
        self._parked = False
        self.lost = False

    def begin(self, *, parks: bool = False) -> bool:
        """Takes the link for one request. False where the server holds another thread's until it is time.

        `parks` tells that this request may be held so.
        """
        if not self._turn.acquire(blocking=False):
            while not self._turn.acquire(timeout=LOOK_SECONDS):
                if self._parked:
                    return False
        self._parked = parks
        return True

    def end(self) -> None:
        """Leaves the link to others."""
        self._parked = False
        self._turn.release()

    @abstractmethod
    def request(self, request: LocalRequest, *, timeout_seconds: float) -> LocalReply:
        """Asks within one's turn. Raises LocalLost, Busy or the server's own error."""

    @abstractmethod
    def close(self) -> None:
        """Ends the link; a thread that waits for a reply is told."""


class Transport:
    """A transport that a worker may choose. This one is gRPC, by which all goes as calls."""

    # Whether vectors are lent in memory that the server may see.
    shares = False
    # Whether the worker ends rather than go on by calls where a server does not share them.
    insists = False

    def channel(self, address: str, *, token: str, use_proxy: bool) -> Channel:
        """A way for calls; what is wrong with it, calls tell."""
        return GrpcChannel(address, token=token, use_proxy=use_proxy)

    def memory(self, num_bytes: int) -> Memory:
        """Memory for vectors that are lent. Raises OSError where it cannot be had."""
        return Memory(num_bytes)

    def offer(self, reply: HelloReply, address: str) -> LocalTransport | None:
        """Where to attach that memory, by what the server at this address says; None for nowhere."""
        return None

    def attach(self, offer: LocalTransport, lending: Lending, sender: Sender, *, name: str) -> Link:
        """Attaches it to a server of that name. Raises LinkLost or a PypsError that says why it cannot be."""
        raise LocalLost(f"{name} cannot see this worker's memory")
