"""What a shard's calls return, and the limit of what waits at the shards of a run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from pyps.core.arrays import Floats
from pyps.core.ledger import LedgerState
from pyps.core.protocols.base import Contribution
from pyps.core.receipt import Receipt
from pyps.core.rules import Slots
from pyps.core.update import Update
from pyps_wire.errors import LimitExceeded


class Pushed(NamedTuple):
    """The result of a push."""

    receipt: Receipt
    # The version of the parameters that were written to its reply; None where none were.
    version: int | None = None
    # The update that it made; None for none.
    update: Update | None = None


@dataclass(frozen=True, slots=True)
class ShardState:
    """A copy of everything in a shard, taken at one version."""

    version: int
    parameters: Floats
    slots: Slots
    ledger: LedgerState
    # Gradients with a PENDING receipt, in order of arrival.
    pending: tuple[Contribution, ...] = ()
    # Examples behind the applied gradients.
    examples: int = 0
    # The base rate; None for the rule's own.
    learning_rate: float | None = None
    # The momentum; None where the rule has none.
    momentum: float | None = None


class PendingBudget:
    """Limits the bytes of pending gradients over all shards of a run. May be used from any thread, under any lock."""

    def __init__(self, bytes_max: int = sys.maxsize):
        self.bytes_max = bytes_max
        self._lock = Lock()
        # Guarded by _lock.
        self.bytes_held = 0

    def take(self, num_bytes: int) -> None:
        """Add the size of a gradient that is about to wait; raise LimitExceeded if it does not fit."""
        with self._lock:
            if self.bytes_held + num_bytes > self.bytes_max:
                raise LimitExceeded(
                    f"{num_bytes} bytes more would make {self.bytes_held + num_bytes} bytes of gradients that wait for "
                    f"an update, this server keeps {self.bytes_max} at the most: raise --max-pending-bytes, or take "
                    "a protocol that keeps fewer"
                )
            self.bytes_held += num_bytes

    def restore(self, num_bytes: int) -> None:
        """Add the size of gradients that waited before the server ended, whatever the bound is now."""
        with self._lock:
            self.bytes_held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Subtract the size of gradients that are no longer pending."""
        with self._lock:
            self.bytes_held -= num_bytes
