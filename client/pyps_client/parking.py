"""Waiting for other workers: a call that a server answers only when it is time."""

from __future__ import annotations

import threading
import time

from pyps_client.log import logger
from pyps_wire.errors import RunFinished, WaitTimedOut

# A server is asked to hold a call for so long at the most; what it then says it waited for goes to the log, and
# it is asked again.
PARK_SECONDS = 30.0


class Parking:
    """One wait, over one server or several, up to its deadline."""

    def __init__(self, wait_seconds: float) -> None:
        self.wait_seconds = wait_seconds
        self._began = time.monotonic()
        self._told_at = self._began

    @property
    def call_seconds(self) -> float:
        """For how long the next call may be held. 0 past the deadline: what is there then still counts."""
        return min(max(self._began + self.wait_seconds - time.monotonic(), 0.0), PARK_SECONDS)

    def go_on(self, unanswered: WaitTimedOut, *, stop: threading.Event) -> None:
        """Notes a call that was held in vain. Raises WaitTimedOut past the deadline, RunFinished when stopped."""
        now = time.monotonic()
        waited = now - self._began
        if stop.is_set():
            # Or a call to another server failed, whose error goes before this one.
            raise RunFinished("The client was closed while it waited for other workers.")
        if waited >= self.wait_seconds:
            raise WaitTimedOut(
                f"Waited {waited:.0f} s for other workers: {unanswered}. "
                "Raise wait_seconds (PYPS_WAIT_SECONDS) to wait longer."
            )
        # Several servers may say the same.
        if now - self._told_at >= PARK_SECONDS / 2:
            self._told_at = now
            logger.info(
                "waiting for other workers, %.0f s so far, at most %.0f s more: %s",
                *(waited, self.wait_seconds - waited, unanswered),
            )
