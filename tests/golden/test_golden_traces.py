"""Whole stories of several workers, told line by line: every join, wait, pull, push and departure, with its time.

Each trace lies beside this file; a change of behaviour shows as a changed line. `pytest tests/golden --regenerate`
writes them anew; the commit then explains each change.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from pyps.simulation.server import ServerPlan
from pyps.simulation.simulation import WorkerPlan, fixed
from simulated import Cluster, cluster, worker_plans

FOLDER = Path(__file__).parent

ONE_DIES_ONE_IS_LATE = [
    WorkerPlan("a", fixed(1.0), steps=4),
    WorkerPlan("b", fixed(1.5), steps=4),
    WorkerPlan("dies", fixed(1.2), dies_at=2.0),
    WorkerPlan("late", fixed(1.0), joins_at=4.0, steps=2),
]
SHORT_LEASE = ServerPlan(expected_workers=3, lease_seconds=3.0)
ONE_IS_SLOW = [
    WorkerPlan("a", fixed(1.0), steps=6),
    WorkerPlan("b", fixed(1.1), steps=6),
    WorkerPlan("slow", fixed(3.0), steps=3),
]


def asynchronous() -> Cluster:
    """Every push is an update; the slow worker's gradients are old, and divided by their age."""
    return cluster("async", staleness="divide", workers=ONE_IS_SLOW).run()


def softsync() -> Cluster:
    """Four workers, n = 2: an update of every two gradients, whoever sent them, until one dies and L is three."""
    plans = [*ONE_DIES_ONE_IS_LATE[:3], WorkerPlan("slow", fixed(2.5), steps=3)]
    server = ServerPlan(expected_workers=4, lease_seconds=3.0)
    return cluster("softsync:n=2", staleness="divide", workers=plans, server=server).run()


def hardsync() -> Cluster:
    """One dies inside a barrier: the others wait for its lease, then go on; a late one counts from its first push."""
    return cluster("hardsync", workers=ONE_DIES_ONE_IS_LATE, server=SHORT_LEASE).run()


def backup() -> Cluster:
    """The first two of three gradients make the update; the slow worker's come late and are dropped."""
    return cluster("backup:b=1", workers=ONE_IS_SLOW).run()


def ssp() -> Cluster:
    """Nobody gets more than one step ahead of the slowest."""
    return cluster("ssp:s=1", workers=ONE_IS_SLOW).run()


def ssp_with_a_death() -> Cluster:
    """The dead worker's clock stands still, and so do the others until its lease has run out."""
    return cluster("ssp:s=1", workers=ONE_DIES_ONE_IS_LATE, server=SHORT_LEASE).run()


def serial() -> Cluster:
    """One computes at a time, in turn; the turn of one that has left goes to the next."""
    return cluster(
        "serial", workers=[WorkerPlan("a", steps=3), WorkerPlan("b", fixed(2.0), steps=1), WorkerPlan("c", steps=2)]
    ).run()


def warm_up() -> Cluster:
    """Four updates in turn, then async; each worker is let in two updates after the one before."""
    return cluster("async", warmup="updates=4,protocol=serial,release_every=2", workers=worker_plans(3, steps=6)).run()


def switches() -> Cluster:
    """hardsync, softsync and async in one run: what waits when a protocol goes becomes one last update of it."""
    run = cluster("hardsync", workers=[*worker_plans(2, steps=9), WorkerPlan("slow", fixed(2.5), steps=4)])
    simulation = run.simulation
    simulation.at(3.6, lambda: simulation.server.configure(protocol="softsync:n=1"))
    simulation.at(6.2, lambda: simulation.server.configure(protocol="async", staleness="divide"))
    return run.run()


STORIES = (asynchronous, softsync, hardsync, backup, ssp, ssp_with_a_death, serial, warm_up, switches)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_the_story_goes_as_it_was_written_down(story, request):
    path = FOLDER / f"{story.__name__}.txt"
    told = tell(story)
    if request.config.getoption("--regenerate", default=False):
        path.write_text(told, encoding="utf-8")
    # Lines, not one text: pytest then shows the lines that differ.
    assert told.splitlines() == path.read_text(encoding="utf-8").splitlines()


def test_no_trace_is_without_its_story():
    assert {path.stem for path in FOLDER.glob("*.txt")} == {story.__name__ for story in STORIES}


def tell(story: Callable[[], Cluster]) -> str:
    """Returns what the story is, its events, and how it ends."""
    run = story()
    ends = [
        f"shard {shard.shard_id} ends at version {shard.version} with {run.parameters(shard.shard_id).tolist()}\n"
        for shard in run.shards
    ]
    return f"# {story.__doc__}\n{run.simulation.trace()}{''.join(ends)}"
