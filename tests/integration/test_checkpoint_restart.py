"""Servers that end and come back: nothing acknowledged is lost, nothing is applied twice, every bit is the same."""

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pyps.storage.checkpoint import Checkpoint
from pyps_wire import common_pb2 as common
from pyps_wire import inspector_pb2 as pb
from pyps_wire import parameter_server_pb2 as wire
from pyps_wire.errors import PypsError
from pyps_wire.partition import Model, Tensor
from support import ServerThread, Start, checksums, inspect, wait_until
from wire_worker import WireWorker, values_of

MODEL = Model((Tensor("first", (40, 60)), Tensor("last", (500,))), shard_size=512)
ADAGRAD = common.OptimizerSettings(
    rule="adagrad", groups=[common.GroupSettings(hyperparameters={"learning_rate": 0.1, "eps": 1e-8})]
)
NUM_SERVERS = 2


class Crew:
    """One worker of two servers, as the wire sees it: a WireWorker for each, one name, one count of pushes."""

    def __init__(self, servers: list[ServerThread], *, first_sequence: int = 1):
        self.workers = [
            WireWorker(server.data, model=MODEL, optimizer=ADAGRAD, server_index=i, num_servers=len(servers))
            for i, server in enumerate(servers)
        ]
        self.be(self.workers[0].sender)
        self._sequences = itertools.count(first_sequence)

    def be(self, sender: common.Sender) -> None:
        for worker in self.workers:
            worker.sender.CopyFrom(sender)

    def initialize(self) -> None:
        welcomes = [worker.hello() for worker in self.workers]
        for worker in reversed(self.workers):
            worker.initialize(welcomes[0].term, value=0.5)

    def requests(self, number: int) -> list[list[wire.PushRequest]]:
        """Pulls, and makes for each server the pushes of step `number`, which depend on what was pulled."""
        sequence = next(self._sequences)
        random = np.random.default_rng(number)
        return [
            [
                worker.push_request(
                    random.standard_normal(values_of(shard).size).astype(np.float32) + values_of(shard),
                    shard_id=shard.shard_id,
                    base_version=shard.version,
                    sequence=sequence,
                )
                for shard in worker.pull()
            ]
            for worker in self.workers
        ]

    def send(self, requests: list[list[wire.PushRequest]]) -> list[common.Receipt]:
        pushed = (worker.push(*own) for worker, own in zip(self.workers, requests, strict=True))
        return [receipt for receipts in pushed for receipt in receipts]

    def step(self, number: int) -> list[common.Receipt]:
        return self.send(self.requests(number))


@pytest.fixture
def crew_of() -> Iterator[Callable[..., Crew]]:
    crews: list[Crew] = []

    def make(servers: list[ServerThread], **options: int) -> Crew:
        crews.append(Crew(servers, **options))
        return crews[-1]

    yield make
    for worker in (worker for crew in crews for worker in crew.workers):
        worker.channel.close()


def start_all(start_server: Start, folder: Path, *flags: str) -> list[ServerThread]:
    return [start_server("--checkpoint-dir", str(folder / f"server-{i}"), *flags) for i in range(NUM_SERVERS)]


def held_by(servers: list[ServerThread]) -> list[dict[int, tuple[int, str]]]:
    return [checksums(server.control) for server in servers]


def slots_of(server: ServerThread) -> dict[int, bytes]:
    """The accumulators of each shard, from a checkpoint written now."""
    run = Checkpoint(Path(inspect(server.control, "SaveCheckpoint").path)).load()
    return {shard_id: state.slots["accumulator"].tobytes() for shard_id, state in run.shards.items()}


def test_a_resumed_run_has_the_same_bits(start_server, crew_of, tmp_path):
    unbroken_servers = start_all(start_server, tmp_path / "unbroken")
    unbroken = crew_of(unbroken_servers)
    unbroken.initialize()
    for number in range(6):
        unbroken.step(number)

    servers = start_all(start_server, tmp_path / "broken")
    before_end = crew_of(servers)
    before_end.initialize()
    for number in range(3):
        before_end.step(number)
    last = before_end.requests(3)
    receipts = before_end.send(last)
    held = held_by(servers)
    assert [server.stop() for server in servers] == [0, 0]

    servers = start_all(start_server, tmp_path / "broken", "--resume")
    assert held_by(servers) == held
    # The same life of the same worker: it lost its connection, not its memory.
    after_end = crew_of(servers, first_sequence=100)
    after_end.be(before_end.workers[0].sender)
    for worker in after_end.workers:
        reply = worker.hello()
        assert (reply.state, reply.run_id, reply.epoch) == (common.RUN_STATE_READY, "run-1", 1)
    # Exactly once: a push acknowledged before the end gets its receipt again, and is not applied again.
    for again, receipt in zip(after_end.send(last), receipts, strict=True):
        assert again.duplicate
        again.duplicate = False
        # What is durable now; then a part was at most, by the new run's first checkpoint.
        assert again.durable_version == receipt.version_after > receipt.durable_version
        again.durable_version = receipt.durable_version
        assert again == receipt
    assert held_by(servers) == held
    # A new epoch: a gradient of the old epoch is refused, the parameters must be pulled again.
    late = after_end.workers[0].push_request(1.0, shard_id=last[0][0].shard_id, base_version=4, epoch=0, sequence=99)
    assert after_end.workers[0].push(late)[0].reason == common.REASON_EPOCH

    for number in range(4, 6):
        assert {receipt.outcome for receipt in after_end.step(number)} == {common.OUTCOME_APPLIED}
    assert held_by(servers) == held_by(unbroken_servers)
    assert [slots_of(server) for server in servers] == [slots_of(server) for server in unbroken_servers]


@pytest.fixture
def trained(start_server: Start, tmp_path: Path) -> Iterator[tuple[ServerThread, Path]]:
    folder = tmp_path / "checkpoints"
    server = start_server("--checkpoint-dir", str(folder))
    with WireWorker(server.data) as worker:
        worker.join(value=5.0)
        worker.push(worker.push_request(1.0))
        yield server, folder


def test_kill_9_costs_what_came_after_the_newest_checkpoint(start_server_process, tmp_path):
    folder = tmp_path / "checkpoints"
    server = start_server_process("--checkpoint-dir", str(folder))
    with WireWorker(server.data) as worker:
        worker.join(value=5.0)
        worker.push(worker.push_request(1.0))
        saved = inspect(server.control, "SaveCheckpoint")
        assert Path(saved.path).parent == folder
        assert saved.bytes == Checkpoint(Path(saved.path)).num_bytes
        assert inspect(server.control, "GetStatus").checkpoint == saved.path
        held = checksums(server.control)
        worker.push(worker.push_request(1.0))
    refused = start_server_process("--checkpoint-dir", str(folder), "--resume", wait=False)
    assert refused.wait() == 2
    assert f"is in use by process {server.pid} on" in refused.output() and "Traceback" not in refused.output()
    server.kill()

    again = start_server_process("--checkpoint-dir", str(folder), "--resume")
    assert checksums(again.control) == held
    status = inspect(again.control, "GetStatus")
    assert (status.run_id, status.epoch, status.version_max, status.examples) == ("run-1", 1, 1, 1)
    again.kill()
    third = start_server_process("--checkpoint-dir", str(folder), "--resume")
    assert inspect(third.control, "GetStatus").epoch == 2


def test_checkpoints_are_written_in_time_and_the_oldest_removed(start_server, tmp_path):
    server = start_server(*("--checkpoint-dir", str(tmp_path), "--checkpoint-seconds", "0.3", "--checkpoint-keep", "2"))
    with WireWorker(server.data) as worker:
        worker.join()
        wait_until(lambda: "checkpoint-00000004" in server.output(), what="the fourth checkpoint")
        worker.push(worker.push_request(1.0))
    assert server.stop() == 0
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2


def checkpoints_in(folder: Path) -> list[int]:
    return [Checkpoint(path).version_max for path in sorted(folder.glob("checkpoint-*"))]


def test_a_server_that_stays_up_saves_the_end_of_its_job_once(start_server, tmp_path):
    server = start_server("--checkpoint-dir", str(tmp_path), "--checkpoint-seconds", "0.3", "--checkpoint-keep", "99")
    with WireWorker(server.data, "a") as first, WireWorker(server.data, "b") as second:
        first.join()
        second.hello()
        inspect(server.control, "SaveCheckpoint")
        first.push(first.push_request(1.0))
        first.leave()
        second.push(second.push_request(1.0))
        second.leave()
        wait_until(lambda: 2 in checkpoints_in(tmp_path), what="the checkpoint of the end")
        written = checkpoints_in(tmp_path)
        # Several periods on, the same checkpoint is the newest: there was nothing new to save.
        uptime = inspect(server.control, "GetStatus").uptime_seconds
        wait_until(lambda: inspect(server.control, "GetStatus").uptime_seconds > uptime + 1.2, what="time to pass")
        assert checkpoints_in(tmp_path) == written
        # Work that comes afterwards is another end.
        with WireWorker(server.data, "c") as third:
            third.hello()
            third.push(third.push_request(1.0, base_version=2))
            third.leave()
            wait_until(lambda: 3 in checkpoints_in(tmp_path), what="the checkpoint of the second end")


def test_a_stopped_run_is_saved_once_while_its_worker_stays(start_server, tmp_path):
    server = start_server("--checkpoint-dir", str(tmp_path))
    with WireWorker(server.data) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
        inspect(server.control, "Stop")
        # The first may have been written before the push.
        wait_until(lambda: checkpoints_in(tmp_path)[-1:] == [1], what="the checkpoint of the end")
        written = checkpoints_in(tmp_path)
        worker.leave()
        uptime = inspect(server.control, "GetStatus").uptime_seconds
        wait_until(lambda: inspect(server.control, "GetStatus").uptime_seconds > uptime + 1.0, what="time to pass")
        assert checkpoints_in(tmp_path) == written


def test_a_new_run_is_saved_at_once(start_server, tmp_path):
    server = start_server("--checkpoint-dir", str(tmp_path))
    with WireWorker(server.data) as worker:
        worker.join()
        wait_until(lambda: checkpoints_in(tmp_path) == [0], what="the first checkpoint")


def test_a_folder_of_another_run_is_refused_with_the_choice(start_server, trained):
    server, folder = trained
    assert server.stop() == 0
    for flags, words in (
        ((), ("--resume, or name another folder",)),
        (("--run-id", "other", "--resume"), ("is of run 'run-1', but this server",)),
        (
            ("--resume", "--optimizer", "sgd:learning_rate=5"),
            ("the checkpoint's optimizer differs from --optimizer", "learning_rate of group 0: 5 here, 1 there"),
        ),
    ):
        # What was refused may hold its folder until it is collected.
        copy = shutil.copytree(folder, folder.with_name(f"of {words[0]}"))
        with pytest.raises(PypsError) as refused:
            start_server("--checkpoint-dir", str(copy), *flags)
        assert all(word in str(refused.value) for word in words), (flags, refused.value)


def test_a_reset_run_stays_away_and_keeps_its_checkpoints(start_server, trained):
    server, folder = trained
    saved = [Path(inspect(server.control, "SaveCheckpoint").path).name for _ in range(2)]
    inspect(server.control, "Reset", pb.ResetRequest(run_id="run-1"))
    assert not inspect(server.control, "GetStatus").checkpoint
    left = sorted(path.name for path in folder.glob("*.json"))
    assert left[-2:] == [name.replace("checkpoint", "forgotten") for name in saved]
    assert Checkpoint(folder / left[-1]).header.run_id == "run-1"
    assert server.stop() == 0

    again = start_server("--checkpoint-dir", str(folder), "--resume")
    assert inspect(again.control, "GetStatus").state == common.RUN_STATE_EMPTY
    with WireWorker(again.data, run_id="run-2") as founder:
        founder.join()
        # Numbers go on, so that a second reset meets no name that is taken.
        assert Path(inspect(again.control, "SaveCheckpoint").path).name > saved[-1]


def in_force(server: ServerThread) -> tuple[str, str, float]:
    status = inspect(server.control, "GetStatus")
    return status.protocol, status.staleness, status.learning_rates[0].base


def test_what_was_changed_while_the_run_went_on_outlives_the_server(start_server, tmp_path):
    flags = ("--checkpoint-dir", str(tmp_path), "--staleness", "divide")
    first = start_server(*flags)
    with WireWorker(first.data) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
        changes = pb.ConfigureRequest(protocol="softsync:n=1", staleness="none", learning_rate=0.25)
        inspect(first.control, "Configure", changes)
        assert first.stop() == 0

    # As a supervisor starts it again, with the same flags, or somebody who says nothing of modes: nothing is lost.
    for again in (flags, flags[:2]):
        second = start_server(*again, "--resume")
        assert in_force(second) == ("softsync:n=1", "none", 0.25)
        assert "the run keeps its checkpoint's settings where no flag sets others" in second.output()
        assert second.stop() == 0

    third = start_server(*flags[:-1], "hinge:a=2,b=1", "--protocol", "hardsync", "--resume")
    assert in_force(third) == ("hardsync", "hinge:a=2,b=1", 0.25)
    assert "the server was started with other settings than the checkpoint's" in third.output()
