"""The service that workers call, without a network: what is done on the event loop, and what is not."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyps.config import resolve
from pyps.run import Greeting, Run
from pyps.run.handshake import Welcome
from pyps.service.limits import ByteBudget
from pyps.service.parameter_server import ParameterServer
from pyps.service.serializations import Serializations
from pyps.service.workbench import Workbench
from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.contract import PROTOCOL_VERSION
from pyps_wire.partition import Model, Tensor


class Watched(Run):
    """A run that notes on which threads it hears Hello."""

    def __init__(self) -> None:
        super().__init__(resolve({"optimizer": "sgd:learning_rate=1"}, {}, warn=print))
        self.threads: list[threading.Thread] = []

    def hello(self, greeting: Greeting) -> Welcome:
        self.threads.append(threading.current_thread())
        return super().hello(greeting)


def greeting_with(num_tensors: int) -> bytes:
    """A worker's Hello with that many small tensors."""
    model = Model(tuple(Tensor(f"tensor.{number}", (2, 3)) for number in range(num_tensors)))
    return wire.HelloRequest(
        sender=common.Sender(run_id="r", worker_id="a", incarnation=time.time_ns()),
        protocol_version=PROTOCOL_VERSION,
        role=common.ROLE_WORKER,
        num_servers=1,
        model=model.to_proto(),
    ).SerializeToString()


def test_a_large_model_is_read_and_checked_off_the_event_loop() -> None:
    for num_tensors, on_the_loop in ((10, True), (2000, False)):
        run, context = Watched(), Any
        with ThreadPoolExecutor(1) as executor:
            service = ParameterServer(
                run,
                budget=ByteBudget(2**20),
                work=Workbench(executor),
                serializations=Serializations(),
                control_address="",
            )
            answer = asyncio.run(service.hello(greeting_with(num_tensors), context))  # type: ignore[arg-type]
        assert wire.HelloReply.FromString(answer).initialize
        assert [thread is threading.current_thread() for thread in run.threads] == [on_the_loop], num_tensors
