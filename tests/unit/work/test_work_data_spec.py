"""What workers say of a data set, and what is refused."""

from __future__ import annotations

import pytest

from pyps.work import DataSpec, WorkQueue
from pyps_wire.errors import BadRequest
from shards import refusal
from work_crews import plain, spec


def test_a_data_set_that_differs_is_refused_by_the_field():
    queue = plain(10, 3)
    for field, value, words in (
        ("name", "test", "worker 'b' says name 'test' of the data set, but the run's has 'train'"),
        ("num_examples", 11, "says num_examples 11 of the data set, but the run's has 10"),
        ("portion_examples", 4, "says portion_examples 4"),
        ("batch_size", 32, "says batch_size 32"),
        ("shuffle", True, "says shuffle True"),
        ("seed", 1, "says seed 1"),
        ("coordinated", True, "says coordinated True"),
    ):
        fields = spec(10, 3).to_json() | {field: value}
        assert words in refusal(queue.open, DataSpec(**fields), worker_id="b")
    queue.open(spec(10, 3), worker_id="b")


def test_a_data_set_without_sense_is_refused():
    for fields, words in (
        ({"num_examples": 0}, "the data set 'train' has 0 examples; expected 1 at least"),
        ({"name": "x" * 201}, "has 201 characters; expected 200 at most"),
        ({"seed": -1}, "seed is -1; expected 0 or more"),
    ):
        assert words in refusal(DataSpec, **({"name": "train", "num_examples": 10} | fields))


def test_portions_need_a_size_and_may_not_be_too_many():
    queue = WorkQueue(stall_seconds=60)
    with pytest.raises(BadRequest, match="name portion_examples or batch_size"):
        queue.open(DataSpec("train", 10), worker_id="a")
    with pytest.raises(BadRequest, match="2000000 portions; expected 1000000 at most: take larger portions"):
        queue.open(DataSpec("train", 2_000_000, 1), worker_id="a")
    assert queue.spec is None
    with pytest.raises(BadRequest, match="no worker has said what the data set is"):
        queue.lease("a", 1, now=0.0)
