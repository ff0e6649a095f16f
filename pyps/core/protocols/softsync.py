"""n-softsync: an update for every few gradients, whoever sent them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from pyps.core import spec
from pyps.core.gradient import PayloadKind
from pyps.core.protocols.base import Acknowledge, Aggregation, Apply, Arrival, Decision, Park, Pending, mean
from pyps.core.roster import Roster
from pyps_wire.errors import InvalidArgument

_ACKNOWLEDGE = Acknowledge()
_PARK = Park()


@dataclass(frozen=True, slots=True)
class Softsync(Aggregation):
    """Applies the mean of every c = max(1, floor(L / n)) gradients, each with its own staleness (Zhang et al. 2016).

    Several may be of one worker, and nobody waits. L is the number of workers that count, with those still
    expected; each shard counts for itself.
    """

    name: ClassVar[str] = "softsync"
    n: int = spec.required(example=4, unset=0)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InvalidArgument(
                f"softsync's n is {self.n}; expected at least 1, as in softsync:n=4: an update for every"
                " floor(workers / n) gradients"
            )

    def gradients_per_update(self, num_workers: int) -> int:
        """Return the paper's c."""
        return max(1, num_workers // self.n)

    def decide(self, arrival: Arrival) -> Decision:
        contribution, pending = arrival.contribution, arrival.pending
        if contribution.gradient.kind == PayloadKind.NOTHING:
            return _ACKNOWLEDGE
        if len(pending) + 1 < self.gradients_per_update(arrival.roster.num_expected):
            return _PARK
        return Apply(mean((*pending, contribution)))

    def complete(self, pending: Pending, version: int, roster: Roster) -> Apply | None:
        gradients_per_update = self.gradients_per_update(roster.num_expected)
        if len(pending) < gradients_per_update:
            return None
        return Apply(mean(islice(pending, gradients_per_update)))

    def split(self, roster: Roster) -> float:
        """Return the effective n = L / c, which is above the n asked for where that does not divide L."""
        num_workers = max(1, roster.num_expected)
        return num_workers / self.gradients_per_update(num_workers)

    def warnings(self, num_workers: int) -> tuple[str, ...]:
        gradients_per_update = self.gradients_per_update(num_workers)
        if num_workers == 0 or gradients_per_update * self.n == num_workers:
            return ()
        every = "gradient" if gradients_per_update == 1 else f"{gradients_per_update} gradients"
        return (
            f"softsync:n={self.n} with {num_workers} workers makes an update of every {every},"
            f" so the effective n is {num_workers / gradients_per_update:g}",
        )
