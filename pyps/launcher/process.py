"""One child process of a job, and the coordinator, a child that is started again."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO

# A group that was killed closes its pipes at once; only a process that left the group keeps them open longer.
DRAIN_SECONDS = 5.0

_PR_SET_PDEATHSIG = 1  # From linux/prctl.h.
_LIBC = ctypes.CDLL(None)


class ChildProcess:
    """A child in a process group of its own, whose output goes to `on_line` line by line.

    `on_end` is called once, when the child has ended and its output was delivered. What the child itself
    started and left running is killed with it. Both callbacks come from threads of the child's own. The child is
    ended with the thread that started it, which is to be the main one, even where the launcher was killed.
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
        # A signal's handler takes it too, maybe amid the same thread's own use of it.
        self._lock = threading.RLock()
        # Its own session: a Ctrl-C in the terminal reaches the launcher alone, which ends everybody in order.
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
        """The end in words: "ended with status 1", "was killed by SIGKILL"."""
        assert self.returncode is not None
        if self.returncode >= 0:
            return f"ended with status {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = f"signal {-self.returncode}"
        return f"was killed by {name}"

    def signal(self, number: int) -> None:
        """Sends a signal to the child and all that it started; nothing once it has ended."""
        # Guarded, since after the wait the number may belong to a stranger's group.
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, number)

    def _forward(self, output: IO[str]) -> None:
        for line in output:
            self._on_line(self.name, line.rstrip("\r\n"))

    def _watch(self) -> None:
        # The child stays a zombie, and its number its own, until its group is gone.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.signal(signal.SIGKILL)
        self._forwarder.join(DRAIN_SECONDS)
        with self._lock:
            self.returncode = self._popen.wait()
        self._on_end(self)


def _end_with(launcher: int) -> None:
    """Runs in the child before its program: lets the system send SIGTERM when the launcher is gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:
        # It went between the fork and the line above.
        os._exit(1)


COORDINATOR = "coordinator"
# One that is killed again and again has a reason.
RESTARTS_MAX = 5
# These say that somebody wants it to end.
_WISHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# The status of a coordinator after which another came, which goes on.
SUPERSEDED = 3


class Coordinator:
    """A child that is replaced when it dies by a signal, and whose own refusal ends the job."""

    def __init__(self, start: Callable[[], ChildProcess], announce: Callable[[str], None]) -> None:
        self._start = start
        self._announce = announce
        self._num_restarts = 0
        self.child = start()
        # True once it has ended for good with another status than 0.
        self.failed = False
        # True once it has ended for good.
        self.done = False

    def ended(self) -> None:
        """Acts on the end of the child: a new one, or the end."""
        returncode = self.child.returncode
        assert returncode is not None
        if returncode < 0 and -returncode not in _WISHED and self._num_restarts < RESTARTS_MAX:
            self._num_restarts += 1
            self._announce(f"{COORDINATOR} {self.child.how_it_ended()}: another one goes on from the last iteration.")
            self.child = self._start()
            return
        self.done = True
        if returncode == SUPERSEDED:
            self._announce(
                f"{COORDINATOR} was replaced by one that was started by hand: the workers go on for that one."
            )
            return
        self.failed = returncode != 0
        if returncode > 0:
            self._announce(f"{COORDINATOR} {self.child.how_it_ended()}; its last lines say why.")
        elif returncode < 0:
            after = f", after {self._num_restarts} times before" if self._num_restarts else ""
            self._announce(f"{COORDINATOR} {self.child.how_it_ended()}{after}: the workers have nobody to work for.")
