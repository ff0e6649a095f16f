"""What workers that share their memory ask of the run: little work is done at once, the rest on threads.

The numbers of a push lie in the worker's memory, and its parameters go there.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from threading import Lock
from typing import Any, TypeAlias

from pyps.core.gradient import Finding, Gradient, first_of, require_few_extents
from pyps.core.plan import PushPlan
from pyps.core.store import Pushed, Store
from pyps.run.handshake import RunState
from pyps.run.run import Run
from pyps.service import convert
from pyps.service.executor import EXTENT_PARAMETERS, Job, KernelExecutor
from pyps.service.limits import ByteBudget
from pyps.service.shm.segment import Attachment, Content, Memory, Vectors, check_layout
from pyps.service.waiting import VersionWait
from pyps_wire import local_pb2 as local
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.errors import InvalidArgument, NotInitialized, ServerUnavailable, WrongSize

# At once, or when it is done.
Answer: TypeAlias = local.LocalReply | Coroutine[Any, Any, local.LocalReply]


class Exchange:
    """One request to push, or to push and pull. All its parts are looked through before any is applied."""

    waits = None

    def __init__(self, run: Run, attachment: Attachment, request: local.LocalExchange):
        """Refuses what names other vectors, shards or workers than those attached, before a number is read."""
        self._run = run
        self._attachment = attachment
        # Not under one mutex for the model, whose parts are handled as one.
        self.at_once = not run.rounds.behaviour.aggregation.whole_model
        attachment.require_shards(run.content.shards)
        if not request.gradients < len(attachment.gradients):
            raise InvalidArgument(
                f"the exchange names gradients {request.gradients}; {len(attachment.gradients)} were attached, from 0"
            )
        numbers = attachment.gradients[request.gradients]
        # By shard; what was found in the gradients that were looked through by themselves, and what became of them.
        self._plans: dict[int, PushPlan] = {}
        self._findings: dict[int, Finding] = {}
        self._pushed: dict[int, Pushed] = {}
        # How many the updates may touch, those of all gradients that wait there included.
        self.num_parameters = 0
        for each in request.shards:
            plan = self._plans[each.shard_id] = self._plan(each, numbers, pull=request.pull)
            shard = attachment.content.shards[each.shard_id]
            self.num_parameters += shard.length * (1 + shard.num_pending)
            self.num_parameters += EXTENT_PARAMETERS * len(plan.gradient.extents)
        if not self._plans:
            raise InvalidArgument("the exchange names no shard: name those whose gradients lie in the segment")
        if len(request.shards) > 1:
            gradients = [plan.gradient for plan in self._plans.values()]
            if len(gradients) < len(request.shards):
                raise InvalidArgument("the exchange names a shard twice: name each once")
            if len({gradient.sequence for gradient in gradients}) > 1:
                raise InvalidArgument("the exchange holds parts of several pushes: give all its shards one sequence")
            require_few_extents(sum(len(gradient.extents) for gradient in gradients))
        if not self.at_once and len(self._plans) != request.shards[0].num_shards:
            raise InvalidArgument(
                f"the exchange holds {len(self._plans)} of the push's {request.shards[0].num_shards} shards: under"
                " one mutex for the model it has to hold all of them, and num_shards has to say how many"
            )

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

    @property
    def held_bytes(self) -> int:
        """The bytes that are copied, as they do not lie together."""
        gradients = [plan.gradient for plan in self._plans.values()]
        return sum(each.codec.max_bytes(sum(extent.length for extent in each.extents)) for each in gradients)

    def stages(self) -> tuple[list[Job], list[Job]]:
        """What is to be done: all of the first, from any threads, then all of the second."""
        scans: list[Job] = []
        pushes: list[Job] = []
        for shard_id, plan in self._plans.items():
            # One alone that lies together is looked through when it is pushed.
            if len(self._plans) > 1 or plan.gradient.extents:
                scans.append(partial(self._scan, shard_id))
            pushes.append(partial(self._push, shard_id))
        return scans, pushes if self.at_once else [self._push_whole]

    def _scan(self, shard_id: int) -> None:
        """Looks through a part's numbers; raises as `Run.scan`, and has changed nothing."""
        plan = self._plans[shard_id]
        gradient = plan.gradient
        if gradient.extents and gradient.volatile:
            payload = _together(gradient, self._attachment.content.shards[shard_id])
            gradient = gradient._replace(payload=payload, volatile=False)
            self._plans[shard_id] = plan._replace(gradient=gradient)
        self._findings[shard_id] = self._run.scan(gradient, shard_id, run_id=self._attachment.content.run_id)

    def _push(self, shard_id: int) -> None:
        """Handles a part; where any of them holds NaN or infinity, it is refused."""
        run_id = self._attachment.content.run_id
        self._pushed[shard_id] = self._run.push(self._plans[shard_id], run_id=run_id, finding=self._finding())

    def _push_whole(self) -> None:
        """Handles all parts as one, under the model's mutex."""
        run_id, plans = self._attachment.content.run_id, list(self._plans.values())
        pushed = self._run.push_whole(plans, run_id=run_id, finding=self._finding())
        self._pushed = dict(zip(self._plans, pushed, strict=True))

    def _finding(self) -> Finding | None:
        return first_of(self._findings[shard_id] for shard_id in self._plans) if self._findings else None

    def reply(self) -> local.LocalReply:
        """What the worker is told, once every part has its receipt."""
        reply, codec, epoch = local.LocalReply(), self._attachment.codec, self._attachment.content.epoch
        for shard_id in self._plans:
            answer = reply.exchanged.replies.add()
            convert.answer_of(self._pushed[shard_id], self._run, epoch=epoch, codec=codec, answer=answer)
        return reply


class Pull:
    """One request to pull, as an exchange that pushes nothing."""

    held_bytes = 0

    def __init__(self, run: Run, work: KernelExecutor, attachment: Attachment, request: wire.PullRequest):
        """Refuses what names other shards or workers than those attached; it renews its lease of the worker."""
        self._run = run
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
        self.waits = VersionWait(run, work, request, attachment.sender)
        # How many may be read, or updated first, at most.
        self.num_parameters = 0
        for shard in self.waits.shards:
            attachment.require_laid_out(shard.shard_id, run.membership)
            self.num_parameters += shard.length * (1 + shard.num_pending)
        # Whether nothing has to be waited for, neither a version nor the model's mutex.
        self.at_once = run.mutex is None and all(map(self.waits.is_ready, self.waits.shards))
        # By shard, the versions that were written.
        self._versions: dict[int, int] = {}

    def stages(self) -> tuple[list[Job]]:
        """What is to be done, from any threads; under one mutex for the model, of one state of it."""
        mutex = self._run.mutex
        if mutex is not None:
            return ([partial(self._read_whole, mutex)],)
        return ([partial(self._read, shard) for shard in self.waits.shards],)

    def _read(self, shard: Store) -> None:
        """Writes a shard's parameters where they are newer than those held; ServerUnavailable after the link's end."""
        shard_id, attachment = shard.shard_id, self._attachment
        version = shard.pull(
            attachment.replies[shard_id],
            held_version=self.waits.held_versions.get(shard_id, -1),
            memory=attachment.memory,
            worker_id=attachment.worker_id,
        )
        if version is not None:
            self._versions[shard_id] = version

    def _read_whole(self, mutex: Lock) -> None:
        with mutex:
            for shard in self.waits.shards:
                self._read(shard)

    def reply(self) -> local.LocalReply:
        """What the worker is told, once every shard was read."""
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
        return reply


class Requests:
    """Answers attached workers. For the event loop."""

    def __init__(self, run: Run, *, work: KernelExecutor, budget: ByteBudget):
        self._run = run
        self._work = work
        self._budget = budget

    async def attach(self, request: local.LocalAttach, map_it: Callable[[], Memory]) -> Attachment:
        """Takes a worker's memory in, once `map_it`, on a thread, has brought it into reach."""
        run, sender = self._run, request.sender
        if run.state == RunState.DRAINING:
            raise ServerUnavailable("this server is shutting down: try again once it is back")
        # As one state of the run.
        shards, plan, epoch = run.content.shards, run.content.partition, run.content.epoch
        # It renews its lease, and refuses strangers.
        run.shards_to_pull(
            sender.run_id, sender.worker_id, sender.incarnation, sender.secret, observer=False, shard_ids=()
        )
        if plan is None or run.content.shards is not shards:
            raise NotInitialized("the run was reset while its memory was attached: say Hello, then attach it anew")
        member = run.membership.get(sender.worker_id)
        own = plan.of_parts(member.parts) if member is not None and member.parts else plan
        content = Content(run.content.run_id, epoch, plan, own, run.content.server_index, shards)
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
        if kind not in ("exchange", "pull"):
            raise InvalidArgument("expected LocalExchange or LocalPull: memory is attached once a connection")
        asked = (
            Exchange(self._run, attachment, request.exchange)
            if kind == "exchange"
            else Pull(self._run, self._work, attachment, request.pull.request)
        )
        if not asked.at_once or asked.num_parameters >= self._work.inline_parameters_max:
            return self._on_threads(attachment, asked)
        for stage in asked.stages():
            for job in stage:
                job()
        return asked.reply()

    async def _on_threads(self, attachment: Attachment, asked: Exchange | Pull) -> local.LocalReply:
        """Works in a worker's memory, which stays mapped until the last job is done, whoever waits for it.

        The budget holds what is copied for as long.
        """
        if asked.waits is not None:
            await asked.waits.all()
        with ExitStack() as held:
            attachment.memory.hold()
            held.callback(attachment.memory.let_go)
            held.enter_context(self._budget.account(attachment.worker_id).holding(asked.held_bytes))
            end = held.pop_all().close
        await self._work.run_stages(*asked.stages(), on_end=end)
        return asked.reply()

    def serves(self, attachment: Attachment) -> bool:
        """Whether the run still has the shards that the memory was laid out for."""
        return self._run.content.shards is attachment.content.shards


def _together(gradient: Gradient, shard: Store) -> bytes:
    """The extents' numbers, one behind the other; the gradient's own check looks at the extents more closely."""
    numbers, extents, max_bytes = gradient.payload, gradient.extents, gradient.codec.max_bytes
    if sum(extent.length for extent in extents) > shard.length:
        raise WrongSize(f"the extents are longer than shard {shard.shard_id}, which has {shard.length} parameters")
    return b"".join(numbers[max_bytes(start) : max_bytes(start + length)] for start, length in extents)
