"""Who counts for a shard's next update."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Roster:
    """The workers that a protocol reckons with (the papers' lambda is their number).

    A worker counts from its first push until it leaves, its lease runs out, or it holds the others up for too
    long.
    """

    # Ascending by worker_id.
    workers: tuple[str, ...] = ()
    # How many of the expected workers have not pushed yet; 0 for good once all have.
    missing: int = 0

    @property
    def num_workers(self) -> int:
        """L, the workers that count now."""
        return len(self.workers)

    @property
    def num_expected(self) -> int:
        """L with those that are still to come."""
        return len(self.workers) + self.missing
