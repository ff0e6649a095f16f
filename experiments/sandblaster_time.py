"""Who is first at a given accuracy, and at which cost: SGD, Downpour with and without Adagrad, or Sandblaster?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.adagrad_rates import ADAGRAD, FIXED, PAPER, downpour
from experiments.harness import Condition, Experiment, Measure, Results, Trial, beside, control
from experiments.sandblaster_servers import train_digits
from experiments.training import digits
from pyps.cli.coordination.settings import CoordinationSettings
from pyps.core.arrays import Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SANDBLASTER = "sandblaster"
WORKERS = (1, 2, 5, 20, 50, 100)
MANY = 500
# By workers: around the best ones.
RATES: dict[str, dict[int, Sequence[float]]] = {
    ADAGRAD: {
        1: (0.06, 0.1, 0.2, 0.4),
        2: (0.06, 0.1, 0.2, 0.4),
        5: (0.03, 0.06, 0.1, 0.2),
        20: (0.03, 0.06, 0.1, 0.2),
        50: (0.02, 0.03, 0.06, 0.1),
        100: (0.01, 0.02, 0.03, 0.06),
        MANY: (0.006, 0.01, 0.015),
    },
    FIXED: {
        1: (0.6, 1.0, 1.5, 2.0),
        2: (0.1, 0.3, 0.6, 1.0),
        5: (0.1, 0.3, 0.6, 1.0),
        20: (0.06, 0.1, 0.2, 0.3),
        50: (0.03, 0.06, 0.1, 0.2),
        100: (0.01, 0.02, 0.03, 0.06),
    },
    # It has no rate.
    SANDBLASTER: dict.fromkeys((*WORKERS, MANY), (0.0,)),
}
# How many times as quick as a worker one device is.
DEVICE = 10
BATCH = 8
# Longer than any training.
NEVER = 1e6


class Reached(Exception):
    """The error is small enough."""


@dataclass(frozen=True, kw_only=True)
class TimeToError(Trial):
    """One training, until the held-out error is reached or the passes are made."""

    method: str
    workers: int
    rate: float
    passes: int = 25
    iterations: int = 15
    # Sandblaster's portions a worker.
    portions: int = 10
    error: float = 0.08

    def measure(self) -> dict[str, float]:
        reached = [0.0]

        def look(seconds: float, parameters: Floats) -> None:
            if digits().test_error(parameters) <= self.error:
                reached.append(seconds)
                raise Reached

        with suppress(Reached):
            if self.method == SANDBLASTER:
                portions = min(self.portions * self.workers, digits().num_examples)
                settings = CoordinationSettings(iterations=self.iterations, portions=portions)
                train_digits(self.seed, settings, look, workers=self.workers)
            else:
                training = downpour(self.seed, rule=self.method, rate=self.rate, workers=self.workers, batch=BATCH)
                simulation = training.simulation(digits())
                for pushes in range(0, self.passes * digits().num_examples // BATCH, 5):
                    simulation.run(pushes=pushes)
                    look(simulation.now, simulation.shards[0].state().parameters)
        return {"reached_at": reached[-1]}


def trials(seeds: Sequence[int]) -> Iterator[TimeToError]:
    for seed in seeds:
        for method, by_workers in RATES.items():
            for workers, rates in by_workers.items():
                for rate in rates:
                    yield TimeToError(seed=seed, method=method, workers=workers, rate=rate)


def time(results: Results, method: str, workers: int) -> float:
    """The mean time at the rate that is there first, of those that every seed gets there with."""
    try:
        return results.soonest(method=method, workers=workers)
    except ValueError:
        return NEVER


def ratio(slower: tuple[str, int], sooner: tuple[str, int]) -> Measure:
    return lambda results: time(results, *slower) / time(results, *sooner)


def lead(results: Results) -> float:
    """The least of all numbers of workers: the best of the others' time over Adagrad's."""
    return min(
        min(time(results, method, workers) for method in (FIXED, SANDBLASTER)) / time(results, ADAGRAD, workers)
        for workers in WORKERS
    )


def scaling(results: Results, method: str) -> float:
    return time(results, method, 100) / time(results, method, MANY)


def device(results: Results, rule: str = FIXED) -> float:
    return time(results, rule, 1) / DEVICE


def passing(results: Results) -> int:
    """The least number of workers that are there before the device; too many if there is none."""
    sooner = [workers for workers in (*WORKERS, MANY) if time(results, ADAGRAD, workers) < device(results)]
    return min(sooner, default=10 * MANY)


def draw(figure: Figure, results: Results) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    for method, by_workers in RATES.items():
        times = {workers: time(results, method, workers) for workers in by_workers}
        drawn = {workers: each for workers, each in times.items() if each < NEVER}
        label = method if method == SANDBLASTER else f"Downpour, {method}"
        axes[0].plot(list(drawn), list(drawn.values()), "-o", markersize=4, label=label)
        costs = [workers * each for workers, each in drawn.items()]
        axes[1].plot(costs, list(drawn.values()), "-o", markersize=4)
    axes[0].axhline(device(results), color="black", linestyle=":", linewidth=1, label=f"SGD, a device {DEVICE} x")
    for axis, label in zip(axes, ("workers", "worker-seconds"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel=label)
    axes[0].set_ylabel("virtual seconds to 8 % error")
    axes[0].legend()


EXPERIMENT = Experiment(
    name="sandblaster_time",
    title="Downpour with Adagrad is first at any budget, and Sandblaster with the most machines",
    in_short="""Downpour is first up to 100 workers, Sandblaster with 500 if messages cost nothing; neither is near a
    tenth of a device's time.""",
    paper=PAPER,
    section="section 5, figures 4 and 5",
    claim="""For any budget of up to 2,000 cores Downpour with Adagrad is first at a given accuracy; with a fixed rate
    it falls behind; 20 and 200 replicas of it are slower and quicker than Sandblaster with 2,000. Sandblaster scales
    further and could win with tens of thousands of cores. Many cores get there in less than a tenth of a GPU's
    time.""",
    setting="""Virtual time to 8 % held-out error of the digits, with 1 to 100 workers, and 500 for "tens of thousands".
    Downpour pushes and pulls every minibatch of 8, which takes a second with a variation of 0.3, at the best of three
    or four rates for each number of workers; with one worker it is serial training. Sandblaster takes as long for an
    example: L-BFGS over all 1,437 with its defaults, ten portions a worker (1,437 for 500), two copies. Messages and
    updates take no time. Of two methods with equal numbers of workers the quicker one also costs fewer worker-seconds.
    The device computes ten times as quickly as a worker, which is our choice, by plain SGD at its best rate. An earlier
    form of this chapter asked whether SGD in one worker is slower than 20 workers of Downpour with Adagrad: yes, and it
    was replaced since it can hardly fail; it stands beside. It also judged that Sandblaster's loss falls in every
    iteration and that its error is at most 6 % after 20 of them: the first follows from the line search, and neither is
    judged here. That 5 workers stand for the paper's 20 replicas was added after the results were known, and decides
    nothing.""",
    trials=trials,
    pilot=(0, 1),
    pilot_chose="""rates, and 500 workers, by which Sandblaster has passed; all but the fifth and the last of the claims
    below were seen to hold, and these two to fail""",
    conditions=(
        control(
            "pairs of method and 1 to 100 workers that get there with every seed, of 18",
            lambda results: sum(time(results, method, workers) < NEVER for method in RATES for workers in WORKERS),
            at_least=18,
            has_error=False,
        ),
        Condition(
            "1 to 100 workers: time of the best other over that of Downpour with Adagrad, where it is least",
            lead,
            at_least=1.0,
            opposite=0.9,
            unit="x",
        ),
        Condition(
            "20 workers: time of Downpour with SGD over that with Adagrad",
            ratio((FIXED, 20), (ADAGRAD, 20)),
            at_least=1.1,
            opposite=0.9,
            unit="x",
        ),
        Condition(
            "500 workers: time of Downpour with Adagrad over Sandblaster's",
            ratio((ADAGRAD, MANY), (SANDBLASTER, MANY)),
            at_least=1.0,
            opposite=0.9,
            unit="x",
        ),
        Condition(
            "gain from 100 to 500 workers, Sandblaster's over that of Downpour with Adagrad",
            lambda results: scaling(results, SANDBLASTER) / scaling(results, ADAGRAD),
            at_least=1.5,
            opposite=1.0,
            unit="x",
        ),
        Condition(
            "Sandblaster's time with 500 workers over that of Downpour with Adagrad with 50",
            ratio((SANDBLASTER, MANY), (ADAGRAD, 50)),
            at_least=1.0,
            opposite=0.9,
            unit="x",
        ),
        Condition(
            "least number of workers of Downpour with Adagrad, of those tried, that is quicker than the device",
            passing,
            at_most=100,
            opposite=10 * MANY,
            has_error=False,
        ),
        Condition(
            "least time of Downpour with Adagrad over the device's",
            lambda results: min(time(results, ADAGRAD, workers) for workers in (*WORKERS, MANY)) / device(results),
            at_most=0.1,
            opposite=1.0,
            unit="x",
        ),
        beside(
            "least time of Downpour with Adagrad over the device's, if that has Adagrad too",
            lambda results: (
                min(time(results, ADAGRAD, workers) for workers in (*WORKERS, MANY)) / device(results, ADAGRAD)
            ),
            at_most=1.0,
            unit="x",
        ),
        beside(
            "time of Downpour with Adagrad with 5 workers over Sandblaster's with 500",
            ratio((ADAGRAD, 5), (SANDBLASTER, MANY)),
            at_least=1.0,
            unit="x",
        ),
        beside(
            "100 workers: time of Downpour with SGD over that with Adagrad",
            ratio((FIXED, 100), (ADAGRAD, 100)),
            at_least=1.1,
            unit="x",
        ),
        beside(
            "the earlier verdict: time of SGD in one worker over 20 workers of Downpour with Adagrad",
            ratio((FIXED, 1), (ADAGRAD, 20)),
            at_least=1.0,
            unit="x",
        ),
    ),
    shows_not="""What messages cost. They would cost Downpour most with few workers; with 500, each of which computes
    three examples a pass, Sandblaster would send more than Downpour. A pass over 1,437 examples is short: the paper's
    has a billion, and SGD gets far within one. That fixed rates often never get there, as the paper found: here the
    control demands that they do. Workers of several machines each, as the paper's: they are built (see sandblaster.md),
    and not timed.""",
    reading="""Two claims fail. No number of workers comes near a tenth of the device's time: that would take a
    hundredfold gain over one worker, since the device is ten times a worker, and the most is 11.9 ± 1.4 (SGD in one
    worker over 500 of Adagrad). A hundred workers are level with the device (0.95 ± 0.13 of its time), 500 take 0.84 ±
    0.10 of it, and none passes a device that trains with Adagrad. And 500 workers of Sandblaster are quicker than 50 of
    Downpour with Adagrad, against the paper. Up to 100 workers Downpour with Adagrad is first at every number, by 1.39
    ± 0.08 times and more. It gains little beyond 20: a hundred are 1.27 ± 0.06 times as quick for four times the cost.
    Sandblaster costs 1,400 to 1,800 worker-seconds whatever their number, and has passed with 500. That, and that it
    gains more from 100 to 500, rest on messages that cost nothing, and on a crossing that the pilot had found.""",
    draw=draw,
    quick={"passes": 1, "iterations": 1, "portions": 1, "error": 1.0},
)
