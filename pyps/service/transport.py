"""The interface of a server's transports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pyps.config import ServerConfig
from pyps.run.handshake import Greeting
from pyps.run.run import Run
from pyps.service.calls import WaitingCalls
from pyps.service.executor import KernelExecutor
from pyps.service.health import Health
from pyps.service.limits import ByteBudget
from pyps.service.security import Access
from pyps.service.serializations import Serializations
from pyps.service.standby.feed import Feed
from pyps.service.tls import Tls
from pyps.storage.folder import CheckpointFolder
from pyps_wire import parameter_server_pb2 as wire


@dataclass(frozen=True)
class Host:
    """The parts of one server that its transports, services and reports share."""

    config: ServerConfig
    access: Access
    tls: Tls | None
    run: Run
    work: KernelExecutor
    budget: ByteBudget
    waiting: WaitingCalls
    health: Health
    serializations: Serializations
    checkpoints: CheckpointFolder | None
    feed: Feed = field(default_factory=Feed)


class Transport(ABC):
    """Carries gradients and parameters. For the event loop, except `used_by` and `shared_bytes`."""

    # As settings and reports name it.
    name: ClassVar[str]
    # How much of workers' memory this process maps.
    shared_bytes = 0

    def __init__(self, host: Host):
        self._host = host

    @property
    def facts(self) -> Mapping[str, str]:
        """Return the transport's lines of the server's start block, once it has started."""
        return {}

    def bind(self) -> str:
        """Bind and return the address at which the server is called, before the run is restored; empty for none."""
        return ""

    @abstractmethod
    async def start(self, services: Mapping[str, object], address: str) -> None:
        """Begin to serve. ConfigError where it cannot.

        `services` has an object for each service of the contract, with its calls as methods on bytes. `address` is the
        server's, by which all workers know it.
        """

    def let_go(self) -> None:  # noqa: B027
        """Stop waiting for the rest of messages that do not go on, since the server ends."""

    @abstractmethod
    async def stop(self, seconds: float) -> None:
        """Accept no more callers, wait at most `seconds` for requests under way, then end the rest."""

    async def offer(self, greeting: Greeting) -> wire.HelloReply:
        """Return the fields of Hello's reply that offer this transport.

        ServerUnavailable while an earlier request of the worker goes on.
        """
        return wire.HelloReply()

    @abstractmethod
    def used_by(self, worker_id: str, incarnation: int) -> bool:
        """Return whether that worker's gradients and parameters took this transport last, as far as it knows."""


def name_of(transports: Sequence[Transport], worker_id: str, incarnation: int) -> str:
    """Return the transport that a worker's gradients and parameters took last: the first that knows it."""
    return next(transport.name for transport in transports if transport.used_by(worker_id, incarnation))
