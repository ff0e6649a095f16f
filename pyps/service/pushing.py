"""Push and Exchange: streams of pushed shards, applied as they come and answered in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from pyps.core.gradient import EXTENTS_MAX, Gradient
from pyps.run.run import Run
from pyps.service import convert
from pyps.service.calls import Context, receive
from pyps.service.frames import PushAnswer
from pyps.service.limits import ByteBudget, check_message_bytes
from pyps.service.replies import ALL_SHARDS, Replies
from pyps.service.workbench import Workbench
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.errors import BadRequest

# Messages of one stream that wait for their replies: one is received while another is applied and a third answered.
# They wait for processors and for their sender, never for another worker.
READ_AHEAD_MAX = 3

# What a request is to be answered with.
Answering: TypeAlias = Callable[[wire.PushRequest, Run], PushAnswer]


class Part(NamedTuple):
    """One message of a push."""

    run_id: str
    worker_id: str
    sequence: int
    # How many messages the push has; 0 where the sender does not say.
    num_shards: int
    shard_id: int
    gradient: Gradient
    answer: PushAnswer
    # The message and the parameters that answer it.
    held_bytes: int

    @property
    def push_id(self) -> tuple[str, int]:
        """The push that it is of."""
        return self.worker_id, self.sequence

    def push(self, run: Run) -> list[bytes]:
        """Pushes it by itself; returns the message that answers it."""
        receipt = run.push(self.gradient, self.shard_id, run_id=self.run_id, answer=self.answer.taker)
        return [self.answer.message(receipt)]


class PushStream:
    """One stream of pushes, any number of them one after the other.

    Reading goes on while updates run. Under one mutex for the model the parts of a push are held until it is all there.
    """

    def __init__(self, run: Run, work: Workbench, budget: ByteBudget, context: Context, answering: Answering):
        self._run = run
        self._account = budget.account()
        self._context = context
        self._answering = answering
        self._replies = Replies(context, work, self._account, ahead_max=READ_AHEAD_MAX)
        self._first = True
        # The parts so far of a push that is to be applied as a whole.
        self._staged: list[Part] = []
        # The push whose parts are applied one by one. It goes on so when one mutex comes into force meanwhile: it could
        # not become whole any more.
        self._singly: tuple[str, int] | None = None

    async def serve(self) -> None:
        """Answers messages until the sender has no more."""
        try:
            async with self._replies:
                while await self._serve_one():
                    await self._replies.room()
                if self._staged:
                    _require_all(self._staged)
                    await self._push_staged()
        finally:
            self._release_staged()

    async def _serve_one(self) -> bool:
        """Takes one message, whose memory nothing here holds afterwards; False after the last."""
        message = await receive(self._context, under_way=bool(self._staged))
        if message is None:
            return False
        part = self._part(message)
        if self._first:
            # The whole stream counts for it, whoever else may send in it.
            self._account.caller, self._first = part.worker_id, False
        if self._staged or (self._run.whole is not None and part.push_id != self._singly):
            await self._stage(part)
        else:
            self._singly = part.push_id
            shard = self._run.shards.get(part.shard_id)
            await self._replies.add(
                part.shard_id,
                partial(part.push, self._run),
                num_bytes=len(part.gradient.payload),
                held_bytes=part.held_bytes,
                shards=() if shard is None else (shard,),
            )
        return True

    def _part(self, message: bytes) -> Part:
        check_message_bytes(len(message), bytes_max=self._run.config.max_message_bytes)
        header_bytes = convert.SMALL_BYTES_MAX + convert.ENTRY_BYTES_MAX * EXTENTS_MAX
        request, payload = convert.parse_frame(wire.PushRequest, message, bytes_max=header_bytes)
        gradient, answer = convert.gradient_from(request, payload), self._answering(request, self._run)
        return Part(
            request.sender.run_id,
            gradient.worker_id,
            gradient.sequence,
            request.num_shards,
            request.shard_id,
            gradient,
            answer,
            len(message) + answer.payload_bytes,
        )

    # Under one mutex for the model.

    async def _stage(self, part: Part) -> None:
        # Before anything of it is held: names that nobody has joined by could be any number.
        self._run.heard(part.run_id, part.worker_id, part.gradient.incarnation)
        if self._staged and self._staged[0].push_id != part.push_id:
            _require_all(self._staged)
            await self._push_staged()
        _require_possible([*self._staged, part], num_shards=len(self._run.shards))
        self._account.hold(part.held_bytes)
        self._staged.append(part)
        if self._run.whole is None:
            # The mutex has gone: the rest of the push goes on one by one, also where the mutex comes back.
            self._singly = part.push_id
        if self._run.whole is None or len(self._staged) == part.num_shards:
            await self._push_staged()

    async def _push_staged(self) -> None:
        parts = self._staged
        # No job of this stream may come between the parts, nor any of them between its shards' pushes.
        await self._replies.none_under_way()
        self._release_staged()
        await self._replies.add(
            ALL_SHARDS,
            partial(_push_whole, self._run, parts),
            num_bytes=sum(len(part.gradient.payload) for part in parts),
            held_bytes=sum(part.held_bytes for part in parts),
            shards=list(self._run.shards.values()),
        )

    def _release_staged(self) -> None:
        self._account.release(sum(part.held_bytes for part in self._staged))
        self._staged = []


def _push_whole(run: Run, parts: Sequence[Part]) -> list[bytes]:
    answers = {part.shard_id: taker for part in parts if (taker := part.answer.taker) is not None}
    gradients = [(part.shard_id, part.gradient) for part in parts]
    receipts = run.push_whole(gradients, run_id=parts[0].run_id, answers=answers)
    return [part.answer.message(receipt) for part, receipt in zip(parts, receipts, strict=True)]


def _require_all(parts: Sequence[Part]) -> None:
    """Refuses a push of which messages are missing: under one mutex for the model it is applied whole or not at all."""
    first = parts[0]
    if len(parts) < first.num_shards:
        raise BadRequest(
            f"push {first.sequence} of worker {first.worker_id!r} ended after {len(parts)} of its"
            f" {first.num_shards} messages, and nothing of it was applied: send them all in one stream"
        )


def _require_possible(parts: Sequence[Part], *, num_shards: int) -> None:
    """Refuses parts that cannot become one push: its memory would be held for what never comes."""
    last = parts[-1]
    if last.num_shards > num_shards:
        raise BadRequest(f"a push has num_shards {last.num_shards}, and this server holds {num_shards} shards")
    if any(part.shard_id == last.shard_id for part in parts[:-1]):
        raise BadRequest(f"a push holds shard {last.shard_id} twice: send each shard once in a push")
