"""Pull: the shards that are newer than those held, each as soon as it has the version wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock

from pyps.core.store import Store
from pyps.run.run import Run
from pyps.service import convert
from pyps.service.calls import Call
from pyps.service.executor import KernelExecutor
from pyps.service.limits import ByteBudget
from pyps.service.responses import OrderedResponses
from pyps.service.serializations import Serializations, Wanted
from pyps.service.waiting import VersionWait
from pyps.service.work_queue import Ask, LeaseCall, lease_reply
from pyps.work import LeaseAnswer, Leased
from pyps_wire import common_pb2 as common
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.errors import InvalidArgument

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
        self._waits = VersionWait(run, work, request, request.sender, observer=self._observes)
        self._worker_id = self._waits.worker_id
        self._account = budget.account(self._worker_id)

    async def serve(self) -> None:
        """Sends what is wanted, waiting as long as the request says."""
        mutex = self._run.mutex
        if self._request.HasField("portion"):
            await self._serve_with_portion(mutex)
        elif mutex is None:
            await self._send_each()
        else:
            await self._waits.all()
            await self._send_whole(mutex)

    async def _serve_with_portion(self, mutex: Lock | None) -> None:
        """Leases a portion, then sends what is newer: of that very moment where one mutex is held for the model.

        Whoever gets no portion gets no parameters either.
        """
        self._require_worker()
        call = LeaseCall(self._run, self._work, self._request.portion)
        if mutex is None:
            answer = await call.answer()
            await self._send([_lease_frame(answer)])
            if isinstance(answer, Leased):
                await self._send_each()
            return
        wanted = self._all_wanted()
        num_bytes = sum(each.payload_bytes for each in wanted)
        frames: list[bytes] = []

        async def within(ask: Ask) -> LeaseAnswer:
            with self._account.holding(num_bytes):
                # Not on the loop: the mutex may be held by a push.
                answer, frames[:] = await self._work.begin(partial(self._lease_and_take, mutex, wanted, ask))
            return answer

        answer = await call.answer(within)
        with self._account.holding(sum(map(len, frames))):
            await self._send([_lease_frame(answer), *frames])

    async def _send(self, messages: list[bytes]) -> None:
        messages.reverse()
        while messages:
            # What was sent is free before the next is.
            await self._context.write(messages.pop())

    async def _send_each(self) -> None:
        replies = OrderedResponses(self._context, self._work, self._account, ahead_max=FRAMES_MAX)
        async with self._waits, replies:
            while (shard := await self._waits.next()) is not None:
                await replies.room()
                wanted = self._wanted(shard)
                await replies.add(
                    shard.shard_id,
                    partial(self._take, wanted),
                    num_parameters=shard.length * (1 + shard.num_pending),
                    held_bytes=wanted.payload_bytes,
                )

    def _take(self, wanted: Wanted) -> list[bytes]:
        frame = self._serializations.take(wanted, worker_id=self._worker_id)
        if frame is None:
            return []
        shard_ids = (wanted.shard.shard_id,)
        self._run.statistics.pulled(self._worker_id or "observer", wanted.payload_bytes, shard_ids=shard_ids)
        return [frame]

    async def _send_whole(self, mutex: Lock) -> None:
        """Sends shards of one state of the model: all are framed under its mutex, then sent without it."""
        wanted = self._all_wanted()
        num_bytes = sum(each.payload_bytes for each in wanted)
        num_parameters = sum(each.shard.length * (1 + each.shard.num_pending) for each in wanted)
        with self._account.holding(num_bytes):
            await self._send(await self._work.compute(num_parameters, partial(self._take_whole, mutex, wanted)))

    def _lease_and_take(self, mutex: Lock, wanted: Sequence[Wanted], ask: Ask) -> tuple[LeaseAnswer, list[bytes]]:
        answers: list[LeaseAnswer] = []

        def leased() -> bool:
            answers.append(ask())
            return isinstance(answers[0], Leased)

        frames = self._take_whole(mutex, wanted, provided=leased)
        return answers[0], frames

    def _require_worker(self) -> None:
        """Refuses a portion to whom could not deliver it."""
        portion, request = self._request.portion, self._request
        if self._observes or portion.sender != request.sender:
            raise InvalidArgument(
                f"{request.sender.worker_id!r} pulls {'as an observer ' if self._observes else ''}and wants a portion "
                f"as {portion.sender.worker_id!r}: ask as the worker that pulls"
            )

    def _take_whole(
        self, mutex: Lock, wanted: Sequence[Wanted], *, provided: Callable[[], bool] = lambda: True
    ) -> list[bytes]:
        """The messages of one state of the model; none where `provided`, which is asked in the same moment, says no."""
        with mutex:
            return [frame for each in wanted for frame in self._take(each)] if provided() else []

    def _all_wanted(self) -> list[Wanted]:
        return [self._wanted(shard) for shard in self._waits.shards]

    def _wanted(self, shard: Store) -> Wanted:
        shard_id, waits = shard.shard_id, self._waits
        of_round = waits.min_versions.get(shard_id, 0) > 0
        return Wanted(shard, self._codec, waits.held_versions.get(shard_id, -1), of_round)


def _lease_frame(answer: LeaseAnswer) -> bytes:
    return wire.Parameters(lease=lease_reply(answer)).SerializeToString()
