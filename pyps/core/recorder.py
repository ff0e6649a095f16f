"""What happens to a shard, and who is told of all of it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient
from pyps.core.receipt import Receipt
from pyps.core.roster import Roster
from pyps.core.update import Update


class Pushed(NamedTuple):
    """A push is about to be applied, parked, dropped or refused by the protocol or the policy.

    Duplicates and the pushes that left no trace (not finite, other epoch, finished, forgotten) are not told.
    """

    shard_id: int
    gradient: Gradient
    receipt: Receipt
    roster: Roster


class Completed(NamedTuple):
    """Waiting gradients are about to become updates at that version, as other workers count now."""

    shard_id: int
    roster: Roster
    version: int


class Configured(NamedTuple):
    """Behaviour and base rate are about to change at that version; None for what stays.

    Gradients that wait for a protocol that goes are settled first, unless the run has finished.
    """

    shard_id: int
    behaviour: Behaviour | None
    learning_rate: float | None
    roster: Roster
    version: int
    finished: bool


class Updated(NamedTuple):
    """An update was made, told of before; here the weight and rate of a gradient which has waited are known."""

    shard_id: int
    update: Update
    # To be looked at, not kept.
    parameters: Floats


class Pulled(NamedTuple):
    """A worker was given the parameters of that version."""

    shard_id: int
    worker_id: str
    version: int


Event = Pushed | Completed | Configured | Updated | Pulled


class Recorder(Protocol):
    """Hears what happens to a shard, in the order in which it happens.

    Whoever starts from an equal shard and does again what was told, in the same order and with the same
    arguments (`push(gradient, roster=)`, `complete(roster)`, `configure(...)`), gets the same receipts and the
    same bits.
    """

    def record(self, event: Event) -> None:
        """Hears of an event.

        It is called under the shard's lock, and from several shards at once: it must be quick, must not call the
        shard, and hold the payload no longer than the call unless it keeps the gradient. What `Pushed`, `Completed`
        and `Configured` tell of is about to happen: an exception prevents it, and nothing has changed. What `Updated`
        and `Pulled` tell of stands: they must not raise.
        """
        ...
