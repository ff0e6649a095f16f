"""A worker of Downpour over portions: `train`, or as a script, python portion_worker.py [--epochs 2 ...] with
PYPS_SERVERS set."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pyps_client import RemoteOptimizer
from pyps_client.data import Portions


def train(
    servers: str | None = None,
    worker_id: str | None = None,
    *,
    examples: int = 400,
    epochs: int = 2,
    batch_size: int = 4,
    portion_batches: int | None = None,
    loader_processes: int = 0,
    overlap: str = "off",
    push_every: int | None = None,
    step_seconds: float = 0.0,
    release: Path | None = None,
    say: Callable[[str], Any] = lambda _: None,
) -> tuple[list[int], float]:
    """The examples that this worker computed in each epoch, and the loss in the end.

    `step_seconds`: how slow it is; `release`: a file to wait for after the first epoch.
    """
    torch.set_num_threads(1)
    inputs = torch.randn(examples, 8, generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = torch.nn.Linear(8, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    where = {"run_id": "portions", "worker_id": worker_id} if servers else {}
    counts = []
    with RemoteOptimizer(model, sgd, servers, **where, push_every=push_every, overlap=overlap) as optimizer:
        portions = Portions(dataset, optimizer, batch_size=batch_size, portion_batches=portion_batches)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=portions, num_workers=loader_processes)
        for epoch in range(epochs):
            counts.append(0)
            for x, y in portions.epoch(loader):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                counts[-1] += len(x)
                time.sleep(step_seconds)
            say(f"epoch {epoch} over, {counts[-1]} examples here")
            while release is not None and not release.exists():
                time.sleep(0.02)
            if optimizer.finished:
                break
        with torch.no_grad():
            return counts, float(torch.nn.functional.mse_loss(model(inputs), dataset.tensors[1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--portion-batches", type=int, default=None)
    parser.add_argument("--loader-processes", type=int, default=0)
    parser.add_argument("--overlap", default="off")
    parser.add_argument("--push-every", type=int, default=None)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--release", type=Path, default=None)
    logging.basicConfig(level=logging.INFO)
    train(**vars(parser.parse_args()), say=lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
