"""The events of a shard, for a recorder that logs them."""

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

    Duplicates and pushes refused earlier (not finite, other epoch, finished, forgotten) are not recorded.
    """

    shard_id: int
    gradient: Gradient
    receipt: Receipt
    roster: Roster


class Completed(NamedTuple):
    """Pending gradients are about to become updates at that version, since the roster has changed."""

    shard_id: int
    roster: Roster
    version: int


class Configured(NamedTuple):
    """The behaviour or base rate is about to change at that version; None for no change.

    If the protocol changes, pending gradients are settled first, unless the run has finished.
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
    # The shard's next update changes the array.
    parameters: Floats


class Pulled(NamedTuple):
    """A worker received the parameters of that version."""

    shard_id: int
    worker_id: str
    version: int


Event = Pushed | Completed | Configured | Updated | Pulled


class Listener(Protocol):
    """Is told what happens to a shard."""

    def record(self, event: Event) -> None:
        """Note an event; see `Recorder`."""
        ...


class Recorder(Listener, Protocol):
    """Records what happens to a shard, in the order in which it happens.

    The same calls in the same order and with the same arguments (`push(gradient, roster=)`, `complete(roster)`,
    `configure(...)`), on an equal shard, give the same receipts and the same bits.
    """

    def record(self, event: Event) -> None:
        """Note an event. Called under the shard's lock, from several shards at once: be quick, do not call the shard.

        `Pushed`, `Completed` and `Configured` are about to happen: an exception prevents them, and nothing has changed.
        `Updated` and `Pulled` have happened: do not raise.
        """
        ...

    def write(self, shard_id: int) -> None:
        """Write a shard's events; see `LoggedShard`. It must not raise, nor keep a gradient's payload afterwards."""
        ...


class Both(NamedTuple):
    """A recorder, which may prevent what is about to happen, and a listener that does not."""

    recorder: Listener
    follower: Listener

    def record(self, event: Event) -> None:
        self.recorder.record(event)
        self.follower.record(event)
