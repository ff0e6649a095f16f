"""The trial of the learning experiments: workers train the digits in virtual time around the servers' own code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from experiments import digits_network
from experiments.harness import Trial
from pyps.core.behaviour import Behaviour
from pyps.core.rule_settings import RuleSettings
from pyps.simulation.server import ServerPlan
from pyps.simulation.simulation import Computed, Simulation, Step, WorkerPlan, parse_timing

digits = cache(digits_network.load)


@dataclass(frozen=True, kw_only=True)
class Training(Trial):
    """One training over a fixed number of examples."""

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

    def measure(self) -> dict[str, float]:
        task = digits()
        simulation = self.simulation(task)
        pushes, reached = round(self.epochs * task.num_examples / self.batch), 0.0
        if self.target:
            # Twenty looks an epoch.
            for done in range(0, pushes, max(1, task.num_examples // (20 * self.batch))):
                simulation.run(pushes=done)
                if not reached and self._loss(simulation) <= self.target:
                    reached = simulation.now
        simulation.run(pushes=pushes)
        [shard] = simulation.shards
        parameters = shard.state().parameters
        tally = simulation.tally
        return {
            "test_error": task.test_error(parameters),
            "train_loss": self._loss(simulation),
            "updates": shard.version,
            "mean_staleness": tally.staleness_sum / (tally.pushes_applied + tally.pushes_pending),
            "virtual_seconds": simulation.now,
            # 0 where it was not reached.
            "reached_at": reached,
        }

    def simulation(self, task: digits_network.Digits) -> Simulation:
        """Return machines that begin at random moments of a first second."""
        behaviour = Behaviour.parse(
            protocol=self.protocol,
            staleness=self.staleness,
            warmup=self.warmup,
            schedule=f"piecewise:{self.drop * self.epochs:g}=0.1,unit=epochs" if self.drop < 1 else "constant",
            epoch_examples=task.num_examples,
        )

        def compute(step: Step) -> Computed:
            batch = step.random.integers(task.num_examples, size=self.batch)
            gradient = digits_network.loss_gradient(step.parameters[0], task.images[batch], task.labels[batch])
            return Computed({0: gradient}, examples=self.batch)

        starts = np.random.default_rng([self.seed, self.workers]).random(self.workers)
        workers = [
            WorkerPlan(
                f"w{index:03}",
                parse_timing(self.timing, mean=self.seconds * (1 if index else self.slow)),
                joins_at=float(start),
            )
            for index, start in enumerate(starts)
        ]
        rule, _, settings = self.rule.partition(":")
        return Simulation(
            [digits_network.first_parameters(np.random.default_rng(self.seed))],
            RuleSettings.parse(f"{rule}:learning_rate={self.rate!r}" + (f",{settings}" if settings else "")),
            behaviour,
            workers,
            compute,
            server=ServerPlan(expected_workers=self.workers, service_seconds=self.service, pull_seconds=self.pull),
            seed=self.seed,
        )

    def _loss(self, simulation: Simulation) -> float:
        """Return the loss over all training images; that of chance where it is not finite."""
        loss = digits_network.mean_loss(simulation.shards[0].state().parameters, digits().images, digits().labels)
        return loss if np.isfinite(loss) else float(np.log(digits_network.CLASSES))
