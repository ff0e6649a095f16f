"""The second task of the learning experiments: the next character of a text, and a small network, in numpy.

The text is the source of `sklearn.ensemble`, the same in every installation of a version. The network sees 16
characters: a vector of 8 numbers each, 64 rectified linear units, a score for each of 48 characters; 11,760 parameters
in one vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int64]

# Other characters are read as the last of them.
ALPHABET = "\n abcdefghijklmnopqrstuvwxyz0123456789_=.,:()[]~"
CONTEXT, EMBEDDING, HIDDEN, CLASSES = 16, 8, 64, len(ALPHABET)
SHAPES = (
    (CLASSES, EMBEDDING),
    (CONTEXT * EMBEDDING, HIDDEN),
    (HIDDEN,),
    (HIDDEN, CLASSES),
    (CLASSES,),
)
SIZES = [int(np.prod(shape)) for shape in SHAPES]
HELD_OUT = 40_000
# Losses are of this many places, evenly spread.
PLACES = 4_000


@dataclass(frozen=True)
class Characters:
    """A text as codes of its characters; what comes after the training text is held out."""

    training: Codes
    held_out: Codes

    @property
    def num_examples(self) -> int:
        """How many places there are to train on."""
        return self.training.size - CONTEXT

    def first_parameters(self, random: np.random.Generator) -> Floats:
        """Returns an untrained network: weights of variance 2 / inputs (He et al. 2015), biases of zero."""
        parameters = np.zeros(sum(SIZES), np.float32)
        embedding, hidden, _, output, _ = _layers(parameters)
        embedding[:] = random.standard_normal(embedding.shape)
        for weights in (hidden, output):
            weights[:] = random.standard_normal(weights.shape) * np.sqrt(2 / len(weights))
        return parameters

    def gradient(self, parameters: Floats, places: Codes) -> Floats:
        """Returns the gradient of the mean cross-entropy at these places of the training text."""
        return loss_gradient(parameters, *windows(self.training, places))

    def train_loss(self, parameters: Floats) -> float:
        """Returns the loss in the training text, in nats; at most that of chance, which a network of no use has."""
        return _loss(parameters, self.training)

    def held_out_measures(self, parameters: Floats) -> dict[str, float]:
        """Returns the loss in the text held out, in bits a character; at most that of chance."""
        return {"test_bits": _loss(parameters, self.held_out) / float(np.log(2))}


def load() -> Characters:
    """Returns the text, lower case, a file after the other."""
    directory = files("sklearn") / "ensemble"
    names = sorted(path.name for path in directory.iterdir() if path.name.endswith(".py"))
    text = "".join((directory / name).read_text(encoding="utf-8").lower() for name in names)
    codes = np.array([ALPHABET.find(character) for character in text])
    codes[codes < 0] = CLASSES - 1
    return Characters(codes[:-HELD_OUT], codes[-HELD_OUT:])


def loss_gradient(parameters: Floats, contexts: Codes, nexts: Codes) -> Floats:
    """Returns the gradient of the mean cross-entropy of what comes next."""
    _, hidden, _, output, _ = _layers(parameters)
    gradient = np.zeros_like(parameters)
    d_embedding, d_hidden, d_hidden_bias, d_output, d_output_bias = _layers(gradient)
    with np.errstate(over="ignore", invalid="ignore"):
        inputs, activations, scores = _forward(parameters, contexts)
        errors = np.exp(scores - scores.max(axis=1, keepdims=True))
        errors /= errors.sum(axis=1, keepdims=True)
        errors[np.arange(nexts.size), nexts] -= 1
        errors /= nexts.size
        np.matmul(activations.T, errors, out=d_output)
        errors.sum(axis=0, out=d_output_bias)
        back = (errors @ output.T) * (activations > 0)
        np.matmul(inputs.T, back, out=d_hidden)
        back.sum(axis=0, out=d_hidden_bias)
        np.add.at(d_embedding, contexts, (back @ hidden.T).reshape(*contexts.shape, EMBEDDING))
    return gradient


def mean_loss(parameters: Floats, contexts: Codes, nexts: Codes) -> float:
    """Returns the mean cross-entropy, in nats; not finite where the network is not."""
    with np.errstate(over="ignore", invalid="ignore"):
        _, _, scores = _forward(parameters, contexts)
        scores = scores.astype(np.float64)
        scores -= scores.max(axis=1, keepdims=True)
        losses = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(nexts.size), nexts]
    return float(losses.mean())


def _loss(parameters: Floats, text: Codes) -> float:
    places = np.linspace(0, text.size - CONTEXT - 1, PLACES).astype(np.int64)
    return float(np.fmin(mean_loss(parameters, *windows(text, places)), np.log(CLASSES)))


def windows(text: Codes, places: Codes) -> tuple[Codes, Codes]:
    """Returns the characters from each place on, and the one that comes after them."""
    return text[places[:, None] + np.arange(CONTEXT)], text[places + CONTEXT]


def _forward(parameters: Floats, contexts: Codes) -> tuple[Floats, Floats, Floats]:
    """Returns the inputs of the hidden units, their activations, and the scores of the characters."""
    embedding, hidden, hidden_bias, output, output_bias = _layers(parameters)
    inputs = embedding[contexts].reshape(len(contexts), -1)
    activations = np.maximum(inputs @ hidden + hidden_bias, 0)
    return inputs, activations, activations @ output + output_bias


def _layers(parameters: Floats) -> list[Floats]:
    """Returns the vector's parts, as views: the characters' vectors, then weights and biases of both layers."""
    parts = np.split(parameters, np.cumsum(SIZES)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]
