"""The shards of a push that leave while the gradients of others are still computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from pyps_wire.partition import Partition


class Departures:
    """The shards of one push, which leave as their gradients become complete; after `seal` all may.

    Nobody can know that all numbers are finite when the first ones leave. Each shard is looked at before it does: from
    the first on that is not, no numbers leave, and where none have left by then nothing does. One thread says what is
    complete; those that send wait for it.
    """

    def __init__(
        self,
        partition: Partition,
        present: Sequence[bool],
        *,
        fits: Callable[[npt.NDArray[Any]], bool],
        arrive: Callable[[int], object],
    ) -> None:
        """`present`: one flag a tensor, good for a shard's once it is complete. `fits`: whether numbers may be sent.

        `arrive` returns once a complete shard's numbers are where they are sent from.
        """
        self.partition = partition
        self.present = present
        self._arrive = arrive
        self._fits = fits
        self._changed = threading.Condition()
        # Guarded by _changed: shards in the order in which they became complete.
        self._complete: list[int] = []
        self._sealed = False
        # Whether nothing more is to leave.
        self._over = False
        # Shards that have left, those included that only say that there is nothing; those with numbers; and how many of
        # these were answered.
        self.left: set[int] = set()
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
        """Waits until one of those `waiting` may leave that is not `under_way`, where it is noted then.

        None where nothing more leaves, and, unless a round of messages `begins`, once all under way are answered.
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

    def leaves(self, shard_id: int, numbers: npt.NDArray[Any] | None) -> bool | None:
        """Note that a shard is sent; return whether with numbers, None where nothing of the push is to be sent."""
        fits = numbers is None or self._fits(numbers)
        with self._changed:
            if not fits:
                self.spoiled = True
                self._changed.notify_all()
            if not self.left and (self.spoiled or self._over):
                self._over = True
                return None
            with_numbers = numbers is not None and not self.spoiled
            # It may be sent again, after a loss.
            self.left.add(shard_id)
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
