"""Clusters in virtual time for tests: a real run, and workers whose speed a test chooses."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.receipt import Outcome, Receipt
from pyps.core.rule_settings import RuleSettings
from pyps.core.rules import RULES
from pyps.core.shard import Shard
from pyps.simulation.event import Event, Kind
from pyps.simulation.network import Network
from pyps.simulation.server import ServerPlan
from pyps.simulation.simulation import Compute, Computed, Simulation, Step, Timing, WorkerPlan, fixed
from shards import Log


class RunLog(Log):
    def begin(self, header: object, shards: Mapping[int, Shard]) -> None:
        """Nothing is to be kept of the beginning: a test knows it."""


@dataclass
class Cluster:
    behaviour: Behaviour
    rule: str
    settings: Mapping[str, float]
    first: Sequence[Floats]
    log: Log
    shards: list[Shard]
    simulation: Simulation

    def fresh_shard(self, shard_id: int = 0) -> Shard:
        first, rule = self.first[shard_id], RULES[self.rule]
        return Shard(shard_id, first, rule=rule, hyperparameters=self.settings, behaviour=self.behaviour)

    def run(self, **until: Any) -> Cluster:
        self.simulation.run(**until)
        return self

    def parameters(self, shard_id: int = 0) -> Floats:
        return self.shards[shard_id].state().parameters

    def staleness(self, shard_id: int = 0) -> list[int]:
        """The staleness of every gradient that was taken, in the order of arrival."""
        return [receipt.staleness for receipt in self.taken(shard_id)]

    def taken(self, shard_id: int = 0) -> list[Receipt]:
        receipts = self.simulation.receipts(shard_id)
        return [receipt for receipt in receipts if receipt.outcome != Outcome.REJECTED]

    def events(self, kind: Kind, worker_id: str | None = None) -> list[Event]:
        events = [event for event in self.simulation.events if event.kind is kind]
        return [event for event in events if worker_id in (None, event.worker_id)]

    def steps(self, worker_id: str) -> int:
        return sum(worker.steps_done for worker in self.simulation.workers if worker.worker_id == worker_id)


def cluster(
    protocol: str = "async",
    *,
    parameters: Sequence[npt.ArrayLike] = ((0.0,),),
    workers: int | Sequence[WorkerPlan] = 4,
    compute: Compute | None = None,
    rule: str = "sgd",
    settings: Mapping[str, float] | None = None,
    server: ServerPlan | None = None,
    network: Network | None = None,
    seed: int = 0,
    **texts: Any,
) -> Cluster:
    """Return a cluster that begins at time 0; four workers of one second a step, whose gradients are ones.

    The texts are those of a behaviour: staleness="divide", schedule="...". By default SGD with
    learning rate 1.
    """
    behaviour = Behaviour.parse(protocol=protocol, **texts)
    settings = {"learning_rate": 1.0} if settings is None else settings
    first = [np.array(values, np.float32) for values in parameters]
    log = RunLog()
    plans = worker_plans(workers) if isinstance(workers, int) else workers
    simulation = Simulation(
        first,
        RuleSettings.make(rule, (settings,)),
        behaviour,
        plans,
        compute or ones,
        server=server or ServerPlan(expected_workers=len(plans)),
        seed=seed,
        recorder=log,
        network=network,
        keep_events=True,
    )
    return Cluster(behaviour, rule, settings, first, log, simulation.shards, simulation)


def worker_plans(count: int, timing: Timing | None = None, **fields: Any) -> list[WorkerPlan]:
    return [WorkerPlan(name(index), timing or fixed(1.0), **fields) for index in range(count)]


def name(index: int) -> str:
    """The worker's name: in the order of the alphabet whatever their number."""
    return string.ascii_lowercase[index] if index < 26 else f"z{index:03}"


def ones(step: Step) -> Computed:
    return Computed({shard_id: np.ones_like(values) for shard_id, values in step.parameters.items()})


def noisy(step: Step) -> Computed:
    """The gradient of a bowl about 1, with noise: it depends on the parameters and on the worker's dice."""
    return Computed(
        {
            shard_id: (values - 1 + 0.1 * step.random.standard_normal(values.size)).astype(np.float32)
            for shard_id, values in step.parameters.items()
        }
    )
