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
        self.waiting: list[Waiter] = []

    def add(self, waiter: Waiter) -> None:
        """Keeps the wait until it is taken or removed."""
        self.waiting.append(waiter)

    def remove(self, waiter: Waiter) -> bool:
        """Forgets the wait; False where it was taken already."""
        still_waiting = waiter in self.waiting
        if still_waiting:
            self.waiting.remove(waiter)
        return still_waiting

    def take_reached(self, version: int) -> list[Waiter]:
        """Returns the waits that end at that version, and keeps the others."""
        if not self.waiting:
            return []
        reached = [waiter for waiter in self.waiting if waiter.min_version <= version]
        self.waiting = [waiter for waiter in self.waiting if waiter.min_version > version]
        return reached

    def take_all(self) -> list[Waiter]:
        """Returns all waits."""
        waiting, self.waiting = self.waiting, []
        return waiting
