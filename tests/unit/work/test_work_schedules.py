"""Whatever dies or loses answers: every example of a pass counts once (B1 and D9), and nobody sleeps for ever."""

import copy
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import pytest

from pyps.work import WorkQueue
from pyps_wire.work_pb2 import LeaseReply
from shards import begin_pass, coordinated_queue, counted, examples_of, is_leased, pass_of, plain_queue


@dataclass
class Worker:
    """A worker as chance leads it."""

    name: str
    incarnation: int
    pass_: int = 0
    # What it knows that it holds: leases with their sizes; of coordinated work those that it may stage.
    held: dict[int, LeaseReply] = field(default_factory=dict)
    claimed: dict[int, LeaseReply] = field(default_factory=dict)
    # Not None while it waits.
    wake: Callable[[], None] | None = None
    woken: bool = False


class Chance:
    """Drives a queue through a random schedule of everything that can happen; the same for the same seed.

    After every step it holds that whoever waits and was not woken would still get nothing.
    """

    def __init__(self, queue: WorkQueue, *, seed: int, num_workers: int = 4, passes: int = 0) -> None:
        self.queue = queue
        # How many all of them go through; 0 where they do not say.
        self.passes = passes
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
        self.incarnations += 1
        return Worker(name, self.incarnations)

    def step(self, *, quiet: bool = False) -> None:
        self.now += self.random.random()
        place = self.random.randrange(len(self.workers))
        worker = self.workers[place]
        accident = 0.0 if quiet else self.random.random()
        if accident > 0.97:
            # Killed: its lease runs out now, or its next life comes first.
            if self.random.random() < 0.5:
                self.queue.release(worker.name, lost=True)
            self.end_wait(worker)
            self.workers[place] = self.born(worker.name)
        elif accident > 0.95:
            # Silent for too long, and goes on with what it had.
            self.queue.release(worker.name, lost=True)
        elif accident > 0.94:
            self.now += 1000.0
        elif accident > 0.92:
            self.queue.tick(self.now)
        elif worker.wake is not None and not worker.woken:
            if accident > 0.9:
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
        if worker.wake is None:

            def wake() -> None:
                worker.woken = True

            worker.wake = wake
            self.queue.announce(worker.name, wake)
        worker.woken = False
        answer = self.queue.lease(
            worker.name,
            worker.incarnation,
            pass_=worker.pass_,
            passes=self.passes,
            now=self.now,
            wake=worker.wake,
            held={*worker.held, *worker.claimed},
        )
        if answer.outcome == LeaseReply.OUTCOME_NOTHING_NOW:
            # One that holds something must not wait for itself for ever: it goes on with that.
            if worker.held or worker.claimed:
                self.end_wait(worker)
            return
        self.end_wait(worker)
        if answer.outcome == LeaseReply.OUTCOME_PASS_DONE:
            assert pass_of(answer) == worker.pass_
            worker.pass_ += 1
        elif is_leased(answer) and not lose_answer:
            worker.held[answer.portion.lease_id] = answer
        else:
            assert lose_answer or answer.outcome == LeaseReply.OUTCOME_ENDED

    def give(self, worker: Worker) -> None:
        lease_id = self.random.choice(list(worker.held))
        leased = worker.held.pop(lease_id)
        if not self.queue.spec.coordinated:
            self.deliver(worker, [leased])
        elif self.queue.claim(worker.name, worker.incarnation, lease_id, now=self.now).accepted:
            assert self.queue.claim(worker.name, worker.incarnation, lease_id, now=self.now).accepted
            worker.claimed[lease_id] = leased

    def deliver(self, worker: Worker, all_of: list[LeaseReply]) -> None:
        """A worker delivers portions, now and then twice."""
        self.stages += 1
        leases = [leased.portion.lease_id for leased in all_of]
        examples = sum(examples_of(leased) for leased in all_of)
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
        if worker.wake is not None:
            self.queue.forget(worker.wake)
        worker.wake, worker.woken = None, False

    def check_waits(self) -> None:
        """Nobody sleeps while there is something for it."""
        for worker in self.workers:
            if worker.wake is None or worker.woken:
                continue
            # What it would be told, asked of a copy.
            lock = self.queue._calls.lock
            queue = copy.deepcopy(self.queue, {id(lock): lock})
            asking = queue._enter(worker.name, worker.incarnation)
            answer = queue._answer(asking, worker.pass_, passes=self.passes, now=self.now)
            assert answer.outcome == LeaseReply.OUTCOME_NOTHING_NOW, f"{worker.name} sleeps, and would get {answer}"


def range_sum(leased: LeaseReply) -> int:
    """A loss of a portion that tells which examples are in it."""
    return sum(range(leased.portion.start, leased.portion.stop))


def finish_pass(chance: Chance, done: int) -> None:
    """Lets the workers go on without accidents until so many passes are done."""
    for _ in range(4000):
        if chance.queue.progress().passes_done >= done:
            return
        chance.step(quiet=True)
    raise AssertionError(f"the pass does not end: {chance.queue.progress()}")


# More than are done.
PASSES_MAX = 1000
SEEDS = (0, 1, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(2, 24)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("ahead", "restarts"), [(0, 0), (1, 0), (3, 0), (0, 5), (2, 5)])
def test_plain_passes_count_each_example_once_across_restarts_of_the_server(seed, ahead, restarts):
    options = {"stall_seconds": 100.0, "epochs_ahead": lambda: ahead}
    chance = Chance(plain_queue(57, 4, **options), seed=seed, passes=PASSES_MAX)
    for life in range(1, restarts + 1):
        for _ in range(80):
            chance.step()
        kept = json.loads(json.dumps(chance.queue.state()))
        for _ in range(20):
            # Happens after the checkpoint, and is forgotten.
            chance.step()
        chance.queue = WorkQueue(first_lease=life * 10_000, **options)
        chance.queue.restore(kept)
        for worker in chance.workers:
            worker.wake = None
    for _ in range(0 if restarts else 400):
        chance.step()
    finish_pass(chance, chance.queue.progress().passes_done + 1)
    progress = chance.queue.progress()
    assert progress.passes_done >= 1
    for pass_ in range(max(0, chance.queue.pass_ - 7), progress.passes_done):
        assert counted(chance.queue, pass_) == list(range(57))


@pytest.mark.parametrize("seed", SEEDS)
def test_coordinated_passes_count_each_example_once(seed):
    num_examples = 43
    chance = Chance(coordinated_queue(num_examples, stall_seconds=100.0), seed=seed)
    for pass_ in range(1, 5):
        begin_pass(chance.queue, pass_, num_portions=11, copies_max=1 + pass_ % 3)
        chance.accepted.clear()
        woken: list[bool] = []
        outcome = chance.queue.await_pass(pass_, coordinator_epoch=1, wake=lambda woken=woken: woken.append(True))
        assert not outcome.complete
        for _ in range(60):
            chance.step()
        finish_pass(chance, pass_)
        outcome = chance.queue.await_pass(pass_, coordinator_epoch=1)
        assert woken
        assert outcome.complete
        assert outcome.example_count == num_examples
        assert counted(chance.queue, pass_) == list(range(num_examples))
        # The stages to fold are those that were accepted, and each holds other examples.
        assert set(outcome.stage_ids) == set(chance.accepted)
        assert sum(examples for _, examples in chance.accepted.values()) == num_examples
        assert outcome.loss_sum == sum(range(num_examples))


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_a_pass_that_is_given_up_leaves_nothing_in_the_next(seed):
    chance = Chance(coordinated_queue(30, stall_seconds=100.0), seed=seed)
    for pass_ in range(1, 8):
        begin_pass(chance.queue, pass_, num_portions=7)
        chance.accepted.clear()
        for _ in range(15):
            # The workers go on with what they have of the pass before.
            chance.step()
    finish_pass(chance, chance.queue.progress().passes_done + 1)
    outcome = chance.queue.await_pass(7, coordinator_epoch=1)
    assert outcome.example_count == 30
    assert counted(chance.queue, 7) == list(range(30))


def test_threads_share_passes_and_none_sleeps_for_ever():
    queue, passes = plain_queue(200, 3, stall_seconds=1e9), 5

    def work(name: str) -> None:
        for pass_ in range(passes):
            while True:
                woken = threading.Event()
                wake = woken.set
                queue.announce(name, wake)
                ask = partial(queue.lease, name, 1, pass_=pass_, wake=wake)
                while (answer := ask(now=time.monotonic())).outcome == LeaseReply.OUTCOME_NOTHING_NOW:
                    assert woken.wait(60), f"{name} sleeps: {queue.progress()}"
                    woken.clear()
                if not is_leased(answer):
                    break
                examples = examples_of(answer)
                done = queue.deliver(name, 1, [answer.portion.lease_id], example_count=examples, now=time.monotonic())
                assert done.accepted

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, f"w{index}") for index in range(8)]:
            done.result(120)
    for pass_ in range(passes):
        assert counted(queue, pass_) == list(range(200))
