"""Scores the parameters of the digits network on the images that no worker sees, without torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

# As in examples/digits.py.
HELD_OUT = 360
SPLIT_SEED = 42

Array = npt.NDArray[np.float32]


class HeldOut:
    """The 360 images that the workers hold out, and how many of them some parameters get right."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        chosen = np.random.RandomState(SPLIT_SEED).permutation(len(labels))[:HELD_OUT]
        self.images: Array = (images[chosen] / 16).astype(np.float32)
        self.labels: npt.NDArray[np.int64] = labels[chosen]

    def accuracy(self, parameters: Mapping[str, Array]) -> float:
        """The share of images whose highest score is that of their label."""
        hidden = np.maximum(self.images @ parameters["0.weight"].T + parameters["0.bias"], 0)
        scores = hidden @ parameters["2.weight"].T + parameters["2.bias"]
        return float((scores.argmax(axis=1) == self.labels).mean())
