"""A run's state as the Inspector's messages."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pyps import _kernels
from pyps.core.arrays import Floats
from pyps.core.membership import Member
from pyps.core.store import Store
from pyps.core.table import TableShard
from pyps.core.warmup import Staged
from pyps.run.run import SOFTWARE, Run
from pyps.service.convert import settings_to
from pyps.service.transport import Host, Transport
from pyps.statistics import tally_of
from pyps.storage.folder import CheckpointFolder
from pyps.storage.plain import checksum_of
from pyps_wire import inspector_pb2 as pb
from pyps_wire.partition import Partition, Piece, Tensor


@dataclass(frozen=True)
class Addresses:
    """A server's addresses, host:port each."""

    data: str
    control: str
    metrics: str


def status_of(run: Run, addresses: Addresses, checkpoints: CheckpointFolder | None) -> pb.Status:
    content, roster, last = run.content, run.membership.roster, run.statistics.last_update
    behaviour, texts, shards = run.rounds.behaviour, run.rounds.behaviour.texts, list(run.content.shards.values())
    version_min = min((shard.version for shard in shards), default=0)
    staged = behaviour.aggregation
    return pb.Status(
        software=SOFTWARE,
        instruction_set=_kernels.isa(),
        state=int(run.state),  # type: ignore[arg-type]
        run_id=content.run_id,
        epoch=content.epoch,
        server_index=content.server_index,
        num_servers=content.num_servers,
        optimizer=settings_to(content.settings) if content.settings is not None else None,
        num_shards=len(shards),
        num_parameters=sum(shard.length for shard in shards),
        model_parameters=content.model.num_parameters if content.model else 0,
        version_min=version_min,
        version_max=max((shard.version for shard in shards), default=0),
        pending_gradients=sum(shard.num_pending for shard in shards),
        pending_bytes=sum(shard.pending_bytes for shard in shards),
        learning_rates=learning_rates_of(run),
        protocol=texts["protocol"],
        staleness=texts["staleness"],
        schedule=texts["schedule"],
        schedule_owner=run.rounds.owner.worker_id,
        warmup=texts["warmup"],
        warming_up=isinstance(staged, Staged) and version_min < staged.warm_up.updates,
        batch_growth=texts["batch_growth"],
        batch_size=run.rounds.batch_size,
        clip_norm=behaviour.clip_norm,
        warnings=run.rounds.warnings,
        tally=tally_of(run.statistics.total()),
        tables=[pb.TableInfo(**shard.table_counts()) for shard in shards if isinstance(shard, TableShard)],
        examples=content.examples,
        uptime_seconds=run.clock() - run.started_at,
        cpu_seconds=time.process_time(),
        last_update_seconds=-1.0 if last is None else run.clock() - last,
        data_address=addresses.data,
        control_address=addresses.control,
        metrics_address=addresses.metrics,
        checkpoint="" if checkpoints is None else str(checkpoints.newest or ""),
        checkpoint_failure="" if checkpoints is None else checkpoints.failure,
        standby=run.about_standby(),
        durable_version=content.durable_version,
        workers_alive=run.membership.num_alive,
        roster=roster.workers,
        workers_missing=roster.missing,
        waiting_for=run.waits.descriptions(),
    )


def memory_of(host: Host, transports: Sequence[Transport]) -> pb.Memory:
    shards = list(host.run.content.shards.values())
    return pb.Memory(
        parameters_bytes=4 * sum(shard.length for shard in shards),
        slots_bytes=sum(shard.slots_bytes for shard in shards),
        in_flight_bytes=host.budget.bytes_held,
        in_flight_bytes_max=host.budget.bytes_max,
        ledger_entries=sum(shard.num_receipts for shard in shards),
        resident_bytes=int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * mmap.PAGESIZE,
        pending_bytes=sum(shard.pending_bytes for shard in shards),
        shared_bytes=sum(transport.shared_bytes for transport in transports),
        first_parameters_bytes=0 if host.run.incoming is None else host.run.incoming.num_bytes,
        ledger_bytes=sum(shard.ledger_bytes for shard in shards),
        serialized_bytes=host.serializations.bytes_held,
        late_messages=host.waiting.num_late,
        published_bytes=sum(shard.published_bytes for shard in shards),
        positions_bytes=host.run.rounds.positions.num_bytes,
    )


def learning_rates_of(run: Run) -> list[pb.LearningRate]:
    """Return the learning rate of each parameter group that has a shard here, by its first shard."""
    partition, shards = run.content.partition, run.content.shards
    if partition is None:
        return []
    first_shards = {partition.shard(shard_id).group: shards[shard_id] for shard_id in sorted(shards, reverse=True)}
    return [
        pb.LearningRate(group=group, base=shard.learning_rate, current=shard.next_rate)
        for group, shard in sorted(first_shards.items())
    ]


def shard_info(run: Run, shard: Store, partition: Partition, *, with_checksum: bool) -> pb.ShardInfo:
    shard_range = partition.shard(shard.shard_id)
    part = partition.model.group_parts[shard_range.group]
    roster = run.membership.roster.of_part(part)
    version, checksum = shard.version, ""
    if with_checksum:
        # Pushes wait for the copy alone.
        version, parameters = shard.read(lambda version, values: (version, values.copy()))
        checksum = checksum_of(parameters)
    return pb.ShardInfo(
        table=pb.TableInfo(**shard.table_counts()) if isinstance(shard, TableShard) else None,
        shard_id=shard.shard_id,
        group=shard_range.group,
        offset=shard_range.offset,
        num_parameters=shard.length,
        version=version,
        checksum=checksum,
        bytes=0 if shard.has_rows else 4 * shard.length + shard.slots_bytes,
        tally=tally_of(run.statistics.shard(shard.shard_id)),
        pending_gradients=shard.num_pending,
        pending_bytes=shard.pending_bytes,
        waiting_for=shard.waiting_for(roster) if shard.num_pending else (),
        learning_rate=shard.next_rate,
        examples=shard.examples,
        part=part,
        num_workers=roster.num_workers,
    )


def tensor_info(tensor: Tensor, pieces: Sequence[tuple[int, Piece]], shards: Mapping[int, Store]) -> pb.TensorInfo:
    """Return the pieces of a tensor, or of a block of one that is split over parts, that this server holds."""
    versions, squares, minima, maxima, first_values = zip(
        *(_read(shards[shard_id], piece) for shard_id, piece in pieces), strict=True
    )
    return pb.TensorInfo(
        name=tensor.name,
        shape=tensor.shape,
        group=tensor.group,
        whole_shape=tensor.whole_shape,
        offset=tensor.offset,
        part=tensor.part,
        held_parameters=sum(piece.length for _, piece in pieces),
        version_min=min(versions),
        version_max=max(versions),
        norm=math.sqrt(math.fsum(squares)),
        min=min(minima),
        max=max(maxima),
        first_values=list(chain.from_iterable(first_values))[:FIRST_VALUES],
    )


def worker_info(run: Run, member: Member, *, waits_for: Sequence[str], transport: str) -> pb.WorkerInfo:
    """Return a worker, the counts of its pushes, the workers that it waits for and its transport."""
    contacts = run.statistics.contacts(member.worker_id)
    return pb.WorkerInfo(
        worker_id=member.worker_id,
        state=member.state.value,
        incarnation=member.incarnation,
        host=member.info.host,
        process_id=member.info.process_id,
        device=member.info.device,
        software=member.info.software,
        gradient_codec=member.info.gradient_codec,
        parameter_codec=member.info.parameter_codec,
        clock=member.clock,
        tally=tally_of(run.statistics.worker(member.worker_id)),
        silent_seconds=max(0.0, run.clock() - member.heard_at),
        scalars=dict(member.scalars),
        message=member.message,
        counts=member.active,
        waits_for=waits_for,
        transport=transport,
        replica=member.replica,
        parts=member.parts,
        shards_pushed=sorted(contacts.pushed),
        shards_pulled=sorted(contacts.pulled),
    )


FIRST_VALUES = 8


def places(partition: Partition, shard_ids: Iterable[int]) -> dict[int, list[tuple[int, Piece]]]:
    """Return each tensor's pieces in these shards, with their shards, by the tensor's index and in its order."""
    found: dict[int, list[tuple[int, Piece]]] = {}
    for shard_id in shard_ids:
        for piece in partition.pieces(shard_id):
            found.setdefault(piece.tensor_index, []).append((shard_id, piece))
    for tensor_places in found.values():
        tensor_places.sort(key=lambda place: place[1].tensor_offset)
    return dict(sorted(found.items()))


def _read(shard: Store, piece: Piece) -> tuple[int, float, float, float, list[float]]:
    """Return the shard's version, and of the piece: the sum of squares, min, max and first values."""

    def read(version: int, parameters: Floats) -> tuple[int, float, float, float, list[float]]:
        held = parameters[piece.shard_offset : piece.shard_offset + piece.length]
        return version, *_kernels.summary(held), held[:FIRST_VALUES].tolist()

    return shard.read(read)
