"""Lines of many processes on one terminal, each behind the name of who wrote it."""

from __future__ import annotations

import sys
import threading


def counted(count: int, noun: str) -> str:
    """A number of things in words: "1 worker", "2 workers"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class PrefixedOutput:
    """Prints whole lines behind an aligned name: "worker-0 | step 10". Any thread may print."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._lock = threading.Lock()

    def line(self, name: str, text: str) -> None:
        with self._lock:
            # One write a line, so that a reader of a pipe never sees half of one.
            sys.stdout.write(f"{name:<{self._width}} | {text}\n")
            sys.stdout.flush()

    def announce(self, text: str) -> None:
        """A line of the launcher itself."""
        self.line("pyps", text)
