"""What a protocol is asked and what it may answer.

The classes made for every push are named tuples, which cost a third of a frozen dataclass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
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


class Pending:
    """The gradients that wait at a shard, in order of arrival, and whose they are. Guarded by its shard's lock.

    A protocol reads it and changes nothing. Whose are there is kept up to date, not looked up: a round of many workers
    would cost the square of their number.
    """

    __slots__ = ("_late", "_roster", "_waiting", "_workers", "num_bytes")

    def __init__(self, contributions: Iterable[Contribution] = ()) -> None:
        self._waiting: list[Contribution] = []
        self._workers: set[str] = set()
        # What `late` says of the roster asked about last.
        self._late: OrderedDict[str, None] = OrderedDict()
        self._roster: Roster | None = None
        # The size of the payloads.
        self.num_bytes = 0
        for contribution in contributions:
            self.add(contribution)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Contribution]:
        return iter(self._waiting)

    @property
    def workers(self) -> Collection[str]:
        """Whose they are; not to be kept."""
        return self._workers

    def late(self, roster: Roster) -> Collection[str]:
        """The workers that count and of whom none is there, ascending; not to be kept."""
        if roster is not self._roster:
            self._late = OrderedDict.fromkeys(name for name in roster.workers if name not in self._workers)
            self._roster = roster
        return self._late.keys()

    def add(self, contribution: Contribution) -> None:
        """Lets one more wait."""
        gradient = contribution.gradient
        self._waiting.append(contribution)
        self._workers.add(gradient.worker_id)
        self._late.pop(gradient.worker_id, None)
        self.num_bytes += memoryview(gradient.payload).nbytes


class Arrival(NamedTuple):
    """A gradient that has just come, and what a protocol may know."""

    contribution: Contribution
    pending: Pending
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
    # The workers for whose gradients it waits, as a receipt names them.
    waiting_for: tuple[str, ...] = ()


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
