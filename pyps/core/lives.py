"""Replicas of several processes, which live and end as one (Dean et al. 2012, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

from pyps_wire.errors import ReplicaLost, Superseded


@dataclass(slots=True)
class Life:
    """One life of a replica, from its first Hello until one of its processes is lost or a later life begins."""

    replica: str
    incarnation: int
    # Which process was lost and how, in words; empty where none was.
    lost: str = ""


class Lives:
    """The latest life of each replica. Guarded by the membership's lock."""

    def __init__(self) -> None:
        self._lives: dict[str, Life] = {}

    def begin(self, replica: str, incarnation: int) -> None:
        """Takes note of a process of that life, which is the replica's latest unless a later one was seen."""
        life = self._lives.get(replica)
        if life is None or life.incarnation < incarnation:
            self._lives[replica] = Life(replica, incarnation)

    def is_latest(self, replica: str, incarnation: int) -> bool:
        """Whether it is the life that counts."""
        life = self._lives.get(replica)
        return life is not None and life.incarnation == incarnation

    def lose(self, replica: str, incarnation: int, how: str) -> bool:
        """Ends a life for one of its processes, "its process 'r/1' failed"; False where it was over already."""
        life = self._lives.get(replica)
        if life is None or life.incarnation != incarnation or life.lost:
            return False
        life.lost = how
        return True

    def is_over(self, replica: str, incarnation: int) -> bool:
        """Whether that life has lost a process, or a later one has begun."""
        life = self._lives.get(replica)
        return life is not None and (
            life.incarnation > incarnation or (life.incarnation == incarnation and bool(life.lost))
        )

    def require(self, replica: str, incarnation: int) -> None:
        """Raises ReplicaLost for a process whose replica has lost another, or itself, Superseded after a later life."""
        life = self._lives.get(replica)
        if life is None or not self.is_over(replica, incarnation):
            return
        if life.incarnation == incarnation:
            raise ReplicaLost(
                f"replica {replica!r} is out of the run: {life.lost}; a replica ends as a whole; start it anew"
            )
        raise Superseded(
            f"a later life of replica {replica!r} has begun (incarnation {life.incarnation}, this process is of"
            f" {incarnation}); give this replica another name, or end it"
        )

    def keep(self, replicas: set[str]) -> None:
        """Forgets all but those replicas."""
        for replica in self._lives.keys() - replicas:
            del self._lives[replica]
