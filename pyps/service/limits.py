"""Bounds on what callers may make the server hold; a refusal names the number and the setting to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from pyps_wire.errors import LimitExceeded


class ByteBudget:
    """Counts the bytes of pushes and pulls held at the moment. May be used from any thread."""

    def __init__(self, bytes_max: int):
        self.bytes_max = bytes_max
        self._lock = Lock()
        # Guarded by _lock.
        self._bytes = 0

    @property
    def bytes_held(self) -> int:
        """Bytes held at the moment."""
        return self._bytes

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Counts `num_bytes` while the block runs; LimitExceeded when they would go beyond the budget."""
        with self._lock:
            if self._bytes + num_bytes > self.bytes_max:
                raise LimitExceeded(
                    f"{num_bytes} bytes more would make {self._bytes + num_bytes} bytes of pushes and pulls "
                    f"held at once, this server holds {self.bytes_max} at the most: try again later, or "
                    "raise --max-in-flight-bytes"
                )
            self._bytes += num_bytes
        try:
            yield
        finally:
            with self._lock:
                self._bytes -= num_bytes


def check_message_bytes(num_bytes: int, *, bytes_max: int) -> None:
    """Refuses a message beyond the limit that Hello told."""
    if num_bytes > bytes_max:
        raise LimitExceeded(
            f"the message is {num_bytes} bytes long, this server takes {bytes_max} at the most: "
            "raise --max-message-bytes, or make shards smaller (shard_size)"
        )
