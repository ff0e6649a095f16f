"""Shards of a push that are sent while the gradients of others are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from pyps_wire.partition import Partition


class EarlyShards:
    """The shards of one push, each sent as soon as its gradients are computed, or after `seal`.

    Each shard is checked for NaN and infinity before it is sent. After the first such shard, shards are sent without
    numbers; if it is the first of all, or servers hold the push, none is sent any more. The thread that computes
    gradients calls `complete` and `seal`; threads that send shards wait in `next`.

    Where servers hold the push, each of them is sent one shard at least after `seal`, which brings the scale.
    """

    def __init__(
        self,
        partition: Partition,
        present: Sequence[bool],
        *,
        fits: Callable[[npt.NDArray[Any]], bool],
        arrive: Callable[[int], object],
        held: bool = False,
    ) -> None:
        """`present`: one flag a tensor, valid once the tensor's shards are complete. `held`: by servers, until `seal`.

        `fits` returns whether numbers are finite. `arrive` waits until a complete shard's numbers are in the memory
        that is sent.
        """
        self.partition = partition
        self.present = present
        self._arrive = arrive
        self._fits = fits
        self.held = held
        # Once sealed: the factor of all gradients, and their norm after it, or 0.
        self.scale, self.norm = 1.0, 0.0
        self._changed = threading.Condition()
        # Guarded by _changed: shards in the order in which they became complete.
        self._complete: list[int] = []
        self.is_sealed = False
        # Nothing more is sent.
        self.is_over = False
        # Sent shards; those with numbers; and how many of these were answered.
        self.sent: set[int] = set()
        self._with_numbers: set[int] = set()
        self.num_answered = 0
        # A shard with NaN or infinity was found.
        self.spoiled = False

    def complete(self, shard_id: int) -> None:
        with self._changed:
            self._complete.append(shard_id)
            self._changed.notify_all()

    def seal(self, *, scale: float = 1.0, norm: float = 0.0) -> None:
        """Mark all gradients as computed."""
        with self._changed:
            self.is_sealed, self.scale, self.norm = True, scale, norm
            self._changed.notify_all()

    def abandon(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def next(
        self, waiting: Mapping[int, object], under_way: set[int], *, begins: bool, to_hold: bool = False
    ) -> int | None:
        """Wait for a shard of `waiting` that may be sent, and return it.

        Return None after `abandon`, for shards `to_hold` after `seal`, and, unless a round `begins`, once all shards
        under way are answered.
        """
        with self._changed:
            while not self.is_over and not (to_hold and self.is_sealed) and (begins or under_way):
                ready = [*self._complete, *waiting] if self.is_sealed or self.spoiled else self._complete
                shard_id = next((each for each in ready if each in waiting and each not in under_way), None)
                if shard_id is not None and not (to_hold and len(waiting) - len(under_way) == 1):
                    break
                self._changed.wait()
            else:
                return None
        self._arrive(shard_id)
        return shard_id

    def send(
        self, shard_id: int, numbers: npt.NDArray[Any] | None, under_way: set[int], *, begins: bool
    ) -> bool | None:
        """Note that a shard is sent, and add it to `under_way`; return whether it is sent with its numbers.

        Return None, and add nothing, if the push sends nothing at all, or, unless a round `begins`, once all shards
        under way are answered, which ends the round.
        """
        fits = numbers is None or self._fits(numbers)
        with self._changed:
            if not fits:
                self.spoiled = True
                self._changed.notify_all()
            if (self.held or not self.sent) and (self.spoiled or self.is_over):
                self.is_over = True
                return None
            if not (begins or under_way):
                return None
            under_way.add(shard_id)
            with_numbers = numbers is not None and not self.spoiled
            self.sent.add(shard_id)
            if with_numbers:
                self._with_numbers.add(shard_id)
            return with_numbers

    def lost(self, under_way: set[int]) -> None:
        """Forget the shards under way, whose round has ended, and end the wait in `next`."""
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
