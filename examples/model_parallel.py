"""A worker of several processes: a transformer, split over them, that learns to guess the next character.

The text is char_lm.py's, the source of Python's standard library. A replica is one worker to pyps; inside it torch
cuts the model, by a plan for parallelize_module that pyps never sees, or into the stages of a pipeline:

    pyps run --servers 2 --replicas 2 --parts 2 -- python examples/model_parallel.py
    pyps run --servers 2 --replicas 2 --parts 2 -- python examples/model_parallel.py --cut pipeline
    pyps run --servers 2 --workers 2 -- python examples/model_parallel.py

The last one cuts nothing. The parameters have the same names in all three, so `pyps eval examples/model_parallel.py`
scores any of them.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from char_lm import bits_per_character, loss_between, loss_of, standard_library
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from transformer import BLOCKS, HEADS, Transformer

from pyps_client.data import worker_sampler
from pyps_client.torch import RemoteOptimizer, Replica
from pyps_wire.errors import PypsError

BATCH_SIZE = 16
# The pieces of a minibatch that a pipeline has at once, each in another stage.
PIECES = 4
REPORT_EVERY = 20

# Split by heads and by the columns of the dense layers; every process has all norms and positions.
PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.query": ColwiseParallel(),
    "blocks.*.key": ColwiseParallel(),
    "blocks.*.value": ColwiseParallel(),
    "blocks.*.join": RowwiseParallel(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "output": ColwiseParallel(output_layouts=Replicate()),
}
# Computes a minibatch's loss, and adds its gradients to the parameters'.
Backpropagation = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    arguments = parse_arguments()
    # A worker of one process has no others.
    if arguments.cut != "none":
        dist.init_process_group("gloo")
    torch.manual_seed(arguments.seed)
    model, backpropagate = cut(Transformer(), arguments.cut)
    optimizer = RemoteOptimizer(
        model,
        torch.optim.Adagrad(model.parameters(), lr=arguments.learning_rate),
        replica=Replica() if dist.is_initialized() else None,
    )
    leads = not dist.is_initialized() or dist.get_rank() == 0
    texts = minibatches(standard_library()[0], seed=arguments.seed)
    losses = []
    for step in range(1, arguments.steps + 1):
        optimizer.zero_grad()
        losses.append(backpropagate(next(texts)).item())
        optimizer.step()
        if step % REPORT_EVERY == 0 or step == arguments.steps:
            bits = sum(losses) / len(losses) / math.log(2)
            if leads:
                print(f"step {step:4d}  update {optimizer.global_step:5d}  {bits:.3f} bits/char", flush=True)
            losses.clear()
    optimizer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def cut(model: Transformer, how: str) -> tuple[nn.Module, Backpropagation]:
    """Return this process's part of the model, and the function that trains the whole with the others."""
    if how == "pipeline":
        return pipeline(model)
    if how == "tensor":
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), PLAN)

    def backpropagate(text: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, text)
        loss.backward()
        return loss.detach()

    return model, backpropagate


def pipeline(model: Transformer) -> tuple[nn.Module, Backpropagation]:
    """Return this process's blocks, as a stage between those of its neighbours."""
    index, count = dist.get_rank(), dist.get_world_size()
    last = index == count - 1
    for number in range(BLOCKS):
        if number * count // BLOCKS != index:
            del model.blocks[str(number)]
    if index > 0:
        model.embedding = model.positions = None
    if not last:
        model.norm = model.output = None
    stage = PipelineStage(model, index, count, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, PIECES, loss_fn=loss_between)

    def backpropagate(text: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        schedule.step(*[text[:, :-1]] * (index == 0), target=text[:, 1:] if last else None, losses=losses)
        # Only the last stage knows the loss.
        loss = torch.stack(losses).mean().detach() if last else torch.empty(())
        dist.broadcast(loss, src=count - 1)
        return loss

    return model, backpropagate


def minibatches(training: TensorDataset, *, seed: int) -> Iterator[torch.Tensor]:
    """Yield minibatches of this replica's part of the text, pass after pass, the same in all its processes."""
    # A pipeline needs minibatches of one size.
    loader = DataLoader(training, BATCH_SIZE, sampler=worker_sampler(training, seed=seed), drop_last=True)
    while True:
        yield from (text for (text,) in loader)


def evaluate(parameters: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the bits per character of these parameters on the held-out text."""
    model = Transformer()
    model.load_state_dict({name: torch.tensor(values) for name, values in parameters.items()})
    return {"bits_per_character": bits_per_character(model, standard_library()[1])}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a transformer whose parts lie in several processes.")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    default = "none" if processes == 1 else "tensor"
    parser.add_argument("--cut", choices=["none", "tensor", "pipeline"], default=default, help=f"here {default}")
    parser.add_argument("--steps", type=int, default=150, help="minibatches of a replica")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=0.01, help="Adagrad's")
    arguments = parser.parse_args()
    if (arguments.cut == "none") != (processes == 1):
        parser.error(f"--cut {arguments.cut} does not go with {processes} processes a replica")
    if arguments.cut == "tensor" and HEADS % processes:
        parser.error(f"--cut tensor divides {HEADS} heads evenly, which {processes} processes do not")
    if arguments.cut == "pipeline" and processes > BLOCKS:
        parser.error(f"--cut pipeline gives each process a block of {BLOCKS}, too few for {processes} processes")
    return arguments


if __name__ == "__main__":
    try:
        main()
    except PypsError as error:
        # A refusal is a sentence, and needs no traceback.
        sys.exit(f"model_parallel.py: {error}")
