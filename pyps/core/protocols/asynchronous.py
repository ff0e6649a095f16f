"""Protocols under which no worker waits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from pyps.core import spec
from pyps.core.gradient import PayloadKind
from pyps.core.protocols.base import (
    MERGES,
    Acknowledge,
    Aggregation,
    Apply,
    Arrival,
    Decision,
    Park,
    Part,
    Pending,
    mean,
    require_one_of,
)
from pyps.core.replicas import parts_in_words
from pyps.core.roster import Roster
from pyps_wire.errors import InvalidArgument

_ACKNOWLEDGE = Acknowledge()
_PARK = Park()


@dataclass(frozen=True, slots=True)
class Async(Aggregation):
    """Applies every gradient on arrival (Dean et al. 2012, section 4.1; softsync with n = L)."""

    name: ClassVar[str] = "async"

    def decide(self, arrival: Arrival) -> Decision:
        contribution = arrival.contribution
        if contribution.gradient.kind == PayloadKind.NOTHING:
            return _ACKNOWLEDGE
        return Apply((Part(contribution),))

    def split(self, roster: Roster) -> float:
        return float(max(1, len(roster.workers) + roster.missing))


MUTEXES = ("whole", "shard")


@dataclass(frozen=True, slots=True)
class Asgd(Async):
    """Async with one mutex for all pulls and updates of the model (Zhang et al. 2013).

    `mutex=whole` is the paper's and needs one server; `shard` locks each shard by itself. `accumulate` is the
    paper's number of minibatches whose gradients a worker sums in a push, 0 for the worker's own choice.
    """

    name: ClassVar[str] = "asgd"
    mutex: str = "whole"
    accumulate: int = 0

    def __post_init__(self) -> None:
        if self.mutex not in MUTEXES:
            raise InvalidArgument(f"asgd's mutex is {self.mutex!r}; expected one of {', '.join(MUTEXES)}")
        if not 0 <= self.accumulate <= spec.COUNT_MAX:
            raise InvalidArgument(
                f"asgd's accumulate is {self.accumulate}; expected the minibatches summed in a push,"
                f" at most {spec.COUNT_MAX}, or 0 to leave it to the workers"
            )

    @property
    def whole_model(self) -> bool:
        return self.mutex == "whole"

    def check_servers(self, num_servers: int) -> None:
        if self.whole_model and num_servers > 1:
            raise InvalidArgument(
                f"{self.text} holds one mutex over the whole model, which needs one server, and the run has "
                f"{num_servers}: start one server, or take asgd:mutex=shard"
            )

    def check_worker(self, worker_id: str, parts: tuple[int, ...], replica: str) -> None:
        if self.whole_model and parts:
            raise InvalidArgument(
                f"{self.text} holds one mutex over the whole model, and worker {worker_id!r} holds only "
                f"{parts_in_words(parts)} of it: take asgd:mutex=shard, or workers that hold the whole model"
            )


@dataclass(frozen=True, slots=True)
class Softsync(Aggregation):
    """Applies the mean of every c = max(1, floor(L / n)) gradients, each with its own staleness (Zhang et al. 2016).

    Several gradients may be of one worker, and no worker waits. L is the number of active and still expected workers.
    Each shard counts its own gradients.
    """

    name: ClassVar[str] = "softsync"
    n: int = spec.required(example=4, unset=0)
    merge: str = "senders"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InvalidArgument(
                f"softsync's n is {self.n}; expected at least 1, as in softsync:n=4: an update for every"
                " floor(workers / n) gradients"
            )
        require_one_of("softsync's merge", self.merge, MERGES)

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
        count = self.gradients_per_update(roster.num_expected)
        return Apply(mean(islice(pending, count))) if len(pending) >= count else None

    def split(self, roster: Roster) -> float:
        """Return the effective n = L / c, which is above the configured n if that does not divide L."""
        num_workers = max(1, roster.num_expected)
        return num_workers / self.gradients_per_update(num_workers)

    @property
    def updates_per_round(self) -> int:
        return self.n

    def warnings(self, num_workers: int) -> tuple[str, ...]:
        gradients_per_update = self.gradients_per_update(num_workers)
        if num_workers == 0 or gradients_per_update * self.n == num_workers:
            return ()
        every = "gradient" if gradients_per_update == 1 else f"{gradients_per_update} gradients"
        return (
            f"softsync:n={self.n} with {num_workers} workers makes an update of every {every},"
            f" so the effective n is {num_workers / gradients_per_update:g}",
        )
