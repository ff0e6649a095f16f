"""Small models and data for tests of training."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from pyps.core.gradient import Codec
from pyps.core.update_rules import RULES, WeightedGradient, validate
from pyps_client import RemoteOptimizer
from pyps_client.data import Portions
from pyps_wire.common_pb2 import OptimizerSettings

torch.set_num_threads(1)


def mlp(seed: int = 0) -> torch.nn.Sequential:
    """A network of 4,522 parameters: enough for shards on each of three servers."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
    )


def batches(count: int, *, size: int = 16, seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and classes for `mlp`."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        inputs = torch.randn(size, 32, generator=generator)
        yield inputs, torch.randint(10, (size,), generator=generator)


def backward(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Computes the loss of a batch and leaves its gradients in the model."""
    model.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss.detach()


def flat(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """All values in one float32 vector."""
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors]).numpy().copy()


def parameters_of(model: torch.nn.Module) -> np.ndarray:
    return flat(list(model.parameters()))


def gradients_of(model: torch.nn.Module) -> np.ndarray:
    return flat([parameter.grad for parameter in model.parameters() if parameter.grad is not None])


def train_on_portions(
    servers: str,
    worker_id: str,
    *,
    examples: int = 400,
    epochs: int = 2,
    portion_batches: int | None = None,
    overlap: str = "off",
    push_every: int | None = None,
    step_seconds: float = 0.0,
) -> tuple[list[int], float]:
    """Trains a small model of its own on a data set that workers share in portions.

    Returns the examples that this worker computed in each epoch, and the loss in the end. `step_seconds`: how slow it
    is.
    """
    inputs = torch.randn(examples, 8, generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = torch.nn.Linear(8, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    where = {"run_id": "portions", "worker_id": worker_id}
    counts = []
    with RemoteOptimizer(model, sgd, servers, **where, push_every=push_every, overlap=overlap) as optimizer:
        portions = Portions(dataset, optimizer, batch_size=4, portion_batches=portion_batches)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=portions)
        for _ in range(epochs):
            counts.append(0)
            for x, y in portions.epoch(loader):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                counts[-1] += len(x)
                time.sleep(step_seconds)
            if optimizer.finished:
                break
        with torch.no_grad():
            return counts, float(torch.nn.functional.mse_loss(model(inputs), dataset.tensors[1]))


class SerialRule:
    """A rule's own run on one vector, without servers."""

    def __init__(self, settings: OptimizerSettings, parameters: np.ndarray) -> None:
        self.rule = RULES[settings.rule]
        self.hyperparameters = validate(self.rule, dict(settings.groups[0].hyperparameters))
        self.parameters = parameters
        self.slots = self.rule.make_slots(len(parameters), self.hyperparameters)
        self.version = 0

    def step(self, gradient: np.ndarray, rate: float) -> None:
        gradients = [WeightedGradient(gradient.tobytes(), Codec.FLOAT32, 1.0)]
        self.rule.apply(
            *(self.parameters, self.slots, gradients),
            rate=rate,
            version=self.version,
            hyperparameters=self.hyperparameters,
        )
        self.version += 1
