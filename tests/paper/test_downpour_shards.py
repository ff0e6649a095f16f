"""Downpour SGD in virtual time: Dean et al., Large Scale Distributed Deep Networks (NIPS 2012), section 4.1.

Shards run independently of each other and so do model replicas. The invariants D1 to D3 and D6 to D8 of the
algorithm notes, section 2.3; D5 over a network is in tests/integration/test_downpour_traffic.py.
"""

import numpy as np
import pytest

from pyps.core.receipt import Outcome
from pyps.simulation.event import Kind
from pyps.simulation.server import ServerPlan
from pyps.simulation.simulation import WorkerPlan, fixed, lognormal
from shards import pull, replay
from simulated import Cluster, cluster, name, noisy, worker_plans

ADAGRAD = {"rule": "adagrad", "settings": {"learning_rate": 0.1}}


def order_of(run: Cluster, shard_id: int) -> list[tuple[str, int]]:
    """Who pushed what to the shard, in the order in which it was applied."""
    return [(event.worker_id, event.receipt.sequence) for event in pushes(run, shard_id) if event.receipt]


def pushes(run: Cluster, shard_id: int) -> list:
    return [event for event in run.events(Kind.PUSH) if event.shard_id == shard_id]


def independent_run() -> Cluster:
    """Two shards whose pushes of one step come one after the other, from workers that get in each other's way."""
    return cluster(
        "downpour",
        parameters=[np.zeros(7), np.zeros(3)],
        workers=[
            *worker_plans(2, lognormal(sigma=0.3)),
            # These send their shards in another order.
            *(WorkerPlan(worker_id, lognormal(sigma=0.3), shards=(1, 0)) for worker_id in "cd"),
            # This replica holds only a part of the model.
            WorkerPlan("half", lognormal(sigma=0.3), shards=(1,)),
        ],
        compute=noisy,
        server=ServerPlan(expected_workers=5, transfer_seconds=0.2),
        staleness="divide",
        **ADAGRAD,
    ).run(seconds=20.0)


def test_d1_the_versions_of_shards_may_differ():
    run = independent_run()
    assert run.shards[1].version > run.shards[0].version > 0


def test_d2_each_shard_replays_to_the_bit_though_the_orders_differ():
    run = independent_run()
    common = {*order_of(run, 0)} & {*order_of(run, 1)}
    first, second = ([push for push in order_of(run, shard_id) if push in common] for shard_id in (0, 1))
    assert first != second
    for shard_id, shard in enumerate(run.shards):
        again = run.fresh_shard(shard_id)
        replay(run.log, again)
        assert pull(again)[1].tobytes() == pull(shard)[1].tobytes()


def test_d3_a_shard_that_stands_still_delays_only_those_that_touch_it():
    def steps(*, stopped: bool) -> dict[str, int]:
        plans = [
            WorkerPlan("both", fixed(1.0)),
            WorkerPlan("first", fixed(1.0), shards=(0,)),
            WorkerPlan("second", fixed(1.0), shards=(1,)),
        ]
        run = cluster("downpour", parameters=[np.zeros(2), np.zeros(2)], workers=plans)
        if stopped:
            run.simulation.at(5.5, lambda: run.simulation.server.pause(1, 10.0))
        run.run(seconds=30.0)
        return {plan.worker_id: run.steps(plan.worker_id) for plan in plans}

    going, held_up = steps(stopped=False), steps(stopped=True)
    assert held_up["first"] == going["first"] == 30
    for touching in ("both", "second"):
        assert held_up[touching] == pytest.approx(20, abs=1)


def test_d6_a_dead_replica_costs_its_own_work_and_nobody_elses():
    """The others' rate stays within 5 %: here exactly, since nobody waits for anybody."""

    def steps(dies_at: float) -> dict[str, int]:
        plans = [*worker_plans(3, lognormal(sigma=0.2)), WorkerPlan("dead", fixed(1.0), dies_at=dies_at)]
        run = cluster("downpour", workers=plans, server=ServerPlan(lease_seconds=3.0)).run(seconds=50.0)
        # Whatever it had pushed counts; what it was computing is lost.
        assert run.shards[0].version == sum(run.steps(plan.worker_id) for plan in plans)
        return {plan.worker_id: run.steps(plan.worker_id) for plan in plans}

    lived, died = steps(float("inf")), steps(10.5)
    assert died.pop("dead") == 10
    lived.pop("dead")
    assert died == lived


def test_d7_a_push_torn_by_death_is_on_some_shards_and_shows_in_the_versions():
    plans = [WorkerPlan("a", fixed(1.0), dies_at=1.5), WorkerPlan("b", fixed(3.0), steps=2)]
    # Three messages of 0.2 s each: at 1.5 s the third is still under way.
    server = ServerPlan(transfer_seconds=0.2)
    run = cluster("downpour", parameters=[[0.0], [0.0], [0.0]], workers=plans, server=server).run()
    of_a = [event.shard_id for event in run.events(Kind.PUSH, "a")]
    assert of_a == [0, 1]
    assert [shard.version for shard in run.shards] == [3, 3, 2]
    assert [run.parameters(shard_id).tolist() for shard_id in range(3)] == [[-3.0], [-3.0], [-2.0]]


def test_d8_a_restarted_replica_pulls_first_and_nothing_is_applied_twice():
    plans = [
        WorkerPlan("a", fixed(1.0), dies_at=3.5),
        # The same worker in its second life: its sequences restart.
        WorkerPlan("a", fixed(1.0), joins_at=5.0, incarnation=2, steps=4),
        WorkerPlan("b", fixed(1.1), steps=9),
    ]
    run = cluster("downpour", workers=plans, server=ServerPlan(lease_seconds=30.0)).run()
    first_life = [event for event in run.simulation.events if event.worker_id == "a" and event.time < 5.0]
    second_life = [event for event in run.simulation.events if event.worker_id == "a" and event.time >= 5.0]
    assert [event.kind for event in second_life][:3] == [Kind.JOIN, Kind.PULL, Kind.PUSH]
    # It computes on what it pulled, not on what the first life held.
    pulled, pushed = second_life[1:3]
    assert pushed.version == pulled.version > first_life[-2].version
    outcomes = [receipt.outcome for receipt in run.simulation.receipts()]
    assert outcomes == [Outcome.APPLIED] * (3 + 4 + 9)
    assert run.parameters().tolist() == [-(3.0 + 4 + 9)]


def test_warm_start_trains_alone_and_then_lets_the_others_in_with_the_slots_as_they_are():
    run = cluster("downpour", warmup="updates=12,protocol=serial", parameters=[np.zeros(4)], compute=noisy, **ADAGRAD)
    run.run(pushes=60)
    workers = [event.worker_id for event in run.events(Kind.PUSH)]
    # In turn at first, all fresh; then at once, and stale.
    assert workers[:12] == [name(index % 4) for index in range(12)]
    assert set(run.staleness()[:12]) == {0}
    assert max(run.staleness()[12:]) == 3
    again = run.fresh_shard()
    replay(run.log, again)
    assert again.state().slots["accumulator"].tobytes() == run.shards[0].state().slots["accumulator"].tobytes()
