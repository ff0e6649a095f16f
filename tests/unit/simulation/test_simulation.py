"""The virtual cluster itself: its times agree with queueing theory, and equal inputs give equal runs."""

import math
from itertools import product

import numpy as np
import pytest

from pyps.simulation.event import Kind, Scheduler
from pyps.simulation.simulation import Computed, Step, WorkerPlan, exponential, fixed, lognormal, normal, scripted
from shards import digest, replay
from simulated import cluster, noisy, ones, worker_plans


@pytest.mark.parametrize("protocol", ["async", "hardsync", "ssp:s=1", "serial"])
def test_equal_seeds_give_equal_events_and_equal_bits(protocol):
    runs = [
        cluster(protocol, parameters=[np.zeros(5)], workers=worker_plans(4, exponential()), compute=noisy, seed=seed)
        for seed in (7, 7, 8)
    ]
    one, same, other = (run.run(pushes=60) for run in runs)
    assert one.simulation.trace() == same.simulation.trace()
    assert one.parameters().tobytes() == same.parameters().tobytes()
    assert one.simulation.trace() != other.simulation.trace()


def test_another_workers_coming_does_not_change_a_workers_dice():
    def times_of_a(workers: int) -> list[float]:
        run = cluster("async", workers=worker_plans(workers, exponential(), steps=5)).run()
        return [event.time for event in run.events(Kind.PUSH, "a")]

    assert times_of_a(1) == times_of_a(6)


ROUNDS = 20


@pytest.mark.parametrize("workers", [4, 8, 30])
@pytest.mark.parametrize("timing", [exponential(), lognormal(sigma=0.5)], ids=["exponential", "lognormal"])
def test_a_hardsync_round_takes_the_largest_of_l_times(workers, timing):
    run = cluster("hardsync", workers=worker_plans(workers, timing, steps=ROUNDS), seed=3).run()
    assert run.shards[0].version == ROUNDS
    # Each worker draws from random numbers of its own.
    random = [np.random.default_rng([3, index]) for index in range(workers)]
    largest = [max(timing(step, numbers) for numbers in random) for step in range(ROUNDS)]
    assert run.simulation.now == pytest.approx(sum(largest))


def test_a_quorum_waits_for_its_grace_in_virtual_time_and_a_replay_makes_the_same_updates():
    workers = [WorkerPlan(name, fixed(4.0 if name == "c" else 1.0), steps=8) for name in "abc"]
    # The first round waits for all; a push that completes a round is no event of this kind.
    times = {0: [], 0.5: [5.5, 7.0, 8.5], 4: []}
    for (grace, expected), warmup in product(times.items(), ("", "updates=1,protocol=hardsync")):
        run = cluster(f"backup:b=1,grace={grace}", workers=workers, compute=noisy, warmup=warmup).run(seconds=8.9)
        assert [event.time for event in run.events(Kind.COMPLETE)] == expected, (grace, warmup)
        assert replay(run.log, run.fresh_shard())[-1] == digest(run.parameters()), grace


def test_times_have_the_mean_that_was_asked_for():
    random = np.random.default_rng(3)
    for timing in (normal(2.0, variation=0.1), lognormal(2.0, sigma=0.5), exponential(2.0)):
        assert np.mean([timing(step, random) for step in range(20_000)]) == pytest.approx(2.0, rel=0.03)
    assert [scripted([3.0, 1.0])(step, random) for step in range(4)] == [3.0, 1.0, 1.0, 1.0]


def test_a_worker_that_has_no_gradient_for_a_shard_pushes_nothing_to_it():
    def first_shard_only(step: Step) -> Computed:
        return Computed({0: np.ones(1, np.float32)})

    run = cluster("hardsync", parameters=[[0.0], [0.0]], workers=2, compute=first_shard_only).run(pushes=8)
    # The round counts on both shards, and changes the numbers of one.
    assert [shard.version for shard in run.shards] == [2, 2]
    assert [run.parameters(shard_id).tolist() for shard_id in range(2)] == [[-2.0], [0.0]]


def test_the_run_ends_where_it_is_told_to():
    run = cluster("async", workers=2).run(seconds=3.5)
    assert (run.simulation.now, run.shards[0].version) == (3.0, 6)
    run.run(pushes=9)
    assert run.shards[0].version == 9
    assert math.isclose(run.simulation.now, 5.0)


@pytest.mark.parametrize("protocol", ["async", "hardsync"])
def test_workers_leave_a_finished_run_also_from_a_wait_for_a_round(protocol):
    run = cluster(protocol, workers=[WorkerPlan("a"), WorkerPlan("slow", fixed(100.0))], compute=ones)
    run.simulation.at(50.0, run.simulation.server.run.finish)
    run.run()
    assert {event.worker_id for event in run.events(Kind.LEAVE)} == {"a", "slow"}


def test_at_equal_times_the_worker_whose_name_is_first_goes_first_then_what_was_asked_first():
    scheduler, called = Scheduler(), []
    for worker_id, what in (("b", "b1"), ("a", "a1"), ("b", "b2"), ("a", "a2"), ("", "operator")):
        scheduler.at(1.0, lambda what=what: called.append(what), worker_id=worker_id)  # type: ignore[misc]
    while scheduler.step():
        pass
    assert called == ["operator", "a1", "a2", "b1", "b2"]


def test_what_is_asked_for_in_the_past_is_done_now():
    scheduler, called = Scheduler(), []
    scheduler.at(5.0, lambda: scheduler.at(1.0, lambda: called.append(scheduler.now)))
    while scheduler.step():
        pass
    assert called == [5.0]


def test_an_empty_shard_is_refused_and_a_large_one_is_one():
    with pytest.raises(ValueError, match=r"parameters\[1\] holds no numbers; a simulated shard holds 1 or more"):
        cluster(parameters=[np.ones(2), np.zeros(0)])
    [shard] = cluster(parameters=[np.zeros(300_000)], workers=1).simulation.shards
    assert shard.read(lambda version, values: values.size) == 300_000
