"""Bounds on the memory that callers use; a refusal names the number and the setting to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from pyps_wire.errors import InvalidArgument, LimitExceeded

if TYPE_CHECKING:
    from pyps.run.run import Run


# How many of the largest shards a caller can always send and get: a push, its answer, a pull.
RESERVE_SHARDS = 3
# The rest of a message usually takes less.
HEADER_BYTES = 4096


class _Reserves(NamedTuple):
    """The memory kept for the callers that joined first."""

    # For each of them.
    num_bytes: int
    # Their ranks in the order of joining; observers, who have no name, come first.
    ranks: Mapping[str, int]
    # How many callers that have yet to join have a reserve too.
    num_vacant: int


class ByteBudget:
    """Counts the bytes of pushes and pulls held at the moment. May be used from any thread.

    Up to half of them is reserved: RESERVE_SHARDS shards for each worker, and for all observers together, in the order
    of joining if there is not enough for all. No caller takes that from them, whatever its names and calls. Of the rest
    a caller's calls together hold at most as much as they leave free; one call alone may hold all of it.
    """

    def __init__(self, bytes_max: int, run: Run | None = None):
        """The run knows its live workers and the size of shards; without a run nothing is reserved."""
        self.bytes_max = bytes_max
        self._run = run
        self._lock = Lock()
        # Changed under _lock.
        self.bytes_held = 0
        self._bytes_by_caller: Counter[str] = Counter()
        # The reserves, for these shards and this roster.
        self._reserves = _Reserves(0, {}, 0)
        self._reserved_for: tuple[object, object] = None, None

    @property
    def is_crowded(self) -> bool:
        """Return whether more than half is held."""
        return 2 * self.bytes_held > self.bytes_max

    def may_wait(self, num_bytes: int) -> bool:
        """Return whether a caller may let so many bytes wait: all reserves and room for one more caller stay free."""
        with self._lock:
            room = num_bytes + self._present_reserves().num_bytes
            return 2 * (self.bytes_held + room) <= self.bytes_max

    def account(self, caller: str = "") -> Account:
        """Return an account for one call; all observers are one caller, without a name."""
        return Account(self, caller)

    def count(self, num_bytes: int, account: Account) -> None:
        """Add bytes to those held by a call, or take them back if negative; raise as `Account.hold`."""
        if num_bytes > self.bytes_max:
            raise InvalidArgument(
                f"{num_bytes} bytes have to be held at once for this, and this server holds {self.bytes_max} at "
                "the most: raise its --max-in-flight-bytes, or make shards smaller (shard_size)"
            )
        with self._lock:
            if num_bytes > 0 and 2 * (self.bytes_held + num_bytes) > self.bytes_max:
                self._require_share(num_bytes, account)
            self.bytes_held += num_bytes
            account.num_bytes += num_bytes
            self._bytes_by_caller[account.caller] += num_bytes
            if not self._bytes_by_caller[account.caller]:
                del self._bytes_by_caller[account.caller]

    def _require_share(self, num_bytes: int, account: Account) -> None:
        """Refuse bytes that would leave the others less than their reserve."""
        caller, by_caller = account.caller, self._bytes_by_caller
        reserve, ranks, num_vacant = self._present_reserves()
        held, free = by_caller[caller], self.bytes_max - self.bytes_held
        rank = ranks.get(caller, len(ranks))
        has_reserve = rank < len(ranks) and held + num_bytes <= reserve
        # A caller that takes of its own reserve must leave the reserves of earlier callers, any other caller all.
        num_before = rank if has_reserve else len(ranks)
        num_others = num_before - (not has_reserve and rank < len(ranks))
        # Over callers that hold bytes alone: there may be hundreds of workers, and this is on the path of a push.
        used = sum(
            min(each, reserve)
            for name, each in by_caller.items()
            if name != caller and ranks.get(name, num_before) < num_before
        )
        kept = reserve * num_others - used
        several = False
        if not has_reserve:
            kept += reserve * num_vacant
            several = held > account.num_bytes
        if num_bytes > free - kept or (several and held + num_bytes > free):
            who = f"worker {caller!r}" if caller else "observers"
            raise LimitExceeded(
                f"{num_bytes} bytes more would make {held + num_bytes} bytes held by calls of {who}, and {free} of"
                f" {self.bytes_max} are free, of which the others get their share: read the answers to earlier calls,"
                " then try again, or raise --max-in-flight-bytes"
            )

    def _present_reserves(self) -> _Reserves:
        run = self._run
        if run is None or not (shards := run.content.shards):
            return _Reserves(0, {}, 0)
        # The roster is replaced whenever a worker joins, leaves or is lost.
        present = shards, run.membership.roster
        if present[0] is not self._reserved_for[0] or present[1] is not self._reserved_for[1]:
            reserve = RESERVE_SHARDS * (4 * max(shard.length for shard in shards.values()) + HEADER_BYTES)
            num_reserves = min(1 + run.config.max_workers, self.bytes_max // (2 * reserve))
            names = ["", *(member.worker_id for member in run.membership.alive())][:num_reserves]
            ranks = {name: rank for rank, name in enumerate(names)}
            self._reserves = _Reserves(reserve, ranks, num_reserves - len(names))
            self._reserved_for = present
        return self._reserves


class Account:
    """The bytes that one call holds of a budget. May be used from any thread."""

    def __init__(self, budget: ByteBudget, caller: str):
        self.budget = budget
        # The worker, or "". Must not change while the account holds anything.
        self.caller = caller
        # Guarded by the budget's lock.
        self.num_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Count `num_bytes` until they are released.

        Raises LimitExceeded if there is no room in the budget or the caller's share now, InvalidArgument if never.
        """
        self.budget.count(num_bytes, self)

    def release(self, num_bytes: int) -> None:
        self.budget.count(-num_bytes, self)

    def close(self) -> None:
        self.release(self.num_bytes)

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Hold `num_bytes` while the block runs; raise as `hold`."""
        self.hold(num_bytes)
        try:
            yield
        finally:
            self.release(num_bytes)


def check_message_bytes(num_bytes: int, *, bytes_max: int) -> None:
    """Refuse a message beyond the limit that Hello reported."""
    if num_bytes > bytes_max:
        raise LimitExceeded(
            f"the message is {num_bytes} bytes long, this server takes {bytes_max} at the most: "
            "raise --max-message-bytes, or make shards smaller (shard_size)"
        )
