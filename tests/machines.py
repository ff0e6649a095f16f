"""Vector machines for tests: over shards of a few lengths, with a coordinator that counts its programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps.core.gradient import Codec
from pyps.core.instructions import Instruction, Operation, Precision
from pyps.core.program import Program
from pyps.core.shard import Shard
from pyps.core.stages import StagePart
from pyps.core.vector_machine import Plan, VectorMachine
from shards import make_shard, pull

BYTES_MAX = 2**20
PLAN = Plan(history_pairs=2, vectors_float32=4, vectors_float64=1, stages=2, num_portions=8)
LENGTHS = (17, 5, 33)


def make_shards(parameters: npt.ArrayLike, lengths: Sequence[int] = LENGTHS) -> dict[int, Shard]:
    """Shards 0, 2, 4, ... that hold the parameters end to end, as those of one of two servers."""
    values = np.asarray(parameters, dtype=np.float32)
    cuts = np.split(values, np.cumsum(lengths)[:-1])
    return {2 * i: make_shard(part, shard_id=2 * i, protocol="sandblaster") for i, part in enumerate(cuts)}


class Driver:
    """A coordinator of one machine, and a way to see and set whole vectors."""

    def __init__(self, machine: VectorMachine, shards: dict[int, Shard], *, attach: bool = True) -> None:
        self.machine = machine
        self.shards = shards
        self.op_seq = 0
        self.epoch = machine.attach(PLAN).coordinator_epoch if attach else 0

    def program(self, *instructions: Instruction, commits: int = 0, state: str = "") -> Program:
        """The next program of this coordinator."""
        return Program(self.epoch, self.op_seq + 1, instructions, commits, state)

    def execute(self, *instructions: Instruction, commits: int = 0, state: str = "", **how: Any) -> list[float]:
        results = self.machine.execute(self.program(*instructions, commits=commits, state=state), **how)
        self.op_seq += 1
        return list(results.scalars)

    def make(self, name: str, values: npt.ArrayLike, precision: Precision = Precision.FLOAT32) -> None:
        """Makes a vector of these values: they come as stages do, which are float32."""
        self.execute(Instruction(Operation.ALLOC, target=name, precision=precision))
        self.write(name, values)

    def write(self, name: str, values: npt.ArrayLike) -> None:
        """Folds a stage of these values into the vector; other stages are forgotten."""
        pass_ = self.machine.present_pass + 1
        self.execute(Instruction(Operation.BEGIN_PASS, count=pass_))
        self.stage(values, stage_id=1)
        self.execute(Instruction(Operation.FOLD, target=name, stage_ids=(1,), count=1))

    def stage(self, values: npt.ArrayLike, **fields: Any) -> list[bool]:
        """Stages a whole vector, shard after shard."""
        return [self.machine.stage(part) for part in self.parts(values, **fields)]

    def parts(self, values: npt.ArrayLike, **fields: Any) -> list[StagePart]:
        fields = {"pass_": self.machine.present_pass, "portion_id": 0, "stage_id": 1, **fields}
        num_shards = fields.pop("num_shards", len(self.shards))
        whole = np.asarray(values, dtype=np.float32)
        cuts = np.split(whole, np.cumsum([shard.length for shard in self.shards.values()])[:-1])
        return [
            StagePart(shard_id=shard_id, num_shards=num_shards, codec=Codec.FLOAT32, payload=values.tobytes(), **fields)
            for shard_id, values in zip(self.shards, cuts, strict=True)
        ]

    def parameters(self) -> npt.NDArray[np.float32]:
        return np.concatenate([pull(shard)[1] for shard in self.shards.values()])

    def held(self, name: str) -> npt.NDArray[Any]:
        """The numbers of a vector, which no caller could ask for."""
        return np.concatenate([vectors.arrays[name] for vectors in self.machine._vectors.values()])


def make_machine(
    parameters: npt.ArrayLike | None = None,
    lengths: Sequence[int] = LENGTHS,
    *,
    bytes_max: int = BYTES_MAX,
    attach: bool = True,
) -> Driver:
    """A machine over shards of these lengths, with a coordinator that has attached."""
    values = np.zeros(sum(lengths)) if parameters is None else parameters
    shards = make_shards(values, lengths)
    return Driver(VectorMachine(shards, bytes_max=bytes_max), shards, attach=attach)
