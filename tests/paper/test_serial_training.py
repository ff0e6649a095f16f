"""One worker is serial training: algorithm notes 1.4, U6, and the torch oracles of 2.5.

The references are written from the formulas, in float32, not from our code.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pyps.core.arrays import Floats
from pyps.core.staleness import POLICIES
from shards import make_shard, pull, push

STEPS = 100
LENGTH = 1003
LEARNING_RATE = 0.05


@pytest.fixture(scope="module")
def target() -> Floats:
    return np.random.default_rng(5).standard_normal(LENGTH).astype(np.float32)


def loss_gradient(parameters: Floats, target: Floats) -> Floats:
    """The gradient of sum((p - t)^2 + (p - t)^4 / 4): an error in p would feed on itself."""
    difference = parameters - target
    return 2 * difference + difference * difference * difference


def trained_on_a_shard(
    rule: str, settings: dict[str, float], policy: str, target: Floats, *, late: int | None = None
) -> Floats:
    """One worker's training; with `late`, a second one's pushes between its own, each so many updates old."""
    shard = make_shard(np.zeros(LENGTH), rule=rule, settings=settings, policy=policy)
    for sequence in range(STEPS):
        version, parameters = pull(shard)
        gradient = loss_gradient(parameters, target)
        push(shard, gradient, sequence=sequence, base_version=version)
        if late is not None and version >= late:
            push(shard, gradient, worker_id="second", sequence=sequence, base_version=shard.version - late)
    return pull(shard)[1]


def sgd_by_the_formula(target: Floats) -> Floats:
    theta, alpha = np.zeros(LENGTH, np.float32), np.float32(LEARNING_RATE)
    for _ in range(STEPS):
        theta = theta - alpha * loss_gradient(theta, target)
    return theta


def adagrad_by_the_formula(target: Floats, eps: float) -> Floats:
    theta, gamma = np.zeros(LENGTH, np.float32), np.float32(LEARNING_RATE)
    sum_of_squares = np.zeros(LENGTH, np.float32)
    for _ in range(STEPS):
        g = loss_gradient(theta, target)
        sum_of_squares = sum_of_squares + g * g
        theta = theta - gamma * g / (np.sqrt(sum_of_squares) + np.float32(eps))
    return theta


def trained_by_torch(optimizer_class: type[torch.optim.Optimizer], target: Floats) -> Floats:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        theta = torch.zeros(LENGTH, requires_grad=True)
        optimizer = optimizer_class([theta], lr=LEARNING_RATE)  # type: ignore[call-arg]
        for _ in range(STEPS):
            theta.grad = torch.from_numpy(loss_gradient(theta.detach().numpy(), target))
            optimizer.step()
        return theta.detach().numpy()
    finally:
        torch.set_num_threads(threads)


def relative_difference(mine: Floats, theirs: Floats) -> float:
    return float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))


def test_one_worker_equals_the_formula_bit_for_bit_under_every_staleness_policy(target: Floats) -> None:
    """It is never stale; and a fresh gradient has weight 1 and its whole rate, whatever the policy."""
    expected = {"sgd": sgd_by_the_formula(target), "adagrad": adagrad_by_the_formula(target, 1e-10)}
    settings = {"sgd": {"learning_rate": LEARNING_RATE}, "adagrad": {"learning_rate": LEARNING_RATE, "eps": 1e-10}}
    for rule, wanted in expected.items():
        for policy in POLICIES:
            mine = trained_on_a_shard(rule, settings[rule], policy, target)
            assert mine.tobytes() == wanted.tobytes(), (rule, policy)


def test_with_a_second_worker_every_policy_that_weighs_trains_to_other_bits(target: Floats) -> None:
    """So the equality above is one of freshness: the same loop, where half of the gradients are ten updates late."""
    ends = {policy: trained_on_a_shard("sgd", {"learning_rate": 0.01}, policy, target, late=10) for policy in POLICIES}
    # A constant rate is the split's, here 1; and nobody here is late enough to be dropped.
    alike = {policy for policy, end in ends.items() if end.tobytes() == ends["none"].tobytes()}
    assert alike == {"none", "constant", "drop"}
    assert ends["divide"].tobytes() == ends["per_update"].tobytes(), "an update of one gradient"
    assert len({end.tobytes() for end in ends.values()}) == len(POLICIES) - 3


def test_sgd_agrees_with_torch(target: Floats) -> None:
    mine = trained_on_a_shard("sgd", {"learning_rate": LEARNING_RATE}, "divide", target)
    assert relative_difference(mine, trained_by_torch(torch.optim.SGD, target)) <= 1e-6


def test_adagrad_agrees_with_torch(target: Floats) -> None:
    mine = trained_on_a_shard("adagrad", {"learning_rate": LEARNING_RATE}, "divide", target)
    assert relative_difference(mine, trained_by_torch(torch.optim.Adagrad, target)) <= 1e-6
