"""Protocols that decide which worker may compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pyps.core import spec
from pyps.core.pacing import ClockBound, Pacer, TurnTaking
from pyps.core.protocols.asynchronous import Async
from pyps.core.protocols.barrier import StrictBsp
from pyps.core.protocols.base import Aggregation, Arrival, Decision
from pyps.core.roster import Roster
from pyps_wire.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Serial(Async):
    """One worker computes at a time, in turn (the STT chapter's "synchronous")."""

    name: ClassVar[str] = "serial"

    def pacer(self) -> Pacer:
        return TurnTaking()

    def split(self, roster: Roster) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class Ssp(Async):
    """Stale synchronous parallel: no worker is more than s clocks ahead of the slowest (Ho et al. 2013).

    Pulls may bring gradients of the present clock. With `strict_bsp` and s = 0 every worker pulls the parameters of the
    barrier instead; an update is a sum, so divide a rate of hardsync by L.
    """

    name: ClassVar[str] = "ssp"
    s: int = spec.required(example=3, unset=-1)
    strict_bsp: bool = False

    def __post_init__(self) -> None:
        if self.s < 0:
            raise InvalidArgument(
                f"ssp's s is {self.s}; expected the clocks that a worker may be ahead of the slowest, as in ssp:s=3"
            )
        if self.strict_bsp and self.s:
            raise InvalidArgument(f"ssp's strict_bsp needs s=0, and s is {self.s}; set one or the other")

    def at(self, version: int) -> Aggregation:
        return _STRICT if self.strict_bsp else self

    def pacer(self) -> Pacer | None:
        return None if self.strict_bsp else ClockBound(self.s)

    @property
    def barrier(self) -> bool:
        return self.strict_bsp


_STRICT = StrictBsp()


@dataclass(frozen=True, slots=True)
class Sandblaster(Aggregation):
    """Sandblaster L-BFGS (Dean et al. 2012, section 4.2): a coordinator moves the parameters, and no worker pushes.

    Workers stage sums of gradients on the servers, which the coordinator adds up by operations on vectors.
    """

    name: ClassVar[str] = "sandblaster"
    coordinated: ClassVar[bool] = True

    def decide(self, arrival: Arrival) -> Decision:
        raise InvalidArgument(
            f"worker {arrival.contribution.gradient.worker_id!r} pushed a gradient to a run under sandblaster, whose"
            " parameters its coordinator moves: let the script call pyps_client.sandblaster, or start the servers with"
            " another --protocol"
        )

    def check_change(self, before: Aggregation) -> None:
        if not before.coordinated:
            raise InvalidArgument(
                f"the run trains by {before.text}, and {self.text} would end each of its workers at its next push: a "
                "coordinator moves the parameters then. Keep the run's protocol, or begin another run under "
                f"{self.name}"
            )
