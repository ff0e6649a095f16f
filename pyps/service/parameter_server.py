"""The ParameterServer service, which workers call.

Messages pass through gRPC as bytes, so that a payload is never copied into a message object. A call that waits is a
coroutine, never a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from pyps.roles import HELLO_AS_WORKER, Role
from pyps.run.handshake import Greeting, RunState, check_name
from pyps.run.initialization import Initialization
from pyps.run.run import SOFTWARE
from pyps.service import convert
from pyps.service.calls import Call
from pyps.service.limits import check_message_bytes
from pyps.service.pulling import serve_pull
from pyps.service.pushing import serve_stream
from pyps.service.transport import Host, Transport
from pyps.service.waiting import LongPoll, names_in_words
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.allocator import give_back_free_memory
from pyps_wire.codecs import codec_numbered
from pyps_wire.contract import PROTOCOL_VERSION
from pyps_wire.errors import InvalidArgument

# Figures that a worker may report.
SCALARS_MAX = 256
# More tensors are handled on a thread, since it takes milliseconds; a longer message may name more.
TENSORS_INLINE = 1_000
MODEL_BYTES_INLINE = 16 * TENSORS_INLINE

T = TypeVar("T")


class ParameterServer:
    """The calls of pyps.v1.ParameterServer."""

    def __init__(self, host: Host, *, control_address: str, transports: Sequence[Transport] = ()):
        self._host = host
        self._run = host.run
        self._work = host.work
        self._control_address = control_address
        self._transports = transports

    async def Hello(self, message: bytes, context: Call) -> bytes:
        """Let a caller join or observe the run, or tell it who serves it."""
        if elsewhere := self._run.elsewhere:
            return wire.HelloReply(
                protocol_version=PROTOCOL_VERSION,
                software=SOFTWARE,
                state=int(RunState.DRAINING),  # type: ignore[arg-type]
                standby=elsewhere,
                control_address=self._control_address,
            ).SerializeToString()
        large = len(message) >= MODEL_BYTES_INLINE
        greeting, term = await self._off_loop_where(large, partial(self._welcome, message, context.role))
        offers = [await transport.offer(greeting) for transport in self._transports]
        address, model = self._control_address, self._run.content.model
        large = large or (model is not None and len(model.tensors) > TENSORS_INLINE)
        make = partial(convert.hello_reply, self._run, greeting, term, control_address=address, offers=offers)
        return (await self._off_loop_where(large, make)).SerializeToString()

    async def Initialize(self, _: object, context: Call) -> bytes:
        """Receive the first parameters, shard by shard, and make them the run's."""
        begun: list[Initialization] = []
        try:
            finished = await self._receive_parameters(context, begun)
        except BaseException:
            for initialization in begun:
                if not initialization.opening.replica:
                    # Only other processes of a replica may go on with it.
                    initialization.abandon()
            raise
        if not finished:
            # Always on a thread: it copies this server's whole part of the model.
            await self._work.begin(partial(self._commit, begun[0]))
        return wire.InitializeReply(
            state=int(self._run.state),  # type: ignore[arg-type]
            epoch=self._run.content.epoch,
            shards=convert.shard_versions(self._run),
        ).SerializeToString()

    async def _receive_parameters(self, call: Call, begun: list[Initialization]) -> bool:
        """Receive all messages; return True where the run has been initialised before."""
        while (message := await call.receive(under_way=bool(begun))) is not None:
            check_message_bytes(len(message), bytes_max=self._run.config.max_message_bytes)
            large = len(message) >= MODEL_BYTES_INLINE
            read = partial(convert.parse_frame, wire.InitializeRequest, message)
            request, payload = await self._off_loop_where(large, read)
            sender = request.sender
            # Before the message counts for that worker.
            self._run.membership.require_own(sender.worker_id, sender.incarnation, sender.secret)
            with self._host.budget.account(sender.worker_id).holding(len(message)):
                if not begun:
                    initialization = await self._off_loop_where(large, partial(self._begin_initialize, request))
                    if initialization is None:
                        return True
                    begun.append(initialization)
                    continue
                self._run.renew_term(begun[0].opening)
                add = partial(begun[0].add, request.shard_id, codec_numbered(request.codec), payload)
                await self._work.compute(begun[0].length(request.shard_id), add)
            # Their memory is free while the next message is waited for.
            del message, request, payload
        if not begun:
            raise InvalidArgument("Initialize came without a message: the model comes first, then each shard")
        return False

    def Push(self, _: object, call: Call) -> Awaitable[None]:
        """Answer each pushed shard with its receipt, in order."""
        return serve_stream(self._host, call, exchanges=False)

    def Exchange(self, _: object, call: Call) -> Awaitable[None]:
        """Answer each pushed shard with its receipt and, where they are newer, its parameters."""
        return serve_stream(self._host, call, exchanges=True)

    def Pull(self, message: bytes, call: Call) -> Awaitable[None]:
        """Send the shards that are newer than those held, each as soon as it has the version wanted."""
        return serve_pull(self._host, call, message)

    async def Proceed(self, message: bytes, context: Call) -> bytes:
        """Answer when the worker may begin its next step."""
        request = convert.parse(wire.ProceedRequest, message)
        run, sender, clock = self._run, request.sender, request.clock
        # A replica takes steps as one worker.
        name = run.membership.name_of(sender.worker_id)

        waits_for = partial(run.rounds.waited_for_by, sender.worker_id)
        poll = LongPoll(
            run,
            self._work,
            worker_id=sender.worker_id,
            wait_seconds=request.wait_milliseconds / 1000,
            describe=lambda: f"{sender.worker_id} waits to begin step {clock + 1}, for {names_in_words(waits_for())}",
            waits_for=waits_for,
        )

        def wake() -> None:
            poll.wake_by(run.rounds.steps.moved_by)

        ask = partial(run.may_proceed, sender.run_id, sender.worker_id, sender.incarnation, sender.secret, clock=clock)
        cancelled = False
        try:
            poll.look()
            again = False
            while not ask(wake=wake, again=again):
                await poll.wait()
                poll.look()
                again = True
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            # If the call timed out, the next one gets the answer; a cancelled call gives up its turn.
            run.rounds.at_gate(run.rounds.steps.forget, name, wake, withdraw=cancelled)
        return wire.ProceedReply(ask_to_proceed=run.rounds.steps.asks).SerializeToString()

    async def Heartbeat(self, message: bytes, context: Call) -> bytes:
        """Renew a lease; return the run's state and settings."""
        request = convert.parse(wire.HeartbeatRequest, message)
        if len(request.scalars) > SCALARS_MAX:
            raise InvalidArgument(f"a heartbeat carries {len(request.scalars)} scalars; report {SCALARS_MAX} at most")
        for name in request.scalars:
            check_name(name, what="a scalar's name")
        sender = request.sender
        known = self._run.heartbeat(
            sender.run_id,
            sender.worker_id,
            sender.incarnation,
            sender.secret,
            clock=request.clock,
            scalars=dict(request.scalars),
        )
        if known and self._run.standby:
            self._run.told.add(sender.worker_id)
        return convert.heartbeat_reply(self._run, known=known).SerializeToString()

    async def Leave(self, message: bytes, context: Call) -> bytes:
        request = convert.parse(wire.LeaveRequest, message)
        left = self._run.leave(
            request.sender.run_id,
            request.sender.worker_id,
            request.sender.incarnation,
            request.sender.secret,
            failed=request.cause == wire.LeaveRequest.CAUSE_FAILED,
            message=convert.for_people(request.message),
        )
        await self._work.begin(self._run.rounds.complete_rounds)
        if (feed := self._host.feed).guards:
            feed.note_workers(self._run.membership)
            if (received := feed.wait()) is not None:
                await received
        return wire.LeaveReply(num_workers=left).SerializeToString()

    async def _off_loop_where(self, large: bool, work: Callable[[], T]) -> T:
        return await self._work.begin(work) if large else work()

    def _welcome(self, message: bytes, role: Role) -> tuple[Greeting, int]:
        greeting = convert.greeting_from(convert.parse(wire.HelloRequest, message), self._run.content.model)
        if not greeting.observer:
            self._host.access.require(role, HELLO_AS_WORKER)
        return greeting, self._run.hello(greeting)

    def _commit(self, initialization: Initialization) -> None:
        self._run.commit(initialization)
        # Else the memory of its messages would stay mapped.
        give_back_free_memory()

    def _begin_initialize(self, request: wire.InitializeRequest) -> Initialization | None:
        return self._run.begin_initialize(convert.opening_from(request))
