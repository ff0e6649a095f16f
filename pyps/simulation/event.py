"""Virtual time: the queue of actions, and events, a readable line each."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from pyps.core.receipt import Outcome, Receipt


class Kind(StrEnum):
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
    # Empty for an event of no worker.
    worker_id: str = ""
    # Of pulls, pushes and completed rounds.
    shard_id: int = -1
    # The version that a worker pulled, that its gradient was computed at, or that a completed round made.
    version: int = 0
    # Of pushes.
    receipt: Receipt | None = None
    # The workers that a worker waits for, or the new setting.
    note: str = ""

    def __str__(self) -> str:
        if self.receipt is not None:
            what = f"shard {self.shard_id} #{self.receipt.sequence} of version {self.version}: {_verdict(self.receipt)}"
        else:
            what = self.note if self.shard_id < 0 else f"shard {self.shard_id} version {self.version} {self.note}"
        return f"{self.time:9.3f}  {self.worker_id or '-':<6} {self.kind:<9} {what}".rstrip()


def _verdict(receipt: Receipt) -> str:
    if receipt.outcome == Outcome.REJECTED:
        return f"{receipt.reason.name.lower()} at version {receipt.version_after}"
    weighed = f"staleness {receipt.staleness}, weight {receipt.weight:.4g}, rate {receipt.rate:.4g}"
    if receipt.outcome == Outcome.APPLIED:
        return f"applied as version {receipt.version_after}, {weighed}"
    waits = f", round waits for {' '.join(receipt.waiting_for)}" if receipt.waiting_for else ""
    return f"pending, {weighed}{waits}"


class Scheduler:
    """Calls actions in the order of virtual time, then of their workers' names, then of the calls of `at`.

    So a run is a function of its inputs alone.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, str, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[[], None], *, worker_id: str = "") -> None:
        """Call `action` at that time, or now if it has passed; actions of no worker precede those of workers.

        One at infinity is never called.
        """
        self._count += 1
        if time < float("inf"):
            heapq.heappush(self._queue, (max(time, self.now), worker_id, self._count, action))

    def step(self, *, until: float = float("inf")) -> bool:
        """Call the next action; return False if there is none until that time."""
        if not self._queue or self._queue[0][0] > until:
            return False
        self.now, _, _, action = heapq.heappop(self._queue)
        action()
        return True
