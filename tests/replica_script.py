"""A worker script for tests: a digits network with a LayerNorm, cut over several processes.

    python tests/replica_script.py [--steps N] [--seed N] [--save FILE] [--cut HOW] [--hold FILE] [--nan-at STEP]
        [--pause-at STEP --pause FILE] [--rule NAME] [--schedule] [--mistake CASE] [--portions EPOCHS]
        [--overlap HOW]

parallelize_module cuts it, or --cut pipeline, into two stages. With --hold it goes on with one batch until that file
exists; with --pause the last process of replica 0 waits for that file before it calls step() for the STEPth time; with
--mistake the last process does something else than the others, or all what no replica may. With --portions it trains so
many epochs of data that the servers hand out, and says of which examples. With --overlap pushes and pulls go on beside
the computation; if that is "held", in the order in which they began, after each minibatch, or each third one where the
process is the last.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from pyps_client.data import Portions
from pyps_client.torch import RemoteOptimizer, Replica
from pyps_client.transport.threads import Future, Threads

BATCH = 32
# Of the data that is handed out: 13 minibatches, in portions of 2.
EXAMPLES, PORTION_BATCHES = 400, 2
# Pieces of a minibatch that a pipeline works at.
PIECES = 2
RULES = {
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.005),
}


class Network(nn.Module):
    """64-32-10 with a norm that no plan mentions; a stage of it, where layers were taken out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 32)
        self.down = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.up is not None:
            x = torch.relu(self.up(self.norm(x)))
        return x if self.down is None else self.down(x)


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network()


def groups_of(model: nn.Module) -> list[dict]:
    """Two groups with settings of their own, so that wire groups and the optimizer's differ."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": weights}, {"params": others, "weight_decay": 1e-4}]


def batches(steps: int, *, index: int, count: int, seed: int = 0):
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x).float() / 16, torch.tensor(y)
    train = torch.randperm(len(x), generator=torch.Generator().manual_seed(42))[:1437][index::count]
    generator = torch.Generator().manual_seed(seed + index)
    for _ in range(steps):
        chosen = train[torch.randint(len(train), (BATCH,), generator=generator)]
        yield x[chosen], y[chosen]


def portions(epochs: int, optimizer: RemoteOptimizer):
    """Minibatches of what the servers hand out; says in the end of which examples each epoch's were."""
    x, y = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(x[:EXAMPLES]).float() / 16, torch.tensor(y[:EXAMPLES]), torch.arange(EXAMPLES))
    handed_out = Portions(dataset, optimizer, batch_size=BATCH, portion_batches=PORTION_BATCHES)
    loader = DataLoader(dataset, batch_sampler=handed_out)
    seen = []
    for _ in range(epochs):
        seen.append([])
        for x, y, numbers in handed_out.epoch(loader):
            yield x, y
            seen[-1] += numbers.tolist()
    print(f"trained on {json.dumps(seen)}", flush=True)


class HeldThreads:
    """What goes on beside the computation begins once it is released: so it is known what comes of it."""

    def __init__(self) -> None:
        self._held: list[tuple[Future, threading.Event]] = []
        self.holds = False
        start = Threads.start

        def start_held(threads: Threads, future: Future) -> None:
            if self.holds and threading.current_thread() is threading.main_thread():
                go, job = threading.Event(), future._job
                future._job = lambda: go.wait() and job()
                self._held.append((future, go))
            start(threads, future)

        Threads.start = start_held

    def release(self) -> None:
        """Lets each do what it was given and waits for its end, one after the other."""
        for future, go in self._held:
            go.set()
            future.wait()
        self._held.clear()


# From a minibatch to gradients in the parameters.
Backpropagation = Callable[[torch.Tensor, torch.Tensor], None]


def cut(model: nn.Module, how: str) -> Backpropagation:
    """Leaves in the model what is this process's."""
    if how == "pipeline":
        return pipeline(model)
    if how == "tensor":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return lambda x, y: nn.functional.cross_entropy(model(x), y).backward()


def mistaken(case: str, groups: list[dict]) -> torch.optim.Optimizer | None:
    """The optimizer of a process that has another one than the rest."""
    if case == "optimizer":
        return torch.optim.Adagrad(groups, lr=0.1)
    if case == "rate":
        return torch.optim.SGD(groups, lr=0.2)
    if case == "unsupported":
        return torch.optim.Adadelta(groups)
    if case == "foreign parameter":
        return torch.optim.SGD([*groups, {"params": [nn.Parameter(torch.ones(3))]}], lr=0.1)
    return None


def pipeline(model: nn.Module) -> Backpropagation:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    last = dist.get_rank() == 1
    if last:
        model.norm = model.up = None
    else:
        model.down = None
    stage = PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, PIECES, loss_fn=nn.functional.cross_entropy)
    return lambda x, y: schedule.step(*([] if last else [x]), target=y if last else None, losses=[])


def fixed(args: argparse.Namespace, *, index: int, count: int):
    feed = list(batches(args.steps, index=index, count=count))
    step = 0
    while step < args.steps or (args.hold and not released(args.hold)):
        yield feed[step % args.steps]
        step += 1
        if args.hold and step >= args.steps:
            time.sleep(0.01)


def released(hold: Path) -> bool:
    """Whether the file was there when process 0 looked: a file that each looked for itself would part them."""
    there = torch.tensor(int(hold.exists()))
    if dist.is_initialized():
        dist.broadcast(there, src=0)
    return bool(there)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rule", default="adagrad", choices=RULES)
    parser.add_argument("--cut", default="tensor", choices=["tensor", "pipeline"])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--hold", type=Path)
    parser.add_argument("--pause", type=Path)
    parser.add_argument("--pause-at", type=int, default=-1)
    parser.add_argument("--nan-at", type=int, default=-1)
    parser.add_argument("--schedule", action="store_true")
    parser.add_argument("--portions", type=int, default=0)
    parser.add_argument("--overlap", default="off", choices=["off", "step", "held"])
    parser.add_argument("--mistake", default="")
    args = parser.parse_args()
    num_parts, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    index, count = int(os.environ["PYPS_WORKER_INDEX"]), int(os.environ["PYPS_WORKER_COUNT"])
    model = network(args.seed)
    if num_parts > 1:
        dist.init_process_group("gloo")
    backpropagate = cut(model, args.cut if num_parts > 1 else "none")
    mistake = args.mistake if rank == num_parts - 1 else ""
    inner = mistaken(mistake, groups_of(model)) or RULES[args.rule](groups_of(model))
    replica = Replica() if num_parts > 1 and args.mistake != "no replica" else None
    held = HeldThreads() if args.overlap == "held" else None
    overlap = "off" if args.overlap == "off" else "step"
    push_every = -3 if mistake == "pace" else None
    optimizer = RemoteOptimizer(model, inner, replica=replica, push_every=push_every, overlap=overlap)
    optimizer.join()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5) if args.schedule else None
    print(f"joined {index}/{rank}", flush=True)
    if args.portions:
        feed = portions(args.portions, optimizer)
    else:
        feed = fixed(args, index=index, count=count)
    step = 0
    if held is not None:
        held.holds = True
    for x, y in optimizer.until_finished(feed):
        optimizer.zero_grad()
        backpropagate(x, y)
        if step == args.nan_at and rank == num_parts - 1:
            # In this process alone, as a broken card would.
            model.up.weight.grad.to_local().fill_(float("nan"))
        if args.pause and index == 0 and step == args.pause_at:
            print(f"about to step {index}/{rank} after {step} steps", flush=True)
            while rank == num_parts - 1 and not args.pause.exists():
                time.sleep(0.01)
        optimizer.examples_in_batch = len(x)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        step += 1
        if held is not None and (rank < num_parts - 1 or step % 3 == 0):
            held.release()
    if held is not None:
        held.release()
        held.holds = False
    print(f"done {index}/{rank} after {step} steps, {optimizer.skipped} left out", flush=True)
    if args.save and rank == 0:
        # By one process alone, as one evaluates.
        torch.save(optimizer.snapshot(), args.save)
    optimizer.close()


if __name__ == "__main__":
    main()
