"""A Sandblaster run in one process: the servers' machines for vectors, and a coordinator that sends them its messages.

Coordinator, machines and queue are those of `pyps sandblaster`; messages are written, counted and read as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np
from google.protobuf.message import Message

from experiments.sandblaster_crew import Stage, VirtualCrew
from pyps.cli.coordination.coordinator import RemoteMachine, RemoteObjective, memory_plan
from pyps.cli.coordination.link import Link, Traffic
from pyps.cli.coordination.settings import CoordinationSettings
from pyps.core import protocols, staleness
from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.rules import RULES
from pyps.core.shard import Shard
from pyps.core.vectors.machine import Plan, VectorMachine
from pyps.core.vectors.program import Program
from pyps.core.vectors.stages import StagePart
from pyps.lbfgs.optimizer import IterationReport, Lbfgs
from pyps.service.vector_machine import instruction_from
from pyps_client.launch import Launch
from pyps_wire import vector_machine_pb2 as machine_pb
from pyps_wire import work_pb2 as work_pb
from pyps_wire.codecs import FLOAT32
from pyps_wire.common_pb2 import Sender

Reply = TypeVar("Reply", bound=Message)

NUM_SERVERS = 2
BYTES_MAX = 2**30


class LocalServers:
    """Servers with one shard each."""

    def __init__(self, parameters: Floats, *, num_servers: int = NUM_SERVERS) -> None:
        behaviour = Behaviour(protocols.parse("sandblaster"), staleness.parse("none"))
        self._shards = [
            Shard(shard_id, part, rule=RULES["sgd"], hyperparameters={"learning_rate": 1.0}, behaviour=behaviour)
            for shard_id, part in enumerate(np.array_split(parameters, num_servers))
        ]
        self.machines = [VectorMachine({shard.shard_id: shard}, bytes_max=BYTES_MAX) for shard in self._shards]

    def parameters(self) -> Floats:
        """Returns a copy of all parameters."""
        return np.concatenate([shard.state().parameters for shard in self._shards])

    def stage(self, stage: Stage) -> None:
        """Lays a sum of gradients aside, each server its part."""
        parts = np.array_split(stage.gradient, len(self._shards))
        for machine, shard, part in zip(self.machines, self._shards, parts, strict=True):
            complete = machine.stages.add(
                StagePart(
                    pass_=stage.pass_,
                    portion_id=stage.portion_id,
                    stage_id=stage.stage_id,
                    shard_id=shard.shard_id,
                    num_shards=1,
                    codec=FLOAT32,
                    payload=part.tobytes(),
                )
            )
            assert complete


class LocalLink:
    """What a coordinator asks of its connections (`pyps.cli.coordination.link.Link`), answered on the spot."""

    def __init__(self, servers: LocalServers, crew: VirtualCrew) -> None:
        self.launch = Launch(servers=tuple(f"server-{index}" for index in range(len(servers.machines))))
        self.sender = Sender(run_id="run-0a1b2c3d", worker_id="coordinator", incarnation=1)
        self.num_servers = len(servers.machines)
        self._servers, self._crew = servers, crew
        self.traffic = Traffic()

    def note_epochs(self) -> None:
        """Servers in this process are never restored."""

    def ask_all(self, method: str, requests: Sequence[Message | None], reply: type[Reply], **_: float) -> list[Reply]:
        return [
            self.ask(server, method, request, reply) for server, request in enumerate(requests) if request is not None
        ]

    def ask(self, server: int, method: str, request: Message, reply: type[Reply], **_: float) -> Reply:
        answers: dict[str, Callable[[int, bytes], Message]] = {
            "Attach": self._attach,
            "Execute": self._execute,
            "BeginPass": self._begin_pass,
            "AwaitPass": self._await_pass,
        }
        answer = reply.FromString(answers[method](server, request.SerializeToString()).SerializeToString())
        self.traffic += Traffic.of(method, request, answer)
        return answer

    def _attach(self, server: int, message: bytes) -> Message:
        request = machine_pb.AttachRequest.FromString(message)
        plan = Plan(request.history_pairs, request.vectors, request.stages)
        attached = self._servers.machines[server].attach(plan, coordinator_epoch=request.coordinator_epoch)
        return machine_pb.AttachReply(
            coordinator_epoch=attached.coordinator_epoch,
            iteration=attached.iteration,
            state=attached.state,
            vectors=attached.vectors,
            num_parameters=attached.num_parameters,
            planned_bytes=attached.planned_bytes,
        )

    def _execute(self, server: int, message: bytes) -> Message:
        request = machine_pb.ExecuteRequest.FromString(message)
        program = Program(
            request.coordinator_epoch,
            request.op_seq,
            tuple(map(instruction_from, request.instructions)),
            request.commits_iteration,
            request.state,
        )
        results = self._servers.machines[server].execute(program)
        return machine_pb.ExecuteReply(scalars=results.scalars, version=results.version)

    def _begin_pass(self, _: int, message: bytes) -> Message:
        request = work_pb.BeginPassRequest.FromString(message)
        self._crew.begin_pass(
            getattr(request, "pass"),
            num_portions=request.num_portions,
            copies_max=request.copies_max,
            portions_per_stage=request.portions_per_stage,
            scalars=request.scalars,
        )
        return work_pb.BeginPassReply(num_workers=self._crew.num_workers)

    def _await_pass(self, _: int, message: bytes) -> Message:
        request = work_pb.AwaitPassRequest.FromString(message)
        reply = self._crew.await_pass(getattr(request, "pass"))
        reply.progress.CopyFrom(self._crew.queue.progress())
        return reply


def coordinate(
    servers: LocalServers,
    crew: VirtualCrew,
    settings: CoordinationSettings,
    *,
    on_iteration: Callable[[IterationReport, Traffic], None],
) -> None:
    """Lower the crew's loss as a coordinator does; `on_iteration` gets the traffic since it attached, too."""
    local = LocalLink(servers, crew)
    link = cast(Link, local)
    plan = memory_plan(settings, settings.portions, num_workers=crew.num_workers)
    machine = RemoteMachine(link, plan)
    # The number of parameters is in the answer to Attach, whose length therefore grows with its digits.
    attached = local.traffic
    objective = RemoteObjective(link, machine, settings, num_portions=settings.portions, last_pass=0)

    def note(report: IterationReport) -> None:
        on_iteration(report, local.traffic - attached)

    Lbfgs(machine, objective, settings.lbfgs, on_iteration=note).run(machine.servers, machine.state)
