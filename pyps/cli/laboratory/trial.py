"""One trial: a user's model, or none, on a virtual cluster under one protocol, policy and rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyps.cli.laboratory.settings import Settings, pulls_apart
from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.simulation.server import ServerPlan
from pyps.simulation.simulation import Computed, Simulation, Step

if TYPE_CHECKING:
    from pyps_client.torch.problem import Problem

# How often a trial looks at the figure.
POINTS = 40
# Numbers of a shard without gradients that workers follow by differences.
PUBLISHED_LENGTH = 2048
# A trial ends after so many gradients that are not finite, or so many pushes for each that should be taken.
SKIPS_MAX = 10
PUSHES_MAX = 20
# So many workers may die one after the other before one pushes.
LIVES_MAX = 3_000


class Point(NamedTuple):
    """The figure after so many examples and virtual seconds."""

    examples: int
    seconds: float
    figure: float


class Outcome(NamedTuple):
    """What came of a trial; `measured` by the names of a table's columns."""

    points: list[Point]
    measured: Mapping[str, float | str]


@dataclass(frozen=True)
class Trial:
    """What sets it apart from the others of its grid."""

    protocol: str
    staleness: str
    rate: float
    seed: int

    def run(
        self, settings: Settings, problem: Problem | None, tell: Callable[[float], None] = lambda share: None
    ) -> Outcome:
        """Run it to its end; `tell` is called with the share of it that was done since."""
        return _Training(self, settings, problem).outcome(tell)


class _Ended(Exception):
    """The trial goes on no longer; why, in a word."""


class _Training:
    def __init__(self, trial: Trial, settings: Settings, problem: Problem | None) -> None:
        self._settings, self._problem, self._rate = settings, problem, trial.rate
        shards, size = settings.shards, settings.parameters
        borders = [index * size // shards for index in range(shards + 1)]
        self._places = [slice(*place) for place in pairwise(borders)]
        lengths = [stop - start for start, stop in pairwise(borders)]
        plans, network = settings.worker_plans, settings.network
        # What a published copy keeps of its differences depends on their size beside its own.
        nothing = np.zeros(PUBLISHED_LENGTH if plans[0].pull_codec.published else 1, np.float32)
        parameters = [nothing] * shards
        if problem is None:
            network = replace(network, sizes=lengths)
        else:
            parameters = [problem.parameters[place].copy() for place in self._places]
        self._nothing = dict.fromkeys(range(shards), nothing)
        rule = settings.rule_settings(trial.rate)
        self._kind = rule.kind(0)
        self._skipped = self._computed = 0
        behaviour = Behaviour.parse(
            protocol=trial.protocol,
            staleness=trial.staleness,
            schedule=settings.schedule,
            epoch_examples=problem.num_examples if problem else 1,
        )
        push_seconds, pull_seconds = settings.service(max(lengths))
        if not pulls_apart(behaviour.aggregation):
            # Nobody comes between the two.
            push_seconds, pull_seconds = push_seconds + pull_seconds, 0.0
        self._simulation = Simulation(
            parameters,
            rule,
            behaviour,
            plans,
            self._compute,
            server=ServerPlan(
                expected_workers=settings.workers,
                service_seconds=push_seconds,
                pull_seconds=pull_seconds,
                cores=settings.cores or math.inf,
            ),
            network=network,
            seed=trial.seed,
        )

    def outcome(self, tell: Callable[[float], None]) -> Outcome:
        settings = self._settings
        points, note = self._look(), ""
        looks = sorted({index * settings.pushes // POINTS for index in range(1, POINTS + 1)} - {0})
        for index, pushes in enumerate(looks):
            try:
                self._run_to(pushes * settings.shards)
            except _Ended as ended:
                note = str(ended)
            points += self._look()
            tell((len(looks) - index if note else 1) / len(looks))
            if note:
                break
        return Outcome(points, self._measured(points, note))

    def _run_to(self, pushes: int) -> None:
        """Run until so many pushes are taken; _Ended if none is, as where workers die before they push."""
        simulation, failures = self._simulation, self._settings.failing
        slice_seconds = failures.mean_seconds + failures.recovery_seconds if failures else math.inf
        taken, died = simulation.num_taken, simulation.server.num_lost
        while simulation.num_taken < pushes:
            simulation.run(seconds=simulation.now + slice_seconds, pushes=pushes)
            if simulation.num_taken > taken:
                taken, died = simulation.num_taken, simulation.server.num_lost
            elif slice_seconds == math.inf or simulation.server.num_lost > died + LIVES_MAX:
                raise _Ended(f"without a push at {simulation.now:,.0f} s")

    def _look(self) -> list[Point]:
        if self._problem is None:
            return []
        for place, shard in zip(self._places, self._simulation.shards, strict=True):
            self._problem.parameters[place] = shard.state().parameters
        return [Point(self._examples, self._simulation.now, self._problem.figure())]

    @property
    def _examples(self) -> int:
        settings = self._settings
        return self._simulation.num_taken // settings.shards * settings.batch_size * settings.local_steps

    def _measured(self, points: list[Point], note: str) -> dict[str, float | str]:
        simulation, tally, target = self._simulation, self._simulation.tally, self._settings.target
        now, server, shards = simulation.now, simulation.server, self._settings.shards
        blocked = sum(worker.blocked_seconds for worker in simulation.workers)
        computing = sum(worker.computing_seconds for worker in simulation.workers)
        hits = (point for point in points if target is not None and point.figure <= target)
        hit = next(hits, None)
        return {
            "figure": points[-1].figure if points else math.nan,
            "target_seconds": hit.seconds if hit else math.nan,
            "target_examples": hit.examples if hit else math.nan,
            "seconds": now,
            "examples": self._examples,
            "updates_per_second": tally.updates / shards / now if now else math.nan,
            "examples_per_second": self._examples / now if now else math.nan,
            "mean_staleness": tally.staleness_mean,
            "largest_staleness": tally.staleness_max,
            "refused": tally.pushes_rejected / max(1, tally.pushes_rejected + simulation.num_taken),
            "waiting": blocked / (blocked + computing) if computing else math.nan,
            "bytes_per_example": (server.bytes_in + server.bytes_out) / max(1, self._examples),
            "note": note,
        }

    def _compute(self, step: Step) -> Computed:
        problem, settings = self._problem, self._settings
        self._computed += 1
        if self._computed > PUSHES_MAX * (settings.pushes + settings.workers):
            raise _Ended("refused")
        count, examples = settings.local_steps, settings.batch_size * settings.local_steps
        if problem is None:
            return Computed(self._nothing, examples, count, self._kind)
        for shard_id, place in enumerate(self._places):
            problem.parameters[place] = step.parameters[shard_id]
        numbers = self._gradient(problem, step)
        if not np.isfinite(numbers).all():
            self._skipped += 1
            if self._skipped > SKIPS_MAX:
                raise _Ended("diverged")
        gradients = {shard_id: numbers[place] for shard_id, place in enumerate(self._places)}
        return Computed(gradients, examples, count, self._kind)

    def _gradient(self, problem: Problem, step: Step) -> Floats:
        """Return the gradient, or how far local steps have moved the parameters."""
        count, size = self._settings.local_steps, self._settings.batch_size
        began = problem.parameters.copy()
        for _ in range(count):
            examples = step.random.integers(problem.num_examples, size=size)
            gradient = problem.gradient(step.worker_id, examples)
            if count == 1:
                return gradient
            with np.errstate(all="ignore"):
                problem.parameters -= np.float32(self._rate) * gradient
        return problem.parameters - began
