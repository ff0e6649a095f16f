"""A coordinator of a few lines on the generated stubs, and a worker's stages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyps_wire import common_pb2 as common
from pyps_wire import vector_machine_pb2 as wire
from pyps_wire.vector_machine_pb2_grpc import VectorMachineStub
from wire_worker import CALL_SECONDS, Floats, WireWorker

# Room for a few vectors, a pair of history and two stages.
PLAN = {"history_pairs": 1, "vectors_float32": 4, "vectors_float64": 1, "stages": 2, "num_portions": 8}


def instruction(operation: str, **fields: object) -> wire.Instruction:
    """One instruction: instruction("DOT", left="x", right="y")."""
    names = {"precision": "PRECISION_FLOAT32"} if operation == "ALLOC" else {}
    return wire.Instruction(operation=f"OPERATION_{operation}", **{**names, **fields})


class WireCoordinator:
    """A coordinator of one server, over a worker's connection."""

    def __init__(self, worker: WireWorker, *, run_id: str = "run-1") -> None:
        self.stub = VectorMachineStub(worker.channel)
        self.sender = common.Sender(run_id=run_id)
        self.epoch = 0
        self.op_seq = 0

    def attach(self, coordinator_epoch: int = 0, **plan: int) -> wire.AttachReply:
        """Becomes the coordinator."""
        request = wire.AttachRequest(sender=self.sender, coordinator_epoch=coordinator_epoch, **{**PLAN, **plan})
        reply = self.stub.Attach(request, timeout=CALL_SECONDS)
        self.epoch, self.op_seq = reply.coordinator_epoch, 0
        return reply

    def request(self, *instructions: wire.Instruction, commits: int = 0, state: str = "") -> wire.ExecuteRequest:
        """The next program."""
        return wire.ExecuteRequest(
            sender=self.sender,
            coordinator_epoch=self.epoch,
            op_seq=self.op_seq + 1,
            instructions=instructions,
            commits_iteration=commits,
            state=state,
        )

    def execute(self, *instructions: wire.Instruction, commits: int = 0, state: str = "") -> wire.ExecuteReply:
        """Executes the next program."""
        reply = self.stub.Execute(self.request(*instructions, commits=commits, state=state), timeout=CALL_SECONDS)
        self.op_seq += 1
        return reply


def stage_messages(worker: WireWorker, values: Floats, **fields: int) -> Iterator[wire.StageRequest]:
    """A stage of these numbers, all shards end to end."""
    shards = worker.plan.of_server(worker.server_index)
    cuts = np.split(values, np.cumsum([shard.length for shard in shards])[:-1])
    for shard, part in zip(shards, cuts, strict=True):
        given = {"pass": 1, "portion_id": 0, "stage_id": 1, "num_shards": len(shards), **fields}
        yield wire.StageRequest(
            sender=worker.sender,
            shard_id=shard.shard_id,
            codec=common.CODEC_FLOAT32,
            payload=part.astype(np.float32).tobytes(),
            **given,
        )


def stage(worker: WireWorker, messages: list[wire.StageRequest]) -> wire.StageReply:
    """Sends the messages in one stream."""
    return VectorMachineStub(worker.channel).Stage(iter(messages), timeout=CALL_SECONDS)
