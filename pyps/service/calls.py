"""Calls as gRPC hands them over: their messages in and out, their end when nobody takes them, their errors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pyps import logs
from pyps.service.security import OPEN_PREFIX, Handler, abort
from pyps_wire.errors import BadRequest, LimitExceeded, MalformedFrame, PypsError, WaitTimedOut

# A reply that nobody takes for so long ends its call.
WRITE_SECONDS = 120.0
# The one message of a call, and the parts of one push, come within so long of each other.
READ_SECONDS = 60.0
# Who needs no token has little to say, and says it at once.
OPEN_READ_SECONDS = 5.0
# Between the first that fails of a call whose caller has gone and its end.
GONE_SECONDS = 10.0

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

log = logs.get("pyps.service")


async def receive(context: Context, *, under_way: bool = False) -> bytes | None:
    """The next message, None after the last.

    A caller that leaves a push unfinished (`under_way`) for long loses its call, and what it held is free.
    """
    if not under_way:
        message = await context.read()
        return None if message is grpc.aio.EOF else message
    try:
        async with asyncio.timeout(READ_SECONDS):
            message = await context.read()
    except TimeoutError:
        raise WaitTimedOut(f"the rest of the push did not come within {READ_SECONDS:g} s: send it again") from None
    return None if message is grpc.aio.EOF else message


class MessageReader(grpc.aio.ServerInterceptor):
    """Takes in the message of calls that have one: gRPC would wait for it for ever, and tell of bad bytes as a bug."""

    def __init__(self, *, open_reads_max: float = math.inf):
        """Waits for the messages of `open_reads_max` calls at once that need no token, and refuses more."""
        self._open_reads_left = open_reads_max

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        is_open = details.method.startswith(OPEN_PREFIX)
        behavior: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def call(_: object, context: Context) -> Any:
            try:
                request = await self._read(context, handler.request_deserializer, is_open=is_open)
            except PypsError as error:
                await abort(context, error)
            return await behavior(request, context)

        # Of a stream a message is read when somebody asks for it.
        many = handler.response_streaming
        make = grpc.stream_stream_rpc_method_handler if many else grpc.stream_unary_rpc_method_handler
        return make(call, response_serializer=handler.response_serializer)

    async def _read(self, context: Context, deserialize: Callable[[bytes], Any] | None, *, is_open: bool) -> Any:
        if is_open and not self._open_reads_left:
            raise LimitExceeded("too many calls that need no token have yet to send their message: try again later")
        self._open_reads_left -= is_open
        seconds = OPEN_READ_SECONDS if is_open else READ_SECONDS
        try:
            async with asyncio.timeout(seconds):
                message = await context.read()
        except TimeoutError:
            raise WaitTimedOut(f"the call's message did not come within {seconds:g} s: call again") from None
        finally:
            self._open_reads_left += is_open
        if message is grpc.aio.EOF:
            raise BadRequest("the call came without its message: send one")
        try:
            return deserialize(message) if deserialize is not None else message
        except DecodeError:
            raise MalformedFrame(f"the {len(message)} bytes received are no message of this call") from None


class Writer:
    """Sends a call's messages, one after the other; a caller that takes none for long loses its call.

    One timer a call, not one a message: that would cost a small message more than all else here.
    """

    def __init__(self, context: Context, *, wait_seconds: float = WRITE_SECONDS):
        self._context = context
        self._wait_seconds = wait_seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        # Who sends at the moment, and since when.
        self._task: asyncio.Task[Any] | None = None
        self._since = 0.0
        self._late = False

    async def send(self, message: bytes) -> None:
        """Sends a message; WaitTimedOut where the caller does not take it, and what it held is free again."""
        self._task, self._since = asyncio.current_task(), self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._wait_seconds, self._look)
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            if not self._late:
                raise
            self._task.uncancel()  # type: ignore[union-attr]
            raise WaitTimedOut(f"the caller took no reply for {self._wait_seconds:g} s: call again") from None
        finally:
            self._task = None

    def close(self) -> None:
        """Ends the watch, with the call."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._task is None:
            # The next message starts the timer again.
            return
        left_seconds = self._since + self._wait_seconds - self._loop.time()
        if left_seconds > 0:
            self._timer = self._loop.call_later(left_seconds, self._look)
        else:
            self._late = True
            self._task.cancel()


def guarded(behavior: Callable[[Any, Context], Awaitable[T]]) -> Callable[[Any, Context], Awaitable[T]]:
    """Turns errors into statuses: ours as they are, any other into INTERNAL with a traceback in the log."""

    async def call(request: Any, context: Context) -> T:
        try:
            return await behavior(request, context)
        except PypsError as error:
            await abort(context, error)
        except grpc.aio.InternalError:
            # The caller has gone, and gRPC is about to cancel the call.
            await asyncio.sleep(GONE_SECONDS)
            raise
        except Exception as error:
            log.exception("a call failed by a bug in the server", call=behavior.__name__)
            await context.abort(grpc.StatusCode.INTERNAL, f"a bug in the server: {type(error).__name__}; see its log")

    return call
