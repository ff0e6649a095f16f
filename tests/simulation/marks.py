"""What a run of many histories has to have met, or the simulator has stopped to test it."""

from __future__ import annotations

from collections import Counter

from tests.simulation.plan import KINDS

# Some words of a mark: a fault, the message or operation of the disk that it met, and what its process was doing.
WANTED = (
    *KINDS,
    # A server ends amid each step of a checkpoint, and while others wait for it.
    *(
        f"{kind} {operation} saving"
        for kind in ("crash", "power")
        for operation in ("create", "write", "sync", "rename")
    ),
    *("power sync_folder saving", "crash sync_folder saving"),
    *(f"{kind} pending" for kind in ("crash", "power", "pause", "stop")),
    *(f"{kind} parked" for kind in ("crash", "power", "pause")),
    *(f"{kind} saving" for kind in ("pause", "stop", "jump")),
    *(f"{kind} empty" for kind in ("crash", "pause")),
    # A connection breaks, or stands still, at each message.
    *(
        f"{kind} {method}{part}"
        for kind in ("cut", "late")
        for method in ("Hello", "Initialize", "Push", "Exchange", "Pull", "Heartbeat", "Leave")
        for part in ("", "=")
    ),
    *(f"hold {method}" for method in ("Push", "Exchange", "Pull=", "Push=")),
    # A server or its standby ends or stands still, their connection breaks, and the standby takes over.
    *(f"{kind} {doing}" for kind in ("crash", "power", "stop", "pause") for doing in ("guarded", "following")),
    *(f"{kind} Follow{part}" for kind in ("cut", "late") for part in ("", "=")),
    *("hold following", "hold guarded", "flip following", "takeover"),
    # A worker ends wherever it is.
    *(f"kill {doing}" for doing in ("connecting", "computing", "pushing", "exchanging", "pulling", "leaving")),
    # No room for each step of a checkpoint.
    *(f"full {operation}" for operation in ("create", "write", "sync", "make_folder")),
)


def missing(marks: Counter[str]) -> list[str]:
    """Return what no history has met."""
    met = [set(mark.replace("+", " ").split()) for mark in marks]
    return [wanted for wanted in WANTED if not any(met_words >= set(wanted.split()) for met_words in met)]
