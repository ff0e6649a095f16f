"""Who works on the portions, where each is, and how fast."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pyps_wire.errors import Superseded

# A speed is that over so many of a worker's last portions: one that has become slow is soon known to be.
PORTIONS_MEASURED = 4


@dataclass(slots=True)
class Hand:
    """A worker as the queue sees it. Times are in seconds of the run's clock."""

    worker_id: str
    incarnation: int
    # The pass of which it was given a portion last, and the portion after that one; None before its first.
    pass_: int = -1
    next_portion: int | None = None
    # The first example that it was given in that pass and in the pass before, to begin with the same data again.
    began: int | None = None
    began_before: int | None = None
    # When it last claimed or delivered anything.
    gave_at: float | None = None
    # Examples, and the seconds that they took, of its last portions.
    measured: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=PORTIONS_MEASURED))

    @property
    def speed(self) -> float:
        """Examples per second over its last portions; 0 while unknown."""
        seconds = sum(seconds for _, seconds in self.measured)
        return sum(examples for examples, _ in self.measured) / seconds if seconds > 0 else 0.0

    def enter(self, pass_: int) -> None:
        """Goes to where it began the pass before, unless it is in this one already."""
        if pass_ != self.pass_:
            self.began_before, self.began = self.began if self.began is not None else self.began_before, None
            self.pass_, self.next_portion = pass_, None

    def computed(self, num_examples: int, *, leased_at: float, now: float) -> None:
        """Notes that it is done with portions, which it may have been given while it was still at others."""
        began = leased_at if self.gave_at is None else max(leased_at, self.gave_at)
        if now > began:
            self.measured.append((num_examples, now - began))


class Crew:
    """The workers of a queue. Guarded by its queue's lock."""

    def __init__(self) -> None:
        self._hands: dict[str, Hand] = {}
        # Those that have left in the present pass or are taken to be dead: apart, so that no lease looks at them.
        self._departed: dict[str, Hand] = {}

    def __iter__(self) -> Iterator[Hand]:
        return iter(self._hands.values())

    @property
    def of_pass(self) -> list[Hand]:
        """The workers and those that have left in the present pass, in the order of their names."""
        return sorted([*self, *self._departed.values()], key=lambda hand: hand.worker_id)

    def get(self, worker_id: str) -> Hand | None:
        """A worker, None where it never came or has left."""
        return self._hands.get(worker_id)

    def enter(self, worker_id: str, incarnation: int) -> tuple[Hand, bool]:
        """The worker that calls, and whether it is a later life than the one that was there.

        Raises Superseded for an earlier life.
        """
        hand = self._hands.get(worker_id) or self._departed.get(worker_id) or Hand(worker_id, incarnation)
        if incarnation < hand.incarnation:
            raise Superseded(
                f"a newer process goes by the name of worker {worker_id!r}: stop this one, or give it another name"
            )
        renewed = incarnation > hand.incarnation
        if renewed:
            # The new process knows nothing of where the old one was, but its machine may still have the data.
            hand.measured.clear()
            hand.gave_at = None
        hand.incarnation = incarnation
        self._departed.pop(worker_id, None)
        self._hands[worker_id] = hand
        return hand, renewed

    def leave(self, hand: Hand) -> None:
        """Takes note that a worker has left, or is taken to be dead."""
        self._departed[hand.worker_id] = self._hands.pop(hand.worker_id)

    def forget_departed(self) -> None:
        """Forgets those that have left."""
        self._departed.clear()
