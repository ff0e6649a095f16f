"""Virtual time: what comes next, and what happened when, one readable line an event."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from pyps.core.receipt import Outcome, Receipt


class Kind(StrEnum):
    """What an event is about."""

    JOIN = "join"
    WAIT = "wait"
    PULL = "pull"
    PUSH = "push"
    COMPLETE = "complete"
    CONFIGURE = "configure"
    LEAVE = "leave"
    DIE = "die"
    EXPIRE = "expire"
    STALL = "stall"


class Event(NamedTuple):
    """One event of a simulation. Time is in virtual seconds."""

    time: float
    kind: Kind
    # Empty where no worker is at work.
    worker_id: str = ""
    # Of pulls, pushes and completed rounds.
    shard_id: int = -1
    # The version that a worker was given, that its gradient was computed at, or that a completed round made.
    version: int = 0
    # Of pushes.
    receipt: Receipt | None = None
    # In words: whom somebody waits for, what was changed.
    note: str = ""

    def __str__(self) -> str:
        """One line without a line's end."""
        what = self._told_push(self.receipt) if self.receipt is not None else self._told()
        return f"{self.time:9.3f}  {self.worker_id or '-':<6} {self.kind:<9} {what}".rstrip()

    def _told(self) -> str:
        if self.shard_id < 0:
            return self.note
        return f"shard {self.shard_id} version {self.version} {self.note}"

    def _told_push(self, receipt: Receipt) -> str:
        told = f"shard {self.shard_id} #{receipt.sequence} of version {self.version}: "
        if receipt.outcome == Outcome.REJECTED:
            return told + f"{receipt.reason.name.lower()} at version {receipt.version_after}"
        weighed = f"staleness {receipt.staleness}, weight {receipt.weight:.4g}, rate {receipt.rate:.4g}"
        if receipt.outcome == Outcome.APPLIED:
            return told + f"applied as version {receipt.version_after}, {weighed}"
        waits = f", round waits for {' '.join(receipt.waiting_for)}" if receipt.waiting_for else ""
        return told + f"pending, {weighed}{waits}"


class Scheduler:
    """Calls actions in the order of virtual time.

    At equal times the worker whose name comes first goes first, then what was asked for first: so a run is a
    function of its inputs alone.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, str, int, Callable[[], None]]] = []
        self._asked = 0

    def at(self, time: float, action: Callable[[], None], *, worker_id: str = "") -> None:
        """Call `action` at that time, or now where it has passed; what no worker does goes before what workers do."""
        self._asked += 1
        heapq.heappush(self._queue, (max(time, self.now), worker_id, self._asked, action))

    def step(self) -> bool:
        """Do what comes next; False when nothing is left."""
        if not self._queue:
            return False
        self.now, _, _, action = heapq.heappop(self._queue)
        action()
        return True

    @property
    def next_time(self) -> float:
        """When the next action is due; infinity when there is none."""
        return self._queue[0][0] if self._queue else float("inf")
