"""A run's shards to write checkpoints of, for unit tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from pyps.checkpoint import CheckpointFolder, RunHeader
from pyps.config import ServerConfig
from pyps.core.aggregation import Contribution
from pyps.core.gradient import Extent
from pyps.core.shard import Shard
from pyps.core.staleness import Weighing
from pyps.run import RuleSettings, Run
from pyps_wire.partition import Model, Tensor
from shards import gradient, make_behaviour, make_shard, push

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


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[CheckpointFolder]:
    """For modules that have this name too."""
    opened = CheckpointFolder(tmp_path / "server-0")
    yield opened
    opened.close()


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


def write(folder: CheckpointFolder, shards: Mapping[int, Shard] | None = None) -> Path:
    return folder.write(HEADER, shards or make_shards()).path


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


def restored_run(folder: CheckpointFolder) -> Run:
    """The server's run, as it is after --resume."""
    saved = folder.resume()
    assert saved is not None
    run = Run(ServerConfig())
    run.restore(saved)
    return run
