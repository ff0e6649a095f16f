"""Who is told of all that happens to a shard."""

from __future__ import annotations

from typing import Protocol

from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient
from pyps.core.receipt import Receipt
from pyps.core.roster import Roster
from pyps.core.update import Update


class Recorder(Protocol):
    """Hears what happens to a shard, in the order in which it happens.

    Whoever starts from an equal shard and does again what was told, in the same order and with the same
    arguments (`push(gradient, roster=)`, `complete(roster)`, `configure(...)`), gets the same receipts and the
    same bits.

    All methods are called under the shard's lock, and from several shards at once: they must be quick, must not
    call the shard, and hold the payload no longer than the call unless they keep the gradient. All but `updated` and
    `pulled` hear of what is about to happen: an exception prevents it, and nothing has changed.
    """

    def pushed(self, shard_id: int, gradient: Gradient, receipt: Receipt, roster: Roster) -> None:
        """Hears of a push that is about to be applied, parked, dropped or refused by the protocol or the policy.

        Duplicates and the pushes that left no trace (not finite, other epoch, finished, forgotten) are not told.
        """
        ...

    def completed(self, shard_id: int, roster: Roster, version: int) -> None:
        """Hears that at that version waiting gradients are about to become updates, as other workers count now."""
        ...

    def configured(
        self,
        shard_id: int,
        behaviour: Behaviour | None,
        learning_rate: float | None,
        roster: Roster,
        version: int,
    ) -> None:
        """Hears that at that version behaviour and base rate are about to change; None for what stays.

        Gradients that wait for a protocol that goes are settled first.
        """
        ...

    def updated(self, shard_id: int, update: Update, parameters: Floats) -> None:
        """Hears of the update that was made, told of before, and may look at the parameters, not keep them.

        It is here that the weight and the rate of a gradient which has waited are known. The update stands: this
        must not raise.
        """
        ...

    def pulled(self, shard_id: int, worker_id: str, version: int) -> None:
        """Hears that a worker was given the parameters of that version."""
        ...
