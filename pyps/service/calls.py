"""Calls of gRPC: their messages in and out, their time limits, their errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pyps import logs
from pyps.roles import Role, needed_for
from pyps.service.limits import ByteBudget
from pyps.service.security import Access, abort, subject_of, text_of
from pyps.service.serializations import Answer
from pyps_wire import local_pb2 as local
from pyps_wire.errors import InvalidArgument, LimitExceeded, MalformedFrame, PypsError, ServerUnavailable, WaitTimedOut

# An answer that its caller does not take for this time ends its call; the second time is for while more than half of
# the bytes in flight are held, which callers that read nothing must not keep. A large message takes less.
WRITE_SECONDS = 120.0
CROWDED_WRITE_SECONDS = 20.0
# How long a call waits for its only message, or for the next part of a push.
READ_SECONDS = 60.0
# A message that has not come after this time may have come in part, and its sender may never send the rest.
LATE_SECONDS = 5.0
# How many messages may be late, even with few workers: observers and commands call too.
LATE_MIN = 16
# Longer messages are part of the bytes in flight.
SHORT_BYTES = 64 * 2**10
# How long a call that needs no token waits for its message, which is short.
OPEN_READ_SECONDS = 5.0
# How long a call whose caller has gone waits for gRPC to cancel it.
GONE_SECONDS = 10.0

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]
# In quotes: only the type stubs know that it has parameters.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

log = logs.get("pyps.service")


class WaitingCalls:
    """The calls that wait for a message. For the event loop, except `num_late`.

    gRPC does not report how much of a message it has received. So a call that waits for long is taken to have received
    nearly all of it, also the call of a worker between two pushes. Beyond `late_max` such calls the longest waiting
    one ends, and its caller makes it again. With `at_once` a call is late as soon as it waits.
    """

    def __init__(self, late_max: int, *, at_once: bool = False):
        self._late_max = late_max
        self._at_once = at_once
        # Since when each call's task waits, the longest first.
        self._since: dict[asyncio.Task[Any], float] = {}
        self._ended: set[asyncio.Task[Any]] = set()
        # One timer for all calls: one for each message would cost more than the rest of a small message.
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_late(self) -> int:
        """Return how many messages have not come for long. May be called from any thread."""
        late_since = time.monotonic() - LATE_SECONDS
        return sum(since <= late_since for since in list(self._since.values()))

    def begin(self, task: asyncio.Task[Any]) -> None:
        """Note that a call's task waits for a message from now on."""
        self._since[task] = time.monotonic()
        if self._at_once:
            self._end_longest(len(self._since))
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LATE_SECONDS, self._look)

    def end(self, task: asyncio.Task[Any]) -> None:
        self._since.pop(task, None)
        self._ended.discard(task)

    def require_wanted(self, task: asyncio.Task[Any]) -> None:
        """Raise LimitExceeded if the task was cancelled because too many messages are late."""
        if task not in self._ended:
            return
        task.uncancel()
        which, advice = (
            ("that need no token waited for their messages", "and send the message at once")
            if self._at_once
            else (f"had waited for their messages for over {LATE_SECONDS:g} s", "or raise --max-workers")
        )
        raise LimitExceeded(
            f"more than {self._late_max} calls {which}, this one the longest: call again, {advice}"
        ) from None

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LATE_SECONDS, self._look) if self._since else None
        self._end_longest(self.num_late)

    def _end_longest(self, num_late: int) -> None:
        for task in list(self._since)[: max(0, num_late - self._late_max)]:
            # Cancelled once, though the task goes on waiting until its turn on the event loop.
            del self._since[task]
            self._ended.add(task)
            task.cancel()


class Call:
    """A call's messages in and out, with time limits; everything else as in gRPC's context.

    A caller that takes no reply for long loses its call. One timer serves the whole call, as in `WaitingCalls`.
    """

    def __init__(self, context: Context, waiting: WaitingCalls, budget: ByteBudget):
        self._context = context
        self._waiting = waiting
        self._budget = budget
        # Until the caller is known.
        self.role = Role.OPERATOR
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        # The task that sends now, and since when.
        self._writer: asyncio.Task[Any] | None = None
        self._since = 0.0
        self._late = False
        # Whether its headers were sent.
        self._has_begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """Return the next message, EOF after the last; LimitExceeded where too many calls wait for theirs."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.begin(task)
        try:
            return await self._context.read()
        except asyncio.CancelledError:
            self._waiting.require_wanted(task)
            raise
        finally:
            self._waiting.end(task)

    async def receive(self, *, under_way: bool = False) -> bytes | None:
        """Return the next message, None after the last; WaitTimedOut if the rest of what is `under_way` is late."""
        try:
            async with asyncio.timeout(READ_SECONDS if under_way else None):
                message = await self.read()
        except TimeoutError:
            raise WaitTimedOut(
                f"the rest of the call's messages did not come within {READ_SECONDS:g} s: call again"
            ) from None
        return None if message is grpc.aio.EOF else message

    async def messages(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def write(self, message: Any) -> None:
        """Send an answer, or a message as gRPC takes it; WaitTimedOut if the caller does not take it."""
        self._writer, self._since = asyncio.current_task(), self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(CROWDED_WRITE_SECONDS, self._look)
        try:
            if not self._has_begun:
                # Before the first message: gRPC could not abort a call whose headers and message it sends together.
                self._has_begun = True
                await self._context.send_initial_metadata(())
            await self._context.write(message.whole if isinstance(message, Answer) else message)
        except asyncio.CancelledError:
            if not self._late:
                raise
            self._writer.uncancel()  # type: ignore[union-attr]
            seconds = self._loop.time() - self._since
            raise WaitTimedOut(f"the caller took no reply for {seconds:.0f} s: call again") from None
        finally:
            self._writer = None

    def close(self) -> None:
        """End the time limits, with the call."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._writer is None:
            # The next message starts the timer again.
            return
        waited_seconds = self._loop.time() - self._since
        seconds_max = write_seconds(self._budget)
        if waited_seconds < seconds_max:
            # The budget may become crowded meanwhile.
            left_seconds = min(seconds_max - waited_seconds, CROWDED_WRITE_SECONDS)
            self._timer = self._loop.call_later(left_seconds, self._look)
        else:
            self._late = True
            self._writer.cancel()


def write_seconds(budget: ByteBudget) -> float:
    return CROWDED_WRITE_SECONDS if budget.is_crowded else WRITE_SECONDS


class MessageReader(grpc.aio.ServerInterceptor):
    """Checks who calls, reads the message of each call, and turns errors into statuses.

    A refused call has no message read, and a message that does not come ends its call. Errors of this project become
    their own statuses, any other INTERNAL with a traceback in the log.
    """

    def __init__(
        self,
        access: Access,
        waiting: WaitingCalls,
        budget: ByteBudget,
        *,
        waiting_without_token: WaitingCalls | None = None,
    ):
        """Calls that need no token wait among `waiting_without_token`, where that is given."""
        self._access = access
        self._waiting = waiting
        self._budget = budget
        self._waiting_without_token = waiting_without_token or waiting
        # Called with gRPC's name of a caller that may make the call it makes.
        self.on_caller: Callable[[str], None] = lambda peer: None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's handler, with all that this class does around it; gRPC calls this once a call."""
        handler = await continuation(details)
        if handler is None:
            return None
        streams, deserialize = handler.request_streaming, handler.request_deserializer
        waiting = self._waiting_without_token if _needs_no_token(details.method) else self._waiting
        method: Any = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary

        async def serve(_: object, context: Context) -> Any:
            call = Call(context, waiting, self._budget)
            try:
                self._admit(call, context, details)
                # A stream's messages are read by its service.
                answer = method(call.messages(), call) if streams else self._answer(call, details, method, deserialize)
                return await answer
            except PypsError as error:
                await abort(context, error)
            except grpc.aio.InternalError:
                # The caller has gone; gRPC cancels the call next.
                await asyncio.sleep(GONE_SECONDS)
                raise
            except grpc.aio.BaseError:
                # The call was aborted, or the server stops.
                raise
            except Exception as error:
                log_bug(error, details.method)
                await context.abort(grpc.StatusCode.INTERNAL, _words_of_bug(error))
            finally:
                call.close()

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        # As a stream always, so that no message is read before the caller is known.
        return make(serve, deserialize if streams else None, handler.response_serializer)

    def _admit(self, call: Call, context: Context, details: grpc.HandlerCallDetails) -> None:
        """Find the caller's role; raise NotAuthenticated or NotAllowed where it may not make the call."""
        authorization = next((value for key, value in details.invocation_metadata if key == "authorization"), None)
        subject, peer = subject_of(context) if self._access.certified else "", context.peer()
        call.role = self._access.admit(details.method, authorization, peer=peer, subject=subject)
        if call.role is not Role.ANYBODY:
            self.on_caller(peer)

    async def _answer(
        self,
        call: Call,
        details: grpc.HandlerCallDetails,
        method: Callable[[Any, Call], Awaitable[Any]],
        deserialize: Callable[[bytes], Any] | None,
    ) -> Any:
        """Read a call's only message and answer it. A long message is held on the budget meanwhile."""
        needs_no_token, account = _needs_no_token(details.method), self._budget.account()
        try:
            message = await _only_message(call, seconds=OPEN_READ_SECONDS if needs_no_token else READ_SECONDS)
            # A short message takes hardly more than its call.
            account.hold(len(message) if len(message) > SHORT_BYTES else 0)
        except LimitExceeded as error:
            # A client retries a call that finds no server, and gives up a call that goes beyond a limit.
            raise error if needs_no_token else ServerUnavailable(str(error)) from None
        try:
            return await method(_parse(message, deserialize), call)
        finally:
            account.close()


def _needs_no_token(method: str) -> bool:
    """Return whether a call needs no token."""
    return needed_for(method) is Role.ANYBODY


def failure_of(error: BaseException, what: str) -> local.LocalFailure:
    """Return an error as a message for callers without gRPC; log a bug, with the call that failed."""
    if isinstance(error, PypsError):
        return local.LocalFailure(status=error.status, name=type(error).__name__, details=text_of(error))
    log_bug(error, what)
    return local.LocalFailure(status="INTERNAL", details=_words_of_bug(error))


def log_bug(error: BaseException, what: str) -> None:
    """Log a bug of the server with its traceback."""
    try:
        raise error
    except BaseException:
        log.exception("a call failed by a bug in the server", call=what)


def _words_of_bug(error: BaseException) -> str:
    return f"a bug in the server: {type(error).__name__}; see its log"


async def _only_message(call: Call, *, seconds: float) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            message = await call.read()
            # A further message would be held while the call waits for others, and has no use.
            more = message is not grpc.aio.EOF and await call.read() is not grpc.aio.EOF
    except TimeoutError:
        raise WaitTimedOut(f"the call's message did not come within {seconds:g} s: call again") from None
    if message is grpc.aio.EOF:
        raise InvalidArgument("the call came without its message: send one")
    if more:
        raise InvalidArgument("the call came with more than one message: send one")
    return message  # type: ignore[no-any-return]


def _parse(message: bytes, deserialize: Callable[[bytes], Any] | None) -> Any:
    try:
        return deserialize(message) if deserialize is not None else message
    except DecodeError:
        raise MalformedFrame(f"the {len(message)} bytes received are no message of this call") from None
