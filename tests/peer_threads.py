"""Processes of one replica as threads of one process, that meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pyps_wire.errors import ReplicaLost

T = TypeVar("T")

# Longer than anybody takes on the worst day: a test that hangs shall end.
MEET_SECONDS = 120.0


class Meeting:
    """Where the threads of one replica meet. `end` is the death of one: whoever waits, or comes later, learns of it."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self._barrier = threading.Barrier(count)
        self._words: list[Any] = [None] * count
        self.peers = [ThreadPeers(self, index, count) for index in range(count)]

    def exchange(self, index: int, word: Any) -> list[Any]:
        """Everybody's word, once all have given theirs."""
        try:
            self._words[index] = word
            self._barrier.wait(MEET_SECONDS)
            words = list(self._words)
            # Nobody may give the next word before all have read this one.
            self._barrier.wait(MEET_SECONDS)
        except threading.BrokenBarrierError:
            raise ReplicaLost(f"process {index} of {self.name} lost another of its processes") from None
        return words

    def end(self) -> None:
        self._barrier.abort()


class ThreadPeers:
    """The other threads, as one of them sees them (pyps_client.peers.Peers)."""

    def __init__(self, meeting: Meeting, index: int, count: int) -> None:
        self._meeting = meeting
        self.name = meeting.name
        self.index = index
        self.count = count

    def tell(self, word: T) -> T:
        told: T = self._meeting.exchange(self.index, word)[0]
        return told

    def gather(self, word: T) -> list[T]:
        return self._meeting.exchange(self.index, word)

    def total(self, numbers: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self._meeting.exchange(self.index, list(numbers)), strict=True)]


def on_all(meeting: Meeting, work: Callable[[ThreadPeers], T]) -> list[T]:
    """Runs `work` on a thread for each process of a replica, and returns their results; raises the first failure.

    A process that fails is lost to the others.
    """

    def run(peers: ThreadPeers) -> T:
        try:
            return work(peers)
        except BaseException:
            meeting.end()
            raise

    with ThreadPoolExecutor(len(meeting.peers)) as pool:
        futures = [pool.submit(run, peers) for peers in meeting.peers]
    return [future.result() for future in futures]
