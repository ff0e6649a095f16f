"""Where a server stands with its run."""

from __future__ import annotations

from enum import IntEnum


class RunState(IntEnum):
    """The states of pyps.v1.RunState, by the same numbers."""

    EMPTY = 1
    INITIALIZING = 2
    READY = 3
    FINISHED = 4
    DRAINING = 5
