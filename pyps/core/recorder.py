"""Who is told of every push and pull of a shard."""

from __future__ import annotations

from typing import Protocol

from pyps.core.gradient import Gradient
from pyps.core.receipt import Receipt


class Recorder(Protocol):
    """Hears what happens to a shard, in the order in which it happens.

    Both methods are called under the shard's lock, and from several shards at once: they must be quick,
    must not call the shard, and hold the payload no longer than the call unless they keep the gradient. An
    exception from `pushed` refuses the push, which then has changed nothing.
    """

    def pushed(self, shard_id: int, gradient: Gradient, receipt: Receipt) -> None:
        """Hears of a push that is about to be applied, parked, dropped or found too stale.

        Replaying these in order through an equal shard gives the same bits. Duplicates and the pushes that
        left no trace (not finite, other epoch, finished, forgotten) are not told.
        """
        ...

    def pulled(self, shard_id: int, worker_id: str, version: int) -> None:
        """Hears that a worker was given the parameters of that version."""
        ...
