"""The network between workers and a server: a NIC each, whose two directions are queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pyps.simulation.event import Scheduler

# Schedules an action of the caller's at a time.
At = Callable[[float, Callable[[], None]], None]


@dataclass(frozen=True)
class Network:
    """How long messages take. A message takes its bytes; receipts and requests take the latency alone."""

    latency_seconds: float = 0.0
    # Of each worker's NIC, in each direction.
    bytes_per_second: float = float("inf")
    # Of the server's.
    server_bytes_per_second: float = float("inf")
    # By shard, how many numbers its messages hold; () for as many as the shard does. So a large model needs no memory.
    sizes: Sequence[int] = ()

    @property
    def is_instant(self) -> bool:
        """Whether messages take no time."""
        return not self.latency_seconds and min(self.bytes_per_second, self.server_bytes_per_second) == float("inf")


class Lane:
    """One direction of a NIC: messages pass one after the other, in the order in which their first bytes come."""

    __slots__ = ("_bytes_per_second", "free_at")

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self.free_at = 0.0

    def take(self, num_bytes: int, *, at: float) -> float:
        """Let a message pass that is there at that time; return when it begins to."""
        began = max(at, self.free_at)
        self.free_at = began + num_bytes / self._bytes_per_second
        return began


@dataclass
class Nic:
    """Both directions of a machine's link."""

    bytes_per_second: float
    out: Lane = field(init=False)
    into: Lane = field(init=False)

    def __post_init__(self) -> None:
        self.out, self.into = Lane(self.bytes_per_second), Lane(self.bytes_per_second)


class Links:
    """Carries messages. The second NIC passes a message on while the first one still sends it."""

    def __init__(self, network: Network, scheduler: Scheduler) -> None:
        self.latency_seconds = network.latency_seconds
        self._scheduler = scheduler
        self._server = Nic(network.server_bytes_per_second)

    def to_server(self, nic: Nic, num_bytes: int, *, at: At, then: Callable[[], None]) -> None:
        """Send a message from a worker; call `then` once all of it has come."""
        began = nic.out.take(num_bytes, at=self._scheduler.now)
        last_byte = nic.out.free_at + self.latency_seconds
        at(began + self.latency_seconds, partial(self._come, num_bytes, last_byte, at, then))

    def to_worker(self, nic: Nic, num_bytes: int, *, at: At, then: Callable[[], None]) -> None:
        """The same from the server, whose messages reach a worker in the order in which they are sent."""
        began = self._server.out.take(num_bytes, at=self._scheduler.now)
        nic.into.take(num_bytes, at=began + self.latency_seconds)
        at(max(nic.into.free_at, self._server.out.free_at + self.latency_seconds), then)

    def _come(self, num_bytes: int, last_byte: float, at: At, then: Callable[[], None]) -> None:
        self._server.into.take(num_bytes, at=self._scheduler.now)
        at(max(self._server.into.free_at, last_byte), then)
