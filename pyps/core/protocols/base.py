"""The base class of protocols, and their decisions. Classes made for every push are named tuples, which are cheap."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from pyps.core import spec
from pyps.core.gradient import Gradient
from pyps.core.pacing import Pacer
from pyps.core.receipt import Reason
from pyps.core.roster import Roster
from pyps.core.staleness import Weighing
from pyps_wire.errors import InvalidArgument


class Aggregation(ABC):
    """Decides on each gradient that arrives.

    A protocol is a frozen dataclass whose fields are its settings. It holds no state and serves all shards at once:
    each shard keeps its pending gradients. `decide`, `complete` and `settle` are called under a shard's lock, from many
    shards at once: they must be quick, must not block, and must give equal answers to equal arguments, since a shard's
    log is replayed through them.
    """

    __slots__ = ()

    name: ClassVar[str]
    # Whether a coordinator moves the parameters, and no worker pushes.
    coordinated: ClassVar[bool] = False

    @abstractmethod
    def decide(self, arrival: Arrival) -> Decision:
        """Return the decision on a gradient that has arrived."""

    def complete(self, pending: Pending, version: int, roster: Roster) -> Apply | None:
        """Return the update that is due since the roster has changed, or None. Called again after each update."""
        return None

    def has_quorum(self, num_gathered: int, roster: Roster) -> bool:
        """Return whether an update of so many gradients waits for `grace` only."""
        return False

    def settle(self, pending: Pending) -> Apply:
        """Return the update of the pending gradients, one at least, when another protocol follows: their mean."""
        return Apply(mean(pending))

    def waiting_for(self, pending: Pending, roster: Roster) -> tuple[str, ...]:
        """Return the workers whose gradients the pending ones wait for, ascending."""
        return ()

    def split(self, roster: Roster) -> float:
        """Return how many updates one gradient from each worker makes: the papers' n, about the mean staleness."""
        return 1.0

    def at(self, version: int) -> Aggregation:
        """Return the protocol in force at a shard's version.

        The methods above, `updates_per_round`, `clip`, `grace` and `merge` are asked of it only.
        """
        return self

    def pacer(self) -> Pacer | None:
        """Return a new pacer for server 0, which grants steps; None if workers never wait for a step."""
        return None

    def check(self, num_workers: int) -> None:  # noqa: B027 - most protocols work with any number
        """Raise InvalidArgument where the protocol cannot work with so many workers; 0 for not known."""

    def check_servers(self, num_servers: int) -> None:  # noqa: B027 - most protocols work with any number
        """Raise InvalidArgument where the protocol cannot work with the model on so many servers."""

    def check_worker(self, worker_id: str, parts: tuple[int, ...], replica: str) -> None:  # noqa: B027
        """Raise InvalidArgument where the protocol cannot work with that worker.

        `parts` are the parts of the model that it holds, () for all; `replica` is the replica that it belongs to.
        """

    def check_change(self, before: Aggregation) -> None:  # noqa: B027
        """Raise InvalidArgument if a run under `before` cannot change to this protocol."""

    def warnings(self, num_workers: int) -> tuple[str, ...]:
        """Return warnings about the protocol with so many workers, in sentences."""
        return ()

    @property
    def text(self) -> str:
        """The text that names an equal protocol."""
        return spec.spell(self.name, self)

    @property
    def barrier(self) -> bool:
        """True if only gradients of a shard's present version are taken."""
        return False

    @property
    def updates_per_round(self) -> int:
        """Updates that one gradient from each worker makes, at least; 0 for one a gradient."""
        return 0

    @property
    def weighting(self) -> str:
        """How the shares of an update's gradients depend on their example counts: `WEIGHTINGS` of `barrier.py`."""
        return "equal"

    @property
    def clip(self) -> str:
        """The norm to which each gradient of an update is clipped: "median" for that of its norms, or "none"."""
        return "none"

    @property
    def grace(self) -> float:
        """The seconds for which an update that has a quorum waits for the other workers."""
        return 0.0

    @property
    def merge(self) -> str:
        """By what each number of sparse gradients is divided: "senders" or "all" workers; empty where none waits."""
        return ""

    @property
    def whole_model(self) -> bool:
        """True if one mutex is held for all shards of a push or a pull."""
        return False

    @property
    def accumulate(self) -> int:
        """Minibatches that a worker should sum in a push; 0 leaves it to the worker."""
        return 0


MERGES = ("senders", "all")


def require_one_of(what: str, value: str, known: Collection[str]) -> None:
    """Raise InvalidArgument for a setting's value that is not among the known ones."""
    if value not in known:
        raise InvalidArgument(f"{what} is {value!r}; expected one of {', '.join(known)}")


def mean(contributions: Iterable[Contribution]) -> tuple[Part, ...]:
    """Return parts of equal shares, in the order given."""
    contributions = tuple(contributions)
    share = 1.0 / len(contributions)
    return tuple(Part(contribution, share) for contribution in contributions)


class Contribution(NamedTuple):
    """A gradient with its staleness and weights at arrival. Gradients that wait do not become staler."""

    gradient: Gradient
    staleness: int
    weighing: Weighing


class Pending:
    """The gradients that wait at a shard, in order of arrival, and their workers. Guarded by its shard's lock.

    A protocol only reads it. The sets of workers are kept up to date: a search at each push would make the cost of a
    round grow with the square of its workers.
    """

    __slots__ = ("_late", "_roster", "num_bytes", "waiting", "workers")

    def __init__(self, contributions: Iterable[Contribution] = ()) -> None:
        # In order of arrival.
        self.waiting: list[Contribution] = []
        # The workers of the gradients.
        self.workers: set[str] = set()
        # The result of `late` for the last roster.
        self._late: OrderedDict[str, None] = OrderedDict()
        self._roster: Roster | None = None
        # The size of the payloads.
        self.num_bytes = 0
        for contribution in contributions:
            self.add(contribution)

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[Contribution]:
        return iter(self.waiting)

    def late(self, roster: Roster) -> Collection[str]:
        """Return the active workers without a gradient here, ascending. Do not keep it."""
        if roster is not self._roster:
            self._late = OrderedDict.fromkeys(name for name in roster.workers if name not in self.workers)
            self._roster = roster
        return self._late.keys()

    def add(self, contribution: Contribution) -> None:
        gradient = contribution.gradient
        self.waiting.append(contribution)
        self.workers.add(gradient.worker_id)
        self._late.pop(gradient.worker_id, None)
        self.num_bytes += memoryview(gradient.payload).nbytes


class Arrival(NamedTuple):
    """A gradient that has just arrived, with the state on which a protocol decides."""

    contribution: Contribution
    pending: Pending
    version: int
    roster: Roster


class Part(NamedTuple):
    """A gradient and its share of an update's sum: 1/c in a mean of c."""

    contribution: Contribution
    share: float = 1.0
    # The factor that clips its norm.
    clip: float = 1.0


class Apply(NamedTuple):
    """Make one update now of these parts, summed in this order; other pending gradients go on waiting."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Park:
    """Keep the gradient until enough have arrived."""

    # The version that the worker waits for before it computes again; 0 for none.
    min_version: int = 0
    # The workers for whose gradients it waits, as a receipt names them.
    waiting_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Answer a push without numbers, and make no update."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Discard a valid gradient that is not needed."""

    message: str
    min_version: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse a gradient that cannot be used."""

    reason: Reason
    message: str
    min_version: int = 0


Decision = Apply | Park | Acknowledge | Drop | Refuse
