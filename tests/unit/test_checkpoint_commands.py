"""`pyps checkpoint`: what the commands say of folders, and what they leave in them."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from pyps.storage.folder import CheckpointFolder, StandbyNote, newest
from shards import adagrad_shards, push, write_checkpoint
from support import shell


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job's folder with four checkpoints of its server."""
    folder = CheckpointFolder(tmp_path / "job" / "server-0", keep=9)
    shards = adagrad_shards()
    for sequence in range(4):
        write_checkpoint(folder, shards)
        push(shards[1], np.ones(16), sequence=10 + sequence, epoch=3)
    folder.close()
    return folder.path.parent


def told(*arguments: object, status: int = 0) -> str:
    return shell("checkpoint", *map(str, arguments), status=status, COLUMNS="80")


def test_list_and_verify_name_what_is_damaged(job):
    folder, _, *lines = told("list", job).splitlines()
    assert folder == f"{job / 'server-0'}: server 0 of 1 of run run-1"
    assert [line.split()[0] for line in lines] == [f"checkpoint-0000000{number}" for number in (4, 3, 2, 1)]
    assert lines[0].split()[1:5] == ["3", "2", "to", "6"]
    assert "4 checkpoints: all as written." in told("verify", job)
    (job / "server-0" / "epoch").write_bytes(b"")
    damaged = told("verify", job, status=1)
    assert f"{job}/server-0/epoch is damaged" in damaged and "4 checkpoints as written, but 1 epoch lost" in damaged
    shard = max((job / "server-0" / "shards").iterdir())
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + b"x")
    damaged = told("verify", job, status=1)
    newest = job / "server-0" / "checkpoint-00000004.json"
    assert f"{newest.name}: {shard} holds other bytes than were written" in damaged
    assert "1 of 4 checkpoints cannot" in damaged
    refused = told("export", job.parent / "m.pt", "--checkpoint", job, status=1)
    assert f"{shard} holds other bytes" in refused
    assert f"Name an older one: --checkpoint {newest.with_name('checkpoint-00000003.json')}" in refused
    shard.write_bytes(content[:-1])
    assert f"{newest.name} cannot be used: {shard} has {len(content) - 1} bytes" in told("list", job / "server-0")
    assert "there is no checkpoint in" in told("verify", job.parent, status=1)


def test_prune_keeps_the_newest_and_what_they_name(job):
    before = newest(job / "server-0").load()
    assert "server-0: 2 checkpoints removed." in told("prune", job, "--keep", "2")
    # The shard that never moved has one file.
    assert len(list((job / "server-0" / "shards").iterdir())) == 3
    assert "all as written" in told("verify", job)
    after = newest(job / "server-0").load()
    assert {i: state.parameters.tobytes() for i, state in before.shards.items()} == {
        i: state.parameters.tobytes() for i, state in after.shards.items()
    }


def test_prune_leaves_a_server_s_folder_alone(job):
    serving = CheckpointFolder(job / "server-0")
    assert "--standby-of" not in told("prune", job, "--keep", "1", status=2)
    serving.note_standby(StandbyNote("127.0.0.1:7620", "run-1", 0))
    refused = told("prune", job, "--keep", "1", status=2)
    assert "is in use by process" in refused and "follow that: --standby-of 127.0.0.1:7620" in refused
    assert len(list((job / "server-0").glob("checkpoint-*"))) == 4
    serving.close()


def test_a_converted_run_is_exported_as_before_and_what_it_set_aside_is_removed_on_request(job):
    told("export", job.parent / "before.safetensors", "--checkpoint", job)
    said = told("convert", job, "--servers", 3, "--into", job, "--shard-size", "32")
    assert said == f"{job}: run run-1 at version 6 for 3 servers, 1 shard.\n"
    told("export", job.parent / "after.safetensors", "--checkpoint", job)
    before, after = (load_file(job.parent / f"{name}.safetensors") for name in ("before", "after"))
    assert {name: values.tobytes() for name, values in before.items()} == {n: v.tobytes() for n, v in after.items()}
    assert "server-0: 0 checkpoints removed." in told("prune", job, "--keep", "1")
    told("convert", job, "--servers", 1, "--into", job)
    lines = told("prune", job, "--keep", "1", "--set-aside").splitlines()
    # Of the others nothing is left but what was set aside.
    removed = enumerate(("5 checkpoints", "1 checkpoint", "1 checkpoint"))
    assert lines == [f"{job}/server-{i}: {number} removed." for i, number in removed]
    assert len([*job.glob("server-*/shards/*")]) == 1


def test_an_export_for_torch_is_the_model_too(job, tmp_path):
    files = {
        form: tmp_path / f"m{end}" for form, end in (("safetensors", ".safetensors"), ("torch", ".pt"), ("dcp", ""))
    }
    told("export", files["safetensors"], "--checkpoint", job)
    told("export", files["torch"], "--checkpoint", job)
    told("export", files["dcp"], "--checkpoint", job, "--format", "dcp")
    expected = load_file(files["safetensors"])
    dcp_to_torch_save(files["dcp"], tmp_path / "whole")
    for file in (files["torch"], tmp_path / "whole"):
        read = torch.load(file, weights_only=True)
        assert {name: values.numpy().tobytes() for name, values in read.items()} == {
            name: values.tobytes() for name, values in expected.items()
        }
    own = {name: torch.zeros(values.shape) for name, values in expected.items()} | {"only.here": torch.ones(1)}
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.load(own, checkpoint_id=files["dcp"], planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert {name: own[name].numpy().tobytes() for name in expected} == {n: v.tobytes() for n, v in expected.items()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "m", "m.pt", "m.safetensors", "whole"]


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_an_export_to_a_full_disk_is_one_sentence_and_leaves_no_part(job, tmp_path, form):
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    # To the process a file that may not grow is a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    try:
        said = told("export", tmp_path / "file", "--checkpoint", job, "--format", form, status=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert f"{tmp_path / 'file'} cannot be written: " in said
    assert [path.name for path in tmp_path.iterdir()] == ["job"]
