"""A worker of two processes that does one thing wrong: python tests/replica_mistakes.py CASE."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pyps_client.torch import RemoteOptimizer, Replica


def main(case: str) -> None:
    rank = int(os.environ["RANK"])
    wrong = rank == 1
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    if case == "float64":
        model = model.double()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    replica = None if case == "no replica" else Replica()
    parameters = list(model.parameters())
    inner = torch.optim.SGD(parameters, lr=0.1)
    if case == "optimizer" and wrong:
        inner = torch.optim.Adagrad(parameters, lr=0.1)
    if case == "rate" and wrong:
        inner = torch.optim.SGD(parameters, lr=0.2)
    if case == "unsupported" and wrong:
        inner = torch.optim.Adadelta(parameters)
    if case == "foreign parameter" and wrong:
        inner = torch.optim.SGD([*parameters, nn.Parameter(torch.ones(3))], lr=0.1)
    push_every = -3 if case == "pace" and wrong else None
    optimizer = RemoteOptimizer(model, inner, replica=replica, push_every=push_every)
    for step in range(4):
        x = torch.randn(4, 8, dtype=parameters[0].dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if step == 1 and wrong:
            # Finite, but not in the servers' float32.
            model[0].weight.grad.to_local().fill_(1e100)
        optimizer.step()
    if rank == 0:
        # By one process alone, as one evaluates.
        print(
            "snapshot", {name: tuple(values.shape) for name, values in sorted(optimizer.snapshot().items())}, flush=True
        )
    print(f"left out {optimizer.skipped}", flush=True)
    optimizer.close()


if __name__ == "__main__":
    main(sys.argv[1])
