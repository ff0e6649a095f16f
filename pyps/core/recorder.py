"""What happens to a shard, for a recorder that logs all of it."""

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

    Duplicates and the pushes that left no trace (not finite, other epoch, finished, forgotten) are not recorded.
    """

    shard_id: int
    gradient: Gradient
    receipt: Receipt
    roster: Roster


class Completed(NamedTuple):
    """Waiting gradients are about to become updates at that version, since other workers are active now."""

    shard_id: int
    roster: Roster
    version: int


class Configured(NamedTuple):
    """Behaviour and base rate are about to change at that version; None for what stays.

    With another protocol, waiting gradients are settled first, unless the run has finished.
    """

    shard_id: int
    behaviour: Behaviour | None
    learning_rate: float | None
    roster: Roster
    version: int
    finished: bool


class Updated(NamedTuple):
    """An update was made by the push, or in the call, that was recorded before."""

    shard_id: int
    update: Update
    # They change with the shard's next update.
    parameters: Floats


class Pulled(NamedTuple):
    """A worker received the parameters of that version."""

    shard_id: int
    worker_id: str
    version: int


Event = Pushed | Completed | Configured | Updated | Pulled


class Recorder(Protocol):
    """Records what happens to a shard, in the order in which it happens.

    The same calls in the same order and with the same arguments (`push(gradient, roster=)`, `complete(roster)`,
    `configure(...)`), on an equal shard, give the same receipts and the same bits.
    """

    def record(self, event: Event) -> None:
        """Note an event.

        It is called under the shard's lock, and from several shards at once: it must be quick and must not call the
        shard. `Pushed`, `Completed` and `Configured` are about to happen: an exception prevents them, and nothing has
        changed. `Updated` and `Pulled` have happened: they must not raise.
        """
        ...

    def write(self, shard_id: int) -> None:
        """Write the events noted of a shard; see `LoggedShard`. It must not raise, nor keep a gradient's payload."""
        ...
