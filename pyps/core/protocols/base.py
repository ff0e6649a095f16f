"""What every protocol answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from pyps.core import spec
from pyps.core.pacing import Pacer
from pyps.core.protocols.decision import Apply, Arrival, Contribution, Decision, Part, Pending
from pyps.core.roster import Roster


class Aggregation(ABC):
    """Decides what becomes of each gradient that arrives.

    A protocol is a frozen dataclass whose fields are its settings; the gradients that wait lie with their
    shard. So it holds no state, serves all shards at once, and a checkpoint of the shards is a checkpoint of
    everything. `decide`, `complete` and `settle` are called under a shard's lock, from many shards at once:
    they must be quick, must not block, and must give equal answers to equal questions (a shard's log is
    replayed through them).
    """

    __slots__ = ()

    name: ClassVar[str]

    @abstractmethod
    def decide(self, arrival: Arrival) -> Decision:
        """Returns what is to be done with the arrival."""

    def complete(self, pending: Pending, version: int, roster: Roster) -> Apply | None:
        """Returns the update that is due now that other workers count; asked again after each until None."""
        return None

    def settle(self, pending: Pending) -> Apply | None:
        """Returns the update that all that waits becomes when another protocol takes over: its mean."""
        return Apply(mean(pending)) if pending else None

    def waiting_for(self, pending: Pending, roster: Roster) -> tuple[str, ...]:
        """Returns the workers for whose gradients those that are here wait, ascending."""
        return ()

    def split(self, roster: Roster) -> float:
        """Returns the updates made of one gradient from each worker: the papers' n, and about the mean staleness."""
        return 1.0

    def at(self, version: int) -> Aggregation:
        """Returns the protocol in force at a shard's version; all questions about that shard go to it."""
        return self

    def pacer(self) -> Pacer | None:
        """Returns a new judge of who may begin a step, for server 0; None where everybody always may."""
        return None

    def check(self, num_workers: int) -> None:  # noqa: B027 - most protocols work with any number
        """Raises BadRequest where the protocol cannot work with so many workers; 0 for not known."""

    def check_servers(self, num_servers: int) -> None:  # noqa: B027 - most protocols work with any number
        """Raises BadRequest where the protocol cannot work with the model on so many servers."""

    def check_worker(self, worker_id: str, parts: tuple[int, ...], replica: str) -> None:  # noqa: B027
        """Raises BadRequest where the protocol cannot work with that worker.

        `parts` are those of the model that it holds, () for all; `replica` is what it is a process of, if anything.
        """

    def check_change(self, before: Aggregation) -> None:  # noqa: B027
        """Raises BadRequest where a run under `before` cannot go on under this protocol."""

    def warnings(self, num_workers: int) -> tuple[str, ...]:
        """Returns what people should know about the protocol with so many workers, in sentences."""
        return ()

    @property
    def text(self) -> str:
        """The text that names an equal protocol."""
        return spec.spell(self.name, self)

    @property
    def barrier(self) -> bool:
        """Whether gradients of a shard's present version only are taken."""
        return False

    @property
    def weighs_examples(self) -> bool:
        """Whether the shares of an update's gradients depend on their counts of examples."""
        return False

    @property
    def whole_model(self) -> bool:
        """Whether one mutex is held for all shards of a push or a pull."""
        return False

    @property
    def coordinated(self) -> bool:
        """Whether a coordinator moves the parameters, and nobody pushes."""
        return False

    @property
    def accumulate(self) -> int:
        """Minibatches that a worker should sum in a push; 0 leaves it to the worker."""
        return 0


def mean(contributions: Iterable[Contribution]) -> tuple[Part, ...]:
    """Returns parts of equal shares, in the order given."""
    contributions = tuple(contributions)
    share = 1.0 / len(contributions)
    return tuple(Part(contribution, share) for contribution in contributions)
