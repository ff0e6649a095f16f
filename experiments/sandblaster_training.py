"""Training the digits by Sandblaster's L-BFGS and by Downpour, in virtual time.

Dean et al. 2012, section 4: the gradients, queue, shards and vectors are real and the servers' own, as is L-BFGS; the
time that computing takes is drawn. Messages and servers take none, which favours Downpour: it sends more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from experiments import digits_network
from experiments.digits_network import Digits, Floats
from experiments.sandblaster_crew import Computed, Numerics, VirtualCrew
from experiments.sandblaster_servers import LocalServers, coordinate
from pyps.cli.coordination.link import Traffic
from pyps.cli.coordination.settings import CoordinationSettings
from pyps.core import protocols, staleness
from pyps.core.behaviour import Behaviour
from pyps.core.rule_settings import RuleSettings
from pyps.lbfgs.optimizer import IterationReport
from pyps.simulation.server import ServerPlan
from pyps.simulation.simulation import Computed as StepResult
from pyps.simulation.simulation import Simulation, Step, WorkerPlan, normal
from pyps.work.portions import Portion

SEEDS = (0, 1, 2, 3, 4)
# Of the held-out images: who is there soonest.
TARGET_ERROR = 0.08
# Downpour's minibatch takes a second, and as many examples of a portion do.
BATCH_SIZE = 8
EXAMPLE_SECONDS = 1 / BATCH_SIZE
TIME_VARIATION = 0.1
PASSES = 25
# Of Downpour's and of serial SGD's runs, the rate with the shortest time to the target is shown.
RATES = (0.03, 0.1, 0.3, 1.0)
DOWNPOUR_WORKERS = 20
LOOK_PUSHES = 10
SANDBLASTER_WORKERS = (2, 20, 100)
PORTIONS_PER_WORKER = 10
COPIES_MAX = 2
LBFGS = CoordinationSettings(history=10, iterations=20, copies=COPIES_MAX)

SGD, DOWNPOUR_SGD, DOWNPOUR, SANDBLASTER = "SGD(1)", "Downpour SGD", "Downpour Adagrad", "Sandblaster"


@dataclass(frozen=True)
class Trial:
    """One training: who trains how."""

    method: str
    workers: int
    # The learning rate; 0 where there is none.
    rate: float
    seed: int


@dataclass(frozen=True)
class Point:
    """Where a training stood."""

    method: str
    workers: int
    rate: float
    seed: int
    # Passes over the data, trials of a line search included; virtual seconds; of L-BFGS the iteration, else 0.
    passes: float
    seconds: float
    iteration: int
    # The mean over all examples that are trained on, and the share of held-out ones taken for another digit.
    loss: float
    test_error: float


@dataclass(frozen=True)
class TimeToTarget:
    """How long a way of training took to the target, at the best of its rates."""

    method: str
    workers: int
    rate: float
    # Virtual; infinite where a seed did not come so far.
    seconds: list[float]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return fmean(self.seconds)


def all_trials() -> Iterator[Trial]:
    """Yields every training, long ones first."""
    for seed in SEEDS:
        for rate in RATES:
            yield Trial(SGD, 1, rate, seed)
            yield Trial(DOWNPOUR_SGD, DOWNPOUR_WORKERS, rate, seed)
            yield Trial(DOWNPOUR, DOWNPOUR_WORKERS, rate, seed)
        for workers in SANDBLASTER_WORKERS:
            yield Trial(SANDBLASTER, workers, 0.0, seed)


def train(trial: Trial) -> list[Point]:
    """Trains once, and returns where it stood on its way."""
    digits = digits_network.load()
    first = digits_network.first_parameters(np.random.default_rng(trial.seed))
    if trial.method == SANDBLASTER:
        return _sandblaster(trial, digits, first)
    return list(_downpour(trial, digits, first))


def _point(trial: Trial, digits: Digits, parameters: Floats, **where: float) -> Point:
    loss = digits_network.mean_loss(parameters, digits.images, digits.labels)
    return Point(
        trial.method,
        trial.workers,
        trial.rate,
        trial.seed,
        passes=where["passes"],
        seconds=where["seconds"],
        iteration=int(where.get("iteration", 0)),
        loss=loss,
        test_error=digits.test_error(parameters),
    )


# Downpour.


def _downpour(trial: Trial, digits: Digits, first: Floats) -> Iterator[Point]:
    """Pushes and pulls with every minibatch; with one worker and plain steps that is serial SGD."""
    # The paper's Downpour knows no division by staleness.
    behaviour = Behaviour(protocols.parse("async"), staleness.parse("none"))
    rule = "adagrad" if trial.method == DOWNPOUR else "sgd"
    settings = RuleSettings.make(rule, ({"learning_rate": trial.rate},))

    def compute(step: Step) -> StepResult:
        batch = step.random.integers(digits.num_examples, size=BATCH_SIZE)
        gradient = digits_network.loss_gradient(step.parameters[0], digits.images[batch], digits.labels[batch])
        return StepResult({0: gradient}, examples=BATCH_SIZE)

    seconds = normal(BATCH_SIZE * EXAMPLE_SECONDS, variation=TIME_VARIATION)
    plans = [WorkerPlan(f"w{index:03}", seconds) for index in range(trial.workers)]
    server = ServerPlan(expected_workers=trial.workers)
    simulation = Simulation([first], settings, behaviour, plans, compute, server=server, seed=trial.seed)
    (shard,) = simulation.shards
    for pushes in range(0, PASSES * digits.num_examples // BATCH_SIZE + 1, LOOK_PUSHES):
        simulation.run(pushes=pushes)
        passes = pushes * BATCH_SIZE / digits.num_examples
        yield _point(trial, digits, shard.state().parameters, passes=passes, seconds=simulation.now)


# Sandblaster.


def _sandblaster(trial: Trial, digits: Digits, first: Floats) -> list[Point]:
    servers = LocalServers(first)

    def compute(parameters: Floats, portion: Portion) -> Computed:
        examples = slice(portion.start, portion.stop)
        images, labels = digits.images[examples], digits.labels[examples]
        gradient = digits_network.loss_gradient(parameters, images, labels) * np.float32(portion.num_examples)
        return Computed(gradient, digits_network.mean_loss(parameters, images, labels) * portion.num_examples)

    crew = VirtualCrew(
        [normal(EXAMPLE_SECONDS, variation=TIME_VARIATION)] * trial.workers,
        num_examples=digits.num_examples,
        numerics=Numerics(servers.parameters, compute, servers.stage),
        seed=trial.seed,
    )
    points = [_point(trial, digits, first, passes=0, seconds=0.0)]
    # The first is at the first parameters.
    passes = 1

    def note(report: IterationReport, _: Traffic) -> None:
        nonlocal passes
        passes += report.trials
        where = {"passes": passes, "seconds": crew.now, "iteration": report.iteration}
        points.append(_point(trial, digits, servers.parameters(), **where))

    num_portions = PORTIONS_PER_WORKER * trial.workers
    coordinate(servers, crew, replace(LBFGS, portions=num_portions), on_iteration=note)
    return points


# What is made of the trainings.


def label(method: str, workers: int) -> str:
    return method if method == SGD else f"{method}, {workers} workers"


def iterations(points: Iterable[Point]) -> list[list[Point]]:
    """Sandblaster's runs, each by iteration from the first parameters on."""
    runs: dict[tuple[int, int], list[Point]] = {}
    for point in points:
        if point.method == SANDBLASTER:
            runs.setdefault((point.workers, point.seed), []).append(point)
    return list(runs.values())


def errors_after(points: Iterable[Point], count: int) -> list[float]:
    """Returns Sandblaster's test errors after so many iterations, or where it ended before, of all runs."""
    return [run[min(count, len(run) - 1)].test_error for run in iterations(points)]


def times_to_target(points: Sequence[Point]) -> list[TimeToTarget]:
    """Returns one a method and number of workers, in the order of the trials."""
    reached: dict[tuple[str, int], dict[float, dict[int, float]]] = {}
    for point in points:
        by_seed = reached.setdefault((point.method, point.workers), {}).setdefault(point.rate, {})
        seconds = point.seconds if point.test_error <= TARGET_ERROR else float("inf")
        by_seed[point.seed] = min(by_seed.get(point.seed, float("inf")), seconds)
    times = [
        [TimeToTarget(method, workers, rate, list(by_seed.values())) for rate, by_seed in by_rate.items()]
        for (method, workers), by_rate in reached.items()
    ]
    return [min(of_rates, key=lambda time: time.mean) for of_rates in times]
