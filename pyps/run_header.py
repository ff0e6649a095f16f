"""A run's header and state as values: what checkpoints and update logs keep, and a restored server continues from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pyps.core.behaviour import Behaviour, BehaviourTexts
from pyps.core.gradient import PayloadKind
from pyps.core.rule_settings import RuleSettings
from pyps.core.store import ShardState, Store
from pyps.core.vectors.machine import MachineState, VectorMachine
from pyps_wire.partition import Model, Partition, Tensor

# Where the data of each worker stood, by name, the one that pushed longest ago first: its number, its life, and the
# sequences and positions of its newest pushes.
PositionsState: TypeAlias = Mapping[str, tuple[int | None, int, tuple[tuple[int, bytes], ...]]]


@dataclass(frozen=True)
class RunHeader:
    """What a run is, apart from its shards."""

    run_id: str
    epoch: int
    server_index: int
    partition: Partition
    optimizer: RuleSettings
    # The behaviour in force, and the server's flags: a run may be changed while it goes on.
    behaviour: BehaviourTexts
    configured: BehaviourTexts

    @property
    def model(self) -> Model:
        return self.partition.model

    @property
    def num_servers(self) -> int:
        return self.partition.num_servers

    def to_json(self) -> dict[str, Any]:
        """Return the header in plain lists, dictionaries, numbers and strings."""
        groups = [dict(group) for group in self.optimizer.groups]
        return {
            "run_id": self.run_id,
            "epoch": self.epoch,
            "server_index": self.server_index,
            "model": {
                "name": self.model.name,
                "tensors": [dataclasses.asdict(tensor) for tensor in self.model.tensors],
                "shard_lengths": self.partition.lengths,
            },
            "placement": {"num_servers": self.num_servers, "servers": list(self.partition.servers)},
            "optimizer": {"rule": self.optimizer.rule, "groups": groups, "kinds": list(self.optimizer.kinds)},
            "behaviour": dict(self.behaviour),
            "configured": dict(self.configured),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> RunHeader:
        """Return the header of the plain values from `to_json`."""
        optimizer = plain["optimizer"]
        return cls(
            run_id=plain["run_id"],
            epoch=plain["epoch"],
            server_index=plain["server_index"],
            partition=Partition.of_tables(
                Model(tuple(map(_tensor_from, plain["model"]["tensors"])), name=plain["model"]["name"]),
                plain["model"]["shard_lengths"],
                **plain["placement"],
            ),
            optimizer=RuleSettings.make(
                optimizer["rule"], tuple(optimizer["groups"]), tuple(map(PayloadKind, optimizer["kinds"]))
            ),
            behaviour=Behaviour.parse(**plain["behaviour"]).texts,
            configured=Behaviour.parse(**plain["configured"]).texts,
        )


@dataclass(frozen=True)
class Snapshot:
    """The parts of a run that a checkpoint is made of; shards and machine go on changing."""

    header: RunHeader
    shards: Mapping[int, Store]
    # A coordinator's vectors and the queue of portions; None where there are none.
    machine: VectorMachine | None = None
    work: Mapping[str, Any] | None = None
    positions: PositionsState = field(default_factory=dict)


@dataclass(frozen=True)
class RestoredRun:
    """A run as read from a checkpoint, or as a standby has it, whose arrays the run that continues from it owns.

    `header.epoch` is the last one in use: serve under the next.
    """

    header: RunHeader
    shards: Mapping[int, ShardState]
    # The queue of portions, and the machine of a coordinator; None where the checkpoint holds none.
    work: Mapping[str, Any] | None = None
    machine: MachineState | None = None
    # How many workers were active, or expected, when it ended, or had ended; 0 where that is not known.
    num_workers: int = 0
    # By name, the state of each worker that the server knew, and how many the job has; None where that is not known.
    workers: tuple[Mapping[str, str], int] | None = None
    positions: PositionsState = field(default_factory=dict)
    # Whether a checkpoint holds it; none may hold what a standby has received.
    is_durable: bool = True


def _tensor_from(plain: Mapping[str, Any]) -> Tensor:
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}
    return Tensor(**values)
