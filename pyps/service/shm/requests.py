"""Requests of workers that share their memory: the numbers of a push lie there, and its parameters go there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from threading import Lock

from pyps.core.gradient import Finding, Gradient, PushPlan, first_of, require_few_extents
from pyps.core.store import Pushed, Store
from pyps.service import convert
from pyps.service.calls import SHORT_BYTES
from pyps.service.conversation import Request
from pyps.service.executor import EXTENT_PARAMETERS, Job
from pyps.service.shm.segment import Attachment, Vectors
from pyps.service.transport import Host
from pyps.service.waiting import VersionWait
from pyps_wire import local_pb2 as local
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.errors import InvalidArgument, WrongSize


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
