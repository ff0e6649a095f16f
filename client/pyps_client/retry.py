"""Waits for lost or missing servers, and one log line for all of them, whichever threads wait."""

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

# Python handles a signal only between its own instructions: a main thread waits outside of Python no longer than this.
SIGNAL_SECONDS = 0.2

# The pause between two log lines of an outage; it doubles up to the longest, unless another server is lost.
AGAIN_SECONDS = 10.0
AGAIN_SECONDS_MAX = 300.0


class LinkLost(Exception):
    """Raised when a call ends without the server's answer; another try may succeed. Callers of pyps never get it."""

    def __init__(self, reason: str, *, answered: int = 0) -> None:
        super().__init__(reason)
        # Replies before the loss: after such progress the waiting time starts again.
        self.answered = answered


class LocalLost(LinkLost):
    """Raised when shared memory or a lane is lost; the gRPC connection may be sound."""


class Busy(LinkLost):
    """Raised when the server has no room now. The connection is sound, and the server still knows the caller."""


@dataclass
class RetryPolicy:
    """Exponential backoff with jitter up to a deadline, with log lines in between."""

    wait_seconds: float
    # The setting of `wait_seconds`, for the error's advice.
    setting: str
    pause_first_seconds: float = 0.1
    pause_max_seconds: float = 2.0
    # Shorter losses are not logged.
    report_first_seconds: float = 1.0
    call_seconds_max: float = 10.0
    hurries: bool = False

    def hurry(self, seconds: float) -> None:
        """Let waits, those under way too, end so long after the first failure; on any thread."""
        self.wait_seconds, self.hurries = min(self.wait_seconds, seconds), True

    def begin(self, what: str, *, stop: threading.Event, advice: str = "", outage: Outage | None = None) -> Wait:
        """Start one wait for `what` ("server 0 (127.0.0.1:7610)"); `outage` is shared with other waits for it."""
        return Wait(self, what, stop=stop, advice=advice, outage=outage or Outage())


class Wait:
    """One wait under a policy, from its first failure to its success or deadline."""

    def __init__(self, policy: RetryPolicy, what: str, *, stop: threading.Event, advice: str, outage: Outage) -> None:
        self._policy = policy
        self._what = what
        self._stop = stop
        self._advice = advice
        # The deadline counts from here: earlier failures of heartbeats are no wait.
        self._started = time.monotonic()
        self._outage = outage
        self._loss = outage.begin_wait(what, at=self._started)
        self._ended = False
        self._pause_seconds = policy.pause_first_seconds

    @property
    def remaining_seconds(self) -> float:
        since = self._loss.since if self._policy.hurries else self._started
        return since + self._policy.wait_seconds - time.monotonic()

    @property
    def call_seconds(self) -> float:
        """The deadline of the next short call: long enough for a slow link, short enough for regular log lines."""
        return min(max(self.remaining_seconds, 1.0), self._policy.call_seconds_max)

    def restart(self) -> None:
        self._started = self._loss.since = time.monotonic()
        self._pause_seconds = self._policy.pause_first_seconds

    def pause(
        self,
        problem: str,
        error: Callable[[str], PypsError] = ServerUnavailable,
        *,
        pause_max_seconds: float = math.inf,
    ) -> None:
        """Sleep before the next try. Raises `error` past the deadline, RunFinished when stopped."""
        problem = problem.rstrip(".")
        self._outage.note_failure(self._what, problem, at=time.monotonic())
        policy, left_seconds = self._policy, self.remaining_seconds
        if left_seconds <= 0:
            way_out = f"Raise {policy.setting} (PYPS_{policy.setting.upper()}) to wait longer."
            if policy.hurries:
                way_out = "A worker that ends waits no longer: keep the optimizer open until its server is back."
            waited = policy.wait_seconds - left_seconds
            raise error(f"Waited {waited:.0f} s for {self._what}: {problem}. {self._advice}{way_out}")
        self._outage.log(
            self._what, first_seconds=policy.report_first_seconds, left_seconds=left_seconds, setting=policy.setting
        )
        pause = min(self._pause_seconds * _jitter.uniform(0.5, 1.0), left_seconds, pause_max_seconds)
        self._pause_seconds = min(self._pause_seconds * 2, policy.pause_max_seconds)
        if self._stop.wait(pause):
            raise RunFinished(f"The client was closed while it waited for {self._what}: {problem}.")

    def end(self) -> None:
        self.give_up()
        self._outage.note_answer(self._what)

    def give_up(self) -> None:
        if not self._ended:
            self._ended = True
            self._outage.end_wait(self._loss)


@dataclass
class Loss:
    """A server that does not answer, and how many threads wait for it."""

    since: float
    problem: str = "no answer"
    num_waits: int = 0


class Outage:
    """The caller's servers that do not answer, by name. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # Guarded by _lock; read without it after an answer.
        self.lost: dict[str, Loss] = {}
        # Logged losses, until all servers are back.
        self._logged: dict[str, Loss] = {}
        self._again_seconds = AGAIN_SECONDS
        self._logged_at = -math.inf

    def note_failure(self, name: str, problem: str, *, at: float) -> float:
        """Note a failed attempt, and return when the first one failed."""
        with self._lock:
            loss = self.lost.setdefault(name, Loss(at))
            loss.since, loss.problem = min(loss.since, at), problem.rstrip(".")
            return loss.since

    def begin_wait(self, name: str, *, at: float) -> Loss:
        """Note a thread that waits since `at`: until it calls `end_wait`, no other thread's answer ends the loss."""
        with self._lock:
            loss = self.lost.setdefault(name, Loss(at))
            loss.num_waits += 1
            return loss

    def end_wait(self, loss: Loss) -> None:
        with self._lock:
            loss.num_waits -= 1

    def note_answer(self, name: str) -> None:
        """Note an answer, and log when all servers that were logged as lost are back."""
        with self._lock:
            loss = self.lost.get(name)
            if loss is None or loss.num_waits:
                return
            del self.lost[name]
            if self.lost or not self._logged:
                return
            back, self._logged = self._logged, {}
            self._again_seconds, self._logged_at = AGAIN_SECONDS, -math.inf
        seconds = self._clock() - min(loss.since for loss in back.values())
        logger.info("%s %s there after %.0f s", ", ".join(sorted(back)), "is" if len(back) == 1 else "are", seconds)

    def log(self, name: str, *, first_seconds: float, left_seconds: float | None = None, setting: str = "") -> None:
        """Log all losses, if this one is new and lasts `first_seconds`, or if the next line is due.

        `left_seconds`: how much longer the caller waits, if it does, by that setting.
        """
        now = self._clock()
        with self._lock:
            loss = self.lost.get(name)
            is_new = loss is not None and name not in self._logged and now - loss.since >= first_seconds
            pause_seconds = AGAIN_SECONDS if is_new else self._again_seconds
            if not (is_new or self._logged) or now < self._logged_at + pause_seconds:
                return
            if not is_new:
                self._again_seconds = min(2 * self._again_seconds, AGAIN_SECONDS_MAX)
            self._logged_at = now
            seconds = now - min(loss.since for loss in self.lost.values())
            by_problem: dict[str, list[str]] = {}
            for lost, loss in self.lost.items():
                self._logged.setdefault(lost, loss)
                by_problem.setdefault(loss.problem, []).append(lost)
        which = "; ".join(f"{', '.join(sorted(names))}: {problem}" for problem, names in by_problem.items())
        if left_seconds is None:
            logger.warning("no word from %s; for %.0f s so far", which, seconds)
        else:
            logger.warning(
                "waiting for %s; for %.0f s so far, at most %.0f s more%s",
                *(which, seconds, left_seconds, f" ({setting}, PYPS_{setting.upper()})" if setting else ""),
            )
