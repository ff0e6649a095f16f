"""The checkpoints of all servers of a run, and what they become on another number of servers."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pyps import logs
from pyps.core.arrays import Floats
from pyps.core.gradient import Extent, Gradient, PayloadKind
from pyps.core.ledger import LedgerState
from pyps.core.protocols.base import Contribution
from pyps.core.store import ShardState
from pyps.storage.checkpoint import (
    SHARDS,
    Checkpoint,
    CheckpointDamaged,
    CheckpointError,
    ShardEntry,
    put_manifest,
    put_positions,
    put_shard,
)
from pyps.storage.disk import Disk
from pyps.storage.folder import CheckpointFolder, checkpoint_paths, epoch_of
from pyps.storage.object_store import disk_of
from pyps_wire.codecs import FLOAT32
from pyps_wire.errors import ModelMismatch
from pyps_wire.partition import Model, Partition, ShardRange, partition, place

log = logs.get("pyps.checkpoint")

# A shard's state and its vectors.
Kept = tuple[ShardState, Mapping[str, Floats]]


@dataclass(frozen=True)
class CheckpointSet:
    """One checkpoint of each server of a run: of one plan, and of one iteration where a coordinator moved it."""

    # By the server's index.
    checkpoints: Mapping[int, Checkpoint]

    @property
    def partition(self) -> Partition:
        return self.checkpoints[0].header.partition

    @property
    def num_servers(self) -> int:
        return self.partition.num_servers

    def read_shard(self, shard_id: int) -> Kept:
        """Return a shard's state and a coordinator's vectors. Raises CheckpointDamaged."""
        return self.checkpoints[self.partition.server_of(shard_id)].read_shard(shard_id)

    def convert(
        self, folders: Sequence[CheckpointFolder], disk: Disk, *, shard_size: int | None = None
    ) -> list[Checkpoint]:
        """Write the run for as many servers as there are folders, under a larger epoch; return their checkpoints.

        Every bit is the same: parameters, slots, ledgers, waiting gradients, counts and rates, vectors, portions.
        `shard_size` slices the model anew: a shard that is made of others has the newest version of them.
        The manifest of server 0 is written last, so an end midway leaves no whole set that is new.

        Raises:
            CheckpointError: A file cannot be written, or gradients wait that cannot be sliced.
        """
        before, header = self.partition, self.checkpoints[0].header
        num_servers = len(folders)
        if shard_size is None:
            servers = place(before.model, before.shards, num_servers=num_servers)
            plan = Partition.of_tables(before.model, before.lengths, servers=servers, num_servers=num_servers)
        else:
            plan = partition(Model(before.model.tensors, shard_size, before.model.name), num_servers=num_servers)
        paths = [one.path.parent for one in self.checkpoints.values()] + [folder.path for folder in folders]
        epoch = max(map(epoch_of, paths)) + 1
        machine = self.checkpoints[0].machine
        if machine is not None:
            machines = [one.machine for one in self.checkpoints.values() if one.machine is not None]
            machine = replace(machine, coordinator_epoch=max(one.coordinator_epoch for one in machines))
        # Of each worker the newest, on all servers: which of them will be asked depends on the placement.
        kept = [item for one in self.checkpoints.values() for item in one.read_positions().items()]
        positions = dict(sorted(kept, key=lambda item: (item[1][1], item[1][2][-1:])))
        try:
            paths = [folder.next_path() for folder in folders]
            for path in paths:
                disk.make_folder(path.parent / SHARDS)
            entries: dict[int, list[ShardEntry]] = defaultdict(list)
            for shard, (state, vectors) in _sliced(self, plan):
                server = plan.server_of(shard.shard_id)
                entry = put_shard(paths[server], shard.shard_id, epoch, state, vectors, disk)
                entries[server].append(entry)
            for server, path in reversed([*enumerate(paths)]):
                own = replace(header, epoch=epoch, server_index=server, partition=plan)
                work = None if server else self.checkpoints[0].work
                places = put_positions(path, positions, disk)
                put_manifest(path, own, entries[server], disk, machine=machine, work=work, positions=places)
        except (OSError, MemoryError) as error:
            reason = error if isinstance(error, OSError) else "the memory does not suffice"
            raise CheckpointError(f"the checkpoints for {num_servers} servers cannot be written: {reason}") from None
        return [Checkpoint(path, disk) for path in paths]


def convert(
    sources: Sequence[Path], into: Path, *, num_servers: int, shard_size: int | None = None, disk: Disk | None = None
) -> list[Checkpoint]:
    """Convert the newest checkpoints of all servers of a run for another number; return the new ones.

    `into` gets a folder for each server. It may be the source itself: its checkpoints are set aside then. Raises
    CheckpointError: it holds other checkpoints, or a folder is in use, or what `newest_set` and `convert` raise.
    """
    disk = disk or disk_of(into)
    in_place = into in sources
    own = newest_set(sources)
    paths = [into / f"server-{index}" for index in range(num_servers)]
    if in_place:
        paths += [path for path in folders_of(into) if path not in paths and path != into]
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(contextlib.closing(CheckpointFolder(path, disk=disk))) for path in paths]
        before = [checkpoint_paths(path, disk) for path in paths]
        for folder in folders if not in_place else ():
            folder.require_empty()
        written = own.convert(folders[:num_servers], disk, shard_size=shard_size)
        for folder, older in zip(folders, before, strict=True):
            folder.set_aside(older)
    return written


def newest_set(sources: Sequence[Path]) -> CheckpointSet:
    """Return the newest whole checkpoints of all servers of a run.

    A source is a folder of a job or of a server, or a checkpoint. Raises CheckpointError where servers are missing.
    """
    # The newest first in each folder, so that the first found of a server is its newest.
    found = [one for source in sources for one in _checkpoints(source)]
    if not found:
        raise CheckpointError(f"there is no whole checkpoint in {', '.join(map(str, sources))}")
    of_plans: list[dict[int, Checkpoint]] = []
    for one in found:
        own = next((of_plan for of_plan in of_plans if _fit(next(iter(of_plan.values())), one)), None)
        if own is None:
            of_plans.append(own := {})
        own.setdefault(one.header.server_index, one)
    whole = [CheckpointSet(own) for own in of_plans if len(own) == next(iter(own.values())).header.num_servers]
    first = found[0]
    mine = first.header
    for other in found:
        theirs = other.header
        if theirs.run_id != mine.run_id or (not whole and theirs.partition != mine.partition):
            raise ModelMismatch(
                f"{other.path} is of run {theirs.run_id!r} on {theirs.num_servers} servers, {first.path} of run "
                f"{mine.run_id!r} on {mine.num_servers}, or their shards are others: name checkpoints of one run"
            )
    if whole:
        return max(whole, key=_rank)
    of_plan = {index: one for own in of_plans for index, one in own.items()}
    if len(of_plan) == mine.num_servers:
        iterations = ", ".join(str(one.iteration) for _, one in sorted(of_plan.items()))
        raise CheckpointError(
            f"the servers' newest checkpoints are of the coordinator's iterations {iterations}, and of no iteration is "
            "there one of each server"
        )
    plan = first.header.partition
    lacking = [server for server in range(plan.num_servers) if server not in of_plan]
    servers = ", ".join(map(str, lacking))
    of_lacking = {plan.part_of(shard.shard_id) for server in lacking for shard in plan.of_server(server)}
    parts = ", ".join(map(str, sorted(of_lacking)))
    of_parts = f", with shards of part {parts}" if plan.model.num_parts > 1 else ""
    raise CheckpointError(
        f"the model has shards on {plan.num_servers} servers; missing here: those of server {servers}{of_parts}. "
        "Give --checkpoint once for each server"
    )


def differing(checkpoints: Iterable[Checkpoint]) -> str:
    """Return a sentence where the servers' checkpoints are of different versions; "" where they are not."""
    versions = {one.header.server_index: one.version_max for one in checkpoints if one.shards}
    if len({*versions.values()}) <= 1:
        return ""
    each = ", ".join(f"server {server} at {version}" for server, version in sorted(versions.items()))
    return f"the servers' newest checkpoints are of different versions: {each}"


def folders_of(source: Path) -> list[Path]:
    """Return the folders of the servers in a job's folder; a server's own stands for itself. Raises CheckpointError."""
    try:
        entries = disk_of(source).sizes(source)
    except OSError:
        raise CheckpointError(f"there is no folder {source}") from None
    # A job's folder has server-0, server-1...
    inside = [source / name for name, size in sorted(entries.items()) if name[:7] == "server-" and size < 0]
    return inside or [source]


def paths_of(source: Path, *, set_aside: bool = False) -> list[Path]:
    """Return the checkpoints in a folder of a job or a server, each server's newest first; see `checkpoint_paths`."""
    if source.suffix == ".json":
        return [source]
    return [path for folder in folders_of(source) for path in checkpoint_paths(folder, set_aside=set_aside)]


def _checkpoints(source: Path) -> Iterator[Checkpoint]:
    for path in paths_of(source):
        try:
            checkpoint = Checkpoint(path)
            checkpoint.require_files()
            yield checkpoint
        except CheckpointDamaged as error:
            if path == source:
                raise
            log.warning("checkpoint ignored", path=path, reason=error)


def _rank(own: CheckpointSet) -> tuple[int, int]:
    """Return the largest epoch, and the iteration."""
    return max(one.header.epoch for one in own.checkpoints.values()), own.checkpoints[0].iteration


def _fit(one: Checkpoint, other: Checkpoint) -> bool:
    mine, theirs = one.header, other.header
    same_run = (mine.run_id, mine.partition) == (theirs.run_id, theirs.partition)
    return same_run and one.iteration == other.iteration


def _sliced(source: CheckpointSet, plan: Partition) -> Iterator[tuple[ShardRange, Kept]]:
    """Yield the plan's shards in order, each with its state; few shards are in memory at a time."""
    if plan.lengths == source.partition.lengths:
        yield from ((shard, source.read_shard(shard.shard_id)) for shard in plan.shards)
        return
    held: dict[int, tuple[ShardRange, Kept]] = {}
    others, first = source.partition.shards, 0
    for shard in plan.shards:
        # Both are in the order of groups and offsets.
        while _end(others[first]) <= (shard.group, shard.offset):
            held.pop(first, None)
            first += 1
        last = first
        while last < len(others) and (others[last].group, others[last].offset) < _end(shard):
            if last not in held:
                held[last] = others[last], source.read_shard(others[last].shard_id)
            last += 1
        yield shard, _made_of(shard, [held[index] for index in range(first, last)])


def _end(shard: ShardRange) -> tuple[int, int]:
    return shard.group, shard.offset + shard.length


def _made_of(shard: ShardRange, others: Sequence[tuple[ShardRange, Kept]]) -> Kept:
    """Return the state of a shard that covers others, or parts of them."""
    states = sorted((state for _, (state, _) in others), key=lambda state: -state.version)
    newest = states[0]
    cuts = [
        slice(max(shard.offset - other.offset, 0), min(shard.offset + shard.length - other.offset, other.length))
        for other, _ in others
    ]

    def joined(arrays: Sequence[Floats]) -> Floats:
        return np.concatenate([values[cut] for values, cut in zip(arrays, cuts, strict=True)])

    vectors = [of_shard for _, (_, of_shard) in others]
    state = replace(
        newest,
        parameters=joined([state.parameters for _, (state, _) in others]),
        slots={name: joined([state.slots[name] for _, (state, _) in others]) for name in newest.slots},
        ledger=LedgerState.of_shard(shard.shard_id, [state.ledger for state in states]),
        pending=_pending(shard, others),
        examples=max(state.examples for state in states),
    )
    return state, {name: joined([of_shard[name] for of_shard in vectors]) for name in vectors[0]}


def _pending(shard: ShardRange, others: Sequence[tuple[ShardRange, Kept]]) -> tuple[Contribution, ...]:
    """Return the gradients that wait for an update of the shard: those of the others, sliced and joined."""
    if not any(state.pending for _, (state, _) in others):
        return ()
    if len({state.version for _, (state, _) in others}) > 1:
        raise CheckpointError(
            f"shard {shard.shard_id} would be made of shards with different versions, for which gradients wait: end "
            "the workers, which completes their round, then `pyps save`, and convert that; or keep the size of shards"
        )
    waiting: dict[tuple[str, int, int], tuple[Contribution, list[tuple[int, Gradient]]]] = {}
    for other, (state, _) in others:
        for contribution in state.pending:
            gradient = contribution.gradient
            identity = (gradient.worker_id, gradient.incarnation, gradient.sequence)
            waiting.setdefault(identity, (contribution, []))[1].append(
                (other.offset - shard.offset, _in_float32(gradient, other.length))
            )
    return tuple(
        contribution._replace(gradient=_joined(contribution.gradient, pieces, shard.length))
        for contribution, pieces in waiting.values()
    )


def _in_float32(gradient: Gradient, length: int) -> Gradient:
    if gradient.codec.sparse:
        raise CheckpointError(
            f"gradients of {gradient.codec.name} wait for an update, of which no slices can be made: end the workers, "
            "which completes their round, then `pyps save`, and convert that; or keep the size of shards"
        )
    if gradient.codec is FLOAT32 or gradient.kind == PayloadKind.NOTHING:
        return gradient
    values = gradient.codec.decode(gradient.payload, gradient.count(length))
    return gradient._replace(codec=FLOAT32, payload=FLOAT32.encode(values))


def _joined(whole: Gradient, pieces: Sequence[tuple[int, Gradient]], length: int) -> Gradient:
    """Return a gradient of a shard of that length; each piece begins at an offset from the shard's beginning."""
    extents: list[Extent] = []
    payload = bytearray()
    for offset, gradient in pieces:
        view, at = memoryview(gradient.payload).cast("B"), 0
        if gradient.kind == PayloadKind.NOTHING:
            continue
        for begin, count in gradient.extents or (Extent(0, len(view) // 4),):
            first = max(begin + offset, 0)
            last = min(begin + offset + count, length)
            if first < last:
                cut = at + first - begin - offset
                payload += view[4 * cut : 4 * (cut + last - first)]
                if extents and sum(extents[-1]) == first:
                    extents[-1] = Extent(extents[-1].offset, last - extents[-1].offset)
                else:
                    extents.append(Extent(first, last - first))
            at += count
    if not extents:
        return whole._replace(kind=PayloadKind.NOTHING, codec=FLOAT32, payload=b"", extents=())
    covers = extents == [Extent(0, length)]
    kind = next(gradient.kind for _, gradient in pieces if gradient.kind != PayloadKind.NOTHING)
    return whole._replace(kind=kind, codec=FLOAT32, payload=bytes(payload), extents=() if covers else tuple(extents))
