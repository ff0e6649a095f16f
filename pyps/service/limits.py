"""Bounds on what callers may make the server hold; a refusal names the number and the setting to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from pyps_wire.errors import InvalidArgument, LimitExceeded

if TYPE_CHECKING:
    from pyps.run.run import Run


# Of the largest shard's numbers, what a caller gets through whatever the others hold: a push, its answer, a pull.
RESERVE_SHARDS = 3
# What comes with them in a message usually takes less.
HEADER_BYTES = 4096


class ByteBudget:
    """Counts the bytes of pushes and pulls held at the moment. May be used from any thread.

    Up to a half of them is kept for those who hold little, RESERVE_SHARDS for the observers together and for each
    worker, the one that joined first before the others where that is not enough for all: no number of names, and of
    calls that are not read, takes it from them. Of the rest a caller who holds bytes by several calls holds no more
    than it leaves free; by one call alone anybody may hold all of it.
    """

    def __init__(self, bytes_max: int, run: Run | None = None):
        """Whose workers live and how large shards are is the run's; without one nothing is kept."""
        self.bytes_max = bytes_max
        self._run = run
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
            raise InvalidArgument(
                f"{num_bytes} bytes have to be held at once for this, and this server holds {self.bytes_max} at "
                "the most: raise its --max-in-flight-bytes, or make shards smaller (shard_size)"
            )
        with self._lock:
            if num_bytes and 2 * (self._bytes + num_bytes) > self.bytes_max:
                self._require_share(num_bytes, account)
            self._count(num_bytes, account)

    def give_back(self, num_bytes: int, account: Account) -> None:
        """Counts them no more."""
        with self._lock:
            self._count(-num_bytes, account)

    def _require_share(self, num_bytes: int, account: Account) -> None:
        """Refuses what would leave the others less than their part."""
        caller, by_caller = account.caller, self._bytes_by_caller
        reserve, names, num_vacant = self._reserves()
        held, free = by_caller[caller], self.bytes_max - self._bytes
        has_reserve = caller in names and held + num_bytes <= reserve
        # Who takes of its own reserve leaves theirs to those before it.
        others = names[: names.index(caller)] if has_reserve else [name for name in names if name != caller]
        kept = sum(max(0, reserve - by_caller[name]) for name in others)
        several = False
        if not has_reserve:
            kept += reserve * num_vacant
            several = held > account.num_bytes
        if num_bytes > free - kept or (several and held + num_bytes > free):
            who = f"worker {caller!r}" if caller else "observers"
            raise LimitExceeded(
                f"{num_bytes} bytes more would make {held + num_bytes} bytes held by calls of {who}, and {free} of"
                f" {self.bytes_max} are free, of which the others get their share: read what earlier calls bring, then"
                " try again, or raise --max-in-flight-bytes"
            )

    def _reserves(self) -> tuple[int, list[str], int]:
        """What is kept for each of whom, the first before the others, and for how many that may still come."""
        if self._run is None or not (shards := self._run.content.shards):
            return 0, [], 0
        reserve = RESERVE_SHARDS * (4 * max(shard.length for shard in shards.values()) + HEADER_BYTES)
        num_reserves = min(1 + self._run.config.max_workers, self.bytes_max // (2 * reserve))
        names = ["", *(member.worker_id for member in self._run.membership.alive())][:num_reserves]
        return reserve, names, num_reserves - len(names)

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

        Raises LimitExceeded where the budget or the caller's share has no room for them now, InvalidArgument where the
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
