"""Replicas of several processes, which end together (Dean et al. 2012, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

from pyps_wire.errors import ReplicaLost, Superseded


@dataclass(slots=True)
class Life:
    """One life of a replica, from its first Hello until one of its processes is lost or a later life begins."""

    incarnation: int
    # Which process was lost and how, in words; empty where none was.
    lost: str = ""


class Lives:
    """The latest life of each replica. Guarded by the membership's lock."""

    def __init__(self) -> None:
        self._lives: dict[str, Life] = {}

    def begin(self, replica: str, incarnation: int) -> None:
        """Note a life, unless a later one is known."""
        life = self._lives.get(replica)
        if life is None or life.incarnation < incarnation:
            self._lives[replica] = Life(incarnation)

    def is_latest(self, replica: str, incarnation: int) -> bool:
        life = self._lives.get(replica)
        return life is not None and life.incarnation == incarnation

    def lose(self, replica: str, incarnation: int, how: str) -> None:
        """End a life, with the reason: "its process 'r/1' failed". The first reason stays."""
        if self.is_latest(replica, incarnation):
            self._lives[replica].lost = self._lives[replica].lost or how

    def is_over(self, replica: str, incarnation: int) -> bool:
        """Return whether that life has lost a process, or a later one has begun."""
        life = self._lives.get(replica)
        if life is None or life.incarnation < incarnation:
            return False
        return life.incarnation > incarnation or bool(life.lost)

    def require(self, replica: str, incarnation: int) -> None:
        """Raise ReplicaLost where that life has lost a process, Superseded where a later one has begun."""
        if not self.is_over(replica, incarnation):
            return
        life = self._lives[replica]
        if life.incarnation == incarnation:
            raise ReplicaLost(
                f"replica {replica!r} is out of the run: {life.lost}; a replica ends as a whole; start it again"
            )
        raise Superseded(
            f"a later life of replica {replica!r} has begun (incarnation {life.incarnation}, this process is of"
            f" {incarnation}); give this replica another name, or end it"
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
