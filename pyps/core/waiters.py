"""Who is called back when a shard reaches a version."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
