"""The Inspector service: what people and scripts ask a running server, and the few calls that change it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from pyps import _kernels
from pyps.checkpoint import CheckpointFolder
from pyps.checksum import checksum_of
from pyps.core.membership import Member
from pyps.core.shard import Shard
from pyps.process import resident_bytes
from pyps.run import Run
from pyps.run.run import SOFTWARE
from pyps.service.convert import receipt_to, settings_to
from pyps.service.limits import ByteBudget
from pyps.service.security import require_loopback, text_of
from pyps.statistics import Tally
from pyps.tensor_summary import places, summarise
from pyps_wire import inspector_pb2 as pb
from pyps_wire.errors import METADATA_KEY, BadRequest, NotAllowed, NotInitialized, PypsError
from pyps_wire.inspector_pb2_grpc import InspectorServicer
from pyps_wire.partition import ShardRange

RECEIPTS_DEFAULT = 20
RECEIPTS_MAX = 1000
TENSORS_DEFAULT = 100
TENSORS_MAX = 1000

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Addresses:
    """Where a server listens, host:port each."""

    data: str
    control: str
    metrics: str


def _answering(method: Method) -> Method:
    """Ends the call with the error's status and text when the method raises one of ours."""

    @functools.wraps(method)
    def answer(self: Inspector, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return method(self, request, context)
        except PypsError as error:
            context.set_trailing_metadata(((METADATA_KEY, type(error).__name__),))
            context.abort(grpc.StatusCode[error.status], text_of(error))

    return answer  # type: ignore[return-value]


class Inspector(InspectorServicer):
    """Answers from the control plane's threads; reads the run, one shard's lock at a time."""

    def __init__(
        self,
        run: Run,
        *,
        addresses: Addresses,
        budget: ByteBudget,
        checkpoints: CheckpointFolder | None,
    ):
        self._run = run
        self._addresses = addresses
        self._budget = budget
        self._checkpoints = checkpoints

    @_answering
    def GetStatus(self, request: pb.GetStatusRequest, context: grpc.ServicerContext) -> pb.Status:
        """The server at a glance."""
        run, total = self._run, self._run.statistics.total()
        shards = run.shards
        versions = [shard.version for shard in shards.values()]
        now, last = run.clock(), run.statistics.last_update
        newest = self._checkpoints.newest if self._checkpoints else None
        return pb.Status(
            software=SOFTWARE,
            instruction_set=_kernels.isa(),
            state=int(run.state),  # type: ignore[arg-type]
            run_id=run.run_id,
            epoch=run.epoch,
            server_index=run.server_index,
            num_servers=run.num_servers,
            protocol=run.aggregation.name,
            staleness=run.staleness.name,
            optimizer=settings_to(run.optimizer) if run.optimizer else None,
            num_shards=len(shards),
            num_parameters=sum(shard.length for shard in shards.values()),
            model_parameters=run.model.num_parameters if run.model else 0,
            version_min=min(versions, default=0),
            version_max=max(versions, default=0),
            workers_alive=run.membership.num_alive,
            updates=total.updates,
            pushes_applied=total.applied,
            pushes_pending=total.pending,
            pushes_rejected=total.rejected,
            pushes_duplicate=total.duplicate,
            examples=run.statistics.examples,
            staleness_mean=total.staleness_mean,
            staleness_max=total.staleness_max,
            rate_scale_mean=total.rate_scale_mean,
            uptime_seconds=now - run.started_at,
            last_update_seconds=-1.0 if last is None else now - last,
            bytes_in=total.bytes_in,
            bytes_out=total.bytes_out,
            data_address=self._addresses.data,
            control_address=self._addresses.control,
            metrics_address=self._addresses.metrics,
            checkpoint=str(newest or ""),
            waiting_for=run.waits.descriptions(),
        )

    @_answering
    def ListShards(self, request: pb.ListShardsRequest, context: grpc.ServicerContext) -> pb.ListShardsReply:
        """This server's shards, with checksums of their parameters."""
        partition, shards = self._run.partition, self._run.shards
        if partition is None:
            return pb.ListShardsReply()
        return pb.ListShardsReply(
            shards=[self._shard_info(shard, partition.shard(shard_id)) for shard_id, shard in shards.items()]
        )

    @_answering
    def ListWorkers(self, request: pb.ListWorkersRequest, context: grpc.ServicerContext) -> pb.ListWorkersReply:
        """The workers that the server knows, the gone ones too."""
        return pb.ListWorkersReply(workers=[self._worker_info(m) for m in self._run.membership.all()])

    @_answering
    def ListTensors(self, request: pb.ListTensorsRequest, context: grpc.ServicerContext) -> pb.ListTensorsReply:
        """The tensors of which this server holds a part, a page at a time."""
        partition, shards = self._run.partition, self._run.shards
        if partition is None:
            return pb.ListTensorsReply()
        page_size = min(request.page_size or TENSORS_DEFAULT, TENSORS_MAX)
        first = _page_start(request.page_token)
        held = [
            (index, tensor_places)
            for index, tensor_places in places(partition, shards).items()
            if index >= first and partition.model.tensors[index].name.startswith(request.name_prefix)
        ]
        infos = []
        for index, tensor_places in held[:page_size]:
            tensor, summary = partition.model.tensors[index], summarise(tensor_places, shards)
            infos.append(
                pb.TensorInfo(name=tensor.name, shape=tensor.shape, group=tensor.group, **dataclasses.asdict(summary))
            )
        token = str(held[page_size][0]) if len(held) > page_size else ""
        return pb.ListTensorsReply(tensors=infos, next_page_token=token)

    @_answering
    def GetStaleness(self, request: pb.GetStalenessRequest, context: grpc.ServicerContext) -> pb.StalenessHistogram:
        """How stale the gradients were, everybody's or one worker's."""
        statistics = self._run.statistics
        tally = statistics.worker(request.worker_id) if request.worker_id else statistics.total()
        return pb.StalenessHistogram(
            buckets=[
                pb.StalenessHistogram.Bucket(staleness=staleness, count=count)
                for staleness, count in sorted(tally.histogram.items())
            ],
            count=tally.staleness_count,
            mean=tally.staleness_mean,
            max=tally.staleness_max,
        )

    @_answering
    def ListReceipts(self, request: pb.ListReceiptsRequest, context: grpc.ServicerContext) -> pb.ListReceiptsReply:
        """The newest receipts, newest first."""
        limit = min(request.limit or RECEIPTS_DEFAULT, RECEIPTS_MAX)
        now = self._run.clock()
        return pb.ListReceiptsReply(
            receipts=[
                pb.LoggedReceipt(
                    worker_id=logged.worker_id,
                    receipt=receipt_to(logged.receipt),
                    age_seconds=now - logged.now,
                )
                for logged in self._run.statistics.recent(limit, request.worker_id)
            ]
        )

    @_answering
    def GetMemory(self, request: pb.GetMemoryRequest, context: grpc.ServicerContext) -> pb.Memory:
        """Where the server's memory goes."""
        shards = list(self._run.shards.values())
        return pb.Memory(
            parameters_bytes=4 * sum(shard.length for shard in shards),
            slots_bytes=sum(shard.slots_bytes for shard in shards),
            in_flight_bytes=self._budget.bytes_held,
            in_flight_bytes_max=self._budget.bytes_max,
            ledger_entries=sum(shard.num_receipts for shard in shards),
            resident_bytes=resident_bytes(),
        )

    @_answering
    def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: grpc.ServicerContext
    ) -> pb.SaveCheckpointReply:
        """Writes a checkpoint now."""
        require_loopback(context, "SaveCheckpoint")
        if self._checkpoints is None:
            raise NotAllowed("this server has no folder for checkpoints: start it with --checkpoint-dir")
        saved = self._checkpoints.save(self._run)
        return pb.SaveCheckpointReply(path=str(saved.path), bytes=saved.num_bytes, seconds=saved.seconds)

    @_answering
    def Reset(self, request: pb.ResetRequest, context: grpc.ServicerContext) -> pb.ResetReply:
        """Forgets the run and sets its checkpoints aside."""
        require_loopback(context, "Reset")
        if self._checkpoints is None:
            self._run.reset(request.run_id)
        else:
            self._checkpoints.forget(self._run, request.run_id)
        return pb.ResetReply()

    @_answering
    def Stop(self, request: pb.StopRequest, context: grpc.ServicerContext) -> pb.StopReply:
        """Finishes the run."""
        require_loopback(context, "Stop")
        if self._run.model is None:
            raise NotInitialized("this server holds no run: there is nothing to stop")
        self._run.finish()
        return pb.StopReply()

    def _shard_info(self, shard: Shard, shard_range: ShardRange) -> pb.ShardInfo:
        tally = self._run.statistics.shard(shard.shard_id)
        version, checksum = shard.read(lambda version, values: (version, checksum_of(values)))
        return pb.ShardInfo(
            shard_id=shard.shard_id,
            group=shard_range.group,
            offset=shard_range.offset,
            num_parameters=shard.length,
            version=version,
            checksum=checksum,
            bytes=4 * shard.length + shard.slots_bytes,
            pushes_applied=tally.applied,
            pushes_rejected=tally.rejected,
            pushes_duplicate=tally.duplicate,
        )

    def _worker_info(self, member: Member) -> pb.WorkerInfo:
        tally: Tally = self._run.statistics.worker(member.worker_id)
        return pb.WorkerInfo(
            worker_id=member.worker_id,
            state=member.state.value,
            incarnation=member.incarnation,
            host=member.info.host,
            process_id=member.info.process_id,
            device=member.info.device,
            software=member.info.software,
            clock=member.clock,
            pushes_applied=tally.applied,
            pushes_pending=tally.pending,
            pushes_rejected=tally.rejected,
            pushes_duplicate=tally.duplicate,
            staleness_mean=tally.staleness_mean,
            staleness_max=tally.staleness_max,
            rate_scale_mean=tally.rate_scale_mean,
            silent_seconds=max(0.0, self._run.clock() - member.heard_at),
            scalars=dict(member.scalars),
        )


def _page_start(page_token: str) -> int:
    try:
        return int(page_token or 0)
    except ValueError:
        raise BadRequest(
            f"page_token is {page_token!r}; expected next_page_token of the reply before, or nothing"
        ) from None
