"""The end of a process whose replica is lost, also where its main thread hangs in a collective call for ever."""

from __future__ import annotations

import threading

from pyps_client.hard_end import end_process
from pyps_wire.errors import PypsError

# For so long the thread that trains may stay away from the session before the process is ended.
GRACE_SECONDS = 10.0


class LostReplica:
    """What a heartbeat learned of the replica's end, until the thread that trains comes to know it.

    That thread, which is the one that made this, may wait for a process that is gone: torch's collective calls then
    end late or never.
    """

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._known = threading.Event()
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._error: PypsError | None = None

    def note(self, error: PypsError) -> bool:
        """Notes the end, as told by a server. Only the first time counts: then True."""
        with self._lock:
            if self._error is not None:
                return False
            self._error = error
        threading.Thread(target=self._end_process, args=(error,), name="pyps-lost-replica", daemon=True).start()
        return True

    def check(self) -> None:
        """Raises what was noted."""
        error = self._error
        if error is None:
            return
        if threading.get_ident() == self._owner:
            self._known.set()
        raise type(error)(str(error))

    def settle(self) -> None:
        """Leaves the process alone: it takes leave by itself."""
        self._known.set()

    def _end_process(self, error: PypsError) -> None:
        if not self._known.wait(GRACE_SECONDS):
            end_process(str(error), 1)
