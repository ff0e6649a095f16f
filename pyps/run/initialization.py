"""The first parameters of a run while they arrive: kept apart until the last shard is there.

A worker of one process sends all of a server's shards in one call. The processes of a replica send those of their
parts in calls of their own, in parallel; the server is ready when all are there.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from pyps.core import rules
from pyps.core.arrays import Floats, aligned_zeros
from pyps.core.gradient import decoded
from pyps.core.ledger import LIVES_MAX, Ledger, LedgerState
from pyps.core.rule_settings import RuleSettings
from pyps.core.shard import LoggedShard, Shard
from pyps.core.store import ShardState
from pyps.core.table import TableBudget, make_table
from pyps.core.vectors.machine import VectorMachine
from pyps.run.content import ReadyContent, listed
from pyps.run.handshake import Opening
from pyps.run.rounds import RoundController
from pyps.run_header import RunHeader
from pyps_wire.codecs import Codec
from pyps_wire.errors import InvalidArgument, Superseded, WrongSize
from pyps_wire.partition import Partition, ShardRange, first_difference

# Lives whose receipts a shard remembers, for each worker that may be alive.
LIVES_PER_WORKER = 4


class Initialization:
    """Collects this server's shards from one initialiser; all calls of its processes share it.

    Several threads may call `add`; the run's lock guards the rest.
    """

    def __init__(self, opening: Opening, settings: RuleSettings):
        self.opening = opening
        self.partition = opening.partition
        self.settings = settings
        self._expected = {shard.shard_id: shard for shard in self.partition.of_server(opening.server_index)}
        # Whole shards only. Two calls never add one shard with different numbers.
        self._received: dict[int, Floats] = {}
        self._taken = False
        self._abandoned = False

    @property
    def num_bytes(self) -> int:
        """The size of the shards received so far."""
        return sum(values.nbytes for values in list(self._received.values()))

    def abandon(self) -> None:
        """Drop all shards, so that there is memory for another initialisation."""
        self._abandoned, self._received = True, {}

    def join(self, opening: Opening, settings: RuleSettings) -> None:
        """Add a process of the same replica; InvalidArgument where its model, slices or optimizer differ."""
        mine, theirs = f"replica {opening.replica!r} so far", f"process {opening.worker_id!r}"
        difference = first_difference(self.partition.model, opening.partition.model, mine_name=mine, theirs_name=theirs)
        if difference is None and self.partition != opening.partition:
            difference = f"the shards of {mine} have other lengths, or other servers, than those of {theirs}"
        if difference is None and self.settings != settings:
            difference = f"the optimizer is {self.settings} in {mine}, but {settings} in {theirs}"
        if difference is not None:
            raise InvalidArgument(f"the processes of a replica initialise one model: {difference}")

    def length(self, shard_id: int) -> int:
        """Return how many parameters a shard of this server has, 0 for a shard of another."""
        shard = self._expected.get(shard_id)
        return shard.length if shard else 0

    def add(self, shard_id: int, codec: Codec, payload: memoryview) -> None:
        """Decode and keep one shard's parameters; a shard sent again replaces the first."""
        shard = self._expected.get(shard_id)
        if shard is None or shard.group in self.partition.model.tables:
            raise InvalidArgument(
                f"shard {shard_id} does not belong on server {self.opening.server_index}, which holds "
                f"{listed(self._expected)}"
            )
        try:
            values, index = decoded(payload, codec, count=shard.length)
        except WrongSize as error:
            raise WrongSize(f"shard {shard_id}: {error}") from None
        if index >= 0:
            raise InvalidArgument(
                f"the first parameters hold NaN or infinity, in {self._tensor_at(shard_id, index)}: "
                "initialise the model with finite numbers"
            )
        if self._abandoned:
            raise Superseded(f"worker {self.opening.name!r} has begun to initialise the run again, or another has")
        if not self._taken:
            # A call that was repeated after all shards were there changes nothing.
            self._received[shard_id] = values

    def take(self) -> dict[int, ShardState] | None:
        """Return the states of all shards, once; None while other processes of the replica have yet to send.

        Raises:
            InvalidArgument: A worker of one process left out shards, which the message names.
        """
        tables = self.partition.model.tables
        missing = [i for i, shard in self._expected.items() if i not in self._received and shard.group not in tables]
        if self._taken or (missing and self.opening.replica):
            return None
        if missing:
            raise InvalidArgument(
                f"the initialisation ended without {listed(missing)}: {len(self._received)} of "
                f"{len(self._expected)} shards came; start it again from the first message"
            )
        # A table begins without rows.
        received = {i: aligned_zeros(0) for i, shard in self._expected.items() if shard.group in tables}
        received |= self._received
        self._received, self._taken = {}, True
        return {
            shard_id: ShardState(version=0, parameters=values, slots={}, ledger=LedgerState())
            for shard_id, values in received.items()
        }

    def _tensor_at(self, shard_id: int, index: int) -> str:
        pieces = self.partition.pieces(shard_id)
        piece = next(p for p in pieces if p.shard_offset <= index < p.shard_offset + p.length)
        tensor = self.partition.model.tensors[piece.tensor_index]
        return f"tensor {tensor.name!r} at flat index {piece.tensor_offset + index - piece.shard_offset}"


def make_content(
    run: Opening | RunHeader,
    settings: RuleSettings,
    states: dict[int, ShardState],
    *,
    rounds: RoundController,
    epoch: int,
    now: float,
    origin: str,
) -> ReadyContent:
    """Make this server's shards of the run, which own the arrays of `states` then."""
    first_crcs = {shard_id: crc32(state.parameters.data) for shard_id, state in states.items()}
    config, recorder = rounds.config, rounds.recorder
    lives_max = max(LIVES_MAX, LIVES_PER_WORKER * config.max_workers)
    options: dict[str, Any] = {"budget": rounds.pending, "behaviour": rounds.behaviour, "epoch": epoch}
    options |= {} if recorder is None else {"recorder": recorder}
    shards = {}
    for place in run.partition.of_server(run.server_index):
        # A model is never held twice.
        state = states.pop(place.shard_id)
        shards[place.shard_id] = make_shard(
            *(run.partition, place, state, settings), lives_max=lives_max, tables=rounds.tables, **options
        )
    return ReadyContent(
        run_id=run.run_id,
        epoch=epoch,
        settings=settings,
        server_index=run.server_index,
        partition=run.partition,
        shards=shards,
        machine=VectorMachine(
            {shard_id: shard for shard_id, shard in shards.items() if not shard.has_rows},
            bytes_max=config.max_vector_bytes,
            logged=recorder is not None,
        ),
        ready_at=now,
        initializer=run.claim if isinstance(run, Opening) else None,
        origin=origin,
        first_crcs=first_crcs,
    )


def make_shard(
    partition: Partition,
    place: ShardRange,
    state: ShardState,
    settings: RuleSettings,
    *,
    lives_max: int | None = None,
    tables: TableBudget | None = None,
    **options: Any,
) -> Shard:
    """Make the shard of that place, which owns the state's arrays then."""
    options |= {
        "version": state.version,
        "ledger": Ledger(state.ledger, lives_max=lives_max),
        "pending": state.pending,
        "examples": state.examples,
        "learning_rate": state.learning_rate,
        "momentum": state.momentum,
    }
    if (table := partition.model.tables.get(place.group)) is not None:
        options |= {"rows": state.rows, "tables": tables}
        return make_table(place.shard_id, table.name, table.shape, table.table, offset=place.offset, **options)
    return (LoggedShard if "recorder" in options else Shard)(
        place.shard_id,
        state.parameters,
        rule=rules.find(settings.rule),
        hyperparameters=settings.groups[place.group],
        kind=settings.kind(place.group),
        slots=state.slots or None,
        take_over=True,
        **options,
    )
