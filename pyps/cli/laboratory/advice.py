"""What a sweep says to a user: the way to train that reaches the target first, and what it is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from pyps.cli.laboratory.settings import Settings, listed
from pyps.cli.laboratory.sweep import Pool, grid
from pyps.cli.laboratory.trial import Outcome, Point, Trial
from pyps.simulation.network import Network
from pyps_wire.errors import InvalidArgument

# The target: so much of one process's way is left.
LEFT = 0.1
# One process, or DDP, is as good as what is this much faster.
AS_GOOD = 1.1
# A codec of more bits, or no local steps, is taken if it is this quick beside the quickest.
QUICK_ENOUGH = 0.9
LOCAL_STEPS = 16
CODECS = ("float32", "bfloat16", "int4")
# Of one process; those of many workers are multiples of its best.
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
FACTORS = (1 / 16, 1 / 4, 1.0, 4.0)
# Many workers compute more examples in the time of one: so many times as many at most.
EXAMPLES_FACTOR = 3
POLICIES = "none,divide,constant"
# Of each worker, where only the speed is asked for.
PUSHES = 20


class Way(NamedTuple):
    """A way to train, and what came of it in virtual time, a curve a seed."""

    name: str
    trial: Trial
    settings: Settings
    curves: list[list[Point]]
    outcomes: list[Outcome]

    def seconds_to(self, target: float) -> list[float]:
        """Return when each seed reached the target; infinity where it did not."""
        return [reached(points, target) for points in self.curves]

    def mean_seconds_to(self, target: float) -> float:
        return fmean(self.seconds_to(target))

    @property
    def last(self) -> float:
        """The figure at the end; infinity where a seed diverged."""
        figures = [points[-1].figure for points in self.curves]
        return fmean(figures) if all(map(math.isfinite, figures)) else math.inf

    def mean(self, name: str) -> float:
        return fmean(float(outcome.measured[name]) for outcome in self.outcomes)


@dataclass(frozen=True)
class Advice:
    """What was compared, the best way first."""

    target: float
    one: Way
    ddp: Way
    # Of pyps.
    ways: list[Way]

    @property
    def best(self) -> Way:
        return self.ways[0]

    @property
    def verdict(self) -> str:
        """What to take, the simplest that is as good as the best: "one", "ddp", "pyps"; "none" gets there."""
        best, one, ddp = (way.mean_seconds_to(self.target) for way in (self.best, self.one, self.ddp))
        if min(best, one, ddp) == math.inf:
            return "none"
        if one <= AS_GOOD * min(best, ddp):
            return "one"
        return "ddp" if ddp <= AS_GOOD * best and not self.best.settings.failures else "pyps"


def reached(points: Sequence[Point], target: float) -> float:
    """Return the time from which on a curve stays at the target, between its points."""
    seconds = math.inf
    for before, after in pairwise(points):
        if not after.figure <= target:
            seconds = math.inf
        elif seconds == math.inf:
            share = (before.figure - target) / (before.figure - after.figure) if before.figure > target else 0.0
            seconds = before.seconds + share * (after.seconds - before.seconds)
    return seconds


def best_first(ways: Sequence[Way], target: float) -> list[Way]:
    """Return the ways in order: those that are about as quick as the quickest by their last figures, then by time."""
    times = [way.mean_seconds_to(target) for way in ways]
    enough = AS_GOOD * min(times)
    keys = [(time > enough, 0.0 if time <= enough else time, way.last) for time, way in zip(times, ways, strict=True)]
    return [way for _, way in sorted(zip(keys, ways, strict=True), key=lambda pair: pair[0])]


def advise(
    pool: Pool,
    settings: Settings,
    link: Network,
    service_for: Callable[[str], str],
    *,
    rates: Sequence[float],
    tell: Callable[[str], None],
) -> Advice:
    """Try ways to train on a virtual cluster, in the processes of a script; `tell` hears what is tried.

    `link` is what DDP's messages go over; `service_for` returns the server's times under a protocol.
    """
    alone = replace(settings, workers=1, slow="", failures="", bandwidth="", latency="0", service_seconds="0")
    tell("one process, at each rate")
    one = min(_ways("one process", pool, alone, "serial", "none", rates or RATES), key=lambda way: way.last)
    start, end = fmean(points[0].figure for points in one.curves), one.last
    if not end < start < math.inf:
        tried = ", ".join(f"{rate:g}" for rate in rates or RATES)
        raise InvalidArgument(
            f"one process learns nothing at any rate of {tried}: its figure goes from {start:.4g} to {end:.4g}; give "
            "other rates (--rate), or more --epochs"
        )
    settings = replace(settings, examples=min(EXAMPLES_FACTOR, settings.workers) * settings.examples)
    target = settings.target if settings.target is not None else end + LEFT * (start - end)
    around = list(rates) or [one.trial.rate * factor for factor in FACTORS]
    ways = list[Way]()
    with Pool(None, 1) as untrained:
        speeds = Speeds(untrained)
        names = protocols_for(settings.workers)
        for number, name in enumerate(names, 1):
            coded = speeds.with_codec(replace(settings, service_seconds=service_for(name)), name)
            tell(f"{name}, {coded.codec} (protocol {number} of {len(names)})")
            ways += _ways("pyps", pool, coded, name, POLICIES, around)
        settings = replace(settings, service_seconds=service_for("hardsync"))
        if speeds.local_pays(settings):
            local = seldom(settings)
            tell(f"hardsync, {local.local_steps} local steps, {local.codec}")
            ways += _ways("pyps", pool, local, "hardsync", "none", around)
    best = best_first(ways, target)[0]
    for workers in sorted({settings.workers // 2, settings.workers // 4} - {0, 1}):
        tell(f"{best.trial.protocol} with {workers} workers")
        fewer = replace(best.settings, workers=workers, slow=_fewer(best.settings.slow, workers))
        ways += _ways("pyps", pool, fewer, best.trial.protocol, best.trial.staleness, [best.trial.rate])
    tell("DDP")
    return Advice(target, one, _ddp(pool, settings, link, around, target), best_first(ways, target))


def protocols_for(workers: int) -> list[str]:
    """Return the protocols to try with so many workers."""
    between = [f"softsync:n={max(2, workers // 4)}", f"backup:b={max(1, workers // 16)}"] if workers >= 4 else []
    return ["async", *between, "hardsync"]


def coded(settings: Settings, codec: str) -> Settings:
    return replace(settings, codec=codec, pull_codec=codec)


def seldom(settings: Settings) -> Settings:
    """Return the settings with local steps, whose changes go in few bits."""
    return replace(coded(settings, CODECS[-1]), local_steps=LOCAL_STEPS)


class Speeds:
    """How many examples a cluster computes in a second, whatever it learns by them."""

    def __init__(self, pool: Pool) -> None:
        """`pool`: without a script."""
        self._pool = pool

    def with_codec(self, settings: Settings, protocol: str) -> Settings:
        """Return the settings with the codec of the most bits that is about as quick as the quickest one."""
        tried = [coded(settings, codec) for codec in CODECS]
        speeds = [self._of(each, protocol) for each in tried]
        quick = (each for each, speed in zip(tried, speeds, strict=True) if speed >= QUICK_ENOUGH * max(speeds))
        return next(quick, tried[-1])

    def local_pays(self, settings: Settings) -> bool:
        """Return whether workers that seldom exchange compute clearly more examples."""
        often = self._of(coded(settings, CODECS[-1]), "hardsync")
        return often < QUICK_ENOUGH * self._of(seldom(settings), "hardsync")

    def _of(self, settings: Settings, protocol: str) -> float:
        examples = PUSHES * settings.workers * settings.batch_size * settings.local_steps
        short = replace(settings, protocol=protocol, staleness="none", rate="", seeds=1, target=None, examples=examples)
        (outcome,) = self._pool.run(grid(short)[0], short)
        return float(outcome.measured["examples_per_second"])


def _ways(name: str, pool: Pool, settings: Settings, protocol: str, policies: str, rates: Sequence[float]) -> list[Way]:
    """Return a way for each policy and rate."""
    whole = replace(settings, protocol=protocol, staleness=policies, rate=",".join(f"{rate:g}" for rate in rates))
    trials, _ = grid(whole)
    found: dict[Trial, list[Outcome]] = {}
    for trial, outcome in zip(trials, pool.run(trials, whole), strict=True):
        found.setdefault(replace(trial, seed=0), []).append(outcome)
    return [Way(name, trial, whole, [each.points for each in group], group) for trial, group in found.items()]


def _fewer(slow: str, workers: int) -> str:
    """Return what is left of "3x2,1x10" with fewer workers: the slow ones are the first."""
    left, kept = workers, []
    for item in listed(slow):
        count, _, factor = item.partition("x")
        kept.append(f"{min(int(count), left)}x{factor}")
        left -= min(int(count), left)
    return ",".join(kept)


def _ddp(pool: Pool, settings: Settings, link: Network, rates: Sequence[float], target: float) -> Way:
    """Return DDP at its best: hardsync's gradients, a ring, and all of it hidden behind the backward pass."""
    count = settings.workers
    free = replace(settings, bandwidth="", latency="0", service_seconds="0", failures="")
    ring = 2 * (count - 1) / count * 4 * settings.parameters / link.bytes_per_second
    ring += 2 * (count - 1) * link.latency_seconds
    stretched = []
    for way in _ways("DDP", pool, free, "hardsync", "none", rates):
        longer = max(1.0, ring * way.mean("updates_per_second"))
        curves = [[point._replace(seconds=longer * point.seconds) for point in points] for points in way.curves]
        stretched.append(way._replace(curves=curves))
    return min(stretched, key=lambda way: (way.mean_seconds_to(target), way.last))
