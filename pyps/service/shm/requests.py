"""What workers that share their memory ask of the run: little work is done at once, the rest on threads.

The numbers of a push lie in the worker's memory, and its parameters go there.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from pyps.core.gradient import Finding, Gradient, first_of, require_few_extents
from pyps.core.plan import PushPlan
from pyps.core.shard import Pushed, Shard
from pyps.run.handshake import RunState
from pyps.run.run import Run
from pyps.service import convert
from pyps.service.executor import EXTENT_BYTES, Job, KernelExecutor
from pyps.service.limits import ByteBudget
from pyps.service.shm.segment import Attachment, Content, Memory, Vectors, check_layout
from pyps.service.waiting import VersionWait
from pyps_wire import common_pb2 as common
from pyps_wire import local_pb2 as local
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.errors import BadRequest, NotInitialized, ServerUnavailable, WrongSize

# At once, or when it is done.
Answer: TypeAlias = local.LocalReply | Coroutine[Any, Any, local.LocalReply]


@dataclass(slots=True)
class Part:
    """One shard of an exchange, from its request to what became of it."""

    shard: Shard
    request: wire.PushRequest
    plan: PushPlan
    finding: Finding | None = None
    pushed: Pushed | None = None


class Exchange:
    """One request of a worker. All its parts are looked through before any is applied.

    `scan` is called for every part, from any threads; then `push` for every part, or `push_whole` once.
    """

    def __init__(self, run: Run, attachment: Attachment, request: local.LocalExchange):
        """Refuses what names other vectors, shards or workers than those attached, before a number is read."""
        self._run = run
        self._attachment = attachment
        # Whether all parts are to be handled as one.
        self.is_whole = run.rounds.behaviour.aggregation.whole_model
        attachment.require_shards(run.shards)
        if not request.gradients < len(attachment.gradients):
            raise BadRequest(
                f"the exchange names gradients {request.gradients}; {len(attachment.gradients)} were attached, from 0"
            )
        numbers = attachment.gradients[request.gradients]
        self.parts: list[Part] = []
        # The bytes of parameters that would take as long, at most; an update of all that waits there included.
        self.num_bytes = 0
        for each in request.shards:
            part = self._part(each, numbers, pull=request.pull)
            self.parts.append(part)
            self.num_bytes += 4 * part.shard.length + part.shard.pending_bytes
            self.num_bytes += EXTENT_BYTES * len(part.plan.gradient.extents)
        if not self.parts:
            raise BadRequest("the exchange names no shard: name those whose gradients lie in the segment")
        if len(self.parts) > 1:
            self._require_one_push()
        if self.is_whole and len(self.parts) != self.parts[0].request.num_shards:
            raise BadRequest(
                f"the exchange holds {len(self.parts)} of the push's {self.parts[0].request.num_shards} shards: under"
                " one mutex for the model it has to hold all of them, and num_shards has to say how many"
            )

    def _part(self, request: wire.PushRequest, numbers: Vectors, *, pull: bool) -> Part:
        attachment = self._attachment
        if request.HasField("sender"):
            attachment.require_sender(request.sender)
        shard_id = request.shard_id
        shard = attachment.content.shards.get(shard_id) or attachment.shard(shard_id)
        if shard_id not in attachment.replies:
            attachment.require_laid_out(shard_id, self._run.membership)
        if request.codec not in (0, numbers.codec):
            raise BadRequest(f"the push names codec {request.codec}; its vectors were attached with {numbers.codec}")
        if pull and request.reply_codec not in (0, attachment.codec):
            raise BadRequest(
                f"the exchange wants codec {request.reply_codec}; its parameters were attached with {attachment.codec}"
            )
        # Versions of another epoch mean nothing here.
        holds = pull and request.HasField("held_version") and request.epoch == attachment.content.epoch
        payload: bytes | memoryview = numbers.shards[shard_id]
        if request.kind == common.PAYLOAD_KIND_NOTHING:
            payload = b""
        gradient = convert.gradient_of(
            request,
            payload,
            attachment.worker_id,
            attachment.incarnation,
            numbers.codec,
            volatile=isinstance(payload, memoryview),
        )
        reply = attachment.replies[shard_id] if pull else None
        held_version = request.held_version if holds else -1
        return Part(shard, request, PushPlan(shard_id, gradient, reply, held_version, attachment.memory))

    def _require_one_push(self) -> None:
        if len({part.plan.shard_id for part in self.parts}) < len(self.parts):
            raise BadRequest("the exchange names a shard twice: name each once")
        if len({part.plan.gradient.sequence for part in self.parts}) > 1:
            raise BadRequest("the exchange holds parts of several pushes: give all its shards one sequence")
        require_few_extents(sum(len(part.plan.gradient.extents) for part in self.parts))

    @property
    def copied_bytes(self) -> int:
        """The bytes that are copied, as they do not lie together."""
        gradients = [part.plan.gradient for part in self.parts]
        return sum(each.codec.bytes_of(sum(extent.length for extent in each.extents)) for each in gradients)

    def scan_all(self) -> None:
        """Looks through every part; one alone that lies together is looked through when it is pushed."""
        if len(self.parts) > 1 or self.parts[0].plan.gradient.extents:
            for part in self.parts:
                self.scan(part)

    def scan(self, part: Part) -> None:
        """Looks through a part's numbers; raises as `Run.scan`, and has changed nothing."""
        gradient = part.plan.gradient
        if gradient.extents and gradient.volatile:
            gradient = gradient._replace(payload=_together(gradient, part.shard), volatile=False)
            part.plan = part.plan._replace(gradient=gradient)
        part.finding = self._run.scan(gradient, part.plan.shard_id, run_id=self._attachment.content.run_id)

    def push(self, part: Part) -> None:
        """Handles a part; where any of them holds NaN or infinity, it is refused."""
        finding = part.finding if len(self.parts) == 1 else self._finding
        part.pushed = self._run.push(part.plan, run_id=self._attachment.content.run_id, finding=finding)

    def push_whole(self) -> None:
        """Handles all parts as one, under the model's mutex."""
        pushed = self._run.push_whole(
            [part.plan for part in self.parts],
            run_id=self._attachment.content.run_id,
            finding=self._finding,
        )
        for part, each in zip(self.parts, pushed, strict=True):
            part.pushed = each

    @property
    def _finding(self) -> Finding:
        return first_of(part.finding for part in self.parts if part.finding is not None)

    def reply(self) -> local.LocalReply:
        """What the worker is told, once every part has its receipt."""
        reply = local.LocalReply()
        for part in self.parts:
            assert part.pushed is not None, "every part is pushed before the worker is answered"
            receipt, version, _ = part.pushed
            answered = reply.exchanged.replies.add()
            convert.receipt_of(receipt, self._run, answered.receipt)
            if version is not None:
                answered.version = version
                # A receipt that is given again may be of an earlier epoch.
                answered.epoch = self._attachment.content.epoch
                answered.codec = self._attachment.codec  # type: ignore[assignment]
        return reply


class Pull:
    """One request of a worker: `read` for every shard, from any threads, or `read_whole` once; then `reply`."""

    def __init__(self, run: Run, attachment: Attachment, request: wire.PullRequest):
        """Refuses what names other shards or workers than those attached; it renews its lease of the worker."""
        self._run = run
        self._attachment = attachment
        content = attachment.content
        attachment.require_shards(run.shards)
        attachment.require_sender(request.sender)
        if request.codec not in (0, attachment.codec):
            raise BadRequest(
                f"the pull wants codec {request.codec}; its parameters were attached with {attachment.codec}"
            )
        wants = {want.shard_id: want for want in request.wants}
        places = attachment.replies
        self.shards = run.shards_to_pull(
            content.run_id, attachment.worker_id, attachment.incarnation, observer=False, shard_ids=wants or places
        )
        for shard_id in wants:
            attachment.require_laid_out(shard_id, run.membership)
        # Versions of another epoch mean nothing here: everything is newer, and nothing is worth waiting for.
        same_epoch = request.epoch == content.epoch
        self.min_versions = {i: want.min_version if same_epoch else 0 for i, want in wants.items()}
        self._held = {i: want.held_version if same_epoch else -1 for i, want in wants.items()}
        self.wait_seconds = request.wait_milliseconds / 1000
        # By shard, the versions that were written.
        self._versions: dict[int, int] = {}

    @property
    def ready(self) -> bool:
        """Whether every shard has the version wanted."""
        return all(shard.version >= self.min_versions.get(shard.shard_id, 0) for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """The bytes of parameters that it is about, at most."""
        return sum(4 * shard.length for shard in self.shards)

    def read(self, shard: Shard) -> None:
        """Writes a shard's parameters where they are newer than those held; ServerUnavailable after the link's end."""
        shard_id, attachment = shard.shard_id, self._attachment
        version = shard.pull(
            attachment.replies[shard_id],
            held_version=self._held.get(shard_id, -1),
            memory=attachment.memory,
            worker_id=attachment.worker_id,
        )
        if version is not None:
            self._versions[shard_id] = version

    def read_whole(self) -> None:
        """Writes all shards wanted, of one state of the model."""
        whole = self._run.whole
        # The protocol may have been replaced in between.
        with nullcontext() if whole is None else whole.held():
            for shard in self.shards:
                self.read(shard)

    def reply(self) -> local.LocalReply:
        """What the worker is told, once every shard was read."""
        reply = local.LocalReply()
        reply.pulled.SetInParent()
        codec, epoch = self._attachment.codec, self._attachment.content.epoch
        num_bytes = 0
        for shard_id, version in sorted(self._versions.items()):
            written = reply.pulled.shards.add(shard_id=shard_id, version=version, epoch=epoch)
            written.codec = codec  # type: ignore[assignment]
            num_bytes += codec.bytes_of(self._attachment.shard(shard_id).length)
        if num_bytes:
            self._run.statistics.pulled(self._attachment.worker_id, num_bytes, shard_ids=self._versions)
        return reply


class Requests:
    """Answers attached workers. For the event loop."""

    def __init__(self, run: Run, *, work: KernelExecutor, budget: ByteBudget):
        self._run = run
        self._work = work
        self._budget = budget

    async def attach(self, request: local.LocalAttach, map_it: Callable[[], Memory]) -> Attachment:
        """Takes a worker's memory in, once `map_it`, on a thread, has brought it into reach."""
        content = self._content(request)
        check_layout(request, content)

        def lay_out() -> Attachment:
            memory = map_it()
            try:
                return Attachment.make(request, memory, content)
            except BaseException:
                memory.close()
                raise

        return await self._work.begin(lay_out)

    def answer(self, attachment: Attachment, request: local.LocalRequest) -> Answer:
        """The reply, at once where that is little work and nothing has to be waited for."""
        kind = request.WhichOneof("request")
        if kind == "exchange":
            return self._exchange(attachment, request.exchange)
        if kind == "pull":
            return self._pull(attachment, request.pull.request)
        raise BadRequest("expected LocalExchange or LocalPull: memory is attached once a connection")

    def serves(self, attachment: Attachment) -> bool:
        """Whether the run still has the shards that the memory was laid out for."""
        return self._run.shards is attachment.content.shards

    def _content(self, request: local.LocalAttach) -> Content:
        """The shards that the memory is for, as one state of the run."""
        run, sender = self._run, request.sender
        if run.state == RunState.DRAINING:
            raise ServerUnavailable("this server is shutting down: try again once it is back")
        shards, plan, epoch = run.shards, run.partition, run.epoch
        # It renews its lease, and refuses strangers.
        run.shards_to_pull(sender.run_id, sender.worker_id, sender.incarnation, observer=False, shard_ids=())
        if plan is None or run.shards is not shards:
            raise NotInitialized("the run was reset while its memory was attached: say Hello, then attach it anew")
        member = run.membership.get(sender.worker_id)
        own = plan.of_parts(member.parts) if member is not None and member.parts else plan
        return Content(run.run_id, epoch, plan, own, run.server_index, shards)

    # Push, or push and pull.

    def _exchange(self, attachment: Attachment, request: local.LocalExchange) -> Answer:
        exchange = Exchange(self._run, attachment, request)
        if exchange.is_whole or exchange.num_bytes >= self._work.inline_bytes_max:
            return self._exchange_on_threads(attachment, exchange)
        exchange.scan_all()
        for part in exchange.parts:
            exchange.push(part)
        return exchange.reply()

    async def _exchange_on_threads(self, attachment: Attachment, exchange: Exchange) -> local.LocalReply:
        scans = [partial(exchange.scan, part) for part in exchange.parts]
        pushes: list[Job] = [partial(exchange.push, part) for part in exchange.parts]
        if exchange.is_whole:
            pushes = [exchange.push_whole]
        await self._on_threads(attachment, scans, pushes, held_bytes=exchange.copied_bytes)
        return exchange.reply()

    # Pull.

    def _pull(self, attachment: Attachment, request: wire.PullRequest) -> Answer:
        pull = Pull(self._run, attachment, request)
        little = pull.ready and self._work.is_little(pull.num_bytes, pull.shards)
        if self._run.whole is not None or not little:
            return self._pull_on_threads(attachment, pull)
        for shard in pull.shards:
            pull.read(shard)
        return pull.reply()

    async def _pull_on_threads(self, attachment: Attachment, pull: Pull) -> local.LocalReply:
        waits = VersionWait(
            self._run,
            self._work,
            pull.shards,
            pull.min_versions,
            worker_id=attachment.worker_id,
            wait_seconds=pull.wait_seconds,
        )
        async with waits:
            while await waits.next() is not None:
                continue
        whole = self._run.whole is not None
        await self._on_threads(
            attachment, [pull.read_whole] if whole else [partial(pull.read, shard) for shard in pull.shards]
        )
        return pull.reply()

    async def _on_threads(self, attachment: Attachment, *stages: Sequence[Job], held_bytes: int = 0) -> None:
        """Runs jobs in a worker's memory, which stays mapped until the last is done, whoever waits for it.

        The budget holds their bytes so long.
        """
        account = self._budget.account(attachment.worker_id)
        attachment.memory.hold()
        try:
            account.hold(held_bytes)
        except BaseException:
            attachment.memory.let_go()
            raise

        def end() -> None:
            account.release(held_bytes)
            attachment.memory.let_go()

        await self._work.run_stages(*stages, on_end=end)


def _together(gradient: Gradient, shard: Shard) -> bytes:
    """The extents' numbers, one behind the other; the gradient's own check looks at the extents more closely."""
    numbers, extents, bytes_of = gradient.payload, gradient.extents, gradient.codec.bytes_of
    if sum(extent.length for extent in extents) > shard.length:
        raise WrongSize(f"the extents are longer than shard {shard.shard_id}, which has {shard.length} parameters")
    return b"".join(numbers[bytes_of(start) : bytes_of(start + length)] for start, length in extents)
