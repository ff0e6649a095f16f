"""The end of an optimizer's part in its run."""

from __future__ import annotations

import threading

from pyps_client import departure
from pyps_client.fork import ForkGuard
from pyps_client.session import Session
from pyps_client.torch.downpour import Downpour


class Ending:
    """What an optimizer leaves its run by. It does not hold the optimizer, and can leave when that one is gone."""

    def __init__(self, session: Session, downpour: Downpour) -> None:
        self._session = session
        self._downpour = downpour
        self._guard = ForkGuard()
        self._begun = threading.Lock()

    def close(self, cause: str = "finished", message: str = "", *, separate: bool = False) -> None:
        """Pushes what has gathered, unless the cause is "failed", and leaves the run. A second call does nothing.

        `separate`: the model's parameters are brought out of the memory that servers see.
        """
        if self._guard.in_child or not self._begun.acquire(blocking=False):
            return
        departure.forget(self)
        try:
            if cause == "finished":
                self._session.hurry()
                self._downpour.flush()
        except BaseException as error:
            cause, message = departure.cause_of(error)
            raise
        finally:
            try:
                self._downpour.close(separate=separate)
            finally:
                self._session.close(cause, message)
