"""gRPC without a network: channels and servers whose messages a link delays, holds, loses and delivers late."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio

from pyps.service.standby.link import ANSWER_SECONDS, Found
from tests.simulation.world import Process, Thread, Waiter, World, wake_all

# Messages on their way to a caller that does not take them; then the sender waits.
WINDOW = 4
# Where nothing comes through, a connection ends after this time.
KEEPALIVE_SECONDS = 80.0

Code = grpc.StatusCode


class RpcFailed(grpc.RpcError):
    def __init__(self, code: Code, details: str, trailing: Sequence[tuple[str, str]] = ()):
        super().__init__(details)
        self._code, self._details, self._trailing = code, details, trailing

    def code(self) -> Code:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Sequence[tuple[str, str]]:
        return self._trailing


class Aborted(grpc.aio.AbortError):  # type: ignore[misc]
    """A handler has ended its call with a status."""


class Network:
    """Every link, and what listens. Messages are counted, so that a fault can name the one that it meets."""

    def __init__(self, world: World):
        self.world = world
        self.servers: dict[str, GrpcServer] = {}
        self.links: list[Link] = []
        # Broken ones whose servers have yet to notice.
        self.num_late = 0
        # By caller and address: until when nothing passes, and by how much all is slower.
        self.held_until: dict[tuple[str, str], float] = {}
        self.slowness: dict[tuple[str, str], float] = {}
        # Whether a firewall answers for what is held, and refuses.
        self.held_refuses = False
        # By caller and address: a stream of delays, so that a plan with less in it goes alike elsewhere.
        self.randoms: dict[tuple[str, str], random.Random] = {}
        # Machines that are gone, until when: nobody says that nothing listens there.
        self.gone_until: dict[str, float] = {}
        # Called with each message before it leaves: the link, its direction, the method, whether it is a call's end.
        self.on_message: Callable[[Link, bool, str, int], None] = lambda link, up, method, size: None
        # Whole calls that were made, for later repetition.
        self.pushed: deque[tuple[Link, str, bytes]] = deque(maxlen=8)

    def hold(self, caller: str, address: str, seconds: float) -> None:
        self.held_until[caller, address] = self.world.now + seconds
        self.world.at(seconds, None, self._release)

    def _release(self) -> None:
        for link in list(self.links):
            link.release()

    async def look(self, address: str) -> Found:
        """Answer the question of a server whether another one listens."""
        assert self.world.process is not None
        asks = self.world.process.name, address
        if self.held_refuses and self.held_until.get(asks, 0.0) > self.world.now:
            return Found.REFUSED
        if max(self.held_until.get(asks, 0.0), self.gone_until.get(address, 0.0)) > self.world.now:
            await asyncio.sleep(ANSWER_SECONDS)
            return Found.SILENT
        await asyncio.sleep(0.002)
        return Found.OPEN if address in self.servers else Found.REFUSED

    def repeat(self, link: Link, path: str, message: bytes) -> None:
        """Deliver a message once more, as what kept a copy of it might: nobody takes the answer."""
        again = Link(self, link.client, link.address)
        call = Rpc(again, path)
        call.begin()
        call.send(message)
        call.half_close()


class Link:
    """One connection of a process to an address. What is sent in a direction arrives in order."""

    def __init__(self, network: Network, client: Process, address: str):
        self.network, self.client, self.address = network, client, address
        self.key = client.name, address
        self.broken = self._brings_late = False
        # Why, once its calls fail.
        self.reason = ""
        # Whether it fails without a word to the client, as where a machine vanished.
        self.silent = False
        # In the order of their beginnings, as sets are not.
        self.calls: dict[Rpc, None] = {}
        self.contexts: dict[Context, None] = {}
        self._arrivals = [0.0, 0.0]
        self._waiting: deque[tuple[bool, Callable[[], None]]] = deque()
        network.links.append(self)
        if self.key not in network.randoms:
            network.randoms[self.key] = random.Random(f"{network.world.seed} {self.key}")
        self._random = network.randoms[self.key]

    def transfer(self, up: bool, method: str, size: int, deliver: Callable[[], None]) -> None:
        """Let a message arrive some time from now, unless the link breaks before."""
        self.network.on_message(self, up, method, size)
        if self.broken or self.silent:
            return
        if self.network.held_until.get(self.key, 0.0) > self.network.world.now:
            if not self._waiting:
                self.network.world.at(KEEPALIVE_SECONDS, None, self._give_up)
            self._waiting.append((up, deliver))
            return
        self._send(up, deliver)

    def _send(self, up: bool, deliver: Callable[[], None]) -> None:
        world = self.network.world
        delay = 0.001 + self._random.expovariate(200.0) * self.network.slowness.get(self.key, 1.0)
        self._arrivals[up] = arrival = max(self._arrivals[up], world.now + delay)
        world.at(arrival - world.now, None, partial(self._arrive, up, deliver))

    def _arrive(self, up: bool, deliver: Callable[[], None]) -> None:
        if self.broken and (not up or not self._brings_late):
            return
        if up:
            server = self.network.servers.get(self.address)
            if server is None:
                self.cut("connection refused")
                return
            server.process.arrive(deliver)
        else:
            self.client.arrive(deliver)

    def release(self) -> None:
        """Send what was held, now that the link is as before."""
        if self.network.held_until.get(self.key, 0.0) > self.network.world.now:
            return
        waiting, self._waiting = self._waiting, deque()
        for up, deliver in waiting:
            if not self.broken:
                self._send(up, deliver)

    def _give_up(self) -> None:
        if self._waiting:
            self.cut("keepalive watchdog timeout")

    def cut(self, reason: str = "connection reset", *, late: float | None = None) -> None:
        """Break the link. What is on its way up arrives all the same with `late`, the server's end after so long."""
        if self.broken:
            return
        self.broken, self.reason = True, reason
        world, network = self.network.world, self.network
        network.links.remove(self)
        self._waiting.clear()
        # Else what was on its way is lost.
        self._brings_late = late is not None
        world.note("cut", *self.key, reason, "" if late is None else f"late {late:g}")
        for call in list(self.calls):
            self.client.at(0.001, partial(call.end, Code.UNAVAILABLE, reason))
        for context in list(self.contexts) if late is None else ():
            context.server.process.at(0.002, context.lose)
        if late is not None:
            network.num_late += 1
            world.at(late, None, self._end_late)

    def _end_late(self) -> None:
        for context in list(self.contexts):
            context.server.process.at(0, context.lose)
        # By then the calls have ended.
        self.network.world.at(0.1, None, self._ended_late)

    def _ended_late(self) -> None:
        self.network.num_late -= 1


class Rpc:
    """A call of a client."""

    def __init__(self, link: Link, path: str, timeout: float | None = None, parse: Any = None):
        self.link, self.path, self.method, self._parse = link, path, path.rpartition("/")[2], parse
        self._world = link.network.world
        self._replies: deque[bytes] = deque()
        self._error: RpcFailed | None = None
        self._ended = False
        self._waiters: deque[Waiter] = deque()
        self.context: Context | None = None
        self._timer = None if timeout is None else link.client.at(timeout, self._expire)
        link.calls[self] = None

    # What gRPC's own calls have.

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while not self._replies:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopIteration
            self._world.park(self._waiters)
        message = self._replies.popleft()
        if self.context is not None:
            self.context.taken()
        return message if self._parse is None else self._parse(message)

    def result(self) -> Any:
        while not self._ended:
            self._world.park(self._waiters)
        if self._error is not None:
            raise self._error
        return self.__next__()

    def cancel(self) -> None:
        if not self._ended:
            self.end(Code.CANCELLED, "Channel closed!")
            self.link.transfer(True, "cancel", 0, self._cancelled)

    # The way up.

    def begin(self) -> None:
        if self.link.broken:
            self.end(Code.UNAVAILABLE, self.link.reason)
            return
        self.link.transfer(True, f"{self.method}(", 0, self._accepted)

    def send(self, message: bytes) -> None:
        if self.method in ("Push", "Exchange"):
            self.link.network.pushed.append((self.link, self.path, message))
        self.link.transfer(True, self.method, len(message), partial(self._received, message))

    def half_close(self) -> None:
        self.link.transfer(True, f"{self.method})", 0, partial(self._received, grpc.aio.EOF))

    def _accepted(self) -> None:
        server = self.link.network.servers.get(self.link.address)
        if server is not None:
            self.context = server.accept(self)

    def _received(self, message: Any) -> None:
        if self.context is not None:
            self.context.receive(message)

    def _cancelled(self) -> None:
        if self.context is not None:
            self.context.lose()

    # The way down.

    def answer(self, message: bytes) -> None:
        if not self._ended:
            self._replies.append(message)
            wake_all(self._waiters)

    def end(self, code: Code, details: str, trailing: Sequence[tuple[str, str]] = ()) -> None:
        if self._ended:
            return
        self._ended = True
        self.link.calls.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if code is not Code.OK:
            self._replies.clear()
            self._error = RpcFailed(code, details, trailing)
        wake_all(self._waiters)

    def _expire(self) -> None:
        if not self._ended:
            self.end(Code.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self.link.transfer(True, "cancel", 0, self._cancelled)


class Channel:
    """A client's grpc.Channel, which connects again where its connection broke."""

    def __init__(self, network: Network, address: str):
        process = network.world.process
        assert process is not None
        self._network, self._address, self._process = network, address, process
        self._link: Link | None = None
        self._closed = False

    def _call(self, path: str, timeout: float | None, parse: Any) -> Rpc:
        self._process.check()
        if self._closed:
            raise ValueError("Cannot invoke RPC on closed channel!")
        if self._link is None or self._link.broken:
            self._link = Link(self._network, self._process, self._address)
        call = Rpc(self._link, path, timeout, parse)
        call.begin()
        return call

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any) -> Any:
        def begin(request: Any, timeout: float | None = None, metadata: Any = ()) -> Rpc:
            call = self._call(path, timeout, response_deserializer)
            call.send(request_serializer(request))
            call.half_close()
            return call

        def wait(request: Any, timeout: float | None = None, metadata: Any = ()) -> Any:
            return begin(request, timeout, metadata).result()

        wait.future = begin  # type: ignore[attr-defined]
        return wait

    def unary_stream(self, path: str, request_serializer: Any) -> Any:
        def begin(request: Any, timeout: float | None = None, metadata: Any = ()) -> Rpc:
            call = self._call(path, timeout, None)
            call.send(request_serializer(request))
            call.half_close()
            return call

        return begin

    def stream_stream(self, path: str) -> Any:
        def begin(requests: Iterator[bytes], metadata: Any = ()) -> Rpc:
            call = self._call(path, None, None)
            Thread(target=self._consume, name="consumption", args=(call, requests)).start()
            return call

        return begin

    def stream_unary(self, path: str, response_deserializer: Any) -> Any:
        def wait(requests: Iterator[bytes], timeout: float | None = None, metadata: Any = ()) -> Any:
            call = self._call(path, timeout, response_deserializer)
            Thread(target=self._consume, name="consumption", args=(call, requests)).start()
            return call.result()

        return wait

    def _consume(self, call: Rpc, requests: Iterator[bytes]) -> None:
        for message in requests:
            if call._ended:
                return
            call.send(message)
            # The next is made when this one has been sent.
            self._network.world.park(None, 0.0005)
        call.half_close()

    def close(self) -> None:
        self._closed = True
        if self._link is not None and not self._process.dead:
            for call in list(self._link.calls):
                call.cancel()
            self._network.world.at(0.001, None, partial(self._link.cut, "the channel was closed"))


class AioWaiter:
    """A coroutine that is parked."""

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(self) -> bool:
        if self.future.done():
            return False
        self.future.set_result(None)
        return True


class AioCall:
    """A call of a server to another one, as grpc.aio's."""

    def __init__(self, call: Rpc):
        self._call = call
        call.begin()

    async def _woken(self) -> None:
        waiter = AioWaiter()
        self._call._waiters.append(waiter)  # type: ignore[arg-type]
        try:
            await waiter.future
        except asyncio.CancelledError:
            # As gRPC does.
            self.cancel()
            raise

    async def read(self) -> Any:
        call = self._call
        while not (call._replies or call._ended):
            await self._woken()
        if call._error is not None and not call._replies:
            raise call._error
        return call.__next__() if call._replies else grpc.aio.EOF

    async def write(self, message: bytes) -> None:
        if self._call._ended:
            raise self._call._error or asyncio.InvalidStateError("RPC already finished.")
        self._call.send(message)
        await asyncio.sleep(0.0005)

    async def code(self) -> None:
        while not self._call._ended:
            await self._woken()

    async def result(self, message: bytes) -> Any:
        self._call.send(message)
        self._call.half_close()
        while not self._call._ended:
            await self._woken()
        if self._call._error is not None:
            raise self._call._error
        return self._call.__next__()

    def cancel(self) -> None:
        self._call.cancel()


class AioChannel:
    """A server's grpc.aio.Channel to another one."""

    def __init__(self, network: Network, address: str):
        process = network.world.process
        assert process is not None
        self._link = Link(network, process, address)

    def stream_stream(self, path: str) -> Any:
        return lambda metadata: AioCall(Rpc(self._link, path))

    def unary_unary(self, path: str, serialize: Any, parse: Any) -> Any:
        return lambda request, timeout, metadata: AioCall(Rpc(self._link, path, timeout, parse)).result(
            serialize(request)
        )

    async def __aenter__(self) -> AioChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        for call in list(self._link.calls):
            call.cancel()
        self._link.network.world.at(0.001, None, partial(self._link.cut, "the channel was closed"))


class GrpcServer:
    """A server's grpc.aio.Server."""

    def __init__(self, network: Network, interceptors: Sequence[Any], options: object):
        process = network.world.process
        assert process is not None
        self.process: Process = process
        self._network, self._interceptor = network, interceptors[0]
        self._handlers: list[Any] = []
        self._address = ""

    def add_insecure_port(self, address: str) -> int:
        self._address = address
        return int(address.rpartition(":")[2])

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._handlers += handlers

    async def start(self) -> None:
        self._network.servers[self._address] = self

    async def stop(self, grace: float) -> None:
        self.vanish()
        await asyncio.sleep(grace)
        self.disconnect("the server ended")

    def vanish(self) -> None:
        if self._network.servers.get(self._address) is self:
            del self._network.servers[self._address]

    def disconnect(self, reason: str) -> None:
        for link in [link for link in self._network.links if link.address == self._address]:
            link.cut(reason)

    def accept(self, call: Rpc) -> Context:
        context = Context(self, call)
        context.task = self.process.loop.create_task(self._serve(context, call.path))
        return context

    async def _serve(self, context: Context, path: str) -> None:
        details = SimpleNamespace(method=path, invocation_metadata=())
        call, link = context.call, context.call.link
        code, words, trailing, reply = Code.OK, "", (), None
        try:
            handler = await self._interceptor.intercept_service(self._find, details)
            if handler is None:
                code, words = Code.UNIMPLEMENTED, f"no method {path}"
            elif handler.response_streaming:
                await handler.stream_stream(None, context)
            else:
                reply = await handler.stream_unary(None, context)
        except Aborted as aborted:
            code, words, trailing = aborted.args
        except asyncio.CancelledError:
            code, words = Code.CANCELLED, "cancelled"
        finally:
            link.contexts.pop(context, None)
            context.over = True
        if reply is not None:
            link.transfer(False, f"{call.method}=", len(reply), partial(call.answer, reply))
        link.transfer(False, f"{call.method}.", 0, partial(call.end, code, words, trailing))

    async def _find(self, details: Any) -> Any:
        return next((found for each in self._handlers if (found := each.service(details)) is not None), None)


class Context:
    """A server's grpc.aio.ServicerContext."""

    task: asyncio.Task[None]

    def __init__(self, server: GrpcServer, call: Rpc):
        self.server, self.call = server, call
        self.over = False
        self._inbox: deque[Any] = deque()
        self._reading: asyncio.Future[None] | None = None
        self._untaken = 0
        self._writing: asyncio.Future[None] | None = None
        call.link.contexts[self] = None

    def receive(self, message: Any) -> None:
        self._inbox.append(message)
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    def lose(self) -> None:
        """Cancel the call, whose caller is gone."""
        if not self.over:
            self.task.cancel()

    async def read(self) -> Any:
        while not self._inbox:
            self._reading = asyncio.get_running_loop().create_future()
            await self._reading
        # The end is there for every later read.
        return self._inbox[0] if self._inbox[0] is grpc.aio.EOF else self._inbox.popleft()

    async def write(self, message: bytes) -> None:
        while self._untaken >= WINDOW:
            self._writing = asyncio.get_running_loop().create_future()
            await self._writing
        self._untaken += 1
        self.call.link.transfer(False, f"{self.call.method}=", len(message), partial(self.call.answer, bytes(message)))

    def taken(self) -> None:
        """Note that the caller has taken a message, some time later."""
        self.call.link.network.world.at(0.001, self.server.process, self._note_taken)

    def _note_taken(self) -> None:
        self._untaken -= 1
        if self._writing is not None and not self._writing.done():
            self._writing.set_result(None)

    async def send_initial_metadata(self, metadata: object) -> None:
        pass

    async def abort(self, code: Code, details: str = "", trailing_metadata: Sequence[tuple[str, str]] = ()) -> None:
        raise Aborted(code, details, trailing_metadata)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:50000"
