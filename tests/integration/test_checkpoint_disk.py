"""Checkpoints where the disk has no room: one error, and the run goes on."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from pyps.checkpoint import Checkpoint
from pyps_wire.partition import Model, Tensor
from support import ServerProcess, inspect
from wire_worker import WireWorker

Start = Callable[..., ServerProcess]


def mounted(folder: Path, size: str) -> bool:
    """Mounts a disk of that size; False where this process may not."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0


BIG = Model((Tensor("t", (120_000,)),))


def test_a_full_disk_is_one_error_and_the_run_goes_on(start_server_process: Start, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    if not mounted(folder, "1600k"):
        pytest.skip("this process may not mount a small disk")
    try:
        check_full_disk(start_server_process, folder, make_room=lambda _: (folder / "ballast").unlink())
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_file_size_limit_is_one_error_and_the_run_goes_on(start_server_process: Start, tmp_path: Path) -> None:
    def make_room(server: ServerProcess) -> None:
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    check_full_disk(start_server_process, tmp_path / "disk", make_room=make_room)


def check_full_disk(start_server_process: Start, folder: Path, *, make_room: Callable[[ServerProcess], None]) -> None:
    server = start_server_process("--checkpoint-dir", str(folder))
    with WireWorker(server.data, model=BIG) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
        first = inspect(server.control, "SaveCheckpoint").path
        if folder.is_mount():
            (folder / "ballast").write_bytes(b"x" * 1_000_000)
        else:
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        with pytest.raises(grpc.RpcError) as refused:
            inspect(server.control, "SaveCheckpoint")
        assert "checkpoint-00000002 could not be written" in refused.value.details()
        assert f"the run goes on, {first} stays the newest" in refused.value.details()
        # The run is none the worse, the older checkpoint whole, and nothing half-written lies about.
        assert worker.push(worker.push_request(1.0, base_version=1))[0].version_after == 2
        assert [path.name for path in folder.iterdir() if path.is_dir()] == ["checkpoint-00000001"]
        assert Checkpoint(Path(first)).load().shards[0].version == 1
        make_room(server)
        second = inspect(server.control, "SaveCheckpoint").path
        assert Checkpoint(Path(second)).load().shards[0].version == 2
    assert server.terminate() == 0
    assert "Traceback" not in server.output()
