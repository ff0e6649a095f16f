"""What checkpoints and update logs keep of a model that is cut into parts, and of one that is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from checkpointed import HEADER, MODEL
from cut_model import CUT, vectors_of, whole_tensors
from logged import train
from pyps.checkpoint import CheckpointError, CheckpointFolder, RunHeader
from pyps.cli.export import from_checkpoints
from pyps.core.shard import Shard
from pyps.run import RuleSettings
from pyps.update_log import ShardLog, UpdateLog, log_paths, replay
from pyps_wire.errors import BadRequest
from pyps_wire.partition import Model, partition
from shards import make_shard

CUT_HEADER = replace(
    HEADER, model=CUT, num_servers=2, optimizer=RuleSettings.make("sgd", ({"learning_rate": 0.1},) * 2)
)
PLAN = partition(CUT, num_servers=2)


def shards_of_server(index: int) -> dict[int, Shard]:
    """A server's shards of the cut model, with the numbers of `whole_tensors`."""
    vectors = vectors_of(whole_tensors())
    return {
        shard.shard_id: make_shard(
            vectors[shard.group][shard.offset : shard.offset + shard.length], shard_id=shard.shard_id
        )
        for shard in PLAN.of_server(index)
    }


def test_a_model_that_is_not_cut_is_written_as_before_models_could_be() -> None:
    plain = HEADER.to_json()["model"]["tensors"]
    assert plain == [{"name": t.name, "shape": list(t.shape), "group": t.group} for t in MODEL.tensors]
    assert RunHeader.from_json(HEADER.to_json()) == HEADER


def test_the_checkpoints_of_all_servers_give_the_tensors_whole_and_those_of_one_say_what_is_missing(
    tmp_path: Path,
) -> None:
    for index in range(2):
        folder = CheckpointFolder(tmp_path / f"server-{index}")
        folder.write(replace(CUT_HEADER, server_index=index), shards_of_server(index))
    tensors = from_checkpoints([tmp_path])
    assert list(tensors) == ["up", "down", "scale"]
    for name, values in whole_tensors().items():
        np.testing.assert_array_equal(tensors[name], values)
    with pytest.raises(CheckpointError, match=r"missing here: those of server 0, with shards of part 0\."):
        from_checkpoints([tmp_path / "server-1"])


def test_a_checkpoint_of_a_model_without_one_of_its_blocks_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.write(replace(CUT_HEADER, model=Model(CUT.tensors[:-1])), shards_of_server(0))
    with pytest.raises(BadRequest, match=r"parts of tensor 'down' .* are missing"):
        from_checkpoints([tmp_path])


def test_an_update_log_keeps_the_cut_and_replays_to_the_same_bits(tmp_path: Path) -> None:
    log = UpdateLog(tmp_path, log_gradients=True)
    shard = make_shard(np.linspace(-1, 1, 16), epoch=2, recorder=log)
    log.begin(replace(CUT_HEADER, epoch=2), {0: shard})
    train(shard, range(1, 4))
    log.end()
    (path,) = log_paths(tmp_path)
    assert ShardLog(path).run.model == CUT
    replayed = replay(path)
    assert (replayed.difference, replayed.ended, replayed.updates) == ("", True, 4)
