"""A free worker's call for a portion: answered when there is one, by itself or in one with the parameters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from pyps.run.handshake import RunState
from pyps.run.run import Run
from pyps.service.executor import KernelExecutor
from pyps.service.waiting import LongPoll, names_in_words
from pyps.work import Ended, LeaseAnswer, NothingNow, WorkQueue
from pyps_wire import work_pb2 as wire
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import BadRequest, NotInitialized, ServerUnavailable, WaitTimedOut

# Leases that a worker may name.
LEASES_MAX = 100_000

Ask: TypeAlias = Callable[[], LeaseAnswer]


async def directly(ask: Ask) -> LeaseAnswer:
    """Asks the queue, and nothing beside."""
    return ask()


class LeaseCall:
    """One request for a portion, on the event loop."""

    def __init__(self, run: Run, work: KernelExecutor, request: wire.LeaseRequest):
        check_few(len(request.held))
        self._run = run
        self._work = work
        self._request = request

    async def answer(self, within: Callable[[Ask], Awaitable[LeaseAnswer]] = directly) -> LeaseAnswer:
        """What the queue answers, waited for as long as the request says.

        `within` asks, again after each wait: in a moment of its choosing, with whatever else belongs to that moment.
        """
        run, request, sender = self._run, self._request, self._request.sender
        queue = queue_of(run, sender)
        pass_ = pass_of(request) if request.HasField("pass") else None
        wait_seconds = request.wait_milliseconds / 1000

        waits_for = partial(queue.waits_for, sender.worker_id)
        poll = LongPoll(
            run,
            self._work,
            worker_id=sender.worker_id,
            wait_seconds=wait_seconds,
            describe=lambda: f"{sender.worker_id} waits for a portion, for {names_in_words(waits_for()) or 'workers'}",
            waits_for=waits_for,
        )
        # Of its first question: a later one knows no better.
        held: set[int] | None = set(request.held)

        def ask() -> LeaseAnswer:
            return queue.lease(
                sender.worker_id,
                sender.incarnation,
                pass_=pass_,
                passes=request.passes,
                now=run.clock(),
                wake=poll.wake,
                announced=True,
                held=held,
            )

        queue.announce(sender.worker_id, poll.wake)
        try:
            while True:
                poll.look()
                if run.state is RunState.FINISHED:
                    return Ended(queue.pass_, "the run has finished")
                refuse_when_replaced(run, queue)
                answer = await within(ask)
                self._require_alive(queue)
                if not (isinstance(answer, NothingNow) and wait_seconds):
                    return answer
                await poll.wait()
                held = None
        finally:
            queue.forget(poll.wake)

    def _require_alive(self, queue: WorkQueue) -> None:
        """Gives back what a worker was given while it left or its lease ran out; WaitTimedOut for such a one."""
        worker_id = self._request.sender.worker_id
        member = self._run.membership.get(worker_id)
        if member is None or not member.alive:
            queue.release(worker_id, lost=False)
            raise WaitTimedOut(f"worker {worker_id!r} left, or was silent for too long, while it asked: ask again")


def queue_of(run: Run, sender: Sender) -> WorkQueue:
    """The queue, for a worker of the run: its call renews its lease."""
    run.heard(sender.run_id, sender.worker_id, sender.incarnation, sender.secret)
    return of_first_server(run)


def of_first_server(run: Run) -> WorkQueue:
    """The queue; BadRequest on a server that has none."""
    if run.content.server_index != 0:
        raise BadRequest(f"this is server {run.content.server_index}: ask server 0, which hands out the data set")
    return run.work


def refuse_when_replaced(run: Run, queue: WorkQueue) -> None:
    """Ends a wait on a server that shuts down, or for a queue that was forgotten."""
    if run.state is RunState.DRAINING:
        raise ServerUnavailable("this server is shutting down: try again once it is back")
    if run.work is not queue:
        raise NotInitialized("the run was reset while the call waited")


def check_few(leases: int) -> None:
    """Refuses a message that names more leases than a worker can have."""
    if leases > LEASES_MAX:
        raise BadRequest(f"a message names {leases} leases; expected {LEASES_MAX} at most")


def pass_of(message: wire.LeaseRequest | wire.BeginPassRequest | wire.AwaitPassRequest) -> int:
    """The message's pass."""
    # The field's name is a keyword of Python's.
    return int(getattr(message, "pass"))
