"""A worker script for tests: `each` process is a worker, or all of them are one, by `ddp` and a Replica.

Prints the examples that it read, and what DistributedDataParallel without a Replica is told.
"""

import sys

import torch
import torch.distributed as dist

from pyps_client import RemoteOptimizer
from pyps_client.data import worker_sampler
from pyps_client.torch import Replica
from pyps_wire.errors import InvalidArgument

how, servers = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = torch.arange(8.0)
if how == "each":
    optimizer = RemoteOptimizer(model, sgd, servers)
    sampler = worker_sampler(dataset, shuffle=False)
else:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(model))
    # A trainer's own module, or part of it, does not know that it was wrapped.
    for given in (model, model.module, model.module[0]):
        try:
            RemoteOptimizer(given, sgd, servers)
        except InvalidArgument as refusal:
            print("refused:", refusal, flush=True)
    optimizer = RemoteOptimizer(model, sgd, servers, replica=Replica())
    sampler = torch.utils.data.DistributedSampler(dataset, shuffle=False)
for index in sampler:
    optimizer.zero_grad()
    model(dataset[index].expand(1, 4)).sum().backward()
    optimizer.step()
weight = next(model.parameters())[0, 0].item()
optimizer.close()
print("read", list(sampler), "weight", round(weight, 4), flush=True)
