"""One worker is serial training: algorithm notes 1.4, U6, and the torch oracles of 2.5.

The references are written from the formulas, in float32, not from our code.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pyps.core.arrays import Floats
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


def trained_on_a_shard(rule: str, settings: dict[str, float], policy: str, target: Floats) -> Floats:
    shard = make_shard(np.zeros(LENGTH), rule=rule, settings=settings, policy=policy)
    for sequence in range(STEPS):
        version, parameters = pull(shard)
        push(shard, loss_gradient(parameters, target), sequence=sequence, base_version=version)
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


@pytest.mark.parametrize("policy", ["none", "divide"])
def test_sgd_equals_the_formula_bit_for_bit(policy: str, target: Floats) -> None:
    mine = trained_on_a_shard("sgd", {"learning_rate": LEARNING_RATE}, policy, target)
    assert mine.tobytes() == sgd_by_the_formula(target).tobytes()


@pytest.mark.parametrize("policy", ["none", "divide"])
def test_adagrad_equals_the_formula_bit_for_bit(policy: str, target: Floats) -> None:
    mine = trained_on_a_shard("adagrad", {"learning_rate": LEARNING_RATE, "eps": 1e-10}, policy, target)
    assert mine.tobytes() == adagrad_by_the_formula(target, 1e-10).tobytes()


def test_sgd_agrees_with_torch(target: Floats) -> None:
    mine = trained_on_a_shard("sgd", {"learning_rate": LEARNING_RATE}, "divide", target)
    assert relative_difference(mine, trained_by_torch(torch.optim.SGD, target)) <= 1e-6


def test_adagrad_agrees_with_torch(target: Floats) -> None:
    mine = trained_on_a_shard("adagrad", {"learning_rate": LEARNING_RATE}, "divide", target)
    assert relative_difference(mine, trained_by_torch(torch.optim.Adagrad, target)) <= 1e-6
