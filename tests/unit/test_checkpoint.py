"""Checkpoints: complete or ignored, bit for bit, whatever happens to the process or the disk (ARCHITECTURE.md)."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from safetensors.numpy import load_file

from pyps.checkpoint import Checkpoint, CheckpointDamaged, CheckpointError, CheckpointFolder, RunHeader, newest
from pyps.checkpoint.disk import Disk
from pyps.config import ServerConfig
from pyps.core.aggregation import Contribution
from pyps.core.behaviour import Behaviour
from pyps.core.gradient import Extent
from pyps.core.receipt import Outcome
from pyps.core.shard import Shard
from pyps.core.staleness import Weighing
from pyps.run import RuleSettings, Run
from pyps_wire.errors import NotInitialized, RunMismatch
from pyps_wire.partition import Model, Tensor
from shards import gradient, make_behaviour, make_shard, push, restored, roster
from support import child_environment

MODEL = Model((Tensor("weight", (4, 5)), Tensor("bias", (12,))), shard_size=16)
HEADER = RunHeader(
    run_id="run-1",
    epoch=3,
    server_index=0,
    num_servers=1,
    model=MODEL,
    optimizer=RuleSettings.make("adagrad", ({"learning_rate": 0.1},)),
    behaviour=make_behaviour("async", "divide").texts,
    told=make_behaviour("hardsync").texts,
)


def make_shards() -> dict[int, Shard]:
    """Two Adagrad shards after a few updates each."""
    settings = dict(HEADER.optimizer.groups[0])
    shards = {
        i: make_shard(np.linspace(-1, 1, 16), shard_id=i, rule="adagrad", settings=settings, epoch=3) for i in (0, 1)
    }
    for shard_id, shard in shards.items():
        for sequence in range(1, 3 + shard_id):
            push(shard, np.full(16, 0.1 * sequence), sequence=sequence, epoch=3, example_count=35)
    return shards


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[CheckpointFolder]:
    opened = CheckpointFolder(tmp_path / "server-0")
    yield opened
    opened.close()


def write(folder: CheckpointFolder, shards: Mapping[int, Shard] | None = None) -> Path:
    return folder.write(HEADER, shards or make_shards()).path


def test_a_restored_run_is_the_same_bit_for_bit(folder: CheckpointFolder) -> None:
    shards = make_shards()
    write(folder, shards)
    run = folder.resume()
    assert run is not None
    assert run.header == HEADER
    assert [state.examples for state in run.shards.values()] == [70, 105]
    for shard_id, shard in shards.items():
        before, after = shard.state(), run.shards[shard_id]
        assert after.version == before.version
        assert after.ledger == before.ledger
        assert after.learning_rate == before.learning_rate == 0.1
        assert after.parameters.tobytes() == before.parameters.tobytes()
        assert after.slots["accumulator"].tobytes() == before.slots["accumulator"].tobytes()


def test_a_restored_shard_goes_on_as_the_old_one_would(folder: CheckpointFolder) -> None:
    shards = make_shards()
    write(folder, shards)
    run = folder.resume()
    assert run is not None
    twin = restored(shards[1], run.shards[1], shard_id=1, epoch=3)
    again = push(twin, np.full(16, 0.2), sequence=2, epoch=3)
    assert again.duplicate and again.outcome is Outcome.APPLIED and again.version_after == 2
    for shard in (shards[1], twin):
        push(shard, np.full(16, 0.3), sequence=9, epoch=3)
    assert twin.state().parameters.tobytes() == shards[1].state().parameters.tobytes()


def test_gradients_that_wait_are_kept(folder: CheckpointFolder) -> None:
    shards = {
        shard_id: make_shard(np.zeros(16), shard_id=shard_id, rule="adagrad", settings={}, pending=pending)
        for shard_id, pending in enumerate((waiting(1.5), (), waiting(2.5, 3.5)))
    }
    path = write(folder, shards)
    run = folder.resume()
    assert run is not None
    assert [state.pending for state in run.shards.values()] == [waiting(1.5), (), waiting(2.5, 3.5)]
    # As bytes, beside the lines that tell of them.
    payloads = b"".join(bytes(c.gradient.payload) for c in waiting(1.5, 2.5, 3.5))
    assert (path / "pending.bin").read_bytes() == payloads


def waiting(*values: float) -> tuple[Contribution, ...]:
    """Gradients that wait for an update."""
    return tuple(
        Contribution(
            gradient([value, -2.0], extents=(Extent(2, 2),), sequence=sequence, clock=4, learning_rate=0.5, norm=7.5),
            1,
            Weighing(rate_scale=0.25),
        )
        for sequence, value in enumerate(values)
    )


def test_a_round_goes_on_where_it_was(folder: CheckpointFolder) -> None:
    workers = roster("a", "b")
    shard = make_shard(np.zeros(16), rule="adagrad", settings={}, protocol="hardsync")
    push(shard, np.ones(16), sequence=1, worker_id="b", workers=workers)
    write(folder, {0: shard})
    run = folder.resume()
    assert run is not None
    twin = restored(shard, run.shards[0])
    for either in (shard, twin):
        push(either, np.full(16, 3.0), sequence=1, workers=workers)
        assert either.version == 1
    assert twin.state().parameters.tobytes() == shard.state().parameters.tobytes()


def test_what_a_run_changed_while_it_went_on_is_kept(folder: CheckpointFolder) -> None:
    behaviour = make_behaviour("softsync:n=4", "exponential:beta=0.3333333333333333", rate_schedule="step:every=7")
    header = dataclasses.replace(HEADER, behaviour=behaviour.texts)
    shard = make_shard(np.zeros(16), rule="adagrad", settings={})
    shard.configure(learning_rate=0.1 / 3, roster=roster())
    folder.write(header, {0: shard})
    run = folder.resume()
    assert run is not None
    assert run.header == header
    assert Behaviour.parse(**run.header.behaviour) == behaviour
    assert run.shards[0].learning_rate == 0.1 / 3


def test_the_files_load_without_pyps(folder: CheckpointFolder) -> None:
    shards = make_shards()
    path = write(folder, shards)
    parameters, slots = load_file(path / "parameters.safetensors"), load_file(path / "slots.safetensors")
    assert list(parameters) == ["shard-000000", "shard-000001"]
    assert (parameters["shard-000001"] == shards[1].state().parameters).all()
    assert (slots["shard-000001.accumulator"] == shards[1].state().slots["accumulator"]).all()
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["run_id"], manifest["format_version"], manifest["epoch"]) == ("run-1", 2, 3)


def test_only_the_newest_are_kept(folder: CheckpointFolder) -> None:
    paths = [write(folder) for _ in range(5)]
    assert sorted(folder.path.glob("checkpoint-*")) == paths[2:]
    assert not list(folder.path.glob(".old-*"))
    assert folder.newest == paths[4]


def test_without_resume_a_folder_with_checkpoints_is_refused_with_the_choice(folder: CheckpointFolder) -> None:
    folder.require_empty()
    write(folder)
    with pytest.raises(CheckpointError, match=r"holds checkpoint-00000001 of run 'run-1' at version 3.*--resume, or"):
        folder.require_empty()


def test_an_empty_folder_has_nothing_to_resume(folder: CheckpointFolder) -> None:
    assert folder.resume() is None


def test_a_second_server_is_refused_by_the_name_of_the_first(folder: CheckpointFolder) -> None:
    with pytest.raises(CheckpointError, match=rf"in use by process {os.getpid()} on .*a folder of its own"):
        CheckpointFolder(folder.path)
    folder.close()
    CheckpointFolder(folder.path).close()


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be used: Not a directory"):
        CheckpointFolder(tmp_path / "file" / "inside")


def test_two_lives_of_a_server_never_serve_under_one_epoch(folder: CheckpointFolder) -> None:
    write(folder)
    epochs = []
    for _ in range(3):
        run = folder.resume()
        assert run is not None
        epochs.append(run.header.epoch)
    # The server adds one to each: 4, 5, 6, though no checkpoint was written in between.
    assert epochs == [3, 4, 5]


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


def restored_run(folder: CheckpointFolder) -> Run:
    """The server's run, as it is after --resume."""
    saved = folder.resume()
    assert saved is not None
    run = Run(ServerConfig())
    run.restore(saved)
    return run


def test_a_forgotten_run_leaves_nothing_to_resume(folder: CheckpointFolder) -> None:
    write(folder)
    write(folder)
    run = restored_run(folder)
    with pytest.raises(RunMismatch):
        folder.forget(run, "another")
    assert len(list(folder.path.glob("checkpoint-*"))) == 2
    folder.forget(run, "run-1")
    assert folder.resume() is None
    assert folder.newest is None
    folder.require_empty()
    with pytest.raises(NotInitialized):
        folder.save(run)
    assert sorted(path.name for path in folder.path.glob("f*")) == ["forgotten-00000001", "forgotten-00000002"]
    assert write(folder).name == "checkpoint-00000003"


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
from unit.test_checkpoint import HEADER, KillingDisk, make_shards
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
