"""Where servers of this process are found by workers of this process: nothing goes through a socket."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Protocol

from pyps_wire.errors import InvalidArgument
from pyps_wire.local_pb2 import LocalAttach, LocalReply, LocalRequest


class End(Protocol):
    """The server's end of a worker's memory, which it reads and writes in place. For any thread."""

    def request(self, request: LocalRequest) -> Future[LocalReply]:
        """Begins to answer; a PypsError of it is ServerUnavailable once it has ended. One request at a time."""
        ...

    def hang_up(self) -> None:
        """Ends it: the memory is touched no more once what is under way has ended."""
        ...


class Server(Protocol):
    """A server, as who calls it in its own process sees it. For any thread."""

    def call(self, method: str, requests: Iterator[bytes], take: Callable[[bytes], None]) -> Future[None]:
        """Begins a call by its full name; `take` gets each message that answers it, before the call is done."""
        ...

    def attach(self, request: LocalAttach, memory: memoryview) -> Future[End]:
        """Takes a worker's memory in, laid out as the request says."""
        ...


# By data address.
SERVERS: dict[str, Server] = {}


def start_local_server() -> str:
    """Starts a server in this process, with a run of its own, and returns its address."""
    try:
        # Not of this distribution: asked for by name, where somebody has installed it.
        local = importlib.import_module("pyps.service.local")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyps":
            raise
        raise InvalidArgument(
            "servers='local' runs a server in this process, which needs the package pyps: install it from the "
            "folder that this client came from; or name servers."
        ) from None
    address: str = local.start()
    return address


def end_local_server(address: str) -> None:
    """Ends a server that `start_local_server` began, unless it has a run: then it ends with that."""
    if address in SERVERS and (local := sys.modules.get("pyps.service.local")) is not None:
        local.end(address)


# A forked child has their memory, but none of their threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SERVERS.clear)
