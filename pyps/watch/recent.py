"""The steps and waits of the last minute, worker by worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from statistics import median
from typing import Any, NamedTuple

from pyps.watch.answer import Answer, waits_for, workers_of

WINDOW_SECONDS = 60.0
STEPS_MAX = 5000
# A server lists a step this late at most, after later ones of other workers.
LATE_SECONDS = 10.0


class Step(NamedTuple):
    """A step of a worker; times are of day, `n` is the history's own number."""

    n: int
    worker: str
    began: float
    ended: float
    staleness: int = 0
    # "applied", "pending" or "rejected", the last for a reason such as "stale".
    outcome: str = "applied"
    reason: str = ""
    updates: int = 1


class Wait(NamedTuple):
    """A wait of a worker for others, by name."""

    n: int
    worker: str
    began: float
    ended: float
    waited_for: Sequence[str] = ()


@dataclass
class Figures:
    """What a worker did in the window."""

    steps: list[Step] = field(default_factory=list)
    # The median of its steps' seconds, and how many times the others' medians' that is; None where not known.
    seconds: float | None = None
    slower: float | None = None
    # Seconds since it first did anything in the window, since it last did, and for how many it waited.
    present: float = 0.0
    idle: float = 0.0
    waited: float = 0.0

    @property
    def share_waited(self) -> float:
        return min(1.0, self.waited / self.present) if self.present > 0 else 0.0


class Recent:
    """Steps and waits of the last minute, and the seconds for which each worker was waited for."""

    def __init__(self, answers: Sequence[Answer], steps: Iterable[Step], waits: Iterable[Wait], *, now: float):
        """`steps` and `waits` come newest first."""
        self.workers: defaultdict[str, Figures] = defaultdict(Figures)
        self.waited_for: defaultdict[str, float] = defaultdict(float)
        newest = list(islice(_since(now - WINDOW_SECONDS, steps), STEPS_MAX))
        # Of many workers a few seconds tell enough.
        start = newest[-1].ended if len(newest) == STEPS_MAX else now - WINDOW_SECONDS
        began: dict[str, float] = {}
        last: dict[str, float] = {}

        def see(each: Step | Wait) -> Figures:
            name = each.worker
            began[name] = min(began.get(name, now), max(start, each.began))
            last[name] = max(last.get(name, start), each.ended)
            return self.workers[name]

        for step in newest:
            see(step).steps.append(step)
        for wait in _since(start, waits):
            self._add_wait(see(wait), wait.ended - max(start, wait.began), wait.waited_for)
        waiting = {
            name: others for name, known in workers_of(answers).items() if name in last and (others := waits_for(known))
        }
        # Under way, and so not listed yet.
        end = now if waiting else max(last.values(), default=now)
        for name, others in waiting.items():
            self._add_wait(self.workers[name], end - last[name], others)
        for name, figures in self.workers.items():
            figures.present, figures.idle = end - began[name], now - last[name]
        self._compare()

    @property
    def num_steps(self) -> int:
        return sum(len(figures.steps) for figures in self.workers.values())

    def share_waited(self, *, without: str = "") -> float:
        """Return the share of the workers' time for which they waited; that of all but one."""
        seen = [figures for name, figures in self.workers.items() if name != without]
        present = sum(figures.present for figures in seen)
        return min(1.0, sum(figures.waited for figures in seen) / present) if present > 0 else 0.0

    def _add_wait(self, figures: Figures, seconds: float, others: Iterable[str]) -> None:
        figures.waited += max(0.0, seconds)
        for name in others:
            self.waited_for[name] += max(0.0, seconds)

    def _compare(self) -> None:
        for figures in self.workers.values():
            if figures.steps:
                figures.seconds = median(step.ended - step.began for step in figures.steps)
        medians = {name: each.seconds for name, each in self.workers.items() if each.seconds is not None}
        for name, seconds in medians.items():
            others = [each for other, each in medians.items() if other != name]
            of_others = median(others) if others else 0.0
            self.workers[name].slower = seconds / of_others if of_others else None


def _since(start: float, newest_first: Iterable[Step | Wait]) -> Iterable[Any]:
    kept = takewhile(lambda each: each.ended > start - LATE_SECONDS, newest_first)
    return (each for each in kept if each.ended > start)
