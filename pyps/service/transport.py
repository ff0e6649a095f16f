"""The seam of transports: what a way of gradients and parameters is to the server that offers it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import grpc

from pyps.config import ServerConfig
from pyps.run.handshake import Greeting
from pyps.run.run import Run
from pyps.service.calls import Awaited
from pyps.service.executor import KernelExecutor
from pyps.service.health import Health
from pyps.service.limits import ByteBudget
from pyps.service.security import Access
from pyps.service.serializations import Serializations
from pyps.service.tls import Tls
from pyps.storage.folder import CheckpointFolder
from pyps_wire import parameter_server_pb2 as wire


@dataclass(frozen=True)
class Host:
    """What one server's transports, services and reports have in common."""

    config: ServerConfig
    access: Access
    tls: Tls | None
    run: Run
    work: KernelExecutor
    budget: ByteBudget
    awaited: Awaited
    health: Health
    serializations: Serializations
    checkpoints: CheckpointFolder | None


class Service(Protocol):
    """A service of the contract."""

    def handlers(self) -> grpc.GenericRpcHandler:
        """Its handlers: bytes in, bytes out."""
        ...


class Transport(ABC):
    """One way of a server's gradients and parameters. For the event loop, `used_by` and `shared_bytes` apart."""

    # As workers choose it and reports name it.
    name: ClassVar[str]

    def __init__(self, host: Host):
        self._host = host

    @property
    def facts(self) -> Mapping[str, str]:
        """What the server's start block says of it, once it has started."""
        return {}

    @property
    def shared_bytes(self) -> int:
        """Of workers' own memory, as far as this process has it in reach."""
        return 0

    def bind(self) -> str:
        """Takes the address at which servers are called, and returns it, before the run is restored: empty for none."""
        return ""

    @abstractmethod
    async def start(self, services: Sequence[Service], address: str) -> None:
        """Begins to serve; `address` is the server's, by which all workers know it. ConfigError where it cannot."""

    def let_go(self) -> None:  # noqa: B027
        """Waits no more for what callers have begun to send and do not go on with: the server ends."""

    @abstractmethod
    async def stop(self, seconds: float) -> None:
        """Takes no more callers, lets requests under way end for so long, then ends the rest."""

    async def offer(self, greeting: Greeting) -> wire.HelloReply:
        """What Hello tells of this way, in the fields that are its own.

        ServerUnavailable where a former request of the worker goes on: it has nothing under way when it says Hello.
        """
        return wire.HelloReply()

    @abstractmethod
    def used_by(self, worker_id: str, incarnation: int) -> bool:
        """Whether that worker's gradients and parameters took this way last, as far as it can tell."""


def name_of(transports: Sequence[Transport], worker_id: str, incarnation: int) -> str:
    """The way that a worker's gradients and parameters took last: the first that knows of it."""
    return next(transport.name for transport in transports if transport.used_by(worker_id, incarnation))
