"""What a caller tells of servers that do not answer: one line for all of them, whichever threads notice."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pyps_client.log import logger

# An outage that grows is told again after so long; one that lasts too, then after twice as long each time, up to the
# longest.
AGAIN_SECONDS = 10.0
AGAIN_SECONDS_MAX = 300.0


@dataclass
class _Loss:
    """Something that does not answer: since when, why, and how many threads wait for it."""

    since: float
    problem: str = "no answer"
    num_waits: int = 0


class Outage:
    """Which of a caller's servers do not answer, by name, and since when; on any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._lost: dict[str, _Loss] = {}
        # Those of which was told, until all are back.
        self._told: dict[str, _Loss] = {}
        self._again_seconds = AGAIN_SECONDS
        self._told_at = -math.inf

    def note(self, name: str, problem: str, *, at: float) -> float:
        """Notes an attempt that failed at `at`; returns when the first one did."""
        with self._lock:
            loss = self._lost.setdefault(name, _Loss(at))
            loss.since, loss.problem = min(loss.since, at), problem
            return loss.since

    def enter(self, name: str, *, at: float) -> None:
        """Notes that a thread waits since `at`: until it leaves, only its own success counts."""
        with self._lock:
            self._lost.setdefault(name, _Loss(at)).num_waits += 1

    def leave(self, name: str) -> None:
        """Ends `enter`."""
        with self._lock:
            self._lost[name].num_waits -= 1

    def since(self, name: str) -> float:
        """When what a thread waits for began not to answer."""
        with self._lock:
            return self._lost[name].since

    def progressed(self, name: str) -> None:
        """Counts from now again for what a thread waits for, after part of it came."""
        with self._lock:
            self._lost[name].since = self._clock()

    def heard(self, name: str) -> None:
        """Notes an answer, and tells where all are back that were told to be lost."""
        if name not in self._lost:
            return
        with self._lock:
            loss = self._lost.get(name)
            if loss is None or loss.num_waits:
                return
            del self._lost[name]
            if self._lost or not self._told:
                return
            back, self._told = self._told, {}
            self._again_seconds, self._told_at = AGAIN_SECONDS, -math.inf
        seconds = self._clock() - min(loss.since for loss in back.values())
        logger.info("%s %s there after %.0f s", ", ".join(sorted(back)), "is" if len(back) == 1 else "are", seconds)

    def tell(self, name: str, *, first_seconds: float, left_seconds: float | None = None) -> None:
        """Tells of all that is lost, where this one is new among it and so old, or where it is time again.

        `left_seconds`: how much longer the caller waits, if it does.
        """
        now = self._clock()
        with self._lock:
            loss = self._lost.get(name)
            is_new = loss is not None and name not in self._told and now - loss.since >= first_seconds
            pause_seconds = AGAIN_SECONDS if is_new else self._again_seconds
            if not (is_new or self._told) or now < self._told_at + pause_seconds:
                return
            if not is_new:
                self._again_seconds = min(2 * self._again_seconds, AGAIN_SECONDS_MAX)
            self._told_at = now
            seconds = now - min(loss.since for loss in self._lost.values())
            by_problem: dict[str, list[str]] = {}
            for lost, loss in self._lost.items():
                self._told.setdefault(lost, loss)
                by_problem.setdefault(loss.problem, []).append(lost)
        which = "; ".join(f"{', '.join(sorted(names))}: {problem}" for problem, names in by_problem.items())
        if left_seconds is None:
            logger.warning("no word from %s; for %.0f s so far", which, seconds)
        else:
            logger.warning("waiting for %s; for %.0f s so far, at most %.0f s more", which, seconds, left_seconds)
