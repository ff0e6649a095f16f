"""The end of a worker by SIGTERM: it takes leave, so that others do not wait out its lease."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from pyps_client import uncaught


class Terminated(SystemExit):
    """Ends a program that got SIGTERM, with the status that shells give for it."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)

    def __str__(self) -> str:
        return "SIGTERM"


def install() -> None:
    """Lets SIGTERM unwind the program, so that its end is said, where the program has no handler of its own."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    # A second one ends the program at once.
    signal.signal(number, signal.SIG_DFL)
    error = Terminated()
    # The hook for uncaught exceptions does not see a SystemExit.
    uncaught.remember(error)
    raise error


def _forget_in_child() -> None:
    """A forked child, such as a data loader's, has nothing to take leave of."""
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)
