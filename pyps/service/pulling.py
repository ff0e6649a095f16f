"""Pull: the shards that are newer than those held, each as soon as it has the version wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pyps.core.shard import Shard
from pyps.core.whole_model import WholeModel
from pyps.run.run import Run
from pyps.service import convert
from pyps.service.calls import Call
from pyps.service.executor import KernelExecutor
from pyps.service.leasing import Ask, LeaseCall
from pyps.service.limits import ByteBudget
from pyps.service.responses import OrderedResponses
from pyps.service.serializations import Serializations, Wanted
from pyps.service.waiting import VersionWait
from pyps.service.work_messages import lease_reply
from pyps.work import LeaseAnswer, Leased
from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.errors import BadRequest

# Shards of one call in memory: one is framed while another is sent.
FRAMES_MAX = 2


class PullStream:
    """One call of Pull."""

    def __init__(
        self,
        run: Run,
        work: KernelExecutor,
        budget: ByteBudget,
        context: Call,
        request: wire.PullRequest,
        *,
        serializations: Serializations,
    ):
        self._run = run
        self._work = work
        self._context = context
        self._request = request
        self._serializations = serializations
        self._codec = convert.codec_from(request.codec)
        self._observes = request.role == common.ROLE_OBSERVER
        # Whose lease and figures it counts for; an observer's counts for nobody.
        self._worker_id = "" if self._observes else request.sender.worker_id
        self._account = budget.account(self._worker_id)
        # Versions of another epoch mean nothing here: everything is newer, and nothing is worth waiting for.
        same_epoch = request.epoch == run.epoch
        self._min_versions = {want.shard_id: want.min_version for want in request.wants if same_epoch}
        self._held_versions = {want.shard_id: want.held_version for want in request.wants if same_epoch}

    async def serve(self) -> None:
        """Sends what is wanted, waiting as long as the request says."""
        request, whole = self._request, self._run.whole
        shards = self._run.shards_to_pull(
            request.sender.run_id,
            request.sender.worker_id,
            request.sender.incarnation,
            observer=self._observes,
            shard_ids=[want.shard_id for want in request.wants],
        )
        waits = VersionWait(
            self._run,
            self._work,
            shards,
            self._min_versions,
            worker_id=self._worker_id,
            wait_seconds=request.wait_milliseconds / 1000,
        )
        if request.HasField("portion"):
            await self._serve_with_portion(whole, shards, waits)
            return
        async with waits:
            if whole is None:
                await self._send_each(waits)
                return
            while await waits.next() is not None:
                continue
        await self._send_whole(whole, shards)

    async def _serve_with_portion(self, whole: WholeModel | None, shards: list[Shard], waits: VersionWait) -> None:
        """Leases a portion, then sends what is newer: of that very moment where one mutex is held for the model.

        Whoever gets no portion gets no parameters either.
        """
        self._require_worker()
        call = LeaseCall(self._run, self._work, self._request.portion)
        if whole is None:
            answer = await call.answer()
            await self._send([_lease_frame(answer)])
            if isinstance(answer, Leased):
                async with waits:
                    await self._send_each(waits)
            return
        wanted = {shard.shard_id: self._wanted(shard) for shard in shards}
        num_bytes = sum(each.payload_bytes for each in wanted.values())
        frames: list[bytes] = []

        async def within(ask: Ask) -> LeaseAnswer:
            with self._account.holding(num_bytes):
                # Not on the loop: the mutex may be held by a push.
                answer, frames[:] = await self._work.begin(partial(self._lease_and_take, whole, wanted, ask))
            return answer

        answer = await call.answer(within)
        with self._account.holding(sum(map(len, frames))):
            await self._send([_lease_frame(answer), *frames])

    async def _send(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            await self._context.write(message)

    async def _send_each(self, waits: VersionWait) -> None:
        async with OrderedResponses(self._context, self._work, self._account, ahead_max=FRAMES_MAX) as replies:
            while (shard := await waits.next()) is not None:
                await replies.room()
                wanted = self._wanted(shard)
                await replies.add(
                    shard.shard_id,
                    partial(self._take, wanted),
                    num_bytes=wanted.payload_bytes + shard.pending_bytes,
                    held_bytes=wanted.payload_bytes,
                )

    def _take(self, wanted: Wanted) -> list[bytes]:
        frame = self._serializations.take(wanted, worker_id=self._worker_id)
        if frame is None:
            return []
        shard_ids = (wanted.shard.shard_id,)
        self._run.statistics.pulled(self._worker_id or "observer", wanted.payload_bytes, shard_ids=shard_ids)
        return [frame]

    async def _send_whole(self, whole: WholeModel, shards: list[Shard]) -> None:
        """Sends shards of one state of the model: all are framed under its mutex, then sent without it."""
        wanted = {shard.shard_id: self._wanted(shard) for shard in shards}
        async with OrderedResponses(self._context, self._work, self._account, ahead_max=1) as replies:
            num_bytes = sum(each.payload_bytes for each in wanted.values())
            job = partial(self._take_whole, whole, wanted)
            pending_bytes = sum(shard.pending_bytes for shard in shards)
            await replies.add(-1, job, num_bytes=num_bytes + pending_bytes, held_bytes=num_bytes)

    def _lease_and_take(
        self, whole: WholeModel, wanted: Mapping[int, Wanted], ask: Ask
    ) -> tuple[LeaseAnswer, list[bytes]]:
        answers: list[LeaseAnswer] = []

        def leased() -> bool:
            answers.append(ask())
            return isinstance(answers[0], Leased)

        frames = self._take_whole(whole, wanted, provided=leased)
        return answers[0], frames

    def _require_worker(self) -> None:
        """Refuses a portion to whom could not deliver it."""
        portion, request = self._request.portion, self._request
        if self._observes or portion.sender != request.sender:
            raise BadRequest(
                f"{request.sender.worker_id!r} pulls {'as an observer ' if self._observes else ''}and wants a portion "
                f"as {portion.sender.worker_id!r}: ask as the worker that pulls"
            )

    def _take_whole(
        self, whole: WholeModel, wanted: Mapping[int, Wanted], *, provided: Callable[[], bool] = lambda: True
    ) -> list[bytes]:
        """The messages of one state of the model; none where `provided`, which is asked in the same moment, says no."""
        frames: list[bytes] = []
        with whole.held():
            if not provided():
                return []
            for each in wanted.values():
                made = each.frame(worker_id=self._worker_id)
                if made is not None:
                    frames.append(made[1])
                    shard_ids = (each.shard.shard_id,)
                    self._run.statistics.pulled(self._worker_id or "observer", each.payload_bytes, shard_ids=shard_ids)
        return frames

    def _wanted(self, shard: Shard) -> Wanted:
        of_round = self._min_versions.get(shard.shard_id, 0) > 0
        return Wanted(shard, self._codec, self._held_versions.get(shard.shard_id, -1), of_round)


def _lease_frame(answer: LeaseAnswer) -> bytes:
    return wire.Parameters(lease=lease_reply(answer)).SerializeToString()
