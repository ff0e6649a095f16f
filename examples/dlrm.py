"""A worker that trains a small DLRM (Naumov et al. 2019) on synthetic clicks, whose tables lie on the servers.

    pyps run --servers 2 --workers 3 --staleness none -- python examples/dlrm.py

The clicks have a planted signal: each id of each feature has a hidden vector, and a click depends on those of its ids
and on dense features. `--alone` trains the same model in this process, with all tables in torch's own memory, on the
minibatches of all three workers in turn.

Two workers rarely have the same rows at once, so rates divided by staleness would but train slower: hence no penalty
for it.
"""

from __future__ import annotations

import argparse
import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import pyps_client
from pyps_client import RemoteOptimizer

FEATURES, IDS, DIM, DENSE = 8, 20_000, 16, 4
HIDDEN = 4


class Clicks:
    """A stream of clicks: ids by a power law, dense features, and labels."""

    def __init__(self, seed: int) -> None:
        planted = np.random.default_rng(1)
        self._hidden = planted.normal(size=(FEATURES, IDS, HIDDEN)).astype(np.float32)
        self._slopes = planted.normal(size=DENSE).astype(np.float32)
        self._random = np.random.default_rng(seed)

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids, (size, FEATURES); dense features, (size, DENSE); and labels, (size,)."""
        ids = (IDS ** self._random.random((size, FEATURES))).astype(np.int64) - 1
        dense = self._random.normal(size=(size, DENSE)).astype(np.float32)
        hidden = self._hidden[np.arange(FEATURES), ids]
        together = (hidden.sum(axis=1) ** 2 - (hidden**2).sum(axis=1)).sum(axis=1) / FEATURES
        chances = 1 / (1 + np.exp(-(together / 2 + hidden[..., 0].sum(axis=1) / 2 + dense @ self._slopes)))
        labels = (self._random.random(size) < chances).astype(np.float32)
        return torch.from_numpy(ids), torch.from_numpy(dense), torch.from_numpy(labels)


class Dlrm(nn.Module):
    """Tables, a perceptron for dense features, the products of all pairs, and a perceptron on top."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        # Before the tables, so that these numbers begin the same wherever those are.
        torch.manual_seed(0)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 32), nn.ReLU(), nn.Linear(32, DIM))
        pairs = (FEATURES + 1) * FEATURES // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        names = [f"feature-{index}" for index in range(FEATURES)]
        self.tables = nn.ModuleList(
            nn.Embedding(IDS, DIM) if alone else pyps_client.Embedding(name, DIM, optimizer="adagrad", lr=0.05)
            for name in names
        )
        for table in self.tables if alone else ():
            nn.init.uniform_(table.weight, -0.01, 0.01)
        self.register_buffer("pairs", torch.triu_indices(FEATURES + 1, FEATURES + 1, 1), persistent=False)

    def prefetch(self, ids: torch.Tensor) -> None:
        """Ask for the rows of all tables at once."""
        for index, table in enumerate(self.tables):
            table.prefetch(ids[:, index])

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        below = self.bottom(dense)
        rows = torch.stack([below, *(table(ids[:, index]) for index, table in enumerate(self.tables))], dim=1)
        products = (rows @ rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([below, products], dim=1)).squeeze(1)


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the chance that a click scores higher than what was not clicked."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    clicks = int(labels.sum())
    return float((ranks[labels == 1].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(labels) - clicks)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default=None, help="addresses; PYPS_SERVERS by default")
    parser.add_argument(
        "--alone",
        metavar="WORKERS",
        type=int,
        nargs="?",
        const=3,
        help="train in this process, without servers, on the minibatches of so many workers (default 3)",
    )
    parser.add_argument("--steps", type=int, default=600, help="minibatches of each worker")
    parser.add_argument("--batch-size", type=int, default=512)
    arguments = parser.parse_args()
    model = Dlrm(alone=bool(arguments.alone))
    dense = [*model.bottom.parameters(), *model.top.parameters()]
    if arguments.alone:
        optimizer: torch.optim.Optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
        indices = range(arguments.alone)
    else:
        remote = RemoteOptimizer(model, torch.optim.Adagrad(dense, lr=0.05), servers=arguments.servers)
        optimizer, indices = remote, [int(os.environ.get("PYPS_WORKER_INDEX", "0"))]
    streams = [Clicks(100 + index) for index in indices]
    for step in range(arguments.steps * len(streams)):
        ids, numbers, labels = streams[step % len(streams)].batch(arguments.batch_size)
        optimizer.zero_grad()
        if not arguments.alone:
            model.prefetch(ids)
        loss = functional.binary_cross_entropy_with_logits(model(ids, numbers), labels)
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    ids, numbers, labels = Clicks(7).batch(100_000)
    with torch.no_grad():
        print(f"AUC {auc(model(ids, numbers).numpy(), labels.numpy()):.4f}")


if __name__ == "__main__":
    main()
