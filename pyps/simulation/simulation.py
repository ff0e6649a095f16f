"""A cluster in virtual time: workers with given compute times around a real run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Gradient, PayloadKind
from pyps.core.receipt import Outcome, Reason, Receipt
from pyps.core.rule_settings import RuleSettings
from pyps.core.store import Store
from pyps.run.content import RunRecorder
from pyps.simulation.event import Event, Kind, Scheduler
from pyps.simulation.server import ServerPlan, VirtualServer
from pyps_wire.codecs import FLOAT32

# Takes the step's number, from 0, and the worker's random numbers.
Timing = Callable[[int, np.random.Generator], float]

# No step takes less than this share of the mean.
SHORTEST = 0.05


def fixed(seconds: float) -> Timing:
    """Return the same time for every step."""
    return lambda step, random: seconds


def scripted(seconds: Sequence[float]) -> Timing:
    """Return these times in turn, and the last one for all further steps."""
    return lambda step, random: seconds[min(step, len(seconds) - 1)]


def normal(mean: float = 1.0, *, variation: float) -> Timing:
    """Return normally distributed times with that coefficient of variation."""
    return lambda step, random: mean * max(SHORTEST, 1 + variation * float(random.standard_normal()))


def lognormal(mean: float = 1.0, *, sigma: float) -> Timing:
    """Return times whose logarithm is normal with deviation `sigma`: some steps take long."""
    return lambda step, random: mean * float(np.exp(sigma * random.standard_normal() - sigma * sigma / 2))


def exponential(mean: float = 1.0) -> Timing:
    """Return exponentially distributed times, as on machines that many jobs share."""
    return lambda step, random: mean * float(random.exponential())


class Step(NamedTuple):
    """The input of a worker's computation."""

    worker_id: str
    # The worker's own count of steps, from 0.
    number: int
    # By shard: the pulled parameters, as copies, and their versions.
    parameters: Mapping[int, Floats]
    versions: Mapping[int, int]
    # The worker's own random numbers.
    random: np.random.Generator


class Computed(NamedTuple):
    """The result of a step."""

    # By shard; a missing shard has no gradient.
    gradients: Mapping[int, Floats]
    # The examples and the minibatches in their sum.
    examples: int = 1
    minibatches: int = 1


Compute = Callable[[Step], Computed]


@dataclass(frozen=True)
class WorkerPlan:
    """When a worker joins, how fast it is, and how it ends."""

    worker_id: str
    timing: Timing = field(default_factory=lambda: fixed(1.0))
    joins_at: float = 0.0
    # The number of steps after which it leaves; None for no end.
    steps: int | None = None
    # When it stops without Leave: its step is lost, and its lease expires later.
    dies_at: float = float("inf")
    # Larger in a later life of the same worker.
    incarnation: int = 1
    # The shards that it trains, in the order in which it sends them; None for all.
    shards: tuple[int, ...] | None = None


class VirtualWorker:
    """One life of a worker: it joins, then proceeds, pulls, computes and pushes in a loop."""

    def __init__(
        self,
        plan: WorkerPlan,
        compute: Compute,
        *,
        server: VirtualServer,
        scheduler: Scheduler,
        random: np.random.Generator,
    ) -> None:
        self.plan = plan
        self.worker_id = plan.worker_id
        self.steps_done = 0
        self.blocked_seconds = 0.0
        self._compute = compute
        self._server, self._scheduler, self._random = server, scheduler, random
        self._shards = plan.shards if plan.shards is not None else tuple(server.shards)
        self._joined = self._gone = False
        self._sequence = 0
        self._asked_at = 0.0
        # By shard: the version and parameters pulled, and the version to wait for before the next pull.
        self._held: dict[int, tuple[int, Floats]] = {}
        self._min_versions = dict.fromkeys(self._shards, 0)
        # Shards without an answer yet.
        self._outstanding: set[int] = set()
        self._at(plan.joins_at, self._join)
        if plan.dies_at < float("inf"):
            scheduler.at(plan.dies_at, self._die, worker_id=self.worker_id)

    def _at(self, time: float, action: Callable[[], None]) -> None:
        """Call the action at that time, unless the worker has left or died by then."""
        self._scheduler.at(time, lambda: None if self._gone else action(), worker_id=self.worker_id)

    def _join(self) -> None:
        self._joined = True
        self._server.join(self.worker_id, self.plan.incarnation)
        self._proceed()

    def _proceed(self) -> None:
        self._asked_at = self._scheduler.now
        if self._server.run.rounds.steps.asks:
            self._request_step()
        else:
            self._pull()

    def _request_step(self, *, again: bool = False) -> None:
        wake = partial(self._at, 0.0, partial(self._request_step, again=True))
        if self._server.may_proceed(self.worker_id, self.steps_done, wake=wake, again=again):
            self._pull()

    def _pull(self) -> None:
        self._outstanding = set(self._shards)
        self._server.pull(
            self.worker_id,
            self._min_versions,
            then=lambda shard_id, time: self._at(time, lambda: self._read(shard_id)),
        )

    def _read(self, shard_id: int) -> None:
        self._held[shard_id] = self._server.read(self.worker_id, shard_id)
        self._outstanding.remove(shard_id)
        if not self._outstanding:
            self.blocked_seconds += self._scheduler.now - self._asked_at
            seconds = self.plan.timing(self.steps_done, self._random)
            self._at(self._scheduler.now + seconds, self._push)

    def _push(self) -> None:
        parameters = {shard_id: values for shard_id, (_, values) in self._held.items()}
        versions = {shard_id: version for shard_id, (version, _) in self._held.items()}
        computed = self._compute(Step(self.worker_id, self.steps_done, parameters, versions, self._random))
        self._sequence += 1
        self._asked_at = self._scheduler.now
        self._outstanding = set(self._shards)
        gradients = [(shard_id, self._gradient(shard_id, computed)) for shard_id in self._shards]
        self._server.receive(gradients, at=self._at, then=self._answered)

    def _gradient(self, shard_id: int, computed: Computed) -> Gradient:
        values = computed.gradients.get(shard_id)
        return Gradient(
            worker_id=self.worker_id,
            incarnation=self.plan.incarnation,
            sequence=self._sequence,
            base_version=self._held[shard_id][0],
            epoch=self._server.run.content.epoch,
            codec=FLOAT32,
            payload=b"" if values is None else np.asarray(values, np.float32).tobytes(),
            kind=PayloadKind.NOTHING if values is None else PayloadKind.GRADIENT,
            example_count=computed.examples,
            minibatch_count=computed.minibatches,
            clock=self.steps_done + 1,
        )

    def _answered(self, receipt: Receipt) -> None:
        self._min_versions[receipt.shard_id] = receipt.min_version
        self._outstanding.discard(receipt.shard_id)
        if receipt.reason == Reason.FINISHED:
            self._leave()
        elif not self._outstanding:
            self.steps_done += 1
            self.blocked_seconds += self._scheduler.now - self._asked_at
            if self.steps_done == self.plan.steps:
                self._leave()
            else:
                self._proceed()

    def _leave(self) -> None:
        self._gone = True
        self._server.leave(self.worker_id)

    def _die(self) -> None:
        if self._joined and not self._gone:
            self._gone = True
            self._server.lose(self.worker_id)


class Simulation:
    """A run and its workers in virtual time. Equal inputs give equal events and equal bits."""

    def __init__(
        self,
        parameters: Sequence[Floats],
        settings: RuleSettings,
        behaviour: Behaviour,
        workers: Sequence[WorkerPlan],
        compute: Compute,
        *,
        server: ServerPlan | None = None,
        seed: int = 0,
        recorder: RunRecorder | None = None,
    ) -> None:
        """Make a shard of each of the parameters, with an update rule of these settings."""
        self.events: list[Event] = []
        # Accepted pushes.
        self.num_taken = 0
        self._scheduler = Scheduler()
        self.server = VirtualServer(
            parameters,
            settings,
            behaviour,
            server or ServerPlan(),
            num_workers=len(workers),
            scheduler=self._scheduler,
            report=self._note,
            recorder=recorder,
        )
        self.workers = [
            VirtualWorker(
                plan,
                compute,
                server=self.server,
                scheduler=self._scheduler,
                random=np.random.default_rng([seed, index]),
            )
            for index, plan in enumerate(workers)
        ]

    @property
    def shards(self) -> list[Store]:
        """The run's shards, in the order of the parameters."""
        return list(self.server.shards.values())

    @property
    def now(self) -> float:
        return self._scheduler.now

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call an action at a time, for example one that pauses a shard."""
        self._scheduler.at(time, action)

    def run(self, *, seconds: float = float("inf"), pushes: int | None = None) -> None:
        """Run until that time, until so many pushes are accepted, or until no action is left."""
        while (pushes is None or self.num_taken < pushes) and self._scheduler.step(until=seconds):
            pass

    def receipts(self, shard_id: int | None = None) -> list[Receipt]:
        """Return the receipts of all pushes, or of a shard's, in the order of time."""
        receipts = (event.receipt for event in self.events if event.receipt is not None)
        return [receipt for receipt in receipts if shard_id is None or receipt.shard_id == shard_id]

    def trace(self) -> str:
        return "".join(f"{event}\n" for event in self.events)

    def _note(self, event: Event) -> None:
        self.events.append(event)
        if event.kind is Kind.PUSH and event.receipt is not None:
            self.num_taken += event.receipt.outcome != Outcome.REJECTED
