"""The processes of one replica, as each of them sees the others.

A replica is one worker that consists of several processes, each with a part of the model (Dean et al. 2012, section
3). Its first process, the leader, decides; the others go by its word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from pyps_wire.errors import InvalidArgument, PypsError, ReplicaLost, from_status
from pyps_wire.partition import Partition

T = TypeVar("T")


class Group:
    """The processes of one replica; here of one process, which leads itself and has nobody to wait for.

    Every method is collective: all processes call it, in the same order. Raises ReplicaLost where another process is
    gone.
    """

    # The replica's name, unique in the run.
    name = ""
    # This process's place in the replica; 0 leads.
    index = 0
    count = 1
    # Its processes as torch's world numbers them.
    ranks: tuple[int, ...] = ()
    # What the user says of plain parameters, by name: which lie in blocks (Block), and which several processes hold.
    blocks: Mapping[str, Any] = {}
    replicated: frozenset[str] = frozenset()

    def broadcast(self, word: T) -> T:
        """Return the leader's word on all processes."""
        return word

    def all_gather(self, word: T) -> list[T]:
        """Return all words, by index, once all processes have called it."""
        return [word]

    def all_reduce(self, numbers: Sequence[float]) -> list[float]:
        """Return sums of numbers over the processes, in float64, the same on all."""
        return [float(number) for number in numbers]


ALONE = Group()


class Failure(NamedTuple):
    """An error of one process, as a message to the others."""

    status: str
    message: str
    name: str

    @classmethod
    def of(cls, error: Exception, peers: Group) -> Failure:
        """Return the message; an error that is not ours means that its process is lost."""
        if not isinstance(error, PypsError):
            words = f"{type(error).__name__}: {error}"
            error = ReplicaLost(f"process {peers.index} of {peers.name} failed ({words}): a replica ends as a whole")
        return cls(error.status, str(error), type(error).__name__)


def led(peers: Group, action: Callable[[], T]) -> T:
    """Run an action on the leader alone; all processes get its result, or its error."""
    if peers.index == 0:
        try:
            result = action()
        except Exception as error:
            peers.broadcast((None, Failure.of(error, peers)))
            raise
        peers.broadcast((result, None))
        return result
    answer: tuple[T | None, Failure | None] = peers.broadcast((None, None))
    of_leader, failure = answer
    if failure is not None:
        raise from_status(*failure)
    return of_leader  # type: ignore[return-value]


def agreed(peers: Group, action: Callable[[], T]) -> T:
    """Run an action on all processes and wait for all; where it failed on some, all raise the first one's error."""
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
    """Return the partition of a process that holds those parts; of all, the whole itself."""
    if peers is not None and peers.count > 1 and not parts:
        raise InvalidArgument(
            f"process {peers.index} of replica {peers.name!r} holds no part of the model: give each of its "
            f"{peers.count} processes one of its own"
        )
    return whole if not parts or len(set(parts)) == whole.model.num_parts else whole.of_parts(parts)
