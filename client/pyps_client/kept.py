"""A worker's pushes to one server that no checkpoint holds yet: kept, and sent again when the server comes back.

A server comes back from a checkpoint, or as its standby, under a larger epoch. The kept pushes go to it before anything
else, in their order and under their old numbers: its ledger says which of them it has.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

from pyps_client.log import logger
from pyps_client.pull import Held, LongPoll
from pyps_client.retry import LinkLost
from pyps_client.run_state import View
from pyps_client.transport import Incoming, Parts, Payload
from pyps_client.transport.connection import Connection, call_seconds
from pyps_client.transport.grpc import GrpcChannel
from pyps_wire.common_pb2 import (
    CODEC_FLOAT32,
    OUTCOME_REJECTED,
    REASON_EPOCH,
    REASON_FORGOTTEN,
    ROLE_WORKER,
    Receipt,
    Sender,
)
from pyps_wire.errors import WaitTimedOut
from pyps_wire.parameter_server_pb2 import PullRequest, PushRequest

# What a kept push takes besides its bytes.
_PUSH_BYTES = 512
# No shard gets there: a pull of who holds it waits, and brings nothing.
_VERSION_MAX = 1 << 62

_sequence = attrgetter("sequence")


@dataclass(slots=True, eq=False)
class KeptPush:
    """One shard's part of a push that was applied, or that waits at the shard."""

    shard_id: int
    sequence: int
    # The message without its payload.
    header: bytes
    payload: memoryview
    num_bytes: int
    # As its first receipt says.
    staleness: int
    # The shard's version before the push, in this epoch: checkpoints of later versions hold it.
    version: int
    epoch: int


class KeptPushes:
    """The kept pushes to one server. One thread pushes; a thread that pulls may send them again, too."""

    def __init__(
        self,
        connection: Connection,
        *helds: Held,
        sender: Sender,
        view: View,
        bytes_max: int,
        wait_seconds: float,
    ) -> None:
        """`helds`: of the model's shards, and of tables'. `bytes_max`: of payloads.

        `wait_seconds`: for other workers, from one round to the next.
        """
        # Whether the server wants pushes to be kept. Else only the one without an answer is sent again.
        self.wanted = False
        # The server's epoch up to which all was sent again.
        self.epoch = connection.epoch
        self._connection = connection
        self._held_of = {shard_id: held for held in helds for shard_id in held.shards}
        self._sender = sender
        self._view = view
        self._bytes_max = bytes_max
        self._wait_seconds = wait_seconds
        self._lock = threading.RLock()
        # Guarded by _lock: by shard, in the order of their numbers.
        self._pushes: dict[int, deque[KeptPush]] = {shard_id: deque() for shard_id in self._held_of}
        self.num_bytes = 0
        # By shard, of its newest push.
        self._staleness: dict[int, int] = {}
        # Whether what was pushed since the last checkpoint had room; its largest version.
        self._has_room, self._durable = True, 0
        # By shard, the version before the newest push that had no room, until a checkpoint holds it.
        self._dropped: dict[int, int] = {}
        # By shard, the version to wait for before the next push.
        self._awaited: dict[int, int] = {}

    @property
    def keeps(self) -> bool:
        return self.wanted and self._has_room

    def staleness(self, shard_id: int) -> int:
        """Return the staleness for a push that has no receipt."""
        return self._staleness.get(shard_id, 0)

    def note(self, receipt: Receipt, *, epoch: int, message: PushRequest | None, payload: memoryview) -> None:
        """Note the receipt of a push that was sent in that epoch, and keep its message if it is given.

        Raises LinkLost if the server came back meanwhile: the push must be sent again.
        """
        if receipt.reason == REASON_EPOCH:
            raise LinkLost("the server came back")
        with self._lock:
            if epoch != self.epoch:
                raise LinkLost("the server came back, and this is an answer of its former life")
            shard_id = receipt.shard_id
            if receipt.outcome != OUTCOME_REJECTED:
                self._staleness[shard_id] = receipt.staleness
                if message is not None:
                    self._keep(message, payload, receipt, epoch)
                elif self.wanted:
                    self._dropped[shard_id] = receipt.version_before
            self._forget_durable(receipt, epoch=epoch)
            if self.num_bytes > self._bytes_max:
                self._drop_all()

    def __call__(self, channel: GrpcChannel, stop: threading.Event) -> None:
        """Send all again if the server has a later epoch. One thread does so; others wait for it."""
        with self._lock:
            epoch = self._connection.epoch
            if epoch <= self.epoch:
                return
            pushes = sorted((push for of_shard in self._pushes.values() for push in of_shard), key=_sequence)
            in_rounds = self._view.state.terms.current_version_only
            self._awaited, self._durable = {}, 0
            tally = Counter[str]()
            for batch in [list(each) for _, each in groupby(pushes, _sequence)] if in_rounds else [pushes]:
                self.await_rounds(channel, stop, [push.shard_id for push in batch], epoch=epoch)
                self._send(channel, batch, epoch, tally)
            lost, self._dropped = self._dropped, {}
            self.epoch, self._has_room = epoch, True
        name = self._connection.name
        if pushes:
            logger.info(
                "%s serves the run now: of %d pushes, sent again to be sure, it had %d, took %d and refused %d",
                *(name, len(pushes), len(pushes) - tally["new"], tally["new"] - tally["refused"], tally["refused"]),
            )
        for shard_id, version in list(lost.items())[:1]:
            logger.warning(
                "%s came back, and this worker did not keep its pushes up to version %d of shard %d: those that the "
                "server's checkpoint lacks are lost",
                *(name, version + 1, shard_id),
            )

    def await_rounds(
        self, channel: GrpcChannel, stop: threading.Event, shard_ids: Iterable[int], *, epoch: int
    ) -> None:
        """Wait until the rounds are complete that have this worker's earlier pushes to these shards."""
        awaited = {shard_id: self._awaited[shard_id] for shard_id in shard_ids if shard_id in self._awaited}
        poll = LongPoll(self._wait_seconds)
        while awaited:
            request = PullRequest(
                sender=self._sender,
                role=ROLE_WORKER,
                epoch=epoch,
                codec=CODEC_FLOAT32,
                wait_milliseconds=round(poll.call_seconds * 1000),
            )
            for shard_id, version in awaited.items():
                request.wants.add(shard_id=shard_id, held_version=_VERSION_MAX, min_version=version)
            seconds = request.wait_milliseconds / 1000 + call_seconds(0)
            parts = Parts([(request, b"")], seconds, are_small=True, waits=True)
            try:
                self._connection.round(channel, "Pull", parts, _refuse_parameters)
            except WaitTimedOut as unanswered:
                poll.go_on(unanswered, stop=stop)
                continue
            for shard_id in awaited:
                del self._awaited[shard_id]
            return

    def _keep(self, message: PushRequest, payload: memoryview, receipt: Receipt, epoch: int) -> None:
        shard_id, header = receipt.shard_id, message.SerializeToString()
        num_bytes = payload.nbytes + len(header) + _PUSH_BYTES
        places = (header, payload, num_bytes, receipt.staleness, receipt.version_before, epoch)
        self._pushes[shard_id].append(KeptPush(shard_id, receipt.sequence, *places))
        self.num_bytes += num_bytes

    def _send(self, channel: GrpcChannel, batch: Sequence[KeptPush], epoch: int, tally: Counter[str]) -> None:
        """Send pushes again, and count the messages that were new to the server, and that it refused."""
        waiting = {(push.shard_id, push.sequence): push for push in batch}
        num_shards = Counter(push.sequence for push in batch)

        def messages() -> Iterator[tuple[PushRequest, memoryview]]:
            for push in batch:
                message = PushRequest.FromString(push.header)
                message.epoch, message.resent_staleness = epoch, push.staleness
                message.num_shards = num_shards[push.sequence]
                yield message, push.payload

        def take(receipt: Any, _: Payload) -> bool:
            push = waiting.pop((receipt.shard_id, receipt.sequence), None)
            if push is not None:
                self._sent_again(push, receipt, epoch, tally)
            return not waiting

        num_bytes = sum(push.num_bytes for push in batch)
        try:
            if batch:
                self._connection.round(channel, "Push", Parts(messages(), call_seconds(num_bytes)), take)
        except LinkLost as lost:
            lost.answered = len(batch) - len(waiting)
            raise

    def _sent_again(self, push: KeptPush, receipt: Receipt, epoch: int, tally: Counter[str]) -> None:
        if receipt.reason == REASON_EPOCH:
            raise LinkLost("the server came back once more")
        shard_id = push.shard_id
        # A push whose receipt is forgotten may be no older.
        push.version, push.epoch = receipt.version_before, epoch
        tally["new"] += not receipt.duplicate and receipt.reason != REASON_FORGOTTEN
        if receipt.outcome == OUTCOME_REJECTED and receipt.reason != REASON_FORGOTTEN:
            tally["refused"] += 1
            self._pushes[shard_id].remove(push)
            self.num_bytes -= push.num_bytes
        elif receipt.min_version > 0:
            self._awaited[shard_id] = receipt.min_version
            self._held_of[shard_id].want(shard_id, receipt.min_version, epoch=epoch)
        self._forget_durable(receipt, epoch=epoch)

    def _forget_durable(self, receipt: Receipt, *, epoch: int) -> None:
        """Forget pushes that a checkpoint holds now; those of an earlier epoch are to be sent again first."""
        shard_id, durable = receipt.shard_id, receipt.durable_version
        of_shard = self._pushes[shard_id]
        while of_shard and of_shard[0].version < durable and of_shard[0].epoch == epoch:
            self.num_bytes -= of_shard.popleft().num_bytes
        if durable > self._durable:
            self._durable, self._has_room = durable, True
        if self._dropped.get(shard_id, durable) < durable:
            del self._dropped[shard_id]
            if not self._dropped:
                logger.info("this worker keeps all pushes again that no checkpoint of %s holds", self._connection.name)

    def _drop_all(self) -> None:
        """Keep nothing until there is another checkpoint: pushes are of little use without those before."""
        if not self._dropped:
            logger.warning(
                "the pushes that no checkpoint of %s holds take more than %s bytes, so this worker does not keep them: "
                "they are lost if the server is killed. Let servers write checkpoints more often "
                "(--checkpoint-seconds), or raise resend_bytes_max (PYPS_RESEND_BYTES_MAX)",
                *(self._connection.name, f"{self._bytes_max:,}"),
            )
        self._has_room, self.num_bytes = False, 0
        for shard_id, of_shard in self._pushes.items():
            if of_shard:
                self._dropped[shard_id] = of_shard[-1].version
                of_shard.clear()


def _refuse_parameters(reply: Any, payload: Payload) -> bool:
    """Take no parameters: only a server that came back meanwhile sends some."""
    if isinstance(payload, Incoming):
        payload.receive(memoryview(bytearray(payload.nbytes)))
    raise LinkLost("the server came back once more")
