"""The processes of one replica: one worker of several processes, each with a part of the model.

(Dean et al. 2012, section 3.) The first process leads: it decides, and the others follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from pyps_wire.errors import InvalidArgument, PypsError, ReplicaLost, from_status
from pyps_wire.partition import Partition

T = TypeVar("T")


class Group:
    """The processes of one replica; in this class, of one process.

    Every method is collective: all processes call it, in the same order. It raises ReplicaLost if another process has
    ended.
    """

    # The replica's name, unique in the run.
    name = ""
    # This process's number in the replica; 0 leads.
    index = 0
    count = 1
    # Of each process, its rank in torch's world.
    ranks: tuple[int, ...] = ()
    # Plain parameters, by name: those of which each process holds a Block, and those that several processes hold.
    blocks: Mapping[str, Any] = {}
    replicated: frozenset[str] = frozenset()

    def broadcast(self, value: T) -> T:
        """Return the leader's value on all processes."""
        return value

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, by index."""
        return [value]

    def all_reduce(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of numbers over the processes, in float64, the same on all."""
        return [float(number) for number in numbers]


ALONE = Group()


class Failure(NamedTuple):
    """An error of one process, as a message to the others."""

    status: str
    message: str
    name: str

    @classmethod
    def of(cls, error: Exception, peers: Group) -> Failure:
        """Return the message. After an error that is not a PypsError, the process counts as lost."""
        if not isinstance(error, PypsError):
            words = f"{type(error).__name__}: {error}"
            error = ReplicaLost(f"process {peers.index} of {peers.name} failed ({words}): a replica ends as a whole")
        return cls(error.status, str(error), type(error).__name__)


def led(peers: Group, action: Callable[[], T]) -> T:
    """Run an action on the leader alone; return its result, or raise its error, on all processes."""
    if peers.index == 0:
        try:
            result = action()
        except Exception as error:
            peers.broadcast((None, Failure.of(error, peers)))
            raise
        peers.broadcast((result, None))
        return result
    answer: tuple[T | None, Failure | None] = peers.broadcast((None, None))
    if answer[1] is not None:
        raise from_status(*answer[1])
    return answer[0]  # type: ignore[return-value]


def agreed(peers: Group, action: Callable[[], T]) -> T:
    """Run an action on all processes and wait for all; if it failed on some, all raise the error of the first."""
    result: T | None = None
    own: Exception | None = None
    try:
        result = action()
    except Exception as error:
        own = error
    failures = peers.all_gather(None if own is None else Failure.of(own, peers))
    for index, failure in enumerate(failures):
        if failure is not None:
            if own is not None and (index == peers.index or not isinstance(own, PypsError)):
                raise own
            raise from_status(*failure)
    return result  # type: ignore[return-value]


def own_partition(whole: Partition, parts: Sequence[int], peers: Group | None) -> Partition:
    """Return the partition of a process that holds these parts; `whole` itself if they are all or none is named."""
    if peers is not None and peers.count > 1 and not parts:
        raise InvalidArgument(
            f"process {peers.index} of replica {peers.name!r} holds no part of the model: give each of its "
            f"{peers.count} processes one of its own"
        )
    vectors = whole.without_tables()
    return vectors if not parts or len(set(parts)) == whole.model.num_parts else vectors.of_parts(parts)
