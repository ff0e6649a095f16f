"""Whatever dies or loses answers: every example of a pass counts once (B1 and D9), and nobody sleeps for ever."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyps.work import Leased, NothingNow, WorkQueue
from work_crews import Chance, begin, coordinated, counted, plain


def finish_pass(chance: Chance, done: int) -> None:
    """Lets the workers go on without accidents until so many passes are done."""
    for _ in range(4000):
        if chance.queue.progress(chance.now).passes_done >= done:
            return
        chance.step(quiet=True)
    raise AssertionError(f"the pass does not end: {chance.queue.progress(chance.now)}")


SEEDS = (0, 1, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(2, 24)))


@pytest.mark.parametrize("seed", SEEDS)
def test_plain_passes_count_each_example_once(seed):
    chance = Chance(plain(57, 4, stall_seconds=100.0), seed=seed)
    for _ in range(400):
        chance.step()
    finish_pass(chance, chance.queue.progress(0.0).passes_done + 1)
    progress = chance.queue.progress(chance.now)
    done = range(max(0, progress.passes_done - 8), progress.passes_done)
    assert progress.passes_done >= 2
    for pass_ in done:
        assert counted(chance.queue, pass_) == list(range(57))


@pytest.mark.parametrize("seed", SEEDS[1:])
def test_plain_passes_count_each_example_once_across_restarts_of_the_server(seed):
    chance = Chance(plain(40, 3, stall_seconds=100.0), seed=seed)
    for life in range(1, 6):
        for _ in range(80):
            chance.step()
        kept = json.loads(json.dumps(chance.queue.state()))
        for _ in range(20):
            # Happens after the checkpoint, and is forgotten.
            chance.step()
        chance.queue = WorkQueue(stall_seconds=100.0, first_lease=life * 10_000)
        chance.queue.restore(kept)
        for worker in chance.workers:
            worker.wake = None
    finish_pass(chance, chance.queue.progress(0.0).passes_done + 1)
    progress = chance.queue.progress(chance.now)
    assert progress.passes_done >= 1
    for pass_ in range(max(0, progress.passes_done - 8), progress.passes_done):
        assert counted(chance.queue, pass_) == list(range(40))


@pytest.mark.parametrize("seed", SEEDS)
def test_coordinated_passes_count_each_example_once(seed):
    num_examples = 43
    chance = Chance(coordinated(num_examples, stall_seconds=100.0), seed=seed)
    for pass_ in range(1, 5):
        begin(chance.queue, pass_, num_portions=11, copies_max=1 + pass_ % 3, now=chance.now)
        chance.accepted.clear()
        woken: list[bool] = []
        outcome = chance.queue.await_pass(
            pass_, coordinator_epoch=1, now=0.0, wake=lambda woken=woken: woken.append(True)
        )
        assert not outcome.complete
        for _ in range(60):
            chance.step()
        finish_pass(chance, pass_)
        outcome = chance.queue.await_pass(pass_, coordinator_epoch=1, now=0.0)
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
    chance = Chance(coordinated(30, stall_seconds=100.0), seed=seed)
    for pass_ in range(1, 8):
        begin(chance.queue, pass_, num_portions=7, now=chance.now)
        chance.accepted.clear()
        for _ in range(15):
            # The workers go on with what they have of the pass before.
            chance.step()
    finish_pass(chance, chance.queue.progress(0.0).passes_done + 1)
    outcome = chance.queue.await_pass(7, coordinator_epoch=1, now=0.0)
    assert outcome.example_count == 30
    assert counted(chance.queue, 7) == list(range(30))


def test_threads_share_passes_and_none_sleeps_for_ever():
    queue, passes = plain(200, 3, stall_seconds=1e9), 5

    def work(name: str) -> None:
        for pass_ in range(passes):
            while True:
                woken = threading.Event()
                answer = queue.lease(name, 1, pass_=pass_, now=time.monotonic(), wake=woken.set)
                while isinstance(answer, NothingNow):
                    assert woken.wait(60), f"{name} sleeps: {queue.progress(0.0)}"
                    woken.clear()
                    answer = queue.lease(name, 1, pass_=pass_, now=time.monotonic(), wake=woken.set, again=True)
                if not isinstance(answer, Leased):
                    break
                examples = answer.portion.num_examples
                done = queue.deliver(name, 1, [answer.lease_id], example_count=examples, now=time.monotonic())
                assert done.accepted

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, f"w{index}") for index in range(8)]:
            done.result(120)
    for pass_ in range(passes):
        assert counted(queue, pass_) == list(range(200))
