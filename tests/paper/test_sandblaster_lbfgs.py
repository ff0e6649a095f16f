"""Sandblaster L-BFGS: Dean et al. (NeurIPS 2012), section 4.2, over the vector machines of several servers."""

import json
import math
from collections.abc import Mapping

import numpy as np
import pytest
from sklearn.datasets import load_digits

from pyps.core.vectors.program import GRADIENT
from pyps.lbfgs.machine import DIRECTION, VECTORS, Evaluation, allocate, dot
from pyps.lbfgs.optimizer import (
    LINE_SEARCHES,
    Found,
    IterationReport,
    Lbfgs,
    LbfgsSettings,
    Line,
    Start,
    Summary,
    quasi_newton,
)
from pyps.lbfgs.resume import Pair
from pyps_wire.errors import NotFinite
from sandblaster import NUM_PORTIONS, Doubles, Passes, PortionLoss, VectorWorld, rosenbrock, rosenbrock_start


def minimise(
    world: VectorWorld, portion_loss: PortionLoss, **settings: object
) -> tuple[Summary, list[IterationReport]]:
    chosen = LbfgsSettings(**{"loss_tolerance": 0.0, "iterations_max": 100, **settings})  # type: ignore[arg-type]
    reports: list[IterationReport] = []
    lbfgs = Lbfgs(world, Passes(world, portion_loss), chosen, on_iteration=reports.append)
    return lbfgs.run(*world.attach(history=chosen.history)), reports


def inverse_hessian_times(q: Doubles, pairs: list[tuple[Doubles, Doubles]], gamma: float) -> Doubles:
    """H q by definition, H' = (1 - rho s y') H (1 - rho y s') + rho s s' from gamma (Nocedal and Wright, 7.16)."""
    if not pairs:
        return gamma * q
    *older, (s, y) = pairs
    rho = 1.0 / (s @ y)
    right = q - rho * (s @ q) * y
    middle = inverse_hessian_times(right, older, gamma)
    return middle - rho * (y @ middle) * s + rho * (s @ q) * s


def make_history(size: int, num_pairs: int) -> tuple[Doubles, list[tuple[Doubles, Doubles]]]:
    """A gradient, and pairs as a problem gives them whose curvatures lie between 1/2 and 2."""
    random = np.random.default_rng(5)
    curvatures = random.uniform(0.5, 2.0, size)
    steps = [random.standard_normal(size) for _ in range(num_pairs)]
    return random.standard_normal(size), [(s, curvatures * s) for s in steps]


def loaded(
    gradient: Doubles, history: list[tuple[Doubles, Doubles]], **layout: int
) -> tuple[VectorWorld, tuple[Pair, ...]]:
    world = VectorWorld(np.zeros(gradient.size), **layout)
    world.attach(history=len(history))
    world.execute(*map(allocate, VECTORS))
    for s, y in history:
        world.load_pair(s, y)
    world.load(GRADIENT, gradient)
    numbers = range(1, len(history) + 1)
    products = [world.execute(dot(f"s{k}", f"y{k}"), dot(f"y{k}", f"y{k}")) for k in numbers]
    return world, tuple(Pair(k, sy, yy) for k, (sy, yy) in zip(numbers, products, strict=True))


def direction(world: VectorWorld) -> Doubles:
    machines = [server.machine._vectors for server in world.servers]
    arrays = {shard_id: vectors.arrays for machine in machines for shard_id, vectors in machine.items()}
    return np.concatenate([arrays[shard_id][DIRECTION] for shard_id in sorted(arrays)]).astype(np.float64)


@pytest.mark.parametrize(("num_pairs", "num_shards", "num_servers"), [(1, 1, 1), (2, 5, 2), (10, 1, 1), (10, 5, 2)])
def test_the_direction_is_that_of_a_single_node_in_float64(num_pairs, num_shards, num_servers):
    gradient, history = make_history(20_000, num_pairs)
    newest_s, newest_y = history[-1]
    gamma = (newest_s @ newest_y) / (newest_y @ newest_y)
    expected = -inverse_hessian_times(gradient, history, gamma)
    world, pairs = loaded(gradient, history, num_shards=num_shards, num_servers=num_servers)
    slope = quasi_newton(world, pairs)
    assert np.linalg.norm(direction(world) - expected) <= 1e-6 * np.linalg.norm(expected)
    assert slope == pytest.approx(expected @ gradient, rel=1e-6)


def test_a_history_whose_numbers_overflow_gives_no_direction():
    gradient, history = make_history(100, 2)
    world, (older, newer) = loaded(gradient, history)
    assert math.isnan(quasi_newton(world, (older, Pair(newer.number, 1e-320, newer.yy))))


def test_a_direction_takes_2_messages_whatever_the_history():
    for num_pairs in (1, 5, 10):
        world, pairs = loaded(*make_history(100, num_pairs))
        world.sent.clear()
        quasi_newton(world, pairs)
        assert (len(world.sent), sum(map(len, world.sent))) == (2, 3)


@pytest.mark.parametrize("line_search", ["armijo", "wolfe"])
def test_every_step_goes_down_and_holds_the_conditions_of_its_line_search(line_search, monkeypatch):
    search, searches = LINE_SEARCHES[line_search], []

    def watched(line: Line, start: Start, settings: LbfgsSettings) -> Found | None:
        found = search(line, start, settings)
        if found is not None:
            searches.append((start, found))
        return found

    monkeypatch.setitem(LINE_SEARCHES, line_search, watched)
    world = VectorWorld(rosenbrock_start(10))
    summary, reports = minimise(world, rosenbrock, line_search=line_search)
    assert summary.converged and summary.loss < 1e-8
    assert np.abs(world.parameters - 1.0).max() < 1e-3
    for report, (start, found) in zip(reports, searches, strict=True):
        assert start.slope < 0.0
        assert report.loss == found.loss <= start.loss + 1e-4 * found.step * start.slope
        if line_search == "wolfe":
            assert abs(found.slope) <= 0.9 * abs(start.slope)
    losses = [report.loss for report in reports]
    assert losses == sorted(losses, reverse=True)


def test_the_first_step_along_the_gradient_is_short():
    world = VectorWorld([3.0, -4.0, 2.0])
    _, reports = minimise(world, quadratic(np.array([1.0, 1.0, 1.0])), iterations_max=1)
    assert reports[0].pairs == 0
    assert reports[0].step_length == pytest.approx(1.0 / 9.0)


def test_the_number_of_shards_and_servers_changes_nothing_but_rounding():
    portion_loss, size = digits()
    ends = []
    for num_shards, num_servers in ((1, 1), (3, 2), (16, 5)):
        world = VectorWorld(np.zeros(size), num_shards=num_shards, num_servers=num_servers)
        summary, _ = minimise(world, portion_loss, iterations_max=10)
        ends.append((summary.loss, world.parameters))
    for loss, parameters in ends[1:]:
        assert loss == pytest.approx(ends[0][0], rel=1e-6)
        assert np.abs(parameters - ends[0][1]).max() <= 1e-4 * np.abs(ends[0][1]).max()


def exact(line: Line, start: Start, settings: LbfgsSettings) -> Found:
    line.loss(start.step)
    step = start.step * start.slope / (start.slope - line.slope())
    return Found(step, line.loss(step), line.slope())


@pytest.mark.parametrize("size", [2, 5, 8])
def test_a_quadratic_in_k_dimensions_takes_at_most_k_plus_1_iterations(size, monkeypatch):
    """With exact line searches and a history as long, L-BFGS is the method of conjugate gradients."""
    curvatures = np.geomspace(1.0, 20.0, size)
    start = np.random.default_rng(1).standard_normal(size)
    world = VectorWorld(start, num_shards=2)
    first = float(np.abs(sum(quadratic(curvatures)(start, 0)[1:2])).max())
    settings = {"history": size, "gradient_tolerance": 1e-5 * first}
    monkeypatch.setitem(LINE_SEARCHES, "armijo", exact)
    summary, _ = minimise(world, quadratic(curvatures), **settings)
    assert summary.converged
    assert summary.iterations <= size + 1


def test_pairs_without_curvature_are_left_out_and_counted():
    summary, reports = minimise(VectorWorld([8.0, -9.0, 7.0, 10.0]), bowl)
    skipped = sum(not report.pair_kept for report in reports)
    assert not reports[0].pair_kept
    assert (summary.converged, summary.skipped) == (True, skipped)
    assert all(report.pairs <= report.iteration - 1 - skipped for report in reports[skipped:])


def test_a_direction_along_which_the_loss_does_not_fall_gives_way_to_the_gradient_and_the_history_goes():
    world = VectorWorld(rosenbrock_start(4))
    summary, _ = minimise(world, rosenbrock, iterations_max=5)
    servers, text = world.attach()
    lie = json.loads(text)
    # Signs that no curvature test lets through: H is negative definite now.
    lie["pairs"] = [[number, -sy, yy] for number, sy, yy in lie["pairs"]]
    reports: list[IterationReport] = []
    settings = LbfgsSettings(iterations_max=8)
    after = Lbfgs(world, Passes(world, rosenbrock), settings, on_iteration=reports.append).run(servers, json.dumps(lie))
    assert [(report.restarted, report.pairs) for report in reports] == [(True, 0), (False, 1), (False, 2)]
    assert after.restarts == 1
    assert [summary.loss, *(report.loss for report in reports)] == sorted(
        [summary.loss, *(report.loss for report in reports)], reverse=True
    )
    history = [name for name in world.servers[0].machine.names if name[1:].isdigit()]
    assert len(history) == 2 * 3


class Walled(Passes):
    """Passes whose loss is not a number where a step is longer than the wall."""

    wall = 0.3

    def evaluate(self, note: Mapping[str, float]) -> Evaluation:
        evaluation = super().evaluate(note)
        if note["step_length"] <= self.wall:
            return evaluation
        return Evaluation(math.nan, evaluation.example_count, ())


@pytest.mark.parametrize("line_search", ["armijo", "wolfe"])
def test_a_trial_whose_loss_is_not_finite_is_taken_for_too_long(line_search):
    world = VectorWorld(rosenbrock_start(4))
    reports: list[IterationReport] = []
    settings = LbfgsSettings(iterations_max=15, line_search=line_search)
    passes = Walled(world, rosenbrock)
    summary = Lbfgs(world, passes, settings, on_iteration=reports.append).run(*world.attach())
    assert sum(note["step_length"] > Walled.wall for note in passes.notes) > 5
    assert all(report.step_length <= Walled.wall for report in reports)
    losses = [report.loss for report in reports]
    assert losses == sorted(losses, reverse=True)
    assert summary.iterations == 15


def test_a_loss_that_is_not_finite_at_the_very_start_is_said_in_a_sentence():
    def broken(parameters: Doubles, portion: int) -> tuple[float, Doubles, int]:
        return math.nan, np.zeros_like(parameters), 1

    with pytest.raises(NotFinite, match=r"from the first parameters: it is nan; expected finite numbers"):
        minimise(VectorWorld([1.0, 2.0]), broken)


def test_where_no_step_lowers_the_loss_the_parameters_go_back_to_the_accepted_point():
    def spike(parameters: Doubles, portion: int) -> tuple[float, Doubles, int]:
        return float((parameters != 1.0).any()), np.ones_like(parameters), 1

    world = VectorWorld([1.0, 1.0, 1.0, 1.0])
    summary, reports = minimise(world, spike)
    assert (summary.converged, reports) == (False, [])
    assert summary.reason == "no step along -g lowers the loss"
    assert (world.parameters == 1.0).all()


def test_it_ends_where_an_iteration_gains_next_to_nothing():
    summary, reports = minimise(VectorWorld(rosenbrock_start(4)), rosenbrock, loss_tolerance=0.5)
    assert summary.converged
    assert summary.reason == "the last iteration lowered the loss by no more than 0.5 of it"
    assert reports[-2].loss - reports[-1].loss <= 0.5 * reports[-1].loss


def quadratic(curvatures: Doubles, seed: int = 0) -> PortionLoss:
    """w' A w / 2 in a random basis, with these eigenvalues of A; each portion has a third of it."""
    size = curvatures.size
    basis, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))
    matrix = basis @ np.diag(curvatures) @ basis.T

    def portion_loss(parameters: Doubles, portion: int) -> tuple[float, Doubles, int]:
        gradient = matrix @ parameters
        return float(parameters @ gradient) / 2.0, gradient, 1

    return portion_loss


def bowl(parameters: Doubles, portion: int) -> tuple[float, Doubles, int]:
    """log(1 + w^2), element by element: concave beyond 1, so that far away s.y is below 0."""
    return float(np.log1p(parameters**2).sum()), 2.0 * parameters / (1.0 + parameters**2), 1


def digits() -> tuple[PortionLoss, int]:
    """Logistic regression on the digits with a little weight decay; returns it and the number of its parameters."""
    data = load_digits()
    inputs = np.hstack([data.data / 16.0, np.ones((len(data.data), 1))])
    targets = np.eye(10)[data.target]

    def portion_loss(parameters: Doubles, portion: int) -> tuple[float, Doubles, int]:
        x, t = inputs[portion::NUM_PORTIONS], targets[portion::NUM_PORTIONS]
        weights = parameters.reshape(x.shape[1], 10)
        scores = x @ weights
        scores -= scores.max(axis=1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        loss = -(t * logs).sum() + 0.5e-3 * len(x) * (weights**2).sum()
        gradient = x.T @ (np.exp(logs) - t) + 1e-3 * len(x) * weights
        return float(loss), gradient.ravel(), len(x)

    return portion_loss, inputs.shape[1] * 10
