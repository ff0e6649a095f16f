"""A worker's end: it leaves its run however its program ends, and reports the cause.

Nothing of the process is changed but by `install_process_hooks`.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import signal
import socket
import sys
import sysconfig
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn

from pyps_client import log
from pyps_client.fork import ForkGuard, at_fork, kept_alive
from pyps_client.log import logger
from pyps_client.retry import SIGNAL_SECONDS
from pyps_wire import allocator
from pyps_wire.errors import InvalidArgument, PypsError

# If it is 1, the first client installs the hooks; `pyps run` sets it for its workers.
VARIABLE = "PYPS_PROCESS_HOOKS"

# If it is 1, uncaught errors of pyps print their traceback.
TRACEBACK_VARIABLE = "PYPS_TRACEBACK"

# How long the main thread may stay in a call that no signal's handler interrupts, such as torch's collective calls.
GRACE_SECONDS = 10.0

# How long the last words may take: the program's output may be a pipe without a reader.
FLUSH_SECONDS = 2.0

# A program's exit status after SIGTERM.
STATUS = 128 + signal.SIGTERM

_OWN_PACKAGES = ("pyps_client", "pyps_wire")
_LIBRARIES = frozenset({"site-packages", "dist-packages"})

# Returns the error of pyps for an error of another library that it knows.
Translator = Callable[[BaseException], PypsError | None]

# Workers that must leave before the program ends, by their `close(cause, message)`.
_open: weakref.WeakSet[Any] = weakref.WeakSet()
# A lock for each worker that leaves on a thread of its own, which holds it meanwhile.
_leaving: list[weakref.ref[_thread.LockType]] = []

_translators: list[Translator] = []
# The error with which the program ends.
_error: BaseException | None = None
_hooks_installed = False

# Leases, whose `terminate(error)` is called after SIGTERM.
watched: weakref.WeakSet[Any] = weakref.WeakSet()
# Set when the main thread has handled SIGTERM.
_handled = threading.Event()
# Python writes the number of each signal into the second socket; `_listen` reads the first.
_pipe: tuple[socket.socket, socket.socket] | None = None


def expect(worker: Any, *, of: object = None) -> None:
    """Let the worker leave, by its `close(cause, message)`, when the program ends or `of` is collected.

    The worker must hold no reference to `of`.
    """
    # Registered again, so that objects made before the newest worker, such as torch's process group, end after it.
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    _open.add(worker)
    if of is not None:
        weakref.finalize(of, _abandoned, worker, ForkGuard()).atexit = False


def forget(worker: Any) -> None:
    _open.discard(worker)


def wait_for_leaving() -> None:
    """Wait until all workers whose holders were collected have left."""
    for leaving in list(_leaving):
        if (done := leaving()) is not None:
            while not done.acquire(timeout=SIGNAL_SECONDS):
                continue
            done.release()


def cause_of(error: BaseException | None) -> tuple[str, str]:
    """Return the cause and message of Leave, for a worker that ends with this exception, or without one."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "finished", ""
    error = translated(error)
    return "failed", f"{type(error).__name__}: {error}"[:1000]


def leave_all(error: BaseException | None = None) -> None:
    """Let all workers leave now, with this error if there is one; the process goes on."""
    if error is not None:
        _remember(error)
    _close_all()


def undisturbed(job: Callable[[], object]) -> BaseException | None:
    """Do a job on a thread of its own, and wait; return what it or, meanwhile, a signal's handler raised.

    Python's handlers run on the main thread, and torch's raises where a process of a data loader has died.
    """
    raised: list[BaseException] = []
    done = _thread.allocate_lock()

    def work() -> None:
        try:
            job()
        except BaseException as error:
            raised.append(error)
        finally:
            done.release()

    done.acquire()
    try:
        _thread.start_new_thread(work, ())
    except RuntimeError:
        # Python 3.12.0 and 3.12.1 start none once the program ends.
        work()
    while True:
        try:
            if done.acquire(timeout=SIGNAL_SECONDS):
                return raised[0] if raised else None
        except BaseException as error:
            raised.append(error)


def check_cause(cause: str) -> None:
    if cause not in ("finished", "failed"):
        raise InvalidArgument(f"cause is {cause!r}; expected 'finished' or 'failed'.")


def translate_with(translator: Translator) -> None:
    """Report uncaught errors as the translator's errors of pyps."""
    if translator not in _translators:
        _translators.append(translator)


def translated(error: BaseException) -> BaseException:
    """Return the error of pyps for an error that a translator knows; else the error itself."""
    return next((own for translate in _translators if (own := translate(error)) is not None), error)


def end_process(words: str, status: int) -> None:
    """End the process at once, with a line on stderr; close nothing, since the main thread may use it."""
    try:
        last_words = threading.Thread(target=_say, args=(words,), name="pyps-last-words", daemon=True)
        last_words.start()
        last_words.join(FLUSH_SECONDS)
    finally:
        os._exit(status)


def install_process_hooks() -> None:
    """Make this process a worker as `pyps run` starts one; call it before the first client is made.

    * An uncaught error of pyps ends the program with one sentence. Any uncaught error and `sys.exit(1)`, and from
      Python 3.12 on `raise SystemExit(1)`, are reported to the servers as the worker's failure.
    * SIGTERM, if it has no handler, raises an error: the worker leaves, and nobody waits for its lease to expire.
    * The client's messages appear on stderr, unless the program configures logging.
    * glibc's allocator keeps the blocks of large messages.

    PYPS_PROCESS_HOOKS=1 in the environment does the same.
    """
    global _hooks_installed
    log.prepare()
    if not _hooks_installed:
        _hooks_installed = True
        _hook_exceptions()
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def install_where_asked() -> None:
    if os.environ.get(VARIABLE, "").strip() not in ("", "0"):
        install_process_hooks()


def keep_large_blocks() -> None:
    """Let the allocator keep large blocks, in a process that has the hooks."""
    if _hooks_installed:
        allocator.keep_large_blocks()


class Terminated(SystemExit):
    """Ends a program after SIGTERM, with the status of shells."""

    def __init__(self) -> None:
        super().__init__(STATUS)

    def __str__(self) -> str:
        return "SIGTERM"


def watch(lease: Any) -> None:
    """Call its `terminate(error)` after a SIGTERM that the main thread does not handle; `watched.discard` ends that.

    Only if the hooks handle the signal, and no other code uses Python's wakeup_fd.
    """
    global _pipe
    watched.add(lease)
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


def _close_all() -> None:
    undisturbed(wait_for_leaving)
    for worker in list(_open):
        _close(worker)


def _abandoned(worker: Any, guard: ForkGuard) -> None:
    """Let a worker leave whose holder was collected. This thread may hold any lock, so a new one closes it."""
    if guard.in_child:
        # Its connections are the parent's.
        kept_alive.add(worker)
    elif worker in _open:
        done = _thread.allocate_lock()
        done.acquire()
        _thread.start_new_thread(_close_and_free, ([worker], done))
        _leaving.append(weakref.ref(done, _leaving.remove))


def _close_and_free(workers: list[Any], done: _thread.LockType) -> None:
    """Close the worker in the list, which holds the only reference, and free its tensors.

    A tensor that is freed while the interpreter ends aborts the process.
    """
    try:
        _close(workers.pop())
    finally:
        done.release()


def _close(worker: Any) -> None:
    try:
        worker.close(*cause_of(_last_error()))
    except PypsError as error:
        logger.warning("an optimizer that was not closed left the run: %s", error)
    except BaseException as error:
        # Most likely of a signal's handler. The others are to leave, too.
        logger.warning("while this worker left the run: %s: %s", type(error).__name__, error)


def _hook_exceptions() -> None:
    """Wrap sys.exit and sys.excepthook; the former hook still gets other libraries' errors."""
    previous, leave_program = sys.excepthook, sys.exit
    if sys.version_info >= (3, 12):
        _watch_for_exit(sys.monitoring)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _remember(error)
        own = translated(error)
        if isinstance(own, PypsError) and os.environ.get(TRACEBACK_VARIABLE, "").strip() in ("", "0"):
            print(_sentence(own, trace), file=sys.stderr)
        else:
            previous(kind, error, trace)

    def exit_program(status: Any = None, /) -> NoReturn:
        # Before Python 3.12 no other hook gets a SystemExit.
        _remember(SystemExit(status))
        leave_program(status)

    sys.excepthook, sys.exit = hook, exit_program


def _watch_for_exit(monitoring: Any) -> None:
    """Remember a SystemExit that the main module raises, which no other hook gets."""
    tool = next((each for each in (3, 4) if monitoring.get_tool(each) is None), None)
    if tool is None:
        return

    def unwound(code: CodeType, offset: int, error: BaseException) -> None:
        is_main = code.co_name == "<module>" and sys._getframe(1).f_globals.get("__name__") == "__main__"
        if is_main and isinstance(error, SystemExit):
            _remember(error)

    monitoring.use_tool_id(tool, "pyps")
    monitoring.register_callback(tool, monitoring.events.PY_UNWIND, unwound)
    monitoring.set_events(tool, monitoring.events.PY_UNWIND)


def _remember(error: BaseException) -> None:
    global _error
    _error = error


def _last_error() -> BaseException | None:
    if _error is None and not hasattr(sys, "ps1"):
        # Python's own record, without the hook; at a prompt the program goes on after an error.
        return getattr(sys, "last_value", None)
    return _error


def _sentence(error: PypsError, trace: TracebackType | None) -> str:
    """Return the error's message, and below it the newest line of the user's code, or else of another package."""
    others = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(trace)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OWN_PACKAGES
    ]
    if not others:
        return f"pyps: {error}"
    file, line = ([(file, line) for file, line in others if not _is_library(file)] or others)[-1]
    # A working directory may have been deleted.
    with contextlib.suppress(OSError):
        file = file.removeprefix(f"{Path.cwd()}{os.sep}")
    return f"pyps: {error}\n  at {file}:{line}"


def _is_library(file: str) -> bool:
    """Return whether a file is of the standard library or an installed package."""
    if file.startswith(("<frozen ", sysconfig.get_path("stdlib") + os.sep)):
        return True
    return not _LIBRARIES.isdisjoint(Path(file).parts)


def _say(words: str) -> None:
    # Either stream may be None, closed, or a broken pipe.
    with contextlib.suppress(Exception):
        print(f"pyps: {words}", file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):
        sys.stdout.flush()


def _listen(reader: socket.socket) -> None:
    while numbers := reader.recv(64):
        if signal.SIGTERM in numbers and not _handled.wait(GRACE_SECONDS):
            for lease in list(watched):
                lease.terminate(Terminated())


def _terminate(number: int, frame: FrameType | None) -> None:
    # First: a second SIGTERM ends the program at once, and must not come while the event's lock is held.
    signal.signal(number, signal.SIG_DFL)
    # A launcher ends the processes of a data loader, too, for which torch's handler raises, wherever this thread is.
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _handled.set()
    error = Terminated()
    # sys.excepthook gets no SystemExit.
    _remember(error)
    raise error


def _forget_in_child() -> None:
    """In a forked child, such as a data loader's, forget the parent's workers and signal handling."""
    global _pipe
    _leaving.clear()
    if _pipe is not None:
        signal.set_wakeup_fd(-1)
        _pipe = None
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


at_fork(after_in_child=_forget_in_child)
