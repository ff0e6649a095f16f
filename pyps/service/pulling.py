"""Pull: the shards that are newer than those held, each as soon as it has the version wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import cast

import numpy as np

from pyps.core.gradient import ID_BYTES
from pyps.core.store import Store
from pyps.core.table import Ids, TableShard
from pyps.roles import PULL_AS_WORKER
from pyps.run.run import Run
from pyps.service import convert
from pyps.service.calls import Call
from pyps.service.conversation import Conversation, Request
from pyps.service.pushing import PUSH_HEADER_MAX
from pyps.service.serializations import HEADER_ROOM, Answer, Frame, ReplyFrame, Wanted
from pyps.service.transport import Host
from pyps.service.waiting import VersionWait
from pyps.service.work_queue import LEASES_MAX, Ask, lease_portion
from pyps_wire import common_pb2 as common
from pyps_wire import lane
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.errors import InvalidArgument
from pyps_wire.work_pb2 import LeaseReply

# Shards of one call in memory: one is framed while another is sent.
FRAMES_MAX = 2


def pull_request(run: Run, message: bytes) -> wire.PullRequest:
    """Read a request to pull, which may list every shard and many leases."""
    content = run.content
    listed_bytes = convert.ENTRY_BYTES_MAX * len(content.shards) + convert.LEASE_BYTES_MAX * LEASES_MAX
    if content.model is not None and content.model.tables:
        listed_bytes = PUSH_HEADER_MAX - convert.SMALL_BYTES_MAX
    return convert.parse(wire.PullRequest, message, bytes_max=convert.SMALL_BYTES_MAX + listed_bytes)


async def serve_pull(host: Host, call: Call, message: bytes) -> None:
    request = pull_request(host.run, message)
    if request.role != common.ROLE_OBSERVER:
        host.access.require(call.role, PULL_AS_WORKER)
    account = host.budget.account("" if request.role == common.ROLE_OBSERVER else request.sender.worker_id)
    async with Conversation(host.work, account, call.write, ahead_max=FRAMES_MAX) as conversation:
        await PullStream(host, conversation, request).serve()


class PullStream:
    """One request to pull, over gRPC or a lane."""

    def __init__(self, host: Host, conversation: Conversation, request: wire.PullRequest):
        """Refuse workers that the run does not know, and shards that they may not read. It renews a lease."""
        self._host = host
        self._run = host.run
        self._conversation = conversation
        self._request = request
        self._codec = convert.codec_from(request.codec)
        observes = request.role == common.ROLE_OBSERVER
        self._waits = VersionWait(host.run, host.work, request, request.sender, observer=observes)
        # Empty for an observer.
        self._worker_id = self._waits.worker_id
        # The ids that are wanted of tables' shards.
        self._ids = {want.shard_id: _ids_from(want) for want in request.wants if want.ids}

    async def serve(self) -> None:
        """Send the shards, waiting as long as the request says."""
        mutex = self._run.mutex
        if self._request.HasField("portion"):
            await self._serve_with_portion(mutex)
        elif mutex is None:
            await self._send_each()
        else:
            await self._waits.all()
            await self._take(_Read(self, self._waits.shards, mutex))

    async def _serve_with_portion(self, mutex: Lock | None) -> None:
        """Lease a portion, then send the newer shards: under one mutex for the model, both of the same moment.

        A worker that gets no portion gets no parameters either.
        """
        self._require_worker()
        lease = partial(lease_portion, self._run, self._host.work, self._request.portion)
        if mutex is None:
            answer = await lease()
            await self._take(_Sent([_lease_frame(answer)]))
            if answer.outcome == LeaseReply.OUTCOME_LEASED:
                await self._send_each()
            return
        read = _Read(self, self._waits.shards, mutex)
        frames: list[Answer] = []

        async def within(ask: Ask) -> LeaseReply:
            with self._conversation.account.holding(read.held_bytes):
                # Not on the loop: the mutex may be held by a push.
                answer, frames[:] = await self._host.work.begin(partial(_lease_and_read, read, ask))
            return answer

        answer = await lease(within)
        await self._take(_Sent([_lease_frame(answer), *frames]))

    async def _take(self, request: Request) -> None:
        if (sent := self._conversation.take(request)) is not None:
            await sent

    async def _send_each(self) -> None:
        async with self._waits:
            while (shard := await self._waits.next()) is not None:
                await self._take(_Read(self, [shard]))

    def read(self, shard: Store) -> list[Frame]:
        """Return the shard's message where its parameters are newer, and count the pull."""
        if shard.has_rows:
            return self._rows(cast(TableShard, shard))
        wanted = self.wanted(shard)
        frame = self._host.serializations.take(wanted, worker_id=self._worker_id)
        if frame is None:
            return []
        shard_ids = (shard.shard_id,)
        statistics, puller = self._run.statistics, self._worker_id or "observer"
        statistics.pulled(puller, len(frame.payload), now=self._run.clock(), shard_ids=shard_ids)
        return [frame]

    def _rows(self, table: TableShard) -> list[Frame]:
        ids = self.ids_of(table)
        if not ids.size:
            return []
        frame = ReplyFrame(lane.PULL, ids.size * table.length, self._codec, header_room=HEADER_ROOM)
        version = table.lookup(ids, frame.reply)
        statistics, puller = self._run.statistics, self._worker_id or "observer"
        statistics.pulled(puller, self._codec.max_bytes(ids.size * table.length), now=self._run.clock())
        header = wire.Parameters(shard_id=table.shard_id, version=version, epoch=table.epoch)
        header.codec = frame.codec  # type: ignore[assignment]
        return [frame.seal(header)]

    def ids_of(self, table: TableShard) -> Ids:
        """Return the ids whose rows are wanted, none by who waits for a round alone; raise InvalidArgument."""
        if (ids := self._ids.get(table.shard_id)) is not None:
            return ids
        if self._waits.held_versions.get(table.shard_id, -1) < table.version:
            raise InvalidArgument(
                f"a pull of table {table.name!r} (shard {table.shard_id}) came without ids: name them"
            )
        return np.empty(0, np.int64)

    def wanted(self, shard: Store) -> Wanted:
        shard_id, waits = shard.shard_id, self._waits
        min_version = waits.min_versions.get(shard_id, 0)
        return Wanted(shard, self._codec, waits.held_versions.get(shard_id, -1), min_version)

    def _require_worker(self) -> None:
        """Refuse a portion to callers that could not deliver it."""
        portion, request = self._request.portion, self._request
        if not self._worker_id or portion.sender != request.sender:
            raise InvalidArgument(
                f"{request.sender.worker_id!r} pulls {'' if self._worker_id else 'as an observer '}and wants a portion "
                f"as {portion.sender.worker_id!r}: ask as the worker that pulls"
            )


def _ids_from(want: wire.PullRequest.Want) -> Ids:
    if len(want.ids) % ID_BYTES:
        raise InvalidArgument(f"the ids of shard {want.shard_id} have {len(want.ids)} bytes; an int64 takes {ID_BYTES}")
    return np.frombuffer(want.ids, "<i8")


class _Read(Request):
    """Reading shards: one, or all of one state of the model under its mutex."""

    def __init__(self, pull: PullStream, shards: Sequence[Store], mutex: Lock | None = None):
        self._pull = pull
        self._shards = shards
        self._mutex = mutex
        if mutex is None:
            self.shard_id = shards[0].shard_id
        self.num_parameters = self.held_bytes = 0
        for shard in shards:
            if shard.has_rows:
                count = pull.ids_of(cast(TableShard, shard)).size * shard.length
                self.num_parameters += count
                self.held_bytes += 4 * count
            else:
                self.num_parameters += shard.length * (1 + shard.num_pending)
                self.held_bytes += pull.wanted(shard).bytes_max

    def work(self) -> list[Frame]:
        return self.read_where(lambda: True)

    def read_where(self, provided: Callable[[], bool]) -> list[Frame]:
        """Return the shards' messages; under the mutex, none if `provided`, which is called there, returns False."""
        if self._mutex is None:
            return self._pull.read(self._shards[0])
        with self._mutex:
            return [frame for shard in self._shards for frame in self._pull.read(shard)] if provided() else []


class _Sent(Request):
    """Answers that are ready to be sent."""

    def __init__(self, answers: list[Answer]):
        self._answers = answers
        self.num_parameters = 0
        self.held_bytes = sum(len(answer.payload) for answer in answers)

    def work(self) -> list[Answer]:
        return self._answers


def _lease_and_read(read: _Read, ask: Ask) -> tuple[LeaseReply, list[Frame]]:
    answers: list[LeaseReply] = []

    def leased() -> bool:
        answers.append(ask())
        return answers[0].outcome == LeaseReply.OUTCOME_LEASED

    frames = read.read_where(leased)
    return answers[0], frames


def _lease_frame(answer: LeaseReply) -> Answer:
    return Answer(lane.PULL, wire.Parameters(lease=answer).SerializeToString())
