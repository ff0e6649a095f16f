"""A small model and data set for tests of Sandblaster's workers, and what one process alone would compute."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

NUM_EXAMPLES = 101


def make_model() -> nn.Sequential:
    """100-odd parameters in several shards of 32."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def make_dataset() -> TensorDataset:
    random = torch.Generator().manual_seed(8)
    inputs = torch.randn(NUM_EXAMPLES, 6, generator=random)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def mean_loss_and_gradient(model: nn.Module) -> tuple[float, npt.NDArray[np.float64]]:
    """Of the whole data set, in float64."""
    inputs, targets = make_dataset().tensors
    twin = make_model().double()
    twin.load_state_dict(model.state_dict())
    loss = functional.cross_entropy(twin(inputs.double()), targets)
    loss.backward()
    return loss.item(), torch.cat([p.grad.reshape(-1) for p in twin.parameters() if p.grad is not None]).numpy()
