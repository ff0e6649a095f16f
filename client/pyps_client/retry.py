"""How long and how loudly a lost or missing server is waited for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pyps_client.log import logger
from pyps_wire.errors import PypsError, RunFinished, ServerUnavailable

# Jitter draws from a generator of its own: the program's seeds stay untouched.
_jitter = random.Random()

# A signal that comes between the interpreter's last look for one and a wait outside of it is seen when that wait ends.
# So whatever a main thread may wait for is waited for in parts no longer than this.
SIGNAL_SECONDS = 0.2


class LinkLost(Exception):
    """A call that ended without the server's verdict: worth another try. Never leaves this package."""

    def __init__(self, reason: str, *, answered: int = 0) -> None:
        super().__init__(reason)
        # Messages that had come back before the loss: progress, which starts the waiting time anew.
        self.answered = answered


class Busy(LinkLost):
    """The server's request to try again later. The connection is sound and the caller still known."""


@dataclass
class RetryPolicy:
    """Exponential backoff with jitter up to a deadline, and a line now and then on what is waited for."""

    # The deadline.
    wait_seconds: float
    # The setting behind the deadline, for the error's advice.
    setting: str
    pause_first_seconds: float = 0.1
    pause_max_seconds: float = 2.0
    # The first line comes soon, the others at this interval.
    report_first_seconds: float = 1.0
    report_seconds: float = 10.0
    _hurries: bool = False

    def hurry(self, seconds: float) -> None:
        """Brings the deadline forward, of waits under way too; on any thread."""
        self.wait_seconds, self._hurries = min(self.wait_seconds, seconds), True

    @property
    def way_out(self) -> str:
        """What may be done to wait longer."""
        if self._hurries:
            return "A worker that ends waits no longer: keep the optimizer open until its server is back."
        return f"Raise {self.setting} (PYPS_{self.setting.upper()}) to wait longer."

    def begin(self, what: str, *, stop: threading.Event, advice: str = "", silence: Silence | None = None) -> Wait:
        """Starts one wait for `what` ("server 0 (127.0.0.1:7610)"); `silence` is what others know of it."""
        return Wait(self, what, stop=stop, advice=advice, silence=silence or Silence())


class Silence:
    """Since when a server has not answered: the clock of every line that says so, whichever thread writes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by _lock. When the first attempt failed since the server last answered; None where none did.
        self._since: float | None = None

    def begin(self, at: float) -> float:
        """Notes an attempt that failed at `at` (time.monotonic); returns when the first one did."""
        with self._lock:
            self._since = at if self._since is None else min(self._since, at)
            return self._since

    def end(self) -> None:
        """Notes an answer."""
        if self._since is not None:
            with self._lock:
                self._since = None


class Wait:
    """One wait under a policy, from its first failure to its success or deadline."""

    def __init__(self, policy: RetryPolicy, what: str, *, stop: threading.Event, advice: str, silence: Silence) -> None:
        self._policy = policy
        self._what = what
        self._stop = stop
        self._advice = advice
        # The deadline counts from here: others may have failed while nobody waited.
        self._started = time.monotonic()
        self._silence = silence
        self._silent_since = silence.begin(self._started)
        self._report_at = self._started + policy.report_first_seconds
        self._reported = False
        self._pause_seconds = policy.pause_first_seconds

    @property
    def remaining_seconds(self) -> float:
        return self._started + self._policy.wait_seconds - time.monotonic()

    @property
    def call_seconds(self) -> float:
        """A deadline for the next short call: long enough for a slow link, short enough to keep reporting."""
        return min(max(self.remaining_seconds, 1.0), self._policy.report_seconds)

    def restart(self) -> None:
        """Counts from now again, after progress was made."""
        self._started = self._silent_since = time.monotonic()
        self._silence.end()
        self._pause_seconds = self._policy.pause_first_seconds

    def pause(self, problem: str, error: Callable[[str], PypsError] = ServerUnavailable) -> None:
        """Sleeps before the next try; raises `error` past the deadline, RunFinished when stopped."""
        waited = time.monotonic() - self._started
        if waited >= self._policy.wait_seconds:
            raise error(f"Waited {waited:.0f} s for {self._what}: {problem}. {self._advice}{self._policy.way_out}")
        self._report(problem)
        # The next try comes no later than the next line is due, so that lines come at their interval.
        quiet_seconds = min(self.remaining_seconds, self._report_at - time.monotonic())
        pause = min(self._pause_seconds * _jitter.uniform(0.5, 1.0), max(quiet_seconds, 0.0))
        self._pause_seconds = min(self._pause_seconds * 2, self._policy.pause_max_seconds)
        if self._stop.wait(pause):
            raise RunFinished(f"The client was closed while it waited for {self._what}: {problem}.")

    def end(self) -> None:
        """Notes success, aloud where the wait was."""
        self._silence.end()
        if self._reported:
            logger.info("%s is there after %.0f s", self._what, time.monotonic() - self._silent_since)

    def _report(self, problem: str) -> None:
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + self._policy.report_seconds
            self._reported = True
            # A heartbeat on its way may have failed earlier and be told of only now.
            self._silent_since = min(self._silent_since, self._silence.begin(now))
            logger.warning(
                "waiting for %s: %s; for %.0f s so far, at most %.0f s more",
                *(self._what, problem, now - self._silent_since, self.remaining_seconds),
            )
