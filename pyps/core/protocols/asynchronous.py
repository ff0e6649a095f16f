"""Protocols that make every gradient an update of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pyps.core import spec
from pyps.core.gradient import PayloadKind
from pyps.core.protocols.base import Acknowledge, Aggregation, Apply, Arrival, Decision, Part
from pyps.core.replicas import parts_in_words
from pyps.core.roster import Roster
from pyps_wire.errors import InvalidArgument

_ACKNOWLEDGE = Acknowledge()


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
    """Async with one mutex around handing out and updating the model (Zhang et al. 2013).

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
