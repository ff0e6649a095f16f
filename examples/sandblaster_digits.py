"""Sandblaster L-BFGS on scikit-learn's digits: a model, a loss and a data set, and no loop.

A coordinator runs the optimizer, servers hold its vectors, and any number of workers like this one compute the loss
and its gradient over all images, a portion at a time:

    pyps sandblaster --servers 2 --workers 4 examples/sandblaster_digits.py

At the end worker 0 prints the share of held-out images that the network takes for another digit. With
`--picture FILE` it draws how the loss fell over the passes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from digits import digits, network
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import pyps_client
from pyps_wire.errors import PypsError


def main() -> None:
    arguments = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # The same first network in every run; the other workers get it from the servers.
    torch.manual_seed(0)
    training, held_out = digits()
    model = network().to(device)
    is_first = os.environ.get("PYPS_WORKER_INDEX", "0") == "0"
    curve = Curve(model, training, held_out)
    result = pyps_client.sandblaster(
        model,
        functional.cross_entropy,
        training,
        batch_size=arguments.batch_size,
        servers=arguments.servers,
        on_pass=curve.note if is_first and arguments.picture else None,
    )
    if is_first:
        loss, _ = score(model, training)
        _, error = score(model, held_out)
        print(f"training loss {loss:.4f}, held-out error {100 * error:.2f} %: {result.message}", flush=True)
        if arguments.picture:
            curve.draw(arguments.picture, last_error=error)
            print(f"Picture: {arguments.picture.resolve()}", flush=True)


def score(model: nn.Module, images: TensorDataset) -> tuple[float, float]:
    """Return the mean loss, and the share of images taken for another digit."""
    device = next(model.parameters()).device
    pixels, labels = (tensor.to(device) for tensor in images.tensors)
    with torch.no_grad():
        scores = model(pixels)
        loss = functional.cross_entropy(scores, labels).item()
    return loss, (scores.argmax(1) != labels).float().mean().item()


class Curve:
    """Loss and held-out error of each pass's parameters: a pass is a trial of the line search."""

    def __init__(self, model: nn.Module, training: TensorDataset, held_out: TensorDataset) -> None:
        self._model = model
        self._training = training
        self._held_out = held_out
        self._passes: list[int] = []
        self._losses: list[float] = []
        self._errors: list[float] = []

    def note(self, number: int) -> None:
        """Score the model at the beginning of a pass, unless the others have finished that pass."""
        self._passes.append(number)
        self._losses.append(score(self._model, self._training)[0])
        self._errors.append(100 * score(self._model, self._held_out)[1])

    def draw(self, path: Path, *, last_error: float) -> None:
        """Write the picture."""
        # Figure alone draws without a display, which pyplot might ask for.
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

        figure = Figure(figsize=(8, 4), layout="constrained")
        loss_axis = figure.subplots()
        loss_axis.plot(self._passes, self._losses, color="tab:orange", marker=".", label="training loss (left)")
        loss_axis.set(xlabel="passes over the training images", ylabel="training loss (logarithmic)", yscale="log")
        loss_axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        loss_axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        loss_axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        loss_axis.minorticks_off()
        error_axis = loss_axis.twinx()
        error_axis.plot(self._passes, self._errors, color="tab:blue", marker=".", label="held-out error (right)")
        error_axis.set(ylabel="held-out error, %", ylim=(0, None))
        lines = [*loss_axis.get_lines(), *error_axis.get_lines()]
        loss_axis.legend(lines, [str(line.get_label()) for line in lines], loc="upper right")
        figure.suptitle(
            f"Sandblaster L-BFGS on digits: {100 * last_error:.2f} % of held-out images mistaken at the end"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Computes portions of handwritten digits for Sandblaster L-BFGS.")
    parser.add_argument("--servers", help="host:port[,host:port]; PYPS_SERVERS by default")
    parser.add_argument("--batch-size", type=int, default=256, help="images of a portion that are computed at once")
    parser.add_argument("--picture", type=Path, help="where worker 0 draws the loss over the passes")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except PypsError as error:
        # A refusal is a sentence, and needs no traceback.
        sys.exit(f"sandblaster_digits.py: {error}")
