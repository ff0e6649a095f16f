"""Bounds on what callers may make the server hold; a refusal names the number and the setting to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from pyps_wire.errors import BadRequest, LimitExceeded


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

    def hold(self, num_bytes: int) -> None:
        """Counts `num_bytes` until they are released.

        Raises LimitExceeded where they would go beyond the budget now, BadRequest where they always would.
        """
        if num_bytes > self.bytes_max:
            raise BadRequest(
                f"{num_bytes} bytes have to be held at once for this, and this server holds {self.bytes_max} at "
                "the most: raise its --max-in-flight-bytes, or make shards smaller (shard_size)"
            )
        with self._lock:
            if self._bytes + num_bytes > self.bytes_max:
                raise LimitExceeded(
                    f"{num_bytes} bytes more would make {self._bytes + num_bytes} bytes of pushes and pulls "
                    f"held at once, this server holds {self.bytes_max} at the most: try again later, or "
                    "raise --max-in-flight-bytes"
                )
            self._bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Counts them no more."""
        with self._lock:
            self._bytes -= num_bytes

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Holds `num_bytes` while the block runs; raises as `hold`."""
        self.hold(num_bytes)
        try:
            yield
        finally:
            self.release(num_bytes)


def check_message_bytes(num_bytes: int, *, bytes_max: int) -> None:
    """Refuses a message beyond the limit that Hello told."""
    if num_bytes > bytes_max:
        raise LimitExceeded(
            f"the message is {num_bytes} bytes long, this server takes {bytes_max} at the most: "
            "raise --max-message-bytes, or make shards smaller (shard_size)"
        )
