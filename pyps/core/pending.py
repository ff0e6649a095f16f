"""What gradients that wait for an update may take of the memory."""

from __future__ import annotations

import sys
from threading import Lock

from pyps_wire.errors import LimitExceeded


class PendingBudget:
    """Counts the bytes of waiting gradients over all shards of a run. May be used from any thread, under any lock."""

    def __init__(self, bytes_max: int = sys.maxsize):
        self.bytes_max = bytes_max
        self._lock = Lock()
        # Guarded by _lock.
        self.bytes_held = 0

    def take(self, num_bytes: int) -> None:
        """Counts a gradient that is about to wait; LimitExceeded where it does not fit."""
        with self._lock:
            if self.bytes_held + num_bytes > self.bytes_max:
                raise LimitExceeded(
                    f"{num_bytes} bytes more would make {self.bytes_held + num_bytes} bytes of gradients that wait for "
                    f"an update, this server keeps {self.bytes_max} at the most: raise --max-pending-bytes, or take "
                    "a protocol that keeps fewer"
                )
            self.bytes_held += num_bytes

    def restore(self, num_bytes: int) -> None:
        """Counts gradients that waited before the server ended, whatever the bound is now."""
        with self._lock:
            self.bytes_held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Counts gradients that wait no longer."""
        with self._lock:
            self.bytes_held -= num_bytes
