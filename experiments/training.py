"""The trial of the learning experiments: workers train a small task in virtual time around the servers' own code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from experiments import character_network, digits_network
from experiments.harness import Trial
from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.rule_settings import RuleSettings
from pyps.simulation.server import ServerPlan
from pyps.simulation.simulation import Compute, Computed, Simulation, Step, WorkerPlan, parse_timing

# Of a staleness policy, in all pictures.
COLORS = {
    "none": "tab:red",
    "divide": "tab:blue",
    "constant": "tab:green",
    "divide_plus_one": "tab:cyan",
    "exponential:beta=0.1": "tab:orange",
    "exponential:beta=0.5": "tab:brown",
    "polynomial": "tab:pink",
    "hinge": "tab:olive",
}
digits = cache(digits_network.load)
characters = cache(character_network.load)


class Task(Protocol):
    """Data, and a network whose parameters are one vector."""

    @property
    def num_examples(self) -> int: ...

    def first_parameters(self, random: np.random.Generator) -> Floats: ...

    def gradient(self, parameters: Floats, batch: npt.NDArray[np.int64]) -> Floats:
        """Return the gradient of the mean loss over these examples."""
        ...

    def train_loss(self, parameters: Floats) -> float:
        """Return the loss over the training data; that of chance where it is not finite."""
        ...

    def held_out_measures(self, parameters: Floats) -> dict[str, float]:
        """Return what the network is worth on data held out, by the names of columns."""
        ...


@dataclass(frozen=True, kw_only=True)
class Training(Trial):
    """One training over a fixed number of examples."""

    # How often the loss is looked at where there is a target.
    looks_per_epoch: ClassVar[int] = 20

    protocol: str = "async"
    staleness: str = "none"
    warmup: str = ""
    # An update rule and its settings but the rate.
    rule: str = "heavy_ball:momentum=0.9"
    rate: float = 0.1
    workers: int = 30
    batch: int = 4
    epochs: float = 20.0
    # After this share of the examples the rate falls to a tenth; 1 for never.
    drop: float = 0.85
    # A step's virtual seconds on average, and how they vary.
    seconds: float = 1.0
    timing: str = "normal:0.1"
    # How many times longer the first worker's steps take.
    slow: float = 1.0
    # The servers' time for a push, and for a pull.
    service: float = 0.0
    pull: float = 0.0
    # The training loss (of all images) whose first time is measured; 0 for none.
    target: float = 0.0

    def task(self) -> Task:
        return digits()

    def measure(self) -> dict[str, float]:
        return self.measured(self.simulation(self.task()))

    def measured(self, simulation: Simulation) -> dict[str, float]:
        """Run a simulation to its end."""
        task = self.task()
        pushes, reached = round(self.epochs * task.num_examples / self.batch), 0.0
        if self.target:
            for done in range(0, pushes, max(1, task.num_examples // (self.looks_per_epoch * self.batch))):
                simulation.run(pushes=done)
                if not reached and task.train_loss(simulation.shards[0].state().parameters) <= self.target:
                    reached = simulation.now
        simulation.run(pushes=pushes)
        [shard] = simulation.shards
        parameters = shard.state().parameters
        tally = simulation.tally
        return {
            **task.held_out_measures(parameters),
            "train_loss": task.train_loss(parameters),
            "updates": shard.version,
            "mean_staleness": tally.staleness_sum / (tally.pushes_applied + tally.pushes_pending),
            "virtual_seconds": simulation.now,
            # 0 where it was not reached.
            "reached_at": reached,
        }

    def simulation(self, task: Task) -> Simulation:
        """Return machines that begin at random moments of a first second."""
        behaviour = Behaviour.parse(
            protocol=self.protocol,
            staleness=self.staleness,
            warmup=self.warmup,
            schedule=f"piecewise:{self.drop * self.epochs:g}=0.1,unit=epochs" if self.drop < 1 else "constant",
            epoch_examples=task.num_examples,
        )

        starts = np.random.default_rng([self.seed, self.workers]).random(self.workers)
        workers = [self.plan(index, float(start)) for index, start in enumerate(starts)]
        simulation = Simulation(
            [task.first_parameters(np.random.default_rng(self.seed))],
            self.settings(),
            behaviour,
            workers,
            self.computation(task, lambda: simulation.shards[0].state().parameters),
            server=ServerPlan(expected_workers=self.workers, service_seconds=self.service, pull_seconds=self.pull),
            seed=self.seed,
        )
        return simulation

    def plan(self, index: int, joins_at: float) -> WorkerPlan:
        """Return a worker's plan."""
        timing = parse_timing(self.timing, mean=self.seconds * (1 if index else self.slow))
        return WorkerPlan(f"w{index:03}", timing, joins_at=joins_at)

    def settings(self) -> RuleSettings:
        """Return the servers' update rule."""
        rule, _, settings = self.rule.partition(":")
        return RuleSettings.parse(f"{rule}:learning_rate={self.rate!r}" + (f",{settings}" if settings else ""))

    def computation(self, task: Task, present: Callable[[], Floats]) -> Compute:
        """Return what workers compute: the gradient of a minibatch. `present` gives the servers' own parameters."""

        def compute(step: Step) -> Computed:
            batch = step.random.integers(task.num_examples, size=self.size(step.number))
            gradient = task.gradient(step.parameters[0], batch)
            # Servers refuse what is not finite, so that a network that diverged would never see all examples.
            return Computed({0: gradient} if np.isfinite(gradient).all() else {}, examples=batch.size)

        return compute

    def size(self, step: int) -> int:
        """Return the minibatch of a worker's step."""
        return self.batch
