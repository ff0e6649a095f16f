"""Push and Exchange: streams of pushed shards, applied as they come and answered in their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import grpc.aio

from pyps.core.gradient import EXTENTS_MAX
from pyps.core.store import Pushed, Store
from pyps.run.run import Run
from pyps.service import convert
from pyps.service.calls import SHORT_BYTES, Call
from pyps.service.executor import EXTENT_PARAMETERS, KernelExecutor
from pyps.service.limits import Account, ByteBudget, check_message_bytes
from pyps.service.responses import ALL_SHARDS, OrderedResponses
from pyps.service.serializations import ReplyFrame
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.codecs import CODECS
from pyps_wire.errors import InvalidArgument

# Messages of one stream that wait for their replies: one is received while another is applied and a third answered.
# They wait for processors and for their sender, never for another worker.
READ_AHEAD_MAX = 3
# What the receipt of a push that was taken and its parameters' version need in front of them.
HEADER_ROOM = 192
PUSH_HEADER_MAX = convert.SMALL_BYTES_MAX + convert.ENTRY_BYTES_MAX * EXTENTS_MAX


class Message:
    """One message of a push, from what came to what answers it."""

    __slots__ = ("frame", "held_bytes", "num_parameters", "num_shards", "plan", "run_id", "shard")

    def __init__(
        self,
        request: wire.PushRequest,
        payload: memoryview,
        shards: Mapping[int, Store],
        *,
        exchanges: bool,
        received_bytes: int,
    ):
        """`exchanges` says that the shard's parameters go back with the receipt, where they are newer."""
        self.run_id = request.sender.run_id
        # How many messages the push has; 0 where the sender does not say.
        self.num_shards = request.num_shards
        # Where its parameters go, in an exchange.
        self.frame: ReplyFrame | None = None
        # The message and the parameters that answer it.
        self.held_bytes = received_bytes
        reply, epoch = None, 0
        # None for a push to a shard that is not here, which is refused.
        self.shard = shard = shards.get(request.shard_id)
        if shard is not None and exchanges:
            codec = CODECS.get(request.reply_codec) or convert.codec_from(request.reply_codec)
            self.frame = ReplyFrame(shard.length, codec, header_room=HEADER_ROOM)
            reply, epoch = self.frame.reply, shard.epoch
            self.held_bytes += reply.codec.max_bytes(shard.length)
        self.plan = convert.plan_from(request, payload, reply, epoch=epoch)
        # How many its update may touch: with it all gradients that wait there may become one.
        extents = self.plan.gradient.extents
        self.num_parameters = EXTENT_PARAMETERS * len(extents)
        if shard is not None:
            whole = exchanges or not extents
            self.num_parameters += shard.length * shard.num_pending
            self.num_parameters += shard.length if whole else self.plan.gradient.count(shard.length)

    @property
    def push_id(self) -> tuple[str, int]:
        """The push that it is of."""
        return self.plan.gradient.worker_id, self.plan.gradient.sequence

    def push(self, run: Run) -> list[bytes]:
        """Pushes it by itself; returns the message that answers it."""
        return [self.answer(run.push(self.plan, run_id=self.run_id), run)]

    def answer(self, pushed: Pushed, run: Run) -> bytes:
        """The receipt, and in an exchange the parameters behind it where any came."""
        frame, shard = self.frame, self.shard
        if frame is None or shard is None:
            return convert.receipt_of(pushed.receipt, run).SerializeToString()
        header = convert.answer_of(pushed, run, epoch=shard.epoch, codec=frame.codec, answer=wire.ExchangeReply())
        return header.SerializeToString() if pushed.version is None else frame.complete(header)

    def answer_in_parts(self, pushed: Pushed, run: Run) -> tuple[bytes, memoryview | bytes]:
        """The same as a header, and the parameters where they lie."""
        frame, shard = self.frame, self.shard
        if frame is None or shard is None or pushed.version is None:
            return self.answer(pushed, run), b""
        answer = wire.ExchangeReply()
        return frame.parts(convert.answer_of(pushed, run, epoch=shard.epoch, codec=frame.codec, answer=answer))


class Staging:
    """The parts so far of a push that is to be applied as a whole, under one mutex for the model. For one stream."""

    def __init__(self, run: Run, account: Account):
        """The account holds the parts."""
        self._run = run
        self._account = account
        self.parts: list[Message] = []
        # The push whose parts are applied one by one. It goes on so when one mutex comes into force meanwhile: it could
        # not become whole any more.
        self.singly: tuple[str, int] | None = None

    def takes(self, message: Message) -> bool:
        """Whether a message is to wait for the others of its push."""
        return bool(self.parts) or (
            self._run.rounds.behaviour.aggregation.whole_model and message.push_id != self.singly
        )

    def add(self, message: Message) -> Iterator[None]:
        """Yields whenever what there is, which `drop` returns, is to be pushed now as a whole."""
        # Before anything of it is held: names that nobody has joined by could be any number.
        gradient = message.plan.gradient
        self._run.heard(message.run_id, gradient.worker_id, gradient.incarnation, message.plan.secret)
        if self.parts and self.parts[0].push_id != message.push_id:
            self.require_all()
            yield
        _require_possible([*self.parts, message], num_shards=len(self._run.content.shards))
        self._account.hold(message.held_bytes)
        self.parts.append(message)
        if self._run.mutex is None:
            # The mutex has gone: the rest of the push goes on one by one, also where the mutex comes back.
            self.singly = message.push_id
        if self._run.mutex is None or len(self.parts) == message.num_shards:
            yield

    def require_all(self) -> None:
        """Refuses a push of which messages are missing: under one mutex it is applied whole or not at all."""
        first = self.parts[0]
        if len(self.parts) < first.num_shards:
            gradient = first.plan.gradient
            raise InvalidArgument(
                f"push {gradient.sequence} of worker {gradient.worker_id!r} ended after {len(self.parts)} of its"
                f" {first.num_shards} messages, and nothing of it was applied: send them all in one stream"
            )

    def drop(self) -> list[Message]:
        """Holds the parts no longer, and returns them."""
        self._account.release(sum(part.held_bytes for part in self.parts))
        parts, self.parts = self.parts, []
        return parts


class PushStream:
    """One stream of pushes, any number of them one after the other.

    Reading goes on while updates run. Under one mutex for the model the parts of a push are held until it is all there.
    """

    def __init__(self, run: Run, executor: KernelExecutor, budget: ByteBudget, call: Call, *, exchanges: bool):
        self._run = run
        self._executor = executor
        self._account = budget.account()
        self._call = call
        self._exchanges = exchanges
        self._responses = OrderedResponses(call, executor, self._account, ahead_max=READ_AHEAD_MAX)
        self._staging = Staging(run, self._account)

    async def serve(self) -> None:
        """Answers messages until the sender has no more."""
        run, call, responses, staging = self._run, self._call, self._responses, self._staging
        bytes_max, first = run.config.max_message_bytes, True
        inline_parameters_max = self._executor.inline_parameters_max
        try:
            async with responses:
                while True:
                    received = await (call.receive(under_way=True) if staging.parts else call.read())
                    if received is None or received is grpc.aio.EOF:
                        break
                    if len(received) > bytes_max:
                        check_message_bytes(len(received), bytes_max=bytes_max)
                    request, payload = convert.parse_frame(wire.PushRequest, received, bytes_max=PUSH_HEADER_MAX)
                    message = Message(
                        request, payload, run.content.shards, exchanges=self._exchanges, received_bytes=len(received)
                    )
                    gradient = message.plan.gradient
                    if first:
                        run.membership.require_own(gradient.worker_id, gradient.incarnation, message.plan.secret)
                        # The whole stream counts for it, whoever else may send in it.
                        self._account.caller, first = gradient.worker_id, False
                    whole = run.rounds.behaviour.aggregation.whole_model
                    if (whole or staging.parts) and staging.takes(message):
                        for _ in staging.add(message):
                            await self._push_whole()
                    elif (
                        responses.under_way
                        or message.num_parameters >= inline_parameters_max
                        # A longer message, and such an answer to it, counts among the bytes in flight.
                        or len(received) > SHORT_BYTES
                        or message.held_bytes > 2 * SHORT_BYTES
                    ):
                        staging.singly = message.push_id
                        await responses.add(
                            message.plan.shard_id,
                            partial(message.push, run),
                            num_parameters=message.num_parameters,
                            held_bytes=message.held_bytes,
                        )
                    else:
                        # A small model's round: neither task nor thread nor account.
                        staging.singly = gradient.worker_id, gradient.sequence
                        await call.write(message.answer(run.push(message.plan, run_id=message.run_id), run))
                    # Nothing here holds its memory while the next is waited for.
                    del received, request, payload, message, gradient
                    if responses.under_way:
                        await responses.room()
                if staging.parts:
                    staging.require_all()
                    await self._push_whole()
        finally:
            staging.drop()

    async def _push_whole(self) -> None:
        # No job of this stream may come between the parts, nor any of them between its shards' pushes.
        await self._responses.none_under_way()
        parts = self._staging.drop()
        await self._responses.add(
            ALL_SHARDS,
            partial(_push_whole, self._run, parts),
            num_parameters=sum(part.num_parameters for part in parts),
            held_bytes=sum(part.held_bytes for part in parts),
        )


def _push_whole(run: Run, parts: Sequence[Message]) -> list[bytes]:
    return [part.answer(pushed, run) for part, pushed in zip(parts, push_whole(run, parts), strict=True)]


def push_whole(run: Run, parts: Sequence[Message]) -> list[Pushed]:
    """Pushes all parts of a push as one."""
    return run.push_whole([part.plan for part in parts], run_id=parts[0].run_id)


def _require_possible(parts: Sequence[Message], *, num_shards: int) -> None:
    """Refuses parts that cannot become one push: its memory would be held for what never comes."""
    last = parts[-1]
    if last.num_shards > num_shards:
        raise InvalidArgument(f"a push has num_shards {last.num_shards}, and this server holds {num_shards} shards")
    if any(part.plan.shard_id == last.plan.shard_id for part in parts[:-1]):
        raise InvalidArgument(f"a push holds shard {last.plan.shard_id} twice: send each shard once in a push")
