"""The cut models of the examples under torch's own optimizer: a script, run by as many processes as there are parts.

    python -m torch.distributed.run --nproc-per-node 2 tests/cut_training.py model_parallel tensor
    python -m torch.distributed.run --nproc-per-node 3 tests/cut_training.py patches

Process 0 prints, as JSON, the loss of each step. However a model is cut, it begins with the same parameters and gets
the same minibatches.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

STEPS = 6


def model_parallel_losses(how: str) -> list[float]:
    """The transformer's, cut so or not."""
    import model_parallel

    model, backpropagate = model_parallel.cut(model_parallel.Transformer(), how)
    texts = model_parallel.minibatches(model_parallel.standard_library()[0], seed=1)
    return train(model, lambda: backpropagate(next(texts)).item())


def patches_losses() -> list[float]:
    """The locally connected network's, over as many bands as there are processes."""
    import halo
    import patches

    band = halo.Band(patches.SIDE, index=index(), count=int(os.environ.get("WORLD_SIZE", "1")))
    model = patches.Network(band)
    images, labels = patches.digits()[0].tensors

    def backpropagate() -> float:
        band.log.clear()
        loss = functional.cross_entropy(model(images[:64]), labels[:64])
        loss.backward()
        assert not band.log.times or max(band.log.times.values()) == 1, "a node's state crossed twice"
        return loss.item()

    return train(model, backpropagate)


def train(model: nn.Module, backpropagate: Callable[[], float]) -> list[float]:
    """The losses of some steps; the gradients come from `backpropagate`."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(backpropagate())
        optimizer.step()
    return losses


def index() -> int:
    return int(os.environ.get("RANK", "0"))


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    example, *how = sys.argv[1:]
    losses = {"model_parallel": model_parallel_losses, "patches": patches_losses}[example](*how)
    if index() == 0:
        print(json.dumps(losses), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
