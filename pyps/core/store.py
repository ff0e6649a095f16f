"""The interface of a shard to the run, the services, storage and the simulator, and what its calls return."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.effects import Wake
from pyps.core.gradient import Finding, Gradient, PayloadKind, PublishedReply, Reply, SharedMemory
from pyps.core.ledger import LedgerState
from pyps.core.protocols.base import Contribution
from pyps.core.receipt import Receipt
from pyps.core.recorder import Listener
from pyps.core.roster import Roster
from pyps.core.rules import Slots
from pyps.core.update import Update
from pyps_wire.errors import LimitExceeded

T = TypeVar("T")


class Pushed(NamedTuple):
    """The result of a push."""

    receipt: Receipt
    # The version of the parameters that were written to its reply; None where none were.
    version: int | None = None
    # The update that it made; None for none.
    update: Update | None = None


class Rows(NamedTuple):
    """The rows of a table, and the ids that are none yet, each the one that was updated longest ago first."""

    ids: npt.NDArray[np.int64]
    # Of each row that of its last update.
    versions: npt.NDArray[np.uint64]
    # float32, or the bits of bfloat16.
    parameters: npt.NDArray[Any]
    slots: Floats
    candidate_ids: npt.NDArray[np.int64]
    candidate_versions: npt.NDArray[np.uint64]
    candidate_counts: npt.NDArray[np.uint32]

    def updated_by(self, newer: Rows, *, num_rows: int) -> Rows:
        """Return the table's `num_rows` rows once these were updated since: what was dropped was the oldest."""
        kept = ~np.isin(self.ids, newer.ids)
        first = int(kept.sum()) + newer.ids.size - num_rows
        of_rows = ("ids", "versions", "parameters", "slots")
        joined = {each: np.concatenate([getattr(self, each)[kept], getattr(newer, each)])[first:] for each in of_rows}
        return newer._replace(**joined)


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
    # A table's, which has no parameters and slots beside; `num_rows` is how many it has where only some are here.
    rows: Rows | None = None
    num_rows: int = 0


class Follower(Listener, Protocol):
    """Follows shards from some state on, under the lock of each. It must not raise."""

    def begin(self, shard: Store, state: ShardState) -> None:
        """Note the state that the next events change."""
        ...


class Store(Protocol):
    """A part of the model's parameters with a version, updated by pushes; see `Shard`, a dense vector.

    Every method may be called from any thread. Only the store writes its fields; they may be read without its lock.
    """

    shard_id: int
    # Whether pushes hold ids and rows; see `TableShard`.
    has_rows: bool
    # The life of the run that the versions belong to.
    epoch: int
    length: int
    # What pushes hold, unless NOTHING.
    kind: PayloadKind
    # The number of updates so far, and the worker whose push made the newest; empty where none did.
    version: int
    updated_by: str
    # With the version it says whether anything has changed that a checkpoint holds.
    moves: int
    # The newest version that a checkpoint holds, and the moves by then. Set by the checkpoint's writer.
    durable_version: int
    durable_moves: int
    # The number of examples behind the applied gradients.
    examples: int
    behaviour: Behaviour
    hyperparameters: Mapping[str, float]
    # The base rate: before schedule, batch growth and staleness.
    learning_rate: float
    finished: bool
    # How many gradients wait for an update, and the size of their payloads.
    num_pending: int
    pending_bytes: int

    @property
    def next_rate(self) -> float: ...

    @property
    def slots_bytes(self) -> int: ...

    @property
    def published_bytes(self) -> int: ...

    @property
    def num_receipts(self) -> int: ...

    @property
    def ledger_bytes(self) -> int: ...

    def push(
        self,
        gradient: Gradient,
        *,
        roster: Roster,
        reply: Reply | PublishedReply | None = None,
        held_version: int = -1,
        memory: SharedMemory | None = None,
        finding: Finding | None = None,
    ) -> Pushed: ...

    def pull(
        self,
        reply: Reply | PublishedReply,
        *,
        held_version: int = -1,
        memory: SharedMemory | None = None,
        worker_id: str | None = None,
    ) -> int | None: ...

    def note_pull(self, version: int, *, worker_id: str | None) -> bool: ...

    def read(self, reader: Callable[[int, Floats], T]) -> T: ...

    def complete(self, roster: Roster, *, version: int | None = None) -> list[Update]: ...

    def configure(
        self, *, roster: Roster, behaviour: Behaviour | None = None, learning_rate: float | None = None
    ) -> list[Update]: ...

    def follow(self, follower: Follower | None) -> None: ...

    def contributors(self) -> set[str]: ...

    def workers_of_round(self) -> set[str]: ...

    def newest_sequence(self, worker_id: str, incarnation: int) -> int: ...

    def waiting_for(self, roster: Roster) -> tuple[str, ...]: ...

    def when_version(self, min_version: int, callback: Wake) -> Callable[[], bool]: ...

    def finish(self) -> None: ...

    def state(self, *, rows_after: int = 0) -> ShardState: ...


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
