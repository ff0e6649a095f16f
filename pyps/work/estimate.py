"""How long a pass still takes, from the speeds of its workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Occupation:
    """A worker, how fast it is, and with what it is busy."""

    examples_per_second: float
    # Examples left unfinished of what it holds, and since when it has been at them.
    num_examples: int = 0
    elapsed_seconds: float = 0.0

    @property
    def seconds_left(self) -> float:
        """Until it is free. One that is late by its own speed has become slow: as long again as it took so far."""
        if not self.num_examples:
            return 0.0
        expected = self.num_examples / self.examples_per_second
        return expected - self.elapsed_seconds if self.elapsed_seconds < expected else self.elapsed_seconds


def seconds_left(pending_examples: int, workers: Iterable[Occupation], *, copy_seconds: float | None) -> float:
    """Seconds until all is done: what nobody has flows to whoever is free, then the last ones end.

    Where backup copies are given out, a portion is done `copy_seconds` after another worker is free for it, however
    slow its first holder is. -1 where nobody is there to do it.
    """
    workers = list(workers)
    free_after = sorted((worker.seconds_left, worker.examples_per_second) for worker in workers)
    if not free_after:
        return -1.0
    # All that is pending is done at the time T at which sum(speed * (T - free_after)) reaches it.
    left, speed, time = float(pending_examples), 0.0, free_after[0][0]
    for freed, examples_per_second in free_after:
        if speed and left <= speed * (freed - time):
            break
        left -= speed * (freed - time)
        time, speed = freed, speed + examples_per_second
        if left <= 0:
            break
    time += max(left, 0.0) / speed
    if not pending_examples:
        time = 0.0
    last = max(worker.seconds_left for worker in workers)
    if copy_seconds is None or len(workers) == 1:
        return max(time, last)
    return max(time, min(last, max(time, free_after[0][0]) + copy_seconds))
