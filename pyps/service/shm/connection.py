"""One caller at the local socket: its requests are answered one by one, and its memory is unmapped when it ends."""

from __future__ import annotations

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


class Exchange(Request):
    """A request to push, or to push and pull. All its parts are scanned before any is applied."""

    def __init__(self, host: Host, attachment: Attachment, request: local.LocalExchange):
        """Refuse vectors, shards and workers that are not those attached, before a number is read."""
        run = self._run = host.run
        self._attachment, self.memory = attachment, attachment.memory
        attachment.require_shards(run.content.shards)
        # Under one mutex for the model all parts are applied together.
        self._is_whole = run.rounds.behaviour.aggregation.whole_model
        if not request.gradients < len(attachment.gradients):
            raise InvalidArgument(
                f"the exchange names gradients {request.gradients}; {len(attachment.gradients)} were attached, from 0"
            )
        numbers = attachment.gradients[request.gradients]
        # By shard.
        self._plans: dict[int, PushPlan] = {}
        self._findings: dict[int, Finding] = {}
        self._pushed: dict[int, Pushed] = {}
        # Numbers in several ranges are copied together.
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
            # Not on the event loop: the mutex may be held for long.
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
            attachment.sender,
            numbers.codec,
            attachment.replies[shard_id] if pull else None,
            epoch=attachment.content.epoch,
            memory=attachment.memory,
        )

    def stages(self) -> Sequence[Sequence[Job]]:
        scans: list[Job] = []
        pushes: list[Job] = []
        for shard_id, plan in self._plans.items():
            # A single gradient in one range is scanned when it is pushed.
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
        """Push a part; it is refused if any part holds NaN or infinity."""
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


class Pull(Request):
    """A request to pull. It renews the worker's lease."""

    def __init__(self, host: Host, attachment: Attachment, request: wire.PullRequest):
        """Refuse shards and workers that are not those attached."""
        run = self._run = host.run
        self._attachment, self.memory = attachment, attachment.memory
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
            # Not on the event loop: the mutex may be held for long.
            self.num_parameters = sys.maxsize
        if not all(map(waits.is_ready, waits.shards)):
            self.waits = waits
        # The versions that were written, by shard.
        self._versions: dict[int, int] = {}

    def stages(self) -> Sequence[Sequence[Job]]:
        if self._mutex is not None:
            return ([partial(self._read_whole, self._mutex)],)
        return ([partial(self._read, shard) for shard in self._shards],)

    def _read(self, shard: Store) -> None:
        """Write a shard's parameters if they are newer; ServerUnavailable once the connection has ended."""
        shard_id, attachment = shard.shard_id, self._attachment
        version = shard.pull(
            attachment.replies[shard_id],
            held_version=self._held_versions.get(shard_id, -1),
            memory=attachment.memory,
            worker_id=attachment.sender.worker_id,
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
            run, worker_id = self._run, self._attachment.sender.worker_id
            run.statistics.pulled(worker_id, num_bytes, now=run.clock(), shard_ids=self._versions)
        return [reply]


def _together(gradient: Gradient, shard: Store) -> bytes:
    """Return a copy of the extents' numbers in one piece. Only the extents' total length is checked here."""
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
# A caller must attach its memory within this time.
ATTACH_SECONDS = 10.0
# A caller must send the rest of a message, and take an answer, within this time.
MESSAGE_SECONDS = 60.0


class Connection(Caller):
    """A caller, from its connection to its end. For the event loop.

    A request is read in the loop's callback, and a small one is answered there: no task, no thread. No request is read
    before the one ahead of it is answered.
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
        self._conversation = Conversation(host.work, host.budget.account(), self._reply, ahead_max=1, feed=host.feed)
        self.attachment: Attachment | None = None
        # Completes the present request, where that takes longer.
        self._task: asyncio.Task[None] | None = None
        self.closed = False
        # The bytes so far of a request, and how many it has together with its length, as far as that is known.
        self._inbox = bytearray()
        self._inbox_end = LENGTH.size
        # The bytes of an answer that the system did not take yet.
        self._outbox = memoryview(b"")
        self._descriptor = -1
        # Since when the caller must attach, send the rest of a request or take an answer; None if it need not.
        self._turn_since: float | None = time.monotonic()
        self._hang_up = select.poll()
        self._hang_up.register(end, select.POLLRDHUP)
        self._loop.add_reader(end, self._on_readable)

    @property
    def worker(self) -> tuple[str, int] | None:
        if self.attachment is None:
            return None
        return self.attachment.sender.worker_id, self.attachment.sender.incarnation

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
        # The event loop does not say so where a further request waits to be read.
        return self._task is not None and self.is_hung_up

    async def finish(self, seconds: float) -> None:
        if self._task is not None:
            await asyncio.wait([self._task], timeout=max(seconds, 0.0))

    def shut(self) -> None:
        """End the connection and its request; memory in which a thread still works is unmapped later."""
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

    def _on_readable(self) -> None:
        try:
            if self._task is None and not self._outbox:
                if (message := self._receive()) is not None:
                    self._take(message)
            elif self.is_hung_up:
                self.shut()
            else:
                # The next request: it is read once this one is answered.
                self._loop.remove_reader(self._socket)
        except BlockingIOError:
            return
        except OSError:
            # The caller is gone.
            self.shut()
        except Exception as error:
            log_bug(error, "a local request")
            self.shut()

    def _receive(self) -> bytes | None:
        """Return a whole request, and read nothing behind it; BlockingIOError where its rest has not arrived."""
        inbox = self._inbox
        while len(inbox) < self._inbox_end:
            num_bytes = min(self._inbox_end - len(inbox), RECEIVE_BYTES)
            received = self._socket.recv(num_bytes) if self.attachment else self._receive_with_descriptor(num_bytes)
            if not received:
                self.shut()
                return None
            inbox += received
            if self._turn_since is None:
                self._turn_since = time.monotonic()
            if len(inbox) == LENGTH.size:
                (length,) = LENGTH.unpack(inbox)
                if not self._admits(length):
                    return None
                self._inbox_end += length
        message = bytes(inbox[LENGTH.size :])
        inbox.clear()
        self._inbox_end = LENGTH.size
        return message

    def _receive_with_descriptor(self, num_bytes: int) -> bytes:
        # With room for one descriptor: the system closes any more at once.
        received, descriptors, _, _ = socket.recv_fds(self._socket, num_bytes, 1)
        for descriptor in descriptors:
            self._drop_descriptor()
            self._descriptor = descriptor
            os.set_inheritable(descriptor, False)
        return received

    def _admits(self, length: int) -> bool:
        """Return whether a message may be so long; otherwise end the connection."""
        try:
            if self.attachment is None and length > ATTACH_BYTES_MAX:
                raise LimitExceeded(
                    f"the first message is {length} bytes long; Attach has {ATTACH_BYTES_MAX} at the most"
                )
            check_message_bytes(length, bytes_max=self._host.config.max_message_bytes)
            if self.attachment is not None and length > PUSH_HEADER_MAX:
                bytes_max = PUSH_HEADER_MAX + SHARD_BYTES_MAX * len(self.attachment.replies)
                if length > bytes_max:
                    # A list of millions takes a hundred times its bytes once parsed, and holds up the event loop.
                    raise LimitExceeded(
                        f"the request is {length} bytes long; expected {bytes_max} at most for the shards that were"
                        " attached: list less in it"
                    )
        except LimitExceeded as error:
            self._refuse(error, for_good=True)
            return False
        return True

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
            rest = self._begin(request)
        except Exception as error:
            self._refuse(error)
            return
        if rest is not None:
            self._turn_since = None
            self._task = self._loop.create_task(rest)
            self._task.add_done_callback(self._on_done)

    def _begin(self, request: local.LocalRequest) -> Coroutine[Any, Any, None] | None:
        """Begin a request; return the coroutine that completes it, None if it is answered already."""
        attachment = self.attachment
        if attachment is None:
            if not request.HasField("attach") or self._descriptor < 0:
                raise InvalidArgument(
                    "expected LocalAttach with the segment's descriptor (SCM_RIGHTS) as the first message"
                )
            return self._attach(request.attach)
        wanted: Request
        if request.HasField("exchange"):
            wanted = Exchange(self._host, attachment, request.exchange)
        elif request.HasField("pull"):
            wanted = Pull(self._host, attachment, request.pull.request)
        else:
            raise InvalidArgument("expected LocalExchange or LocalPull: memory is attached once a connection")
        return cast("Coroutine[Any, Any, None] | None", self._conversation.take(wanted))

    async def _attach(self, request: local.LocalAttach) -> None:
        # From here on the descriptor belongs to this call, which a closed connection does not end.
        descriptor, self._descriptor = self._descriptor, -1
        try:
            attachment = await self._take_memory(self, request, descriptor)
        finally:
            os.close(descriptor)
        self._conversation.account.caller = attachment.sender.worker_id
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

    def _refuse(self, error: BaseException, *, for_good: bool = False) -> None:
        self._reply(local.LocalReply(failure=failure_of(error, "a local request")))
        attachment = self.attachment
        if for_good or attachment is None or self._host.run.content.shards is not attachment.content.shards:
            self.shut()

    def _reply(self, reply: local.LocalReply) -> None:
        if self.closed:
            return
        message = reply.SerializeToString()
        self._outbox = memoryview(LENGTH.pack(len(message)) + message)
        self._turn_since = None
        self._send()
        if self._outbox and not self.closed:
            self._turn_since = time.monotonic()
            self._loop.add_writer(self._socket, self._on_writable)

    def _send(self) -> None:
        try:
            self._outbox = self._outbox[self._socket.send(self._outbox) :]
        except BlockingIOError:
            return
        except OSError:
            self.shut()

    def _on_writable(self) -> None:
        self._send()
        if not self._outbox and not self.closed:
            self._turn_since = None
            self._loop.remove_writer(self._socket)
            self._loop.add_reader(self._socket, self._on_readable)

    def _drop_descriptor(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
