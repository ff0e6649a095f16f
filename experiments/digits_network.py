"""The task of the learning experiments: handwritten digits and a small network, in numpy.

1,797 images of 8 by 8 pixels (scikit-learn), 1,437 to train on and 360 held out; a network of 64, 32 and 10
units with rectified linear ones between, 2,410 parameters in one vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

HELD_OUT = 360
SPLIT_SEED = 42
PIXELS, HIDDEN, CLASSES = 64, 32, 10
NUM_PARAMETERS = PIXELS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
# What an untrained or diverged network scores.
CHANCE_ERROR = 1 - 1 / CLASSES


@dataclass(frozen=True)
class Digits:
    """The images, brightness 0 to 1 less the training mean, and which digit each shows."""

    images: Floats
    labels: Labels
    held_out_images: Floats
    held_out_labels: Labels

    @property
    def num_examples(self) -> int:
        """How many images there are to train on."""
        return self.labels.size

    def first_parameters(self, random: np.random.Generator) -> Floats:
        return first_parameters(random)

    def gradient(self, parameters: Floats, batch: Labels) -> Floats:
        return loss_gradient(parameters, self.images[batch], self.labels[batch])

    def train_loss(self, parameters: Floats) -> float:
        """Returns the loss over all training images; that of chance where it is not finite."""
        loss = mean_loss(parameters, self.images, self.labels)
        return loss if np.isfinite(loss) else float(np.log(CLASSES))

    def held_out_measures(self, parameters: Floats) -> dict[str, float]:
        return {"test_error": self.test_error(parameters)}

    def test_error(self, parameters: Floats) -> float:
        """Returns the share of held-out images taken for another digit; chance where the network is not finite."""
        if not np.isfinite(parameters).all():
            return CHANCE_ERROR
        # A network that diverged may overflow: then its scores say nothing, and argmax of NaN is a constant.
        with np.errstate(over="ignore", invalid="ignore"):
            _, scores = _forward(parameters, self.held_out_images)
        return float((scores.argmax(1) != self.held_out_labels).mean())


def load() -> Digits:
    """Returns the digits, split the same way every time."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(SPLIT_SEED).permutation(labels.size)
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int64)
    images -= images[HELD_OUT:].mean(axis=0)
    return Digits(images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT])


def first_parameters(random: np.random.Generator) -> Floats:
    """Returns an untrained network: weights of variance 2 / inputs (He et al. 2015), biases of zero."""
    parameters = np.zeros(NUM_PARAMETERS, np.float32)
    hidden, _, output, _ = _layers(parameters)
    hidden[:] = random.standard_normal(hidden.shape) * np.sqrt(2 / PIXELS)
    output[:] = random.standard_normal(output.shape) * np.sqrt(2 / HIDDEN)
    return parameters


def loss_gradient(parameters: Floats, images: Floats, labels: Labels) -> Floats:
    """Returns the gradient of the mean cross-entropy over the images."""
    _, _, output, _ = _layers(parameters)
    gradient = np.empty(NUM_PARAMETERS, np.float32)
    d_hidden, d_hidden_bias, d_output, d_output_bias = _layers(gradient)
    with np.errstate(over="ignore", invalid="ignore"):
        activations, scores = _forward(parameters, images)
        scores -= scores.max(axis=1, keepdims=True)
        errors = np.exp(scores)
        errors /= errors.sum(axis=1, keepdims=True)
        errors[np.arange(labels.size), labels] -= 1
        errors /= labels.size
        np.matmul(activations.T, errors, out=d_output)
        errors.sum(axis=0, out=d_output_bias)
        back = (errors @ output.T) * (activations > 0)
        np.matmul(images.T, back, out=d_hidden)
        back.sum(axis=0, out=d_hidden_bias)
    return gradient


def mean_loss(parameters: Floats, images: Floats, labels: Labels) -> float:
    """Returns the mean cross-entropy over the images, in nats; not finite where the network is not."""
    with np.errstate(over="ignore", invalid="ignore"):
        _, scores = _forward(parameters, images)
        scores = scores.astype(np.float64)
        scores -= scores.max(axis=1, keepdims=True)
        logarithms = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(labels.size), labels]
    return float(logarithms.mean())


def _forward(parameters: Floats, images: Floats) -> tuple[Floats, Floats]:
    """Returns the hidden units' activations and the scores of the classes."""
    hidden, hidden_bias, output, output_bias = _layers(parameters)
    activations = np.maximum(images @ hidden + hidden_bias, 0)
    return activations, activations @ output + output_bias


def _layers(parameters: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Returns the vector's parts, as views: both layers' weights (inputs by units) and biases."""
    a = PIXELS * HIDDEN
    b = a + HIDDEN
    c = b + HIDDEN * CLASSES
    return (
        parameters[:a].reshape(PIXELS, HIDDEN),
        parameters[a:b],
        parameters[b:c].reshape(HIDDEN, CLASSES),
        parameters[c:],
    )
