"""What workers call: the ParameterServer service on asyncio, over a run.

Messages pass through gRPC as plain bytes, so that a payload is never copied into a message object: it is read
where it was received, and written where it is sent from. A call that waits is a coroutine, never a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import grpc
import grpc.aio

from pyps import logs
from pyps.core.gradient import Codec, Gradient, item_bytes
from pyps.core.receipt import Receipt
from pyps.core.shard import Shard
from pyps.core.whole_model import WholeModel
from pyps.run import Run
from pyps.run.initialization import Initialization
from pyps.service import convert
from pyps.service.frames import ExchangeReading, ParametersReading, Reading
from pyps.service.limits import ByteBudget, check_message_bytes
from pyps.service.security import abort
from pyps.service.waiting import Arrivals, Parking, names_in_words
from pyps.service.workbench import Workbench
from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.contract import PARAMETER_SERVER
from pyps_wire.errors import BadRequest, NotInitialized, PypsError, WaitTimedOut

# A reply that nobody takes for so long ends its call.
WRITE_SECONDS = 120.0
# The parts of one push come within so long of each other.
READ_SECONDS = 60.0
# Figures of its own that a worker may report.
SCALARS_MAX = 256

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

log = logs.get("pyps.service")


class Pushed(NamedTuple):
    """One shard of a push as it was received."""

    request: wire.PushRequest
    gradient: Gradient


# What answers the shards of a push that were handled together.
Reply: TypeAlias = Callable[[Context, Sequence[Pushed], list[Receipt]], Awaitable[None]]


class ParameterServer:
    """The calls of pyps.v1.ParameterServer."""

    def __init__(self, run: Run, *, budget: ByteBudget, executor: Executor, control_address: str):
        self._run = run
        self._budget = budget
        self._work = Workbench(executor)
        self._control_address = control_address

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service's handlers: bytes in, bytes out."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Hello": grpc.unary_unary_rpc_method_handler(_guarded(self.hello)),
            "Initialize": grpc.stream_unary_rpc_method_handler(_guarded(self.initialize)),
            "Push": grpc.stream_stream_rpc_method_handler(_guarded(self.push)),
            "Pull": grpc.unary_stream_rpc_method_handler(_guarded(self.pull)),
            "Exchange": grpc.stream_stream_rpc_method_handler(_guarded(self.exchange)),
            "Proceed": grpc.unary_unary_rpc_method_handler(_guarded(self.proceed)),
            "Heartbeat": grpc.unary_unary_rpc_method_handler(_guarded(self.heartbeat)),
            "Leave": grpc.unary_unary_rpc_method_handler(_guarded(self.leave)),
        }
        return grpc.method_handlers_generic_handler(PARAMETER_SERVER, methods)

    async def hello(self, message: bytes, context: Context) -> bytes:
        """Takes a caller in."""
        greeting = convert.greeting_from(convert.parse(wire.HelloRequest, message))
        welcome = self._run.hello(greeting)
        return convert.hello_reply(self._run, welcome, control_address=self._control_address).SerializeToString()

    async def initialize(self, _: object, context: Context) -> bytes:
        """Takes the first parameters, shard by shard, and makes them the run's."""
        initialization: Initialization | None = None
        while (message := await context.read()) is not grpc.aio.EOF:
            check_message_bytes(len(message), bytes_max=self._run.config.max_message_bytes)
            with self._budget.holding(len(message)):
                request, payload = convert.parse_frame(wire.InitializeRequest, message)
                if initialization is None:
                    initialization = self._run.begin_initialize(convert.opening_from(request))
                    if initialization is None:
                        return self._initialize_reply()
                    continue
                self._run.renew_term(initialization.opening)
                add = partial(initialization.add, request.shard_id, request.codec, payload)
                await self._work.compute(len(payload), add)
        if initialization is None:
            raise BadRequest("Initialize came without a message: the model comes first, then each shard")
        # On a thread whatever the size: it copies this server's whole part of the model.
        await self._work.off_loop(partial(self._run.commit, initialization))
        return self._initialize_reply()

    async def push(self, _: object, context: Context) -> None:
        """Answers each pushed shard with its receipt, in order."""
        await self._take_pushes(context, self._reply_receipts)

    async def exchange(self, _: object, context: Context) -> None:
        """Answers each pushed shard with its receipt and the newest parameters."""
        await self._take_pushes(context, self._reply_exchanged)

    async def pull(self, message: bytes, context: Context) -> None:
        """Sends the shards that are newer than those held, each as soon as it has the version wanted."""
        request = convert.parse(wire.PullRequest, message)
        codec = convert.codec_from(request.codec)
        worker_id = "" if request.role == common.ROLE_OBSERVER else request.sender.worker_id
        wants = {want.shard_id: want for want in request.wants}
        shards = self._run.shards_to_pull(
            request.sender.run_id,
            request.sender.worker_id,
            request.sender.incarnation,
            observer=request.role == common.ROLE_OBSERVER,
            shard_ids=wants,
        )
        epoch = self._run.epoch
        # Versions of another epoch mean nothing here: everything is newer, and nothing is worth waiting for.
        same_epoch = request.epoch == epoch
        min_versions = {i: want.min_version if same_epoch else 0 for i, want in wants.items()}
        held = {i: want.held_version if same_epoch else -1 for i, want in wants.items()}
        readings = {
            shard.shard_id: ParametersReading(shard.shard_id, held.get(shard.shard_id, -1), epoch, codec)
            for shard in shards
        }
        wait_seconds = request.wait_milliseconds / 1000
        arrivals = Arrivals(self._run, self._work, shards, min_versions, worker_id=worker_id, wait_seconds=wait_seconds)
        whole = self._run.whole
        async with arrivals:
            while (shard := await arrivals.next()) is not None:
                if whole is None:
                    await self._send(context, shard, readings[shard.shard_id], codec, worker_id=worker_id)
        if whole is not None:
            await self._send_whole(context, whole, readings, codec, worker_id=worker_id)

    async def proceed(self, message: bytes, context: Context) -> bytes:
        """Answers when the worker may begin its next step."""
        request = convert.parse(wire.ProceedRequest, message)
        run, sender, clock = self._run, request.sender, request.clock

        def describe() -> str:
            others = names_in_words(run.conduct.waited_for_by(sender.worker_id))
            return f"{sender.worker_id} waits to begin step {clock + 1}, for {others}"

        parking = Parking(
            run,
            self._work,
            worker_id=sender.worker_id,
            wait_seconds=request.wait_milliseconds / 1000,
            describe=describe,
            waits_for=lambda: run.conduct.waited_for_by(sender.worker_id),
        )
        ask = partial(run.may_proceed, sender.run_id, sender.worker_id, sender.incarnation, clock=clock)
        cancelled = False
        try:
            parking.look()
            again = False
            while not ask(wake=parking.wake, again=again):
                await parking.wait()
                parking.look()
                again = True
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            # An answer that came too late is fetched by asking again; nobody asks again for one that was given up.
            run.conduct.pacing.forget(sender.worker_id, parking.wake, withdraw=cancelled)
        return wire.ProceedReply(ask_to_proceed=run.conduct.pacing.asks).SerializeToString()

    async def heartbeat(self, message: bytes, context: Context) -> bytes:
        """Renews a lease and tells what the server wants."""
        request = convert.parse(wire.HeartbeatRequest, message)
        if len(request.scalars) > SCALARS_MAX:
            raise BadRequest(f"a heartbeat carries {len(request.scalars)} scalars; report {SCALARS_MAX} at most")
        sender = request.sender
        pulse = self._run.heartbeat(
            sender.run_id,
            sender.worker_id,
            sender.incarnation,
            clock=request.clock,
            scalars=dict(request.scalars),
        )
        return convert.heartbeat_reply(self._run, pulse).SerializeToString()

    async def leave(self, message: bytes, context: Context) -> bytes:
        """Ends a worker's membership."""
        request = convert.parse(wire.LeaveRequest, message)
        left = self._run.leave(
            request.sender.run_id,
            request.sender.worker_id,
            request.sender.incarnation,
            failed=request.cause == wire.LeaveRequest.CAUSE_FAILED,
            message=convert.for_people(request.message),
        )
        await self._work.off_loop(self._run.conduct.complete_rounds)
        return wire.LeaveReply(num_workers=left).SerializeToString()

    async def _take_pushes(self, context: Context, reply: Reply) -> None:
        """Handles each pushed shard as it comes or, under one mutex for the model, each push once it is all there."""
        staged: list[Pushed] = []
        with contextlib.ExitStack() as held:
            while (message := await _read(context, under_way=bool(staged))) is not grpc.aio.EOF:
                check_message_bytes(len(message), bytes_max=self._run.config.max_message_bytes)
                held.enter_context(self._budget.holding(len(message)))
                request, payload = convert.parse_frame(wire.PushRequest, message)
                pushed = Pushed(request, convert.gradient_from(request, payload))
                if staged and staged[0].request.sequence != request.sequence:
                    _require_all(staged)
                    await reply(context, staged, await self._push_staged(staged))
                    staged = []
                staged.append(pushed)
                if self._run.whole is not None:
                    _require_possible(staged, num_shards=len(self._run.shards))
                if self._run.whole is not None and len(staged) != request.num_shards:
                    continue
                await reply(context, staged, await self._push_staged(staged))
                staged = []
                held.close()
            if staged:
                _require_all(staged)
                await reply(context, staged, await self._push_staged(staged))

    async def _push_staged(self, staged: Sequence[Pushed]) -> list[Receipt]:
        run_id = staged[0].request.sender.run_id
        gradients = [(pushed.request.shard_id, pushed.gradient) for pushed in staged]
        if self._run.whole is not None or len(gradients) > 1:
            return await self._work.off_loop(partial(self._run.push_whole, gradients, run_id=run_id))
        [(shard_id, gradient)] = gradients
        push, shard = partial(self._run.push, gradient, shard_id, run_id=run_id), self._run.shards.get(shard_id)
        return [await self._work.compute(len(gradient.payload), push, shards=[shard] if shard is not None else [])]

    async def _reply_receipts(self, context: Context, staged: Sequence[Pushed], receipts: list[Receipt]) -> None:
        for receipt in receipts:
            await _write(context, convert.receipt_of(receipt, self._run).SerializeToString())

    async def _reply_exchanged(self, context: Context, staged: Sequence[Pushed], receipts: list[Receipt]) -> None:
        worker_id = staged[0].request.sender.worker_id
        readings = {receipt.shard_id: ExchangeReading(receipt, self._run) for receipt in receipts}
        whole, shards = self._run.whole, self._run.shards
        if whole is not None:
            await self._send_whole(context, whole, readings, Codec.FLOAT32, worker_id=worker_id)
            return
        for shard_id, reading in readings.items():
            if shard_id not in shards:
                raise NotInitialized("the run was reset while the push was under way")
            await self._send(context, shards[shard_id], reading, Codec.FLOAT32, worker_id=worker_id)

    async def _send(self, context: Context, shard: Shard, reading: Reading, codec: Codec, *, worker_id: str) -> None:
        """Sends a shard's parameters as `reading` frames them; one frame is in memory at a time."""
        payload_bytes = shard.length * item_bytes(codec)
        with self._budget.holding(payload_bytes):
            read = partial(shard.read, reading, worker_id=worker_id or None)
            frame = await self._work.compute(payload_bytes, read, shards=[shard])
            if frame is None:
                return
            await _write(context, frame)
        self._run.statistics.pulled(worker_id or "observer", payload_bytes)

    async def _send_whole(
        self,
        context: Context,
        whole: WholeModel,
        readings: Mapping[int, Reading],
        codec: Codec,
        *,
        worker_id: str,
    ) -> None:
        """Sends shards of one state of the model: all are framed under its mutex, then sent without it."""
        sizes = {shard_id: whole.shards[shard_id].length * item_bytes(codec) for shard_id in readings}
        with self._budget.holding(sum(sizes.values())):
            frames = await self._work.off_loop(partial(whole.read, readings, worker_id=worker_id or None))
            for shard_id, frame in frames.items():
                if frame is not None:
                    await _write(context, frame)
                    self._run.statistics.pulled(worker_id or "observer", sizes[shard_id])

    def _initialize_reply(self) -> bytes:
        return wire.InitializeReply(
            state=int(self._run.state),  # type: ignore[arg-type]
            epoch=self._run.epoch,
            shards=convert.shard_versions(self._run),
        ).SerializeToString()


def _require_all(staged: Sequence[Pushed]) -> None:
    """Refuses a push of which messages are missing: under one mutex for the model it is applied whole or not at all."""
    request = staged[0].request
    if len(staged) < request.num_shards:
        raise BadRequest(
            f"push {request.sequence} of worker {request.sender.worker_id!r} ended after {len(staged)} of its"
            f" {request.num_shards} messages, and nothing of it was applied: send them all in one stream"
        )


def _require_possible(staged: Sequence[Pushed], *, num_shards: int) -> None:
    """Refuses parts that cannot become one push: its memory would be held for what never comes."""
    last = staged[-1].request
    if last.num_shards > num_shards:
        raise BadRequest(f"a push has num_shards {last.num_shards}, and this server holds {num_shards} shards")
    if any(pushed.request.shard_id == last.shard_id for pushed in staged[:-1]):
        raise BadRequest(f"a push holds shard {last.shard_id} twice: send each shard once in a push")


async def _read(context: Context, *, under_way: bool) -> Any:
    """The next message; a caller that leaves a push unfinished for long loses its call, and what it held is free."""
    try:
        async with asyncio.timeout(READ_SECONDS if under_way else None):
            return await context.read()
    except TimeoutError:
        raise WaitTimedOut(f"the rest of the push did not come within {READ_SECONDS:g} s: send it again") from None


async def _write(context: Context, message: bytes) -> None:
    """Sends a message; a caller that takes nothing for long loses its call, and what it held is free again."""
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await context.write(message)
    except TimeoutError:
        raise WaitTimedOut(f"the caller took no reply for {WRITE_SECONDS:g} s: call again") from None


def _guarded(behavior: Callable[[Any, Context], Awaitable[T]]) -> Callable[[Any, Context], Awaitable[T]]:
    """Turns errors into statuses: ours as they are, any other into INTERNAL with a traceback in the log."""

    async def call(request: Any, context: Context) -> T:
        try:
            return await behavior(request, context)
        except PypsError as error:
            await abort(context, error)
        except Exception as error:
            log.exception("a call failed by a bug in the server", call=behavior.__name__)
            await context.abort(grpc.StatusCode.INTERNAL, f"a bug in the server: {type(error).__name__}; see its log")

    return call
