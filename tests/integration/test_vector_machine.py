"""Vectors and stages on a real server: what a coordinator and its workers call."""

import contextlib
import math
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from client_support import SGD
from pyps.core.arrays import Floats
from pyps_client import Client, Launch
from pyps_client.lbfgs.worker import Staging
from pyps_wire import common_pb2 as common
from pyps_wire import vector_machine_pb2 as wire
from pyps_wire import work_pb2 as work
from pyps_wire.contract import VECTOR_MACHINE, WORK_QUEUE, stub_of
from pyps_wire.errors import NoRoom
from pyps_wire.partition import Model, Tensor
from pyps_wire.vector_machine_pb2 import Instruction
from sandblaster import WireCoordinator, instruction
from support import DEADLINE_SECONDS, ServerThread
from wire_worker import WireWorker, refusal_of, values_of

# Five shards, the last of which is shorter.
MODEL = Model((Tensor("layer.weight", (10, 7)),), shard_size=16)
SIZE = 70


@contextlib.contextmanager
def coordinated(server: ServerThread, *, value: float = 0.0) -> Iterator[tuple[WireCoordinator, WireWorker]]:
    """A worker whose parameters all have that value, and a coordinator that has attached."""
    with WireWorker(server.data, model=MODEL) as worker:
        worker.join(value)
        coordinator = WireCoordinator(worker)
        coordinator.attach()
        yield coordinator, worker


def whole(worker: WireWorker) -> np.ndarray:
    return np.concatenate([values_of(shard) for shard in sorted(worker.observe(), key=lambda shard: shard.shard_id)])


def numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def test_a_step_of_a_search_is_made_of_instructions_and_workers_pull_it(start_server):
    g = numbers(1)
    with coordinated(start_server("--protocol", "sandblaster"), value=2.0) as (coordinator, worker):
        coordinator.execute(*(instruction("ALLOC", target=name) for name in "xgd"))
        coordinator.execute(instruction("COPY", target="x", left="parameters"), instruction("BEGIN_PASS", count=1))
        stage(worker, list(stage_messages(worker, g * 10)))

        reply = coordinator.execute(
            instruction("FOLD", target="g", stage_ids=[1], count=10),
            instruction("COMBINE", target="d", names=["g"], scalars=[-1.0]),
            instruction("DOT", left="g", right="d"),
            instruction("NORM1", left="d"),
            instruction("NORM_INF", left="d"),
            instruction("MOVE", left="x", right="d", scalar=0.5),
        )

        folded = (g * np.float32(10)).astype(np.float64) / 10
        folded = folded.astype(np.float32).astype(np.float64)
        assert list(reply.scalars) == pytest.approx(
            [-(folded @ folded), np.abs(folded).sum(), np.abs(folded).max()], rel=1e-12
        )
        assert reply.version == 1
        assert np.array_equal(whole(worker), (2.0 - 0.5 * folded).astype(np.float32))


def test_a_returning_coordinator_finds_state_and_vectors(start_server):
    with coordinated(start_server("--protocol", "sandblaster")) as (coordinator, worker):
        coordinator.execute(instruction("ALLOC", target="x"), commits=1, state='{"loss":1.5}')
        successor = WireCoordinator(worker)

        attached = successor.attach()

        assert (attached.coordinator_epoch, attached.iteration, attached.state) == (2, 1, '{"loss":1.5}')
        assert list(attached.vectors) == ["x"] and attached.num_parameters == SIZE
        assert attached.planned_bytes == SIZE * 4 * (2 + 5 + 2)
        status, name, text = refusal_of(coordinator.execute, instruction("NORM1", left="x"))
        assert (status, name) == ("ABORTED", "Superseded")
        assert text == "coordinator life 1 was replaced by life 2: end this one"


def test_a_program_that_cannot_be_executed_is_refused_in_one_sentence(start_server):
    server, many = start_server("--protocol", "sandblaster"), ["x"] * 8000
    with coordinated(server) as (coordinator, _):
        coordinator.execute(instruction("ALLOC", target="g"), instruction("ALLOC", target="x"))
        for wrong, words in (
            (instruction("DOT", left="q", right="g"), "(DOT) names the vector 'q', which does not exist"),
            (Instruction(operation=77), "instruction 2 has the operation 77; expected 1 to 12"),
            (Instruction(), "instruction 2 has the operation 0"),
            (instruction("MOVE", left="g", scalar=math.inf), "has the scalar inf"),
            (instruction("GRAM", names=many, others=many), "answers with 64000000 numbers; expected 65536 at most"),
        ):
            moved = instruction("MOVE", left="g", right="g", scalar=1.0)
            status, name, text = refusal_of(coordinator.execute, moved, wrong)
            assert (status, name) == ("INVALID_ARGUMENT", "InvalidArgument")
            assert words in text and "\n" not in text
        assert coordinator.execute(instruction("NORM1", left="g")).version == 0
    assert "Traceback" not in server.output()


def test_under_another_protocol_a_coordinator_is_told_how_to_start_servers(start_server):
    with WireWorker(start_server().data, model=MODEL) as worker:
        worker.join()

        status, name, text = refusal_of(WireCoordinator(worker).attach)

        assert (status, name) == ("INVALID_ARGUMENT", "InvalidArgument")
        assert text == (
            "the protocol in force is async, under which workers push gradients: start the servers with --protocol "
            "sandblaster for a coordinator"
        )


def test_a_coordinator_of_another_run_or_of_none_yet_is_refused(start_server):
    server = start_server("--protocol", "sandblaster")
    with WireWorker(server.data, model=MODEL) as worker:
        assert refusal_of(WireCoordinator(worker).attach)[1] == "NotInitialized"
        worker.join()
        assert refusal_of(WireCoordinator(worker, run_id="run-2").attach)[1] == "RunMismatch"


def test_a_coordinators_number_comes_from_server_0_alone(start_server):
    server = start_server("--protocol", "sandblaster")
    with WireWorker(server.data, model=MODEL, server_index=1, num_servers=2) as worker:
        worker.initialize(1)
        coordinator = WireCoordinator(worker)
        assert "attach there first" in refusal_of(coordinator.attach)[2]
        assert coordinator.attach(coordinator_epoch=5).coordinator_epoch == 5
    with coordinated(start_server("--protocol", "sandblaster")) as (coordinator, _):
        present = coordinator.attach().coordinator_epoch
        for never in (present + 1, 2**64 - 1):
            assert "no coordinator" in refusal_of(coordinator.attach, coordinator_epoch=never)[2]
        assert coordinator.attach(coordinator_epoch=present).coordinator_epoch == present
        assert coordinator.attach().coordinator_epoch == present + 1


def test_nobody_else_speaks_for_the_coordinator(start_server):
    """Its life's number is no secret; who wants another has to attach, which the one before hears."""
    server = start_server("--protocol", "sandblaster")
    with coordinated(server) as (coordinator, worker):
        coordinator.attach()
        impostor = WireCoordinator(worker)
        impostor.epoch, queue = coordinator.epoch, stub_of(WORK_QUEUE, worker.channel)
        known = {"coordinator_epoch": coordinator.epoch}
        program = coordinator.request(instruction("MOVE", left="parameters"))
        for secret in (b"", b"0" * 16, worker.sender.secret):
            impostor.sender.secret = program.sender.secret = secret
            who = {"sender": impostor.sender, **known}
            for call in (
                partial(impostor.attach, coordinator.epoch),
                partial(impostor.stub.Execute, program),
                partial(queue.BeginPass, work.BeginPassRequest(**who, **{"pass": 1, "num_portions": 1})),
                partial(queue.EndWork, work.EndWorkRequest(**who)),
            ):
                assert refusal_of(call)[1] == "NotAllowed", call
            # A life of which nobody has heard.
            who["coordinator_epoch"] = 2**40
            assert refusal_of(queue.EndWork, work.EndWorkRequest(**who))[1] == "InvalidArgument"
        assert not queue.AwaitPass(work.AwaitPassRequest(sender=coordinator.sender, **known)).progress.ended
        coordinator.execute(instruction("ALLOC", target="g"))


def test_a_stage_that_was_sent_in_part_is_refused_and_may_be_sent_again(start_server):
    with coordinated(start_server("--protocol", "sandblaster")) as (coordinator, worker):
        coordinator.execute(instruction("ALLOC", target="t"), instruction("BEGIN_PASS", count=1))
        messages = list(stage_messages(worker, numbers(1), stage_id=7))

        assert "stage 7 ended before each of its 5 shards arrived" in refusal_of(stage, worker, messages[:3])[2]
        text = refusal_of(coordinator.execute, instruction("FOLD", target="t", stage_ids=[7], count=1))[2]
        assert "names the stage 7, of which 3 of 5 shards are here in pass 1" in text
        stage(worker, messages)
        coordinator.execute(instruction("FOLD", target="t", stage_ids=[7], count=1), instruction("MOVE", left="t"))

        assert np.array_equal(whole(worker), numbers(1))


def test_what_is_no_stage_of_the_present_pass_is_refused(start_server):
    server = start_server("--protocol", "sandblaster")
    with coordinated(server) as (coordinator, worker):
        coordinator.execute(instruction("BEGIN_PASS", count=1))
        bad = numbers(1)
        bad[40] = math.nan
        mixed = [*list(stage_messages(worker, numbers(1)))[:2], *stage_messages(worker, numbers(1), stage_id=2)]

        assert refusal_of(stage, worker, list(stage_messages(worker, numbers(1), **{"pass": 2})))[2] == (
            "stage 1 is of pass 2, and pass 1 is under way here: discard it and request another portion"
        )
        status, name, text = refusal_of(stage, worker, list(stage_messages(worker, bad)))
        assert (status, name) == ("INVALID_ARGUMENT", "NotFinite")
        assert "parameter 8 of shard 2" in text
        assert "send one stage in a stream" in refusal_of(stage, worker, mixed)[2]
        assert "Stage has no message" in refusal_of(stage, worker, [])[2]
        with WireWorker(server.data, "stranger", model=MODEL) as stranger:
            assert refusal_of(stage, stranger, list(stage_messages(stranger, numbers(1))))[1] == "UnknownWorker"


def test_a_stream_of_a_worker_that_vanishes_midway_leaves_the_server_well(start_server):
    server = start_server("--protocol", "sandblaster")
    with coordinated(server) as (coordinator, worker):
        coordinator.execute(instruction("ALLOC", target="t"), instruction("BEGIN_PASS", count=1))
        begun, over = threading.Event(), threading.Event()

        def messages():
            yield next(stage_messages(worker, numbers(2), stage_id=3))
            begun.set()
            over.wait(60)

        call = coordinator.stub.Stage.future(messages(), timeout=60)
        assert begun.wait(60)
        call.cancel()
        over.set()

        stage(worker, list(stage_messages(worker, numbers(1), stage_id=4)))
        assert coordinator.execute(instruction("FOLD", target="t", stage_ids=[4], count=1)).version == 0


def test_a_worker_for_whose_stage_there_is_no_memory_hears_so_at_once(start_server):
    # For 70 parameters: 11 stages, and no vectors.
    server = start_server("--protocol", "sandblaster", "--max-vector-bytes", str(4 * SIZE * 11))
    model = {"weight": np.zeros(SIZE, np.float32)}
    with Client(model, SGD, launch=Launch(server.data, shard_size=16, run_id="run-1", loss_wait_seconds=20)) as worker:
        with grpc.insecure_channel(server.data) as channel:
            coordinator = WireCoordinator(SimpleNamespace(channel=channel))
            coordinator.attach(history_pairs=0, vectors=0, stages=2)
            coordinator.execute(instruction("BEGIN_PASS", count=1))
        staging, vectors = Staging(worker.session), [np.ones(SIZE, np.float32)]
        for portion_id in range(11):
            staging.stage(vectors, pass_number=1, portion_id=portion_id, stage_id=portion_id + 1)

        with pytest.raises(NoRoom, match=r"stage 12 of portion 11 would make .* raise --max-vector-bytes"):
            staging.stage(vectors, pass_number=1, portion_id=11, stage_id=12)


def stage_messages(worker: WireWorker, values: Floats, **fields: int) -> Iterator[wire.StageRequest]:
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
    return stub_of(VECTOR_MACHINE, worker.channel).Stage(iter(messages), timeout=DEADLINE_SECONDS)
