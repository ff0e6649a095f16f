"""A worker, or one process of a replica, as the run knows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hmac import compare_digest

from pyps_wire.errors import BadRequest, NameHeld, NotAllowed, ReplicaLost, Superseded


class WorkerState(StrEnum):
    """How it stands with a worker."""

    ALIVE = "alive"
    EXPIRED = "expired"
    FINISHED = "finished"
    FAILED = "failed"


_ALIVE = WorkerState.ALIVE


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself, for people."""

    host: str = ""
    process_id: int = 0
    device: str = ""
    software: str = ""


@dataclass(slots=True)
class Member:
    """One worker as the server knew it when it was asked for. Times are in seconds of the caller's clock."""

    worker_id: str
    incarnation: int
    state: WorkerState
    info: WorkerInfo
    joined_at: float
    heard_at: float
    # Whether anything has come of it after its first Hello: only then is it remembered when it is gone.
    was_heard: bool = False
    # When it pushed last in this life; None before its first push.
    pushed_at: float | None = None
    # When it last pushed what was taken: applied, parked, or dropped as the protocol foresees.
    taken_at: float | None = None
    # How often it was left out since then, as others waited too long for it.
    stalls: int = 0
    # Whether it is active in the protocol's rounds: from its first push until it goes, or holds others up for too long.
    counts: bool = False
    # The worker's own count of steps.
    clock: int = 0
    # The worker's own figures, by name.
    scalars: Mapping[str, float] = field(default_factory=dict)
    # How it ended, in its own words.
    message: str = ""
    # The replica that it is one of several processes of; empty for a worker of one process.
    replica: str = ""
    # The parts of the model that it holds, ascending; () for all of them.
    parts: tuple[int, ...] = ()
    # What its calls show, and nobody else's.
    secret: bytes = field(default=b"", repr=False)

    @property
    def alive(self) -> bool:
        """Whether it counts among the run's workers."""
        return self.state is _ALIVE

    @property
    def name(self) -> str:
        """Whom the run takes it for: its replica, which is one worker, or itself."""
        return self.replica or self.worker_id

    def holds(self, part: int) -> bool:
        """Whether that part of the model is its own."""
        return not self.parts or part in self.parts

    def shares(self, parts: tuple[int, ...]) -> bool:
        """Whether one of those parts of the model (() for all of them) is its own."""
        return not parts or any(self.holds(part) for part in parts)

    def greets_again(self, *, now: float, info: WorkerInfo, replica: str, parts: tuple[int, ...]) -> Member:
        """The same process after another Hello, which keeps its figures."""
        return replace(
            self, state=_ALIVE, info=info, heard_at=now, was_heard=True, message="", replica=replica, parts=parts
        )


def require_own(known: Member, incarnation: int, secret: bytes) -> None:
    """Refuses whoever speaks for that worker without its secret."""
    if not compare_digest(known.secret, secret):
        raise NotAllowed(
            f"the call is in the name of worker {known.worker_id!r} (incarnation {incarnation}) without its secret:"
            " send the one that HelloReply brought in the Sender of every call, another Hello too"
        )


def require_name_given(
    known: Member, worker_id: str, incarnation: int, secret: bytes, *, now: float, lease_seconds: float
) -> None:
    """Refuses whoever would take the place of that worker, which lives, in a later life of it without its secret."""
    if known.incarnation == incarnation:
        require_own(known, incarnation, secret)
    elif known.alive and not compare_digest(known.secret, secret):
        info = known.info
        raise NameHeld(
            f"worker {worker_id!r} cannot join yet: {known.worker_id!r} is a live process (pid {info.process_id} on"
            f" {info.host or 'an unnamed host'}), heard of {now - known.heard_at:.1f} s ago. The name is free once that"
            f" leaves or is silent for {lease_seconds:g} s, and at once for who shows the same PYPS_WORKER_KEY; else"
            " give this worker another name (worker_id, PYPS_WORKER_ID)"
        )


def require_name_free(worker_id: str, replica: str, members: Iterable[Member]) -> None:
    """Refuses a worker of one process and a replica, or a process of it, that go by one name."""
    name = replica or worker_id
    for other in members:
        if other.alive and other.replica != replica and (other.name == name or other.worker_id == worker_id):
            taken = name if other.name == name else worker_id
            raise BadRequest(
                f"{taken!r} is the name of a worker of one process and of a replica, or of a process of it: give one"
                " of them another name (worker_id, PYPS_WORKER_ID)"
            )


def require_parts_free(worker_id: str, parts: tuple[int, ...], others: Iterable[Member]) -> None:
    """Refuses a process that declares what another process of its replica holds."""
    for other in others:
        if other.shares(parts):
            raise BadRequest(
                f"worker {worker_id!r} declares {parts_in_words(parts)} of the model, and {other.worker_id!r} of the"
                f" same replica {parts_in_words(other.parts)}: give each part to one process of a replica"
            )


def parts_in_words(parts: tuple[int, ...]) -> str:
    """The parts of a model that a worker holds, for people."""
    return f"part{'s' if len(parts) > 1 else ''} {', '.join(map(str, parts))}" if parts else "all parts"


def superseded(known: Member, incarnation: int) -> Superseded:
    """The refusal of a process whose name a later one holds."""
    return Superseded(
        f"worker {known.worker_id!r} is held by a later process (incarnation {known.incarnation}, this one is"
        f" {incarnation}); give this process another worker id"
    )


# How messages begin of a process that left because it had lost another of its replica, and of one that people ended.
_LOST = "ReplicaLost"
_INTERRUPTIONS = ("KeyboardInterrupt", "Terminated")


def was_interrupted(message: str) -> bool:
    """Whether people ended a process that left as failed, by its own message."""
    return message.startswith(_INTERRUPTIONS)


def failure_in_words(message: str) -> str:
    """What became of a process that left as failed, by its own message."""
    if message.startswith(_LOST):
        return "says that it lost another of them"
    if was_interrupted(message):
        return f"was interrupted ({message.rstrip(': ')})"
    return f"failed ({message})" if message else "failed"


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
