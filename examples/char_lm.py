"""A worker that trains a small network to guess the next character of Python's standard library.

The text is the source of the Python that runs it, so nothing is downloaded: files in the order of their paths, their
ASCII characters, the first 2 MB to train on and the next 200 kB held out. The network reads stretches of 64 characters
with 64 gated recurrent units, and is judged by the bits that each held-out character would take:

    pyps run --servers 2 --workers 4 -- python examples/char_lm.py --picture char_lm.png

All workers share each epoch: the servers hand out portions of the text, a quicker worker gets more of them, and what a
dead one held goes to another. Worker 0 scores the model now and then, and the others do more meanwhile.

`evaluate` is what `pyps eval examples/char_lm.py` calls with a running model's parameters.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from pyps_client import RemoteOptimizer
from pyps_client.data import Portions
from pyps_wire.errors import PypsError

TRAINING_BYTES = 2_000_000
HELD_OUT_BYTES = 200_000
# Characters in an example; the model guesses each but the first from those before it.
LENGTH = 65
CHARACTERS = 128
# Seconds between two scores of the held-out text, each of every so manyth example.
LOOK_SECONDS = 2.0
LOOK_EVERY = 10
# Examples that are scored at once: the scores of all would take 100 MB.
SCORED_AT_ONCE = 500


def main() -> None:
    arguments = parse_arguments()
    # The launcher gives each worker its share of the cores by OMP_NUM_THREADS.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, held_out = standard_library(arguments.training_bytes)
    model = Network().to(device)
    # The first worker does what is done once for all.
    scores = Scores(model, held_out) if os.environ.get("PYPS_WORKER_INDEX", "0") == "0" else None
    if scores is not None:
        print(f"held-out text, untrained: {scores.seen[0][1]:.3f} bits/char", flush=True)
    optimizer = RemoteOptimizer(
        model,
        torch.optim.Adagrad(model.parameters(), lr=arguments.learning_rate),
        servers=arguments.servers,
        push_every=arguments.push_every,
        overlap=arguments.overlap,
    )
    portions = Portions(training, optimizer, batch_size=arguments.batch_size, epochs=arguments.epochs, seed=1)
    loader = DataLoader(training, batch_sampler=portions)
    for epoch in range(arguments.epochs):
        batches, loss_sum = 0, 0.0
        for (text,) in loader:
            optimizer.zero_grad()
            loss = loss_of(model, text.to(device))
            loss.backward()
            optimizer.step()
            batches, loss_sum = batches + 1, loss_sum + loss.item()
            if scores is not None:
                scores.look_if_due()
        # The others may have done all of an epoch before a late worker.
        if batches:
            optimizer.report(loss=loss_sum / batches)
            trained = f"{batches:4d} batches here, loss {loss_sum / batches:.4f}"
            print(f"epoch {epoch}  update {optimizer.global_step:5d}  {trained}", flush=True)
    optimizer.close()
    if scores is not None:
        scores.look()
        seconds, score = scores.seen[-1]
        print(f"held-out text, after {seconds:.0f} s: {score:.3f} bits/char", flush=True)
        if arguments.picture is not None:
            draw(arguments.picture, scores.seen)


class Network(nn.Module):
    """Scores of the next character after each of some characters."""

    def __init__(self, *, units: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, 32)
        self.units = nn.GRU(32, units, batch_first=True)
        self.output = nn.Linear(units, CHARACTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(examples, characters) to (examples, characters, CHARACTERS)."""
        states, _ = self.units(self.embedding(text))
        return self.output(states)


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next characters, in nats."""
    return loss_between(model(text[:, :-1]), text[:, 1:])


def loss_between(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return the same for the characters' scores."""
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def bits_per_character(model: nn.Module, text: TensorDataset, *, every: int = 1) -> float:
    """Return the mean over the text, or over every so manyth example."""
    examples = text.tensors[0][::every]
    device = next(model.parameters()).device
    with torch.no_grad():
        nats = sum(len(some) * loss_of(model, some.to(device)).item() for some in examples.split(SCORED_AT_ONCE))
    return nats / len(examples) / math.log(2)


class Scores:
    """Scores of a model in training on held-out text."""

    def __init__(self, model: nn.Module, held_out: TensorDataset) -> None:
        self._model, self._held_out = model, held_out
        self._began = time.monotonic()
        # (seconds, bits/char) pairs.
        self.seen: list[tuple[float, float]] = []
        self.look()

    def look_if_due(self) -> None:
        """Score the model by a part of the text, if the last score is old enough."""
        if time.monotonic() - self._began >= self.seen[-1][0] + LOOK_SECONDS:
            self.look(every=LOOK_EVERY)

    def look(self, *, every: int = 1) -> None:
        """Score the model by every so manyth example."""
        seconds = time.monotonic() - self._began
        self.seen.append((seconds, bits_per_character(self._model, self._held_out, every=every)))


def standard_library(training_bytes: int = TRAINING_BYTES) -> tuple[TensorDataset, TensorDataset]:
    """Return the text for training and the held-out text: rows of LENGTH characters, which share their ends."""
    # The held-out text does not depend on the amount of training text.
    wanted = TRAINING_BYTES + HELD_OUT_BYTES
    text = b""
    for path in sources(Path(sysconfig.get_path("stdlib"))):
        text += path.read_bytes().decode("ascii", errors="ignore").encode()
        if len(text) >= wanted:
            break
    else:
        sys.exit(f"char_lm.py: the standard library has {len(text):,} bytes of source; {wanted:,} are needed.")
    characters = torch.tensor(np.frombuffer(text[:wanted], np.uint8), dtype=torch.int64)
    training, held_out = characters[:training_bytes], characters[TRAINING_BYTES:]
    return (
        TensorDataset(training.unfold(0, LENGTH, LENGTH - 1)),
        TensorDataset(held_out.unfold(0, LENGTH, LENGTH - 1)),
    )


def sources(folder: Path) -> Iterator[Path]:
    """Return the files of the standard library, without installed packages."""
    installed = {"site-packages", "dist-packages"}
    return (path for path in sorted(folder.rglob("*.py")) if not installed.intersection(path.parts))


def draw(path: Path, scores: Sequence[tuple[float, float]]) -> None:
    """Draw (seconds, bits/char) pairs."""
    # Figure alone draws without a display, which pyplot might ask for.
    from matplotlib.figure import Figure

    workers = os.environ.get("PYPS_WORKER_COUNT", "1")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    axis.plot(*zip(*scores, strict=True), marker=".", color="tab:blue")
    axis.set(xlabel="seconds", ylabel="bits per held-out character", ylim=(2, None), xlim=(0, None))
    axis.set_title(f"The standard library's source, GRU of 64 units, workers: {workers}")
    axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"picture: {path}", flush=True)


def evaluate(parameters: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the bits per character of these parameters on the held-out text."""
    model = Network()
    model.load_state_dict({name: torch.tensor(values) for name, values in parameters.items()})
    return {"bits_per_character": bits_per_character(model, standard_library()[1])}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a character model on Python's own source through pyps.")
    parser.add_argument("--servers", help="host:port[,host:port]; PYPS_SERVERS by default")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the text, of all workers together")
    parser.add_argument("--training-bytes", type=int, default=TRAINING_BYTES, help="of the text, the first so many")
    parser.add_argument("--batch-size", type=int, default=32, help="stretches of 64 characters in a minibatch")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="Adagrad's")
    parser.add_argument("--push-every", type=int, help="minibatches summed in a push; 1, or what the servers ask for")
    parser.add_argument("--overlap", choices=["off", "step", "backward"], default="off")
    parser.add_argument("--picture", type=Path, help="where worker 0 draws bits per character over time")
    arguments = parser.parse_args()
    if not LENGTH <= arguments.training_bytes <= TRAINING_BYTES:
        parser.error(f"--training-bytes is {arguments.training_bytes}; expected {LENGTH} to {TRAINING_BYTES:,}")
    if arguments.picture is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")
    return arguments


if __name__ == "__main__":
    try:
        main()
    except PypsError as error:
        # A refusal is a sentence, and needs no traceback.
        sys.exit(f"char_lm.py: {error}")
