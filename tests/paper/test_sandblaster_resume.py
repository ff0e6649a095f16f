"""Sandblaster L-BFGS, cut off wherever it can be: a coordinator that comes back takes the very same steps.

Dean et al. 2012, section 4.2, keep all vectors on the servers; the coordinator's own numbers go with each commit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from pyps.core.arrays import Floats, aligned_copy
from pyps.core.vectors.machine import MachineState
from pyps.lbfgs.optimizer import IterationReport, Lbfgs, LbfgsSettings, Summary
from pyps.lbfgs.resume import LbfgsState, Pair
from pyps_wire.errors import InvalidArgument
from sandblaster import Killed, Passes, VectorServer, VectorWorld, rosenbrock, rosenbrock_start
from shards import make_shard

FORMS = [LbfgsSettings(history=2, iterations_max=4), LbfgsSettings(history=2, iterations_max=4, line_search="wolfe")]
FORM_NAMES = ["armijo", "wolfe"]


def make_world() -> VectorWorld:
    return VectorWorld(rosenbrock_start(6))


class Life:
    """Coordinators over one world, one after the other: each begins where the one before was killed."""

    def __init__(self, world: VectorWorld, settings: LbfgsSettings) -> None:
        self.world = world
        self.settings = settings
        self.reports: list[IterationReport] = []
        self.lives = 0

    def run(self, mend: Callable[[VectorWorld], None] = lambda world: None) -> Summary:
        """Return how the last one ended; `mend` is what happens to the world between two of them."""
        while True:
            self.lives += 1
            passes = Passes(self.world, rosenbrock)
            lbfgs = Lbfgs(self.world, passes, self.settings, on_iteration=self.reports.append)
            try:
                return lbfgs.run(*self.world.attach(history=self.settings.history))
            except Killed:
                mend(self.world)


def outcome(life: Life, summary: Summary) -> tuple[object, ...]:
    """What must be the same: the end and its parameters."""
    return summary, life.world.parameters.tobytes()


def require_same(life: Life, summary: Summary, whole: Life, expected: tuple[object, ...], *, when: str) -> None:
    """The same bits, and the same reports but for one that a coordinator may not have got round to in each life."""
    assert outcome(life, summary) == expected, when
    assert set(life.reports) <= set(whole.reports), when
    assert len(life.reports) >= len(whole.reports) - life.lives + 1, when


@dataclass(frozen=True)
class Checkpoint:
    """What a server would find again."""

    parameters: dict[int, Floats]
    machine: MachineState


def checkpoint(server: VectorServer) -> Checkpoint:
    with server.machine.durable():
        parameters, vectors = {}, {}
        for shard_id, shard in server.shards.items():
            point = server.machine.parameters_to_keep(shard_id)
            parameters[shard_id] = shard.state().parameters if point is None else point.copy()
            kept = server.machine.vectors_to_keep(shard_id)
            vectors[shard_id] = {name: aligned_copy(vector) for name, vector in kept.items()}
        return Checkpoint(parameters, replace(server.machine.state(), vectors=vectors))


def restore(world: VectorWorld, server: int, saved: Checkpoint) -> None:
    shards = {shard_id: make_shard(values, shard_id=shard_id) for shard_id, values in saved.parameters.items()}
    for shard_id, shard in shards.items():
        world.shards[shard_id] = shard
    world.servers[server] = VectorServer(shards)
    world.servers[server].machine.restore(saved.machine)


@pytest.mark.parametrize(("settings", "every"), [(FORMS[0], 1), (FORMS[1], 4)], ids=FORM_NAMES)
def test_killed_at_any_moment_it_goes_on_with_the_same_bits(settings, every):
    """Before and after each server's execution of each program, and within each pass; of a variant at some of them."""
    whole = Life(make_world(), settings)
    expected = outcome(whole, whole.run())
    moments = whole.world.moment
    assert moments > 80
    for moment in range(1, moments + 1, every):
        cut = Life(make_world(), settings)
        cut.world.kill_at = moment
        require_same(cut, cut.run(), whole, expected, when=f"killed at moment {moment} of {moments}")
        assert cut.lives == 2


def test_killed_again_and_again_it_goes_on_with_the_same_bits():
    """The coordinator that comes back is killed too, while it mends what the one before left."""
    settings = LbfgsSettings(history=2, iterations_max=4)
    whole = Life(make_world(), settings)
    expected = outcome(whole, whole.run())
    for first in range(1, whole.world.moment - 10, 7):
        for later in (1, 2, 4):
            cut = Life(make_world(), settings)
            cut.world.kill_at = first

            def kill_soon(world: VectorWorld, first: int = first, later: int = later) -> None:
                if world.moment == first:
                    world.kill_at = first + later

            when = f"killed at moments {first} and {first + later}"
            require_same(cut, cut.run(kill_soon), whole, expected, when=when)
            assert cut.lives == 3


@pytest.mark.parametrize("servers", [(0, 1), (0,), (1,)])
def test_servers_restored_from_checkpoints_of_one_iteration_go_on_with_the_same_bits(servers):
    """Trial, direction and stages are gone; and what a checkpoint has is the accepted point, not the trial."""
    settings = LbfgsSettings(history=2, iterations_max=4)
    whole = Life(make_world(), settings)
    expected = outcome(whole, whole.run())
    restored = 0

    def restore_all(world: VectorWorld) -> None:
        nonlocal restored
        # While a commit is under way they are not of one iteration: the next test's.
        if len({server.machine.iteration for server in world.servers}) == 1:
            restored += 1
            for server in servers:
                restore(world, server, checkpoint(world.servers[server]))

    for moment in range(1, whole.world.moment + 1, 5):
        cut = Life(make_world(), settings)
        cut.world.kill_at = moment
        require_same(cut, cut.run(restore_all), whole, expected, when=f"killed at moment {moment}")
    assert restored > 14


def make_uneven_world(lagging: int) -> VectorWorld:
    """Servers at iterations 3 and 5: one was restored from an older checkpoint."""
    world = make_world()
    Life(world, LbfgsSettings(history=3, iterations_max=3)).run()
    saved = checkpoint(world.servers[lagging])
    Life(world, LbfgsSettings(history=3, iterations_max=5)).run()
    restore(world, lagging, saved)
    assert sorted(server.machine.iteration for server in world.servers) == [3, 5]
    return world


@pytest.mark.parametrize("lagging", [0, 1])
def test_a_server_restored_from_an_older_checkpoint_costs_the_history_and_no_more(lagging):
    """Points of two iterations are one point: it goes on from there, downwards."""
    world = make_uneven_world(lagging)
    life = Life(world, LbfgsSettings(history=10, iterations_max=120, loss_tolerance=0.0))
    summary = life.run()
    assert summary.restarts == 1
    assert (life.reports[0].iteration, life.reports[0].pairs) == (7, 0)
    losses = [report.loss for report in life.reports]
    assert losses == sorted(losses, reverse=True)
    assert summary.loss < 1e-6
    assert {server.machine.iteration for server in world.servers} == {summary.iterations}
    assert len({server.machine.names for server in world.servers}) == 1


@pytest.mark.parametrize("lagging", [0, 1])
def test_killed_while_it_brings_uneven_servers_together_it_goes_on_with_the_same_bits(lagging):
    """Commits that bring servers together count as iterations, and may be more or fewer: the steps are the same."""
    whole = Life(make_uneven_world(lagging), LbfgsSettings(history=3, iterations_max=11))
    before = whole.world.moment
    whole.run()
    losses = {report.loss for report in whole.reports}
    for moment in range(before + 1 + lagging, before + 50, 3):
        cut = Life(make_uneven_world(lagging), LbfgsSettings(history=3, iterations_max=9))
        cut.world.kill_at = moment
        cut.run()
        assert cut.lives == 2
        assert cut.reports
        assert {report.loss for report in cut.reports} <= losses, f"killed at moment {moment}"


def test_a_finished_run_stays_finished_and_goes_on_with_more_iterations():
    whole = Life(make_world(), LbfgsSettings(iterations_max=6))
    expected = whole.run()
    world = make_world()
    first = Life(world, LbfgsSettings(iterations_max=4))
    first.run()
    assert Life(world, LbfgsSettings(iterations_max=4)).run().reason == "4 iterations were requested"
    again = Life(world, LbfgsSettings(iterations_max=6))
    assert again.run() == expected
    assert [report.iteration for report in again.reports] == [5, 6]
    assert world.parameters.tobytes() == whole.world.parameters.tobytes()


def test_a_shorter_history_takes_the_newest_pairs_and_drops_the_others():
    world = make_world()
    Life(world, LbfgsSettings(history=5, iterations_max=8)).run()
    life = Life(world, LbfgsSettings(history=2, iterations_max=10))
    life.run()
    assert [report.pairs for report in life.reports] == [2, 2]
    history = [name for name in world.servers[0].machine.names if name[1:].isdigit()]
    assert len(history) == 2 * 2


def test_the_state_comes_back_from_its_text_with_the_same_bits():
    world = make_world()
    Life(world, LbfgsSettings(iterations_max=4)).run()
    _, text = world.attach()
    state = LbfgsState.from_text(text)
    assert state.to_text() == text
    assert state.iteration == 4 and len(state.pairs) == 4
    odd = LbfgsState(loss=0.1 + 0.2, pairs=(Pair(1, 1e-310, np.nextafter(1.0, 2.0)),))
    assert LbfgsState.from_text(odd.to_text()) == odd


def test_a_state_that_another_version_wrote_is_refused_in_a_sentence():
    for text in ("{", "[]", '{"format":2}', '{"format":1}', '{"format":2,"pairs":[[1]]}'):
        with pytest.raises(InvalidArgument, match=r"state on server 0 .*; start the coordinator in the version"):
            LbfgsState.from_text(text)
