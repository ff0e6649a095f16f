"""Workers in the server's own process: calls are function calls, gradients and parameters lie where both see them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from pyps.run.handshake import Greeting
from pyps.service.calls import Call
from pyps.service.shm.requests import Requests
from pyps.service.shm.segment import Attachment, Memory
from pyps.service.shm.sharers import Sharers
from pyps.service.transport import Host, Service, Transport
from pyps_wire import local_pb2 as local
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.common_pb2 import ROLE_OBSERVER
from pyps_wire.contract import METHODS
from pyps_wire.errors import ProtocolMismatch, PypsError, ServerUnavailable
from pyps_wire.in_process import SERVERS, End

T = TypeVar("T")
Take = Callable[[bytes], None]


class InProcess(Transport):
    """Serves workers of this process, which find it by its address; `call` and `attach` are for any thread."""

    name = "in_process"

    def __init__(self, host: Host):
        super().__init__(host)
        self._requests = Requests(host.run, work=host.work, budget=host.budget)
        self._sharers = Sharers(host.run)
        self._services: list[grpc.GenericRpcHandler] = []
        self._address = ""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def shared_bytes(self) -> int:
        return self._sharers.shared_bytes

    def used_by(self, worker_id: str, incarnation: int) -> bool:
        return self._sharers.used_by(worker_id, incarnation)

    async def offer(self, greeting: Greeting) -> wire.HelloReply:
        if not greeting.observer:
            await self._sharers.quiet(greeting.worker_id)
            self._sharers.greeted(greeting.worker_id)
        return wire.HelloReply()

    async def start(self, services: Sequence[Service], address: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._services = [service.handlers() for service in services]
        self._address = address
        SERVERS[address] = self

    async def stop(self, seconds: float) -> None:
        if SERVERS.get(self._address) is self:
            del SERVERS[self._address]
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(seconds, 0.0))
        for task in self._tasks:
            task.cancel()
        self._sharers.close()

    def call(self, method: str, requests: Iterator[bytes], take: Take) -> Future[None]:
        """Begins a call; `take` gets its answers on the event loop."""
        return self._begin(self._serve(method, requests, take))

    def attach(self, request: local.LocalAttach, memory: memoryview) -> Future[End]:
        """Takes a worker's memory in."""
        return self._begin(self._attach(request, memory))

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        async def watched() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                return await work
            finally:
                self._tasks.discard(task)

        coroutine = watched()
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            # The loop has ended, and the server with it.
            coroutine.close()
            work.close()
            ended: Future[T] = Future()
            ended.set_exception(ServerUnavailable("the server has ended"))
            return ended

    async def _serve(self, method: str, requests: Iterator[bytes], take: Take) -> None:
        handler: Any = next(filter(None, [service.service(_Details(method)) for service in self._services]), None)
        if handler is None:
            raise ProtocolMismatch(f"this server has no call {method}")
        call = Call(_Context(requests, take), self._host.awaited)  # type: ignore[arg-type]
        try:
            request: Any = call.messages() if handler.request_streaming else next(requests)
            ways = handler.stream_stream, handler.stream_unary, handler.unary_stream, handler.unary_unary
            answer = await next(filter(None, ways))(request, call)
        finally:
            call.close()
        if not handler.response_streaming:
            take(answer)
        if method == METHODS["Hello"] and (hello := wire.HelloRequest.FromString(request)).role != ROLE_OBSERVER:
            self._sharers.came(hello.sender.worker_id, hello.sender.incarnation)

    async def _attach(self, request: local.LocalAttach, memory: memoryview) -> End:
        attachment = await self._requests.attach(request, partial(Memory, memory, num_bytes=memory.nbytes))
        end = Attached(attachment, begin=self._begin, requests=self._requests, on_closed=self._sharers.drop)
        try:
            await self._sharers.take(end)
        except BaseException:
            attachment.memory.close()
            raise
        return end


class Attached:
    """The server's end of one worker's memory. For the event loop, `request` and `hang_up` apart.

    What little work there is is not done in the caller's thread either: a Ctrl-C there would come amid an update.
    """

    def __init__(
        self,
        attachment: Attachment,
        *,
        begin: Callable[[Coroutine[Any, Any, local.LocalReply]], Future[local.LocalReply]],
        requests: Requests,
        on_closed: Callable[[Attached], None],
    ):
        self.attachment: Attachment | None = attachment
        self._memory = attachment.memory
        self._begin = begin
        self._requests = requests
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None

    def request(self, request: local.LocalRequest) -> Future[local.LocalReply]:
        """Begins to answer."""
        return self._begin(self._answer(request))

    def hang_up(self) -> None:
        """Ends it, with what is under way."""
        # The loop may have ended, and the server with it.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.close)

    def close(self) -> None:
        """Ends it, with what is under way."""
        if not self._memory.attached:
            return
        self._memory.close()
        if self._task is not None:
            self._task.cancel()
        self._on_closed(self)

    async def _answer(self, request: local.LocalRequest) -> local.LocalReply:
        assert self.attachment is not None
        self._memory.require_attached()
        try:
            answer = self._requests.answer(self.attachment, request)
            if isinstance(answer, local.LocalReply):
                return answer
            self._task = asyncio.current_task()
            return await answer
        except PypsError:
            if not self._requests.serves(self.attachment):
                self.close()
            raise
        finally:
            self._task = None


class _Details(grpc.HandlerCallDetails):
    method: str
    invocation_metadata = ()

    def __init__(self, method: str):
        self.method = method


class _Context:
    """A call's messages as gRPC's context gives and takes them."""

    def __init__(self, requests: Iterator[bytes], take: Take):
        self._requests = requests
        self._take = take

    async def read(self) -> Any:
        # On a thread: whoever makes them may take its time.
        return await asyncio.to_thread(next, self._requests, grpc.aio.EOF)

    async def write(self, message: bytes) -> None:
        self._take(message)
