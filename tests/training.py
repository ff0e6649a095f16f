"""Models and data for tests of training with torch, and workers on a work queue in this process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from client_support import RecordingSession
from pyps.core.rules import RULES, validate
from pyps.work import DataSpec, WorkQueue
from pyps_client import RemoteOptimizer
from pyps_client.data import Portions
from pyps_client.launch import Launch
from pyps_client.torch.layout import Layout, plan
from pyps_client.torch.overlap import steps_of
from pyps_client.torch.schedule import Settings
from pyps_client.torch.steps import Steps
from pyps_wire import work_pb2 as wire
from pyps_wire.codecs import FLOAT32
from pyps_wire.common_pb2 import OptimizerSettings, Sender
from pyps_wire.errors import WaitTimedOut

torch.set_num_threads(1)


def mlp(seed: int = 0) -> torch.nn.Sequential:
    """A network of 4,522 parameters: enough for shards on each of three servers."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
    )


def batches(count: int, *, size: int = 16, seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        inputs = torch.randn(size, 32, generator=generator)
        yield inputs, torch.randint(10, (size,), generator=generator)


def backward(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    model.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss.detach()


def train(data: Iterable[tuple[torch.Tensor, torch.Tensor]], *pairs: tuple[torch.nn.Module, Any]) -> None:
    """Takes a step on each minibatch, with each model and its optimizer."""
    for batch in data:
        for model, optimizer in pairs:
            backward(model, batch)
            optimizer.step()


def remote(model: torch.nn.Module, servers: Any, *, lr: float = 0.1, **settings: Any) -> Any:
    """An SGD that has joined its run; `servers`: a server, or addresses."""
    return joined(model, torch.optim.SGD(model.parameters(), lr=lr), getattr(servers, "data", servers), **settings)


def joined(model: torch.nn.Module, optimizer: torch.optim.Optimizer, servers: Any = None, **settings: Any) -> Any:
    """A RemoteOptimizer that has joined its run, by settings of its own and of its Launch."""
    names = settings.keys() & Launch.__dataclass_fields__.keys()
    launch = Launch(servers, **{name: settings.pop(name) for name in names})
    optimizer = RemoteOptimizer(model, optimizer, launch=launch, **settings)
    optimizer.join()
    return optimizer


def layout_of(model: torch.nn.Module) -> Layout:
    return plan(model, [{"params": list(model.parameters())}])


def started_steps(session: Any, model: torch.nn.Module, *, local: float = 0.0, **settings: Any) -> Steps:
    """A worker's steps on a session without a network, its parameters already pulled; `local`: local steps' rate."""
    torch.set_num_threads(1)
    steps = steps_of(session, layout_of(model), Settings(**settings), local_rates=lambda: [local])
    steps.start()
    return steps


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

    Returns the examples that this worker computed in each iteration, and the loss in the end. `step_seconds`: how slow
    it is.
    """
    inputs = torch.randn(examples, 8, generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = torch.nn.Linear(8, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    where = {"run_id": "portions", "worker_id": worker_id}
    counts = []
    with joined(model, sgd, servers, **where, push_every=push_every, overlap=overlap) as optimizer:
        portions = Portions(dataset, optimizer, batch_size=4, epochs=epochs, portion_batches=portion_batches)
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
        rule = RULES[settings.rule]
        self.hyperparameters = validate(rule, dict(settings.groups[0].hyperparameters))
        self.parameters = parameters
        slots = rule.make_slots(len(parameters), self.hyperparameters)
        self._rule = rule.bind(parameters, slots, self.hyperparameters)
        self._version = 0

    def step(self, gradient: np.ndarray, rate: float) -> None:
        self._rule.apply([(gradient.tobytes(), FLOAT32, 1.0)], rate=rate, version=self._version)
        self._version += 1


# For Sandblaster's workers.

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


# Portions: a work queue in this process, and workers that take part in it without a network.

SIZE = 4
_incarnations = itertools.count(1)


def make_queue(**settings: Any) -> WorkQueue:
    return WorkQueue(**{"stall_seconds": 1e9} | settings)


class QueueSession(RecordingSession):
    """A session whose server 0 is a queue in this process."""

    def __init__(
        self, queue: WorkQueue, worker_id: str, *, wait_seconds: float = 60.0, server: str = "127.0.0.1:1"
    ) -> None:
        super().__init__([np.zeros(SIZE, np.float32)])
        self.launch = Launch(servers=(server,), worker_id=worker_id, wait_seconds=wait_seconds)
        self.sender = Sender(worker_id=worker_id, incarnation=next(_incarnations))
        self.batch_size = 0
        self.run_id = "run"
        self.channel: Any = QueueChannel(queue)

    def ask_first(self, operation: Callable[[Any, threading.Event], Any], *, each: bool = False) -> Any:
        return operation(self.channel, threading.Event())


class QueueChannel:
    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue

    def call(self, method: str, request: Any, reply: type, *, timeout_seconds: float) -> Any:
        return getattr(self, method.lower())(request.sender, request)

    def open(self, sender: Sender, request: wire.OpenWorkRequest) -> wire.OpenWorkReply:
        data = {field.name: getattr(request.data, field.name) for field in request.data.DESCRIPTOR.fields}
        self._queue.open(DataSpec(**data), worker_id=sender.worker_id)
        return wire.OpenWorkReply(data=request.data)

    def lease(self, sender: Sender, request: wire.LeaseRequest) -> wire.LeaseReply:
        woken = threading.Event()
        pass_ = getattr(request, "pass") if request.HasField("pass") else None
        held: list[int] | None = list(request.held)
        wake = woken.set if request.wait_milliseconds else None
        if wake is not None:
            self._queue.announce(sender.worker_id, wake)
        asked = {"pass_": pass_, "passes": request.passes, "now": 0.0, "wake": wake}
        answer = self._queue.lease(sender.worker_id, sender.incarnation, held=held, **asked)
        while answer.outcome == wire.LeaseReply.OUTCOME_NOTHING_NOW and request.wait_milliseconds:
            if not woken.wait(request.wait_milliseconds / 1000):
                self._queue.forget(woken.set)
                raise WaitTimedOut("others")
            woken.clear()
            answer = self._queue.lease(sender.worker_id, sender.incarnation, **asked)
        return answer

    def deliver(self, sender: Sender, request: wire.DeliverRequest) -> wire.DeliverReply:
        answer = self._queue.deliver(
            *(sender.worker_id, sender.incarnation, list(request.lease_ids)),
            example_count=request.example_count,
            now=0.0,
        )
        return wire.DeliverReply(accepted=answer.accepted, message=answer.message)


class Stopped(Exception):
    """Raised where a loop goes on although the run is over."""


class PortionWorker:
    def __init__(self, queue: WorkQueue, worker_id: str = "a", *, has: Mapping[str, Any] | None = None, **pace: Any):
        self.session = QueueSession(queue, worker_id)
        for name, value in (has or {}).items():
            setattr(self.session, name, value)
        model = torch.nn.Linear(SIZE, 1, bias=False)
        self.weight = model.weight
        self.stepper = started_steps(self.session, model, **pace)
        self.stepper.tell_over = self._end  # type: ignore[method-assign]

    def step(self) -> None:
        self.stepper.step([torch.ones(1, SIZE)])

    def _end(self) -> None:
        raise Stopped
