"""What Sandblaster's workers and coordinator say and hear, in bytes of messages as they are sent.

Dean et al. 2012, section 4.2: a worker pulls the parameters at the start of a pass and sends gradients only every few
portions; a coordinator's messages are as small for a large model as for a small one. gRPC's own bytes are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import Message

from experiments import digits_network
from experiments.digits_network import Floats
from experiments.sandblaster_crew import Computed, Numerics, VirtualCrew
from experiments.sandblaster_servers import NUM_SERVERS, LocalServers, coordinate
from pyps.cli.coordination.link import Traffic
from pyps.cli.coordination.settings import CoordinationSettings
from pyps.lbfgs.optimizer import IterationReport
from pyps.simulation.simulation import normal
from pyps.work.portions import Portion
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire import vector_machine_pb2 as machine
from pyps_wire import work_pb2 as work
from pyps_wire.common_pb2 import CODEC_FLOAT32, OUTCOME_APPLIED, PAYLOAD_KIND_GRADIENT, ROLE_WORKER, Receipt, Sender

# One pass over the digits, with the network that is trained there.
EXAMPLES = 1437
MODEL_PARAMETERS = digits_network.NUM_PARAMETERS
WORKERS = (2, 4, 8, 20, 100)
PORTIONS_PER_WORKER = 10
# Claimed portions whose gradients are summed before they are sent: `--fold group:k=4`. By default (`--fold portion`)
# each is sent by itself, so that the result has the same bits for any number of workers.
PORTIONS_PER_STAGE = 4
# Downpour pushes and pulls with every minibatch.
BATCH_SIZE = 8
TIME_VARIATION = 0.1

# The coordinator: a bowl in so many dimensions a server; whatever else a model has plays no part, so that every number
# that it hears is the same for all sizes.
PARAMETERS = (1_000, 1_000_000)
LIVE_PARAMETERS = 500
LBFGS = CoordinationSettings(history=5, iterations=8, portions=8)
COORDINATED_WORKERS, COORDINATED_EXAMPLES = 4, 64

SENDER = Sender(run_id="run-0a1b2c3d", worker_id="worker-00", incarnation=1)


@dataclass(frozen=True)
class WorkerTraffic:
    """Bytes for each example, both ways, of all workers together."""

    workers: int
    # Pulled parameters, sums of gradients that were sent, and all messages without a vector.
    parameters: float
    gradients: float
    other: float
    # What Downpour sends and gets.
    downpour: float

    @property
    def total(self) -> float:
        """All that Sandblaster sends and gets."""
        return self.parameters + self.gradients + self.other

    @property
    def share(self) -> float:
        """Of Downpour's bytes."""
        return self.total / self.downpour


@dataclass(frozen=True)
class CoordinatorTraffic:
    """What a coordinator sent and got for one iteration."""

    parameters: int
    # From 1; the pass at the first parameters is part of the first.
    iteration: int
    # Passes over the data, each with messages of its own.
    trials: int
    messages: int
    bytes: int


# Workers.


def worker_traffic(workers: int, *, portions_per_stage: int = PORTIONS_PER_STAGE) -> WorkerTraffic:
    """Makes one pass in virtual time and adds up the messages of its workers."""
    crew = VirtualCrew([normal(1 / BATCH_SIZE, variation=TIME_VARIATION)] * workers, num_examples=EXAMPLES)
    crew.begin_pass(1, num_portions=PORTIONS_PER_WORKER * workers, portions_per_stage=portions_per_stage)
    crew.await_pass(1)
    sent = crew.messages
    other = sum(sent[kind] * sum(map(size, MESSAGES[kind])) for kind in MESSAGES)
    return WorkerTraffic(
        workers,
        parameters=sent["pull"] * sum(size(message) for message in pull_messages()) / EXAMPLES,
        gradients=sent["stage"] * sum(size(message) for message in stage_messages()) / EXAMPLES,
        other=other / EXAMPLES,
        downpour=sum(size(message) for message in exchange_messages()) / BATCH_SIZE,
    )


def size(message: Message) -> int:
    """The bytes of a message as it is sent."""
    return len(message.SerializeToString())


def pull_messages() -> list[Message]:
    """A pull from each server, and what comes."""
    asked: list[Message] = [
        wire.PullRequest(
            sender=SENDER,
            role=ROLE_WORKER,
            epoch=1,
            codec=CODEC_FLOAT32,
            wants=[wire.PullRequest.Want(shard_id=shard_id, held_version=20, min_version=0)],
        )
        for shard_id in range(NUM_SERVERS)
    ]
    answers: list[Message] = [
        wire.Parameters(shard_id=shard_id, version=21, epoch=1, codec=CODEC_FLOAT32, payload=payload)
        for shard_id, payload in enumerate(payloads())
    ]
    return asked + answers


def stage_messages() -> list[Message]:
    """A sum of gradients on its way to each server, and the answers."""
    requests: list[Message] = [
        machine.StageRequest(
            sender=SENDER,
            portion_id=100,
            stage_id=1000,
            shard_id=shard_id,
            num_shards=1,
            codec=CODEC_FLOAT32,
            payload=payload,
            **{"pass": 10},
        )
        for shard_id, payload in enumerate(payloads())
    ]
    return [*requests, *[machine.StageReply()] * NUM_SERVERS]


def exchange_messages() -> list[Message]:
    """Downpour's gradient on its way to each server, and the receipt with the new parameters."""
    requests: list[Message] = [
        wire.PushRequest(
            sender=SENDER,
            sequence=1000,
            shard_id=shard_id,
            base_version=1000,
            epoch=1,
            codec=CODEC_FLOAT32,
            kind=PAYLOAD_KIND_GRADIENT,
            example_count=BATCH_SIZE,
            minibatch_count=1,
            clock=1000,
            num_shards=1,
            reply_codec=CODEC_FLOAT32,
            held_version=1000,
            payload=payload,
        )
        for shard_id, payload in enumerate(payloads())
    ]
    replies: list[Message] = [
        wire.ExchangeReply(
            receipt=Receipt(
                shard_id=shard_id,
                sequence=1000,
                outcome=OUTCOME_APPLIED,
                version_before=1019,
                version_after=1020,
                staleness=19,
                rate=0.1,
                rate_scale=1.0,
                weight=1.0,
                num_workers=20,
                epoch=1,
            ),
            version=1020,
            epoch=1,
            codec=CODEC_FLOAT32,
            payload=payload,
        )
        for shard_id, payload in enumerate(payloads())
    ]
    return requests + replies


def payloads() -> list[bytes]:
    """One vector of the network, as each server's part of it is written."""
    return [part.tobytes() for part in np.array_split(np.ones(MODEL_PARAMETERS, np.float32), NUM_SERVERS)]


def _portion(lease_id: int) -> work.Portion:
    return work.Portion(portion_id=100, start=1000, stop=1007, lease_id=lease_id)


# A request and its answer, by what the crew calls them.
MESSAGES: dict[str, Sequence[Message]] = {
    "lease": (
        work.LeaseRequest(sender=SENDER, wait_milliseconds=5000, held=[1000, 1001]),
        work.LeaseReply(
            outcome=work.LeaseReply.OUTCOME_LEASED,
            portion=_portion(1000),
            next=_portion(0),
            portions_per_stage=PORTIONS_PER_STAGE,
            **{"pass": 10},  # type: ignore[arg-type]
        ),
    ),
    "claim": (work.ClaimRequest(sender=SENDER, lease_id=1000), work.ClaimReply(granted=True)),
    "deliver": (
        work.DeliverRequest(
            sender=SENDER,
            lease_ids=range(1000, 1000 + PORTIONS_PER_STAGE),
            stage_id=1000,
            loss_sum=1.0,
            example_count=PORTIONS_PER_STAGE * 7,
        ),
        work.DeliverReply(accepted=True),
    ),
}


# The coordinator.


def coordinator_traffic(parameters: int) -> list[CoordinatorTraffic]:
    """Lowers the bowl with a model of that size, and counts what the coordinator said in each iteration."""
    first, target, steepness = (np.zeros(parameters, np.float32) for _ in range(3))
    random = np.random.default_rng(0)
    drawn = random.standard_normal((NUM_SERVERS, 2, LIVE_PARAMETERS)).astype(np.float32)
    for server, part in enumerate(np.array_split(np.arange(parameters), NUM_SERVERS)):
        live = part[:LIVE_PARAMETERS]
        first[live], target[live] = drawn[server]
        steepness[live] = np.geomspace(0.1, 10, LIVE_PARAMETERS)

    live = np.flatnonzero(steepness)

    def compute(at: Floats, portion: Portion) -> Computed:
        # The same for every example: which of them are in a portion is all the same.
        gradient = steepness * (at - target)
        losses = 0.5 * gradient[live].astype(np.float64) * (at - target)[live]
        return Computed(gradient * np.float32(portion.num_examples), float(losses.sum()) * portion.num_examples)

    servers = LocalServers(first)
    crew = VirtualCrew(
        [normal(1.0, variation=TIME_VARIATION)] * COORDINATED_WORKERS,
        num_examples=COORDINATED_EXAMPLES,
        numerics=Numerics(servers.parameters, compute, servers.stage),
    )
    rows: list[CoordinatorTraffic] = []
    before = Traffic()

    def note(report: IterationReport, said: Traffic) -> None:
        nonlocal before
        of_iteration, before = said - before, said
        row = CoordinatorTraffic(parameters, report.iteration, report.trials, of_iteration.messages, of_iteration.bytes)
        rows.append(row)

    coordinate(servers, crew, LBFGS, on_iteration=note)
    return rows
