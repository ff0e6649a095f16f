"""The WorkQueue service on server 0: a data set's portions for workers, its passes for a coordinator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, fields
from functools import partial, wraps
from typing import Any, TypeAlias

from pyps.run.handshake import RunState, check_name, check_run
from pyps.run.run import Run
from pyps.service import convert
from pyps.service.calls import Call
from pyps.service.executor import KernelExecutor
from pyps.service.transport import Host
from pyps.service.waiting import LongPoll, names_in_words
from pyps.work import DataSpec, WorkQueue, lease_reply
from pyps_wire import work_pb2 as wire
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import InvalidArgument, NotInitialized, RunFinished, WaitTimedOut

# Leases that a message may name.
LEASES_MAX = 100_000
LEASES_BYTES_MAX = convert.SMALL_BYTES_MAX + convert.LEASE_BYTES_MAX * LEASES_MAX
# Figures that a coordinator may send with a pass.
SCALARS_MAX = 256

Ask: TypeAlias = Callable[[], wire.LeaseReply]
Method: TypeAlias = Callable[[Any, bytes, Call], Awaitable[bytes]]


def _followed(method: Method) -> Method:
    """Answer once the standby has received what the call has changed."""

    @wraps(method)
    async def call(self: WorkQueueService, message: bytes, context: Call) -> bytes:
        reply = await method(self, message, context)
        if self._feed.guards:
            self._feed.add_work(self._run.work)
            if (received := self._feed.wait()) is not None:
                await received
        return reply

    return call


class WorkQueueService:
    """The calls of pyps.v1.WorkQueue."""

    def __init__(self, host: Host):
        self._run = host.run
        self._work = host.work
        self._feed = host.feed

    @_followed
    async def Open(self, message: bytes, context: Call) -> bytes:
        request = convert.parse(wire.OpenWorkRequest, message)
        queue = _queue_of(self._run, request.sender)
        queue.open(spec_from(request.data), worker_id=request.sender.worker_id)
        assert queue.spec is not None
        return wire.OpenWorkReply(data=wire.DataSpec(**asdict(queue.spec)), **{"pass": queue.pass_}).SerializeToString()

    async def Lease(self, message: bytes, context: Call) -> bytes:
        """Answer with a portion once there is one, or with the reason why there will be none."""
        request = convert.parse(wire.LeaseRequest, message, bytes_max=LEASES_BYTES_MAX)
        return (await lease_portion(self._run, self._work, request)).SerializeToString()

    async def Claim(self, message: bytes, context: Call) -> bytes:
        """Accept or refuse a portion's result."""
        request = convert.parse(wire.ClaimRequest, message)
        sender, queue = request.sender, _queue_of(self._run, request.sender)
        claim = queue.claim(sender.worker_id, sender.incarnation, request.lease_id, now=self._run.clock())
        return wire.ClaimReply(granted=claim.accepted, message=claim.message).SerializeToString()

    @_followed
    async def Deliver(self, message: bytes, context: Call) -> bytes:
        """Accept or refuse portions whose gradients are pushed or staged."""
        request = convert.parse(wire.DeliverRequest, message, bytes_max=LEASES_BYTES_MAX)
        _require_few(len(request.lease_ids))
        sender, queue = request.sender, _queue_of(self._run, request.sender)
        if request.stage_id and request.stage_id not in request.lease_ids:
            raise InvalidArgument(
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

    @_followed
    async def BeginPass(self, message: bytes, context: Call) -> bytes:
        request = convert.parse(wire.BeginPassRequest, message)
        if len(request.scalars) > SCALARS_MAX:
            raise InvalidArgument(f"a pass has {len(request.scalars)} scalars; expected {SCALARS_MAX} at most")
        for name in request.scalars:
            check_name(name, what="a scalar's name")
        queue = self._coordinated_by(request.sender)
        self._refuse_when_over()
        self._require_coordinator(request)
        queue.begin_pass(
            _pass_of(request),
            coordinator_epoch=request.coordinator_epoch,
            num_portions=request.num_portions,
            copies_max=request.copies_max,
            portions_per_stage=request.portions_per_stage,
            scalars=request.scalars,
        )
        return wire.BeginPassReply(num_workers=self._run.membership.num_alive).SerializeToString()

    async def AwaitPass(self, message: bytes, context: Call) -> bytes:
        """Answer when a pass is complete or the time is up; for pass 0, once there is a data set."""
        request = convert.parse(wire.AwaitPassRequest, message)
        queue = self._coordinated_by(request.sender)
        try:
            reply = await self._wait_for_pass(request, queue)
        except WaitTimedOut:
            reply = wire.AwaitPassReply(complete=False)
        reply.progress.CopyFrom(queue.progress())
        return reply.SerializeToString()

    @_followed
    async def EndWork(self, message: bytes, context: Call) -> bytes:
        request = convert.parse(wire.EndWorkRequest, message)
        queue = self._coordinated_by(request.sender)
        self._require_coordinator(request)
        queue.end(coordinator_epoch=request.coordinator_epoch, message=convert.for_people(request.message))
        return wire.EndWorkReply().SerializeToString()

    async def _wait_for_pass(self, request: wire.AwaitPassRequest, queue: WorkQueue) -> wire.AwaitPassReply:
        run, pass_, wait_seconds = self._run, _pass_of(request), request.wait_milliseconds / 1000
        what = f"the end of pass {pass_}" if pass_ else "workers that open a data set"
        poll = _poll(run, self._work, queue, f"the coordinator waits for {what}", wait_seconds=wait_seconds)
        try:
            while True:
                poll.look()
                self._refuse_when_over()
                _refuse_when_replaced(run, queue)
                outcome = queue.await_pass(pass_, coordinator_epoch=request.coordinator_epoch, wake=poll.wake)
                if outcome.complete or not wait_seconds or (pass_ == 0 and queue.spec is not None):
                    return outcome
                await poll.wait()
        finally:
            queue.forget(poll.wake)

    def _coordinated_by(self, sender: Sender) -> WorkQueue:
        """Return the queue to a coordinator of the run."""
        if self._run.content.partition is None:
            raise NotInitialized("this server holds no run yet: a worker that starts brings it")
        check_run(sender.run_id, self._run.holding(), observer=True)
        return _queue_on_first(self._run)

    def _require_coordinator(self, request: wire.BeginPassRequest | wire.EndWorkRequest) -> None:
        machine = self._run.content.machine
        assert machine is not None
        machine.require_coordinator(request.coordinator_epoch, request.sender.secret)

    def _refuse_when_over(self) -> None:
        if self._run.state is RunState.FINISHED:
            raise RunFinished("the run has finished: no pass over its data set ends any more")


async def _ask_directly(ask: Ask) -> wire.LeaseReply:
    return ask()


async def lease_portion(
    run: Run,
    work: KernelExecutor,
    request: wire.LeaseRequest,
    within: Callable[[Ask], Awaitable[wire.LeaseReply]] = _ask_directly,
) -> wire.LeaseReply:
    """Return the queue's answer to a worker that wants a portion, after at most the request's wait.

    `within` calls the queue after each wait, for example under a lock that it holds for other work too.
    """
    _require_few(len(request.held))
    sender, worker_id = request.sender, request.sender.worker_id
    queue = _queue_of(run, sender)
    pass_ = _pass_of(request) if request.HasField("pass") else None
    wait_seconds = request.wait_milliseconds / 1000
    poll = _poll(run, work, queue, f"{worker_id} waits for a portion", worker_id=worker_id, wait_seconds=wait_seconds)
    # For the first call of the queue: the worker holds no other leases later.
    held: set[int] | None = set(request.held)

    def ask() -> wire.LeaseReply:
        return queue.lease(
            worker_id,
            sender.incarnation,
            pass_=pass_,
            passes=request.passes,
            now=run.clock(),
            wake=poll.wake,
            held=held,
        )

    queue.announce(worker_id, poll.wake)
    try:
        while True:
            poll.look()
            if run.state is RunState.FINISHED:
                return lease_reply(wire.LeaseReply.OUTCOME_ENDED, queue.pass_, message="the run has finished")
            _refuse_when_replaced(run, queue)
            answer = await within(ask)
            member = run.membership.get(worker_id)
            if member is None or not member.alive:
                # The portion is free for others.
                queue.release(worker_id, lost=False)
                raise WaitTimedOut(f"worker {worker_id!r} left, or was silent for too long, while it asked: ask again")
            if answer.outcome != wire.LeaseReply.OUTCOME_NOTHING_NOW or not wait_seconds:
                return answer
            await poll.wait()
            held = None
    finally:
        queue.forget(poll.wake)


def _poll(
    run: Run, work: KernelExecutor, queue: WorkQueue, what: str, *, wait_seconds: float, worker_id: str = ""
) -> LongPoll:
    waits_for = partial(queue.waits_for, worker_id)
    return LongPoll(
        run,
        work,
        worker_id=worker_id,
        wait_seconds=wait_seconds,
        describe=lambda: f"{what}, for {names_in_words(waits_for()) or 'workers'}",
        waits_for=waits_for,
    )


def _queue_of(run: Run, sender: Sender) -> WorkQueue:
    """Return the queue to a worker of the run, and renew its lease."""
    run.heard(sender.run_id, sender.worker_id, sender.incarnation, sender.secret)
    return _queue_on_first(run)


def _queue_on_first(run: Run) -> WorkQueue:
    if run.content.server_index != 0:
        raise InvalidArgument(f"this is server {run.content.server_index}: ask server 0, which hands out the data set")
    return run.work


def _refuse_when_replaced(run: Run, queue: WorkQueue) -> None:
    """End a wait on a server that shuts down, or for the queue of a run that was reset."""
    run.refuse_when_unavailable()
    if run.work is not queue:
        raise NotInitialized("the run was reset while the call waited")


def _require_few(leases: int) -> None:
    if leases > LEASES_MAX:
        raise InvalidArgument(f"a message names {leases} leases; expected {LEASES_MAX} at most")


def _pass_of(message: wire.LeaseRequest | wire.BeginPassRequest | wire.AwaitPassRequest) -> int:
    # The field's name is a keyword of Python's.
    return int(getattr(message, "pass"))


def spec_from(message: wire.DataSpec) -> DataSpec:
    given: dict[str, Any] = {field.name: getattr(message, field.name) for field in fields(DataSpec)}
    return DataSpec(**given | {"name": convert.for_people(message.name)})
