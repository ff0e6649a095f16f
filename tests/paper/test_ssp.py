"""Stale synchronous parallel: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server" (NIPS 2013), section 2; the bound as in Petuum Bosen. Invariants R1 to R5 of the algorithm notes, 2.9.

A worker's clock is the number of steps that it has finished; the update of its step k carries clock k.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pyps.core.receipt import Outcome
from pyps.simulation.event import Kind
from pyps.simulation.server import ServerPlan
from pyps.simulation.simulation import Computed, Step, Timing, WorkerPlan, exponential, fixed, lognormal
from simulated import Cluster, cluster, name, noisy, worker_plans

L = 5
STEPS = 12
SPEEDS: dict[str, Sequence[Timing]] = {
    "a straggler": [fixed(4.0), *[fixed(1.0)] * (L - 1)],
    "all different": [fixed(1.0 + 0.37 * index) for index in range(L)],
    "now and then a long step": [lognormal(sigma=0.8)] * L,
    "no memory": [exponential()] * L,
}


def plans(speeds: Sequence[Timing], *, steps: int | None = STEPS) -> list[WorkerPlan]:
    return [replace(plan, timing=timing) for plan, timing in zip(worker_plans(L, steps=steps), speeds, strict=True)]


def clocks_at_each_pull(run: Cluster) -> list[tuple[str, Counter[str]]]:
    """Return who pulled and the clocks of all that train, at each pull."""
    clocks = Counter({worker.worker_id: 0 for worker in run.simulation.workers})
    seen = []
    for event in run.simulation.events:
        if event.kind is Kind.PUSH:
            clocks[event.worker_id] += 1
        elif event.kind is Kind.LEAVE:
            del clocks[event.worker_id]
        elif event.kind is Kind.PULL:
            seen.append((event.worker_id, Counter(clocks)))
    return seen


def test_r1_nobody_begins_a_step_more_than_s_clocks_ahead_of_the_slowest():
    """Rule 1: a worker at clock c proceeds iff c - min_q c_q <= s; so no clock is ever more than s + 1 ahead."""
    for s, speed in itertools.product((0, 1, 3), SPEEDS):
        run = cluster(f"ssp:s={s}", workers=plans(SPEEDS[speed])).run()
        leads = [clocks[worker_id] - min(clocks.values()) for worker_id, clocks in clocks_at_each_pull(run)]
        spreads = [max(clocks.values()) - min(clocks.values()) for _, clocks in clocks_at_each_pull(run)]
        assert max(leads) == s, speed
        assert max(spreads) <= s + 1, speed
        assert [run.steps(name(index)) for index in range(L)] == [STEPS] * L
        # What the bound is not: while one step runs, each of the others may finish as many as 2s + 1.
        assert s < max(run.staleness()) <= (2 * s + 1) * (L - 1), (s, speed)
        assert all(receipt.outcome == Outcome.APPLIED for receipt in run.simulation.receipts())


class Tags:
    """Gradients that leave a mark: step k of worker l adds 1 to parameter (l, k) and touches no other."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, np.ndarray]] = []

    def __call__(self, step: Step) -> Computed:
        worker = ord(step.worker_id) - ord("a")
        self.seen.append((worker, step.number, step.parameters[0].reshape(L, STEPS)))
        mark = np.zeros((L, STEPS), np.float32)
        mark[worker, step.number] = -1.0
        return Computed({0: mark.ravel()})


def test_r2_r3_a_read_at_clock_c_contains_all_updates_of_clock_c_less_s_less_1_and_before_and_its_own():
    """Rule 2: a read may contain newer ones, and each update once. Rule 3, read-my-writes: exactly its own steps."""
    for s, speed in itertools.product((0, 1, 3), SPEEDS):
        tags = Tags()
        cluster(f"ssp:s={s}", parameters=[np.zeros(L * STEPS)], workers=plans(SPEEDS[speed]), compute=tags).run()
        assert len(tags.seen) == L * STEPS
        for worker, clock, visible in tags.seen:
            assert (visible[:, : max(0, clock - s)] == 1).all(), (s, speed)
            assert np.isin(visible, (0, 1)).all(), (s, speed)
            assert visible[worker].tolist() == [1.0] * clock + [0.0] * (STEPS - clock), (s, speed)


@pytest.mark.parametrize(("protocol", "newer"), [("ssp:s=1", True), ("ssp:s=0,strict_bsp=true", False)])
def test_a_read_may_contain_updates_of_its_own_clock_unless_strict(protocol, newer):
    """Reads are eager; under strict_bsp they are served from the barrier's snapshot."""
    tags = Tags()
    cluster(protocol, parameters=[np.zeros(L * STEPS)], workers=plans(SPEEDS["no memory"]), compute=tags).run()
    assert any(visible[:, clock:].any() for _, clock, visible in tags.seen) == newer


@pytest.mark.parametrize("rule", ["sgd", "momentum"])
@pytest.mark.parametrize("num_workers", [2, 4, 8])
def test_r4_strict_bsp_is_hardsync_at_the_lth_part_of_the_rate(num_workers, rule):
    """SSP adds updates up where hardsync takes their mean. Bit for bit: an L that is a power of 2 rounds nothing."""
    ends = {}
    for protocol, rate in (("ssp:s=0,strict_bsp=true", 0.3 / num_workers), ("hardsync:weighting=equal", 0.3)):
        run = cluster(
            protocol,
            parameters=[np.linspace(-1, 1, 33)],
            workers=worker_plans(num_workers, lognormal(sigma=0.5), steps=20),
            compute=noisy,
            rule=rule,
            settings={"learning_rate": rate},
        ).run()
        assert run.shards[0].version == 20
        ends[protocol] = run.parameters().tobytes()
    assert len(set(ends.values())) == 1


@pytest.mark.parametrize("protocol", ["ssp:s=2", "ssp:s=0,strict_bsp=true"])
def test_r5_the_others_go_on_when_the_lease_of_a_dead_worker_has_run_out(protocol):
    """A worker that dies leaves the clock set, else all would wait for it for ever."""
    workers = worker_plans(4, steps=40)
    workers[1] = replace(workers[1], steps=None, dies_at=10.5)
    run = cluster(protocol, workers=workers, server=ServerPlan(expected_workers=4, lease_seconds=30.0)).run()
    (expiry,) = run.events(Kind.EXPIRE)
    assert (expiry.worker_id, round(expiry.time, 3)) == ("b", 40.5)
    # As far as the bound lets them, and then nothing until the lease runs out.
    assert not [event for event in run.events(Kind.PUSH) if 15 < event.time < 40.5]
    assert [run.steps(worker_id) for worker_id in "acd"] == [40, 40, 40]


def test_r5_nobody_waits_for_a_worker_that_has_finished():
    workers = [replace(plan, steps=5 * (index + 1)) for index, plan in enumerate(worker_plans(4))]
    run = cluster("ssp:s=1", workers=workers).run()
    assert [run.steps(name(index)) for index in range(4)] == [5, 10, 15, 20]
    assert run.simulation.events[-1].time == 20.0


def test_a_waiting_worker_knows_the_workers_that_it_waits_for():
    run = cluster("ssp:s=1", workers=plans(SPEEDS["a straggler"])).run()
    assert {event.note for event in run.events(Kind.WAIT) if event.time > 0} == {"for a"}
