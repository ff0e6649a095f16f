"""Checkpoints that cannot be written, or take long: one error, and the run goes on."""

import os
import resource
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pyps.storage.checkpoint import Checkpoint, CheckpointError
from pyps.storage.disk import Disk
from pyps.storage.folder import CheckpointFolder
from pyps_wire import inspector_pb2 as pb
from pyps_wire.contract import INSPECTOR, stub_of
from pyps_wire.partition import Model, Tensor
from support import (
    DEADLINE_SECONDS,
    connected,
    events_of,
    inspect,
    status_of,
    wait_for_event,
    wait_until,
)
from wire_worker import WireWorker

BIG = Model((Tensor("t", (120_000,)),))


def test_a_disk_without_room_is_one_error_and_the_run_goes_on(start_server_process, tmp_path):
    """To the process a file that may not grow is a full disk."""
    folder = tmp_path / "disk"
    server = start_server_process("--checkpoint-dir", str(folder))
    with WireWorker(server.data, model=BIG) as worker:
        worker.join()
        # That of the new run, which could follow the next.
        wait_until(lambda: inspect(server.control, "GetStatus").checkpoint, what="the first checkpoint")
        worker.push(worker.push_request(1.0))
        first = inspect(server.control, "SaveCheckpoint").path
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        # What has not moved is not written again.
        worker.push(worker.push_request(1.0, base_version=1))
        with pytest.raises(grpc.RpcError) as refused:
            inspect(server.control, "SaveCheckpoint")
        assert f"no checkpoint could be written in {folder}" in refused.value.details()
        assert f"{first} stays the newest" in refused.value.details()
        status = inspect(server.control, "GetStatus")
        assert status.checkpoint_failure == refused.value.details()
        assert (status.durable_version, status.version_min) == (1, 2)
        # The run is none the worse, the older checkpoint whole, and nothing half-written lies about.
        receipt = worker.push(worker.push_request(1.0, base_version=2))[0]
        assert (receipt.version_after, receipt.durable_version) == (3, 1)
        assert str(max(folder.glob("checkpoint-*"))) == first
        assert not [*folder.rglob(".writing*")]
        assert Checkpoint(Path(first)).load().shards[0].version == 1
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        second = inspect(server.control, "SaveCheckpoint").path
        assert Checkpoint(Path(second)).load().shards[0].version == 3
        assert inspect(server.control, "GetStatus").checkpoint_failure == ""
        told = events_of(server, "checkpoint")
        assert len(told) == 2 and "checkpoints can be written again" in told[1]
        # The failure itself may be the reason of an end.
        assert told[0] == f"{refused.value.details()}; the run goes on"
    assert server.terminate() == 0
    assert "Traceback" not in server.output()


def test_a_server_outlives_its_folder_and_uses_it_once_it_is_back(start_server, tmp_path):
    folder = tmp_path / "checkpoints"
    server = start_server("--checkpoint-dir", str(folder), "--checkpoint-seconds", "0.1")
    with WireWorker(server.data) as worker:
        worker.join()
        wait_until(lambda: status_of(server).checkpoint, what="the first checkpoint")
        folder.rename(tmp_path / "away")
        wait_until(lambda: "the folder is gone, make it" in status_of(server).checkpoint_failure, what="the failure")
        assert worker.push(worker.push_request(1.0))[0].version_after == 1
        folder.mkdir()
        wait_for_event(server, "checkpoint", "checkpoints can be written again")
        with pytest.raises(CheckpointError, match="in use by"):
            CheckpointFolder(folder)
    assert len(events_of(server, "checkpoint")) == 2, "an outage is told once"


class SlowDisk:
    """A disk that takes nothing until it is told to."""

    def __init__(self) -> None:
        self.asked, self.goes_on = threading.Event(), threading.Event()

    def sync(self, disk: Disk, file: object) -> None:
        self.asked.set()
        assert self.goes_on.wait(DEADLINE_SECONDS), "the test never let the disk go on"


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk()
    monkeypatch.setattr(Disk, "sync", lambda *arguments: disk.sync(*arguments))
    yield disk
    disk.goes_on.set()


def test_leases_end_while_a_checkpoint_is_written(start_server, tmp_path, slow_disk):
    often = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-seconds", "0.1")
    server = start_server(*often, "--lease-seconds", "1", "--heartbeat-seconds", "0.3")
    with WireWorker(server.data) as worker:
        worker.join()
        assert slow_disk.asked.wait(DEADLINE_SECONDS)
        wait_for_event(server, "expired")
        slow_disk.goes_on.set()


def test_waits_for_a_checkpoint_block_no_answer(start_server, tmp_path, slow_disk):
    server = start_server("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-seconds", "1000")
    with WireWorker(server.data) as worker, connected(server.control) as channel:
        worker.join()
        saves = [stub_of(INSPECTOR, channel).SaveCheckpoint.future(pb.SaveCheckpointRequest()) for _ in range(12)]
        assert slow_disk.asked.wait(DEADLINE_SECONDS)
        for method in ("GetStatus", "GetMemory", "ListEvents", "ListShards", "ListWorkers"):
            inspect(server.control, method)
        assert not any(save.done() for save in saves)
        slow_disk.goes_on.set()
        assert len({save.result(DEADLINE_SECONDS).path for save in saves}) == 12


def test_the_end_is_bounded(start_server, tmp_path, slow_disk, monkeypatch):
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    server = start_server("--checkpoint-dir", str(tmp_path / "checkpoints"), "--drain-seconds", "0.5")
    with WireWorker(server.data) as worker:
        worker.join()
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    wait_until(lambda: statuses == [1], what="the end")
    assert "the end took too long" in server.output()
    slow_disk.goes_on.set()
    stopping.join(DEADLINE_SECONDS)


def test_a_model_and_its_logs_are_their_owner_s_alone(start_server, tmp_path):
    told = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--update-log", str(tmp_path / "log"))
    server = start_server(*told, "--log-gradients")
    with WireWorker(server.data) as worker:
        worker.join()
        inspect(server.control, "SaveCheckpoint")
    paths = [path for name in ("checkpoints", "log") for path in (tmp_path / name, *(tmp_path / name).rglob("*"))]
    assert len(paths) > 8
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_lock_of_a_folder_follows_no_link(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "checkpoints"
    victim.write_text("precious", encoding="utf-8")
    folder.mkdir()
    (folder / ".lock").symlink_to(victim)
    with pytest.raises(CheckpointError, match="cannot be used"):
        CheckpointFolder(folder)
    assert victim.read_text(encoding="utf-8") == "precious"
