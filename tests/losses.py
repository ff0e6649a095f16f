"""Losses with known gradients, in portions, for optimizers that get both from passes over data."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from vector_world import Doubles, PortionLoss

NUM_PORTIONS = 3


def rosenbrock(parameters: Doubles, portion: int) -> tuple[float, Doubles, int]:
    """Rosenbrock's valleys, one for each two parameters; a portion has every third of them."""
    mine = slice(portion, None, NUM_PORTIONS)
    a, b = parameters[0::2], parameters[1::2]
    loss = 100.0 * (b - a**2) ** 2 + (1.0 - a) ** 2
    gradient = np.zeros_like(parameters)
    gradient[0::2][mine] = (-400.0 * a * (b - a**2) - 2.0 * (1.0 - a))[mine]
    gradient[1::2][mine] = (200.0 * (b - a**2))[mine]
    return float(loss[mine].sum()), gradient, 1


def rosenbrock_start(num_valleys: int) -> Doubles:
    """Where the valleys are usually entered."""
    return np.tile([-1.2, 1.0], num_valleys)


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
