"""A worker's calls to the queue of portions on server 0 (service WorkQueue)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import Message

from pyps_client.pull import LeaseCall, LongPoll
from pyps_client.retry import LinkLost
from pyps_client.transport.connection import CALL_SECONDS
from pyps_client.transport.grpc import GrpcChannel
from pyps_wire import work_pb2 as wire
from pyps_wire.errors import ProtocolMismatch, RunFinished, WaitTimedOut

if TYPE_CHECKING:
    from pyps_client.worker import Worker

Reply = TypeVar("Reply", bound=Message)

# A worker that waits for a portion checks this often whether the run is over.
LOOK_SECONDS = 5.0


class RemoteQueue:
    """Portions of the data set for one worker, over its connected session. Used by one thread.

    After a lost connection a call is repeated for the launch's `loss_wait_seconds`. This is safe: a lease whose answer
    was lost returns to the queue, and a repeated claim or delivery gets the same answer.
    """

    def __init__(self, session: Worker) -> None:
        self._session = session
        # Leases that are neither delivered nor given up. Every LeaseRequest names them.
        self.held: tuple[int, ...] = ()

    def open(self, data: wire.DataSpec) -> wire.OpenWorkReply:
        """Describe the data set to server 0. Raises InvalidArgument if an earlier worker's description differs."""
        request = wire.OpenWorkRequest(sender=self._session.sender, data=data)
        try:
            # Each process of a replica sends its own, lest they compute different examples of the same portion.
            return self._ask("Open", request, wire.OpenWorkReply, each=True)
        except ProtocolMismatch:
            raise ProtocolMismatch(
                f"Server 0 ({self._session.launch.servers[0]}) hands out no portions of a data set: it is of an "
                "earlier version. Install the same version of pyps at both ends."
            ) from None

    def lease(
        self, call: LeaseCall | None = None, *, pass_number: int | None = None, passes: int = 0, wait: bool = True
    ) -> wire.LeaseReply:
        """Lease a portion.

        With `wait` the outcome is never NOTHING_NOW. Then it raises WaitTimedOut after the launch's `wait_seconds`,
        naming the workers that have the portions, and RunFinished soon after the end of the run.

        Args:
            call: Sends the request, instead of the call Lease.
            pass_number: The pass of the portion; None for the current one.
            passes: The number of passes of the worker's loop. With it the portion may be of a later one of these.
            wait: Whether to wait for a free portion.
        """
        poll = LongPoll(self._session.launch.wait_seconds if wait else 0.0)

        def operation(channel: GrpcChannel, stop: threading.Event) -> wire.LeaseReply:
            waits = 0
            while True:
                request = wire.LeaseRequest(
                    sender=self._session.sender,
                    wait_milliseconds=round(min(poll.call_seconds, LOOK_SECONDS) * 1000),
                    held=self.held,
                    passes=passes,
                )
                if pass_number is not None:
                    # The field's name is a keyword of Python's.
                    setattr(request, "pass", pass_number)
                problem = WaitTimedOut("every portion is with a worker")
                try:
                    reply = (call or _lease)(channel, request, stop)
                except WaitTimedOut as unanswered:
                    reply, problem = wire.LeaseReply(outcome=wire.LeaseReply.OUTCOME_NOTHING_NOW), unanswered
                except LinkLost as lost:
                    lost.answered = waits
                    raise
                if not wait or reply.outcome != wire.LeaseReply.OUTCOME_NOTHING_NOW:
                    return reply
                if self._session.finished:
                    raise RunFinished("The run is over: no more portions of its data are handed out.")
                poll.go_on(problem, stop=stop)
                waits += 1

        reply = self._session.ask_first(operation)
        if reply.outcome == wire.LeaseReply.OUTCOME_LEASED:
            self.held += (reply.portion.lease_id,)
        return reply

    def claim(self, lease_id: int) -> wire.ClaimReply:
        """Claim a computed portion, so that its gradient may enter a sum; give it up if the claim is refused."""
        request = wire.ClaimRequest(sender=self._session.sender, lease_id=lease_id)
        reply = self._ask("Claim", request, wire.ClaimReply)
        if not reply.granted:
            self.give_up([lease_id])
        return reply

    def deliver(
        self, lease_ids: Sequence[int], *, stage_id: int = 0, loss_sum: float = 0.0, example_count: int = 0
    ) -> wire.DeliverReply:
        """Deliver portions, all or none."""
        request = wire.DeliverRequest(
            sender=self._session.sender,
            lease_ids=lease_ids,
            stage_id=stage_id,
            loss_sum=loss_sum,
            example_count=example_count,
        )
        reply = self._ask("Deliver", request, wire.DeliverReply)
        self.give_up(lease_ids)
        return reply

    def give_up(self, lease_ids: Sequence[int]) -> None:
        """Drop these leases: with the next call of `lease`, portions not delivered return to the queue."""
        self.held = tuple(lease_id for lease_id in self.held if lease_id not in lease_ids)

    def _ask(self, method: str, request: Message, reply: type[Reply], *, each: bool = False) -> Reply:
        def operation(channel: GrpcChannel, _: threading.Event) -> Reply:
            return channel.call(method, request, reply, timeout_seconds=CALL_SECONDS)

        return self._session.ask_first(operation, each=each)


def _lease(channel: GrpcChannel, request: wire.LeaseRequest, stop: threading.Event) -> wire.LeaseReply:
    seconds = request.wait_milliseconds / 1000
    return channel.call("Lease", request, wire.LeaseReply, timeout_seconds=seconds + CALL_SECONDS)
