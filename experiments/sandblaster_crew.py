"""Sandblaster's workers in virtual time, around the queue of portions that a server has.

Each worker does what the client's does: leases a portion, pulls the parameters once a pass, computes, claims, and sums
the gradients of a few claimed portions before it stages and delivers them. Messages take no time; computing does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from pyps.core.arrays import Floats
from pyps.simulation.event import Scheduler
from pyps.simulation.simulation import Timing
from pyps.work import DataSpec, Portion, WorkQueue
from pyps_wire.work_pb2 import AwaitPassReply, LeaseReply

COORDINATOR_EPOCH = INCARNATION = 1
# A coordinated queue takes nothing away from a worker that is only slow.
STALL_SECONDS = 3600.0


class Numerics(NamedTuple):
    """What workers compute with; left out where only time matters."""

    pull: Callable[[], Floats]
    # Returns the sums of a portion's gradients and losses.
    compute: Callable[[Floats, Portion], tuple[Floats, float]]
    # Takes a sum of gradients: its pass, stage and first portion.
    stage: Callable[[int, int, int, Floats], None]


class Span(NamedTuple):
    """A portion that a worker computed in a pass; False for a copy that came too late."""

    pass_: int
    worker_id: str
    portion_id: int
    counted: bool


@dataclass
class Worker:
    worker_id: str
    # Seconds an example takes.
    timing: Timing
    random: np.random.Generator
    alive: bool = True
    portions: int = 0
    # The pass in which the parameters were pulled last, and they.
    pulled_in: int = -1
    parameters: Floats | None = None
    # Claimed portions that are not delivered yet, and their sums.
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
        dies_at: Mapping[int, float] | None = None,
        lease_seconds: float = 30.0,
        seed: int = 0,
    ) -> None:
        """`dies_at`: when workers stop, by their places; what they have is taken back when their leases expire."""
        self.queue = WorkQueue(stall_seconds=STALL_SECONDS)
        self.spans: list[Span] = []
        # What was sent, by kind of message: pulls, stages, leases, claims, deliveries.
        self.messages: Counter[str] = Counter()
        self.num_workers = len(timings)
        self._numerics = numerics
        self._scheduler = Scheduler()
        spec = DataSpec(name="training", num_examples=num_examples, coordinated=True)
        for index, timing in enumerate(timings):
            worker = Worker(f"w{index:03}", timing, np.random.default_rng([seed, index]))
            self.queue.open(spec, worker_id=worker.worker_id)
            self._at(0.0, worker, partial(self._ask, worker))
            if index in (dies_at or {}):
                self._scheduler.at((dies_at or {})[index], partial(setattr, worker, "alive", False))
                lose = partial(self.queue.release, worker.worker_id, lost=True)
                self._scheduler.at((dies_at or {})[index] + lease_seconds, lose)
        # All ask before the first pass begins, and wait.
        while self._scheduler.step(until=0.0):
            pass

    @property
    def now(self) -> float:
        return self._scheduler.now

    def begin_pass(
        self,
        pass_: int,
        *,
        num_portions: int,
        copies_max: int = 2,
        portions_per_stage: int = 1,
        scalars: Mapping[str, float] | None = None,
    ) -> None:
        """Begin a pass; copies of the last one that were beaten go on into it."""
        self.queue.begin_pass(
            pass_,
            coordinator_epoch=COORDINATOR_EPOCH,
            num_portions=num_portions,
            copies_max=copies_max,
            portions_per_stage=portions_per_stage,
            scalars=scalars or {},
        )

    def await_pass(self, pass_: int) -> AwaitPassReply:
        """Go on until the pass is done, and return what it came to."""
        while not (outcome := self.queue.await_pass(pass_, coordinator_epoch=COORDINATOR_EPOCH)).complete:
            assert self._scheduler.step(), "the pass is not done and nobody has anything to do"
        return outcome

    def finish(self) -> None:
        """Go on until nobody has anything to do: copies that were beaten end too."""
        while self._scheduler.step():
            pass

    def _at(self, time: float, worker: Worker, action: Callable[[], None]) -> None:
        """Call the action at that time if the worker lives."""
        self._scheduler.at(time, lambda: action() if worker.alive else None, worker_id=worker.worker_id)

    # A worker's turns.

    def _ask(self, worker: Worker) -> None:
        """Lease a portion and compute it, or deliver what is claimed and wait."""
        lease = partial(self.queue.lease, worker.worker_id, INCARNATION, now=self.now)
        self.messages["lease"] += 1
        answer = lease()
        if answer.outcome != LeaseReply.OUTCOME_LEASED and worker.claimed:
            self._deliver(worker)
            self.messages["lease"] += 1
            answer = lease()
        if answer.outcome != LeaseReply.OUTCOME_LEASED:
            wake = partial(self._at, 0.0, worker, partial(self._ask, worker))
            self.queue.announce(worker.worker_id, wake)
            answer = lease(wake=wake)
        if answer.outcome == LeaseReply.OUTCOME_LEASED:
            self._begin(worker, answer)

    def _begin(self, worker: Worker, leased: LeaseReply) -> None:
        if worker.pulled_in != _pass(leased):
            # What was claimed in a pass that is over is void.
            self._forget(worker)
            worker.pulled_in = _pass(leased)
            self.messages["pull"] += 1
            if self._numerics is not None:
                worker.parameters = self._numerics.pull()
        examples = leased.portion.stop - leased.portion.start
        seconds = examples * worker.timing(worker.portions, worker.random)
        worker.portions += 1
        self._at(self.now + seconds, worker, partial(self._end, worker, leased))

    def _end(self, worker: Worker, leased: LeaseReply) -> None:
        self.messages["claim"] += 1
        portion = leased.portion
        counted = self.queue.claim(worker.worker_id, INCARNATION, portion.lease_id, now=self.now).accepted
        self.spans.append(Span(_pass(leased), worker.worker_id, portion.portion_id, counted))
        if counted:
            worker.claimed.append(leased)
            if self._numerics is not None and worker.parameters is not None:
                gradient, loss_sum = self._numerics.compute(
                    worker.parameters, Portion(portion.portion_id, portion.start, portion.stop, portion.lease_id)
                )
                worker.loss_sum += loss_sum
                worker.gradient = gradient if worker.gradient is None else worker.gradient + gradient
        if len(worker.claimed) >= max(1, leased.portions_per_stage):
            self._deliver(worker)
        self._ask(worker)

    def _deliver(self, worker: Worker) -> None:
        """Stage what was summed, and say so."""
        portions = [leased.portion for leased in worker.claimed]
        first = min(portions, key=lambda portion: portion.portion_id)
        self.messages["stage"] += 1
        if self._numerics is not None and worker.gradient is not None:
            self._numerics.stage(_pass(worker.claimed[0]), first.lease_id, first.portion_id, worker.gradient)
        self.messages["deliver"] += 1
        self.queue.deliver(
            worker.worker_id,
            INCARNATION,
            [portion.lease_id for portion in portions],
            stage_id=first.lease_id,
            loss_sum=worker.loss_sum,
            example_count=sum(portion.stop - portion.start for portion in portions),
            now=self.now,
        )
        self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        worker.claimed, worker.gradient, worker.loss_sum = [], None, 0.0


def _pass(leased: LeaseReply) -> int:
    # The field's name is a keyword of Python's.
    return int(getattr(leased, "pass"))
