"""A worker of Downpour over portions, as a script: python portion_worker.py [--epochs 2 ...] with PYPS_SERVERS set."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

import torch

from pyps_client import RemoteOptimizer
from pyps_client.data import Portions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--portion-batches", type=int, default=None)
    parser.add_argument("--loader-processes", type=int, default=0)
    parser.add_argument("--overlap", default="off")
    parser.add_argument("--push-every", type=int, default=None)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="how slow this worker is")
    parser.add_argument("--no-shuffle", action="store_true")
    parser.add_argument("--release", type=Path, default=None, help="a file to wait for after the first epoch")
    options = parser.parse_args()

    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = torch.randn(options.examples, 8)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = torch.nn.Linear(8, 1)
    optimizer = RemoteOptimizer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        push_every=options.push_every,
        overlap=options.overlap,
    )
    portions = Portions(
        dataset,
        optimizer,
        batch_size=options.batch_size,
        portion_batches=options.portion_batches,
        shuffle=not options.no_shuffle,
    )
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=portions, num_workers=options.loader_processes)
    for epoch in range(options.epochs):
        count = 0
        for x, y in portions.epoch(loader):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            count += len(x)
            time.sleep(options.step_seconds)
        print(f"epoch {epoch} over, {count} examples here", flush=True)
        while options.release is not None and not options.release.exists():
            time.sleep(0.02)
        if optimizer.finished:
            break
    with torch.no_grad():
        loss = float(torch.nn.functional.mse_loss(model(inputs), dataset.tensors[1]))
    print(f"final loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
