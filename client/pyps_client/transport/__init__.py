"""Transports: they carry rounds of messages between a worker and one server; a dialer opens each."""

from __future__ import annotations

import functools
import importlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from google.protobuf.message import Message

from pyps_client.credentials import Credentials
from pyps_client.log import logger
from pyps_client.transport.memory import Segment
from pyps_wire.common_pb2 import Receipt, Sender
from pyps_wire.errors import InvalidArgument, ServerUnavailable
from pyps_wire.local_pb2 import LocalRequest
from pyps_wire.parameter_server_pb2 import ExchangeReply, HelloReply, LocalTransport, Parameters

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The methods of rounds, and the messages that answer them.
REPLIES: dict[str, Any] = {"Push": Receipt, "Exchange": ExchangeReply, "Pull": Parameters}

# How long a worker uses a Hello's tickets; servers accept them somewhat longer.
TICKET_SECONDS = 20.0

# After so many losses gRPC is used instead: of shared memory in one operation, of lanes without a message in between.
LINKS_LOST_MAX = 3

NO_OFFER = "it offers no shared memory"
NO_LANE = "it offers no lane"


class Incoming(NamedTuple):
    """A payload that is not received yet."""

    nbytes: int
    # Receives as many bytes as the place has.
    receive: Callable[[memoryview], None]


# A reply's payload: received, not received yet, or None where the server wrote it into shared memory.
Payload: TypeAlias = "memoryview | Incoming | None"
# Takes a reply and its payload; returns True for the last reply of the round.
Take = Callable[[Any, Payload], bool]


@dataclass(slots=True)
class Parts:
    """The messages of one round."""

    # Headers and payloads, each made when the transport can send it; making one may take long.
    messages: Iterable[tuple[Message, Buffer]]
    timeout_seconds: float
    # Whether the system buffers all messages, so that replies need not be read meanwhile.
    are_small: bool = False
    # The headers in one request, for a server that shares the memory of the numbers.
    request: LocalRequest | None = None
    # Whether the server may hold the round until other workers have done something.
    waits: bool = False
    # Called after a failed round: `messages` must not wait for further gradients.
    abandon: Callable[[], object] = lambda: None


class Transport(ABC):
    """Carries rounds of messages to one server, and the replies back."""

    # As in `Launch.transport`.
    name: ClassVar[str]
    # Whether it is lost for good, so that another transport must be opened.
    lost = False

    @abstractmethod
    def round(self, method: str, parts: Parts, take: Take) -> bool:
        """Send the messages of a method of `REPLIES` and pass replies to `take` until it returns True.

        Returns:
            False, with nothing sent, if another thread uses the transport or it cannot be opened: another transport
            must do the round.

        Raises:
            LinkLost: The connection was lost, or must be opened again. No thread reads numbers any more.
            Busy: The server has no room now.
            PypsError: The server's own error.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the transport, on any thread; a round under way ends with LinkLost."""


class Route:
    """Logs by which transport gradients and parameters go to one server, whenever it changes."""

    def __init__(self, server: str) -> None:
        self._server = server
        # The last one logged.
        self.transport = ""
        # Why no memory is shared.
        self.no_memory = ""

    def log(self, transport: str, *reasons: str) -> None:
        """Log a new transport, and why it is no faster one."""
        if transport != self.transport:
            self.transport = transport
            why = "; ".join(reason.rstrip(".") for reason in reasons if reason)
            logger.info(
                "gradients and parameters go to and from %s by %s%s", self._server, transport, why and f": {why}"
            )


class Greeted(NamedTuple):
    """A worker and a server that has answered its Hello."""

    sender: Sender
    reply: HelloReply
    address: str
    credentials: Credentials
    route: Route


class Dialer:
    """Opens the transports of one choice (`Launch.transport`); gRPC serves where it opens none."""

    # Whether a server on this machine may share the memory of vectors.
    shares = False
    # Whether the worker ends rather than use another transport.
    insists = False

    def lane(self, greeted: Greeted, former: Transport | None) -> Transport | None:
        """Return the lane that the server offers, in place of the former one."""
        return None

    def attach(self, offer: LocalTransport, memory: Segment, request: LocalRequest, *, name: str) -> Transport:
        """Share memory with the server `name`. Raises LinkLost or a PypsError with the reason against it."""
        raise NotImplementedError

    def hindrance(self, reply: HelloReply) -> str:
        """Return why this transport cannot be opened to the server of that reply; empty if nothing prevents it."""
        return NO_OFFER

    def refusal(self, server: str, reason: str) -> ServerUnavailable:
        """Return the error for a worker that insists on this transport."""
        return ServerUnavailable(
            f"transport is 'shm', but no memory can be shared with {server}: {reason}. Run worker and server on one "
            "machine, as one user, with the server's --local-socket where both see it; or set transport "
            "(PYPS_TRANSPORT) to 'auto'."
        )


# Loaded when used: shared memory needs Linux.
_CLASSES = {
    "auto": "pyps_client.transport.shared_memory:SharedMemory",
    "shm": "pyps_client.transport.shared_memory:OnlySharedMemory",
    "tcp": "pyps_client.transport.tcp:OnlyTcp",
    "grpc": "pyps_client.transport:Dialer",
}
TRANSPORTS = tuple(_CLASSES)


def check_transport(name: str) -> None:
    if name not in TRANSPORTS:
        raise InvalidArgument(f"transport is {name!r}; expected one of {', '.join(TRANSPORTS)}.")
    lack = ""
    if name == "tcp" and not _has_lanes():
        lack = "this system's sockets cannot send from two places at once, as lanes do"
    if name == "shm" and not _has_shared_memory():
        lack = "workers share memory with servers on Linux only"
    if lack:
        raise InvalidArgument(f"transport is {name!r}, but {lack}; set transport (PYPS_TRANSPORT) to 'auto' or 'grpc'.")


@functools.cache
def named(name: str) -> Dialer:
    """Return the dialer of a `Launch.transport`."""
    module, _, of_module = _CLASSES[name].partition(":")
    if name == "auto" and not _has_shared_memory():
        module, of_module = ("pyps_client.transport.tcp", "Tcp") if _has_lanes() else (__name__, "Dialer")
    return getattr(importlib.import_module(module), of_module)()  # type: ignore[no-any-return]


def _has_lanes() -> bool:
    return hasattr(socket.socket, "sendmsg")


def _has_shared_memory() -> bool:
    return hasattr(os, "memfd_create") and hasattr(socket, "AF_UNIX")
