"""Lanes: one worker a connection, whose small messages stay on the event loop and whose large ones go to threads."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from pyps import logs
from pyps.config import ConfigError
from pyps.run.handshake import Greeting
from pyps.service import convert
from pyps.service.calls import SHORT_BYTES, failure_of, write_seconds
from pyps.service.conversation import AHEAD_BYTES_MAX, Conversation
from pyps.service.executor import look_at_error
from pyps.service.hosting import address_of, busy_port, listening_socket
from pyps.service.limits import ByteBudget, check_message_bytes
from pyps.service.listener import AUTO, OFF, Caller, Listener, peer_of
from pyps.service.pulling import PullStream, pull_request
from pyps.service.pushing import PUSH_HEADER_MAX, READ_AHEAD_MAX, Message, Pushes
from pyps.service.serializations import Answer
from pyps.service.transport import Host
from pyps_wire import lane, lane_pb2
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.common_pb2 import Sender
from pyps_wire.contract import LANE_PORT
from pyps_wire.errors import InvalidArgument, NotAllowed, ServerUnavailable

# A caller shows its ticket within so long.
OPEN_SECONDS = 5.0
OPEN_BYTES_MAX = 4096
# A message that has begun is whole within so long, or at this rate where it is larger than by default.
MESSAGE_SECONDS = 60.0
BYTES_PER_SECOND_MIN = 2**18
# A server that ends does not wait for a message whose rest has not come for so long.
STALL_SECONDS = 1.0
# After a failure the other end reads it within so long, and closes.
END_SECONDS = 5.0

log = logs.get("pyps.service")

T = TypeVar("T")


class Connection(Caller):
    """A lane from its beginning to its end. For the event loop.

    While the large messages of a push come, a thread receives them, and another applies and answers them: a hand-over
    to the event loop for each would double their time. At most READ_AHEAD_MAX messages are here at once, or one while
    all callers together hold much.
    """

    def __init__(
        self,
        end: socket.socket,
        host: Host,
        threads: Executor,
        *,
        admit: Callable[[Connection, lane_pb2.LaneOpen], None],
        on_closed: Callable[[Caller], None],
        warnings: logs.Crowd,
    ):
        """`admit` accepts a worker or raises an error."""
        self.peer = peer_of(end)
        self._end = end
        self._lane = lane.Lane(end) if host.tls is None else lane.SecureLane(end, host.tls.context())
        self._host = host
        self._threads = threads
        self._admit = admit
        self._on_closed = on_closed
        self._warnings = warnings
        self._loop = asyncio.get_running_loop()
        self._account = host.budget.account()
        self._conversation = Conversation(
            host.work, self._account, self._write, ahead_max=READ_AHEAD_MAX, feed=host.feed
        )
        self._pushes = Pushes(host.run, self._conversation)
        # The worker, once the lane is open.
        self._sender: Sender | None = None
        # Done with the error that ends the lane.
        self._ended: asyncio.Future[None] = self._loop.create_future()
        # Its error counts as seen where a failed delivery ends the lane first.
        self._ended.add_done_callback(look_at_error)
        # The pull under way, until its end is sent: a worker has one at a time.
        self._pulling: asyncio.Task[None] | None = None
        # The newest message that a thread sends.
        self._sending: asyncio.Task[None] | None = None
        self._sending_lock = threading.Lock()
        # The same two threads serve all pushes: each thread allocates payloads from memory of its own, which it uses
        # again.
        self._receiver = ThreadPoolExecutor(1, thread_name_prefix="lane receives")
        self._answerer = ThreadPoolExecutor(1, thread_name_prefix="lane answers")
        # Blocking work that may still use the socket.
        self._blocking: set[Future[Any]] = set()
        # By when the other end must have opened the lane, or sent the rest of a message. None while it owes nothing.
        self._receives_until: float | None = time.monotonic() + OPEN_SECONDS
        # Since when a thread has been sending a message, and its size.
        self._sends: tuple[float, int] | None = None
        # By when the rest of a push that is applied as a whole must have come; after a failure, the other end's end.
        self._completes_until: float | None = None
        self._task = self._loop.create_task(self._serve())

    @property
    def worker(self) -> tuple[str, int] | None:
        return None if self._sender is None else (self._sender.worker_id, self._sender.incarnation)

    def is_overdue(self, now: float) -> bool:
        # Once: a thread may set it to None meanwhile.
        if (sends := self._sends) is not None:
            since, num_bytes = sends
            if now > since + max(write_seconds(self._host.budget), num_bytes / BYTES_PER_SECOND_MIN):
                return True
        limits = self._receives_until, self._completes_until
        return any(until is not None and now > until for until in limits)

    @property
    def is_stalled(self) -> bool:
        """Return whether the rest of a message, or of a push, does not come."""
        owes = self._receives_until is not None or self._completes_until is not None
        return owes and self._lane.silent_seconds() > STALL_SECONDS

    @property
    def idle(self) -> bool:
        # A push whose rest does not come is answered too: its worker may be gone.
        is_answered = not self._conversation.under_way and not self._account.num_bytes
        return self._receives_until is None and self._pulling is None and is_answered

    def shut(self) -> None:
        self._lane.shut()

    async def finish(self, seconds: float) -> None:
        self.take_no_more()
        await asyncio.wait([self._task], timeout=max(seconds, 0.0))

    def take_no_more(self) -> None:
        """Let the messages end; those received are answered."""
        with contextlib.suppress(OSError):
            self._lane.shut_reading()

    async def _serve(self) -> None:
        try:
            request = await self._in_thread(self._open)
            self._admit(self, request)
            self._sender, self._receives_until = request.sender, None
            self._account.caller = request.sender.worker_id
            async with self._conversation:
                self._write(Answer(lane.OPEN))
                self._conversation.start(self._go_on())
                await self._ended
        except (lane.LaneClosed, OSError):
            # The worker is gone, or comes again.
            pass
        except Exception as error:
            with contextlib.suppress(lane.LaneClosed, OSError):
                await self._end_with(error)
        finally:
            self._loop.remove_reader(self._end)
            self._lane.shut()
            if self._pulling is not None:
                # Where a delivery ended the lane it goes on; what it holds is on the account that closes here.
                self._pulling.cancel()
                await asyncio.wait([self._pulling])
            while self._blocking:
                # The system would give their socket's number to another. Their errors were seen, or come of the end.
                await asyncio.gather(*map(asyncio.wrap_future, list(self._blocking)), return_exceptions=True)
            for threads in (self._receiver, self._answerer):
                threads.shutdown(wait=False)
            self._lane.close()
            self._pushes.discard()
            self._account.close()
            self._on_closed(self)

    def _fail(self, error: Exception) -> None:
        """End the lane, behind the answers to earlier messages."""
        if self._end.fileno() < 0:
            # It has ended while the end of a pull was being sent.
            return
        self._loop.remove_reader(self._end)
        if self._pulling is not None:
            self._pulling.cancel()
        if not self._ended.done():
            self._ended.set_exception(error)

    async def _end_with(self, error: Exception) -> None:
        self._completes_until = time.monotonic() + END_SECONDS
        sent = self._write(_failure(error))
        if sent is not None:
            await sent
        await self._in_thread(self._lane.end)

    # Receiving.

    def _open(self) -> lane_pb2.LaneOpen:
        try:
            self._lane.handshake()
        except ssl.SSLError as error:
            self._warnings.note("callers at the lane were refused by TLS", newest=self.peer, reason=error.reason)
            # It reads why.
            self._lane.end()
            raise
        kind, header, payload_bytes = self._lane.receive(header_bytes_max=OPEN_BYTES_MAX)
        if kind != lane.OPEN or payload_bytes:
            raise InvalidArgument("the first message on a lane shows the ticket of Hello")
        return convert.parse(lane_pb2.LaneOpen, header)

    def _on_readable(self) -> None:
        """Take one small message that has come, the usual case; a task goes on where there is more to do."""
        try:
            self._lane.fill()
            message = self._lane.whole()
            sent = None if message is None else self._take(*message)
            if sent is not None or self._lane.has_more:
                self._loop.remove_reader(self._end)
                self._conversation.start(self._go_on(sent))
        except BlockingIOError:
            return
        except Exception as error:
            self._fail(error)

    async def _go_on(self, sent: Awaitable[object] | None = None) -> None:
        """Take messages until no more has come."""
        try:
            while True:
                if sent is not None:
                    await sent
                    self._completes_until = _until(MESSAGE_SECONDS, 0) if self._pushes.parts else None
                if (message := self._lane.whole()) is not None:
                    sent = self._take(*message)
                elif self._lane.is_large:
                    large = await (
                        self._take_burst() if self._may_burst else self._in_thread(self._receive, self._receiver)
                    )
                    sent = None if large is None else self._take(*large)
                    del large
                elif self._fill():
                    sent = None
                else:
                    break
                del message
                if sent is None:
                    # Others have their turn.
                    await asyncio.sleep(0)
            if not self._lane.is_empty:
                self._receives_until = time.monotonic() + MESSAGE_SECONDS
                if (begun := self._lane.begun) is not None:
                    self._check(*begun)
            self._loop.add_reader(self._end, self._on_readable)
        except Exception as error:
            self._fail(error)

    def _fill(self) -> bool:
        try:
            self._lane.fill()
        except BlockingIOError:
            return False
        return True

    def _receive(self) -> tuple[int, bytes, memoryview, int]:
        self._receives_until = time.monotonic() + MESSAGE_SECONDS
        kind, header, payload_bytes = self._lane.receive(header_bytes_max=PUSH_HEADER_MAX)
        self._check(kind, len(header), payload_bytes)
        self._receives_until = _until(MESSAGE_SECONDS, payload_bytes)
        self._account.hold(payload_bytes)
        # From the heap, where an earlier one has just become free; a gradient that waits for others keeps it.
        payload = np.empty(payload_bytes, np.uint8).data
        self._lane.receive_into(payload)
        return kind, header, payload, payload_bytes

    @property
    def _may_burst(self) -> bool:
        """Return whether all is answered and sent, and pushes are applied message by message."""
        is_free = self._pulling is None and self._sending is None and not self._conversation.under_way
        return is_free and not self._pushes.parts and not self._pushes.held and not self._whole_model

    @property
    def _whole_model(self) -> bool:
        return self._host.run.rounds.behaviour.aggregation.whole_model

    async def _take_burst(self) -> tuple[int, bytes, memoryview, int] | None:
        """Take pushes until the lane ends or another message comes, and return that message.

        A worker that pushes large messages goes on doing so. The thread therefore waits for the next push itself, which
        saves two switches between threads a push.
        """
        burst = _Burst(self._host.budget)
        answering = asyncio.ensure_future(self._in_thread(partial(self._answer_burst, burst), self._answerer))
        receiving = asyncio.ensure_future(self._in_thread(partial(self._receive_burst, burst), self._receiver))
        for thread in (answering, receiving):
            # Its error counts as seen where the other's ends the lane.
            thread.add_done_callback(look_at_error)
        try:
            await asyncio.wait([answering, receiving], return_when=asyncio.FIRST_EXCEPTION)
            if answering.done():
                answering.result()
            await asyncio.wait([receiving])
            # Also where no thread was left to receive.
            burst.put(None)
            # What came before a failure is answered first.
            await answering
            return receiving.result()
        finally:
            burst.end()

    def _receive_burst(self, burst: _Burst) -> tuple[int, bytes, memoryview, int] | None:
        try:
            push_id, left = None, 0
            while burst.may_receive():
                self._lane.wait()
                if (begun := self._lane.begun) is not None:
                    self._check(*begun)
                message = self._receive()
                self._receives_until = None
                kind, header, payload, bytes_held = message
                if kind not in (lane.PUSH, lane.EXCHANGE):
                    return message
                request = self._request(header)
                if request.scale_follows or request.num_held:
                    return message
                each_id = request.sender.worker_id, request.sequence
                if left <= 0 and not self._whole_model:
                    self._pushes.singly = push_id = each_id
                    left = request.num_shards
                elif each_id != push_id:
                    return message
                # Memory for the answer is for the other thread, which uses the same again.
                burst.put(partial(self._message, kind, request, payload, bytes_held))
                del message, payload
                left -= 1
            return None
        finally:
            burst.put(None)

    def _answer_burst(self, burst: _Burst) -> None:
        try:
            while (make := burst.get()) is not None:
                part = make()
                num_bytes = part.bytes_held
                self._conversation.answer(part, self._send_answer)
                # Its memory is free while the next is waited for.
                del part, make
                self._account.release(num_bytes)
                burst.answered()
        finally:
            burst.end()

    def _send_answer(self, answer: Answer) -> None:
        self._sends = time.monotonic(), len(answer.payload)
        try:
            with self._sending_lock:
                self._lane.send(answer.kind, answer.header, answer.payload)
        finally:
            self._sends = None

    def _check(self, kind: int, header_bytes: int, payload_bytes: int) -> None:
        """Refuse a message that no worker sends, before memory is taken for it."""
        check_message_bytes(header_bytes + payload_bytes, bytes_max=self._host.config.max_message_bytes)
        if kind not in (lane.PUSH, lane.EXCHANGE, lane.PULL):
            raise InvalidArgument(f"a lane's message has kind {kind}, which workers do not send")
        if kind == lane.PULL and payload_bytes:
            raise InvalidArgument(f"a lane's Pull has a payload of {payload_bytes} bytes; expected none")

    def _take(self, kind: int, header: bytes, payload: memoryview, bytes_held: int = 0) -> Awaitable[object] | None:
        self._receives_until = None
        if kind not in (lane.PUSH, lane.EXCHANGE):
            self._check(kind, len(header), payload.nbytes)
            self._begin_pull(header)
            return None
        request = self._request(header)
        if request.scale_follows:
            exchanges, num_bytes = kind == lane.EXCHANGE, payload.nbytes
            return self._pushes.hold(request, payload, exchanges=exchanges, num_bytes=num_bytes, bytes_held=bytes_held)
        return self._pushes.take(self._message(kind, request, payload, bytes_held))

    def _request(self, header: bytes) -> wire.PushRequest:
        request = convert.parse(wire.PushRequest, header, bytes_max=PUSH_HEADER_MAX)
        self._require_own(request.sender)
        return request

    def _message(self, kind: int, request: wire.PushRequest, payload: memoryview, bytes_held: int) -> Message:
        return Message(
            self._host.run,
            request,
            payload,
            exchanges=kind == lane.EXCHANGE,
            received_bytes=payload.nbytes,
            bytes_held=bytes_held,
        )

    def _require_own(self, sender: Sender) -> None:
        own = self._sender
        assert own is not None
        if (sender.worker_id, sender.incarnation) != (own.worker_id, own.incarnation):
            raise NotAllowed(
                f"the message is of worker {sender.worker_id!r} ({sender.incarnation}), on the lane of worker "
                f"{own.worker_id!r} ({own.incarnation})"
            )

    def _begin_pull(self, header: bytes) -> None:
        request = pull_request(self._host.run, header)
        self._require_own(request.sender)
        if self._pulling is not None:
            raise InvalidArgument("a pull is under way on this lane: read what it brings first")
        self._pulling = self._loop.create_task(self._serve_pull(request))

    async def _serve_pull(self, request: wire.PullRequest) -> None:
        try:
            try:
                await PullStream(self._host, self._conversation, request).serve()
                await self._conversation.none_under_way()
                answer = Answer(lane.END)
            except OSError:
                raise
            except Exception as error:
                # The lane goes on.
                answer = _failure(error)
            self._pulling = None
            if (sent := self._write(answer)) is not None:
                await sent
        except OSError as error:
            self._pulling = None
            self._fail(error)

    # Sending.

    def _write(self, answer: Answer) -> Awaitable[None] | None:
        kind, header, payload = answer.kind, answer.header, answer.payload
        num_bytes = len(payload)
        send = partial(self._lane.send, kind, header, payload)
        if num_bytes <= SHORT_BYTES and self._sending is None and not self._sending_lock.locked():
            rest = self._lane.send_now(kind, header, payload)
            if not rest:
                return None
            send = partial(self._lane.flush, rest)
        self._sending = self._loop.create_task(self._send_after(self._sending, send, num_bytes))
        return self._sending

    async def _send_after(self, before: asyncio.Task[None] | None, send: Callable[[], None], num_bytes: int) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._sends = time.monotonic(), num_bytes
        try:
            await self._in_thread(partial(self._send, send))
        finally:
            self._sends = None
            if self._sending is asyncio.current_task():
                self._sending = None

    def _send(self, send: Callable[[], None]) -> None:
        # A cancelled task does not end its thread.
        with self._sending_lock:
            send()

    async def _in_thread(self, work: Callable[[], T], threads: Executor | None = None) -> T:
        try:
            future = (threads or self._threads).submit(work)
        except RuntimeError as error:
            # No thread is left, or the server has ended.
            log.warning("a lane was cut off", reason=str(error))
            raise ConnectionAbortedError(str(error)) from None
        self._blocking.add(future)
        future.add_done_callback(self._blocking.discard)
        return await asyncio.wrap_future(future)


class _Burst:
    """The messages of a push between the thread that receives and the one that answers."""

    def __init__(self, budget: ByteBudget):
        self._budget = budget
        self._messages: SimpleQueue[Callable[[], Message] | None] = SimpleQueue()
        # Messages that may still be received.
        self._room = threading.Semaphore(READ_AHEAD_MAX)
        self._has_ended = False

    def may_receive(self) -> bool:
        """Return once there is room for one more; False after the end."""
        self._room.acquire()
        if self._budget.bytes_held >= AHEAD_BYTES_MAX:
            # Where callers together hold much, each has one at a time: the others keep the processors busy.
            for _ in range(READ_AHEAD_MAX - 1):
                self._room.acquire()
            self._room.release(READ_AHEAD_MAX - 1)
        return not self._has_ended

    def put(self, message: Callable[[], Message] | None) -> None:
        """Hand a message to the thread that answers, None as the last."""
        self._messages.put(message)

    def get(self) -> Callable[[], Message] | None:
        return self._messages.get()

    def answered(self) -> None:
        self._room.release()

    def end(self) -> None:
        """Let both threads end, whatever they wait for here."""
        self._has_ended = True
        self._room.release(READ_AHEAD_MAX)
        self._messages.put(None)


def _failure(error: Exception) -> Answer:
    return Answer(lane.FAILURE, failure_of(error, "a message on a lane").SerializeToString())


def _until(seconds: float, payload_bytes: int) -> float:
    """Return when a message that begins now is to be whole."""
    return time.monotonic() + max(seconds, payload_bytes / BYTES_PER_SECOND_MIN)


BACKLOG = 128
# Each has two threads of its own, and may use one more; further workers go by gRPC.
LANES_MAX = 64


class Tcp(Listener):
    """Serves workers over lanes."""

    name = "tcp"
    place = "the lane"
    # All workers at once, and some others. Each may have a thread.
    unauthenticated_max = LANES_MAX + 16

    def __init__(self, host: Host):
        super().__init__(host)
        self._threads = ThreadPoolExecutor(LANES_MAX + self.unauthenticated_max, thread_name_prefix="lane")

    @property
    def facts(self) -> Mapping[str, str]:
        if self._socket is None:
            return {"lane": "not offered"}
        return {"lane": address_of(self._host.config.host, self._socket.getsockname()[1])}

    def bind(self) -> str:
        config = self._host.config
        if config.lane_port == OFF:
            return ""
        if config.lane_port == AUTO:
            ports = [LANE_PORT, 0] if config.port else [0]
        else:
            ports = [int(config.lane_port)]
        for port in ports:
            self._socket = self._socket or listening_socket(config.host, port, backlog=BACKLOG)
        if self._socket is None:
            raise ConfigError(busy_port(config.host, ports[-1], field="lane_port"))
        return ""

    def let_go(self) -> None:
        for caller in list(self._callers):
            if isinstance(caller, Connection) and caller.is_stalled:
                caller.take_no_more()

    async def stop(self, seconds: float) -> None:
        await super().stop(seconds)
        self._threads.shutdown(wait=False)

    async def offer(self, greeting: Greeting) -> wire.HelloReply:
        worker_id = greeting.worker_id
        if not greeting.observer:
            self._note_hello(worker_id)
        if self._socket is None or self._is_full(worker_id):
            return wire.HelloReply()
        ticket = b"" if greeting.observer else self._tickets.issue(worker_id, greeting.incarnation)
        return wire.HelloReply(lane=wire.LaneOffer(port=self._socket.getsockname()[1], ticket=ticket))

    def _is_full(self, worker_id: str) -> bool:
        workers = [caller.worker for caller in self._callers]
        return sum(worker is not None and worker[0] != worker_id for worker in workers) >= LANES_MAX

    def _admit(self, connection: Connection, request: lane_pb2.LaneOpen) -> None:
        self._require_admitted(connection, request.sender, request.ticket)
        if self._is_full(request.sender.worker_id):
            raise ServerUnavailable(f"this server has {LANES_MAX} lanes already, its most: go by gRPC")
        self._take_over(request.sender)

    def _connect(self, end: socket.socket) -> Connection:
        end.setblocking(True)
        return Connection(
            end,
            self._host,
            self._threads,
            admit=self._admit,
            on_closed=self._forget,
            warnings=self._warnings,
        )
