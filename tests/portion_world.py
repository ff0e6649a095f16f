"""A queue of portions in this process, and workers of Downpour that take part in it without a network."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from pyps.work.answers import Ended, Leased, NothingNow, PassDone
from pyps.work.data_spec import DataSpec
from pyps.work.work_queue import WorkQueue
from pyps_client.launch import Launch
from pyps_client.torch.downpour import Downpour
from pyps_client.torch.layout import plan
from pyps_client.torch.pace import Pace
from pyps_client.torch.stepper import TorchStepper
from pyps_wire import work_pb2 as wire
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import WaitTimedOut
from recording_session import RecordingSession

SIZE = 4
_incarnations = itertools.count(1)


def queue(**settings: Any) -> WorkQueue:
    """A queue in which nobody is ever taken to be stuck."""
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

    def ask_first(self, operation: Callable[[Any, threading.Event], Any]) -> Any:
        return operation(self.channel, threading.Event())


class QueueChannel:
    """The service WorkQueue without a wire."""

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
        asked = {"pass_": pass_, "now": 0.0, "wake": woken.set if request.wait_milliseconds else None}
        answer = self._queue.lease(sender.worker_id, sender.incarnation, held=held, **asked)
        while isinstance(answer, NothingNow) and request.wait_milliseconds:
            if not woken.wait(request.wait_milliseconds / 1000):
                self._queue.forget(woken.set)
                raise WaitTimedOut("others")
            woken.clear()
            answer = self._queue.lease(sender.worker_id, sender.incarnation, again=True, **asked)
        said: dict[str, Any] = {"pass": answer.pass_}
        if isinstance(answer, Leased):
            portion = wire.Portion(**asdict(answer.portion))
            return wire.LeaseReply(outcome="OUTCOME_LEASED", portion=portion, batch_size=answer.batch_size, **said)
        if isinstance(answer, PassDone):
            return wire.LeaseReply(outcome="OUTCOME_PASS_DONE", **said)
        if isinstance(answer, Ended):
            return wire.LeaseReply(outcome="OUTCOME_ENDED", message=answer.message, **said)
        return wire.LeaseReply(outcome="OUTCOME_NOTHING_NOW", **said)

    def deliver(self, sender: Sender, request: wire.DeliverRequest) -> wire.DeliverReply:
        answer = self._queue.deliver(
            *(sender.worker_id, sender.incarnation, list(request.lease_ids)),
            example_count=request.example_count,
            now=0.0,
        )
        return wire.DeliverReply(accepted=answer.accepted, message=answer.message)


class Stopped(Exception):
    """Raised where a loop goes on although the run is over."""


class Worker:
    """One that trains: Downpour on a session that records."""

    def __init__(self, queue: WorkQueue, worker_id: str = "a", *, has: Mapping[str, Any] | None = None, **pace: Any):
        torch.set_num_threads(1)
        self.session = QueueSession(queue, worker_id)
        for name, value in (has or {}).items():
            setattr(self.session, name, value)
        model = torch.nn.Linear(SIZE, 1, bias=False)
        self.weight = model.weight
        layout = plan(model, [{"params": list(model.parameters())}])
        self.downpour = Downpour(self.session, layout, pace=Pace(**pace), local_rates=lambda: [0.0])
        self.downpour.start()
        self.examples_in_batch: int | None = None
        self.stepper = TorchStepper(self, self.session, self.downpour)  # type: ignore[arg-type]

    def step(self) -> None:
        self.downpour.step([torch.ones(1, SIZE)], example_count=self.examples_in_batch or 0)

    def tell_over(self) -> None:
        raise Stopped


def delivered(queue: WorkQueue, pass_: int) -> list[int]:
    """The examples of the portions that were delivered in a pass, in order."""
    log = [entry for entry in queue.progress(0.0, deliveries=True).deliveries if entry.pass_ == pass_]
    return sorted(place for entry in log for place in range(entry.portion.start, entry.portion.stop))
