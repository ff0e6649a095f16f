"""The Inspector service: questions of people and scripts to a running server, and the few calls that change it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyps.run.handshake import RunState
from pyps.run.rounds import Settled
from pyps.service.calls import Context
from pyps.service.convert import receipt_of
from pyps.service.report import (
    Addresses,
    learning_rates_of,
    memory_of,
    places,
    shard_info,
    status_of,
    tensor_info,
    worker_info,
)
from pyps.service.standby.feed import Line
from pyps.service.standby.follower import Follower
from pyps.service.standby.primary import Primary
from pyps.service.transport import Host, Transport, name_of
from pyps.statistics import activity_of, histogram_of
from pyps_wire import inspector_pb2 as pb
from pyps_wire import work_pb2 as work
from pyps_wire.errors import InvalidArgument, NotAllowed, NotInitialized, RunFinished

# How many answers of a kind may be made at once; the rest wait in line. Answers that read every parameter, or wait for
# a checkpoint, take long and delay only their own kind.
THREADS = {"ask": 8, "sum": 2, "save": 1}
EVENTS_DEFAULT = 100
EVENTS_MAX = 1000
ACTIVITIES_DEFAULT = 500
ACTIVITIES_MAX = 2000
RECEIPTS_DEFAULT = 20
RECEIPTS_MAX = 1000
TENSORS_DEFAULT = 100
TENSORS_MAX = 1000


def _answering(
    method: Callable[..., Any], *, kind: str = "ask", changes: bool = False
) -> Callable[..., Awaitable[Any]]:
    """Run the method on a thread of its kind, since it may wait for locks; its error ends the call.

    A method that `changes` the run is answered once the standby has received the change.
    """

    @functools.wraps(method)
    async def answer(self: Inspector, request: Any, context: Context) -> Any:
        threads = self._threads[kind]
        reply = await asyncio.get_running_loop().run_in_executor(threads, method, self, request, context)
        feed = self._host.feed
        if changes and feed.guards:
            feed.note_workers(self._run.membership)
            if (received := feed.wait()) is not None:
                await received
        return reply

    return answer


_summing = functools.partial(_answering, kind="sum")
_saving = functools.partial(_answering, kind="save")
_changing = functools.partial(_answering, changes=True)


class Inspector:
    """Answers on threads of its own; it holds one shard's lock at a time."""

    def __init__(
        self,
        host: Host,
        *,
        addresses: Addresses,
        transports: Sequence[Transport],
        primary: Primary,
        follower: Follower | None,
        stop: Callable[[str], None],
    ):
        """`stop` ends the server, with the reason; `follower`: of one that was started as a standby."""
        self._host = host
        self._primary = primary
        self._follower = follower
        self._stop = stop
        self._run = host.run
        self._addresses = addresses
        self._checkpoints = host.checkpoints
        self._transports = transports
        self._threads = {
            kind: ThreadPoolExecutor(count, thread_name_prefix=f"control-{kind}") for kind, count in THREADS.items()
        }

    @_answering
    def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.Status:
        status = status_of(self._run, self._addresses, self._checkpoints)
        if self._follower is not None and not self._follower.has_taken_over:
            self._follower.describe(status)
        return status

    @_summing
    def ListShards(self, request: pb.ListShardsRequest, context: Context) -> pb.ListShardsReply:
        """List this server's shards, with checksums of their parameters unless the request excludes them."""
        partition, shards = self._run.content.partition, self._run.content.shards
        if partition is None:
            return pb.ListShardsReply()
        sums = not request.without_checksums
        return pb.ListShardsReply(
            shards=[shard_info(self._run, shard, partition, with_checksum=sums) for shard in shards.values()]
        )

    @_answering
    def ListWorkers(self, request: pb.ListWorkersRequest, context: Context) -> pb.ListWorkersReply:
        """List the workers that the server knows, including those that are gone."""
        waits_for = self._run.waits.waits_for()
        return pb.ListWorkersReply(
            workers=[
                worker_info(
                    self._run,
                    member,
                    waits_for=waits_for.get(member.worker_id, ()),
                    transport=name_of(self._transports, member.worker_id, member.incarnation),
                )
                for member in self._run.membership.all()
            ]
        )

    @_summing
    def ListTensors(self, request: pb.ListTensorsRequest, context: Context) -> pb.ListTensorsReply:
        """List the tensors, or blocks of them, that this server holds in part, a page at a time."""
        partition, shards = self._run.content.partition, self._run.content.shards
        if partition is None:
            return pb.ListTensorsReply()
        page_size = min(request.page_size or TENSORS_DEFAULT, TENSORS_MAX)
        first = _page_start(request.page_token)
        held = [
            (index, tensor_places)
            for index, tensor_places in places(partition, shards).items()
            if index >= first and partition.model.tensors[index].name.startswith(request.name_prefix)
        ]
        infos = [
            tensor_info(partition.model.tensors[index], tensor_places, shards)
            for index, tensor_places in held[:page_size]
        ]
        token = str(held[page_size][0]) if len(held) > page_size else ""
        return pb.ListTensorsReply(tensors=infos, next_page_token=token)

    @_answering
    def GetStaleness(self, request: pb.GetStalenessRequest, context: Context) -> pb.StalenessHistogram:
        """Return how stale the gradients were: all, one worker's or one shard's."""
        if request.worker_id and request.HasField("shard_id"):
            raise InvalidArgument(
                f"worker_id is {request.worker_id!r} and shard_id {request.shard_id}; expected one of them, or none"
            )
        statistics = self._run.statistics
        if request.worker_id:
            tally = statistics.worker(request.worker_id)
        else:
            tally = statistics.shard(request.shard_id) if request.HasField("shard_id") else statistics.total()
        return histogram_of(tally)

    @_answering
    def ListReceipts(self, request: pb.ListReceiptsRequest, context: Context) -> pb.ListReceiptsReply:
        limit = min(request.limit or RECEIPTS_DEFAULT, RECEIPTS_MAX)
        now = self._run.clock()
        return pb.ListReceiptsReply(
            receipts=[
                pb.LoggedReceipt(
                    worker_id=logged.worker_id,
                    receipt=receipt_of(logged.receipt, None),
                    age_seconds=now - logged.now,
                )
                for logged in self._run.statistics.recent(limit, request.worker_id)
            ]
        )

    @_answering
    def ListEvents(self, request: pb.ListEventsRequest, context: Context) -> pb.ListEventsReply:
        kept, now = self._run.events.since(request.after), self._run.clock()
        events = kept[: min(request.limit or EVENTS_DEFAULT, EVENTS_MAX)]
        return pb.ListEventsReply(
            events=[
                pb.Event(
                    number=event.number,
                    age_seconds=now - event.time,
                    kind=event.kind,
                    message=event.message,
                    worker=event.worker,
                )
                for event in events
            ],
            newest=events[-1].number if events else request.after,
            forgotten=events[-1].number - request.after - len(events) if events else 0,
        )

    @_answering
    def ListActivity(self, request: pb.ListActivityRequest, context: Context) -> pb.ListActivityReply:
        """List the newest steps and waits; of one step all shards together."""
        limit, now = min(request.limit or ACTIVITIES_DEFAULT, ACTIVITIES_MAX), self._run.clock()
        found, forgotten = self._run.statistics.activities(request.after, limit, now=now)
        return pb.ListActivityReply(
            activities=[activity_of(each, now=now) for each in found],
            newest=found[-1].number if found else request.after,
            forgotten=forgotten,
        )

    @_answering
    def GetWork(self, request: work.GetWorkRequest, context: Context) -> work.WorkProgress:
        return self._run.work.progress(deliveries=request.deliveries)

    @_answering
    def GetMemory(self, request: pb.GetMemoryRequest, context: Context) -> pb.Memory:
        """Return how much memory the server uses for what."""
        return memory_of(self._host, self._transports)

    @_changing
    def Configure(self, request: pb.ConfigureRequest, context: Context) -> pb.ConfigureReply:
        """Change the protocol, staleness policy, learning rate, schedule or number of expected workers."""
        learning_rate = request.learning_rate if request.HasField("learning_rate") else None
        expects = request.HasField("expected_workers")
        trains = bool(request.protocol or request.staleness or request.schedule or learning_rate is not None)
        if not (trains or expects):
            raise InvalidArgument(
                "nothing to configure: name a protocol, staleness, learning_rate, schedule or expected_workers"
            )
        run, settled = self._run, Settled(0, 0)
        if run.state is RunState.FINISHED:
            raise RunFinished("the run has finished: nothing in it can be set any more")
        if trains and run.content.model is None:
            raise NotInitialized("this server holds no run yet: start its workers first")
        if trains:
            settled = run.configure(
                protocol=request.protocol,
                staleness=request.staleness,
                learning_rate=learning_rate,
                schedule=request.schedule,
                validate_only=request.validate_only,
            )
        if expects and not request.validate_only:
            run.rounds.expect(request.expected_workers)
        texts = run.rounds.behaviour.texts
        return pb.ConfigureReply(
            protocol=texts["protocol"],
            staleness=texts["staleness"],
            schedule=texts["schedule"],
            learning_rates=learning_rates_of(run),
            gradients_settled=settled.gradients,
            updates_made=settled.updates,
            warnings=run.rounds.warnings_of_a_change,
        )

    @_saving
    def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Context) -> pb.SaveCheckpointReply:
        if self._checkpoints is None:
            raise NotAllowed("this server has no folder for checkpoints: start it with --checkpoint-dir")
        self._run.refuse_when_unavailable()
        if request.validate_only:
            return pb.SaveCheckpointReply()
        saved = self._checkpoints.save(self._run.snapshot)
        return pb.SaveCheckpointReply(path=str(saved.path), bytes=saved.num_bytes, seconds=saved.seconds)

    @functools.partial(_saving, changes=True)
    def Reset(self, request: pb.ResetRequest, context: Context) -> pb.ResetReply:
        """Forget the run and move its checkpoints aside."""
        reset = functools.partial(self._run.reset, validate_only=request.validate_only)
        if self._checkpoints is None:
            reset(request.run_id)
        else:
            self._checkpoints.forget(request.run_id, reset=reset, validate_only=request.validate_only)
        if not request.validate_only:
            self._host.feed.add(Line({"event": "reset"}))
        return pb.ResetReply()

    @_changing
    def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopReply:
        if self._run.content.model is None:
            raise NotInitialized("this server holds no run: there is nothing to stop")
        if not request.validate_only:
            self._run.finish()
        return pb.StopReply()

    async def Promote(self, request: pb.PromoteRequest, context: Context) -> pb.PromoteReply:
        """Make a standby take over, or a server that waits for its standby do without."""
        is_standby = self._follower is not None and not self._follower.has_taken_over
        promote = self._follower.promote if is_standby and self._follower is not None else self._primary.promote
        promote(validate_only=request.validate_only)
        return pb.PromoteReply()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        """Hand over to the standby, and end."""
        if not self._primary.is_guarded:
            raise NotAllowed("this server has no standby that could take over: start one with --standby-of")
        if not request.validate_only:
            self._stop("drained: its standby takes over")
        return pb.DrainReply(standby=self._run.standby)


def _page_start(page_token: str) -> int:
    try:
        return int(page_token or 0)
    except ValueError:
        raise InvalidArgument(
            f"page_token is {page_token!r}; expected next_page_token of the reply before, or nothing"
        ) from None
