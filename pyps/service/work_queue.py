"""The WorkQueue service on server 0: a data set's portions for workers, its passes for a coordinator.

A call that waits for a portion or for the end of a pass is a coroutine, never a thread.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import grpc

from pyps.run.handshake import RunState, check_name, check_run
from pyps.run.run import Run
from pyps.service import convert
from pyps.service.calls import Call
from pyps.service.executor import KernelExecutor
from pyps.service.leasing import (
    LEASES_MAX,
    LeaseCall,
    check_few,
    of_first_server,
    pass_of,
    queue_of,
    refuse_when_replaced,
)
from pyps.service.waiting import LongPoll, names_in_words
from pyps.service.work_messages import lease_reply, progress_to, spec_from, spec_to
from pyps.work import PassOutcome, WorkQueue
from pyps_wire import work_pb2 as wire
from pyps_wire.common_pb2 import Sender
from pyps_wire.contract import WORK_QUEUE
from pyps_wire.errors import BadRequest, NotInitialized, RunFinished, WaitTimedOut

LEASES_BYTES_MAX = convert.SMALL_BYTES_MAX + convert.LEASE_BYTES_MAX * LEASES_MAX
# Figures of its own that a coordinator may tell.
SCALARS_MAX = 256


class WorkQueueService:
    """The calls of pyps.v1.WorkQueue."""

    def __init__(self, run: Run, *, work: KernelExecutor):
        self._run = run
        self._work = work

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service's handlers: bytes in, bytes out."""
        calls = {
            "Open": self.open,
            "Lease": self.lease,
            "Claim": self.claim,
            "Deliver": self.deliver,
            "BeginPass": self.begin_pass,
            "AwaitPass": self.await_pass,
            "EndWork": self.end_work,
        }
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(call) for name, call in calls.items()
        }
        return grpc.method_handlers_generic_handler(WORK_QUEUE, methods)

    # A worker's.

    async def open(self, message: bytes, context: Call) -> bytes:
        """Says what the data set is."""
        request = convert.parse(wire.OpenWorkRequest, message)
        queue = queue_of(self._run, request.sender)
        queue.open(spec_from(request.data), worker_id=request.sender.worker_id)
        assert queue.spec is not None
        return wire.OpenWorkReply(data=spec_to(queue.spec), **{"pass": queue.pass_}).SerializeToString()

    async def lease(self, message: bytes, context: Call) -> bytes:
        """Answers with a portion when there is one, or with why none will come."""
        request = convert.parse(wire.LeaseRequest, message, bytes_max=LEASES_BYTES_MAX)
        answer = await LeaseCall(self._run, self._work, request).answer()
        return lease_reply(answer).SerializeToString()

    async def claim(self, message: bytes, context: Call) -> bytes:
        """Answers whether a portion's result counts."""
        request = convert.parse(wire.ClaimRequest, message)
        sender, queue = request.sender, queue_of(self._run, request.sender)
        claim = queue.claim(sender.worker_id, sender.incarnation, request.lease_id, now=self._run.clock())
        return wire.ClaimReply(granted=claim.accepted, message=claim.message).SerializeToString()

    async def deliver(self, message: bytes, context: Call) -> bytes:
        """Takes portions in."""
        request = convert.parse(wire.DeliverRequest, message, bytes_max=LEASES_BYTES_MAX)
        check_few(len(request.lease_ids))
        sender, queue = request.sender, queue_of(self._run, request.sender)
        if request.stage_id and request.stage_id not in request.lease_ids:
            raise BadRequest(
                f"worker {sender.worker_id!r} delivers stage {request.stage_id}, which is none of its leases: a stage "
                "goes by the first lease whose gradient is in it"
            )
        delivery = queue.deliver(
            sender.worker_id,
            sender.incarnation,
            request.lease_ids,
            stage_id=request.stage_id,
            loss_sum=request.loss_sum,
            example_count=request.example_count,
            now=self._run.clock(),
        )
        return wire.DeliverReply(accepted=delivery.accepted, message=delivery.message).SerializeToString()

    # The coordinator's.

    async def begin_pass(self, message: bytes, context: Call) -> bytes:
        """Begins a pass."""
        request = convert.parse(wire.BeginPassRequest, message)
        if len(request.scalars) > SCALARS_MAX:
            raise BadRequest(f"a pass comes with {len(request.scalars)} scalars; tell {SCALARS_MAX} at most")
        for name in request.scalars:
            check_name(name, what="a scalar's name")
        queue = self._coordinated_by(request.sender)
        self._refuse_when_over()
        self._require_coordinator(request)
        queue.begin_pass(
            pass_of(request),
            coordinator_epoch=request.coordinator_epoch,
            num_portions=request.num_portions,
            copies_max=request.copies_max,
            portions_per_stage=request.portions_per_stage,
            scalars=request.scalars,
        )
        return wire.BeginPassReply(num_workers=self._run.membership.num_alive).SerializeToString()

    async def await_pass(self, message: bytes, context: Call) -> bytes:
        """Answers when a pass is complete or the time is up; to who awaits pass 0, once there is a data set."""
        request = convert.parse(wire.AwaitPassRequest, message)
        queue = self._coordinated_by(request.sender)
        outcome = await self._awaited(request, queue)
        progress = progress_to(queue.progress())
        return wire.AwaitPassReply(**asdict(outcome), progress=progress).SerializeToString()

    async def end_work(self, message: bytes, context: Call) -> bytes:
        """Ends the work."""
        request = convert.parse(wire.EndWorkRequest, message)
        queue = self._coordinated_by(request.sender)
        self._require_coordinator(request)
        queue.end(coordinator_epoch=request.coordinator_epoch, message=convert.for_people(request.message))
        return wire.EndWorkReply().SerializeToString()

    # Waits.

    async def _awaited(self, request: wire.AwaitPassRequest, queue: WorkQueue) -> PassOutcome:
        run, pass_, wait_seconds = self._run, pass_of(request), request.wait_milliseconds / 1000
        what = f"the end of pass {pass_}" if pass_ else "workers that open a data set"
        waits_for = partial(queue.waits_for, "")
        poll = LongPoll(
            run,
            self._work,
            worker_id="",
            wait_seconds=wait_seconds,
            describe=lambda: f"the coordinator waits for {what}, for {names_in_words(waits_for()) or 'workers'}",
            waits_for=waits_for,
        )
        try:
            while True:
                poll.look()
                self._refuse_when_over()
                refuse_when_replaced(self._run, queue)
                outcome = queue.await_pass(pass_, coordinator_epoch=request.coordinator_epoch, wake=poll.wake)
                if outcome.complete or not wait_seconds or (pass_ == 0 and queue.spec is not None):
                    return outcome
                await poll.wait()
        except WaitTimedOut:
            return PassOutcome(complete=False)
        finally:
            queue.forget(poll.wake)

    # Who may ask.

    def _coordinated_by(self, sender: Sender) -> WorkQueue:
        """The queue, for a coordinator of the run."""
        if self._run.content.partition is None:
            raise NotInitialized("this server holds no run yet: a worker that starts brings it")
        check_run(sender.run_id, self._run.holding(), observer=True)
        return of_first_server(self._run)

    def _require_coordinator(self, request: wire.BeginPassRequest | wire.EndWorkRequest) -> None:
        machine = self._run.content.machine
        assert machine is not None
        machine.require_coordinator(request.coordinator_epoch, request.sender.secret)

    def _refuse_when_over(self) -> None:
        if self._run.state is RunState.FINISHED:
            raise RunFinished("the run has finished: no pass over its data set ends any more")
