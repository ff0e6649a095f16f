"""What people see of a job: lines of many processes on one terminal, and which of the servers' matter there."""

from __future__ import annotations

import re
import sys
import threading


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


# As pyps.logs writes them, for people and as JSON.
_ROUTINE = re.compile(r'\d{4}-\d\d-\d\dT\S+ (DEBUG|INFO) |\{"time": "[^"]*", "level": "(debug|info)"')
_START_BLOCK = re.compile(r"pyps \S+ parameter server$")


class ServerLines:
    """Tells routine from what needs attention: warnings, errors, and whatever is no log line at all."""

    def __init__(self) -> None:
        # The servers whose start block is being written; each server's lines come from a thread of its own.
        self._starting: set[str] = set()

    def attention(self, name: str, line: str) -> bool:
        """True for a line of server `name` that is no routine."""
        if _START_BLOCK.match(line):
            self._starting.add(name)
            return False
        if name in self._starting:
            if line.startswith("  "):
                return False
            self._starting.discard(name)
        return not _ROUTINE.match(line)
