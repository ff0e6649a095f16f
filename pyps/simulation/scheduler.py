"""Virtual time: actions and when they happen."""

from __future__ import annotations

import heapq
from collections.abc import Callable


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
        """Calls `action` at that time, or now where it has passed; what no worker does goes before what workers do."""
        self._asked += 1
        heapq.heappush(self._queue, (max(time, self.now), worker_id, self._asked, action))

    def step(self) -> bool:
        """Does what comes next; False when nothing is left."""
        if not self._queue:
            return False
        self.now, _, _, action = heapq.heappop(self._queue)
        action()
        return True

    @property
    def next_time(self) -> float:
        """When the next action is due; infinity when there is none."""
        return self._queue[0][0] if self._queue else float("inf")
