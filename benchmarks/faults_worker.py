"""A worker of faults.py and soak.py: steps until the file END is there, and notes each in its journal, a line of JSON:
when it ended, by the machine's monotonic clock, in which process, and the pushes that servers acknowledged.

    python benchmarks/faults_worker.py END JOURNAL [--pace 0.02] [--sandblaster] [--digits [--portions]]
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

# Of four, so that each of two servers has two.
SHARD_SIZE = 10_240


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("end", type=Path)
    parser.add_argument("journal", type=Path)
    parser.add_argument("--pace", type=float, default=0.02, help="seconds that a minibatch takes")
    parser.add_argument("--sandblaster", action="store_true")
    parser.add_argument("--digits", action="store_true", help="train on scikit-learn's digits, by torch")
    parser.add_argument("--portions", action="store_true", help="whose data the servers hand out")
    options = parser.parse_args()
    # Without a buffer: what was written is kept when this process is killed.
    with options.journal.open("ab", buffering=0) as journal:

        def note(**facts: Any) -> None:
            journal.write(json.dumps({"at": time.monotonic(), "life": os.getpid(), **facts}).encode() + b"\n")

        (sandblaster if options.sandblaster else digits if options.digits else train)(options, note)


def train(options: argparse.Namespace, note: Callable[..., None]) -> None:
    """Push ones: each update takes 1 from each number."""
    from pyps_client import Client, Launch

    ones = np.ones(4 * SHARD_SIZE, np.float32)
    with Client({"w": 0 * ones}, ("sgd", {"learning_rate": 1.0}), launch=Launch(shard_size=SHARD_SIZE)) as client:
        while not options.end.exists():
            time.sleep(options.pace)
            receipts = client.push({"w": ones})
            client.pull()
            note(accepted=accepted(client.session.sender, receipts))


def accepted(sender: Any, receipts: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The parts of a push that were acknowledged."""
    from pyps_wire.common_pb2 import OUTCOME_APPLIED, OUTCOME_PENDING

    taken = [one for one in receipts if one.outcome in (OUTCOME_APPLIED, OUTCOME_PENDING)]
    return [(one.shard_id, sender.worker_id, sender.incarnation, one.sequence) for one in taken]


def digits(options: argparse.Namespace, note: Callable[..., None]) -> None:
    import torch
    from torch.nn import functional
    from torch.utils.data import DataLoader

    from pyps_client import RemoteOptimizer
    from pyps_client.data import Portions, worker_sampler

    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    example = importlib.import_module("digits")
    training, held_out = example.digits()
    model = example.network()
    optimizer = RemoteOptimizer(model, torch.optim.Adagrad(model.parameters(), lr=0.05))
    if options.portions:
        loader = DataLoader(training, batch_sampler=Portions(training, optimizer, batch_size=32, seed=1))
    else:
        loader = DataLoader(training, batch_size=32, sampler=worker_sampler(training, seed=1))
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for images, labels in itertools.takewhile(lambda _: not options.end.exists(), batches):
        time.sleep(options.pace)
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        note(accepted=accepted(optimizer.stepper.session.sender, optimizer.receipts))
    optimizer.close()
    images, labels = held_out.tensors
    with torch.no_grad():
        note(accuracy=(model(images).argmax(1) == labels).float().mean().item())


def sandblaster(options: argparse.Namespace, note: Callable[..., None]) -> None:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import pyps_client

    torch.manual_seed(5)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    examples = TensorDataset(torch.randn(120, 8), torch.randint(4, (120,)))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        time.sleep(options.pace)
        note()
        return nn.functional.cross_entropy(outputs, targets)

    # Shards so small that both servers have some.
    pyps_client.sandblaster(model, loss, examples, batch_size=8, launch=pyps_client.Launch(shard_size=32))
    parameters = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    note(crc=zlib.crc32(parameters.numpy().tobytes()))


if __name__ == "__main__":
    main()
