"""Checkpoints: complete or ignored, bit for bit, whatever happens to the process or the disk (ARCHITECTURE.md)."""

import dataclasses
import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pyps.cli.export import from_checkpoints
from pyps.config import ServerConfig, resolve
from pyps.core.rule_settings import RuleSettings
from pyps.core.shard import Shard
from pyps.run.handshake import RunState
from pyps.run.positions import Positions
from pyps.run.run import Run
from pyps.run_header import Snapshot
from pyps.storage.checkpoint import Checkpoint, CheckpointDamaged, CheckpointError, files_of
from pyps.storage.disk import Disk
from pyps.storage.folder import CheckpointFolder, Saved
from pyps_wire.errors import InvalidArgument, NotInitialized, RunMismatch
from pyps_wire.partition import Model, Partition, Tensor, partition
from replicas import CUT, vectors_of, whole_tensors
from shards import (
    HEADER,
    adagrad_shards,
    checkpoint_folder,
    everything,
    make_behaviour,
    make_shard,
    push,
    restored,
    restored_run,
    roster,
    write_checkpoint,
)

folder = checkpoint_folder


def test_a_protocol_that_is_told_anew_brings_its_policy_and_no_other_changes_it(folder: CheckpointFolder) -> None:
    write_checkpoint(folder, header=dataclasses.replace(HEADER, configured=HEADER.behaviour))
    for given, policy in (({}, "divide"), ({"protocol": "downpour"}, "none"), ({"protocol": "softsync:n=2"}, "divide")):
        run = restored_run(folder, resolve(given, {}, warn=print))
        assert run.rounds.behaviour.staleness.text == policy, given


def test_a_run_goes_on_with_the_momentum_that_it_had(folder: CheckpointFolder) -> None:
    settings = RuleSettings.make("adam", ({},))
    shards = {i: make_shard(np.zeros(16), shard_id=i, rule="adam", epoch=3) for i in (0, 1)}
    push(shards[1], np.ones(16), epoch=3, momentum=0.5)
    write_checkpoint(folder, shards, header=dataclasses.replace(HEADER, optimizer=settings))
    assert [shard.hyperparameters["beta1"] for shard in restored_run(folder).content.shards.values()] == [0.9, 0.5]


def test_examples_of_gradients_that_wait_count_with_the_update_that_takes_them(folder: CheckpointFolder) -> None:
    shards = {i: make_shard(np.zeros(16), shard_id=i, protocol="hardsync", epoch=3) for i in (0, 1)}
    push(shards[0], np.ones(16), epoch=3, example_count=64, workers=roster("a", "b"))
    hardsync = make_behaviour("hardsync").texts
    sgd = RuleSettings.make("sgd", ({"learning_rate": 1.0},))
    write_checkpoint(folder, shards, header=replace(HEADER, optimizer=sgd, behaviour=hardsync, configured=hardsync))
    for protocol, examples, state in (("hardsync", 0, RunState.READY), ("async", 64, RunState.FINISHED)):
        run = restored_run(folder, resolve({"protocol": protocol, "stop_after": "examples=64"}, {}, warn=print))
        assert (run.content.examples, run.state) == (examples, state), protocol


def test_a_run_comes_back_under_backup_workers_where_one_gradient_waits(folder: CheckpointFolder) -> None:
    for kept in ("backup:b=1", "hardsync"):
        # How many workers will return is not known: one has pushed.
        shards = {i: make_shard(np.zeros(16), shard_id=i, protocol=kept, epoch=3) for i in (0, 1)}
        push(shards[0], np.ones(16), epoch=3, workers=roster("a", "b", "c"))
        texts, sgd = make_behaviour(kept).texts, RuleSettings.make("sgd", ({"learning_rate": 1.0},))
        write_checkpoint(folder, shards, header=replace(HEADER, optimizer=sgd, behaviour=texts, configured=texts))
        run = restored_run(folder, resolve({"protocol": "backup:b=1"}, {}, warn=print))
        assert run.rounds.behaviour.aggregation.text == "backup:b=1", kept


def test_a_manifest_says_which_file_has_which_shard(folder: CheckpointFolder) -> None:
    shards = adagrad_shards()
    path = write_checkpoint(folder, shards)
    manifest = json.loads(path.read_text(encoding="utf-8"))
    assert (manifest["run_id"], manifest["format_version"], manifest["epoch"]) == ("run-1", 6, 3)
    for entry in manifest["shards"]:
        parameters = load_file(folder.path / "shards" / entry["file"])["parameters"]
        assert (parameters == shards[entry["shard_id"]].state().parameters).all()


def test_positions_are_written_as_they_are_and_only_where_they_have_moved(folder: CheckpointFolder) -> None:
    shards, positions = adagrad_shards(), Positions()

    def save(sequence: int) -> Saved:
        positions.note("worker \n", 3, 1, sequence, b"\xff\n" * 2**15)
        return folder.save(lambda: Snapshot(HEADER, shards, positions=positions.state()))

    first, second, third = save(1), save(1), save(2)
    assert (second.num_bytes, third.num_bytes // 2**10) == (0, 128)
    assert third.path.stat().st_size < first.path.stat().st_size + 100
    assert len(files_of(first.path, Disk()) & files_of(second.path, Disk())) == 3
    for saved in (first, third):
        again = Positions()
        again.restore(Checkpoint(saved.path).load().positions)
        assert len(again.state()["worker \n"][2]) == (1 if saved is first else 2)
    assert again.state() == positions.state()


CHANGES: dict[str, Callable[[Shard], object]] = {
    "a gradient": lambda shard: push(shard, np.ones(16), sequence=9, epoch=3),
    "one that waits": lambda shard: push(
        shard, np.ones(16), sequence=9, epoch=3, base_version=0, workers=roster("a", "b")
    ),
    "one that is dropped": lambda shard: push(shard, np.ones(16), sequence=9, epoch=3, base_version=0),
    "a rate": lambda shard: shard.configure(roster=roster(), learning_rate=0.125),
    "a move": lambda shard: shard.rewrite(lambda parameters: parameters.fill(3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_a_shard_that_has_moved_is_written_again(folder: CheckpointFolder, change: str) -> None:
    protocol = {"one that waits": "hardsync", "one that is dropped": "backup:b=1"}.get(change, "async")
    shards = {i: make_shard(np.zeros(16), shard_id=i, protocol=protocol, epoch=3, version=2) for i in (0, 1)}
    header = replace(HEADER, optimizer=RuleSettings.make("sgd", ({"learning_rate": 1.0},)))
    first, second = (set(files_of(write_checkpoint(folder, shards, header=header), Disk())) for _ in range(2))
    assert first == second
    shards[0].durable_version = -1
    CHANGES[change](shards[0])
    saved = folder.save(lambda: Snapshot(header, shards))
    third = set(files_of(saved.path, Disk()))
    assert [name[:12] for name in third - first] == ["shard-000000"] and len(third & first) == 1
    assert 0 < saved.num_bytes < Checkpoint(saved.path).num_bytes
    read = Checkpoint(saved.path).load()
    assert read.header == header
    for shard_id, shard in shards.items():
        again = restored(shard, read.shards[shard_id], epoch=3, shard_id=shard_id)
        assert everything(again) == everything(shard)
        assert shard.durable_version == shard.version
    # A run that begins anew is another, whatever its versions are.
    others = {i: make_shard(np.ones(16), shard_id=i, epoch=4, version=2) for i in (0, 1)}
    path = write_checkpoint(folder, others, header=replace(header, epoch=4))
    assert all((state.parameters == 1).all() for state in Checkpoint(path).load().shards.values())


def test_files_go_with_the_last_checkpoint_that_names_them(folder: CheckpointFolder) -> None:
    shards = adagrad_shards()
    paths = [write_checkpoint(folder, shards)]
    for sequence in range(10, 15):
        push(shards[1], np.ones(16), sequence=sequence, epoch=3)
        paths.append(write_checkpoint(folder, shards))
    assert sorted(folder.path.glob("checkpoint-*")) == paths[-3:]
    # One of the shard that never moved, three of the other.
    assert len([*folder.path.glob("shards/*")]) == 4
    for path in paths[-3:]:
        Checkpoint(path).load()
    # Those of a run that was forgotten stay.
    folder.forget("run-1", reset=lambda name: None)
    others = {i: make_shard(np.ones(16), shard_id=i, epoch=4) for i in (0, 1)}
    sgd = RuleSettings.make("sgd", ({"learning_rate": 1.0},))
    for _ in range(5):
        write_checkpoint(folder, others, header=replace(HEADER, epoch=4, optimizer=sgd))
    assert len([*folder.path.glob("shards/*")]) == 6
    for path in folder.path.glob("forgotten-*"):
        Checkpoint(path).load()


def test_without_resume_a_folder_with_checkpoints_is_refused_with_the_choice(folder: CheckpointFolder) -> None:
    folder.require_empty()
    assert folder.resume() is None
    write_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"holds checkpoint-00000001.json of run 'run-1' at .* 3.*--resume, or"):
        folder.require_empty()


def test_a_folder_that_cannot_be_used_is_one_clear_error_and_left_free(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be used: Not a directory"):
        CheckpointFolder(tmp_path / "file" / "inside")
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    try:
        with pytest.raises(CheckpointError, match=f"{tmp_path} cannot be used: File too large; name one with room"):
            CheckpointFolder(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    CheckpointFolder(tmp_path).close()


def test_a_run_that_trains_by_pushes_is_not_resumed_under_a_coordinator(folder: CheckpointFolder) -> None:
    write_checkpoint(folder)
    saved = folder.resume()
    assert saved is not None
    with pytest.raises(InvalidArgument, match="trains by async, and sandblaster would end each of its workers"):
        Run(ServerConfig(protocol="sandblaster")).restore(saved)


def test_two_lives_of_a_server_never_serve_under_one_epoch(folder: CheckpointFolder) -> None:
    write_checkpoint(folder)
    epochs = []
    for _ in range(3):
        run = folder.resume()
        assert run is not None
        epochs.append(run.header.epoch)
    # The server adds one to each: 4, 5, 6, though no checkpoint was written in between.
    assert epochs == [3, 4, 5]
    # Nor under that of a checkpoint whose parameters are damaged.
    shards = adagrad_shards()
    push(shards[0], np.ones(16), sequence=9, epoch=3)
    path = write_checkpoint(folder, shards, header=dataclasses.replace(HEADER, epoch=9))
    (folder.path / "shards" / min(files_of(path, Disk()))).write_bytes(b"x")
    assert restored_run(folder).content.epoch == 10


def test_a_forgotten_run_is_not_saved_again_and_another_name_forgets_nothing(folder: CheckpointFolder) -> None:
    path = write_checkpoint(folder)
    run = restored_run(folder)
    with pytest.raises(RunMismatch):
        folder.forget("another", reset=run.reset)
    assert path.exists()
    folder.forget("run-1", reset=run.reset)
    assert folder.newest is None
    with pytest.raises(NotInitialized):
        folder.save(run.snapshot)


def test_a_run_whose_checkpoints_cannot_be_listed_is_not_reset(folder: CheckpointFolder) -> None:
    """As on a volume that is away for a moment."""
    write_checkpoint(folder)
    run = restored_run(folder)
    away = folder.path.rename(folder.path.with_name("away"))
    for validate_only in (True, False):
        with pytest.raises(CheckpointError, match=f"{folder.path} cannot be listed: No such file"):
            folder.forget("run-1", reset=run.reset, validate_only=validate_only)
    assert run.is_ready
    away.rename(folder.path)
    folder.forget("run-1", reset=lambda name: run.reset(name, validate_only=True), validate_only=True)
    assert run.is_ready
    assert folder.newest is not None
    folder.forget("run-1", reset=run.reset)
    assert not run.is_ready
    assert folder.resume() is None


# Models that are split into parts, and what is written of one that is not.


PLAN = partition(CUT, num_servers=2)
CUT_HEADER = replace(HEADER, partition=PLAN, optimizer=RuleSettings.make("sgd", ({"learning_rate": 0.1},) * 2))


def shards_of_server(index: int) -> dict[int, Shard]:
    vectors = vectors_of(whole_tensors())
    return {
        shard.shard_id: make_shard(
            vectors[shard.group][shard.offset : shard.offset + shard.length], shard_id=shard.shard_id
        )
        for shard in PLAN.of_server(index)
    }


def test_all_servers_checkpoints_give_whole_tensors_or_say_what_is_missing(tmp_path: Path) -> None:
    for index in range(2):
        folder = CheckpointFolder(tmp_path / f"server-{index}")
        write_checkpoint(folder, shards_of_server(index), header=replace(CUT_HEADER, server_index=index))
    tensors = from_checkpoints([tmp_path])
    assert list(tensors) == ["up", "down", "scale"]
    for name, values in whole_tensors().items():
        np.testing.assert_array_equal(tensors[name], values)
    with pytest.raises(CheckpointError, match=r"missing here: those of server 0, with shards of part 0\."):
        from_checkpoints([tmp_path / "server-1"])


def test_a_checkpoint_of_a_model_without_one_of_its_blocks_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    lacking = replace(PLAN, model=Model(CUT.tensors[:-1]))
    path = write_checkpoint(folder, shards_of_server(0), header=replace(CUT_HEADER, partition=lacking))
    with pytest.raises(CheckpointDamaged, match=r"parts of tensor 'down' .* are missing"):
        Checkpoint(path)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        from_checkpoints([tmp_path])


def test_slices_and_placement_are_read_and_not_computed_again(tmp_path: Path) -> None:
    """As a checkpoint that was placed on other servers meanwhile: neither table is what `partition` would make."""
    model = Model((Tensor("x", (64,)),))
    tables = Partition.of_tables(model, [16, 48], servers=[1, 0], num_servers=3)
    optimizer = RuleSettings.make("sgd", ({"learning_rate": 0.1},))
    header = replace(HEADER, partition=tables, optimizer=optimizer, server_index=1)
    path = write_checkpoint(CheckpointFolder(tmp_path), {0: make_shard(np.ones(16))}, header=header)
    assert Checkpoint(path).header.partition == tables
    run = Run(ServerConfig())
    run.restore(Checkpoint(path).load())
    assert {shard_id: shard.length for shard_id, shard in run.content.shards.items()} == {0: 16}
    assert run.content.partition == tables != partition(model, num_servers=3)
