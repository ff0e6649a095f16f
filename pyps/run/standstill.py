"""Noticing that the server itself did nothing for a while: it was stopped, or its machine was."""

from __future__ import annotations

from collections.abc import Callable

# A busy machine delays a look by less.
LATE_SECONDS = 1.0


class Standstill:
    """Tells by looks at a clock, which are due at an interval, for how long nobody could be heard."""

    def __init__(self, interval_seconds: float, *, clock: Callable[[], float]) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._looked_at = clock()

    def look(self) -> float:
        """The seconds by which this look comes too late; 0 where that is little."""
        before, self._looked_at = self._looked_at, self._clock()
        late = self._looked_at - before - self._interval_seconds
        return late if late > LATE_SECONDS else 0.0
