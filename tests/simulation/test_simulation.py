"""Servers and workers as they are, through faults that seeds draw; `python -m tests.simulation` plays more of them."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import play, shrunk
from tests.simulation.mutants import MUTANTS
from tests.simulation.plan import Fault, Plan, draw
from tests.simulation.play import History, simulated

ONE = {"num_servers": 1, "protocol": "async", "exchange_share": 0.5, "switch_share": 0.0, "final": "crash"}
# Rare ones that were not allowed once.
FOUND = {
    "a server that comes back without a checkpoint asks its standby": Plan(
        seed=2969,
        checkpoint_seconds=3.0,
        steps=(1, 1),
        faults=(Fault("power", "server-0", "disk", 33, 6.0),),
        standby=True,
        unaware=True,
        **ONE,
    ),
    "a standby that has ended may have taken over before": Plan(
        seed=2606,
        checkpoint_seconds=0.3,
        steps=(4, 4),
        faults=(Fault("hold", "server-1", "message", 110, 6.0), Fault("crash", "server-1", "disk", 62, 6.0)),
        standby=True,
        **ONE,
    ),
    "a server that has begun again and serves nobody tells workers no epoch": draw(2894),
}

# About a minute with all tests of this file, on two processes.
HISTORIES = 1000


@pytest.mark.parametrize("part", range(10))
def test_histories_with_faults_are_allowed(part):
    each = HISTORIES // 10
    report = play(range(part * each, (part + 1) * each))
    assert not [f"{plan}\n{failures[0]}" for plan, failures in report.failures]
    # The few of which nothing was saved yet end early.
    assert report.histories == each and report.lost < each // 5
    assert len(report.marks) > each // 2


@pytest.mark.parametrize("plan", FOUND.values(), ids=FOUND)
def test_rare_histories_are_allowed(plan):
    with simulated():
        assert not History(plan).play().world.failures


def test_a_seed_is_one_history():
    with simulated():
        for seed in range(30):
            first, again = History(draw(seed)).play(), History(draw(seed)).play()
            assert first.world.trace_hash == again.world.trace_hash, seed
            assert len(first.world.trace) > 50, seed


def test_a_failing_plan_becomes_small():
    mutant = next(each for each in MUTANTS if each.name == "no receipt is kept")
    with simulated(), mutant.seeded():
        plan = next(
            plan for plan in map(draw, range(100)) if len(plan.faults) > 1 and History(plan).play().world.failures
        )
    with mutant.seeded():
        small = shrunk(plan)
        assert len(small.faults) == 1
        with simulated():
            assert History(small).play().world.failures
    with simulated():
        assert not History(small).play().world.failures


def test_each_seeded_fault_is_one_of_the_present_product():
    for mutant in MUTANTS:
        with mutant.seeded():
            pass
