"""A worker that trains a small network on scikit-learn's digits, 1,797 real images of 8 by 8 pixels.

Run any number of it at once; each takes its own part of the data and all share one model:

    pyps run --servers 2 --workers 4 -- python examples/digits.py

or by hand against a server that runs already, whose run every worker names:

    pyps serve --run-id digits
    PYPS_RUN_ID=digits python examples/digits.py --servers 127.0.0.1:7610

`evaluate` is what `pyps eval examples/digits.py` calls with a running model's parameters.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from pyps_client import RemoteOptimizer
from pyps_client.data import worker_sampler
from pyps_wire.errors import PypsError

# The default settings of each torch optimizer.
OPTIMIZERS = {
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "sgd": (torch.optim.SGD, {"lr": 0.3}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.003}),
    "adam": (torch.optim.Adam, {"lr": 0.005}),
    "adamw": (torch.optim.AdamW, {"lr": 0.005}),
}
# Images that no worker trains on.
HELD_OUT = 360
SPLIT_SEED = 42


def main() -> None:
    arguments = parse_arguments()
    # The launcher gives each worker its share of the cores by OMP_NUM_THREADS.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, held_out = digits()
    loader = DataLoader(training, batch_size=arguments.batch_size, sampler=worker_sampler(training, seed=1))
    model = network().to(device)
    optimizer = RemoteOptimizer(
        model,
        torch_optimizer(model, arguments),
        servers=arguments.servers,
        push_every=arguments.push_every,
        overlap=arguments.overlap,
    )
    scheduler = annealing(optimizer, arguments.epochs) if arguments.anneal else None
    started = time.monotonic()
    for epoch in range(arguments.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            optimizer.examples_in_batch = len(images)
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.report(loss=loss.item())
        if epoch % 10 == 0 or epoch == arguments.epochs - 1:
            print(f"epoch {epoch:3d}  update {optimizer.global_step:5d}  loss {loss.item():.4f}", flush=True)
        if optimizer.finished:
            break
    optimizer.close()
    images, labels = held_out.tensors
    with torch.no_grad():
        hits = (model(images.to(device)).argmax(1).cpu() == labels).float().mean().item()
    print(f"held-out accuracy {hits:.4f} after {time.monotonic() - started:.1f} s", flush=True)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def torch_optimizer(model: nn.Module, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    kind, settings = OPTIMIZERS[arguments.optimizer]
    rate = {} if arguments.learning_rate is None else {"lr": arguments.learning_rate}
    return kind(model.parameters(), **{**settings, **rate})


def annealing(optimizer: torch.optim.Optimizer, epochs: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Lower the learning rate to a tenth along a cosine; the servers follow worker 0's."""
    lowest = [group["lr"] / 10 for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs, eta_min=min(lowest))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the images for training and the held-out ones, split in the same way in every process."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(SPLIT_SEED).permutation(len(labels))
    pixels = torch.tensor(images[order] / 16, dtype=torch.float32)
    classes = torch.tensor(labels[order])
    training = TensorDataset(pixels[HELD_OUT:], classes[HELD_OUT:])
    return training, TensorDataset(pixels[:HELD_OUT], classes[:HELD_OUT])


def evaluate(parameters: dict[str, np.ndarray]) -> dict[str, float]:
    """Return loss and accuracy of these parameters on the held-out images."""
    model = network()
    model.load_state_dict({name: torch.tensor(values) for name, values in parameters.items()})
    images, labels = digits()[1].tensors
    with torch.no_grad():
        scores = model(images)
    accuracy = (scores.argmax(1) == labels).float().mean().item()
    return {"loss": functional.cross_entropy(scores, labels).item(), "accuracy": accuracy}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small network on handwritten digits through pyps.")
    parser.add_argument("--servers", help="host:port[,host:port]; PYPS_SERVERS by default")
    parser.add_argument("--epochs", type=int, default=40, help="passes over this worker's part of the data")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    parser.add_argument("--learning-rate", type=float, help="by default one that suits the optimizer")
    parser.add_argument("--anneal", action="store_true", help="let the learning rate fall towards the end")
    parser.add_argument("--push-every", type=int, help="minibatches summed in a push; 1, or what the servers ask for")
    parser.add_argument("--overlap", choices=["off", "step", "backward"], default="off")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except PypsError as error:
        # A refusal is a sentence, and needs no traceback.
        sys.exit(f"digits.py: {error}")
