"""A worker of several processes that trains a locally connected network, each process with a band of the image.

Every node has weights of its own and reads the nodes around its place, one layer below: the case that DistBelief was
cut for (Dean et al. 2012, section 3), since a part needs of the others only what lies along its borders (halo.py). The
images are scikit-learn's digits, 8 by 8 pixels.

    pyps run --servers 2 --replicas 2 --parts 2 -- python examples/patches.py

torch knows no such split, so the worker gives pyps the block of each tensor that it holds. The messages between the
parts of a replica are counted, and the count is the end of the output.
"""

from __future__ import annotations

import argparse
import math
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from digits import digits
from halo import KERNEL, Band
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from pyps_client.data import worker_sampler
from pyps_client.torch import Block, RemoteOptimizer, Replica
from pyps_wire.errors import PypsError

SIDE, CHANNELS, CLASSES = 8, 4, 10


def main() -> None:
    arguments = parse_arguments()
    index, count = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if count > SIDE:
        sys.exit(f"patches.py: the images have {SIDE} rows, too few for {count} parts")
    # A worker of one process has no others.
    if count > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    band = Band(SIDE, index=index, count=count)
    model = Network(band)
    optimizer = RemoteOptimizer(
        model,
        torch.optim.Adagrad(model.parameters(), lr=0.05),
        replica=Replica(blocks=blocks(model, band), replicated=["output.bias"]) if count > 1 else None,
    )
    training, held_out = digits()
    loader = DataLoader(training, arguments.batch_size, sampler=worker_sampler(training, seed=1))
    most_times = 0
    for epoch in range(arguments.epochs):
        for images, labels in loader:
            band.log.clear()
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            most_times = max([most_times, *band.log.times.values()])
        if index == 0:
            print(f"epoch {epoch:3d}  update {optimizer.global_step:5d}  loss {loss.item():.4f}", flush=True)
    optimizer.close()
    # The last minibatch is in the log; scoring adds to it.
    sent = what_crossed(band, most_times=most_times)
    hits = accuracy(model, held_out)
    if index == 0:
        print(f"{sent}\nheld-out accuracy {hits:.4f}", flush=True)
    if count > 1:
        dist.destroy_process_group()


class Network(nn.Module):
    """Two locally connected layers and a dense one; of each tensor the band's rows, which are its first dimension."""

    def __init__(self, band: Band) -> None:
        super().__init__()
        self.local1 = LocallyConnected("local1", band, inputs=1, outputs=CHANNELS)
        self.local2 = LocallyConnected("local2", band, inputs=CHANNELS, outputs=CHANNELS)
        self.output = Dense("output", band)
        self._rows = band.rows

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(examples, pixels) to (examples, CLASSES); of the pixels it reads the band's alone."""
        states = images.view(-1, 1, SIDE, SIDE)[:, :, self._rows]
        return self.output(functional.relu(self.local2(functional.relu(self.local1(states)))))


class LocallyConnected(nn.Module):
    """Nodes that read the KERNEL by KERNEL places around theirs, each with its own weights."""

    def __init__(self, name: str, band: Band, *, inputs: int, outputs: int) -> None:
        super().__init__()
        self._name, self._band, self._outputs = name, band, outputs
        self.weight = own_rows(band, SIDE, outputs, inputs * KERNEL**2, fan_in=inputs * KERNEL**2)
        self.bias = nn.Parameter(torch.zeros(len(self.weight), SIDE, outputs))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(examples, inputs, rows, columns) to (examples, outputs, rows, columns)."""
        around = self._band.with_halo(states, self._name, readers=self._outputs)
        around = functional.unfold(functional.pad(around, (KERNEL // 2, KERNEL // 2)), KERNEL)
        around = around.unflatten(2, states.shape[2:])
        return torch.einsum("nirc,rcoi->norc", around, self.weight) + self.bias.permute(2, 0, 1)


class Dense(nn.Module):
    """A score for each class from all nodes; each part adds up those of its own."""

    def __init__(self, name: str, band: Band) -> None:
        super().__init__()
        self._name, self._band = name, band
        self.weight = own_rows(band, SIDE, CHANNELS, CLASSES, fan_in=SIDE * SIDE * CHANNELS)
        self.bias = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(examples, channels, rows, columns) to (examples, CLASSES)."""
        partial = torch.einsum("nirc,rcik->nk", states, self.weight)
        return self._band.sum_of_parts(partial, self._name) + self.bias


def own_rows(band: Band, *shape: int, fan_in: int) -> nn.Parameter:
    """Return the band's rows of random weights; all processes draw the same whole."""
    return nn.Parameter((torch.randn(band.height, *shape) / math.sqrt(fan_in))[band.rows].clone())


def blocks(model: nn.Module, band: Band) -> dict[str, Block]:
    """Return the places of this process's parameters in the whole tensors; all hold the dense layer's bias."""
    return {
        name: Block(offset=(band.rows.start,) + (0,) * (parameter.ndim - 1), whole_shape=(SIDE, *parameter.shape[1:]))
        for name, parameter in model.named_parameters()
        if name != "output.bias"
    }


def what_crossed(band: Band, *, most_times: int) -> str:
    """Describe what all parts of the replica sent in the last minibatch; all processes call it."""
    counts = [sum(sent[0] == direction for sent in band.log.times) for direction in ("forward", "backward")]
    everybody = [(*counts, band.log.edges, most_times)] * band.count
    if band.count > 1:
        dist.all_gather_object(everybody, everybody[0])
    forward, backward, edges, _ = (sum(numbers) for numbers in zip(*everybody, strict=True))
    if band.count == 1:
        return "one part: nothing crosses"
    return (
        f"crossings between {band.count} parts, for each image: {forward} nodes forward, {backward} gradients back; "
        f"sending each node once for every edge that it has there would take {edges}\n"
        f"most often that a node went to the same part in a minibatch: {max(most for *_, most in everybody)}"
    )


def accuracy(model: nn.Module, held_out: TensorDataset) -> float:
    """Return the share of images that are recognised; all processes call it."""
    images, labels = held_out.tensors
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def evaluate(parameters: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the accuracy of these parameters on the held-out images, for `pyps eval`: all in one process."""
    model = Network(Band(SIDE, index=0, count=1))
    model.load_state_dict({name: torch.tensor(values) for name, values in parameters.items()})
    return {"accuracy": accuracy(model, digits()[1])}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a locally connected network cut into bands of the image.")
    parser.add_argument("--epochs", type=int, default=10, help="passes over this replica's share of the data")
    parser.add_argument("--batch-size", type=int, default=32)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except PypsError as error:
        # A refusal is a sentence, and needs no traceback.
        sys.exit(f"patches.py: {error}")
