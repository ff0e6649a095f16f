"""ASGD: Zhang, Zhang, You, Zheng, Xu (ICASSP 2013): a mutex around handing out and updating the model.

That every pull is a model that was is U2, in test_universal_invariants.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pyps.core.arrays import Floats
from pyps.core.shard import Shard
from pyps.core.update_rules import Sgd
from shards import crew, gradient, make_behaviour, run_together

# Large enough for the kernel to run long without the interpreter's lock, so that threads would meet inside.
LENGTH = 200_000


class Owners:
    """Counts who is inside; neither += is atomic, so a second owner also shows as a lost count."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.entries = 0

    def __enter__(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entries += 1

    def __exit__(self, *error: object) -> None:
        self.inside -= 1


class WatchedSgd(Sgd):
    """SGD that notes who is inside an update."""

    def __init__(self, owners: Owners) -> None:
        self.owners = owners

    def apply(self, *arguments: Any, **named: Any) -> int:
        with self.owners:
            return super().apply(*arguments, **named)


def test_no_update_meets_another_update_or_a_read() -> None:
    owners, rounds = Owners(), 60
    shard = Shard(
        0,
        np.zeros(LENGTH, np.float32),
        rule=WatchedSgd(owners),
        hyperparameters={"learning_rate": 1.0},
        behaviour=make_behaviour(),
    )
    values = np.ones(LENGTH, np.float32)

    def copy(version: int, parameters: Floats) -> None:
        with owners:
            parameters.copy()

    def pusher(worker_id: str) -> None:
        for sequence in range(rounds):
            shard.push(gradient(values, worker_id=worker_id, sequence=sequence), roster=crew(2))

    def reader() -> None:
        for _ in range(rounds):
            shard.read(copy)

    run_together([lambda: pusher("a"), lambda: pusher("b"), reader, reader])
    assert (owners.most, owners.entries) == (1, 4 * rounds)
