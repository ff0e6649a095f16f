"""When a run is over: after so many updates, examples or seconds, or at somebody's word."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock
from typing import TYPE_CHECKING

from pyps.core.shard import Shard

if TYPE_CHECKING:
    from pyps.config import StopCondition


class Ending:
    """Ends a run once, by refusing pushes shard by shard. May be used from any thread, and under any lock."""

    def __init__(self, condition: StopCondition | None, *, on_end: Callable[[str], None]):
        self.condition = condition
        self._on_end = on_end
        self._lock = Lock()
        # Guarded by _lock.
        self.over = False

    def finish(self, shards: Iterable[Shard], reason: str) -> None:
        """Ends the run now."""
        for shard in shards:
            shard.finish()
        self._end(reason)

    def after_update(self, shard: Shard, *, examples: Callable[[], int], shards: Iterable[Shard]) -> None:
        """Ends the run where the shard's last update was the last of the run."""
        condition = self.condition
        if condition is None:
            return
        if condition.unit == "updates" and shard.version >= condition.limit:
            # Each shard takes its own count of updates: the other shards of the same push still get theirs.
            shard.finish()
            self._end(f"{condition.limit:g} updates are done")
        elif condition.unit == "examples" and (done := examples()) >= condition.limit:
            self.finish(shards, f"{done} examples are done")

    def after_seconds(self, seconds: float, shards: Iterable[Shard]) -> None:
        """Ends the run where its time is over."""
        condition = self.condition
        if condition is not None and condition.unit == "seconds" and seconds >= condition.limit:
            self.finish(shards, f"{condition.limit:g} seconds are over")

    def _end(self, reason: str) -> None:
        with self._lock:
            if self.over:
                return
            self.over = True
        self._on_end(reason)
