"""Workers of a work queue that come, die, stall and lose answers as chance has it, and whoever checks them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyps.work import DataSpec, Ended, Leased, NothingNow, PassDone, WorkQueue


def spec(num_examples: int = 10, portion_examples: int = 3, **fields: Any) -> DataSpec:
    """A data set."""
    return DataSpec("train", num_examples, portion_examples, **fields)


def plain(num_examples: int = 10, portion_examples: int = 3, *, stall_seconds: float = 60.0, **more: Any) -> WorkQueue:
    """A queue of plain work that is open."""
    queue = WorkQueue(stall_seconds=stall_seconds, **more)
    queue.open(spec(num_examples, portion_examples), worker_id="opener")
    return queue


def coordinated(num_examples: int = 10, *, stall_seconds: float = 60.0, **more: Any) -> WorkQueue:
    """A queue of coordinated work that is open; no pass has begun."""
    queue = WorkQueue(stall_seconds=stall_seconds, **more)
    queue.open(spec(num_examples, 0, coordinated=True), worker_id="opener")
    return queue


def begin(queue: WorkQueue, pass_: int = 1, *, num_portions: int = 5, epoch: int = 1, **more: Any) -> None:
    """Begins a pass."""
    settings = {"copies_max": 2, "portions_per_stage": 1, "now": 0.0} | more
    queue.begin_pass(pass_, coordinator_epoch=epoch, num_portions=num_portions, **settings)


def counted(queue: WorkQueue, pass_: int) -> list[int]:
    """The examples of a pass in the delivery log, in order: each once where all is well."""
    log = queue.progress(0.0, deliveries=True).deliveries
    return sorted(example for d in log if d.pass_ == pass_ for example in range(d.portion.start, d.portion.stop))


@dataclass
class Worker:
    """A worker as chance leads it."""

    name: str
    incarnation: int
    pass_: int = 0
    # What it knows that it holds: leases with their sizes; of coordinated work those that it may stage.
    held: dict[int, Leased] = field(default_factory=dict)
    claimed: dict[int, Leased] = field(default_factory=dict)
    # Not None while it waits.
    wake: Callable[[], None] | None = None
    woken: bool = False


class Chance:
    """Drives a queue through a random schedule of everything that can happen; the same for the same seed.

    After every step it holds that whoever waits and was not woken would still get nothing.
    """

    def __init__(self, queue: WorkQueue, *, seed: int, num_workers: int = 4) -> None:
        self.queue = queue
        self.random = random.Random(seed)
        self.now = 0.0
        self.incarnations = 0
        self.workers = [self.born(f"w{index}") for index in range(num_workers)]
        self.stages = 0
        # Loss sums and examples of accepted stages, by stage.
        self.accepted: dict[int, tuple[float, int]] = {}
        # Stages that were delivered and refused.
        self.refused: set[int] = set()

    def born(self, name: str) -> Worker:
        """A new process of that name."""
        self.incarnations += 1
        return Worker(name, self.incarnations)

    def step(self, *, quiet: bool = False) -> None:
        """One thing happens to one worker: it works or, unless all is to be `quiet`, has an accident."""
        self.now += self.random.random()
        place = self.random.randrange(len(self.workers))
        worker = self.workers[place]
        accident = 0.0 if quiet else self.random.random()
        if accident > 0.97:
            # Killed: its lease runs out now, or its next life comes first.
            if self.random.random() < 0.5:
                self.queue.release(worker.name, now=self.now, lost=True)
            self.end_wait(worker)
            self.workers[place] = self.born(worker.name)
        elif accident > 0.95:
            # Silent for too long, and goes on with what it had.
            self.queue.release(worker.name, now=self.now, lost=True)
        elif accident > 0.94:
            self.now += 1000.0
        elif accident > 0.92:
            self.queue.tick(self.now)
        elif worker.wake is not None and not worker.woken:
            pass_over = accident > 0.9
            if pass_over:
                # Its call ends at the deadline, and it asks anew.
                self.end_wait(worker)
        elif worker.claimed and self.random.random() < 0.5:
            self.deliver(worker, list(worker.claimed.values()))
        elif worker.held and self.random.random() < 0.8:
            self.give(worker)
        else:
            self.ask(worker, lose_answer=accident > 0.88)
        self.check_waits()

    def ask(self, worker: Worker, *, lose_answer: bool) -> None:
        """A worker asks for work, or once more after it was woken."""
        again = worker.wake is not None
        if not again:

            def wake() -> None:
                worker.woken = True

            worker.wake = wake
        worker.woken = False
        answer = self.queue.lease(
            worker.name,
            worker.incarnation,
            pass_=worker.pass_,
            now=self.now,
            wake=worker.wake,
            held={*worker.held, *worker.claimed},
            again=again,
        )
        if isinstance(answer, NothingNow):
            # One that holds something must not wait for itself for ever: it goes on with that.
            if worker.held or worker.claimed:
                self.end_wait(worker)
            return
        self.end_wait(worker)
        if isinstance(answer, PassDone):
            assert answer.pass_ == worker.pass_
            worker.pass_ += 1
        elif isinstance(answer, Leased) and not lose_answer:
            worker.held[answer.lease_id] = answer
        else:
            assert lose_answer or isinstance(answer, Ended)

    def give(self, worker: Worker) -> None:
        """A worker is done with a portion."""
        lease_id = self.random.choice(list(worker.held))
        leased = worker.held.pop(lease_id)
        if not self.queue.spec.coordinated:
            self.deliver(worker, [leased])
        elif self.queue.claim(worker.name, worker.incarnation, lease_id, now=self.now).granted:
            assert self.queue.claim(worker.name, worker.incarnation, lease_id, now=self.now).granted
            worker.claimed[lease_id] = leased

    def deliver(self, worker: Worker, all_of: list[Leased]) -> None:
        """A worker delivers portions, now and then twice."""
        self.stages += 1
        leases = [leased.lease_id for leased in all_of]
        examples = sum(leased.portion.num_examples for leased in all_of)
        loss = float(sum(range_sum(leased) for leased in all_of))
        for _ in range(self.random.choice((1, 1, 2))):
            delivery = self.queue.deliver(
                *(worker.name, worker.incarnation, leases),
                stage_id=self.stages if self.queue.spec.coordinated else 0,
                loss_sum=loss,
                example_count=examples,
                now=self.now,
            )
            if delivery.accepted:
                assert self.stages not in self.refused
                self.accepted[self.stages] = (loss, examples)
            else:
                assert self.stages not in self.accepted
                assert delivery.message
                self.refused.add(self.stages)
        worker.claimed = {}

    def end_wait(self, worker: Worker) -> None:
        """A call ends."""
        if worker.wake is not None:
            self.queue.forget(worker.wake)
        worker.wake, worker.woken = None, False

    def check_waits(self) -> None:
        """Nobody sleeps while there is something for it."""
        for worker in self.workers:
            if worker.wake is None or worker.woken:
                continue
            # What it would be told, asked of a copy.
            state = copy.deepcopy(self.queue._state)
            hand, _ = state.crew.enter(worker.name, worker.incarnation)
            answer = state.answer(hand, worker.pass_, now=self.now)
            assert isinstance(answer, NothingNow), f"{worker.name} sleeps, and would get {answer}"


def range_sum(leased: Leased) -> int:
    """A loss of a portion that tells which examples are in it."""
    return sum(range(leased.portion.start, leased.portion.stop))
