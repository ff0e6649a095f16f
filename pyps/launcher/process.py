"""A child process of a job, and the coordinator, which is restarted when it dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import IO

# A process that left the child's group may keep its pipes open.
DRAIN_SECONDS = 5.0
# How long a command beside another one may take to end.
END_SECONDS = 20.0

_PR_SET_PDEATHSIG = 1  # From linux/prctl.h.
_LIBC = ctypes.CDLL(None)


class ChildProcess:
    """A child in a process group of its own, which ends with the launcher's main thread.

    `on_line` gets its name and each line of its output; `on_end` is called once, when it has ended and all its output
    was delivered. Both are called from threads of the child's own. Processes that it left behind are killed.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        on_line: Callable[[str, str], None],
        on_end: Callable[[ChildProcess], None],
    ) -> None:
        self.name = name
        self.returncode: int | None = None
        self._on_line = on_line
        self._on_end = on_end
        # Reentrant, for signal handlers.
        self._lock = threading.RLock()
        # Its own session: Ctrl-C in the terminal reaches the launcher alone, which ends children in order.
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=partial(_end_with, os.getpid()),
            text=True,
            errors="replace",
        )
        assert self._popen.stdout is not None
        self._forwarder = threading.Thread(target=self._forward, args=(self._popen.stdout,), daemon=True)
        self._forwarder.start()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self.returncode is None

    def how_it_ended(self) -> str:
        """Return "ended with status 1" or "was killed by SIGKILL"."""
        assert self.returncode is not None
        if self.returncode >= 0:
            return f"ended with status {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = f"signal {-self.returncode}"
        return f"was killed by {name}"

    def signal(self, number: int) -> None:
        """Send a signal to the child and its group, unless it has ended."""
        # After the wait the number may belong to another group.
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, number)

    def _forward(self, output: IO[str]) -> None:
        for line in output:
            self._on_line(self.name, line.rstrip("\r\n"))

    def _watch(self) -> None:
        # Without WNOWAIT the number would be free before the group is killed.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.signal(signal.SIGKILL)
        self._forwarder.join(DRAIN_SECONDS)
        with self._lock:
            self.returncode = self._popen.wait()
        self._on_end(self)


@contextlib.contextmanager
def beside(
    name: str,
    command: Sequence[str],
    *,
    on_line: Callable[[str, str], None],
    on_end: Callable[[ChildProcess], None],
) -> Iterator[None]:
    """Run a command for as long as the block; `on_end` is called if it ends before."""
    leaving, ended = threading.Event(), threading.Event()

    def note(child: ChildProcess) -> None:
        if not leaving.is_set():
            on_end(child)
        ended.set()

    environment = {"PYTHONUNBUFFERED": "1"} | os.environ
    child = ChildProcess(name, command, environment=environment, on_line=on_line, on_end=note)
    try:
        yield
    finally:
        leaving.set()
        child.signal(signal.SIGTERM)
        if not ended.wait(END_SECONDS):
            child.signal(signal.SIGKILL)


def _end_with(launcher: int) -> None:
    """Have the kernel send this child SIGTERM when the launcher is gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:
        # It ended between the fork and the line above.
        os._exit(1)


COORDINATOR = "coordinator"
RESTARTS_MAX = 5
# A coordinator that ends by these is not restarted.
_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The exit status of a coordinator that another one has replaced.
SUPERSEDED = 3


class Coordinator:
    """The coordinator of a job: restarted when a signal kills it; its failure ends the job."""

    def __init__(self, start: Callable[[], ChildProcess], announce: Callable[[str], None]) -> None:
        self._start = start
        self._announce = announce
        self._num_restarts = 0
        self.child = start()
        # Set once it has ended for good; `failed` where its status was not 0.
        self.done = self.failed = False

    def ended(self) -> None:
        """Restart the child that has ended, or note its end."""
        returncode = self.child.returncode
        assert returncode is not None
        if returncode < 0 and -returncode not in _REQUESTS and self._num_restarts < RESTARTS_MAX:
            self._num_restarts += 1
            self._announce(f"{COORDINATOR} {self.child.how_it_ended()}: another one goes on from the last iteration.")
            self.child = self._start()
            return
        self.done = True
        if returncode == SUPERSEDED:
            self._announce(f"{COORDINATOR} was replaced by another one, for which the workers go on.")
            return
        self.failed = returncode != 0
        if returncode > 0:
            self._announce(f"{COORDINATOR} {self.child.how_it_ended()}; its last lines say why.")
        elif returncode < 0:
            after = f", after {self._num_restarts} times before" if self._num_restarts else ""
            self._announce(f"{COORDINATOR} {self.child.how_it_ended()}{after}: the workers have no coordinator.")
