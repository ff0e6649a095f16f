"""Protocols whose updates consist of gradients of one version: none is stale, and workers wait."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from pyps.core import spec
from pyps.core.gradient import Gradient, PayloadKind
from pyps.core.protocols.base import (
    MERGES,
    Aggregation,
    Apply,
    Arrival,
    Contribution,
    Decision,
    Drop,
    Park,
    Part,
    Pending,
    Refuse,
    mean,
    require_one_of,
)
from pyps.core.receipt import WAITING_FOR_MAX, Reason
from pyps.core.roster import Roster, not_joined
from pyps_wire.errors import InvalidArgument


class Barrier(Aggregation):
    """One gradient from each worker makes a round; the round is one update, summed in worker order."""

    __slots__ = ()

    @property
    def barrier(self) -> bool:
        return True

    @property
    def updates_per_round(self) -> int:
        return 1

    def decide(self, arrival: Arrival) -> Decision:
        contribution, pending, version, roster = arrival
        gradient = contribution.gradient
        if gradient.base_version != version:
            return self.late(gradient.base_version, version)
        worker_id = gradient.worker_id
        if worker_id in pending.workers:
            message = (
                f"worker {worker_id!r} has given its gradient to the round that makes version {version + 1};"
                " wait for that version"
            )
            return Refuse(Reason.REPEATED, message, min_version=version + 1)
        if self._is_due(roster, pending, newest=worker_id):
            return Apply(self.parts(_in_worker_order((*pending, contribution))))
        others = (name for name in _awaited(pending, roster) if name != worker_id)
        return Park(version + 1, tuple(islice(others, WAITING_FOR_MAX)))

    def complete(self, pending: Pending, version: int, roster: Roster) -> Apply | None:
        return self.settle(pending) if pending and self._is_due(roster, pending) else None

    def settle(self, pending: Pending) -> Apply:
        return Apply(self.parts(_in_worker_order(pending)))

    def waiting_for(self, pending: Pending, roster: Roster) -> tuple[str, ...]:
        return (*pending.late(roster), *roster.awaited) if pending else ()

    def late(self, base_version: int, version: int) -> Decision:
        """Return the decision on a gradient of an earlier version."""
        message = (
            f"{self.name} takes gradients of the present version {version} only, and this one was computed at"
            f" version {base_version}; pull, then compute again"
        )
        return Refuse(Reason.STALE, message, min_version=version)

    def _is_due(self, roster: Roster, pending: Pending, *, newest: str = "") -> bool:
        """Return whether a round is complete, with the gradient of the worker `newest` if there is one."""
        # The first update waits for all expected workers.
        if roster.missing:
            return False
        late = pending.late(roster)
        num_gathered, num_late = len(pending) + bool(newest), len(late) - (newest in late)
        return self.is_complete(roster, num_gathered=num_gathered, num_late=num_late)

    def is_complete(self, roster: Roster, *, num_gathered: int, num_late: int) -> bool:
        """Return whether a round of `num_gathered` gradients, without those of `num_late` workers, is complete."""
        return num_late == 0

    @abstractmethod
    def parts(self, gathered: Sequence[Contribution]) -> tuple[Part, ...]:
        """Return the parts of the round's update."""


def _awaited(pending: Pending, roster: Roster) -> Iterator[str]:
    """Yield the workers for which a round waits, those that are late last.

    While workers come, each first push makes a roster: to read all of it each time would cost the square of the
    workers.
    """
    yield from roster.coming
    yield from not_joined(roster.missing - len(roster.coming))
    yield from pending.late(roster)


def _in_worker_order(gathered: Iterable[Contribution]) -> list[Contribution]:
    """Return the gradients in an order that no timing changes: float sums depend on it (algorithm notes 2.1, 2.7)."""
    return sorted(gathered, key=lambda contribution: contribution.gradient.worker_id)


WEIGHTINGS = ("by_count", "by_speed", "equal")
CLIPS = ("none", "median")


@dataclass(frozen=True, slots=True)
class Hardsync(Barrier):
    """Applies the mean of one gradient from each live worker (Zhang et al. 2016; the STT chapter's "hybrid"; BSP).

    `by_count` weighs each by its examples, so that unequal last minibatches give the mean over examples; `by_speed` by
    examples * (examples / minibatches), for deltas of local training (Liu et al. 2024). If one gradient of a round has
    no count, all have equal shares: without a count it would weigh nothing.
    """

    name: ClassVar[str] = "hardsync"
    weighting: str = "by_count"
    clip: str = "none"
    merge: str = "senders"

    def __post_init__(self) -> None:
        require_one_of("hardsync's weighting", self.weighting, WEIGHTINGS)
        require_one_of("hardsync's clip", self.clip, CLIPS)
        require_one_of("hardsync's merge", self.merge, MERGES)

    def parts(self, gathered: Sequence[Contribution]) -> tuple[Part, ...]:
        weights = [self._weight(contribution.gradient) for contribution in gathered]
        total = sum(weights)
        # The total is 0 in a round of nothing.
        if self.weighting == "equal" or any(_is_uncounted(each.gradient) for each in gathered) or total == 0:
            return mean(gathered)
        return tuple(Part(each, weight / total) for each, weight in zip(gathered, weights, strict=True))

    def _weight(self, gradient: Gradient) -> float:
        count = gradient.example_count
        return count if self.weighting == "by_count" else count * count / max(1, gradient.minibatch_count)


def _is_uncounted(gradient: Gradient) -> bool:
    return gradient.example_count == 0 and gradient.kind != PayloadKind.NOTHING


@dataclass(frozen=True, slots=True)
class StrictBsp(Barrier):
    """Applies the sum of one gradient from each live worker: SSP with s = 0 (Ho et al. 2013)."""

    name: ClassVar[str] = "ssp:s=0,strict_bsp=true"

    def parts(self, gathered: Sequence[Contribution]) -> tuple[Part, ...]:
        return tuple(Part(contribution) for contribution in gathered)


@dataclass(frozen=True, slots=True)
class Backup(Barrier):
    """Applies the mean of the first L - b gradients of a shard's version, drops the late ones (Chen et al. 2016).

    With `grace` the update waits for the others too, for so many seconds after the first L - b have come at most.
    """

    name: ClassVar[str] = "backup"
    b: int = spec.required(example=1, unset=-1)
    grace: float = 0.0
    clip: str = "none"
    merge: str = "senders"

    def __post_init__(self) -> None:
        if self.b < 0:
            raise InvalidArgument(
                f"backup's b is {self.b}; expected the workers that no update waits for, as in backup:b=2"
            )
        if not 0.0 <= self.grace < math.inf:
            raise InvalidArgument(
                f"backup's grace is {self.grace:g}; expected the seconds that an update waits for the last b workers,"
                " or 0 for none"
            )
        require_one_of("backup's clip", self.clip, CLIPS)
        require_one_of("backup's merge", self.merge, MERGES)

    def has_quorum(self, num_gathered: int, roster: Roster) -> bool:
        return not roster.missing and num_gathered >= max(1, roster.num_workers - self.b)

    def is_complete(self, roster: Roster, *, num_gathered: int, num_late: int) -> bool:
        return num_late == 0 or (not self.grace and self.has_quorum(num_gathered, roster))

    def parts(self, gathered: Sequence[Contribution]) -> tuple[Part, ...]:
        return mean(gathered)

    def late(self, base_version: int, version: int) -> Decision:
        return Drop(
            f"the round of version {base_version} was made of other workers' gradients, and the shard is at"
            f" version {version}; pull, then go on",
            min_version=version,
        )

    def check(self, num_workers: int) -> None:
        if 0 < num_workers <= self.b:
            raise InvalidArgument(
                f"backup:b={self.b} waits for none of {num_workers} workers; expected b below {num_workers}"
            )

    def warnings(self, num_workers: int) -> tuple[str, ...]:
        if num_workers - self.b >= 1:
            return ()
        count = f"{num_workers} worker{'s' if num_workers > 1 else ''}"
        return (
            f"backup:b={self.b} with {count} waits for no worker, so every gradient is an update of its own;"
            " set a b below the number of workers",
        )
