"""The ways to a server: what each makes of calls and of lent vectors, and which there are."""

from __future__ import annotations

import functools
import importlib
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar, TypeVar

from google.protobuf.message import Message

from pyps_client.credentials import Credentials
from pyps_client.log import logger
from pyps_client.retry import LocalLost
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import InvalidArgument, ServerUnavailable
from pyps_wire.local_pb2 import LocalReply, LocalRequest
from pyps_wire.parameter_server_pb2 import HelloReply, LocalTransport

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyps_client.transport.lent import Lending, Memory

Reply = TypeVar("Reply", bound=Message)
# Takes a reply; True once it was the round's last.
Take = Callable[[bytes], bool]
# A message's header, and its payload where it lies.
Parts = tuple[bytes, "Buffer"]
# Takes a reply's header, and its payload of so many bytes by handing a place for it to what receives it; True once it
# was the round's last.
TakeParts = Callable[[bytes, int, Callable[[memoryview], None]], bool]

# How often a thread that waits for its turn looks whether that may take long.
LOOK_SECONDS = 0.005

# What a Hello's tickets are good for; servers give them somewhat longer.
TICKET_SECONDS = 20.0

# What is lost so often goes by gRPC: a local link amid one operation, or lanes by which nothing came in between.
LINKS_LOST_MAX = 3

NO_OFFER = "it offers no shared memory"
NO_LANE = "it offers no lane"


class Told:
    """What a caller was told of the way of its numbers to one server: a line once it is known, and when it changes."""

    def __init__(self, server: str) -> None:
        self._server = server
        # In words, the last one told; empty before.
        self.way = ""
        # Why no memory is shared, where that was tried.
        self.no_memory = ""

    def tell(self, way: str, *reasons: str) -> None:
        """Says which way it is, and why it is not a nearer one, unless that was the way before."""
        if way != self.way:
            self.way = way
            why = "; ".join(reason.rstrip(".") for reason in reasons if reason)
            logger.info("gradients and parameters go to and from %s by %s%s", self._server, way, why and f": {why}")


class Channel(ABC):
    """A connection of its own to one server. Calls raise the server's own error, LinkLost or Busy."""

    # The transport, by its name.
    transport: ClassVar[str]
    address: str
    # A nearer way for large messages, where there is one.
    lane: Lane | None = None
    # Of all of a caller's channels to the server.
    told: Told
    # Whether the server has answered before, on this connection or another: what TLS refuses then may be renewed.
    was_heard = False

    @property
    def is_outdated(self) -> bool:
        """Whether a new connection would show another token than this one."""
        return False

    @abstractmethod
    def call(self, method: str, request: Message, reply: type[Reply], *, timeout_seconds: float) -> Reply:
        """Calls a method with one request and one reply."""

    @abstractmethod
    def start(
        self, method: str, request: Message, reply: type[Reply], *, timeout_seconds: float
    ) -> Callable[[], Reply]:
        """Begins such a call, whose reply or error comes of what is returned."""

    @abstractmethod
    def exchange(
        self, frames: Iterator[bytes], take: Take, *, timeout_seconds: float, method: str = "Exchange"
    ) -> None:
        """Sends one round of a method, and hands the answers to `take` until it says that all are there.

        One round of a method at a time. Frames may have to be waited for: answers are taken meanwhile.
        """

    def push(self, frames: Iterator[bytes], take: Take, *, timeout_seconds: float) -> None:
        """Does the same with `Push`: also while a round of `Exchange` is under way."""
        self.exchange(frames, take, timeout_seconds=timeout_seconds, method="Push")

    @abstractmethod
    def read(self, method: str, request: Message, *, timeout_seconds: float) -> Iterator[bytes]:
        """Sends one request and yields the answers as bytes."""

    @abstractmethod
    def send(self, method: str, requests: Iterable[bytes], reply: type[Reply], *, timeout_seconds: float) -> Reply:
        """Sends messages from an iterator and returns the one reply."""

    @abstractmethod
    def close(self) -> None:
        """Ends all calls and the connection."""


class Lane(ABC):
    """A way of messages whose payloads are sent from where they lie, and received where they are used."""

    @abstractmethod
    def begin(self) -> bool:
        """Takes it for one round; False where it is in use, or cannot be had: calls are to serve. Raises LinkLost."""

    @abstractmethod
    def end(self) -> None:
        """Leaves it to others."""

    @abstractmethod
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
        """Does as `Channel.exchange`, `push` or `read`, by the method's name; `is_small`: all messages and answers are.

        Where it fails, `lost` ends the waits of messages that are not there yet: no thread reads numbers once this has
        left.
        Raises LinkLost, Busy or the server's own error.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends it, also amid a round, on any thread."""


class Link(ABC):
    """A way for lent vectors, which the server sees too: requests without numbers.

    Requests and replies alternate, so one thread at a time has it.
    """

    # The transport, by its name.
    transport: ClassVar[str]

    def __init__(self) -> None:
        self.lost = False
        self._turn = threading.Lock()
        # Whether the request under way is one that the server holds until it is time.
        self._parked = False

    def begin(self, *, parks: bool = False) -> bool:
        """Takes the link for one request, which `parks` where the server may hold it until it is time.

        False where another thread's parks.
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
        if self.lost:
            # Looked at after the release: who closes the link meanwhile finds it free, or has set this before.
            self.close()

    @abstractmethod
    def request(self, request: LocalRequest, *, timeout_seconds: float) -> LocalReply:
        """Asks within one's turn. Raises LocalLost, Busy or the server's own error."""

    @abstractmethod
    def close(self) -> None:
        """Ends the link, also once more; a thread that waits for a reply is told."""


class Transport(ABC):
    """A transport that a worker may choose."""

    # Whether vectors are lent in memory that the server may see.
    shares = False
    # Whether the worker ends rather than go on by calls where a server does not share them.
    insists = False

    @abstractmethod
    def channel(self, address: str, credentials: Credentials, *, use_proxy: bool) -> Channel:
        """A way for calls; what is wrong with it, calls tell."""

    def memory(self, num_bytes: int) -> Memory:
        """Memory for vectors that are lent. Raises OSError where it cannot be had."""
        raise OSError("this transport shares no memory")

    def offer(self, reply: HelloReply, address: str) -> LocalTransport | None:
        """Where to attach that memory, by what the server at this address says; None for nowhere."""
        return None

    def attach(self, offer: LocalTransport, lending: Lending, sender: Sender, *, name: str) -> Link:
        """Attaches it to a server of that name. Raises LinkLost or a PypsError that says why it cannot be."""
        raise LocalLost(f"{name} cannot see this worker's memory")

    def hindrance(self, reply: HelloReply) -> str:
        """Why no memory can be shared with the server that gave this reply; empty where nothing speaks against it."""
        return NO_OFFER

    def refusal(self, server: str, reason: str) -> ServerUnavailable:
        """The error for a worker that insists on this transport, which cannot be had."""
        return ServerUnavailable(
            f"transport is 'shm', but no memory can be shared with {server}: {reason}. Run worker and server on one "
            "machine, as one user, with the server's --local-socket where both see it; or set transport "
            "(PYPS_TRANSPORT) to 'auto'."
        )


# Loaded when they are used: one of them needs what only Linux has.
_CLASSES = {
    "auto": "pyps_client.transport.shared_memory:SharedMemory",
    "shm": "pyps_client.transport.shared_memory:OnlySharedMemory",
    "tcp": "pyps_client.transport.tcp:OnlyTcp",
    "grpc": "pyps_client.transport.grpc:Grpc",
}
TRANSPORTS = tuple(_CLASSES)


def check_transport(name: str) -> None:
    """Refuses a name that is none, or of what this system has not got."""
    if name not in TRANSPORTS:
        raise InvalidArgument(f"transport is {name!r}; expected one of {', '.join(TRANSPORTS)}.")
    if name == "tcp" and not _has_lanes():
        raise InvalidArgument(
            "transport is 'tcp', but this system's sockets cannot send from two places at once, as lanes do; set "
            "transport (PYPS_TRANSPORT) to 'auto' or 'grpc'."
        )
    if name == "shm" and not _has_shared_memory():
        raise InvalidArgument(
            "transport is 'shm', but workers share memory with servers on Linux only; set transport (PYPS_TRANSPORT) "
            "to 'auto' or 'grpc'."
        )


@functools.cache
def named(name: str) -> Transport:
    """The transport of that name."""
    module, _, of_module = _CLASSES[name].partition(":")
    if name == "auto" and not _has_shared_memory():
        module, of_module = ("pyps_client.transport.tcp", "Tcp") if _has_lanes() else _CLASSES["grpc"].split(":")
    return getattr(importlib.import_module(module), of_module)()  # type: ignore[no-any-return]


def _has_lanes() -> bool:
    return hasattr(socket.socket, "sendmsg")


def _has_shared_memory() -> bool:
    return hasattr(os, "memfd_create") and hasattr(socket, "AF_UNIX")
