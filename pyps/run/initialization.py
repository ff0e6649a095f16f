"""The first parameters of a run on their way in: kept apart until the last shard is there.

A worker of one process sends all of a server's shards in one call. The processes of a replica each send those of their
parts, in calls of their own, which may come at once; the server is ready when all are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyps import _kernels
from pyps.core.arrays import Floats, aligned_zeros
from pyps.core.gradient import Codec, item_bytes
from pyps.core.rule_settings import RuleSettings
from pyps_wire.errors import BadRequest, Superseded, WrongSize
from pyps_wire.partition import Model, Partition, first_difference


@dataclass(frozen=True)
class Opening:
    """What an initialiser says before it sends the first shard."""

    run_id: str
    worker_id: str
    incarnation: int
    term: int
    model: Model
    optimizer: RuleSettings | None
    server_index: int
    num_servers: int
    # The replica that the initialiser is one of several processes of; empty for a worker of one process.
    replica: str = ""

    @property
    def name(self) -> str:
        """Whom the run takes the initialiser for: its replica, or itself."""
        return self.replica or self.worker_id

    @property
    def initializer(self) -> tuple[int, str, int]:
        """Who initialises, in which term."""
        return self.term, self.name, self.incarnation


class Initialization:
    """Collects this server's shards from one initialiser, which all calls of its processes share.

    `add` may be called from several threads at once, one a call; the rest is guarded by the run's lock.
    """

    def __init__(self, opening: Opening, partition: Partition, settings: RuleSettings):
        self.opening = opening
        self.partition = partition
        self.settings = settings
        self._expected = {shard.shard_id: shard for shard in partition.of_server(opening.server_index)}
        # Whole shards only. Two calls never add one shard with different numbers.
        self._received: dict[int, Floats] = {}
        self._taken = False
        self._abandoned = False

    @property
    def num_bytes(self) -> int:
        """The size of the shards that have come."""
        return sum(values.nbytes for values in list(self._received.values()))

    def abandon(self) -> None:
        """Lets go of all shards: another has begun, and memory is for one."""
        self._abandoned, self._received = True, {}

    def join(self, opening: Opening, partition: Partition, settings: RuleSettings) -> None:
        """Lets another process of the same replica in; BadRequest where it sends another model or optimizer."""
        mine = f"replica {opening.replica!r} so far"
        difference = first_difference(
            self.partition.model, partition.model, mine_name=mine, theirs_name=f"process {opening.worker_id!r}"
        )
        if difference is None and self.settings != settings:
            difference = f"the optimizer is {self.settings} in {mine}, but {settings} in process {opening.worker_id!r}"
        if difference is not None:
            raise BadRequest(f"the processes of a replica initialise one model: {difference}")

    def add(self, shard_id: int, codec: int, payload: memoryview) -> None:
        """Takes one shard's parameters, decoded; a shard sent again replaces what was there."""
        shard = self._expected.get(shard_id)
        if shard is None:
            raise BadRequest(
                f"shard {shard_id} does not belong on server {self.opening.server_index}, which holds "
                f"{listed(self._expected)}"
            )
        if codec not in tuple(Codec):
            raise BadRequest(f"shard {shard_id} came with codec {codec}; expected float32, float16 or bfloat16")
        expected_bytes = shard.length * item_bytes(codec)
        if payload.nbytes != expected_bytes:
            raise WrongSize(
                f"the payload of shard {shard_id} is {payload.nbytes} bytes long; its {shard.length} "
                f"parameters as {Codec(codec).name.lower()} are {expected_bytes} bytes"
            )
        index = _kernels.first_non_finite(payload, codec)
        if index >= 0:
            raise BadRequest(
                f"the first parameters hold NaN or infinity, in {self._tensor_at(shard_id, index)}: "
                "initialise the model with finite numbers"
            )
        values = aligned_zeros(shard.length)
        _kernels.decode(payload, codec, values)
        if self._abandoned:
            raise Superseded(f"worker {self.opening.name!r} has begun to initialise the run anew, or another has")
        if not self._taken:
            # A call that was repeated after all shards had come changes nothing.
            self._received[shard_id] = values

    def take(self) -> dict[int, Floats] | None:
        """Hands over all shards, to the first that asks; None while other processes of the replica have yet to send.

        BadRequest names those that never came from a worker of one process.
        """
        missing = [shard_id for shard_id in self._expected if shard_id not in self._received]
        if self._taken or (missing and self.opening.replica):
            return None
        if missing:
            raise BadRequest(
                f"the initialisation ended without {listed(missing)}: {len(self._received)} of "
                f"{len(self._expected)} shards came; start it again from the first message"
            )
        received, self._received, self._taken = self._received, {}, True
        return received

    def _tensor_at(self, shard_id: int, index: int) -> str:
        pieces = self.partition.pieces(shard_id)
        piece = next(p for p in pieces if p.shard_offset <= index < p.shard_offset + p.length)
        tensor = self.partition.model.tensors[piece.tensor_index]
        return f"tensor {tensor.name!r} at flat index {piece.tensor_offset + index - piece.shard_offset}"


def listed(shard_ids: Iterable[int]) -> str:
    """Shard ids in words, few of many."""
    ids = sorted(shard_ids)
    if not ids:
        return "no shards"
    more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
    return f"shard{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids[:8]))}{more}"
