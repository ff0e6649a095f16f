"""Protocols that decide who may compute; on the shard every gradient is an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pyps.core import spec
from pyps.core.pacing import ClockBound, Pacer, TurnTaking
from pyps.core.protocols.asynchronous import Async
from pyps.core.protocols.barrier import StrictBsp
from pyps.core.protocols.base import Aggregation
from pyps.core.protocols.decision import Apply, Arrival, Decision, Pending
from pyps.core.roster import Roster
from pyps_wire.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Serial(Async):
    """One worker computes at a time, in turn (the STT chapter's "synchronous")."""

    name: ClassVar[str] = "serial"

    def pacer(self) -> Pacer:
        return TurnTaking()

    def split(self, roster: Roster) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class Ssp(Aggregation):
    """Stale synchronous parallel: nobody is more than s clocks ahead of the slowest (Ho et al. 2013).

    Reads are eager: they may hold gradients of the reader's own clock. `strict_bsp`, with s = 0, serves the
    barrier's snapshot instead; updates are sums, so rates compare with hardsync's after division by L.
    """

    name: ClassVar[str] = "ssp"
    s: int = spec.required(example=3, unset=-1)
    strict_bsp: bool = False

    def __post_init__(self) -> None:
        if self.s < 0:
            raise BadRequest(
                f"ssp's s is {self.s}; expected the clocks that a worker may be ahead of the slowest, as in ssp:s=3"
            )
        if self.strict_bsp and self.s:
            raise BadRequest(f"ssp's strict_bsp needs s=0, and s is {self.s}; set one or the other")

    def at(self, version: int) -> Aggregation:
        return _STRICT if self.strict_bsp else _EAGER

    def decide(self, arrival: Arrival) -> Decision:
        return self.at(arrival.version).decide(arrival)

    def complete(self, pending: Pending, version: int, roster: Roster) -> Apply | None:
        return self.at(version).complete(pending, version, roster)

    def settle(self, pending: Pending) -> Apply | None:
        return self.at(0).settle(pending)

    def waiting_for(self, pending: Pending, roster: Roster) -> tuple[str, ...]:
        return self.at(0).waiting_for(pending, roster)

    def split(self, roster: Roster) -> float:
        return self.at(0).split(roster)

    def pacer(self) -> Pacer | None:
        return None if self.strict_bsp else ClockBound(self.s)

    @property
    def barrier(self) -> bool:
        return self.strict_bsp


_EAGER = Async()
_STRICT = StrictBsp()
