"""What workers that share their memory ask of the run: little work is done at once, the rest on threads."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, TypeAlias

from pyps.run.run import Run
from pyps.run.state import RunState
from pyps.service.limits import ByteBudget
from pyps.service.local.attachment import Attachment, Content, check_layout
from pyps.service.local.exchange import Exchange
from pyps.service.local.pull import Pull
from pyps.service.local.segment import Segment
from pyps.service.local.stages import Job, Stages
from pyps.service.local.tickets import Tickets
from pyps.service.waiting import Arrivals
from pyps.service.workbench import Workbench
from pyps_wire import local_pb2 as local
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.errors import BadRequest, NotInitialized, ServerUnavailable

# At once, or when it is done.
Answer: TypeAlias = local.LocalReply | Coroutine[Any, Any, local.LocalReply]


class Requests:
    """Answers attached workers. For the event loop."""

    def __init__(self, run: Run, *, work: Workbench, budget: ByteBudget, threads: int, tickets: Tickets):
        self._run = run
        self._work = work
        self._budget = budget
        self._threads = threads
        self._tickets = tickets

    async def attach(self, request: local.LocalAttach, descriptor: int) -> Attachment:
        """Takes a worker's memory in; the descriptor can be closed afterwards."""
        sender = request.sender
        self._tickets.check(request.ticket, worker_id=sender.worker_id, incarnation=sender.incarnation)
        content = self._content(request)
        check_layout(request, content)

        def map_it() -> Attachment:
            segment = Segment(descriptor, num_bytes=request.segment_bytes, hand_over=self._work.hand_over)
            try:
                return Attachment.make(request, segment, content)
            except BaseException:
                segment.close()
                raise

        return await self._work.off_loop(map_it)

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
        # It is a sign of life, and refuses strangers.
        run.shards_to_pull(sender.run_id, sender.worker_id, sender.incarnation, observer=False, shard_ids=())
        if plan is None or run.shards is not shards:
            raise NotInitialized("the run was reset while its memory was attached: say Hello, then attach it anew")
        member = run.membership.get(sender.worker_id)
        own = plan.of_parts(member.parts) if member is not None and member.parts else plan
        return Content(run.run_id, epoch, plan, own, run.server_index, shards)

    # Push, or push and pull.

    def _exchange(self, attachment: Attachment, request: local.LocalExchange) -> Answer:
        exchange = Exchange(self._run, attachment, request)
        shards = [part.shard for part in exchange.parts]
        if exchange.is_whole or not self._work.is_little(exchange.work_bytes, shards):
            return self._exchange_on_threads(attachment, exchange)
        for part in exchange.parts:
            exchange.scan(part)
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
        arrivals = Arrivals(
            self._run,
            self._work,
            pull.shards,
            pull.min_versions,
            worker_id=attachment.worker_id,
            wait_seconds=pull.wait_seconds,
        )
        async with arrivals:
            while await arrivals.next() is not None:
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
        attachment.segment.hold()
        try:
            account.hold(held_bytes)
        except BaseException:
            attachment.segment.let_go()
            raise

        def end() -> None:
            account.release(held_bytes)
            attachment.segment.let_go()

        await Stages(stages, executor=self._work.executor, threads=self._threads).run(on_end=end)
