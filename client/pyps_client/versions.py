"""Versions of shards together with the epochs that give them meaning."""

from __future__ import annotations

from collections.abc import Iterable


class Versions(dict[int, int]):
    """Shard id -> version, as held at one moment, with each server's epoch at that moment.

    A version says nothing without its epoch: after a restore a server counts again from an older one.
    """

    def __init__(self, versions: Iterable[tuple[int, int]] = (), *, epochs: Iterable[int]) -> None:
        super().__init__(versions)
        self.epochs = tuple(epochs)

    def copy(self) -> Versions:
        return Versions(self.items(), epochs=self.epochs)
