"""Downpour SGD with Adagrad: Dean et al., Large Scale Distributed Deep Networks (NIPS 2012), section 4.1."""

from __future__ import annotations

import numpy as np
import pytest

from pyps.core.shard import Shard
from shards import make_shard, pull, push

# The paper has no eps.
PAPER = {"learning_rate": 0.1, "eps": 0.0}


def adagrad_shard(length: int = 1, **others: int) -> Shard:
    return make_shard(np.zeros(length), rule="adagrad", settings=PAPER, **others)


def test_gradients_3_and_4_make_steps_of_a_tenth_and_eight_hundredths() -> None:
    """gamma * g / sqrt(sum): 0.1 * 3 / 3, then 0.1 * 4 / 5. Without the root: 0.0333 and 0.016."""
    shard = adagrad_shard()
    push(shard, [3.0])
    first = pull(shard)[1][0]
    push(shard, [4.0], sequence=1)
    second = pull(shard)[1][0] - first
    assert (first, second) == (pytest.approx(-0.1), pytest.approx(-0.08))
    assert shard.state().slots["accumulator"].tolist() == [25.0], "the sum of squares, with the present gradient's"


def test_the_first_step_is_gamma_times_the_sign() -> None:
    gradients = np.array([1e-6, -0.5, 3.0, -1e6, 0.0])
    shard = adagrad_shard(gradients.size)
    push(shard, gradients)
    assert pull(shard)[1] == pytest.approx(-0.1 * np.sign(gradients), rel=1e-6), "none without a gradient"


def test_the_update_does_not_depend_on_the_scale_of_the_gradients() -> None:
    gradients = np.random.default_rng(1).standard_normal((10, 16)).astype(np.float32)
    plain, scaled = adagrad_shard(16), adagrad_shard(16)
    for sequence, values in enumerate(gradients):
        push(plain, values, sequence=sequence)
        # A power of two, so that scaling rounds nothing.
        push(scaled, values * 1024.0, sequence=sequence)
    assert pull(plain)[1].tobytes() == pull(scaled)[1].tobytes()


def test_the_rate_of_a_parameter_is_local_to_it_so_shards_may_be_cut_anywhere() -> None:
    gradients = np.random.default_rng(2).standard_normal((10, 9)).astype(np.float32)
    whole, left, right = adagrad_shard(9), adagrad_shard(4), adagrad_shard(5)
    for sequence, values in enumerate(gradients):
        push(whole, values, sequence=sequence)
        push(left, values[:4], sequence=sequence)
        push(right, values[4:], sequence=sequence)
    assert pull(whole)[1].tolist() == [*pull(left)[1], *pull(right)[1]]
