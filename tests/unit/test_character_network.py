"""experiments/character_network.py: its gradient is that of its loss."""

import numpy as np
import pytest

from experiments import character_network


def test_the_gradient_is_the_slope_of_the_loss():
    task = character_network.load()
    random = np.random.default_rng(0)
    parameters = task.first_parameters(random).astype(np.float64)
    contexts, nexts = character_network.windows(task.training, random.integers(task.num_examples, size=8))
    gradient = character_network.loss_gradient(parameters, contexts, nexts)
    ends = np.cumsum(character_network.SIZES)

    for end, size in zip(ends, character_network.SIZES, strict=True):
        # Of each layer: in the direction of its own gradient, which takes in all of its numbers.
        step = np.zeros_like(gradient)
        step[end - size : end] = gradient[end - size : end]
        step *= 1e-5 / np.linalg.norm(step)
        rise = [character_network.mean_loss(parameters + sign * step, contexts, nexts) for sign in (1, -1)]
        assert (rise[0] - rise[1]) / 2 == pytest.approx(step @ gradient, rel=1e-6)
