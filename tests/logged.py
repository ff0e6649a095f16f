"""A shard whose updates are logged, for unit tests of update logs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyps.checkpoint import RunHeader
from pyps.core.gradient import Extent
from pyps.core.shard import Shard
from pyps.run import RuleSettings
from pyps.update_log import UpdateLog, log_paths
from pyps.update_log.lines import decode, encode
from pyps_wire.partition import Model, Tensor
from shards import make_behaviour, make_shard, nothing, pull, push, roster

SETTINGS = RuleSettings.make("adagrad", ({"learning_rate": 0.1},))
HEADER = RunHeader(
    run_id="run 1/../x",
    epoch=2,
    server_index=0,
    num_servers=1,
    model=Model((Tensor("t", (16,)),)),
    optimizer=SETTINGS,
    behaviour=make_behaviour("async", "divide").texts,
    told=make_behaviour("async").texts,
)


def logged_shard(log: UpdateLog, **others: Any) -> Shard:
    shard = make_shard(
        np.linspace(-1, 1, 16),
        **{"rule": "adagrad", "settings": SETTINGS.groups[0], "policy": "divide", "epoch": 2, **others},
        recorder=log,
    )
    log.begin(HEADER, {shard.shard_id: shard})
    return shard


def train(shard: Shard, sequences: Sequence[int]) -> None:
    for sequence in sequences:
        pull(shard, "a")
        push(shard, np.full(16, 0.1 * sequence), sequence=sequence, epoch=2, base_version=max(0, shard.version - 1))
    push(shard, [1.0, 2.0], sequence=max(sequences) + 1, epoch=2, extents=(Extent(3, 2),))
    # What leaves no trace is not logged: a repetition, another epoch, NaN.
    push(shard, np.zeros(16), sequence=sequences[0], epoch=2)
    push(shard, np.zeros(16), sequence=900, epoch=1)
    push(shard, np.full(16, np.nan), sequence=901, epoch=2)


def only(folder: Path) -> Path:
    (path,) = log_paths(folder)
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def hardsync(shard: Shard) -> None:
    """Rounds of two workers, one of them without a gradient once; then the second dies in a round."""
    workers = roster("a", "b")
    for sequence in range(1, 4):
        for worker_id, scale in (("b", 3.0), ("a", 1.0)):
            values = np.full(16, scale * sequence)
            push(shard, values, sequence=sequence, epoch=2, worker_id=worker_id, workers=workers, example_count=4)
    shard.push(nothing(worker_id="b", sequence=4, epoch=2, base_version=3), roster=workers)
    push(shard, np.ones(16), sequence=4, epoch=2, workers=workers)
    push(shard, np.ones(16), sequence=5, epoch=2, workers=workers)
    # Too late, and once more in the same round: both are refused and logged.
    push(shard, np.ones(16), sequence=9, epoch=2, base_version=1, worker_id="c", workers=workers)
    push(shard, np.ones(16), sequence=6, epoch=2, workers=workers)
    assert shard.complete(roster("a")) == 1


def rewrite(path: Path, sequence: int, change: Mapping[str, Any]) -> None:
    """Changes the line of a push, its checksum too."""
    lines = [decode(line + b"\n") for line in path.read_bytes().splitlines()]
    changed_lines = [
        {**line, **change} if line and line.get("sequence") == sequence else line for line in lines if line
    ]
    path.write_bytes(b"".join(encode(line) for line in changed_lines))
