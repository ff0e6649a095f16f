"""What a run is called and holds, as values: what checkpoints and update logs keep, and a server goes on from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyps.core.behaviour import Behaviour, BehaviourTexts
from pyps.core.gradient import PayloadKind
from pyps.core.rule_settings import RuleSettings
from pyps.core.store import ShardState, Store
from pyps.core.vectors.machine import MachineState, VectorMachine
from pyps_wire.partition import Model, Tensor


@dataclass(frozen=True)
class RunHeader:
    """What a run is, apart from its shards."""

    run_id: str
    epoch: int
    server_index: int
    num_servers: int
    model: Model
    optimizer: RuleSettings
    # As it is in force, and as the server was told at its start: a run may be changed while it goes on.
    behaviour: BehaviourTexts
    told: BehaviourTexts

    def with_epoch(self, epoch: int) -> RunHeader:
        """Returns the same header with another epoch."""
        return dataclasses.replace(self, epoch=epoch)

    def to_json(self) -> dict[str, Any]:
        """Returns the header in plain lists, dictionaries, numbers and strings."""
        groups = [dict(group) for group in self.optimizer.groups]
        return {
            "run_id": self.run_id,
            "epoch": self.epoch,
            "server_index": self.server_index,
            "num_servers": self.num_servers,
            "model": {"shard_size": self.model.shard_size, "tensors": [_tensor_to_json(t) for t in self.model.tensors]},
            "optimizer": {"rule": self.optimizer.rule, "groups": groups, "kinds": list(self.optimizer.kinds)},
            "behaviour": dict(self.behaviour),
            "told": dict(self.told),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> RunHeader:
        """Returns the header that `to_json` gave."""
        model = plain["model"]
        tensors = tuple(_tensor_from_json(tensor) for tensor in model["tensors"])
        optimizer = plain["optimizer"]
        return cls(
            run_id=plain["run_id"],
            epoch=plain["epoch"],
            server_index=plain["server_index"],
            num_servers=plain["num_servers"],
            model=Model(tensors, model["shard_size"]),
            optimizer=RuleSettings.make(
                optimizer["rule"], tuple(optimizer["groups"]), tuple(map(PayloadKind, optimizer["kinds"]))
            ),
            behaviour=Behaviour.parse(**plain["behaviour"]).texts,
            told=Behaviour.parse(**plain["told"]).texts,
        )


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is made of: a run's head, and what it consists of, which goes on changing."""

    header: RunHeader
    shards: Mapping[int, Store]
    # A coordinator's vectors and the queue of portions; None where there are none.
    machine: VectorMachine | None = None
    work: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RestoredRun:
    """A run as read from a checkpoint. `header.epoch` is the last one in use: serve under the next.

    The run that goes on from it takes its arrays over.
    """

    header: RunHeader
    shards: Mapping[int, ShardState]
    # The queue of portions, and the machine of a coordinator; None where the checkpoint holds none.
    work: Mapping[str, Any] | None = None
    machine: MachineState | None = None


def _tensor_to_json(tensor: Tensor) -> dict[str, Any]:
    """A tensor in plain values; what is not cut has those that it had before models could be."""
    plain: dict[str, Any] = {"name": tensor.name, "shape": list(tensor.shape), "group": tensor.group}
    if tensor.whole_shape:
        plain |= {"whole_shape": list(tensor.whole_shape), "offset": list(tensor.offset)}
    if tensor.part:
        plain["part"] = tensor.part
    return plain


def _tensor_from_json(plain: Mapping[str, Any]) -> Tensor:
    return Tensor(
        plain["name"],
        tuple(plain["shape"]),
        plain["group"],
        whole_shape=tuple(plain.get("whole_shape", ())),
        offset=tuple(plain.get("offset", ())),
        part=plain.get("part", 0),
    )
