"""Callers of a server's work queue on the generated stubs: workers, a coordinator, and whoever looks."""

from __future__ import annotations

import contextlib

from inspection import inspect
from pyps_wire import common_pb2 as common
from pyps_wire import work_pb2 as wire
from pyps_wire.work_pb2_grpc import WorkQueueStub
from support import wait_until
from wire_crew import crew, status_of
from wire_worker import CALL_SECONDS, WireWorker

TRAIN = wire.DataSpec(name="train", num_examples=20, portion_examples=4)
COORDINATED = wire.DataSpec(name="train", num_examples=20, coordinated=True)


class Portions:
    """The calls of one worker."""

    def __init__(self, worker: WireWorker) -> None:
        self.worker = worker
        self.stub = WorkQueueStub(worker.channel)
        self.held: list[int] = []

    def open(self, data: wire.DataSpec = TRAIN) -> wire.OpenWorkReply:
        return self.stub.Open(wire.OpenWorkRequest(sender=self.worker.sender, data=data), timeout=CALL_SECONDS)

    def request(self, pass_: int | None = None, seconds: float = 0.0) -> wire.LeaseRequest:
        request = wire.LeaseRequest(sender=self.worker.sender, wait_milliseconds=round(seconds * 1000), held=self.held)
        if pass_ is not None:
            setattr(request, "pass", pass_)
        return request

    def lease(self, pass_: int | None = None, seconds: float = 0.0) -> wire.LeaseReply:
        reply = self.stub.Lease(self.request(pass_, seconds), timeout=CALL_SECONDS)
        if reply.outcome == wire.LeaseReply.OUTCOME_LEASED:
            self.held.append(reply.portion.lease_id)
        return reply

    def waiting(self, pass_: int | None = None, seconds: float = 50.0):
        return self.stub.Lease.future(self.request(pass_, seconds), timeout=CALL_SECONDS)

    def claim(self, leased: wire.LeaseReply) -> wire.ClaimReply:
        request = wire.ClaimRequest(sender=self.worker.sender, lease_id=leased.portion.lease_id)
        return self.stub.Claim(request, timeout=CALL_SECONDS)

    def deliver(self, leased: wire.LeaseReply, *, stage_id: int = 0, loss_sum: float = 0.0) -> wire.DeliverReply:
        request = wire.DeliverRequest(
            sender=self.worker.sender,
            lease_ids=[leased.portion.lease_id],
            stage_id=stage_id,
            loss_sum=loss_sum,
            example_count=leased.portion.stop - leased.portion.start,
        )
        self.held.remove(leased.portion.lease_id)
        return self.stub.Deliver(request, timeout=CALL_SECONDS)

    def finish(self, pass_: int) -> None:
        """Does what is left of a pass."""
        while (reply := self.lease(pass_)).outcome == wire.LeaseReply.OUTCOME_LEASED:
            assert self.deliver(reply).accepted
        assert reply.outcome == wire.LeaseReply.OUTCOME_PASS_DONE


class Coordinator:
    """The calls of a coordinator, which is an observer."""

    def __init__(self, worker: WireWorker, *, epoch: int = 1) -> None:
        self.stub = WorkQueueStub(worker.channel)
        self.sender = common.Sender(run_id=worker.sender.run_id)
        self.epoch = epoch

    def begin(self, pass_: int, *, num_portions: int = 2, **fields: object) -> wire.BeginPassReply:
        request = wire.BeginPassRequest(
            sender=self.sender,
            coordinator_epoch=self.epoch,
            num_portions=num_portions,
            **{"pass": pass_, "copies_max": 2, "portions_per_stage": 1} | fields,
        )
        return self.stub.BeginPass(request, timeout=CALL_SECONDS)

    def wait(self, pass_: int, seconds: float = 0.0) -> wire.AwaitPassReply:
        request = wire.AwaitPassRequest(
            sender=self.sender,
            coordinator_epoch=self.epoch,
            wait_milliseconds=round(seconds * 1000),
            **{"pass": pass_},
        )
        return self.stub.AwaitPass(request, timeout=CALL_SECONDS)

    def waiting(self, pass_: int):
        request = wire.AwaitPassRequest(
            sender=self.sender, coordinator_epoch=self.epoch, wait_milliseconds=50_000, **{"pass": pass_}
        )
        return self.stub.AwaitPass.future(request, timeout=CALL_SECONDS)

    def end(self, message: str) -> None:
        request = wire.EndWorkRequest(sender=self.sender, coordinator_epoch=self.epoch, message=message)
        self.stub.EndWork(request, timeout=CALL_SECONDS)


@contextlib.contextmanager
def opened(server, num_workers: int = 2, data: wire.DataSpec = TRAIN):
    """Workers that have opened a data set."""
    with crew(server, num_workers) as workers:
        portions = [Portions(worker) for worker in workers]
        for portion in portions:
            portion.open(data)
        yield portions


def work_of(server, *, deliveries: bool = False) -> wire.WorkProgress:
    return inspect(server.control, "GetWork", wire.GetWorkRequest(deliveries=deliveries))


def counted(server, pass_: int) -> list[int]:
    """The examples of a pass in the delivery log."""
    log = work_of(server, deliveries=True).deliveries
    return sorted(
        example for d in log if getattr(d, "pass") == pass_ for example in range(d.portion.start, d.portion.stop)
    )


def wait_for_waits(server, count: int) -> list[str]:
    return wait_until(lambda: (waits := list(status_of(server).waiting_for)) and len(waits) == count and waits, 60)
