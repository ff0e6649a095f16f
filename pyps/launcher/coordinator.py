"""The coordinator of a job, which is started again when a signal ended it: what it knows lies on the servers."""

from __future__ import annotations

import signal
from collections.abc import Callable

from pyps.launcher.process import ChildProcess

NAME = "coordinator"
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
            self._announce(f"{NAME} {self.child.how_it_ended()}: another one goes on from the last iteration.")
            self.child = self._start()
            return
        self.done = True
        if returncode == SUPERSEDED:
            self._announce(f"{NAME} was replaced by one that was started by hand: the workers go on for that one.")
            return
        self.failed = returncode != 0
        if returncode > 0:
            self._announce(f"{NAME} {self.child.how_it_ended()}; its last lines say why.")
        elif returncode < 0:
            after = f", after {self._num_restarts} times before" if self._num_restarts else ""
            self._announce(f"{NAME} {self.child.how_it_ended()}{after}: the workers have nobody to work for.")
