"""Sandblaster's workers in virtual time, around the queue of portions that a server has.

Dean et al. 2012, section 4.2. Each worker does what the client's does: leases a portion, pulls the parameters once a
pass, computes, claims, and lays aside the sum of a few claimed portions' gradients before it delivers them. Messages
take no time; computing does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pyps.core.arrays import Floats
from pyps.simulation.event import Scheduler
from pyps.simulation.simulation import Timing
from pyps.work import DataSpec, Portion, WorkQueue
from pyps_wire.work_pb2 import AwaitPassReply, LeaseReply

COORDINATOR_EPOCH = 1
INCARNATION = 1
# A coordinated queue takes nothing away from a worker that is only slow.
STALL_SECONDS = 3600.0


def portion_of(leased: LeaseReply) -> Portion:
    return Portion(leased.portion.portion_id, leased.portion.start, leased.portion.stop, leased.portion.lease_id)


def pass_of(leased: LeaseReply) -> int:
    # The field's name is a keyword of Python's.
    return int(getattr(leased, "pass"))


@dataclass(frozen=True)
class Computed:
    """What came of a portion: sums over its examples."""

    gradient: Floats
    loss_sum: float


# Computes a portion at the parameters that the worker pulled.
Compute = Callable[[Floats, Portion], Computed]


@dataclass
class Stage:
    """The sum of the gradients of some portions, on its way to the servers."""

    pass_: int
    stage_id: int
    portion_id: int
    gradient: Floats


@dataclass(frozen=True)
class Numerics:
    """What the workers compute with, and where it goes; left out where only time matters."""

    pull: Callable[[], Floats]
    compute: Compute
    stage: Callable[[Stage], None]


@dataclass(frozen=True)
class Span:
    """One worker's time with one portion."""

    worker_id: str
    pass_: int
    portion: Portion
    start: float
    stop: float
    # Whether the result counted; False for copies that came too late.
    counted: bool


@dataclass
class Worker:
    """One worker between two portions."""

    worker_id: str
    # Seconds an example takes, by the number of the portion among the worker's own.
    timing: Timing
    random: np.random.Generator
    portions: int = 0
    # The pass in which the parameters were pulled last, and they.
    pulled_in: int = -1
    parameters: Floats | None = None
    # Claimed portions that are not yet laid aside.
    claimed: list[LeaseReply] = field(default_factory=list)
    gradient: Floats | None = None
    loss_sum: float = 0.0


class VirtualCrew:
    """Workers and their queue; `begin_pass` and `await_pass` make one pass over the data set."""

    def __init__(
        self,
        timings: Sequence[Timing],
        *,
        num_examples: int,
        numerics: Numerics | None = None,
        seed: int = 0,
    ) -> None:
        self.queue = WorkQueue(stall_seconds=STALL_SECONDS)
        self.spans: list[Span] = []
        # What was sent, by kind of message: pulls, stages, leases, claims, deliveries.
        self.messages: Counter[str] = Counter()
        self._num_workers = len(timings)
        self._numerics = numerics
        self._scheduler = Scheduler()
        spec = DataSpec(name="training", num_examples=num_examples, coordinated=True)
        for index, timing in enumerate(timings):
            worker = Worker(f"w{index:03}", timing, np.random.default_rng([seed, index]))
            self.queue.open(spec, worker_id=worker.worker_id)
            self._scheduler.at(0.0, partial(self._ask, worker), worker_id=worker.worker_id)
        # All ask before the first pass begins, and wait.
        while self._scheduler.step(until=0.0):
            pass

    @property
    def now(self) -> float:
        """The virtual time, in seconds."""
        return self._scheduler.now

    @property
    def num_workers(self) -> int:
        """How many there are; none dies."""
        return self._num_workers

    def begin_pass(
        self,
        pass_: int,
        *,
        num_portions: int,
        copies_max: int = 2,
        portions_per_stage: int = 1,
        scalars: Mapping[str, float] | None = None,
    ) -> None:
        """Begins a pass; copies of the last one that were beaten go on into it."""
        self.queue.begin_pass(
            pass_,
            coordinator_epoch=COORDINATOR_EPOCH,
            num_portions=num_portions,
            copies_max=copies_max,
            portions_per_stage=portions_per_stage,
            scalars=scalars or {},
        )

    def await_pass(self, pass_: int) -> AwaitPassReply:
        """Goes on until the pass is done, and returns what it came to."""
        while not (outcome := self._outcome(pass_)).complete:
            assert self._scheduler.step(), "the pass is not done and nobody has anything to do"
        return outcome

    def finish(self) -> None:
        """Goes on until nobody has anything to do: copies that were beaten end too."""
        while self._scheduler.step():
            continue

    def spans_of(self, pass_: int) -> Iterator[Span]:
        """The portions computed in a pass, in the order of their ends."""
        return (span for span in self.spans if span.pass_ == pass_)

    def _outcome(self, pass_: int) -> AwaitPassReply:
        return self.queue.await_pass(pass_, coordinator_epoch=COORDINATOR_EPOCH)

    # A worker's turns.

    def _ask(self, worker: Worker) -> None:
        """Leases a portion and computes it, or lays aside what is claimed and waits."""
        self.messages["lease"] += 1
        answer = self.queue.lease(worker.worker_id, INCARNATION, pass_=None, now=self.now)
        if answer.outcome != LeaseReply.OUTCOME_LEASED and worker.claimed:
            self._deliver(worker)
            self.messages["lease"] += 1
            answer = self.queue.lease(worker.worker_id, INCARNATION, pass_=None, now=self.now)
        if answer.outcome != LeaseReply.OUTCOME_LEASED:
            wake = partial(self._scheduler.at, 0.0, partial(self._ask, worker), worker_id=worker.worker_id)
            self.queue.announce(worker.worker_id, wake)
            answer = self.queue.lease(worker.worker_id, INCARNATION, pass_=None, now=self.now, wake=wake)
        if answer.outcome == LeaseReply.OUTCOME_LEASED:
            self._begin(worker, answer)

    def _begin(self, worker: Worker, leased: LeaseReply) -> None:
        if worker.pulled_in != pass_of(leased):
            # What was claimed in a pass that is over is void.
            self._forget(worker)
            worker.pulled_in = pass_of(leased)
            self.messages["pull"] += 1
            if self._numerics is not None:
                worker.parameters = self._numerics.pull()
        seconds = portion_of(leased).num_examples * worker.timing(worker.portions, worker.random)
        worker.portions += 1
        ends = partial(self._end, worker, leased, self.now)
        self._scheduler.at(self.now + seconds, ends, worker_id=worker.worker_id)

    def _end(self, worker: Worker, leased: LeaseReply, started: float) -> None:
        self.messages["claim"] += 1
        claim = self.queue.claim(worker.worker_id, INCARNATION, leased.portion.lease_id, now=self.now)
        self.spans.append(
            Span(worker.worker_id, pass_of(leased), portion_of(leased), started, self.now, counted=claim.accepted)
        )
        if claim.accepted:
            self._gather(worker, leased)
        if len(worker.claimed) >= max(1, leased.portions_per_stage):
            self._deliver(worker)
        self._ask(worker)

    def _gather(self, worker: Worker, leased: LeaseReply) -> None:
        worker.claimed.append(leased)
        if self._numerics is not None:
            assert worker.parameters is not None
            computed = self._numerics.compute(worker.parameters, portion_of(leased))
            worker.loss_sum += computed.loss_sum
            worker.gradient = computed.gradient if worker.gradient is None else worker.gradient + computed.gradient

    def _deliver(self, worker: Worker) -> None:
        """Lays aside what was gathered, and says so."""
        first = min(worker.claimed, key=lambda leased: leased.portion.portion_id)
        self.messages["stage"] += 1
        if self._numerics is not None and worker.gradient is not None:
            self._numerics.stage(
                Stage(pass_of(first), first.portion.lease_id, first.portion.portion_id, worker.gradient)
            )
        self.messages["deliver"] += 1
        self.queue.deliver(
            worker.worker_id,
            INCARNATION,
            [leased.portion.lease_id for leased in worker.claimed],
            stage_id=first.portion.lease_id,
            loss_sum=worker.loss_sum,
            example_count=sum(portion_of(leased).num_examples for leased in worker.claimed),
            now=self.now,
        )
        self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        worker.claimed, worker.gradient, worker.loss_sum = [], None, 0.0
