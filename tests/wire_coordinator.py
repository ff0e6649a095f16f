"""Callers of a server's vectors and work queue on the generated stubs: a coordinator, its workers, and who looks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from pyps_wire import common_pb2 as common
from pyps_wire import vector_machine_pb2 as wire
from pyps_wire import work_pb2 as work
from pyps_wire.vector_machine_pb2_grpc import VectorMachineStub
from pyps_wire.work_pb2_grpc import WorkQueueStub
from support import DEADLINE_SECONDS, inspect, status_of, wait_until
from wire_worker import Floats, WireWorker, crew

# Room for a few vectors, a pair of history and two stages.
PLAN = {"history_pairs": 1, "vectors_float32": 4, "vectors_float64": 1, "stages": 2, "num_portions": 8}


def instruction(operation: str, **fields: object) -> wire.Instruction:
    """One instruction: instruction("DOT", left="x", right="y")."""
    names = {"precision": "PRECISION_FLOAT32"} if operation == "ALLOC" else {}
    return wire.Instruction(operation=f"OPERATION_{operation}", **{**names, **fields})


class WireCoordinator:
    """A coordinator of one server, over a worker's connection."""

    def __init__(self, worker: WireWorker, *, run_id: str = "run-1") -> None:
        self.stub = VectorMachineStub(worker.channel)
        self.sender = common.Sender(run_id=run_id)
        self.epoch = 0
        self.op_seq = 0

    def attach(self, coordinator_epoch: int = 0, **plan: int) -> wire.AttachReply:
        """Becomes the coordinator."""
        request = wire.AttachRequest(sender=self.sender, coordinator_epoch=coordinator_epoch, **{**PLAN, **plan})
        reply = self.stub.Attach(request, timeout=DEADLINE_SECONDS)
        self.epoch, self.op_seq = reply.coordinator_epoch, 0
        return reply

    def request(self, *instructions: wire.Instruction, commits: int = 0, state: str = "") -> wire.ExecuteRequest:
        """The next program."""
        return wire.ExecuteRequest(
            sender=self.sender,
            coordinator_epoch=self.epoch,
            op_seq=self.op_seq + 1,
            instructions=instructions,
            commits_iteration=commits,
            state=state,
        )

    def execute(self, *instructions: wire.Instruction, commits: int = 0, state: str = "") -> wire.ExecuteReply:
        """Executes the next program."""
        reply = self.stub.Execute(self.request(*instructions, commits=commits, state=state), timeout=DEADLINE_SECONDS)
        self.op_seq += 1
        return reply


def stage_messages(worker: WireWorker, values: Floats, **fields: int) -> Iterator[wire.StageRequest]:
    """A stage of these numbers, all shards end to end."""
    shards = worker.plan.of_server(worker.server_index)
    cuts = np.split(values, np.cumsum([shard.length for shard in shards])[:-1])
    for shard, part in zip(shards, cuts, strict=True):
        given = {"pass": 1, "portion_id": 0, "stage_id": 1, "num_shards": len(shards), **fields}
        yield wire.StageRequest(
            sender=worker.sender,
            shard_id=shard.shard_id,
            codec=common.CODEC_FLOAT32,
            payload=part.astype(np.float32).tobytes(),
            **given,
        )


def stage(worker: WireWorker, messages: list[wire.StageRequest]) -> wire.StageReply:
    """Sends the messages in one stream."""
    return VectorMachineStub(worker.channel).Stage(iter(messages), timeout=DEADLINE_SECONDS)


# The work queue.

TRAIN = work.DataSpec(name="train", num_examples=20, portion_examples=4)
COORDINATED = work.DataSpec(name="train", num_examples=20, coordinated=True)


class Portions:
    """The calls of one worker."""

    def __init__(self, worker: WireWorker) -> None:
        self.worker = worker
        self.stub = WorkQueueStub(worker.channel)
        self.held: list[int] = []

    def open(self, data: work.DataSpec = TRAIN) -> work.OpenWorkReply:
        return self.stub.Open(work.OpenWorkRequest(sender=self.worker.sender, data=data), timeout=DEADLINE_SECONDS)

    def request(self, pass_: int | None = None, seconds: float = 0.0) -> work.LeaseRequest:
        request = work.LeaseRequest(sender=self.worker.sender, wait_milliseconds=round(seconds * 1000), held=self.held)
        if pass_ is not None:
            setattr(request, "pass", pass_)
        return request

    def lease(self, pass_: int | None = None, seconds: float = 0.0) -> work.LeaseReply:
        reply = self.stub.Lease(self.request(pass_, seconds), timeout=DEADLINE_SECONDS)
        if reply.outcome == work.LeaseReply.OUTCOME_LEASED:
            self.held.append(reply.portion.lease_id)
        return reply

    def waiting(self, pass_: int | None = None, seconds: float = 50.0):
        return self.stub.Lease.future(self.request(pass_, seconds), timeout=DEADLINE_SECONDS)

    def claim(self, leased: work.LeaseReply) -> work.ClaimReply:
        request = work.ClaimRequest(sender=self.worker.sender, lease_id=leased.portion.lease_id)
        return self.stub.Claim(request, timeout=DEADLINE_SECONDS)

    def deliver(self, leased: work.LeaseReply, *, stage_id: int = 0, loss_sum: float = 0.0) -> work.DeliverReply:
        request = work.DeliverRequest(
            sender=self.worker.sender,
            lease_ids=[leased.portion.lease_id],
            stage_id=stage_id,
            loss_sum=loss_sum,
            example_count=leased.portion.stop - leased.portion.start,
        )
        self.held.remove(leased.portion.lease_id)
        return self.stub.Deliver(request, timeout=DEADLINE_SECONDS)

    def finish(self, pass_: int) -> None:
        """Does what is left of a pass."""
        while (reply := self.lease(pass_)).outcome == work.LeaseReply.OUTCOME_LEASED:
            assert self.deliver(reply).accepted
        assert reply.outcome == work.LeaseReply.OUTCOME_PASS_DONE


class Coordinator:
    """The calls of a coordinator, which is an observer."""

    def __init__(self, worker: WireWorker, *, epoch: int = 1) -> None:
        self.stub = WorkQueueStub(worker.channel)
        self.sender = common.Sender(run_id=worker.sender.run_id)
        self.epoch = epoch

    def begin(self, pass_: int, *, num_portions: int = 2, **fields: object) -> work.BeginPassReply:
        request = work.BeginPassRequest(
            sender=self.sender,
            coordinator_epoch=self.epoch,
            num_portions=num_portions,
            **{"pass": pass_, "copies_max": 2, "portions_per_stage": 1} | fields,
        )
        return self.stub.BeginPass(request, timeout=DEADLINE_SECONDS)

    def wait(self, pass_: int, seconds: float = 0.0) -> work.AwaitPassReply:
        request = work.AwaitPassRequest(
            sender=self.sender,
            coordinator_epoch=self.epoch,
            wait_milliseconds=round(seconds * 1000),
            **{"pass": pass_},
        )
        return self.stub.AwaitPass(request, timeout=DEADLINE_SECONDS)

    def waiting(self, pass_: int):
        request = work.AwaitPassRequest(
            sender=self.sender, coordinator_epoch=self.epoch, wait_milliseconds=50_000, **{"pass": pass_}
        )
        return self.stub.AwaitPass.future(request, timeout=DEADLINE_SECONDS)

    def end(self, message: str) -> None:
        request = work.EndWorkRequest(sender=self.sender, coordinator_epoch=self.epoch, message=message)
        self.stub.EndWork(request, timeout=DEADLINE_SECONDS)


@contextlib.contextmanager
def opened(server, num_workers: int = 2, data: work.DataSpec = TRAIN):
    """Workers that have opened a data set."""
    with crew(server, num_workers) as workers:
        portions = [Portions(worker) for worker in workers]
        for portion in portions:
            portion.open(data)
        yield portions


def work_of(server, *, deliveries: bool = False) -> work.WorkProgress:
    return inspect(server.control, "GetWork", work.GetWorkRequest(deliveries=deliveries))


def counted(server, pass_: int) -> list[int]:
    """The examples of a pass in the delivery log."""
    log = work_of(server, deliveries=True).deliveries
    return sorted(
        example for d in log if getattr(d, "pass") == pass_ for example in range(d.portion.start, d.portion.stop)
    )


def wait_for_waits(server, count: int) -> list[str]:
    return wait_until(lambda: (waits := list(status_of(server).waiting_for)) and len(waits) == count and waits, 60)
