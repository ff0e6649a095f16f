"""What workers call: the ParameterServer service on asyncio, over a run.

Messages pass through gRPC as plain bytes, so that a payload is never copied into a message object: it is read
where it was received, and written where it is sent from. A call that waits is a coroutine, never a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from pyps import _kernels, logs
from pyps.core.arrays import Floats
from pyps.core.gradient import Codec, item_bytes
from pyps.core.receipt import Receipt
from pyps.core.shard import Shard
from pyps.run import Run, RunState
from pyps.run.initialization import Initialization
from pyps.service import convert
from pyps.service.limits import ByteBudget, check_message_bytes
from pyps.service.security import abort
from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.contract import PARAMETER_SERVER
from pyps_wire.errors import BadRequest, NotInitialized, PypsError, ServerUnavailable, WaitTimedOut
from pyps_wire.framing import PAYLOAD_FIELD

# Kernels on fewer bytes run on the event loop: handing them to a thread would cost more than they do.
INLINE_BYTES_MAX = 65_536 * 4
# A reply that nobody takes for so long ends its call.
WRITE_SECONDS = 120.0
# Figures of its own that a worker may report.
SCALARS_MAX = 256

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

log = logs.get("pyps.service")


class ParameterServer:
    """The calls of pyps.v1.ParameterServer."""

    def __init__(self, run: Run, *, budget: ByteBudget, executor: Executor, control_address: str):
        self._run = run
        self._budget = budget
        self._executor = executor
        self._control_address = control_address

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service's handlers: bytes in, bytes out."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Hello": grpc.unary_unary_rpc_method_handler(_guarded(self.hello)),
            "Initialize": grpc.stream_unary_rpc_method_handler(_guarded(self.initialize)),
            "Push": grpc.stream_stream_rpc_method_handler(_guarded(self.push)),
            "Pull": grpc.unary_stream_rpc_method_handler(_guarded(self.pull)),
            "Exchange": grpc.stream_stream_rpc_method_handler(_guarded(self.exchange)),
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
                await self._compute(len(payload), add)
        if initialization is None:
            raise BadRequest("Initialize came without a message: the model comes first, then each shard")
        # On a thread whatever the size: it copies this server's whole part of the model.
        await asyncio.get_running_loop().run_in_executor(self._executor, partial(self._run.commit, initialization))
        return self._initialize_reply()

    async def push(self, _: object, context: Context) -> None:
        """Answers each pushed shard with its receipt, in order."""
        while (message := await context.read()) is not grpc.aio.EOF:
            check_message_bytes(len(message), bytes_max=self._run.config.max_message_bytes)
            with self._budget.holding(len(message)):
                _, receipt = await self._push_one(message)
                await _write(context, convert.receipt_to(receipt).SerializeToString())

    async def exchange(self, _: object, context: Context) -> None:
        """Answers each pushed shard with its receipt and the newest parameters."""
        while (message := await context.read()) is not grpc.aio.EOF:
            check_message_bytes(len(message), bytes_max=self._run.config.max_message_bytes)
            with self._budget.holding(len(message)):
                request, receipt = await self._push_one(message)
            shard = self._run.shards.get(request.shard_id)
            if shard is None:
                raise NotInitialized("the run was reset while the push was under way")
            reading = _ExchangeReading(receipt, self._run.epoch)
            await self._send(context, shard, reading, Codec.FLOAT32, worker_id=request.sender.worker_id)

    async def pull(self, message: bytes, context: Context) -> None:
        """Sends the shards that are newer than those held, each as soon as it has the version wanted."""
        request = convert.parse(wire.PullRequest, message)
        codec = convert.codec_from(request.codec)
        observer = request.role == common.ROLE_OBSERVER
        wants = {want.shard_id: want for want in request.wants}
        shards = self._run.shards_to_pull(
            request.sender.run_id,
            request.sender.worker_id,
            request.sender.incarnation,
            observer=observer,
            shard_ids=wants,
        )
        epoch = self._run.epoch
        # Versions of another epoch mean nothing here: everything is newer, and nothing is worth waiting for.
        same_epoch = request.epoch == epoch
        min_versions = {i: want.min_version if same_epoch else 0 for i, want in wants.items()}
        name = "an observer" if observer else request.sender.worker_id
        arrivals = _Arrivals(self._run, shards, min_versions, name=name)
        with arrivals:
            while (shard := await arrivals.next(request.wait_milliseconds / 1000)) is not None:
                want = wants.get(shard.shard_id)
                held = want.held_version if want is not None and same_epoch else -1
                reading = _ParametersReading(shard.shard_id, held, epoch, codec)
                await self._send(
                    context, shard, reading, codec, worker_id=None if observer else request.sender.worker_id
                )

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
        command = wire.HeartbeatReply.COMMAND_STOP if pulse.stop else wire.HeartbeatReply.COMMAND_UNSPECIFIED
        return wire.HeartbeatReply(
            known=pulse.known,
            epoch=pulse.epoch,
            state=int(pulse.state),  # type: ignore[arg-type]
            command=command,
            version=pulse.version,
        ).SerializeToString()

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
        return wire.LeaveReply(num_workers=left).SerializeToString()

    async def _push_one(self, message: bytes) -> tuple[wire.PushRequest, Receipt]:
        request, payload = convert.parse_frame(wire.PushRequest, message)
        gradient = convert.gradient_from(request, payload)
        push = partial(self._run.push, gradient, request.shard_id, run_id=request.sender.run_id)
        return request, await self._compute(len(payload), push)

    async def _send(
        self, context: Context, shard: Shard, reading: _Reading, codec: Codec, *, worker_id: str | None
    ) -> None:
        """Sends a shard's parameters as `reading` frames them; one frame is in memory at a time."""
        payload_bytes = shard.length * item_bytes(codec)
        with self._budget.holding(payload_bytes):
            read = partial(shard.read, reading, worker_id=worker_id)
            frame = await self._compute(payload_bytes, read)
            if frame is None:
                return
            await _write(context, frame)
        self._run.statistics.pulled(worker_id or "observer", payload_bytes)

    async def _compute(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Runs work on that many bytes: here when it is little, else on a thread, so that the loop goes on."""
        if num_bytes < INLINE_BYTES_MAX:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _initialize_reply(self) -> bytes:
        return wire.InitializeReply(
            state=int(self._run.state),  # type: ignore[arg-type]
            epoch=self._run.epoch,
            shards=convert.shard_versions(self._run),
        ).SerializeToString()


@dataclass(frozen=True)
class _ParametersReading:
    """Frames a shard for Pull under its lock; None when the caller's version is as new."""

    shard_id: int
    held_version: int
    epoch: int
    codec: Codec

    def __call__(self, version: int, parameters: Floats) -> bytes | None:
        if version <= self.held_version:
            return None
        header = wire.Parameters(
            shard_id=self.shard_id,
            version=version,
            epoch=self.epoch,
            codec=int(self.codec),  # type: ignore[arg-type]
        )
        return _kernels.join_frame(header.SerializeToString(), PAYLOAD_FIELD, parameters, self.codec)


@dataclass(frozen=True)
class _ExchangeReading:
    """Frames a shard for Exchange under its lock, behind the receipt of the push."""

    receipt: Receipt
    epoch: int

    def __call__(self, version: int, parameters: Floats) -> bytes | None:
        header = wire.ExchangeReply(
            receipt=convert.receipt_to(self.receipt),
            version=version,
            epoch=self.epoch,
            codec=common.CODEC_FLOAT32,
        )
        return _kernels.join_frame(header.SerializeToString(), PAYLOAD_FIELD, parameters, Codec.FLOAT32)


_Reading = _ParametersReading | _ExchangeReading


class _Arrivals:
    """Shards in the order in which they get the version that a pull waits for. A context manager, for one call."""

    def __init__(self, run: Run, shards: list[Shard], min_versions: dict[int, int], *, name: str):
        self._run = run
        self._name = name
        self._shards = run.shards
        self._min_versions = min_versions
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        # The shards still to be sent; those that are ready are found by looking, woken by _changed.
        self._waiting = {shard.shard_id: shard for shard in shards}
        self._cancels: list[Callable[[], bool]] = []
        self._began = self._loop.time()

    def __enter__(self) -> _Arrivals:
        for shard_id, shard in self._waiting.items():
            min_version = self._min_versions.get(shard_id, 0)
            if shard.version < min_version:
                self._cancels.append(shard.when_version(min_version, self._wake))
        return self

    def __exit__(self, *_: object) -> None:
        # A call that was answered, refused, cancelled or abandoned leaves nothing behind.
        for cancel in self._cancels:
            cancel()

    async def next(self, wait_seconds: float) -> Shard | None:
        """The next shard to send, None after the last; WaitTimedOut when a version did not come in time."""
        while self._waiting:
            self._changed.clear()
            for shard_id, shard in self._waiting.items():
                if self._ready(shard):
                    return self._waiting.pop(shard_id)
            self._refuse_when_pointless()
            try:
                with self._run.waits.waiting(self._describe(), self._wake):
                    async with asyncio.timeout_at(self._began + wait_seconds):
                        await self._changed.wait()
            except TimeoutError:
                raise WaitTimedOut(f"{wait_seconds:g} s were not enough: {self._describe()}") from None
        return None

    def _ready(self, shard: Shard) -> bool:
        # A finished shard never gets a newer version: what it has is the answer.
        if shard.version >= self._min_versions.get(shard.shard_id, 0) or shard.finished:
            return True
        return self._run.state == RunState.FINISHED

    def _refuse_when_pointless(self) -> None:
        if self._run.state == RunState.DRAINING:
            raise ServerUnavailable("this server is shutting down: try again once it is back")
        if self._run.shards is not self._shards:
            raise NotInitialized("the run was reset while the pull waited")

    def _describe(self) -> str:
        shard = next(iter(self._waiting.values()))
        wanted = self._min_versions.get(shard.shard_id, 0)
        alive = ", ".join(sorted(member.worker_id for member in self._run.membership.alive())[:8])
        return (
            f"{self._name} waits for version {wanted} of shard {shard.shard_id}, which is at {shard.version}; "
            f"live workers: {alive or 'none'}"
        )

    def _wake(self) -> None:
        # Called from any thread, also while the server ends.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed.set)


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
