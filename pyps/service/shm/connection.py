"""One caller at the local socket: its requests are answered one by one, and its memory is unmapped when it ends."""

from __future__ import annotations

import array
import asyncio
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from threading import Lock
from typing import Any, cast

from google.protobuf.message import DecodeError

from pyps.core.gradient import Finding, Gradient, PushPlan, first_of, require_few_extents
from pyps.core.store import Pushed, Store
from pyps.service import convert
from pyps.service.calls import SHORT_BYTES, failure_of, log_bug
from pyps.service.conversation import Conversation, Request
from pyps.service.executor import EXTENT_PARAMETERS, Job
from pyps.service.limits import check_message_bytes
from pyps.service.listener import Caller
from pyps.service.pushing import PUSH_HEADER_MAX
from pyps.service.shm.segment import Attachment, Vectors
from pyps.service.transport import Host
from pyps.service.waiting import VersionWait
from pyps_wire import local_pb2 as local
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.errors import InvalidArgument, LimitExceeded, MalformedFrame, PypsError, WrongSize


class _InMemory(Request):
    """A request whose work touches a worker's memory, which stays mapped until the last job is done."""

    _attachment: Attachment

    def hold(self) -> None:
        self._attachment.memory.hold()

    def let_go(self) -> None:
        self._attachment.memory.let_go()


class Exchange(_InMemory):
    """One request to push, or to push and pull. All its parts are scanned before any is applied."""

    def __init__(self, host: Host, attachment: Attachment, request: local.LocalExchange):
        """Refuse other vectors, shards or workers than those attached, before a number is read."""
        run = self._run = host.run
        self._attachment = attachment
        attachment.require_shards(run.content.shards)
        # Under one mutex for the model its parts are handled as one.
        self._is_whole = run.rounds.behaviour.aggregation.whole_model
        if not request.gradients < len(attachment.gradients):
            raise InvalidArgument(
                f"the exchange names gradients {request.gradients}; {len(attachment.gradients)} were attached, from 0"
            )
        numbers = attachment.gradients[request.gradients]
        # By shard; what scans found, and the results.
        self._plans: dict[int, PushPlan] = {}
        self._findings: dict[int, Finding] = {}
        self._pushed: dict[int, Pushed] = {}
        # The numbers that are copied, as they do not lie together.
        self.num_parameters = copied_bytes = 0
        for each in request.shards:
            plan = self._plans[each.shard_id] = self._plan(each, numbers, pull=request.pull)
            shard = attachment.content.shards[each.shard_id]
            self.num_parameters += shard.length * (1 + shard.num_pending)
            self.num_parameters += EXTENT_PARAMETERS * len(plan.gradient.extents)
            for extent in plan.gradient.extents:
                copied_bytes += plan.gradient.codec.max_bytes(min(extent.length, shard.length))
        if not self._plans:
            raise InvalidArgument("the exchange names no shard: name those whose gradients lie in the segment")
        if len(request.shards) > 1:
            gradients = [plan.gradient for plan in self._plans.values()]
            if len(gradients) < len(request.shards):
                raise InvalidArgument("the exchange names a shard twice: name each once")
            if len({gradient.sequence for gradient in gradients}) > 1:
                raise InvalidArgument("the exchange holds parts of several pushes: give all its shards one sequence")
            require_few_extents(sum(len(gradient.extents) for gradient in gradients))
        if self._is_whole and len(self._plans) != request.shards[0].num_shards:
            raise InvalidArgument(
                f"the exchange holds {len(self._plans)} of the push's {request.shards[0].num_shards} shards: under"
                " one mutex for the model it has to hold all of them, and num_shards has to say how many"
            )
        if self._is_whole:
            # The mutex may be held for long: not on the event loop.
            self.num_parameters = sys.maxsize
        self.held_bytes = copied_bytes if copied_bytes > SHORT_BYTES else 0

    def _plan(self, request: wire.PushRequest, numbers: Vectors, *, pull: bool) -> PushPlan:
        attachment, shard_id = self._attachment, request.shard_id
        if request.HasField("sender"):
            attachment.require_sender(request.sender)
        if shard_id not in attachment.replies:
            attachment.require_laid_out(shard_id, self._run.membership)
        if request.codec not in (0, numbers.codec):
            raise InvalidArgument(
                f"the push names codec {request.codec}; its vectors were attached with {numbers.codec}"
            )
        if pull and request.reply_codec not in (0, attachment.codec):
            raise InvalidArgument(
                f"the exchange wants codec {request.reply_codec}; its parameters were attached with {attachment.codec}"
            )
        return convert.plan_of(
            request,
            numbers.shards[shard_id],
            attachment.worker_id,
            attachment.incarnation,
            attachment.secret,
            numbers.codec,
            attachment.replies[shard_id] if pull else None,
            epoch=attachment.content.epoch,
            memory=attachment.memory,
        )

    def stages(self) -> Sequence[Sequence[Job]]:
        scans: list[Job] = []
        pushes: list[Job] = []
        for shard_id, plan in self._plans.items():
            # One alone that lies together is scanned when it is pushed.
            if len(self._plans) > 1 or plan.gradient.extents:
                scans.append(partial(self._scan, shard_id))
            pushes.append(partial(self._push, shard_id))
        return scans, [self._push_whole] if self._is_whole else pushes

    def _scan(self, shard_id: int) -> None:
        plan = self._plans[shard_id]
        gradient = plan.gradient
        if gradient.extents and gradient.volatile:
            payload = _together(gradient, self._attachment.content.shards[shard_id])
            gradient = gradient._replace(payload=payload, volatile=False)
            self._plans[shard_id] = plan._replace(gradient=gradient)
        self._findings[shard_id] = self._run.scan(gradient, shard_id, run_id=self._attachment.content.run_id)

    def _push(self, shard_id: int) -> None:
        """Push a part; where any of them holds NaN or infinity, it is refused."""
        run_id = self._attachment.content.run_id
        self._pushed[shard_id] = self._run.push(self._plans[shard_id], run_id=run_id, finding=self._finding())

    def _push_whole(self) -> None:
        run_id, plans = self._attachment.content.run_id, list(self._plans.values())
        pushed = self._run.push_whole(plans, run_id=run_id, finding=self._finding())
        self._pushed = dict(zip(self._plans, pushed, strict=True))

    def _finding(self) -> Finding | None:
        return first_of(self._findings[shard_id] for shard_id in self._plans) if self._findings else None

    def answers(self) -> list[local.LocalReply]:
        reply, codec, epoch = local.LocalReply(), self._attachment.codec, self._attachment.content.epoch
        for shard_id in self._plans:
            answer = reply.exchanged.replies.add()
            convert.answer_of(self._pushed[shard_id], self._run, epoch=epoch, codec=codec, answer=answer)
        return [reply]


class Pull(_InMemory):
    """One request to pull, as an exchange that pushes nothing. It renews its lease of the worker."""

    def __init__(self, host: Host, attachment: Attachment, request: wire.PullRequest):
        """Refuse other shards or workers than those attached."""
        run = self._run = host.run
        self._attachment = attachment
        attachment.require_shards(run.content.shards)
        attachment.require_sender(request.sender)
        if request.HasField("portion"):
            raise InvalidArgument(
                "the pull wants a portion, which shared memory does not bring: pull by gRPC or a lane"
            )
        if request.codec not in (0, attachment.codec):
            raise InvalidArgument(
                f"the pull wants codec {request.codec}; its parameters were attached with {attachment.codec}"
            )
        waits = VersionWait(run, host.work, request, attachment.sender)
        self._shards, self._held_versions = waits.shards, waits.held_versions
        self.num_parameters = 0
        for shard in waits.shards:
            attachment.require_laid_out(shard.shard_id, run.membership)
            self.num_parameters += shard.length * (1 + shard.num_pending)
        self._mutex = run.mutex
        if self._mutex is not None:
            # It may be held for long: not on the event loop.
            self.num_parameters = sys.maxsize
        if not all(map(waits.is_ready, waits.shards)):
            self.waits = waits
        # By shard, the versions that were written.
        self._versions: dict[int, int] = {}

    def stages(self) -> Sequence[Sequence[Job]]:
        if self._mutex is not None:
            return ([partial(self._read_whole, self._mutex)],)
        return ([partial(self._read, shard) for shard in self._shards],)

    def _read(self, shard: Store) -> None:
        """Write a shard's parameters where they are newer; ServerUnavailable once the connection has ended."""
        shard_id, attachment = shard.shard_id, self._attachment
        version = shard.pull(
            attachment.replies[shard_id],
            held_version=self._held_versions.get(shard_id, -1),
            memory=attachment.memory,
            worker_id=attachment.worker_id,
        )
        if version is not None:
            self._versions[shard_id] = version

    def _read_whole(self, mutex: Lock) -> None:
        with mutex:
            for shard in self._shards:
                self._read(shard)

    def answers(self) -> list[local.LocalReply]:
        reply = local.LocalReply()
        reply.pulled.SetInParent()
        codec, content = self._attachment.codec, self._attachment.content
        num_bytes = 0
        for shard_id, version in sorted(self._versions.items()):
            written = reply.pulled.shards.add(shard_id=shard_id, version=version, epoch=content.epoch)
            written.codec = codec  # type: ignore[assignment]
            num_bytes += codec.max_bytes(content.shards[shard_id].length)
        if num_bytes:
            self._run.statistics.pulled(self._attachment.worker_id, num_bytes, shard_ids=self._versions)
        return [reply]


def _together(gradient: Gradient, shard: Store) -> bytes:
    """Return the extents' numbers in one piece; the gradient's own check examines the extents more closely."""
    numbers, extents, max_bytes = gradient.payload, gradient.extents, gradient.codec.max_bytes
    if sum(extent.length for extent in extents) > shard.length:
        raise WrongSize(f"the extents are longer than shard {shard.shard_id}, which has {shard.length} parameters")
    return b"".join(numbers[max_bytes(start) : max_bytes(start + length)] for start, length in extents)


# Each message follows its length.
LENGTH = struct.Struct("<I")
RECEIVE_BYTES = 65_536
# Attach names a few numbers a parameter group.
ATTACH_BYTES_MAX = 2**18
# The bytes of a request for each of its shards, without the extents.
SHARD_BYTES_MAX = 1024
# A caller attaches its memory within so long.
ATTACH_SECONDS = 10.0
# A message that has begun is whole within so long, and an answer is taken.
MESSAGE_SECONDS = 60.0
# Room for one descriptor: the system closes any more at once.
_ONE_DESCRIPTOR = socket.CMSG_LEN(4)


class Connection(Caller):
    """A caller, from its connection to its end. For the event loop.

    A request is read in the loop's callback, and a small one is answered there: no task, no thread.
    """

    def __init__(
        self,
        end: socket.socket,
        host: Host,
        *,
        attach: Callable[[Connection, local.LocalAttach, int], Awaitable[Attachment]],
        on_closed: Callable[[Caller], None],
    ):
        """`attach` maps a worker's memory and lets the worker in; the descriptor can be closed afterwards."""
        self._socket = end
        self._host = host
        self._take_memory = attach
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._conversation = Conversation(host.work, host.budget.account(), self._reply, ahead_max=1)
        self.attachment: Attachment | None = None
        # The request that a task works on; the next is not read before it is answered.
        self._task: asyncio.Task[None] | None = None
        self.closed = False
        # Bytes of a request that is not whole yet, and of a reply that is not taken yet.
        self._inbox = bytearray()
        self._outbox = memoryview(b"")
        # Whether a further request of the inbox is about to be taken.
        self._more = False
        self._descriptor = -1
        # When the caller's turn began: to attach, to send the rest of a request, to take a reply. None else.
        self._turn_since: float | None = time.monotonic()
        self._hang_up = select.poll()
        self._hang_up.register(end, select.POLLRDHUP)
        self._loop.add_reader(end, self._on_readable)

    @property
    def worker(self) -> tuple[str, int] | None:
        return None if self.attachment is None else (self.attachment.worker_id, self.attachment.incarnation)

    @property
    def idle(self) -> bool:
        return self._task is None and not self._outbox and not self._inbox

    def is_overdue(self, now: float) -> bool:
        if self._turn_since is None or self._task is not None:
            return False
        return now - self._turn_since > (ATTACH_SECONDS if self.attachment is None else MESSAGE_SECONDS)

    @property
    def is_hung_up(self) -> bool:
        """Return whether the caller has hung up, though its earlier messages may not be read yet."""
        return bool(self._hang_up.poll(0))

    @property
    def is_gone(self) -> bool:
        # Behind a further request, which is not read while one is worked on.
        return self._task is not None and self.is_hung_up

    async def finish(self, seconds: float) -> None:
        if self._task is not None:
            await asyncio.wait([self._task], timeout=max(seconds, 0.0))

    def shut(self) -> None:
        """End the connection and its request; memory that a thread still works in is unmapped when it is done."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._drop_descriptor()
        if self.attachment is not None:
            self.attachment.memory.close()
            if self._task is not None:
                self._task.cancel()
        self._on_closed(self)

    # What comes in.

    def _on_readable(self) -> None:
        try:
            if self._more:
                # What has come already is handled first.
                return
            if self._task is None and not self._outbox:
                self._receive()
            else:
                self._look_for_the_end()
        except BlockingIOError:
            return
        except OSError:
            # The caller is gone.
            self.shut()
        except Exception as error:
            log_bug(error, "a local request")
            self.shut()

    def _receive(self) -> None:
        received = self._socket.recv(RECEIVE_BYTES) if self.attachment is not None else self._receive_with_descriptor()
        if not received:
            self.shut()
        elif not self._inbox and len(received) > 4 and LENGTH.unpack_from(received)[0] == len(received) - 4:
            # The usual case: one request, and all of it.
            if self._admits(len(received) - 4):
                self._take(received[4:])
        else:
            self._inbox += received
            self._take_next()

    def _receive_with_descriptor(self) -> bytes:
        received, ancillary, _, _ = self._socket.recvmsg(RECEIVE_BYTES, _ONE_DESCRIPTOR, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                for descriptor in array.array("i", data[: len(data) - len(data) % 4]):
                    self._drop_descriptor()
                    self._descriptor = descriptor
        return received

    def _look_for_the_end(self) -> None:
        """Close the connection where the caller has gone while its request was worked on."""
        if self._socket.recv(1, socket.MSG_PEEK):
            # The next request; it is read once this one is answered.
            self._loop.remove_reader(self._socket)
        else:
            self.shut()

    def _take_next(self) -> None:
        """Take one request where it is whole. Other callers have their turn before the next."""
        self._more = False
        if self.closed or self._task is not None or self._outbox:
            return
        message = self._whole_message()
        if message is not None:
            self._take(message)
            if self._inbox and not self.closed:
                self._more = True
                self._loop.call_soon(self._take_next)
        elif self._inbox and self._turn_since is None:
            self._turn_since = time.monotonic()

    @property
    def _request_bytes_max(self) -> int:
        num_shards = 0 if self.attachment is None else len(self.attachment.replies)
        return PUSH_HEADER_MAX + SHARD_BYTES_MAX * num_shards

    def _whole_message(self) -> bytes | None:
        if len(self._inbox) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._inbox)
        if not self._admits(length) or len(self._inbox) < LENGTH.size + length:
            return None
        message = bytes(self._inbox[LENGTH.size : LENGTH.size + length])
        del self._inbox[: LENGTH.size + length]
        return message

    def _admits(self, length: int) -> bool:
        """Return whether a message may be so long; the connection of one that may not ends."""
        try:
            if self.attachment is None and length > ATTACH_BYTES_MAX:
                raise LimitExceeded(
                    f"the first message is {length} bytes long; Attach has {ATTACH_BYTES_MAX} at the most"
                )
            check_message_bytes(length, bytes_max=self._host.config.max_message_bytes)
            if length > PUSH_HEADER_MAX and length > self._request_bytes_max:
                # Read, a list of millions takes a hundred times its bytes, and holds up the event loop.
                raise LimitExceeded(
                    f"the request is {length} bytes long; expected {self._request_bytes_max} at most for the shards"
                    " that were attached: list less in it"
                )
        except LimitExceeded as error:
            self._inbox.clear()
            self._refuse(error, for_good=True)
            return False
        return True

    # What becomes of a request.

    def _take(self, message: bytes) -> None:
        if self._hang_up.poll(0):
            # No caller waits for the answer, and the memory may be in other use already.
            self.shut()
            return
        try:
            request = local.LocalRequest.FromString(message)
        except DecodeError:
            error = MalformedFrame(f"the {len(message)} bytes received are no valid LocalRequest message")
            self._refuse(error, for_good=True)
            return
        try:
            answer = self._answer(request)
        except Exception as error:
            self._refuse(error)
            return
        if answer is not None:
            self._turn_since = None
            self._task = self._loop.create_task(answer)
            self._task.add_done_callback(self._on_done)

    def _answer(self, request: local.LocalRequest) -> Coroutine[Any, Any, None] | None:
        """Answer at once where that is little work and nothing has to be waited for."""
        attachment = self.attachment
        if attachment is not None:
            wanted: Request
            if request.HasField("exchange"):
                wanted = Exchange(self._host, attachment, request.exchange)
            elif request.HasField("pull"):
                wanted = Pull(self._host, attachment, request.pull.request)
            else:
                raise InvalidArgument("expected LocalExchange or LocalPull: memory is attached once a connection")
            return cast("Coroutine[Any, Any, None] | None", self._conversation.take(wanted))
        if not request.HasField("attach") or self._descriptor < 0:
            raise InvalidArgument(
                "expected LocalAttach with the segment's descriptor (SCM_RIGHTS) as the first message"
            )
        return self._attach(request.attach)

    async def _attach(self, request: local.LocalAttach) -> None:
        # From here on it belongs to this call, which a closed connection does not end.
        descriptor, self._descriptor = self._descriptor, -1
        try:
            attachment = await self._take_memory(self, request, descriptor)
        finally:
            os.close(descriptor)
        self._conversation.account.caller = attachment.worker_id
        self._reply(local.LocalReply(attached=local.LocalAttached(nonce=attachment.memory.nonce)))

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or self.closed:
            if error is not None and not isinstance(error, PypsError):
                log_bug(error, "a local request")
            return
        if error is not None:
            self._refuse(error)
        if not self.closed:
            self._loop.add_reader(self._socket, self._on_readable)
            self._take_next()

    # What goes out.

    def _refuse(self, error: BaseException, *, for_good: bool = False) -> None:
        self._reply(local.LocalReply(failure=failure_of(error, "a local request")))
        attachment = self.attachment
        if for_good or attachment is None or self._host.run.content.shards is not attachment.content.shards:
            self.shut()

    def _reply(self, reply: local.LocalReply) -> None:
        if self.closed:
            return
        message = reply.SerializeToString()
        frame = LENGTH.pack(len(message)) + message
        self._turn_since = None
        try:
            sent = self._socket.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.shut()
            return
        if sent < len(frame):
            self._outbox = memoryview(frame)[sent:]
            self._turn_since = time.monotonic()
            self._loop.add_writer(self._socket, self._on_writable)

    def _on_writable(self) -> None:
        try:
            self._outbox = self._outbox[self._socket.send(self._outbox) :]
        except BlockingIOError:
            return
        except OSError:
            self.shut()
            return
        if not self._outbox:
            self._turn_since = None
            self._loop.remove_writer(self._socket)
            self._loop.add_reader(self._socket, self._on_readable)
            self._take_next()

    def _drop_descriptor(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
