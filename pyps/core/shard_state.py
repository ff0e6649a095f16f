"""What a shard keeps beside its arrays: all of it for a checkpoint, the bytes that wait, and who is called back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock

from pyps.core.aggregation import Contribution
from pyps.core.arrays import Floats
from pyps.core.ledger import LedgerState
from pyps.core.rules import Slots, UpdateRule
from pyps_wire.errors import BadRequest, LimitExceeded, WrongSize


@dataclass(frozen=True, slots=True)
class ShardState:
    """A copy of all that a shard is, taken at one version."""

    version: int
    parameters: Floats
    slots: Slots
    ledger: LedgerState
    # Gradients with a PENDING receipt, in order of arrival.
    pending: tuple[Contribution, ...] = ()
    # Examples behind the applied gradients.
    examples: int = 0
    # The base rate; None in a state from before it was kept: the rule's own.
    learning_rate: float | None = None
    # The momentum; None where the rule has none, or from before it was kept.
    momentum: float | None = None


def first_slots(
    rule: UpdateRule,
    hyperparameters: Mapping[str, float],
    restored: Mapping[str, Floats] | None,
    *,
    shard_id: int,
    length: int,
    take: Callable[[Floats], Floats],
) -> Slots:
    """Returns what `take` makes of the restored slots, or those of a shard that has had no update.

    Raises BadRequest where they are another rule's, WrongSize where they are another shard's.
    """
    if restored is None:
        return rule.make_slots(length, hyperparameters)
    if set(restored) != set(rule.slot_names):
        raise BadRequest(
            f"shard {shard_id} was given the slots {sorted(restored)}; {rule.name} has {sorted(rule.slot_names)}"
        )
    for name, slot in restored.items():
        if slot.size != length:
            raise WrongSize(f"shard {shard_id}: the slot {name!r} has {slot.size} values for {length} parameters")
    return {name: take(slot) for name, slot in restored.items()}


class PendingBudget:
    """Counts the bytes of waiting gradients over all shards of a run. May be used from any thread, under any lock."""

    def __init__(self, bytes_max: int = sys.maxsize):
        self.bytes_max = bytes_max
        self._lock = Lock()
        # Guarded by _lock.
        self.bytes_held = 0

    def take(self, num_bytes: int) -> None:
        """Counts a gradient that is about to wait; LimitExceeded where it does not fit."""
        with self._lock:
            if self.bytes_held + num_bytes > self.bytes_max:
                raise LimitExceeded(
                    f"{num_bytes} bytes more would make {self.bytes_held + num_bytes} bytes of gradients that wait for "
                    f"an update, this server keeps {self.bytes_max} at the most: raise --max-pending-bytes, or take "
                    "a protocol that keeps fewer"
                )
            self.bytes_held += num_bytes

    def restore(self, num_bytes: int) -> None:
        """Counts gradients that waited before the server ended, whatever the bound is now."""
        with self._lock:
            self.bytes_held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Counts gradients that wait no longer."""
        with self._lock:
            self.bytes_held -= num_bytes


Callback = Callable[[], None]


# Compared by identity: two waits for one version are two waits.
@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """One wait, called once at most, and never under the shard's lock."""

    min_version: int
    callback: Callback


def call_all(waiters: Iterable[Waiter]) -> None:
    """Calls them back. Not to be called under the shard's lock."""
    for waiter in waiters:
        waiter.callback()


class Waiters:
    """The waits for a shard's versions. Guarded by its shard's lock."""

    def __init__(self) -> None:
        # By version: a push looks at the versions waited for, of which there are few, not at all who wait.
        self.waiting: dict[int, dict[Waiter, None]] = {}

    def add(self, waiter: Waiter) -> None:
        """Keeps the wait until it is taken or removed."""
        self.waiting.setdefault(waiter.min_version, {})[waiter] = None

    def remove(self, waiter: Waiter) -> bool:
        """Forgets the wait; False where it was taken already."""
        waiting = self.waiting.get(waiter.min_version, {})
        if waiter not in waiting:
            return False
        del waiting[waiter]
        if not waiting:
            del self.waiting[waiter.min_version]
        return True

    def take_reached(self, version: int) -> list[Waiter]:
        """Returns the waits that end at that version, and keeps the others."""
        reached = [min_version for min_version in self.waiting if min_version <= version]
        return [waiter for min_version in reached for waiter in self.waiting.pop(min_version)]

    def take_all(self) -> list[Waiter]:
        """Returns all waits."""
        waiting, self.waiting = self.waiting, {}
        return [waiter for of_version in waiting.values() for waiter in of_version]
