"""Pushes and exchanges that come as messages, one a shard: over gRPC and lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import NamedTuple

import grpc.aio

from pyps.core.gradient import EXTENTS_MAX
from pyps.core.store import Pushed
from pyps.run.run import Run
from pyps.service import convert
from pyps.service.calls import SHORT_BYTES, Call
from pyps.service.conversation import Conversation, Request
from pyps.service.executor import EXTENT_PARAMETERS
from pyps.service.limits import check_message_bytes
from pyps.service.serializations import Answer, Frame, PublishedFrame, ReplyFrame
from pyps.service.transport import Host
from pyps_wire import common_pb2 as common
from pyps_wire import lane
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.codecs import CODECS, FLOAT32
from pyps_wire.errors import InvalidArgument, ServerUnavailable

# Messages of one stream without an answer yet: one is received while another is applied and a third answered.
READ_AHEAD_MAX = 3
# The bytes of a receipt and a version in front of parameters.
HEADER_ROOM = 192
# Messages whose scale does not come are held for so long after the newest of them.
HOLD_SECONDS = 60.0
PUSH_HEADER_MAX = convert.SMALL_BYTES_MAX + convert.ENTRY_BYTES_MAX * EXTENTS_MAX


class Message(Request):
    """One message of a push: a shard's gradient."""

    def __init__(
        self,
        run: Run,
        request: wire.PushRequest,
        payload: memoryview,
        *,
        exchanges: bool,
        received_bytes: int,
        bytes_held: int = 0,
    ):
        """With `exchanges`, parameters newer than the sender's go back; its account holds `bytes_held` already."""
        self.run = run
        self.run_id = request.sender.run_id
        # How many messages the push has; 0 if the sender does not say.
        self.num_shards = request.num_shards
        # How many messages of the push were held for this one.
        self.num_held = request.num_held
        # The memory for its parameters, in an exchange.
        self.frame: Frame | None = None
        # The size of the message and of its answer.
        self.num_bytes = received_bytes
        reply, epoch = None, 0
        # None for a shard that is not here: the push is refused.
        self.shard = shard = run.content.shards.get(request.shard_id)
        if shard is not None and exchanges and shard.has_rows:
            raise InvalidArgument(f"shard {request.shard_id} is a table's, whose rows come by Pull: use Push")
        if shard is not None and exchanges:
            codec = CODECS.get(request.reply_codec)
            if codec is None or codec.stateful:
                codec = convert.codec_from(request.reply_codec)
            if codec.published:
                self.frame, codec = PublishedFrame(lane.EXCHANGE, codec), FLOAT32
            else:
                self.frame = ReplyFrame(lane.EXCHANGE, shard.length, codec, header_room=HEADER_ROOM)
                codec = self.frame.reply.codec
            reply, epoch = self.frame.reply, shard.epoch
            self.num_bytes += codec.max_bytes(shard.length)
        self.plan = plan = convert.plan_from(request, payload, reply, epoch=epoch)
        self.shard_id = plan.shard_id
        # The push's worker and sequence.
        self.push_id = plan.gradient.worker_id, plan.gradient.sequence
        # Longer messages and answers are part of the bytes in flight.
        is_short = received_bytes <= SHORT_BYTES and self.num_bytes <= 2 * SHORT_BYTES and not bytes_held
        self.held_bytes = 0 if is_short else self.num_bytes
        self.bytes_held = bytes_held
        extents = plan.gradient.extents
        self.num_parameters = EXTENT_PARAMETERS * len(extents)
        if shard is not None:
            whole = exchanges or not (extents or shard.has_rows)
            self.num_parameters += shard.length * shard.num_pending
            self.num_parameters += shard.length if whole else plan.gradient.count(shard.length)

    def work(self) -> list[Answer]:
        return [self.answer(self.run.push(self.plan, run_id=self.run_id))]

    def answer(self, pushed: Pushed) -> Answer:
        """Return the receipt, and in an exchange the parameters if they are newer."""
        frame, shard, run = self.frame, self.shard, self.run
        if frame is None or shard is None:
            return Answer(lane.PUSH, convert.receipt_of(pushed.receipt, run).SerializeToString())
        header = convert.answer_of(pushed, run, epoch=shard.epoch, codec=frame.codec, answer=wire.ExchangeReply())
        return Answer(lane.EXCHANGE, header.SerializeToString()) if pushed.version is None else frame.seal(header)


class _Whole(Request):
    """All messages of a push, applied as one under the model's mutex."""

    def __init__(self, parts: Sequence[Message]):
        self._parts = parts
        self.num_parameters = sum(part.num_parameters for part in parts)
        # Their account has held them since they arrived.
        self.held_bytes = self.bytes_held = sum(part.num_bytes for part in parts)

    def work(self) -> list[Answer]:
        parts, first = self._parts, self._parts[0]
        pushed = first.run.push_whole([part.plan for part in parts], run_id=first.run_id)
        return [part.answer(each) for part, each in zip(parts, pushed, strict=True)]


class _Held(NamedTuple):
    """A message of a push whose scale is not known yet. Memory for its answer is taken when it is."""

    request: wire.PushRequest
    payload: memoryview
    num_bytes: int


class _Note(Request):
    """The answer to a message that is to be held."""

    num_parameters = 0

    def __init__(self, request: wire.PushRequest, *, held: bool, exchanges: bool):
        self.shard_id = request.shard_id
        outcome = common.OUTCOME_HELD if held else common.OUTCOME_NOT_HELD
        receipt = common.Receipt(shard_id=request.shard_id, sequence=request.sequence, outcome=outcome)
        reply = wire.ExchangeReply(receipt=receipt) if exchanges else receipt
        self._answer = Answer(lane.EXCHANGE if exchanges else lane.PUSH, reply.SerializeToString())

    def work(self) -> list[Answer]:
        return [self._answer]


class Pushes:
    """The pushes of one stream or lane, any number of them one after the other.

    Under one mutex for the model the messages of a push are kept until all are there, and messages with
    `scale_follows` until their scale comes. The conversation's owner closes the account that holds their bytes.
    """

    def __init__(self, run: Run, conversation: Conversation):
        self._run = run
        self._conversation = conversation
        # The messages so far of a push that is to be applied as a whole.
        self.parts: list[Message] = []
        # The push whose messages are applied one by one, even if a mutex comes into force meanwhile: it cannot become
        # whole any more.
        self.singly: tuple[str, int] | None = None
        # The messages, by shard, whose scale has not come, their push, and the end of the wait for it.
        self.held: dict[int, _Held] = {}
        self._held_push: tuple[str, int] | None = None
        self._held_until: asyncio.TimerHandle | None = None

    def take(self, message: Message) -> Awaitable[object] | None:
        """Apply a message and answer it; await what this returns before taking the next."""
        if self.held or message.num_held:
            return self._take_held(message)
        return self._take(message)

    def hold(
        self, request: wire.PushRequest, payload: memoryview, *, exchanges: bool, num_bytes: int, bytes_held: int = 0
    ) -> Awaitable[object] | None:
        """Keep a message until its scale comes, and answer; await as after `take`.

        It is not kept, which the answer says, where other callers would have too little room. The account holds
        `bytes_held` of the message's bytes already.
        """
        sender, push_id = request.sender, (request.sender.worker_id, request.sequence)
        # Before the message is held: callers could invent any number of names.
        self._run.heard(sender.run_id, sender.worker_id, sender.incarnation, sender.secret)
        if self._held_push != push_id:
            self.discard()
        if request.shard_id in self.held or request.shard_id not in self._run.content.shards:
            raise InvalidArgument(
                f"a push with scale_follows names shard {request.shard_id} twice, or this server has no such shard"
            )
        account, more_bytes = self._conversation.account, num_bytes - bytes_held
        held = account.budget.may_wait(more_bytes)
        if not held:
            account.release(bytes_held)
        else:
            account.hold(more_bytes)
            self.held[request.shard_id], self._held_push = _Held(request, payload, num_bytes), push_id
            self._wait_no_more()
            self._held_until = asyncio.get_running_loop().call_later(HOLD_SECONDS, self.discard)
        return self._conversation.take(_Note(request, held=held, exchanges=exchanges))

    async def _take_held(self, message: Message) -> None:
        """Apply the held messages, scaled as this one of their push, and this one."""
        if self._held_push != message.push_id:
            self.discard()
        if len(self.held) != message.num_held:
            missing = message.num_held - len(self.held)
            self.discard()
            raise ServerUnavailable(f"{missing} messages of the push are not held any more: send all of it again")
        self._wait_no_more()
        last = message.plan.gradient
        while self.held:
            each = self.held.pop(next(iter(self.held)))
            each.request.gradient_norm, each.request.gradient_scale = last.norm, last.scale
            part = Message(
                *(self._run, each.request, each.payload),
                exchanges=message.frame is not None,
                received_bytes=each.num_bytes,
                bytes_held=each.num_bytes,
            )
            if (taken := self._take(part)) is not None:
                await taken
        if (taken := self._take(message)) is not None:
            await taken

    def discard(self) -> None:
        """Forget a push whose scale has not come: nothing of it is applied. Call it before the account is closed."""
        self._wait_no_more()
        self._conversation.account.release(sum(each.num_bytes for each in self.held.values()))
        self.held, self._held_push = {}, None

    def _wait_no_more(self) -> None:
        if self._held_until is not None:
            self._held_until.cancel()

    def _take(self, message: Message) -> Awaitable[object] | None:
        if self.parts or (self._run.rounds.behaviour.aggregation.whole_model and message.push_id != self.singly):
            return self._stage(message)
        self.singly = message.push_id
        return self._conversation.take(message)

    async def end(self) -> None:
        """Apply the messages that wait; InvalidArgument if messages of their push are missing."""
        if self.parts:
            self._require_all()
            await self._push_whole()

    async def _stage(self, message: Message) -> None:
        # Before the message is held: callers could invent any number of names.
        gradient = message.plan.gradient
        self._run.heard(message.run_id, gradient.worker_id, gradient.incarnation, message.plan.secret)
        if self.parts and self.parts[0].push_id != message.push_id:
            self._require_all()
            await self._push_whole()
        _require_possible([*self.parts, message], num_shards=len(self._run.content.shards))
        self._conversation.account.hold(message.num_bytes - message.bytes_held)
        self.parts.append(message)
        if self._run.mutex is None:
            # There is no mutex any more: the rest of the push is applied one by one, even if the mutex comes back.
            self.singly = message.push_id
        if self._run.mutex is None or len(self.parts) == message.num_shards:
            await self._push_whole()

    async def _push_whole(self) -> None:
        # Requests of this stream on single shards must not run between those of the whole push.
        await self._conversation.none_under_way()
        whole, self.parts = _Whole(self.parts), []
        if (sent := self._conversation.take(whole)) is not None:
            await sent

    def _require_all(self) -> None:
        """Refuse a push of which messages are missing: under one mutex it is applied whole or not at all."""
        first = self.parts[0]
        if len(self.parts) < first.num_shards:
            gradient = first.plan.gradient
            raise InvalidArgument(
                f"push {gradient.sequence} of worker {gradient.worker_id!r} ended after {len(self.parts)} of its"
                f" {first.num_shards} messages, and nothing of it was applied: send them all in one stream"
            )


async def serve_stream(host: Host, call: Call, *, exchanges: bool) -> None:
    """Answer the messages of gRPC's Push or Exchange until the sender has no more."""
    run, account = host.run, host.budget.account()
    bytes_max, is_first = run.config.max_message_bytes, True
    conversation = Conversation(host.work, account, call.write, ahead_max=READ_AHEAD_MAX, feed=host.feed)
    pushes = Pushes(run, conversation)
    try:
        async with conversation:
            while True:
                received = await (call.receive(under_way=True) if pushes.parts else call.read())
                if received is None or received is grpc.aio.EOF:
                    break
                if len(received) > bytes_max:
                    check_message_bytes(len(received), bytes_max=bytes_max)
                request, payload = convert.parse_frame(wire.PushRequest, received, bytes_max=PUSH_HEADER_MAX)
                if is_first:
                    sender = request.sender
                    run.membership.require_own(sender.worker_id, sender.incarnation, sender.secret)
                    # From here on the account is this worker's.
                    account.caller, is_first = sender.worker_id, False
                if request.scale_follows:
                    sent = pushes.hold(request, payload, exchanges=exchanges, num_bytes=len(received))
                else:
                    sent = pushes.take(
                        Message(run, request, payload, exchanges=exchanges, received_bytes=len(received))
                    )
                # Their memory is free while the next message is waited for.
                del received, request, payload
                if sent is not None:
                    await sent
                    del sent
            await pushes.end()
    finally:
        pushes.discard()
        account.close()


def _require_possible(parts: Sequence[Message], *, num_shards: int) -> None:
    """Refuse parts that cannot become one push: their memory would be held for nothing."""
    last = parts[-1]
    if last.num_shards > num_shards:
        raise InvalidArgument(f"a push has num_shards {last.num_shards}, and this server holds {num_shards} shards")
    if any(part.plan.shard_id == last.plan.shard_id for part in parts[:-1]):
        raise InvalidArgument(f"a push holds shard {last.plan.shard_id} twice: send each shard once in a push")
