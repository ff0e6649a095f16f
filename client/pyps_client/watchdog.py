"""A deadline for what stays open longer than one call: a round on an open stream."""

from __future__ import annotations

import _thread
import math
import threading
import time
import weakref
from collections.abc import Callable

# A watch sleeps no longer than this while nothing is under way, so that a deadline set meanwhile is not missed by more.
NAP_SECONDS = 5.0


class Watchdog:
    """Calls `expire` when a round lasts longer than it was given, on a thread of its own that mostly sleeps.

    To begin and to end a round costs an assignment: the thread looks at the deadline when the one that it saw last
    has passed.
    """

    def __init__(self, expire: Callable[[], None]) -> None:
        """`expire` is a method, held weakly: its object's end is the watch's."""
        self._expire = weakref.WeakMethod(expire)
        self._deadline = math.inf
        self._ended = threading.Event()
        self._started = False

    def begin(self, seconds: float) -> None:
        """Starts the time of a round."""
        self._deadline = time.monotonic() + seconds
        if not self._started:
            first = min(seconds, NAP_SECONDS)
            # A signal's handler that raises amid the start of a threading.Thread breaks both: the new thread, and what
            # it raised. After this call the watch runs, whatever is raised; a second one would do no harm.
            _thread.start_new_thread(_watch, (weakref.ref(self), self._ended, first))
            self._started = True

    def rest(self) -> None:
        """Ends a round: it was in time."""
        self._deadline = math.inf

    def end(self) -> None:
        """Ends the watch for good."""
        self._ended.set()

    def look(self) -> float:
        """How long the thread may sleep now; calls `expire` where the deadline has passed, once."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            self._deadline = math.inf
            expire = self._expire()
            if expire is not None:
                expire()
        return min(max(left, 0.0), NAP_SECONDS)


def _watch(watchdog: weakref.ref[Watchdog], ended: threading.Event, seconds: float) -> None:
    while not ended.wait(seconds):
        watched = watchdog()
        if watched is None:
            return
        seconds = watched.look()
        del watched
