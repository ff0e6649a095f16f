"""Waits for lost or missing servers, and their log lines: one for all servers, whichever threads notice."""

from __future__ import annotations

import math
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

# The pause between two log lines of an outage; it doubles while the outage does not grow, up to the longest.
AGAIN_SECONDS = 10.0
AGAIN_SECONDS_MAX = 300.0


class LinkLost(Exception):
    """A call without the server's verdict: worth another try. Never leaves this package."""

    def __init__(self, reason: str, *, answered: int = 0) -> None:
        super().__init__(reason)
        # Replies before the loss: progress, after which the waiting time starts again.
        self.answered = answered


class LocalLost(LinkLost):
    """The loss of shared memory or of a lane; the gRPC connection may be sound."""


class Busy(LinkLost):
    """The server's request to try again later. The connection is sound and the caller still known."""


@dataclass
class RetryPolicy:
    """Exponential backoff with jitter up to a deadline, with log lines in between."""

    # The deadline.
    wait_seconds: float
    # The setting behind the deadline, for the error's advice.
    setting: str
    pause_first_seconds: float = 0.1
    pause_max_seconds: float = 2.0
    # Longer losses are logged.
    report_first_seconds: float = 1.0
    call_seconds_max: float = 10.0
    hurries: bool = False

    def hurry(self, seconds: float) -> None:
        """Bring the deadline forward, of waits under way too, and count it from the first failure; on any thread."""
        self.wait_seconds, self.hurries = min(self.wait_seconds, seconds), True

    def begin(self, what: str, *, stop: threading.Event, advice: str = "", outage: Outage | None = None) -> Wait:
        """Start one wait for `what` ("server 0 (127.0.0.1:7610)"); `outage` is what others know of it."""
        return Wait(self, what, stop=stop, advice=advice, outage=outage or Outage())


class Wait:
    """One wait under a policy, from its first failure to its success or deadline."""

    def __init__(self, policy: RetryPolicy, what: str, *, stop: threading.Event, advice: str, outage: Outage) -> None:
        self._policy = policy
        self._what = what
        self._stop = stop
        self._advice = advice
        # The deadline counts from here: others may have failed while nobody waited.
        self._started = time.monotonic()
        self._outage = outage
        self._loss = outage.enter(what, at=self._started)
        self._ended = False
        self._pause_seconds = policy.pause_first_seconds

    @property
    def remaining_seconds(self) -> float:
        since = self._loss.since if self._policy.hurries else self._started
        return since + self._policy.wait_seconds - time.monotonic()

    @property
    def call_seconds(self) -> float:
        """A deadline for the next short call: long enough for a slow link, short enough to keep reporting."""
        return min(max(self.remaining_seconds, 1.0), self._policy.call_seconds_max)

    def restart(self) -> None:
        self._started = self._loss.since = time.monotonic()
        self._pause_seconds = self._policy.pause_first_seconds

    def pause(self, problem: str, error: Callable[[str], PypsError] = ServerUnavailable) -> None:
        """Sleep before the next try. Raises `error` past the deadline, RunFinished when stopped."""
        # Some are sentences, which go into others.
        problem = problem.rstrip(".")
        self._outage.note(self._what, problem, at=time.monotonic())
        policy, left_seconds = self._policy, self.remaining_seconds
        if left_seconds <= 0:
            way_out = f"Raise {policy.setting} (PYPS_{policy.setting.upper()}) to wait longer."
            if policy.hurries:
                way_out = "A worker that ends waits no longer: keep the optimizer open until its server is back."
            waited = policy.wait_seconds - left_seconds
            raise error(f"Waited {waited:.0f} s for {self._what}: {problem}. {self._advice}{way_out}")
        self._outage.tell(
            self._what, first_seconds=policy.report_first_seconds, left_seconds=left_seconds, setting=policy.setting
        )
        pause = min(self._pause_seconds * _jitter.uniform(0.5, 1.0), left_seconds)
        self._pause_seconds = min(self._pause_seconds * 2, policy.pause_max_seconds)
        if self._stop.wait(pause):
            raise RunFinished(f"The client was closed while it waited for {self._what}: {problem}.")

    def end(self) -> None:
        self.give_up()
        self._outage.heard(self._what)

    def give_up(self) -> None:
        if not self._ended:
            self._ended = True
            self._outage.leave(self._loss)


@dataclass
class Loss:
    """A server that does not answer: since when, why, and how many threads wait for it."""

    since: float
    problem: str = "no answer"
    num_waits: int = 0


class Outage:
    """The caller's servers that do not answer, by name; on any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # Guarded by _lock; who has heard of a server may look before.
        self.lost: dict[str, Loss] = {}
        # Logged losses, until all servers are back.
        self._told: dict[str, Loss] = {}
        self._again_seconds = AGAIN_SECONDS
        self._told_at = -math.inf

    def note(self, name: str, problem: str, *, at: float) -> float:
        """Note a failed attempt, and return when the first one failed."""
        with self._lock:
            loss = self.lost.setdefault(name, Loss(at))
            loss.since, loss.problem = min(loss.since, at), problem.rstrip(".")
            return loss.since

    def enter(self, name: str, *, at: float) -> Loss:
        """Note that a thread waits since `at`: until it leaves, only its own success counts."""
        with self._lock:
            loss = self.lost.setdefault(name, Loss(at))
            loss.num_waits += 1
            return loss

    def leave(self, loss: Loss) -> None:
        with self._lock:
            loss.num_waits -= 1

    def heard(self, name: str) -> None:
        """Note an answer, and log when all servers that were logged as lost are back."""
        with self._lock:
            loss = self.lost.get(name)
            if loss is None or loss.num_waits:
                return
            del self.lost[name]
            if self.lost or not self._told:
                return
            back, self._told = self._told, {}
            self._again_seconds, self._told_at = AGAIN_SECONDS, -math.inf
        seconds = self._clock() - min(loss.since for loss in back.values())
        logger.info("%s %s there after %.0f s", ", ".join(sorted(back)), "is" if len(back) == 1 else "are", seconds)

    def tell(self, name: str, *, first_seconds: float, left_seconds: float | None = None, setting: str = "") -> None:
        """Log all losses, if this one is new and lasts long enough, or if the next line is due.

        `left_seconds`: how much longer the caller waits, if it does; `setting` is what says so.
        """
        now = self._clock()
        with self._lock:
            loss = self.lost.get(name)
            is_new = loss is not None and name not in self._told and now - loss.since >= first_seconds
            pause_seconds = AGAIN_SECONDS if is_new else self._again_seconds
            if not (is_new or self._told) or now < self._told_at + pause_seconds:
                return
            if not is_new:
                self._again_seconds = min(2 * self._again_seconds, AGAIN_SECONDS_MAX)
            self._told_at = now
            seconds = now - min(loss.since for loss in self.lost.values())
            by_problem: dict[str, list[str]] = {}
            for lost, loss in self.lost.items():
                self._told.setdefault(lost, loss)
                by_problem.setdefault(loss.problem, []).append(lost)
        which = "; ".join(f"{', '.join(sorted(names))}: {problem}" for problem, names in by_problem.items())
        if left_seconds is None:
            logger.warning("no word from %s; for %.0f s so far", which, seconds)
        else:
            logger.warning(
                "waiting for %s; for %.0f s so far, at most %.0f s more%s",
                *(which, seconds, left_seconds, f" ({setting}, PYPS_{setting.upper()})" if setting else ""),
            )
