"""Servers that end and come back: nothing acknowledged is lost, nothing is applied twice, every bit is the same."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from pyps.storage.checkpoint import Checkpoint
from pyps_wire import common_pb2 as common
from pyps_wire import inspector_pb2 as pb
from pyps_wire.errors import PypsError
from support import ServerThread, Start, inspect, wait_until
from wire_worker import WireWorker


@pytest.fixture
def trained(start_server: Start, tmp_path: Path) -> Iterator[tuple[ServerThread, Path]]:
    folder = tmp_path / "checkpoints"
    server = start_server("--checkpoint-dir", str(folder))
    with WireWorker(server.data) as worker:
        worker.join(value=5.0)
        worker.push(worker.push_request(1.0))
        yield server, folder


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
        # At once: it may be killed.
        paths = partial(tmp_path.glob, "checkpoint-*.json")
        wait_until(
            lambda: any("softsync:n=1" in path.read_text() for path in paths()), what="a checkpoint of the changes"
        )
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
