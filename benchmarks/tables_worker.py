"""One process of tables.py: 26 features of a batch, their rows by id, the gradients of these and an update of each.

The model is the sum of a sample's rows and a line on top, so that what a step takes is what its tables take. A worker
goes through its batches once, prints "ready", waits for "go", goes through the same ones again for some seconds, and
prints a line of JSON. So all rows are there when they are timed, where they come to be by an update too.

This runs under the Python of a peer: beside torch and numpy it takes from packages only what its way needs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from measure import cpu_seconds, memory_bytes, wait_for_line
from torch import nn

TABLES, BATCH = 26, 8192
# Possible ids of the smallest table and of the largest.
IDS_MIN, IDS_MAX = 100_000, 1_000_000
BATCHES = 4
LEARNING_RATE = 0.05
POWER = 1.05
STEPS_MIN = 3
# Rows beyond a limit: numbers of each, ids of a batch, and batches that are seen twice.
LARGE_DIM, LARGE_BATCH, SEEN_TWICE = 64, 50_000, 10

Ids = npt.NDArray[np.int64]
# Takes a step with the ids of a batch, (tables, batch); it may ask for those of the next.
Step = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Work:
    """What a process is told: which ids, and where the others are."""

    dim: int
    law: str
    index: int
    address: str

    @property
    def sizes(self) -> list[int]:
        return [int(size) for size in np.geomspace(IDS_MIN, IDS_MAX, TABLES)]


def drawn(law: str, size: int, count: int, random: np.random.Generator) -> Ids:
    """Ids below `size`: uniform, or with chances that fall with a power of the id."""
    if law == "uniform":
        return random.integers(0, size, count)
    # The inverse of the integral of x ** -POWER from 1 to size + 1.
    exponent = 1 - POWER
    values = (1 + random.random(count) * ((size + 1) ** exponent - 1)) ** (1 / exponent)
    found: Ids = np.minimum(values.astype(np.int64) - 1, size - 1)
    return found


def batches_of(work: Work) -> list[torch.Tensor]:
    random = np.random.default_rng(work.index)
    drawings = (np.stack([drawn(work.law, size, BATCH, random) for size in work.sizes]) for _ in range(BATCHES))
    return [torch.from_numpy(ids) for ids in drawings]


class Head(nn.Module):
    """A sample's loss, of its rows in all tables: a sum, and a line on top."""

    def __init__(self, dim: int):
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(dim, 1)

    def forward(self, rows: list[torch.Tensor]) -> torch.Tensor:
        total = rows[0]
        for more in rows[1:]:
            total = total + more
        loss: torch.Tensor = (self.line(total) - 1).square().mean()
        return loss


def pyps(work: Work, *, ahead: bool) -> Step:
    from pyps_client import Embedding, RemoteOptimizer, install_process_hooks

    install_process_hooks()
    head, rule = Head(work.dim), "rowwise_adagrad"
    tables = nn.ModuleList(
        Embedding(f"table-{index}", work.dim, optimizer=rule, lr=LEARNING_RATE) for index in range(TABLES)
    )
    optimizer = RemoteOptimizer(nn.ModuleList([head, tables]), torch.optim.SGD(head.parameters(), lr=LEARNING_RATE))
    asked: list[torch.Tensor] = []

    def ask(ids: torch.Tensor) -> None:
        for table, of_table in zip(tables, ids, strict=True):
            table.prefetch(of_table)  # type: ignore[operator]
        asked[:] = [ids]

    def step(ids: torch.Tensor, next_ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        if not asked or asked[0] is not ids:
            ask(ids)
        rows = [table(of_table) for table, of_table in zip(tables, ids, strict=True)]
        if ahead:
            ask(next_ids)
        head(rows).backward()
        optimizer.step()

    optimizer.join()
    return step


def bags_of(work: Work, *, sparse: bool = True) -> nn.ModuleList:
    bags = nn.ModuleList(nn.EmbeddingBag(size, work.dim, mode="sum", sparse=sparse) for size in work.sizes)
    for bag in bags:
        nn.init.uniform_(bag.weight, -0.01, 0.01)  # type: ignore[arg-type]
    return bags


def rows_of(bags: nn.ModuleList, ids: torch.Tensor) -> list[torch.Tensor]:
    return [bag(of_bag.unsqueeze(1)) for bag, of_bag in zip(bags, ids, strict=True)]


class InMemory(nn.Module):
    """The model with all its tables."""

    def __init__(self, work: Work):
        super().__init__()
        self.bags, self.head = bags_of(work), Head(work.dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(rows_of(self.bags, ids))
        return loss


def one_process(work: Work) -> Step:
    model = InMemory(work)
    return _step_of(model, model, torch.optim.SparseAdam(model.bags.parameters(), lr=LEARNING_RATE))


def ddp(work: Work) -> Step:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{work.address}", rank=work.index, world_size=2)
    model = InMemory(work)
    parallel = nn.parallel.DistributedDataParallel(model)
    return _step_of(model, parallel, torch.optim.Adagrad(model.bags.parameters(), lr=LEARNING_RATE))


def _step_of(model: InMemory, called: nn.Module, of_rows: torch.optim.Optimizer) -> Step:
    of_head = torch.optim.SGD(model.head.parameters(), lr=LEARNING_RATE)

    def step(ids: torch.Tensor, next_ids: torch.Tensor) -> None:
        of_rows.zero_grad()
        of_head.zero_grad()
        called(ids).backward()
        of_rows.step()
        of_head.step()

    return step


def torchrec(work: Work) -> Step:
    """Its tables that update themselves in the backward pass, as it has them on a CPU, in one process."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    names = [f"feature-{index}" for index in range(TABLES)]
    configs = [
        EmbeddingBagConfig(name=f"of {name}", embedding_dim=work.dim, num_embeddings=size, feature_names=[name])
        for name, size in zip(names, work.sizes, strict=True)
    ]
    settings = {"lr": LEARNING_RATE}
    device = torch.device("cpu")
    tables = FusedEmbeddingBagCollection(configs, RowWiseAdagrad, settings, device=device)
    head = Head(work.dim)
    optimizer = torch.optim.SGD(head.parameters(), lr=LEARNING_RATE)
    lengths = torch.ones(TABLES * BATCH, dtype=torch.int32)

    def step(ids: torch.Tensor, next_ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        found = tables(KeyedJaggedTensor(names, ids.flatten(), lengths=lengths)).to_dict()
        head([found[name] for name in names]).backward()
        optimizer.step()

    return step


class RedisTable:
    """A table in Redis: a row with its sum of squares is the value of a key, and this worker updates it."""

    def __init__(self, index: int, dim: int):
        self._prefix, self._dim = index << 56, dim

    def keys(self, ids: Ids) -> list[bytes]:
        found: list[bytes] = (ids | self._prefix).view("V8").tolist()
        return found

    def rows(self, ids: Ids, values: list[bytes | None]) -> npt.NDArray[np.float32]:
        """The values of ids; those of absent ones are new."""
        absent = [place for place, value in enumerate(values) if value is None]
        first = bytes(4 * (self._dim + 1))
        rows = np.frombuffer(b"".join(value or first for value in values), np.float32)
        rows = rows.reshape(len(ids), self._dim + 1).copy()
        rows[absent, : self._dim] = np.random.default_rng(0).uniform(-0.01, 0.01, (len(absent), self._dim))
        return rows

    def updated(self, rows: npt.NDArray[np.float32], gradient: npt.NDArray[np.float32]) -> list[bytes]:
        """The values after an update with row-wise Adagrad."""
        rows[:, -1] += np.square(gradient).mean(axis=1)
        rows[:, :-1] -= LEARNING_RATE * gradient / (np.sqrt(rows[:, -1:]) + 1e-10)
        found: list[bytes] = rows.view(f"V{4 * (self._dim + 1)}").ravel().tolist()
        return found


def redis(work: Work) -> Step:
    import redis as client

    host, port = work.address.split(":")
    server = client.Redis(host, int(port), retry=client.retry.Retry(client.backoff.ConstantBackoff(0.05), 200))
    server.ping()
    tables, head = [RedisTable(index, work.dim) for index in range(TABLES)], Head(work.dim)
    optimizer = torch.optim.SGD(head.parameters(), lr=LEARNING_RATE)

    def step(ids: torch.Tensor, next_ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        unique = [np.unique(of_table, return_inverse=True) for of_table in ids.numpy()]
        keys = [table.keys(some) for table, (some, _) in zip(tables, unique, strict=True)]
        pipeline = server.pipeline(transaction=False)
        for of_table in keys:
            pipeline.mget(of_table)
        held = [
            table.rows(some, values)
            for table, (some, _), values in zip(tables, unique, pipeline.execute(), strict=True)
        ]
        wanted = [torch.from_numpy(rows[:, :-1].copy()).requires_grad_() for rows in held]
        places = [torch.from_numpy(inverse) for _, inverse in unique]
        head([nn.functional.embedding(*pair) for pair in zip(places, wanted, strict=True)]).backward()
        for table, of_table, rows, leaf in zip(tables, keys, held, wanted, strict=True):
            assert leaf.grad is not None
            pipeline.mset(dict(zip(of_table, table.updated(rows, leaf.grad.numpy()), strict=True)))
        pipeline.execute()
        optimizer.step()

    return step


class RpcTables:
    """The tables at the other end of torch's RPC."""

    def __init__(self, work: Work):
        self._bags = bags_of(work)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.stack(rows_of(self._bags, ids))

    def parameters(self) -> list[Any]:
        from torch.distributed.rpc import RRef

        return [RRef(parameter) for parameter in self._bags.parameters()]


def join_rpc(work: Work, name: str, *, rank: int) -> None:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{work.address}", rpc_timeout=600)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]


def rpc(work: Work) -> Step:
    from torch.distributed import autograd
    from torch.distributed import rpc as torch_rpc
    from torch.distributed.optim import DistributedOptimizer

    join_rpc(work, "worker", rank=1)
    tables, head = torch_rpc.remote("server", RpcTables, (work,)), Head(work.dim)
    head_refs = [torch_rpc.RRef(parameter) for parameter in head.parameters()]
    refs = [*tables.rpc_sync().parameters(), *head_refs]
    optimizer = DistributedOptimizer(torch.optim.Adagrad, refs, lr=LEARNING_RATE)  # type: ignore[no-untyped-call]

    def step(ids: torch.Tensor, next_ids: torch.Tensor) -> None:
        with autograd.context() as context:
            loss = head(list(tables.rpc_sync().rows(ids)))
            autograd.backward(context, [loss])  # type: ignore[attr-defined]
            optimizer.step(context)  # type: ignore[no-untyped-call]

    return step


WAYS: dict[str, Callable[[Work], Step]] = {
    "pyps": lambda work: pyps(work, ahead=False),
    "pyps_ahead": lambda work: pyps(work, ahead=True),
    "one_process": one_process,
    "ddp": ddp,
    "torchrec": torchrec,
    "redis": redis,
    "rpc": rpc,
}


def measured(step: Step, batches: list[torch.Tensor], seconds: float) -> dict[str, float]:
    """Steps of some seconds, and what one took. Beside the first worker others go on for ever."""
    for index, ids in enumerate(batches):
        step(ids, batches[(index + 1) % BATCHES])
    print("ready", flush=True)
    wait_for_line("go")
    began, cpu_before, count = time.perf_counter(), cpu_seconds(os.getpid()), 0
    while (now := time.perf_counter()) < began + seconds or count < STEPS_MIN:
        step(batches[count % BATCHES], batches[(count + 1) % BATCHES])
        count += 1
    return {
        "steps_per_s": count / (now - began),
        "worker_cpu_s": (cpu_seconds(os.getpid()) - cpu_before) / count,
        "worker_peak_mb": peak_mb(),
    }


def peak_mb() -> float:
    return memory_bytes(os.getpid(), "VmHWM") / 1e6


def large(num_rows: int) -> dict[str, float]:
    """A loss of rows before their first update and before their second, once all of them have had the first."""
    from pyps_client import Embedding, RemoteOptimizer, install_process_hooks

    install_process_hooks()
    table, line = Embedding("rows", LARGE_DIM, lr=0.5), nn.Linear(LARGE_DIM, 1)
    optimizer = RemoteOptimizer(nn.ModuleList([table, line]), torch.optim.SGD(line.parameters(), lr=0.0))

    def step(batch: int) -> float:
        numbers = np.arange(batch * LARGE_BATCH, min(num_rows, (batch + 1) * LARGE_BATCH))
        # Different ids, spread over all int64.
        ids = torch.from_numpy((numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64))
        optimizer.zero_grad()
        loss = (table(ids).mean(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    began = time.perf_counter()
    first = [step(batch) for batch in range(-(-num_rows // LARGE_BATCH))][:SEEN_TWICE]
    seconds = time.perf_counter() - began
    again = [step(batch) for batch in range(len(first))]
    optimizer.close()
    return {"first_loss": float(np.mean(first)), "last_loss": float(np.mean(again)), "seconds": seconds}


def large_alone(num_rows: int) -> dict[str, str]:
    try:
        nn.EmbeddingBag(num_rows, LARGE_DIM, sparse=True)
    except (MemoryError, RuntimeError) as error:
        return {"refused": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return {"error": "it had all the memory that it needs"}


LARGE: dict[str, Callable[[int], dict[str, Any]]] = {"large": large, "large_alone": large_alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", action="append", required=True, choices=[*WAYS, "rpc_server", *LARGE])
    parser.add_argument("--dim", type=int, default=LARGE_DIM)
    parser.add_argument("--law", default="uniform", choices=["power", "uniform"])
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--address", default="", help="host:port of the others")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rows", type=int, default=0, help="of the large table")
    parser.add_argument("--data-bytes-max", type=int, default=0, help="a limit of this process")
    options = parser.parse_args()
    # The last one counts.
    way = options.way[-1]
    if options.data_bytes_max:
        resource.setrlimit(resource.RLIMIT_DATA, (options.data_bytes_max, options.data_bytes_max))
    work = Work(options.dim, options.law, options.index, options.address)
    if way == "rpc_server":
        join_rpc(work, "server", rank=0)
    elif way in LARGE:
        print("ready", flush=True)
        wait_for_line("go")
        print(json.dumps(LARGE[way](options.rows) | {"worker_peak_mb": peak_mb()}), flush=True)
    else:
        seconds = math.inf if work.index else options.seconds
        print(json.dumps(measured(WAYS[way](work), batches_of(work), seconds)), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
