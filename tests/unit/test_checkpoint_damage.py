"""Checkpoints that were damaged, or whose writing was cut short: complete or ignored (ARCHITECTURE.md)."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from checkpointed import make_shards, restored_run, waiting, write
from pyps.checkpoint import Checkpoint, CheckpointDamaged, CheckpointError, CheckpointFolder, newest
from pyps.checkpoint.disk import Disk
from shards import make_shard
from support import child_environment


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[CheckpointFolder]:
    opened = CheckpointFolder(tmp_path / "server-0")
    yield opened
    opened.close()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.parametrize(
    "name", ["parameters.safetensors", "slots.safetensors", "ledger.jsonl", "pending.bin", "manifest.json"]
)
def test_a_damaged_checkpoint_is_passed_over_by_name(
    folder: CheckpointFolder, caplog: pytest.LogCaptureFixture, name: str, damage: Any
) -> None:
    shards = {0: make_shard(np.zeros(16), rule="adagrad", settings={}, pending=waiting(1.5))}
    older = write(folder, shards)
    newer = write(folder, shards)
    damage(newer / name)
    with caplog.at_level(logging.INFO):
        assert folder.resume() is not None
    assert folder.newest == older
    (ignored,) = [record for record in caplog.records if record.message == "checkpoint ignored"]
    assert ignored.fields["path"] == newer  # type: ignore[attr-defined]
    assert name in str(ignored.fields["reason"])  # type: ignore[attr-defined]


def test_every_flipped_bit_of_the_parameters_is_noticed(folder: CheckpointFolder) -> None:
    path = write(folder) / "parameters.safetensors"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        checkpoint = newest(folder.path)
        assert checkpoint is not None
        if place < len(whole) - 128:
            # In the header some bits mean nothing (the free text in it): then the values must be right.
            try:
                values = dict(checkpoint.parameters())
            except CheckpointDamaged:
                continue
            assert (values[1] == make_shards()[1].state().parameters).all()
        else:
            with pytest.raises(CheckpointDamaged, match=r"parameters\.safetensors"):
                dict(checkpoint.parameters())


def test_when_all_are_damaged_the_server_does_not_start_anew_silently(folder: CheckpointFolder) -> None:
    truncate(write(folder) / "manifest.json")
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints in .* can be used"):
        folder.resume()


class FixedNames(Disk):
    """A disk that renames nothing."""

    def rename(self, old: Path, new: Path) -> None:
        raise OSError(30, os.strerror(30))


def test_a_checkpoint_that_cannot_be_set_aside_is_named(folder: CheckpointFolder) -> None:
    path = write(folder)
    run = restored_run(folder)
    folder.close()
    stuck = CheckpointFolder(folder.path, disk=FixedNames())
    with pytest.raises(CheckpointError, match=f"run 'run-1' is forgotten, but its checkpoint {path} could not"):
        stuck.forget(run, "run-1")
    stuck.close()


def test_a_checkpoint_of_a_later_format_is_told_apart_from_a_damaged_one(folder: CheckpointFolder) -> None:
    path = write(folder) / "manifest.json"
    manifest = {**json.loads(path.read_text()), "format_version": 3}
    del manifest["checksum"]
    checksum = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    path.write_text(json.dumps({**manifest, "checksum": f"{checksum:08x}"}))
    with pytest.raises(CheckpointDamaged, match="has format version 3, this software reads 2"):
        Checkpoint(path.parent)


class FullDisk(Disk):
    """A disk with room for so many bytes."""

    def __init__(self, num_bytes: int):
        self.left = num_bytes

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self.left -= len(data)
        if self.left < 0:
            raise OSError(28, os.strerror(28))
        super().write(file, data)


@pytest.mark.parametrize("room", [0, 100, 700, 1500, 3000])
def test_a_full_disk_leaves_the_older_checkpoint_and_no_rubbish(tmp_path: Path, room: int) -> None:
    with_room = CheckpointFolder(tmp_path)
    first = write(with_room)
    with_room.close()
    disk = FullDisk(room)
    folder = CheckpointFolder(tmp_path, disk=disk)
    with pytest.raises(CheckpointError, match="checkpoint-00000002 could not be written: No space left on device"):
        write(folder)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [first.name]
    disk.left = 10**9
    assert write(folder).name == "checkpoint-00000002"
    folder.close()


# Runs in a process of its own: forks a child for each number of disk operations after which it is killed.
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from checkpointed import HEADER, make_shards
from unit.test_checkpoint_damage import KillingDisk
from pyps.checkpoint import Checkpoint, CheckpointFolder

for operations in range(1000):
    folder = Path(sys.argv[1]) / str(operations)
    child = os.fork()
    if child == 0:
        disk = KillingDisk(None)
        opened = CheckpointFolder(folder, keep=1, disk=disk)
        opened.write(HEADER, make_shards())
        disk.left = operations
        opened.write(HEADER, make_shards())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(operations, "killed" if os.WIFSIGNALED(status) else "done", flush=True)
    if not os.WIFSIGNALED(status):
        sys.exit(os.waitstatus_to_exitcode(status))
"""


class KillingDisk(Disk):
    """A disk that ends the process, as `kill -9` does, before the operation after `left` more of them."""

    def __init__(self, left: int | None):
        self.left = left

    def _operate(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def create(self, path: Path) -> BinaryIO:
        self._operate()
        return super().create(path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self._operate()
        super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        self._operate()
        super().sync(file)

    def make_folder(self, path: Path) -> None:
        self._operate()
        super().make_folder(path)

    def sync_folder(self, path: Path) -> None:
        self._operate()
        super().sync_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self._operate()
        super().rename(old, new)

    def remove_folder(self, path: Path) -> None:
        self._operate()
        super().remove_folder(path)


def test_kill_9_at_every_disk_operation_leaves_a_usable_checkpoint(tmp_path: Path) -> None:
    script = KILLED.format(tests=str(Path(__file__).parent.parent))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    *killed, finished = done.stdout.splitlines()
    assert len(killed) > 20
    assert finished.endswith("done")
    expected = {shard_id: shard.state() for shard_id, shard in make_shards().items()}
    names = []
    for operations in range(len(killed) + 1):
        folder = CheckpointFolder(tmp_path / str(operations))
        run = folder.resume()
        assert run is not None
        assert {i: s.parameters.tobytes() for i, s in run.shards.items()} == {
            i: s.parameters.tobytes() for i, s in expected.items()
        }
        assert folder.newest is not None
        names.append(folder.newest.name)
        assert not [path for path in folder.path.iterdir() if path.name.startswith((".writing", ".old"))]
        folder.close()
    # The old one up to the renaming, the new one from then on.
    assert names == sorted(names)
    assert (names[0], names[-1]) == ("checkpoint-00000001", "checkpoint-00000002")
