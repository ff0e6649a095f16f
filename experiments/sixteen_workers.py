"""Do sixteen workers fall short of sixteen times as quick, and do averages of models trained apart do as well?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from experiments.digits_network import HELD_OUT
from experiments.harness import Condition, Experiment, Measure, Results, beside, control, plot
from experiments.training import Training
from pyps.simulation.simulation import parse_timing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATES = (0.1, 0.2, 0.5, 1.0, 2.0)
WORKERS, STRAGGLER, COST = 16, 3.0, 0.005
# One worker with the data, workers around a server, and workers on parts of the data without one.
ALONE, SERVER, ONCE, EPOCH = "alone", "server", "averaged once", "averaged each epoch"


@dataclass(frozen=True, kw_only=True)
class Sixteen(Training):
    """A training by one of these ways, over the same number of examples."""

    way: str

    def measure(self) -> dict[str, float]:
        return self._apart() if self.way in (ONCE, EPOCH) else super().measure()

    def _apart(self) -> dict[str, float]:
        """Train each worker on its own part of the data, from the same parameters, and average the models."""
        task, random = self.task(), np.random.default_rng(self.seed)
        mean = task.first_parameters(random)
        parts = np.array_split(random.permutation(task.num_examples), self.workers)
        timings = [parse_timing(self.timing, mean=self.slow if not index else 1.0) for index in range(self.workers)]
        steps = round(self.epochs * task.num_examples / self.batch / self.workers)
        each = round(steps / self.epochs) if self.way == EPOCH else steps
        seconds = reached = 0.0
        for began in range(0, steps, each):
            count = min(each, steps - began)
            models = []
            for part in parts:
                model = mean.copy()
                for step in range(began, began + count):
                    rate = self.rate * (1.0 if step < self.drop * steps else 0.1)
                    batch = random.choice(part, size=self.batch)
                    model -= np.float32(rate) * task.gradient(model, batch)
                models.append(model)
            mean = np.mean(models, axis=0, dtype=np.float32)
            # They wait for the slowest.
            seconds += max(sum(timing(step, random) for step in range(count)) for timing in timings)
            if not reached and task.train_loss(mean) <= self.target:
                reached = seconds
        return {
            **task.held_out_measures(mean),
            "train_loss": task.train_loss(mean),
            "updates": steps * self.workers,
            "mean_staleness": 0.0,
            "virtual_seconds": seconds,
            "reached_at": reached,
        }


def trials(seeds: Sequence[int]) -> Iterator[Sixteen]:
    for seed in seeds:
        for rate in RATES:
            for way in (ALONE, SERVER, ONCE, EPOCH):
                alone, cost = way == ALONE, COST if way == SERVER else 0.0
                yield Sixteen(
                    seed=seed,
                    way=way,
                    protocol="asgd",
                    rule="sgd",
                    rate=rate,
                    workers=1 if alone else WORKERS,
                    slow=1.0 if alone else STRAGGLER,
                    timing="lognormal:0.3",
                    service=cost,
                    pull=cost,
                    target=0.2,
                )


def error(results: Results, way: str) -> float:
    return results.least("test_error", "rate", way=way)[0]


def over(way: str, other: str) -> Measure:
    """How much more one way errs than another, each at its own best rate."""
    return lambda results: error(results, way) - error(results, other)


def standard_errors(results: Results) -> float:
    """The difference to one worker in standard errors of a share of 360 images."""
    alone = error(results, ALONE)
    return over(SERVER, ALONE)(results) / sqrt(alone * (1 - alone) / HELD_OUT)


def quicker(results: Results) -> float:
    """How many times as long one worker takes for the same number of examples."""
    alone, many = (results.mean("virtual_seconds", way=way) for way in (ALONE, SERVER))
    return alone / many


def sooner(way: str, other: str) -> Measure:
    """How many times as long another way takes to the target, each at its own best rate."""
    return lambda results: results.soonest(way=other) / results.soonest(way=way)


def draw(figure: Figure, results: Results) -> None:
    errors, losses = figure.subplots(1, 2)
    for way in (ALONE, SERVER, ONCE, EPOCH):
        plot(errors, results, "test_error", "rate", label=way, scale=100, way=way)
        plot(losses, results, "train_loss", "rate", label=way, way=way)
    errors.set(ylabel="held-out error in %", ylim=(0, 12))
    losses.set(ylabel="training loss at the end", yscale="log")
    for axis in (errors, losses):
        axis.set(xscale="log", xlabel="rate")
        axis.set_xticks(RATES, map(str, RATES))
        axis.minorticks_off()
    figure.legend(*errors.get_legend_handles_labels(), loc="outside right center")


EXPERIMENT = Experiment(
    name="sixteen_workers",
    title="""ASGD falls short of 16 times as quick on 16 workers at little loss; training on parts of the data does no
    good""",
    in_short="""8.6 ± 0.5 times as quick to a target, so short of 16; but no loss of accuracy. Models averaged once err
    3.5 points more.""",
    paper="a reader of Zhang et al. 2013",
    section="introduction and closing remark of the review",
    claim="""The review calls an algorithm good that is 16 times as quick on 16 GPUs with little loss of accuracy, or 8
    times without any, and finds ASGD unconvincing in both; parallel training on parts of the data has given no good
    results either. Judged here: that ASGD falls short of the first measure in time and in accuracy, each by itself,
    and the second sentence.""",
    setting=f"""16 workers under `asgd`, one of them three times slower, whose pushes and pulls hold the mutex for
    0.5 % of a step each; one worker alone, which pays nothing for a server; 16 that train apart, each on its own 16th
    of the images from the same parameters, and whose models are averaged once, at the end, or each epoch. The digits,
    minibatches of 4, 20 epochs of examples in all, plain SGD whose rate falls to a tenth for the last 15 %;
    compute times log-normal with sigma 0.3; each way at its own best of five rates from {RATES[0]} to {RATES[-1]:g}.
    The target is a training loss of 0.2.""",
    trials=trials,
    pilot=(0,),
    pilot_chose="""minibatch and rates; it saw 15.2 times for the same examples and 7 times to the target. A first form
    of this chapter named 16 times as the claim, and judged with the same numbers that it is reached, by the examples a
    second, too ("yes"; they stand beside now, since they follow from the setting). Its verdict was "mixed" as well""",
    conditions=(
        control("one worker: least error", lambda results: error(results, ALONE), at_most=0.08, unit="%"),
        Condition(
            "16 workers: error above that of one, in standard errors of a share of 360 images",
            standard_errors,
            at_least=1.0,
        ),
        Condition("16 workers: sooner at the target than one, times", sooner(SERVER, ALONE), at_most=14, unit="x"),
        Condition(
            "parts, averaged once: error above that of 16 workers",
            over(ONCE, SERVER),
            at_least=0.01,
            opposite=-0.005,
            unit="points",
        ),
        beside("16 workers: as quick as one over the same examples, times", quicker, at_most=14, unit="x"),
        beside("16 workers: sooner at the target than one, times", sooner(SERVER, ALONE), at_most=8, unit="x"),
        beside("16 workers: error above that of one", over(SERVER, ALONE), at_least=0.0025, unit="points"),
        beside(
            "parts, averaged each epoch: error above that of 16 workers",
            over(EPOCH, SERVER),
            at_least=0.005,
            unit="points",
        ),
        beside(
            "16 workers: sooner at the target than parts averaged each epoch, times",
            sooner(SERVER, EPOCH),
            at_least=2,
            unit="x",
        ),
    ),
    shows_not="""Wall-clock time, nor a network between workers. Workers that train apart have as many examples as
    the others, not as much time: they wait for the slowest, and would have more examples without it.""",
    reading="""What fails is a loss of accuracy: 16 workers err as one does, 0.06 ± 0.14 points more. What holds is the
    time: to the target they are 8.6 ± 0.5 times as quick, far from 16, and 1.2 standard errors above 8. Their best rate
    is 0.2, and one worker's 0.5, at which stale gradients take longer; at rate 0.1 for both it is 13.9 ± 0.4 times. For
    the same examples they need a fifteenth of the time, by the setting alone: 16 workers, of which one is three times
    slower, are 15.33 machines, and the mutex takes 1 %. Training apart does as the review says: 3.5 ± 0.5 points more
    errors if models are averaged once. Averaged each epoch they lose 0.4 ± 0.2 points, and take nine times as long to
    the target, much of it by the straggler, for which they alone wait.""",
    draw=draw,
    quick={"epochs": 0.5, "target": 2.0},
)
