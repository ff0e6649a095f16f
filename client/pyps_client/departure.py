"""Taking leave of a run, also when the program ends without saying so."""

from __future__ import annotations

import _thread
import atexit
import weakref
from collections.abc import Sequence
from typing import Protocol

from pyps_client import uncaught
from pyps_client.channel import problem_of
from pyps_client.connection import Connection
from pyps_client.fork import ForkGuard, at_fork, keep_alive
from pyps_client.log import logger
from pyps_client.retry import SIGNAL_SECONDS
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import PypsError
from pyps_wire.parameter_server_pb2 import LeaveReply, LeaveRequest

# All servers together: a program's end must not hang on a server that is gone.
LEAVE_SECONDS = 3.0

_CAUSES = {"finished": LeaveRequest.CAUSE_FINISHED, "failed": LeaveRequest.CAUSE_FAILED}


class Closable(Protocol):
    """Something that takes leave."""

    def close(self, cause: str = "finished", message: str = "") -> None: ...


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
# A lock for each that takes leave on a thread of its own, which holds it until it has.
_leaving: list[weakref.ref[_thread.LockType]] = []
_registered = False


def expect(session: Closable, *, of: object = None) -> None:
    """Sees to it that the session takes leave at the program's end at the latest.

    With `of`, once nobody holds that object any more; the session must not hold it either.
    """
    _register()
    _open.add(session)
    if of is not None:
        weakref.finalize(of, _abandoned, session, ForkGuard()).atexit = False


def forget(session: Closable) -> None:
    """Ends `expect`."""
    _open.discard(session)


def cause_of(error: BaseException | None) -> tuple[str, str]:
    """How a worker that ends with this exception (or none) tells it: cause and message."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "finished", ""
    error = uncaught.translated(error)
    return "failed", f"{type(error).__name__}: {error}"[:1000]


def leave(connections: Sequence[Connection], sender: Sender, cause: str, message: str) -> None:
    """Says Leave to all servers at once, without insisting: a lease runs out by itself."""
    request = LeaveRequest(sender=sender, cause=_CAUSES[cause], message=message)
    calls = []
    for connection in connections:
        try:
            call = connection.channel.start("Leave", request, LeaveReply, timeout_seconds=LEAVE_SECONDS)
        except (PypsError, ValueError) as error:
            # Closed, by another thread.
            logger.debug("leaving %s: %s", connection.name, error)
        else:
            calls.append((connection, call))
    for connection, call in calls:
        problem = problem_of(call)
        if problem is not None:
            logger.debug("leaving %s: %s", connection.name, problem)


def _register() -> None:
    """Registers the leave-taking at the interpreter's end, once."""
    global _registered
    if _registered:
        return
    _registered = True
    atexit.register(_close_all)


def _abandoned(session: Closable, guard: ForkGuard) -> None:
    """Lets a session take leave whose holder is gone: perhaps by the garbage collector, amid anything, on any thread.

    So it waits for no lock, which that thread may hold.
    """
    if guard.in_child:
        # Its connections are the parent's.
        keep_alive(session)
    elif session in _open:
        done = _thread.allocate_lock()
        done.acquire()
        _thread.start_new_thread(_leave_alone, (session, done))
        _leaving.append(weakref.ref(done, _leaving.remove))


def _leave_alone(session: Closable, done: _thread.LockType) -> None:
    try:
        _close(session)
    finally:
        done.release()


def _close_all() -> None:
    # Whatever is lost, this takes seconds.
    for leaving in list(_leaving):
        done = leaving()
        while done is not None and not done.acquire(timeout=SIGNAL_SECONDS):
            continue
    for session in list(_open):
        _close(session)


def _close(session: Closable) -> None:
    try:
        session.close(*cause_of(uncaught.last()))
    except PypsError as error:
        # There is nobody left to raise it to.
        logger.warning("an optimizer that was not closed left the run: %s", error)


at_fork(after_in_child=_leaving.clear)
