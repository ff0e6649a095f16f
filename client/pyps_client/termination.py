"""The end of a worker by SIGTERM: it takes leave, so that others do not wait out its lease."""

from __future__ import annotations

import signal
import socket
import threading
import weakref
from types import FrameType
from typing import Protocol

from pyps_client import uncaught
from pyps_client.fork import at_fork

STATUS = 128 + signal.SIGTERM

# For so long the main thread may stay in a call that no signal's handler interrupts, such as torch's collective ones.
GRACE_SECONDS = 10.0

_taken = threading.Event()
# Where the interpreter writes the numbers of signals as they come, and what reads them.
_pipe: tuple[socket.socket, socket.socket] | None = None


class Watched(Protocol):
    """Something that has to take leave."""

    def terminate(self, error: BaseException) -> None: ...


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()


class Terminated(SystemExit):
    """Ends a program that got SIGTERM, with the status that shells give for it."""

    def __init__(self) -> None:
        super().__init__(STATUS)

    def __str__(self) -> str:
        return "SIGTERM"


def install() -> None:
    """Lets SIGTERM unwind the program, so that its end is said, where the program has no handler of its own."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def watch(watched: Watched) -> None:
    """Has it terminated, on another thread, where SIGTERM comes and the main thread does not take it.

    Only where `install` took charge of the signal, and nobody else of the interpreter's wakeup_fd.
    """
    global _pipe
    _watched.add(watched)
    if _pipe is not None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not _terminate:
        return
    reader, writer = pipe = socket.socketpair()
    writer.setblocking(False)
    others = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if others != -1:
        signal.set_wakeup_fd(others)
        return
    _pipe = pipe
    threading.Thread(target=_listen, args=(reader,), name="pyps-sigterm", daemon=True).start()


def unwatch(watched: Watched) -> None:
    """Ends `watch`."""
    _watched.discard(watched)


def _listen(reader: socket.socket) -> None:
    while numbers := reader.recv(64):
        if signal.SIGTERM in numbers and not _taken.wait(GRACE_SECONDS):
            for watched in list(_watched):
                watched.terminate(Terminated())


def _terminate(number: int, frame: FrameType | None) -> None:
    _taken.set()
    # A second one ends the program at once.
    signal.signal(number, signal.SIG_DFL)
    error = Terminated()
    # The hook for uncaught exceptions does not see a SystemExit.
    uncaught.remember(error)
    raise error


def _forget_in_child() -> None:
    """A forked child, such as a data loader's, has nothing to take leave of."""
    global _pipe
    if _pipe is not None:
        signal.set_wakeup_fd(-1)
        _pipe = None
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


at_fork(after_in_child=_forget_in_child)
