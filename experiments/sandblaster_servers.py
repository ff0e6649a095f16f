"""A Sandblaster run in one process: the servers' machines for vectors, and a coordinator that sends them its messages.

Coordinator, machines and queue are those of `pyps sandblaster`; messages are written, counted and read as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TypeVar, cast

import numpy as np
from google.protobuf.message import Message

from experiments import digits_network
from experiments.sandblaster_crew import Numerics, VirtualCrew
from experiments.training import digits
from pyps.cli.coordination.coordinator import RemoteMachine, RemoteObjective, memory_plan
from pyps.cli.coordination.link import Link, Traffic
from pyps.cli.coordination.settings import CoordinationSettings
from pyps.core.arrays import Floats
from pyps.core.behaviour import Behaviour
from pyps.core.rules import RULES
from pyps.core.shard import Shard
from pyps.core.vectors.machine import Plan, VectorMachine
from pyps.core.vectors.program import Program
from pyps.core.vectors.stages import StagePart
from pyps.lbfgs.optimizer import IterationReport, Lbfgs
from pyps.service.vector_machine import instruction_from
from pyps.simulation.simulation import normal
from pyps.work.portions import Portion
from pyps_client.launch import Launch
from pyps_wire import vector_machine_pb2 as machine_pb
from pyps_wire import work_pb2 as work_pb
from pyps_wire.codecs import FLOAT32
from pyps_wire.common_pb2 import Sender

Reply = TypeVar("Reply", bound=Message)
OnIteration = Callable[[IterationReport], None]

NUM_SERVERS = 2
BYTES_MAX = 2**30
# Downpour's minibatch of 8 takes a second.
EXAMPLE_SECONDS = 1 / 8


class LocalServers:
    """Servers with one shard each, and what a coordinator asks of its link to them (`pyps.cli.coordination.link`)."""

    def __init__(self, parameters: Floats) -> None:
        behaviour = Behaviour.parse(protocol="sandblaster")
        self._shards = [
            Shard(shard_id, part, rule=RULES["sgd"], hyperparameters={"learning_rate": 1.0}, behaviour=behaviour)
            for shard_id, part in enumerate(np.array_split(parameters, NUM_SERVERS))
        ]
        self._machines = [VectorMachine({shard.shard_id: shard}, bytes_max=BYTES_MAX) for shard in self._shards]
        self.launch = Launch(servers=tuple(f"server-{index}" for index in range(NUM_SERVERS)))
        self.sender = Sender(run_id="run-0a1b2c3d", worker_id="coordinator", incarnation=1)
        self.num_servers = NUM_SERVERS
        self.traffic = Traffic()

    def parameters(self) -> Floats:
        return np.concatenate([shard.state().parameters for shard in self._shards])

    def stage(self, pass_: int, stage_id: int, portion_id: int, gradient: Floats) -> None:
        """Stage a sum of gradients, each server its part."""
        parts = np.array_split(gradient, NUM_SERVERS)
        for machine, shard, part in zip(self._machines, self._shards, parts, strict=True):
            which = {"pass_": pass_, "portion_id": portion_id, "stage_id": stage_id, "shard_id": shard.shard_id}
            assert machine.stages.add(StagePart(**which, num_shards=1, codec=FLOAT32, payload=part.tobytes()))

    def lower(self, crew: VirtualCrew, settings: CoordinationSettings, on_iteration: OnIteration) -> None:
        """Lower the crew's loss as a coordinator does."""
        self._crew = crew
        link = cast(Link, self)
        machine = RemoteMachine(link, memory_plan(settings, settings.portions, num_workers=crew.num_workers))
        # The number of parameters is in the answer to Attach, whose length therefore grows with its digits.
        self.traffic = Traffic()
        objective = RemoteObjective(link, machine, settings, num_portions=settings.portions, last_pass=0)
        Lbfgs(machine, objective, settings.lbfgs, on_iteration=on_iteration).run(machine.servers, machine.state)

    # For a coordinator.

    def note_epochs(self) -> None:
        """Servers in this process are never restored."""

    def ask_all(self, method: str, requests: Sequence[Message | None], reply: type[Reply], **_: float) -> list[Reply]:
        return [self.ask(server, method, each, reply) for server, each in enumerate(requests) if each is not None]

    def ask(self, server: int, method: str, request: Message, reply: type[Reply], **_: float) -> Reply:
        answers: dict[str, Callable[..., Message]] = {
            "Attach": self._attach,
            "Execute": self._execute,
            "BeginPass": self._begin_pass,
            "AwaitPass": self._await_pass,
        }
        read = type(request).FromString(request.SerializeToString())
        answer = reply.FromString(answers[method](self._machines[server], read).SerializeToString())
        self.traffic += Traffic.of(method, request, answer)
        return answer

    def _attach(self, machine: VectorMachine, request: machine_pb.AttachRequest) -> Message:
        plan = Plan(request.history_pairs, request.vectors, request.stages)
        return machine_pb.AttachReply(**asdict(machine.attach(plan, coordinator_epoch=request.coordinator_epoch)))

    def _execute(self, machine: VectorMachine, request: machine_pb.ExecuteRequest) -> Message:
        instructions = tuple(map(instruction_from, request.instructions))
        life = request.coordinator_epoch, request.op_seq
        results = machine.execute(Program(*life, instructions, request.commits_iteration, request.state))
        return machine_pb.ExecuteReply(scalars=results.scalars, version=results.version)

    def _begin_pass(self, _: VectorMachine, request: work_pb.BeginPassRequest) -> Message:
        self._crew.begin_pass(
            getattr(request, "pass"),
            num_portions=request.num_portions,
            copies_max=request.copies_max,
            portions_per_stage=request.portions_per_stage,
            scalars=request.scalars,
        )
        return work_pb.BeginPassReply(num_workers=self._crew.num_workers)

    def _await_pass(self, _: VectorMachine, request: work_pb.AwaitPassRequest) -> Message:
        reply = self._crew.await_pass(getattr(request, "pass"))
        reply.progress.CopyFrom(self._crew.queue.progress())
        return reply


def train_digits(
    seed: int,
    settings: CoordinationSettings,
    on_iteration: Callable[[float, Floats], None],
    *,
    workers: int,
    timing: float = 0.1,
    dies_at: Mapping[int, float] | None = None,
) -> None:
    """Train the digits; `on_iteration` gets the virtual seconds and the parameters."""
    task = digits()
    servers = LocalServers(digits_network.first_parameters(np.random.default_rng(seed)))

    def compute(parameters: Floats, portion: Portion) -> tuple[Floats, float]:
        images, labels = task.images[portion.start : portion.stop], task.labels[portion.start : portion.stop]
        gradient = digits_network.loss_gradient(parameters, images, labels) * np.float32(portion.num_examples)
        return gradient, digits_network.mean_loss(parameters, images, labels) * portion.num_examples

    crew = VirtualCrew(
        [normal(EXAMPLE_SECONDS, variation=timing)] * workers,
        num_examples=task.num_examples,
        numerics=Numerics(servers.parameters, compute, servers.stage),
        dies_at=dies_at,
        seed=seed,
    )
    servers.lower(crew, settings, lambda _: on_iteration(crew.now, servers.parameters()))
