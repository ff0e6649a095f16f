"""A worker of Sandblaster as a user writes it, for tests: tells the bits of the parameters that it ends with.

`--hold-at N` stops before the batch N (from 0) that this process computes, until the file `--release` is there; it says
"held" meanwhile. Under `--parts` parallelize_module cuts the model. `--save FILE` keeps the whole model.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import pyps_client
from pyps_client.torch import Replica
from pyps_wire.errors import PypsError

NUM_EXAMPLES = 120


def classification() -> tuple[nn.Module, TensorDataset]:
    """Some 200 parameters, so hard to fit that L-BFGS does not end by itself."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    random = torch.Generator().manual_seed(8)
    inputs = torch.randn(NUM_EXAMPLES, 8, generator=random)
    return model, TensorDataset(inputs, torch.randint(4, (NUM_EXAMPLES,), generator=random))


class Held:
    """A loss that waits at one of its calls."""

    def __init__(self, loss: nn.Module, *, at: int, release: Path) -> None:
        self._loss = loss
        self._at = at
        self._release = release
        self._calls = 0

    def __call__(self, outputs: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        if self._calls == self._at:
            print("held", flush=True)
            while not self._release.exists():
                time.sleep(0.02)
        self._calls += 1
        value: torch.Tensor = self._loss(outputs, *targets)
        return value


def cut(model: nn.Module) -> Replica:
    """Leaves in the model what is this process's; both have the last bias."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return Replica()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--release", type=Path, default=Path("/nowhere"))
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    model, dataset = classification()
    replica = cut(model) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
    held = Held(nn.CrossEntropyLoss(), at=arguments.hold_at, release=arguments.release)
    # Shards so small that every server has some.
    launch = pyps_client.Launch(shard_size=32)
    pyps_client.sandblaster(model, held, dataset, batch_size=8, replica=replica, launch=launch)
    whole = [getattr(parameter, "full_tensor", lambda p=parameter: p)().detach() for parameter in model.parameters()]
    if arguments.save and os.environ.get("RANK", "0") == "0":
        torch.save(whole, arguments.save)
    bits = torch.cat([values.reshape(-1) for values in whole]).numpy().tobytes()
    print("bits", hashlib.sha256(bits).hexdigest(), flush=True)


if __name__ == "__main__":
    try:
        main()
    except PypsError as error:
        sys.exit(f"sandblaster_script.py: {error}")
