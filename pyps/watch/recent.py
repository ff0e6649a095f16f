"""The newest steps and waits, worker by worker."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from statistics import median
from typing import Any, NamedTuple

from pyps.watch.answer import Answer, waits_for, workers_of

# What is said of now is of so many seconds; of slow steps of more, so that each worker has two.
WINDOW_SECONDS, WINDOW_MOST = 20.0, 60.0
STEPS_A_WORKER = 2
STEPS_MAX = 5000
# A server lists a step this late at most, after later ones of other workers.
LATE_SECONDS = 10.0
# A step takes long by both: seconds, and times its worker's median.
LONG_SECONDS, LONG_TIMES = 2.0, 5.0


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

    @property
    def seconds(self) -> float:
        return self.ended - self.began


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
    # Seconds since it last did anything.
    idle: float = 0.0
    share_waited: float = 0.0


class Recent:
    """The newest steps and waits of workers that are not gone, after `since`; `steps` and `waits` come newest first."""

    def __init__(
        self,
        answers: Sequence[Answer],
        steps: Iterable[Step],
        waits: Iterable[Wait],
        *,
        now: float,
        since: float = -math.inf,
    ):
        known = workers_of(answers)
        gone = {name for name, infos in known.items() if infos[0].state != "alive"}
        earliest = max(since, now - WINDOW_MOST)
        newest = list(islice(_since(earliest, steps), STEPS_MAX))
        if len(newest) == STEPS_MAX:
            # Of many workers a few seconds tell enough.
            earliest = newest[-1].ended
        steps_of: defaultdict[str, list[Step]] = defaultdict(list)
        for step in newest:
            if step.worker not in gone:
                steps_of[step.worker].append(step)
        long: list[Step] = []
        for kept in steps_of.values():
            least = long_seconds(median_of(kept))
            long += [step for step in kept if step.seconds >= least]
        if len(long) == 1:
            # One that does not come again, as of a process that was stopped and goes on, tells nothing of now.
            earliest = max(earliest, long[0].ended)
        self.seconds = now - earliest
        self._waits = [wait for wait in _since(earliest, waits) if wait.worker not in gone]
        done = [*chain(*steps_of.values()), *self._waits]
        last: dict[str, float] = {}
        for each in done:
            last[each.worker] = max(each.ended, last.get(each.worker, -math.inf))
        # Under way, and so not listed yet.
        waiting = {name: waits_for(infos) for name, infos in known.items() if name in last and waits_for(infos)}
        for name, awaited in waiting.items():
            # Between two waits is a step: the last one is listed with its update.
            stepped = max((wait.ended for wait in self._waits if wait.worker == name), default=-math.inf) == last[name]
            began = last[name] + ((median_of(steps_of[name]) or 0.0) if stepped else 0.0)
            self._waits.append(Wait(0, name, min(began, now), now, awaited))
        self._end = now if waiting else max(last.values(), default=now)
        reach = [kept[:STEPS_A_WORKER][-1].began for kept in steps_of.values()]
        first = min((each.began for each in done), default=now)
        self._start = max(earliest, min([now - WINDOW_SECONDS, *reach]), first)
        waited, self.waited_for = self._waited_after(self._start)
        self.workers: dict[str, Figures] = {}
        for name, ended in last.items():
            since_start = [step for step in steps_of[name] if step.ended > self._start]
            share = min(1.0, waited[name] / max(1e-9, self._end - self._start))
            self.workers[name] = Figures(since_start, median_of(since_start), idle=now - ended, share_waited=share)
        for name, figures in self.workers.items():
            others = [each.seconds for other, each in self.workers.items() if other != name and each.seconds]
            figures.slower = figures.seconds / median(others) if figures.seconds and others else None

    @property
    def num_steps(self) -> int:
        return sum(len(figures.steps) for figures in self.workers.values())

    def share_waited(self, last_seconds: float = math.inf) -> float:
        """Return for which share of all workers' time they waited."""
        start = max(self._start, self._end - last_seconds)
        present = len(self.workers) * (self._end - start)
        return min(1.0, self._waited_after(start)[0].total() / present) if present > 0 else 0.0

    def _waited_after(self, start: float) -> tuple[Counter[str], Counter[str]]:
        """Return the seconds waited after a time, by who waited and by whom they waited for."""
        waited, waited_for = Counter[str](), Counter[str]()
        for wait in self._waits:
            seconds: Any = max(0.0, wait.ended - max(start, wait.began))
            waited[wait.worker] += seconds
            for name in wait.waited_for:
                waited_for[name] += seconds
        return waited, waited_for


def long_seconds(median_seconds: float | None) -> float:
    """Return from when on a step is no longer like its worker's others."""
    return max(LONG_SECONDS, LONG_TIMES * (median_seconds or 0.0))


def median_of(steps: Sequence[Step]) -> float | None:
    return median(step.seconds for step in steps) if steps else None


def _since(start: float, newest_first: Iterable[Step | Wait]) -> Iterable[Any]:
    kept = takewhile(lambda each: each.ended > start - LATE_SECONDS, newest_first)
    return (each for each in kept if each.ended > start)
