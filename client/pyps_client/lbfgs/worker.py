"""A worker's part in passes that a coordinator begins (Dean et al. 2012, section 4.2 and appendix algorithm 1.2).

The paper's ProcessPortion: pull the parameters once a pass, compute a portion, add its gradient to the local sum, send
the sum after every few portions. Several workers may compute a portion. So that it counts once, a worker claims it
before its gradient enters the sum; sums go to stages on the servers, and count once server 0 accepts their delivery.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pyps_client.data.queue import RemoteQueue
from pyps_client.leave import keep_large_blocks
from pyps_client.log import logger
from pyps_client.pull import LARGE_BYTES
from pyps_client.replica.group import ALONE, Group, agreed
from pyps_client.retry import Busy, RetryPolicy, Wait
from pyps_client.transport.connection import call_seconds
from pyps_client.transport.grpc import GrpcChannel
from pyps_client.vectors import NUMPY, Converter, Vectors, part_of
from pyps_client.worker import Worker
from pyps_wire.codecs import codec_of
from pyps_wire.errors import InvalidArgument, LimitExceeded, NoRoom, RunFinished
from pyps_wire.framing import join
from pyps_wire.partition import ShardRange
from pyps_wire.vector_machine_pb2 import StageReply, StageRequest
from pyps_wire.work_pb2 import DataSpec, LeaseReply, Portion

if TYPE_CHECKING:
    from pyps_client.lbfgs.gradient import PortionComputation


@dataclass
class SandblasterResult:
    """A worker's counts, and why it ended. The model has the run's last parameters."""

    # Passes in which it computed portions.
    num_passes: int = 0
    # Delivered portions and examples, over all passes; and portions that another worker claimed first, or that were too
    # late.
    num_portions: int = 0
    num_examples: int = 0
    num_thrown_away: int = 0
    # The mean loss of its examples in the last of these passes; NaN if there are none.
    loss: float = math.nan
    # The coordinator's reason for the end.
    message: str = ""
    run_id: str = ""


class CoordinatedWork:
    """Works on portions until the coordinator ends the work. For one thread."""

    def __init__(
        self,
        session: Worker,
        *,
        data: DataSpec,
        computation: PortionComputation,
        converter: Converter,
        on_pass: Callable[[int], object] | None = None,
        peers: Group = ALONE,
    ) -> None:
        """`on_pass` gets each pass's number once its parameters are in the model.

        `peers`: the processes of this worker's replica. Their leader leases, claims and delivers for all, and each
        computes and stages its own part of every portion.
        """
        self.result = SandblasterResult(run_id=session.run_id)
        self._session = session
        self._queue = RemoteQueue(session)
        self._data = data
        self._staging = Staging(session, converter=converter)
        self._computation = computation
        self._on_pass = on_pass
        self._peers = peers
        # The pass of the parameters in the model, and each process's epoch: a restored server may have others.
        self._parameters_of: tuple[int, ...] | None = None
        self._pass = 0
        # Portions whose gradients are in the sum, with their sums of losses.
        self._claimed: list[tuple[Portion, float]] = []
        # The delivered losses and examples of this pass.
        self._loss_sum, self._loss_count = 0.0, 0
        # The pass of the newest warning of a gradient that was not sent.
        self._warned_in = 0
        # While servers refuse claims and deliveries.
        self._refusal: Wait | None = None

    def run(self) -> str:
        self._queue.open(self._data)
        while True:
            try:
                reply = self._queue.lease(wait=not self._claimed)
            except RunFinished as finished:
                return str(finished)
            except InvalidArgument as refused:
                # A server restored from a checkpoint may not know the data set.
                self._wait_out(refused)
                self._queue.open(self._data)
                continue
            if reply.outcome == LeaseReply.OUTCOME_ENDED:
                return reply.message
            if reply.outcome != LeaseReply.OUTCOME_LEASED:
                # Other workers have the remaining portions, and may wait for those claimed here.
                self._deliver()
                continue
            self._enter(reply)
            self._process(reply)

    def _enter(self, reply: LeaseReply) -> None:
        """Pull the parameters of a new pass."""
        pass_number = getattr(reply, "pass")
        entered = (pass_number, *self._peers.all_gather(self._session.epoch))
        if entered == self._parameters_of:
            return
        if self._claimed:
            # Only a restarted coordinator begins a pass before the last one is complete.
            logger.info("pass %d is over: this worker's portions of it are discarded", self._pass)
            self._throw_away()
        self._computation.begin_pass(keep_apart=reply.portions_per_stage > 1)
        self._parameters_of, self._pass = entered, pass_number
        self._loss_sum, self._loss_count = 0.0, 0
        self.result.num_passes += 1
        if self._on_pass is not None:
            self._on_pass(pass_number)

    def _process(self, reply: LeaseReply) -> None:
        portion = reply.portion
        loss_sum = self._computation.compute(portion, reply.next if reply.HasField("next") else None)
        try:
            claim = self._queue.claim(portion.lease_id)
        except InvalidArgument as refused:
            # A server restored from a checkpoint may not know the lease.
            self._queue.give_up([portion.lease_id])
            self._wait_out(refused)
            return
        if not claim.granted:
            self.result.num_thrown_away += 1
            logger.debug("portion %d of pass %d is not needed: %s", portion.portion_id, self._pass, claim.message)
            return
        self._computation.keep()
        self._claimed.append((portion, loss_sum))
        if len(self._claimed) >= reply.portions_per_stage:
            self._deliver()

    def _deliver(self) -> None:
        leases = [portion.lease_id for portion, _ in self._claimed]
        stage_id, loss_sum, example_count = 0, 0.0, 0
        for portion, loss_of_portion in self._claimed:
            # Not by sum(): from Python 3.12 on it rounds otherwise.
            loss_sum += loss_of_portion
            example_count += portion.stop - portion.start
        vectors = self._computation.sealed() if math.isfinite(loss_sum) else None
        try:
            if vectors is None:
                if math.isfinite(loss_sum) and self._warned_in != self._pass:
                    self._warned_in = self._pass
                    reason = self._computation.why_not_sealed()
                    logger.warning("the loss of pass %d is reported as NaN, but is a number: %s", self._pass, reason)
                # After a NaN loss the coordinator folds nothing, and takes a shorter step.
                loss_sum = math.nan
            else:
                stage_id, first = leases[0], self._claimed[0][0].portion_id
                staged = {"pass_number": self._pass, "portion_id": first, "stage_id": stage_id}
                agreed(self._peers, partial(self._staging.stage, vectors, **staged))
            delivery = self._queue.deliver(leases, stage_id=stage_id, loss_sum=loss_sum, example_count=example_count)
        except InvalidArgument as refused:
            self._throw_away()
            self._wait_out(refused)
            return
        if not delivery.accepted:
            logger.info("%d portions of pass %d came too late: %s", len(leases), self._pass, delivery.message)
            self._throw_away()
            return
        self._computation.clear()
        self._claimed.clear()
        if self._refusal is not None:
            self._refusal.end()
            self._refusal = None
        self._loss_sum += loss_sum
        self._loss_count += example_count
        self.result.num_portions += len(leases)
        self.result.num_examples += example_count
        self.result.loss = self._loss_sum / self._loss_count
        self._session.clock += len(leases)
        self._session.report(loss=self.result.loss)

    def _throw_away(self) -> None:
        """Drop the undelivered claims: with the next lease they return to the queue."""
        self.result.num_thrown_away += len(self._claimed)
        self._queue.give_up([portion.lease_id for portion, _ in self._claimed])
        self._claimed.clear()
        self._computation.clear()

    def _wait_out(self, refused: InvalidArgument) -> None:
        """Pause after a refusal; raise it if there were only refusals for `loss_wait_seconds`.

        A server restored from its checkpoint does not know the pass: the coordinator will begin another.
        """
        if type(refused) is not InvalidArgument:
            # The payload is wrong, and would be again.
            raise refused
        if self._refusal is None:
            policy = RetryPolicy(self._session.launch.loss_wait_seconds, "loss_wait_seconds")
            self._refusal = policy.begin("a pass that takes this worker's portions", stop=threading.Event())
        self._refusal.pause(str(refused))


class Staging:
    """Sends sums of gradients to the servers' stages, in the codec of pushes."""

    def __init__(self, session: Worker, *, converter: Converter = NUMPY) -> None:
        self._session = session
        self._codec = codec_of(session.launch.gradient_codec)
        if self._codec.stateful:
            raise InvalidArgument(
                f"gradient_codec is {self._codec.name}, which makes up for its errors in later pushes, but a sum of "
                "Sandblaster's gradients is sent once: use float32, float16 or bfloat16"
            )
        pull_codec = codec_of(session.launch.parameter_codec)
        if pull_codec.published:
            raise InvalidArgument(
                f"parameter_codec is {pull_codec.name}, which changes the points that Sandblaster tries: use float32"
            )
        self._converter = converter

    def stage(self, vectors: Vectors, *, pass_number: int, portion_id: int, stage_id: int) -> None:
        """Send vectors (one a group, float32 or the codec's type) to the stages of all servers at once.

        `portion_id`, `stage_id`: the first portion in the sum, and its lease. The vectors must not change during the
        call, which may send them again.

        Raises:
            InvalidArgument: A server takes no stages of this pass.
            NoRoom: A server has no memory for another stage.
        """
        header = StageRequest(
            sender=self._session.sender,
            portion_id=portion_id,
            stage_id=stage_id,
            codec=self._codec,  # type: ignore[arg-type]
            # The field's name is a keyword of Python's.
            **{"pass": pass_number},  # type: ignore[arg-type]
        )
        self._session.ask_all(lambda shards: partial(self._send, header, vectors, shards))

    def _send(
        self,
        header: StageRequest,
        vectors: Vectors,
        shards: Sequence[ShardRange],
        channel: GrpcChannel,
        _: threading.Event,
    ) -> None:
        """Send a stage to one server, again as a whole after a lost connection."""
        if not shards:
            # More servers than shards, or server 0 of a process whose part lies on others.
            return
        num_bytes = self._codec.max_bytes(sum(shard.length for shard in shards))
        if num_bytes > LARGE_BYTES:
            keep_large_blocks()

        def frames() -> Iterator[bytes]:
            # A message a shard, each made when gRPC is ready to send it.
            for shard in shards:
                request = StageRequest(shard_id=shard.shard_id, num_shards=len(shards))
                request.MergeFrom(header)
                yield join(request, self._converter.encoded(part_of(vectors, shard), self._codec))

        try:
            channel.send("Stage", frames(), StageReply, timeout_seconds=call_seconds(num_bytes))
        except NoRoom:
            # The memory for stages, which is not freed before the pass ends.
            raise
        except LimitExceeded as exceeded:
            # The memory for calls.
            raise Busy(str(exceeded)) from None
