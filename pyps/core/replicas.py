"""Replicas of several processes, which end together (Dean et al. 2012, section 3)."""

from __future__ import annotations

from pyps_wire.errors import ReplicaLost, Superseded


class Lives:
    """The latest life of each replica. Guarded by the membership's lock.

    A life lasts from its first Hello until one of its processes is lost or a later life begins.
    """

    def __init__(self) -> None:
        # By replica: the incarnation, and which process was lost and how, in words; "" where none was.
        self._lives: dict[str, tuple[int, str]] = {}

    def _latest(self, replica: str) -> tuple[int, str]:
        return self._lives.get(replica, (-1, ""))

    def begin(self, replica: str, incarnation: int) -> None:
        """Note a life, unless a later one is known."""
        if self._latest(replica)[0] < incarnation:
            self._lives[replica] = incarnation, ""

    def is_latest(self, replica: str, incarnation: int) -> bool:
        return self._latest(replica)[0] == incarnation

    def lose(self, replica: str, incarnation: int, how: str) -> None:
        """End a life, with the reason: "its process 'r/1' failed". The first reason stays."""
        if self._latest(replica) == (incarnation, ""):
            self._lives[replica] = incarnation, how

    def is_over(self, replica: str, incarnation: int) -> bool:
        """Return whether that life has lost a process, or a later one has begun."""
        latest, lost = self._latest(replica)
        return latest > incarnation or (latest == incarnation and bool(lost))

    def require(self, replica: str, incarnation: int) -> None:
        """Raise ReplicaLost where that life has lost a process, Superseded where a later one has begun."""
        latest, lost = self._latest(replica)
        if latest > incarnation:
            raise Superseded(
                f"a later life of replica {replica!r} has begun (incarnation {latest}, this process is of"
                f" {incarnation}); give this replica another name, or end it"
            )
        if latest == incarnation and lost:
            raise ReplicaLost(
                f"replica {replica!r} is out of the run: {lost}; a replica ends as a whole; start it again"
            )

    def keep(self, replicas: set[str]) -> None:
        """Forget all but those replicas."""
        for replica in self._lives.keys() - replicas:
            del self._lives[replica]


def parts_in_words(parts: tuple[int, ...]) -> str:
    return f"part{'s' if len(parts) > 1 else ''} {', '.join(map(str, parts))}" if parts else "all parts"


def was_interrupted(message: str) -> bool:
    """Return whether the last message of a failed process says that people ended it."""
    return message.startswith(("KeyboardInterrupt", "Terminated"))


def failure_in_words(message: str) -> str:
    """Return how a failed process ended, from its last message."""
    if message.startswith("ReplicaLost"):
        return "says that it lost another of them"
    if was_interrupted(message):
        return f"was interrupted ({message.rstrip(': ')})"
    return f"failed ({message})" if message else "failed"
