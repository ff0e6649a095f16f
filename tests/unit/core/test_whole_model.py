"""One mutex for the whole model: its owners and reads under threads are in tests/paper/test_asgd.py."""

from __future__ import annotations

import numpy as np
import pytest

from pyps.core.arrays import Floats
from pyps.core.plan import PushPlan
from pyps.core.receipt import Reason
from pyps.core.whole_model import WholeModel
from pyps_wire.errors import BadRequest
from shards import gradient, make_shard, roster


def model_of(num_shards: int) -> WholeModel:
    return WholeModel({index: make_shard([0.0], shard_id=index) for index in range(num_shards)})


def version_and_first(version: int, parameters: Floats) -> tuple[int, float]:
    return version, float(parameters[0])


def test_a_push_is_applied_to_all_its_shards_and_a_read_sees_them() -> None:
    model = model_of(3)
    pushed = model.push([PushPlan(0, gradient([1.0])), PushPlan(2, gradient([2.0]))], roster=roster())
    assert [(each.receipt.shard_id, each.receipt.version_after) for each in pushed] == [(0, 1), (2, 1)]
    with model.held():
        read = [shard.read(version_and_first) for shard in model.shards.values()]
    assert read == [(1, -1.0), (0, 0.0), (1, -2.0)]


def test_a_push_that_cannot_be_is_applied_to_none_of_its_shards() -> None:
    model = model_of(2)
    with pytest.raises(BadRequest, match="version 5 of shard 1, which is at version 0"):
        model.push([PushPlan(0, gradient([1.0])), PushPlan(1, gradient([1.0], base_version=5))], roster=roster())
    with pytest.raises(BadRequest, match="8 bytes long"):
        model.push([PushPlan(0, gradient([1.0])), PushPlan(1, gradient([1.0, 2.0]))], roster=roster())
    assert [shard.version for shard in model.shards.values()] == [0, 0]


def test_a_part_that_is_refused_leaves_the_others_alone() -> None:
    model = model_of(2)
    pushed = model.push([PushPlan(0, gradient([np.nan])), PushPlan(1, gradient([1.0]))], roster=roster())
    assert [each.receipt.reason for each in pushed] == [Reason.NOT_FINITE, Reason.UNSPECIFIED]


def test_the_mutex_is_let_go_after_an_error() -> None:
    model = model_of(1)
    with pytest.raises(ZeroDivisionError), model.held():
        model.shards[0].read(lambda version, parameters: 1 // 0)
    model.push([PushPlan(0, gradient([1.0]))], roster=roster())
    with model.held():
        assert model.shards[0].version == 1
