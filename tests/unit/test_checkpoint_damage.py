"""Checkpoints that were damaged, or whose writing was cut short: complete or ignored (ARCHITECTURE.md)."""

import contextlib
import itertools
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from pyps.core.shard import Shard
from pyps.run_header import Snapshot
from pyps.storage.checkpoint import Checkpoint, CheckpointDamaged, CheckpointError, files_of
from pyps.storage.disk import Disk
from pyps.storage.folder import CheckpointFolder
from shards import HEADER, adagrad_shards, checkpoint_folder, push, restored_run, write_checkpoint

folder = checkpoint_folder


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def moved_shards() -> dict[int, Shard]:
    shards = adagrad_shards()
    for shard in shards.values():
        push(shard, np.ones(16), sequence=9, epoch=3)
    return shards


def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path, caplog):
    names = ["checkpoint-00000002.json", "shards/shard-000001.epoch-3.version-4.00000002"]
    for name, damage in itertools.product(names, [flip, truncate, Path.unlink]):
        folder = CheckpointFolder(tmp_path / f"{name.partition('/')[0]} {damage.__name__}")
        older, newer = write_checkpoint(folder), write_checkpoint(folder, moved_shards())
        damage(folder.path / name)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert folder.resume() is not None
        assert folder.newest == older
        ignored = [record for record in caplog.records if record.message == "checkpoint ignored"]
        if damage is not Path.unlink or name.startswith("shards"):
            assert [record.fields["path"] for record in ignored] == [newer]  # type: ignore[attr-defined]
            assert "the run goes back to an older checkpoint" in caplog.text
            assert name in str(ignored[0].fields["reason"])  # type: ignore[attr-defined]
        folder.close()


def test_when_all_are_damaged_the_server_does_not_start_anew_silently(folder):
    truncate(write_checkpoint(folder))
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints in .* can be used"):
        folder.resume()


class FixedNames(Disk):
    """A disk on which nothing gets a name with that prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def rename(self, old: Path, new: Path) -> None:
        if new.name.startswith(self._prefix):
            raise OSError(30, os.strerror(30))
        super().rename(old, new)


def test_a_checkpoint_that_cannot_be_set_aside_is_named(folder):
    path = write_checkpoint(folder)
    # The newest is the last to go: a process that ends midway has either forgotten the run or not.
    write_checkpoint(folder)
    run = restored_run(folder)
    folder.close()
    stuck = CheckpointFolder(folder.path, disk=FixedNames("forgotten"))
    with pytest.raises(CheckpointError, match=f"run 'run-1' is forgotten, but its checkpoint {path} could not"):
        stuck.forget("run-1", reset=run.reset)
    stuck.close()


class Unremovable(Disk):
    def remove(self, path: Path) -> None:
        if path.name.startswith("checkpoint"):
            raise OSError(30, os.strerror(30))
        super().remove(path)


def test_a_stuck_old_checkpoint_is_no_failure_of_the_new(tmp_path, caplog):
    folder = CheckpointFolder(tmp_path / "server-0", keep=1, disk=Unremovable())
    write_checkpoint(folder)
    newest = write_checkpoint(folder)
    assert folder.newest == newest and Checkpoint(newest).load()
    assert "an old checkpoint could not be removed" in caplog.text
    folder.close()


def put(path: Path, *keys: str | int, value: object) -> None:
    """Change what a manifest says, or take it away where the value is `...`, under a right checksum."""
    manifest = json.loads(path.read_text(encoding="utf-8"))
    del manifest["checksum"]
    place = manifest
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    if value is ...:
        del place[keys[-1]]
    checksum = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    path.write_text(json.dumps({**manifest, "checksum": f"{checksum:08x}"}), encoding="utf-8")


ABSURD: list[object] = [..., None, -1, 10**30, float("nan"), "\0", [], {}]


def keys_in(plain: Any) -> Iterator[tuple[str | int, ...]]:
    """Yield the way to each value in what was read from JSON, of lists to the first two."""
    for key in plain if isinstance(plain, dict) else range(min(len(plain), 2)) if isinstance(plain, list) else ():
        yield (key,)
        yield from ((key, *more) for more in keys_in(plain[key]))


def test_a_manifest_that_says_what_cannot_be_is_damaged_and_an_older_one_is_read(folder):
    older = write_checkpoint(folder)
    newer = folder.save(lambda: Snapshot(HEADER, moved_shards(), positions={"w": (None, 1, ((1, b"x"),))})).path
    written = newer.read_bytes()
    accepted = set()
    for keys, value in itertools.product(keys_in(json.loads(written)), ABSURD):
        if keys != ("checksum",):
            put(newer, *keys, value=value)
            with contextlib.suppress(CheckpointDamaged):
                Checkpoint(newer).load()
                accepted.add(keys)
            newer.write_bytes(written)
    refused: list[tuple[str | int, ...]] = [("epoch",), ("server_index",), ("shards",), ("shards", 1)]
    refused += [("shards", 0, name) for name in ("file", "version", "num_bytes", "checksum")]
    refused += [("positions", name) for name in ("file", "num_bytes", "checksum")]
    assert not accepted.intersection(refused)
    manifest = json.loads(written)
    for keys, entry in {("shards", 0): manifest["shards"][0], ("positions",): manifest["positions"]}.items():
        file = newer.parent / "shards" / entry["file"]
        whole = file.read_bytes()
        for data in (b"", b"{" * 99, b"[[1]]\n", whole[:-1]):
            file.write_bytes(data)
            put(newer, *keys, value={**entry, "num_bytes": len(data), "checksum": zlib.crc32(data)})
            with pytest.raises(CheckpointDamaged, match=f"{file} cannot be understood"):
                Checkpoint(newer).load()
            newer.write_bytes(written)
        with pytest.raises(CheckpointDamaged, match=f"{file} holds other bytes"):
            Checkpoint(newer).load()
        assert folder.resume() is not None and folder.newest == older
        file.write_bytes(whole)


def test_checkpoints_of_other_formats_are_told_apart_from_damaged_ones(folder):
    path = write_checkpoint(folder)
    put(path, "format_version", value=7)
    with pytest.raises(CheckpointDamaged, match="has format version 7, this software reads 6"):
        Checkpoint(path)
    path.unlink()
    # As earlier versions named them: a server must not begin anew beside one.
    path.with_suffix("").mkdir()
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints in .* can be used"):
        folder.resume()
    with pytest.raises(CheckpointDamaged, match="format version 4 or earlier, this software reads 6"):
        Checkpoint(path.with_suffix(""))


class PowerCut(BaseException):
    """The machine, or the process, is gone before a file operation."""


def test_what_is_nested_too_deeply_is_damage_too(tmp_path):
    path = tmp_path / "checkpoint-00000001.json"
    path.write_bytes(b"[" * 200_000)
    with pytest.raises(CheckpointDamaged, match="is no JSON: maximum recursion depth"):
        Checkpoint(path)


class CutDisk(Disk):
    """A disk that fails with PowerCut before the operation after `left` more; what is not synced then may be lost.

    Files and folders are known by their inodes: they are renamed, and so are the folders that they lie in.
    """

    def __init__(self, graves: Path) -> None:
        """Removed files lie in a folder in `graves`, as they come back where their removal is lost."""
        self.left: int | None = None
        self._unwritten: set[int] = set()
        self._unnamed: list[tuple[int, int, Path | None]] = []  # Folder, entry, its name before.
        self._graves = Path(tempfile.mkdtemp(dir=graves))

    def _operate(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise PowerCut

    def create(self, path: Path) -> BinaryIO:
        self._operate()
        file = super().create(path)
        self._unwritten.add(path.stat().st_ino)
        self._unnamed.append((path.parent.stat().st_ino, path.stat().st_ino, None))
        return file

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self._operate()
        super().write(file, data)
        self._unwritten.add(os.fstat(file.fileno()).st_ino)

    def sync(self, file: BinaryIO) -> None:
        self._operate()
        super().sync(file)
        self._unwritten.discard(os.fstat(file.fileno()).st_ino)

    def make_folder(self, path: Path) -> None:
        self._operate()
        if not path.exists():
            super().make_folder(path)
            self._unnamed.append((path.parent.stat().st_ino, path.stat().st_ino, None))

    def sync_folder(self, path: Path) -> None:
        self._operate()
        super().sync_folder(path)
        self._unnamed = [change for change in self._unnamed if change[0] != path.stat().st_ino]

    def rename(self, old: Path, new: Path) -> None:
        self._operate()
        super().rename(old, new)
        self._unnamed.append((new.parent.stat().st_ino, new.stat().st_ino, old))

    def remove(self, path: Path) -> None:
        self._operate()
        if path.exists():
            grave = self._graves / f"{path.stat().st_ino}"
            path.rename(grave)
            self._unnamed.append((path.parent.stat().st_ino, grave.stat().st_ino, path))

    def lose_contents(self, root: Path) -> None:
        """Tears every file that was not synced after it was last written."""
        for path in root.rglob("*"):
            if path.stat().st_ino in self._unwritten:
                os.truncate(path, path.stat().st_size // 2)

    def lose_names(self, root: Path) -> None:
        """Undoes, the last first, what was made or renamed in a folder that was not synced since."""
        for _, entry, name_before in reversed(self._unnamed):
            paths = [*root.rglob("*"), *self._graves.iterdir()]
            for path in [path for path in paths if path.stat().st_ino == entry]:
                if name_before is not None:
                    path.rename(name_before)
                elif path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def nothing_lost(disk: CutDisk, root: Path) -> None:
    """As `kill -9` leaves it."""


def all_lost(disk: CutDisk, root: Path) -> None:
    disk.lose_contents(root)
    disk.lose_names(root)


Loss = Callable[[CutDisk, Path], None]
LOSSES: list[Loss] = [nothing_lost, CutDisk.lose_contents, CutDisk.lose_names, all_lost]


def cut_at_every_operation(
    tmp_path: Path, loss: Loss, work: Callable[[CheckpointFolder], object]
) -> Iterator[tuple[CheckpointFolder, object]]:
    """Lets `work` end at each operation in turn, in a folder with one checkpoint; gives folder and result."""
    for num_operations in itertools.count():
        disk = CutDisk(tmp_path)
        folder = CheckpointFolder(tmp_path / f"{loss.__name__} {num_operations}", keep=1, disk=disk)
        write_checkpoint(folder)
        disk.left = num_operations
        try:
            result = work(folder)
        except PowerCut:
            result = None
        folder.close()
        loss(disk, folder.path)
        again = CheckpointFolder(folder.path)
        yield again, result
        again.close()
        if result is not None:
            return


@pytest.mark.parametrize("loss", LOSSES)
def test_the_end_at_any_disk_operation_leaves_a_whole_checkpoint(tmp_path, loss):
    later = moved_shards()
    expected = {"checkpoint-00000001.json": adagrad_shards(), "checkpoint-00000002.json": later}
    names = []
    for folder, _ in cut_at_every_operation(tmp_path, loss, lambda folder: write_checkpoint(folder, later)):
        run = folder.resume()
        assert run is not None and folder.newest is not None, f"after {len(names)} operations"
        names.append(folder.newest.name)
        for shard_id, shard in expected[names[-1]].items():
            assert run.shards[shard_id].parameters.tobytes() == shard.state().parameters.tobytes()
        assert not [*folder.path.rglob(".writing*")]
        # What an older one names may be gone with it.
        paths = sorted(folder.path.glob("checkpoint-*"))
        named = set().union(*(files_of(path, Disk()) for path in paths))
        assert {path.name for path in folder.path.glob("shards/*")} <= named
        if loss is nothing_lost:
            for path in paths:
                Checkpoint(path).load()
    # The old one up to the renaming, the new one from then on.
    assert len(names) > 20
    assert names == sorted(names)
    assert (names[0], names[-1]) == tuple(expected)


def test_to_sync_is_to_hand_all_over_and_to_ask_the_system(tmp_path, monkeypatch):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fsync", lambda fd: asked.append((os.fstat(fd).st_ino, os.fstat(fd).st_size)))
    disk, path = Disk(), tmp_path / "file"
    with disk.create(path) as file:
        disk.write(file, b"number")
        disk.sync(file)
        assert asked == [(path.stat().st_ino, 6)]
    disk.sync_folder(tmp_path)
    assert asked[1][0] == tmp_path.stat().st_ino


@pytest.mark.parametrize("loss", LOSSES)
def test_an_epoch_that_a_server_served_under_is_never_claimed_again(tmp_path, loss):
    epochs = []
    for folder, first in cut_at_every_operation(tmp_path, loss, lambda folder: folder.resume()):
        run = folder.resume()
        epochs.append(run.header.epoch - (3 if first is None else first.header.epoch))  # type: ignore[attr-defined]
    assert len(epochs) > 4
    assert set(epochs[:-1]) <= {0, 1}
    assert epochs[-1] == 1


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"9" * 5000, b"-7", b"18446744073709551616", b"4\0"])
def test_under_a_damaged_epoch_file_an_epoch_is_taken_that_none_had(folder, caplog, content):
    write_checkpoint(folder)
    file = folder.path / "epoch"
    file.write_bytes(content)
    first, second = restored_run(folder), restored_run(folder)
    # As many as the seconds since 1970.
    assert 1_700_000_000 < first.content.epoch < second.content.epoch < 2**40
    reasons = [str(record.fields["reason"]) for record in caplog.records]  # type: ignore[attr-defined]
    assert len(reasons) == 1 and reasons[0].startswith(f"{file} is damaged: it holds no epoch")
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointError, match=f"{file} cannot be read: Is a directory; make it readable first"):
        folder.resume()
