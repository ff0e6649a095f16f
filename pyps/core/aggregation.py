"""How pushed gradients become updates.

A protocol only decides. The gradients that wait lie with their shard, which does what was decided: so a
protocol holds no state, serves all shards at once, and a checkpoint of the shards is a checkpoint of
everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pyps.core.gradient import Gradient
from pyps.core.receipt import Reason
from pyps.core.staleness import Weighing
from pyps_wire.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Contribution:
    """A gradient and what its staleness made of it.

    The version moves with updates only, so a gradient that waits does not grow staler.
    """

    gradient: Gradient
    staleness: int
    weighing: Weighing


@dataclass(frozen=True, slots=True)
class Arrival:
    """A gradient that has just come, and what a protocol may know."""

    contribution: Contribution
    # The gradients that wait, in order of arrival.
    pending: tuple[Contribution, ...]
    version: int
    num_workers: int


@dataclass(frozen=True, slots=True)
class Part:
    """One gradient's place in an update: `share` is its fraction of the sum, 1/c in a mean of c."""

    contribution: Contribution
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Apply:
    """Make one update now of these parts, summed in this order. The arrival is one of them."""

    parts: tuple[Part, ...]

    def share_of(self, contribution: Contribution) -> float:
        """Returns the contribution's share of the update."""
        return next(part.share for part in self.parts if part.contribution is contribution)


@dataclass(frozen=True, slots=True)
class Park:
    """Keep the gradient until enough are there."""


@dataclass(frozen=True, slots=True)
class Drop:
    """The gradient is good but not needed."""

    message: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The gradient cannot be used."""

    reason: Reason
    message: str


Decision = Apply | Park | Drop | Refuse


class Aggregation(Protocol):
    """Decides what becomes of each gradient that arrives.

    Called under a shard's lock, from many shards at once: it must be quick, must not block, must hold no
    state, and must give equal answers to equal arrivals (a shard's log is replayed through it).
    """

    name: str

    def decide(self, arrival: Arrival) -> Decision:
        """Returns what is to be done with the arrival."""
        ...


class Async:
    """Applies every gradient on arrival (Dean et al. 2012, section 4.1)."""

    name = "async"

    def decide(self, arrival: Arrival) -> Decision:
        return Apply((Part(arrival.contribution),))


PROTOCOLS: dict[str, type[Aggregation]] = {"async": Async}


def parse(text: str) -> Aggregation:
    """Returns the protocol that the text names."""
    if text not in PROTOCOLS:
        raise BadRequest(f"protocol {text!r} is unknown; expected one of {', '.join(sorted(PROTOCOLS))}")
    return PROTOCOLS[text]()
