"""One worker's lane: a thread receives its messages, another pushes them and sends what answers them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from pyps import _kernels, logs
from pyps.core.store import Pushed
from pyps.run.run import Run
from pyps.service import convert
from pyps.service.calls import WRITE_SECONDS, failure_of
from pyps.service.executor import INLINE_PARAMETERS_MAX
from pyps.service.limits import ByteBudget, check_message_bytes
from pyps.service.pushing import PUSH_HEADER_MAX, READ_AHEAD_MAX, Message, Staging, push_whole
from pyps.service.responses import AHEAD_BYTES_MAX
from pyps.service.tls import Tls
from pyps_wire import lane, lane_pb2
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.common_pb2 import Sender
from pyps_wire.errors import InvalidArgument, NotAllowed
from pyps_wire.framing import PAYLOAD_FIELD

# Who connects shows its ticket at once.
OPEN_SECONDS = 5.0
OPEN_BYTES_MAX = 4096
# A message that has begun is whole within so long, or at this rate where it is larger than by default.
MESSAGE_SECONDS = 60.0
BYTES_PER_SECOND_MIN = 2**18
# At the server's end a message of which nothing has come for so long is not waited for.
STALL_SECONDS = 1.0
# After a failure the other end reads it, and closes.
END_SECONDS = 5.0

# Answers a pull, whose messages go to the second.
Pull = Callable[[bytes, "Connection"], Coroutine[Any, Any, None]]


class Connection:
    """A lane from its beginning to its end, with two threads of its own.

    No more than READ_AHEAD_MAX pushes are here at once: the next is received when the first of them is answered; one,
    while all calls and lanes together hold much. A small one is answered by the thread that received it.
    """

    def __init__(
        self,
        end: socket.socket,
        *,
        tls: Tls | None,
        run: Run,
        budget: ByteBudget,
        admit: Callable[[Connection, lane_pb2.LaneOpen], None],
        pull: Pull,
        on_closed: Callable[[Connection], None],
        warnings: logs.Crowd,
    ):
        """`admit` sets the sender or refuses, on this one's thread; `on_closed` is for the event loop."""
        self.peer = peer_of(end)
        self._lane = lane.Lane(end) if tls is None else lane.SecureLane(end, tls.context())
        self._run = run
        self._account = budget.account()
        self._staging = Staging(run, self._account)
        self._admit = admit
        self._pull = pull
        self._on_closed = on_closed
        self._warnings = warnings
        self._loop = asyncio.get_running_loop()
        # Whose it is, once it is open.
        self.sender: Sender | None = None
        # What is to be done by the second thread; None at the end.
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Pushes that may still be received, and those that are not answered.
        self._room = threading.Semaphore(READ_AHEAD_MAX)
        self._num_begun = self._num_answered = 0
        self._pulling: Future[None] | None = None
        # Until its end is sent, after which the worker may begin another.
        self._pulls = False
        self._sending = threading.Lock()
        self._failed = False
        # When the other end is to have done its part: opened, sent a message, taken one. None while it owes nothing.
        self._receives_until: float | None = time.monotonic() + OPEN_SECONDS
        self._sends_until: float | None = None
        # The same for the rest of a push that is to be applied as a whole, and for its end after a failure.
        self._completes_until: float | None = None
        self._answerer = threading.Thread(target=self._answer_all, name="lane answers", daemon=True)
        self._receiver = threading.Thread(target=self._serve, name="lane", daemon=True)
        self._answerer.start()
        try:
            self._receiver.start()
        except RuntimeError:
            # No thread is left: the other one ends.
            self._jobs.put(None)
            raise

    def is_overdue(self, now: float) -> bool:
        """Whether the other end holds the lane up for longer than anybody may."""
        limits = self._receives_until, self._sends_until, self._completes_until
        return any(until is not None and now > until for until in limits)

    @property
    def is_stalled(self) -> bool:
        """Whether the rest of a message, or of a push, does not come."""
        owes = self._receives_until is not None or self._completes_until is not None
        return owes and self._lane.silent_seconds() > STALL_SECONDS

    @property
    def idle(self) -> bool:
        """Whether nothing is under way on an open lane."""
        return not (
            self.sender is None
            or self._receives_until is not None
            or self._num_begun != self._num_answered
            or self._pulls
        )

    def shut(self) -> None:
        """Cuts the lane, from any thread; its threads end."""
        self._lane.shut()

    def finish(self) -> None:
        """Takes nothing more; what has been received is answered."""
        with contextlib.suppress(OSError):
            self._lane.shut_reading()

    def join(self, seconds: float) -> None:
        """Waits for the lane's end, for so long at most."""
        self._receiver.join(max(seconds, 0.0))

    # The thread that receives.

    def _serve(self) -> None:
        try:
            try:
                self._open()
                while not self._failed:
                    self._take()
            except (lane.LaneClosed, OSError):
                raise
            except Exception as error:
                # Behind the answers to what came before.
                self._jobs.put(partial(self._fail, error))
            self._end_answers()
            # Here too where the other thread has failed, and the rest of what was sent is on its way.
            self._receives_until = time.monotonic() + END_SECONDS
            self._lane.end()
        except (lane.LaneClosed, OSError):
            # The worker is gone, or comes again.
            return
        finally:
            self._end_answers()
            self._lane.close()
            self._account.close()
            with contextlib.suppress(RuntimeError):
                # The server may have ended meanwhile, and the loop with it.
                self._loop.call_soon_threadsafe(self._on_closed, self)

    def _end_answers(self) -> None:
        """Returns when all is answered that will be."""
        if self._pulling is not None:
            self._pulling.cancel()
        self._jobs.put(None)
        self._answerer.join()

    def _open(self) -> None:
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
        request = convert.parse(lane_pb2.LaneOpen, header)
        self._admit(self, request)
        self._account.caller = request.sender.worker_id
        self._send(lane.OPEN, b"")
        self._receives_until = None

    def _take(self) -> None:
        self._room.acquire()
        if self._account.budget.bytes_held >= AHEAD_BYTES_MAX:
            # Where all together hold much, each has one at a time: the others keep the processors at work.
            for _ in range(READ_AHEAD_MAX - 1):
                self._room.acquire()
            self._room.release(READ_AHEAD_MAX - 1)
        if self._failed:
            return
        self._lane.wait()
        self._receives_until = time.monotonic() + MESSAGE_SECONDS
        kind, header, payload_bytes = self._lane.receive(header_bytes_max=PUSH_HEADER_MAX)
        check_message_bytes(len(header) + payload_bytes, bytes_max=self._run.config.max_message_bytes)
        if kind == lane.PULL:
            if payload_bytes:
                raise InvalidArgument(f"a lane's Pull has a payload of {payload_bytes} bytes; expected none")
            self._receives_until = None
            self._room.release()
            self._begin_pull(header)
            return
        if kind not in (lane.PUSH, lane.EXCHANGE):
            raise InvalidArgument(f"a lane's message has kind {kind}, which workers do not send")
        request = convert.parse(wire.PushRequest, header, bytes_max=PUSH_HEADER_MAX)
        self._require_own(request.sender)
        self._receives_until = _until(MESSAGE_SECONDS, payload_bytes)
        self._account.hold(payload_bytes)
        # From the heap, where the one before it has just become free; a gradient that waits for others keeps it.
        payload = np.empty(payload_bytes, np.uint8).data
        self._lane.receive_into(payload)
        self._receives_until = None
        self._num_begun += 1
        answer = partial(self._answer, request, payload, exchanges=kind == lane.EXCHANGE)
        shard = self._run.content.shards.get(request.shard_id)
        if (shard is None or shard.length < INLINE_PARAMETERS_MAX) and self._num_answered == self._num_begun - 1:
            answer()
        else:
            self._jobs.put(answer)

    def _require_own(self, sender: Sender) -> None:
        assert self.sender is not None
        own = self.sender
        if (sender.worker_id, sender.incarnation) != (own.worker_id, own.incarnation):
            raise NotAllowed(
                f"the message is of worker {sender.worker_id!r} ({sender.incarnation}), on the lane of worker "
                f"{own.worker_id!r} ({own.incarnation})"
            )

    def _begin_pull(self, header: bytes) -> None:
        self._require_own(convert.parse(wire.PullRequest, header, bytes_max=PUSH_HEADER_MAX).sender)
        if self._pulls:
            raise InvalidArgument("a pull is under way on this lane: read what it brings first")
        self._pulls = True
        self._pulling = asyncio.run_coroutine_threadsafe(self._serve_pull(header), self._loop)

    async def _serve_pull(self, header: bytes) -> None:
        try:
            await self._pull(header, self)
        except Exception as error:
            self._jobs.put(partial(self._end_pull, error))
        else:
            self._jobs.put(self._end_pull)

    def _end_pull(self, error: Exception | None = None) -> None:
        self._pulls = False
        if error is None:
            self._send(lane.END, b"")
        else:
            self._send_failure(error)

    async def write(self, message: bytes) -> None:
        """Sends a pull's message; as of gRPC's context."""
        sent = asyncio.get_running_loop().create_future()
        self._jobs.put(partial(self._send_pulled, message, sent))
        await sent

    # The thread that answers; the first does what is little.

    def _answer_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not self._failed:
                    job()
            except OSError:
                self._failed = True
                self._lane.shut()
            except Exception as error:
                with contextlib.suppress(OSError):
                    self._fail(error)
                # Also where nobody hears of it: the first thread is not to wait for what is never answered.
                self._failed = True
            # What it holds is free while the next is waited for.
            del job
            if self._failed:
                # The first thread may wait for room.
                self._room.release()

    def _answer(self, request: wire.PushRequest, payload: memoryview, *, exchanges: bool) -> None:
        run, staging = self._run, self._staging
        received_bytes = payload.nbytes
        message = Message(request, payload, run.content.shards, exchanges=exchanges, received_bytes=received_bytes)
        if staging.takes(message):
            self._account.release(received_bytes)
            for _ in staging.add(message):
                parts = staging.drop()
                for part, pushed in zip(parts, push_whole(run, parts), strict=True):
                    self._reply(part, pushed)
            # What follows is as large as this.
            self._completes_until = _until(MESSAGE_SECONDS, received_bytes) if staging.parts else None
        else:
            staging.singly = message.push_id
            with self._account.holding(message.held_bytes - received_bytes):
                self._reply(message, run.push(message.plan, run_id=message.run_id))
            self._account.release(received_bytes)
        self._num_answered += 1
        self._room.release()

    def _reply(self, message: Message, pushed: Pushed) -> None:
        header, payload = message.answer_in_parts(pushed, self._run)
        self._send(lane.PUSH if message.frame is None else lane.EXCHANGE, header, payload)

    def _send_pulled(self, message: bytes, sent: asyncio.Future[None]) -> None:
        header, offset, length = _kernels.split_frame(message, PAYLOAD_FIELD)
        self._send(lane.PULL, header, memoryview(message)[offset : offset + length])
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_settle, sent)

    def _send(self, kind: int, header: bytes, payload: memoryview | bytes = b"") -> None:
        with self._sending:
            self._sends_until = _until(WRITE_SECONDS, memoryview(payload).nbytes)
            self._lane.send(kind, header, payload)
            self._sends_until = None

    def _fail(self, error: Exception) -> None:
        """Says why nothing more is answered."""
        if not self._failed:
            self._send_failure(error)
            self._failed = True
            self._completes_until = time.monotonic() + END_SECONDS

    def _send_failure(self, error: Exception) -> None:
        self._send(lane.FAILURE, failure_of(error, "a message on a lane").SerializeToString())


def peer_of(end: socket.socket) -> str:
    """The address of who has connected; empty where it has gone again."""
    try:
        return str(end.getpeername()[0])
    except OSError:
        return ""


def _until(seconds: float, payload_bytes: int) -> float:
    """When a message that begins now is to be whole."""
    return time.monotonic() + max(seconds, payload_bytes / BYTES_PER_SECOND_MIN)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
