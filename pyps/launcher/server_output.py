"""Which lines of the servers a person who watches the workers wants to see."""

from __future__ import annotations

import re

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
