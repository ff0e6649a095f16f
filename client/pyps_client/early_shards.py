"""Shards of a push that are sent while the gradients of others are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from pyps_wire.partition import Partition


class EarlyShards:
    """The shards of one push, each sent once its gradients are complete; after `seal` all are.

    Whether all numbers are finite is unknown when the first ones are sent. Each shard is checked before: from the first
    one with NaN or infinity on, shards are sent without numbers; if none was sent before, none is at all. One thread
    marks shards as complete; those that send wait for it.
    """

    def __init__(
        self,
        partition: Partition,
        present: Sequence[bool],
        *,
        fits: Callable[[npt.NDArray[Any]], bool],
        arrive: Callable[[int], object],
    ) -> None:
        """`present`: one flag a tensor, valid for a shard's once it is complete. `fits`: whether numbers may be sent.

        `arrive` returns once a complete shard's numbers are in the memory that is sent.
        """
        self.partition = partition
        self.present = present
        self._arrive = arrive
        self._fits = fits
        self._changed = threading.Condition()
        # Guarded by _changed: shards in the order in which they became complete.
        self._complete: list[int] = []
        self._sealed = False
        # Whether no more is to be sent.
        self._over = False
        # Sent shards; those with numbers; and how many of these were answered.
        self.sent: set[int] = set()
        self._with_numbers: set[int] = set()
        self.num_answered = 0
        # Whether numbers were found that must not be sent.
        self.spoiled = False

    def complete(self, shard_id: int) -> None:
        """Mark a shard whose gradients are all computed."""
        with self._changed:
            self._complete.append(shard_id)
            self._changed.notify_all()

    def seal(self) -> None:
        """Mark all gradients as computed: none follows."""
        with self._changed:
            self._sealed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Let no further shard be sent."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def next(self, waiting: Mapping[int, object], under_way: set[int], *, begins: bool) -> int | None:
        """Wait for a shard of `waiting` that may be sent, add it to `under_way`, and return it.

        None where no more is sent, and, unless a round `begins`, once all under way are answered.
        """
        with self._changed:
            while not self._over and (begins or under_way):
                may_leave = [*self._complete, *waiting] if self._sealed or self.spoiled else self._complete
                for shard_id in may_leave:
                    if shard_id in waiting and shard_id not in under_way:
                        under_way.add(shard_id)
                        break
                else:
                    self._changed.wait()
                    continue
                break
            else:
                return None
        self._arrive(shard_id)
        return shard_id

    def send(self, shard_id: int, numbers: npt.NDArray[Any] | None) -> bool | None:
        """Note that a shard is sent; return whether with numbers, None where nothing of the push is to be sent."""
        fits = numbers is None or self._fits(numbers)
        with self._changed:
            if not fits:
                self.spoiled = True
                self._changed.notify_all()
            if not self.sent and (self.spoiled or self._over):
                self._over = True
                return None
            with_numbers = numbers is not None and not self.spoiled
            # It may be sent again after a loss.
            self.sent.add(shard_id)
            if with_numbers:
                self._with_numbers.add(shard_id)
            return with_numbers

    def lost(self, under_way: set[int]) -> None:
        with self._changed:
            under_way.clear()
            self._changed.notify_all()

    def answered(self, under_way: set[int], waiting: Collection[int]) -> bool:
        """Remove answered shards from those under way; return whether none is left."""
        with self._changed:
            self.num_answered += len(under_way.difference(waiting) & self._with_numbers)
            under_way.intersection_update(waiting)
            if not under_way:
                self._changed.notify_all()
            return not under_way
