"""What a protocol is asked and what it may answer.

The classes made for every push are named tuples, which cost a third of a frozen dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pyps.core.gradient import Gradient
from pyps.core.receipt import Reason
from pyps.core.roster import Roster
from pyps.core.staleness import Weighing


class Contribution(NamedTuple):
    """A gradient and what its staleness made of it.

    The version moves with updates only, so a gradient that waits does not grow staler.
    """

    gradient: Gradient
    staleness: int
    weighing: Weighing


class Arrival(NamedTuple):
    """A gradient that has just come, and what a protocol may know."""

    contribution: Contribution
    # The gradients that wait, in order of arrival.
    pending: tuple[Contribution, ...]
    version: int
    roster: Roster


class Part(NamedTuple):
    """One gradient's place in an update: `share` is its fraction of the sum, 1/c in a mean of c."""

    contribution: Contribution
    share: float = 1.0


class Apply(NamedTuple):
    """Make one update now of these parts, summed in this order.

    Where it answers an arrival, that is one of them. Gradients that are left out go on waiting.
    """

    parts: tuple[Part, ...]

    def share_of(self, contribution: Contribution) -> float:
        """Returns the contribution's share of the update."""
        for part in self.parts:
            if part.contribution is contribution:
                return part.share
        raise LookupError(contribution)


@dataclass(frozen=True, slots=True)
class Park:
    """Keep the gradient until enough are there."""

    # What the worker should wait for before it computes again; 0 where nobody waits.
    min_version: int = 0


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """The push brought no numbers and nothing waits for it: answer it, and make no update."""


@dataclass(frozen=True, slots=True)
class Drop:
    """The gradient is good but not needed."""

    message: str
    min_version: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """The gradient cannot be used."""

    reason: Reason
    message: str
    min_version: int = 0


Decision = Apply | Park | Acknowledge | Drop | Refuse
