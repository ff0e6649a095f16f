"""A coordinator by hand, straight on the generated stubs: what tests of Sandblaster's workers are led by."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from pyps_client import Observer
from pyps_wire import vector_machine_pb2 as machine
from pyps_wire import work_pb2 as work
from pyps_wire.common_pb2 import Sender
from pyps_wire.vector_machine_pb2_grpc import VectorMachineStub
from pyps_wire.work_pb2_grpc import WorkQueueStub
from support import AnyServer, wait_until
from wire_worker import CHANNEL_OPTIONS

CALL_SECONDS = 60.0
Operation = machine.Instruction


class Conductor:
    """Leads the workers of a run through passes over their data set. A context manager.

    Made once a worker has opened the data set. The vector "g" is the mean gradient of the last pass that was folded.
    """

    def __init__(self, servers: Sequence[AnyServer], *, run_id: str = "blast") -> None:
        self.servers = ",".join(server.data for server in servers)
        self.sender = Sender(run_id=run_id, worker_id="conductor", incarnation=time.time_ns())
        self._channels = [grpc.insecure_channel(server.data, options=CHANNEL_OPTIONS) for server in servers]
        self.queue = WorkQueueStub(self._channels[0])
        self._machines = [VectorMachineStub(channel) for channel in self._channels]
        self._op_seq = 0
        self.epoch = 0
        self.pass_ = 0

    def opened(self) -> bool:
        """Whether the run has begun and a worker has said what the data set is."""
        try:
            return self.state().progress.HasField("data")
        except grpc.RpcError:
            return False

    def attach(self) -> None:
        """Becomes the coordinator of every server."""
        for stub in self._machines:
            plan = machine.AttachRequest(
                sender=self.sender,
                coordinator_epoch=self.epoch,
                history_pairs=1,
                vectors_float32=4,
                vectors_float64=1,
                stages=64,
                num_portions=64,
            )
            self.epoch = stub.Attach(plan, timeout=CALL_SECONDS).coordinator_epoch
        self._op_seq = 0
        self.execute(
            machine.Instruction(operation=Operation.OPERATION_ALLOC, target="g", precision="PRECISION_FLOAT32")
        )

    def execute(self, *instructions: machine.Instruction) -> None:
        """Has every server execute these."""
        self._op_seq += 1
        for stub in self._machines:
            request = machine.ExecuteRequest(
                sender=self.sender,
                coordinator_epoch=self.epoch,
                op_seq=self._op_seq,
                instructions=instructions,
            )
            stub.Execute(request, timeout=CALL_SECONDS)

    def begin(self, *, portions: int, copies: int = 1, per_stage: int = 1) -> None:
        """Begins the next pass."""
        self.pass_ += 1
        self.execute(machine.Instruction(operation=Operation.OPERATION_BEGIN_PASS, count=self.pass_))
        request = work.BeginPassRequest(
            sender=self.sender,
            coordinator_epoch=self.epoch,
            num_portions=portions,
            copies_max=copies,
            portions_per_stage=per_stage,
            **self._number(),
        )
        self.queue.BeginPass(request, timeout=CALL_SECONDS)

    def state(self, *, wait_seconds: float = 0.0) -> work.AwaitPassReply:
        """How the pass stands."""
        request = work.AwaitPassRequest(
            sender=self.sender,
            coordinator_epoch=self.epoch,
            wait_milliseconds=round(wait_seconds * 1000),
            **self._number(),
        )
        reply: work.AwaitPassReply = self.queue.AwaitPass(request, timeout=CALL_SECONDS + wait_seconds)
        return reply

    def outcome(self) -> work.AwaitPassReply:
        """What the pass came to, once it is complete."""

        def complete() -> work.AwaitPassReply | None:
            reply = self.state(wait_seconds=1)
            return reply if reply.complete else None

        reply = wait_until(complete, what="the end of the pass")
        assert reply is not None
        return reply

    def run_pass(self, **described: Any) -> work.AwaitPassReply:
        """Begins a pass, awaits its end, and folds its stages into "g"."""
        self.begin(**described)
        outcome = self.outcome()
        if outcome.stage_ids:
            self.execute(
                machine.Instruction(
                    operation=Operation.OPERATION_FOLD,
                    target="g",
                    stage_ids=outcome.stage_ids,
                    count=outcome.example_count,
                )
            )
        return outcome

    def step(self, length: float) -> None:
        """parameters = parameters - length g"""
        self.execute(
            machine.Instruction(operation=Operation.OPERATION_MOVE, left="parameters", right="g", scalar=-length)
        )

    def parameters(self) -> dict[str, npt.NDArray[np.float32]]:
        """The servers' parameters by name."""
        with Observer(self.servers, run_id=self.sender.run_id) as observer:
            return observer.snapshot()

    def end(self, message: str = "enough") -> None:
        """Ends the work."""
        request = work.EndWorkRequest(sender=self.sender, coordinator_epoch=self.epoch, message=message)
        self.queue.EndWork(request, timeout=CALL_SECONDS)

    def __enter__(self) -> Conductor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            channel.close()

    def _number(self) -> dict[str, Any]:
        # The field's name is a keyword of Python's.
        return {"pass": self.pass_}
