"""One process of a training: a transformer, a text without end, and an optimizer that is wherever the subject has it.

A worker prints "ready", waits for "go", and from then on prints a line a batch until it is killed: when its step was
done, and the batch's loss before it. No batch comes twice, so that this is the loss of text that no worker has seen.
"""

from __future__ import annotations

import argparse
import functools
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import figures
import torch
import torch.distributed as dist
from measure import wait_for_line
from torch import nn
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from work import Size

TOKENS = 512
# How often the next token is the one that belongs to the last; else any is as likely.
REGULAR = 0.8
LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Task(Size):
    """A model to train, and how far. `rounds`: so many batches, of all workers together, are waited for at least."""

    width: int
    layers: int
    # The mean loss of the last batches that ends a run, and the time that does.
    loss: float
    seconds: float
    # Of a batch, each of so many tokens.
    sequences: int = 8
    length: int = 32


TASKS = {
    task.name: task
    for task in (
        Task("25 million", params=25_761_280, keys=102, rounds=16, width=512, layers=8, loss=4.8, seconds=15.0),
        Task("170 thousand", params=168_192, keys=30, rounds=16, width=64, layers=2, loss=6.2, seconds=3.0),
    )
}


@dataclass(frozen=True)
class Subject:
    """A way to train, by whom and how."""

    name: str
    way: str
    # When a gradient becomes an update: at once ("async"), or with those of all others ("hardsync").
    protocol: str = "hardsync"
    # How what travels is written, and parameters, unless they are written otherwise.
    codec: str = "float32"
    overlap: str = "off"
    parameter_codec: str = ""
    # A worker takes so many steps by itself between two exchanges, 0 if it takes none; LocalTraining takes "auto" too.
    sync_every: int | str = 0
    # The rule that joins what workers trained by themselves.
    outer: str = "average"
    # What its Python must have, where that may be another than ours.
    module: str = ""


ALONE = Subject(figures.ALONE, "alone")
SUBJECTS = {
    subject.name: subject
    for subject in (
        ALONE,
        Subject("pyps async", "pyps", "async"),
        Subject("pyps hardsync", "pyps"),
        Subject("pyps async, overlapped, bfloat16", "pyps", "async", "bfloat16", "step"),
        Subject("pyps hardsync, overlapped in backward, bfloat16", "pyps", "hardsync", "bfloat16", "backward"),
        Subject("pyps hardsync, overlapped in backward, int8", "pyps", "hardsync", "int8", "backward"),
        Subject("pyps hardsync, overlapped in backward, int4", "pyps", "hardsync", "int4", "backward"),
        # Of the batches that a run has, more steps in a round would leave no round.
        Subject("pyps local training, H = 8", "pyps", codec="topk2bit", parameter_codec="int4", sync_every=8),
        Subject("DDP gloo", "ddp"),
        Subject("DDP gloo, float16", "ddp", codec="float16"),
        Subject("DDP gloo, bfloat16", "ddp", codec="bfloat16"),
        Subject("DDP gloo, PowerSGD rank 4", "ddp", codec="powersgd"),
        Subject("torch RPC async", "rpc", "async"),
        Subject("torch RPC hardsync", "rpc"),
        Subject("torchft", "torchft", module="torchft"),
        Subject("Hivemind", "hivemind", module="hivemind"),
    )
}


@dataclass(frozen=True)
class Place:
    """Which of how many workers this is, and where all meet."""

    index: int
    count: int
    address: str

    @property
    def host(self) -> str:
        """This worker's own address, as the others reach it."""
        host, _, port = self.address.partition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
            towards.connect((host, int(port)))
            own: str = towards.getsockname()[0]
        return own


class Stepper(Protocol):
    """What a loop needs of an optimizer."""

    def zero_grad(self) -> None: ...
    def step(self) -> object: ...


# The model to call, and what takes its steps.
Training = tuple[nn.Module, Stepper]


class Transformer(nn.Module):
    """Scores of the next token after each of some tokens."""

    def __init__(self, task: Task):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, task.width)
        self.places = nn.Parameter(torch.zeros(task.length, task.width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                task.width, task.width // 64, 4 * task.width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(task.layers)
        )
        self.norm = nn.LayerNorm(task.width)
        self.scores = nn.Linear(task.width, TOKENS)
        # No buffer: DDP would send it around before every batch.
        self.mask = nn.Transformer.generate_square_subsequent_mask(task.length)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(sequences, length) to (sequences, length, TOKENS)."""
        state = self.tokens(text) + self.places
        for layer in self.layers:
            state = layer(state, src_mask=self.mask, is_causal=True)
        scores: torch.Tensor = self.scores(self.norm(state))
        return scores


def text_of(task: Task, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of a random chain's text, and what follows each token; the chain is the same for all seeds."""
    belonging = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    while True:
        text = torch.randint(TOKENS, (task.sequences, task.length + 1), generator=generator)
        regular = torch.rand(text.shape, generator=generator) < REGULAR
        for place in range(1, task.length + 1):
            text[:, place] = torch.where(regular[:, place], belonging[text[:, place - 1]], text[:, place])
        yield text[:, :-1], text[:, 1:]


def alone(model: nn.Module, subject: Subject, place: Place) -> Training:
    return model, adam(model.parameters())


def pyps(model: nn.Module, subject: Subject, place: Place) -> Training:
    """Codec, transport and servers come through the environment."""
    # Here, as others below: a peer's Python has none of it.
    from pyps_client import RemoteOptimizer

    if subject.sync_every:
        from pyps_client import LocalTraining

        outer = subject.outer.format(count=place.count, rate=place.count**-0.5)
        local = LocalTraining(model, adam(model.parameters()), sync_every=subject.sync_every, outer=outer)
        return model, local
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    return model, RemoteOptimizer(model, optimizer, overlap=subject.overlap)


def ddp(model: nn.Module, subject: Subject, place: Place) -> Training:
    dist.init_process_group("gloo", f"tcp://{place.address}", rank=place.index, world_size=place.count)
    # PowerSGD's callbacks begin the sums of several buckets in orders that differ between workers, which ends gloo.
    parallel = DistributedDataParallel(model, bucket_cap_mb=1000 if subject.codec == "powersgd" else None)
    if subject.codec == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        # The first batch, which is not measured, goes whole, and the second in few numbers already.
        state.iter = 1
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif subject.codec != "float32":
        # Without NCCL torch refuses its own by the name, though gloo adds bfloat16.
        hooks = {"float16": fp16_compress_hook, "bfloat16": lambda group, bucket: bf16_compress_hook(group, bucket)}
        parallel.register_comm_hook(None, hooks[subject.codec])
    return parallel, adam(model.parameters())


def through_rpc(model: nn.Module, subject: Subject, place: Place) -> Training:
    join_rpc(f"worker-{place.index}", place, rank=place.index + 1)
    return model, OnRpcServer(model)


def through_torchft(model: nn.Module, subject: Subject, place: Place) -> Training:
    """A replica group of one process, with a store of its own."""
    import torchft
    from torchft.local_sgd import DiLoCo, LocalSGD

    inner = adam(model.parameters())
    held: dict[str, Any] = {"model": model, "optimizer": inner}
    store = dist.TCPStore(place.host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        # All start alike; one that returns takes the state of another.
        load_state_dict=lambda states: [of.load_state_dict(states[name]) for name, of in held.items()],
        state_dict=lambda: {name: of.state_dict() for name, of in held.items()},
        init_sync=False,
        min_replica_size=1 if subject.sync_every else place.count,
        use_async_quorum=not subject.sync_every,
        replica_id=f"worker-{place.index}",
        rank=0,
        world_size=1,
        store_addr=place.host,
        store_port=store.port,
        hostname=place.host,
        lighthouse_addr=f"http://{place.address}",
    )
    _kept.append(store)
    if subject.sync_every:
        if subject.outer == "average":
            synchronizing = LocalSGD(manager, model, inner, subject.sync_every)
        else:
            outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            synchronizing = DiLoCo(manager, [model], inner, outer, subject.sync_every)
        # It adds hooks to the optimizer's step.
        _kept.append(synchronizing.__enter__())
        return model, inner
    optimizer = torchft.Optimizer(manager, inner)
    # Begins the quorum that the first backward pass averages in.
    optimizer.zero_grad()
    return torchft.DistributedDataParallel(manager, model), optimizer


def serve_lighthouse(place: Place, *, least: int) -> None:
    """Says who is in each of torchft's steps, at least so many, until it is killed."""
    from torchft.coordination import LighthouseServer

    # Its command waits so long for a worker that is late; without that it would be 0.1 s.
    _kept.append(LighthouseServer(bind=place.address, min_replicas=least, join_timeout_ms=60_000))
    threading.Event().wait()


def through_hivemind(model: nn.Module, subject: Subject, place: Place) -> Training:
    """A peer; the first publishes its address in a store of torch's. An update is of a batch of each.

    With local updates peers take steps by themselves, and average their parameters in the background.
    """
    import hivemind
    from hivemind.optim.grad_averager import GradientAverager

    host, _, port = place.address.partition(":")
    store = dist.TCPStore(host, int(port), is_master=place.index == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    known = store.get("first").decode().split() if place.index else []
    table = hivemind.DHT(initial_peers=known, start=True, host_maddrs=[f"/ip4/{place.host}/tcp/0"], use_relay=False)
    if place.index == 0:
        store.set("first", " ".join(map(str, table.get_visible_maddrs())))
    # For a network without latency, and groups that are complete: by default each waits for seconds.
    group = {"request_timeout": 0.5, "target_group_size": place.count}
    optimizer = hivemind.Optimizer(
        dht=table,
        run_id="bench",
        batch_size_per_step=1,
        target_batch_size=place.count * (subject.sync_every or 1),
        params=model.parameters(),
        optimizer=adam,
        matchmaking_time=1.0,
        averager_opts=group,
        use_local_updates=bool(subject.sync_every),
        grad_averager_factory=None if subject.sync_every else functools.partial(GradientAverager, **group),
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.5},
    )
    _kept.extend((store, table))
    return model, optimizer


# What the library's side of a way needs as long as its process lives.
_kept: list[object] = []

WAYS: dict[str, Callable[[nn.Module, Subject, Place], Training]] = {
    "alone": alone,
    "pyps": pyps,
    "ddp": ddp,
    "rpc": through_rpc,
    "torchft": through_torchft,
    "hivemind": through_hivemind,
}


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Torch's own, by its fastest way on a processor."""
    return torch.optim.Adam(parameters, lr=LEARNING_RATE, fused=True)


class RpcServer:
    """The parameter server of torch's tutorial: gradients are added up, and all who brought some get the new model."""

    def __init__(self, model: nn.Module, gradients_per_update: int):
        self._parameters = list(model.parameters())
        self._optimizer = adam(self._parameters)
        self._gradients_per_update = gradients_per_update
        self._lock = threading.Lock()
        self._pending = 0
        self._updated: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def push(self, gradients: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
        with self._lock:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            self._pending += 1
            updated = self._updated
            if self._pending == self._gradients_per_update:
                if self._pending > 1:
                    for parameter in self._parameters:
                        assert parameter.grad is not None
                        parameter.grad /= self._pending
                self._optimizer.step()
                self._optimizer.zero_grad()
                self._pending, self._updated = 0, torch.futures.Future()
                updated.set_result([parameter.detach() for parameter in self._parameters])
        return updated


# The one of a server's process, where calls find it.
_servers: list[RpcServer] = []


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push_to_server(gradients: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
    """Runs in the server's process."""
    return _servers[0].push(gradients)


class OnRpcServer:
    """Takes the steps of a model whose optimizer is an RpcServer's."""

    def __init__(self, model: nn.Module):
        self._parameters = list(model.parameters())

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> None:
        values = rpc.rpc_sync("server", push_to_server, args=([parameter.grad for parameter in self._parameters],))
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)


def join_rpc(name: str, place: Place, *, rank: int) -> None:
    # Over a network it has no other way; left to itself it would find that all are processes of one machine.
    way = rpc.TensorPipeRpcBackendOptions(
        _transports=["uv"], _channels=["basic"], rpc_timeout=300, init_method=f"tcp://{place.address}"
    )
    rpc.init_rpc(name, rank=rank, world_size=place.count + 1, rpc_backend_options=way)  # type: ignore[no-untyped-call]


def serve_rpc(task: Task, subject: Subject, place: Place) -> None:
    """Serves until all workers are done."""
    _servers.append(RpcServer(model_of(task), place.count if subject.protocol == "hardsync" else 1))
    join_rpc("server", place, rank=0)
    rpc.shutdown()


def model_of(task: Task, seed: int = 0) -> Transformer:
    """The same for everybody."""
    torch.manual_seed(seed)
    return Transformer(task)


def trained(task: Task, subject: Subject, place: Place, *, slowed: float = 1.0) -> Iterator[float]:
    """Makes everything ready and yields once; then takes a step for each batch, and yields its loss before that."""
    source = text_of(task, seed=1 + place.index)
    model, optimizer = WAYS[subject.way](model_of(task), subject, place)
    # What torch and DDP do once only.
    loss_of(model, next(source)).backward()  # type: ignore[no-untyped-call]
    optimizer.zero_grad()
    yield 0.0
    for batch in source:
        began = time.thread_time()
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        # A slower processor, whose time is this thread's: waiting for others does not count.
        time.sleep((slowed - 1) * (time.thread_time() - began))
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    text, following = batch
    return functional.cross_entropy(model(text).flatten(0, 1), following.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=TASKS)
    parser.add_argument("--subject", required=True, choices=SUBJECTS)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--address", default="", help="host:port where the workers of torch find each other")
    parser.add_argument("--slowed", type=float, default=1.0, help="how many times as long its computing takes")
    parser.add_argument(
        "--serve", action="store_true", help="be the parameter server of torch RPC, or torchft's lighthouse"
    )
    options = parser.parse_args()
    task, subject = TASKS[options.task], SUBJECTS[options.subject]
    place = Place(options.index, options.count, options.address)
    if options.serve:
        if subject.way == "rpc":
            serve_rpc(task, subject, place)
        else:
            serve_lighthouse(place, least=place.count)
        return
    torch.set_num_threads(1)
    losses = trained(task, subject, place, slowed=options.slowed)
    next(losses)
    say("ready")
    wait_for_line("go")
    for loss in losses:
        say(f"{time.perf_counter()} {loss}")


def say(line: str) -> None:
    """Print in one piece, even without Python's buffer: all workers share a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
