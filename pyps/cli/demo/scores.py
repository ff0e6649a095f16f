"""Scores the parameters of the digits network, without torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

# As in examples/digits.py.
HELD_OUT = 360
SPLIT_SEED = 42

Array = npt.NDArray[np.float32]


class Scores:
    """What some parameters make of the images that workers train on, and of the 360 that no worker sees."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = np.random.RandomState(SPLIT_SEED).permutation(len(labels))
        pixels: Array = (images[order] / 16).astype(np.float32)
        self._held_out, self._training = pixels[:HELD_OUT], pixels[HELD_OUT:]
        self._held_out_labels, self._training_labels = labels[order][:HELD_OUT], labels[order][HELD_OUT:]

    def accuracy(self, parameters: Mapping[str, Array]) -> float:
        """The share of held-out images whose highest score is that of their label."""
        return float((scores_of(self._held_out, parameters).argmax(axis=1) == self._held_out_labels).mean())

    def loss(self, parameters: Mapping[str, Array]) -> float:
        """The mean cross-entropy over all images of the training, in nats; a minibatch's own is far noisier."""
        scores = scores_of(self._training, parameters)
        scores -= scores.max(axis=1, keepdims=True)
        of_labels = scores[np.arange(len(scores)), self._training_labels]
        return float((np.log(np.exp(scores).sum(axis=1)) - of_labels).mean())


def scores_of(images: Array, parameters: Mapping[str, Array]) -> Array:
    """A score for each image and class."""
    hidden = np.maximum(images @ parameters["0.weight"].T + parameters["0.bias"], 0)
    scores: Array = hidden @ parameters["2.weight"].T + parameters["2.bias"]
    return scores
