"""Accelerate on parameter servers."""

from __future__ import annotations

from typing import Any

import torch

from pyps_client.torch.remote_optimizer import RemoteOptimizer

__all__ = ["prepare"]


def prepare(
    accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *others: Any, **settings: Any
) -> list[Any]:
    """Prepare a model, an optimizer whose updates run on parameter servers, and others by `accelerator.prepare`.

        remote, model, optimizer, loader = prepare(accelerator, model, optimizer, loader, overlap="step")
        for epoch in remote.until_finished(range(10)):
            for x, y in remote.until_finished(loader):
                ...

    `accelerator`: of one process. `model`: not prepared yet. `optimizer`: a fresh torch optimizer over its parameters.
    `others`: data loaders, schedulers. `settings`: the keywords of RemoteOptimizer.

    Return the RemoteOptimizer, then the prepared objects in the order given.
    """
    remote = RemoteOptimizer(model.to(accelerator.device), optimizer, **settings)
    return [remote, *accelerator.prepare(model, remote, *others)]
