"""Bounds on what callers may make the server hold; a refusal names the number and the setting to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from pyps_wire.errors import BadRequest, LimitExceeded


class ByteBudget:
    """Counts the bytes of pushes and pulls held at the moment. May be used from any thread.

    A caller who holds bytes by several calls holds no more than it leaves free: however many calls one makes, and
    however many do, a part is left for the others. By one call alone anybody may hold all that is free.
    """

    def __init__(self, bytes_max: int):
        self.bytes_max = bytes_max
        self._lock = Lock()
        # Guarded by _lock.
        self._bytes = 0
        self._bytes_by_caller: Counter[str] = Counter()

    @property
    def bytes_held(self) -> int:
        """Bytes held at the moment."""
        return self._bytes

    def account(self, caller: str = "") -> Account:
        """What one call is to hold, for the worker of that name; all observers are one caller, without a name."""
        return Account(self, caller)

    def take(self, num_bytes: int, account: Account) -> None:
        """Counts bytes of a call; for accounts, and raises as `Account.hold`."""
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
            caller = account.caller
            held, free = self._bytes_by_caller[caller], self.bytes_max - self._bytes
            if num_bytes and held > account.num_bytes and held + num_bytes > free:
                who = f"worker {caller!r}" if caller else "observers"
                raise LimitExceeded(
                    f"{num_bytes} bytes more would make {held + num_bytes} bytes held by several calls of {who}, and"
                    f" {free} of {self.bytes_max} are free, of which the others get their share: read what earlier"
                    " calls bring, then try again, or raise --max-in-flight-bytes"
                )
            self._count(num_bytes, account)

    def give_back(self, num_bytes: int, account: Account) -> None:
        """Counts them no more."""
        with self._lock:
            self._count(-num_bytes, account)

    def _count(self, num_bytes: int, account: Account) -> None:
        self._bytes += num_bytes
        account.num_bytes += num_bytes
        self._bytes_by_caller[account.caller] += num_bytes
        if not self._bytes_by_caller[account.caller]:
            del self._bytes_by_caller[account.caller]


class Account:
    """What one call holds of a budget. For one call, though it may be used from any thread."""

    def __init__(self, budget: ByteBudget, caller: str):
        self.budget = budget
        # The worker that it counts for; not to be changed while it holds anything.
        self.caller = caller
        # Guarded by the budget's lock.
        self.num_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Counts `num_bytes` until they are released.

        Raises LimitExceeded where the budget or the caller's share has no room for them now, BadRequest where the
        budget never has.
        """
        self.budget.take(num_bytes, self)

    def release(self, num_bytes: int) -> None:
        """Counts them no more."""
        self.budget.give_back(num_bytes, self)

    def close(self) -> None:
        """Counts nothing of it any more."""
        self.release(self.num_bytes)

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
