"""One mutex for the whole model (algorithm notes 2.2, A1 and A2); the paper's test is in tests/paper."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pyps.core.arrays import Floats
from pyps.core.receipt import Reason
from pyps.core.whole_model import WholeModel
from pyps_wire.errors import BadRequest
from shards import crew, gradient, make_shard, roster, run_together

LENGTH = 50_000


def model_of(num_shards: int, length: int = 1) -> WholeModel:
    return WholeModel({index: make_shard(np.zeros(length), shard_id=index) for index in range(num_shards)})


def version_and_first(version: int, parameters: Floats) -> tuple[int, float]:
    return version, float(parameters[0])


def test_a_push_is_applied_to_all_its_shards_and_a_read_sees_them() -> None:
    model = model_of(3)
    receipts = model.push([(0, gradient([1.0])), (2, gradient([2.0]))], roster=roster())
    assert [(receipt.shard_id, receipt.version_after) for receipt in receipts] == [(0, 1), (2, 1)]
    assert model.read(dict.fromkeys(range(3), version_and_first)) == {0: (1, -1.0), 1: (0, 0.0), 2: (1, -2.0)}


def test_every_read_sees_whole_pushes_only() -> None:
    """A2: each push moves all shards by the same 1, so a torn read would mix two versions."""
    model, rounds = model_of(4, LENGTH), 15
    torn: list[dict[int, tuple[int, float]]] = []
    done = threading.Event()

    def pusher(worker_id: str) -> None:
        for sequence in range(rounds):
            sent = [
                (shard_id, gradient(-np.ones(LENGTH), worker_id=worker_id, sequence=sequence))
                for shard_id in model.shards
            ]
            model.push(sent, roster=crew(2))

    def pushers() -> None:
        try:
            run_together([lambda: pusher("a"), lambda: pusher("b")])
        finally:
            done.set()

    def reader() -> None:
        while not done.is_set():
            seen = model.read(dict.fromkeys(model.shards, version_and_first))
            if len(set(seen.values())) != 1:
                torn.append(seen)

    run_together([pushers, reader, reader])
    assert torn == []
    assert [shard.version for shard in model.shards.values()] == [2 * rounds] * 4


def test_the_mutex_has_one_owner_at_a_time() -> None:
    """A1, instrumented: no push or read begins before the one before it has ended."""
    told: list[bool] = []
    model = WholeModel({0: make_shard(np.zeros(LENGTH))}, on_lock=told.append)

    def work(worker_id: str) -> None:
        for sequence in range(10):
            model.push([(0, gradient(np.ones(LENGTH), worker_id=worker_id, sequence=sequence))], roster=crew(3))
            model.read({0: version_and_first})

    run_together([lambda name=name: work(name) for name in "abc"])
    assert told == [True, False] * 60


def test_a_push_that_cannot_be_is_applied_to_none_of_its_shards() -> None:
    model = model_of(2)
    with pytest.raises(BadRequest, match="version 5 of shard 1, which is at version 0"):
        model.push([(0, gradient([1.0])), (1, gradient([1.0], base_version=5))], roster=roster())
    with pytest.raises(BadRequest, match="8 bytes long"):
        model.push([(0, gradient([1.0])), (1, gradient([1.0, 2.0]))], roster=roster())
    assert [shard.version for shard in model.shards.values()] == [0, 0]


def test_a_part_that_is_refused_leaves_the_others_alone() -> None:
    model = model_of(2)
    receipts = model.push([(0, gradient([np.nan])), (1, gradient([1.0]))], roster=roster())
    assert [receipt.reason for receipt in receipts] == [Reason.NOT_FINITE, Reason.UNSPECIFIED]


def test_the_mutex_is_let_go_after_an_error() -> None:
    model = model_of(1)
    with pytest.raises(ZeroDivisionError):
        model.read({0: lambda version, parameters: 1 // 0})
    model.push([(0, gradient([1.0]))], roster=roster())
    with model.held():
        assert model.shards[0].version == 1
