"""Staleness-aware ASGD: Zhang, Gupta, Lian, Liu (IJCAI 2016, arXiv 1511.05950).

The learning rate's modulation: alpha(tau) = alpha0 / tau for tau > 0, alpha0 for tau = 0, that is
alpha0 / max(1, tau).
"""

from __future__ import annotations

import numpy as np
import pytest

from pyps.core.staleness import WeighingContext, parse
from shards import make_shard, pull, push

VERSION = 40


@pytest.mark.parametrize(("tau", "scale"), [(0, 1.0), (1, 1.0), (2, 0.5), (10, 0.1), (29, 1 / 29)])
def test_the_learning_rate_is_divided_by_the_staleness(tau: int, scale: float) -> None:
    context = WeighingContext(worker_id="a", num_workers=30, version=VERSION)
    assert parse("divide").weigh(tau, context).rate_scale == scale


@pytest.mark.parametrize("tau", [0, 1, 10])
def test_staleness_is_the_shards_version_minus_the_one_the_gradient_was_computed_on(tau: int) -> None:
    shard = make_shard([0.0], version=VERSION)
    assert push(shard, [1.0], base_version=VERSION - tau).staleness == tau


@pytest.mark.parametrize(("tau", "displacement"), [(0, 2.0), (1, 2.0), (10, 0.2)])
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_the_step_shrinks_by_the_divisor_under_any_rule(rule: str, tau: int, displacement: float) -> None:
    """Scaling the gradient alone would cancel under Adagrad: its first step is gamma whatever the scale."""
    gradient = 1.0
    shard = make_shard([0.0], rule=rule, settings={"learning_rate": 2.0}, policy="divide", version=VERSION)
    push(shard, [gradient], base_version=VERSION - tau)
    assert pull(shard)[1][0] == pytest.approx(-displacement)


def test_what_enters_adagrads_sum_is_not_divided() -> None:
    shard = make_shard([0.0], rule="adagrad", policy="divide", version=VERSION)
    push(shard, [3.0], base_version=VERSION - 10)
    assert shard.state().slots["accumulator"].tolist() == [9.0]


def test_under_constant_staleness_the_displacement_is_that_fraction_of_the_unmodulated() -> None:
    gradients = np.random.default_rng(3).standard_normal((50, 8)).astype(np.float32)
    moved = {}
    for policy in ("none", "divide"):
        shard = make_shard(np.zeros(8), rule="adagrad", policy=policy, version=VERSION)
        for sequence, values in enumerate(gradients):
            push(shard, values, sequence=sequence, base_version=shard.version - 10)
        moved[policy] = pull(shard)[1]
    np.testing.assert_allclose(moved["divide"], moved["none"] / 10, rtol=1e-4, atol=1e-6)


def test_the_receipt_tells_what_staleness_cost() -> None:
    shard = make_shard([0.0], settings={"learning_rate": 0.5}, policy="divide", version=VERSION)
    receipt = push(shard, [1.0], base_version=VERSION - 4)
    assert (receipt.rate, receipt.rate_scale) == (0.125, 0.25)
