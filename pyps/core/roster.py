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
    # Those that have joined and may be among the missing, ascending; none once nobody is missing.
    coming: tuple[str, ...] = ()

    @property
    def num_workers(self) -> int:
        """L, the workers that count now."""
        return len(self.workers)

    @property
    def num_expected(self) -> int:
        """L with those that are still to come."""
        return len(self.workers) + self.missing

    @property
    def awaited(self) -> tuple[str, ...]:
        """Whom a gate waits for that opens once nobody is missing: those that are coming by name, others counted."""
        return (*self.coming, *not_joined(self.missing - len(self.coming)))


def not_joined(count: int) -> tuple[str, ...]:
    """Returns so many workers that nobody knows by name in words, as an entry in a list of names; () for none."""
    if count <= 0:
        return ()
    return (f"{count} more worker{'s' if count > 1 else ''} that ha{'ve' if count > 1 else 's'} not joined",)
