"""What of a shard is sent when some tensors have no gradient."""

from __future__ import annotations

import numpy as np
import pytest

from pyps_client.pushing import OutgoingPush, present_shards
from pyps_client.vectors import check_vectors
from pyps_wire.common_pb2 import CODEC_FLOAT16, CODEC_FLOAT32
from pyps_wire.errors import WrongSize
from pyps_wire.framing import split
from pyps_wire.parameter_server_pb2 import PushRequest
from pyps_wire.partition import Model, Tensor, partition

MODEL = Model((Tensor("a", (10,)), Tensor("b", (2, 5)), Tensor("c", (30,)), Tensor("d", (14,))), shard_size=32)


def test_all_present_means_whole_shards() -> None:
    plan = partition(MODEL, num_servers=1)

    for present in (None, [True] * 4):
        shards = present_shards(plan, 0, present)
        assert [shard for shard, _ in shards] == list(plan.of_server(0))
        assert all(extents == () for _, extents in shards)


def test_neighbours_are_one_extent_and_absent_shards_are_left_out() -> None:
    plan = partition(MODEL, num_servers=1)
    assert [(s.offset, s.length) for s in plan.of_server(0)] == [(0, 32), (32, 32)]

    shards = present_shards(plan, 0, [True, True, False, False])
    assert [(shard.shard_id, extents) for shard, extents in shards] == [(0, ((0, 20),))]

    shards = present_shards(plan, 0, [True, False, True, False])
    assert [(shard.shard_id, extents) for shard, extents in shards] == [
        (0, ((0, 10), (20, 12))),
        (1, ((0, 18),)),
    ]

    assert present_shards(plan, 0, [False] * 4) == ()


@pytest.mark.parametrize(("codec", "dtype"), [(CODEC_FLOAT32, np.float32), (CODEC_FLOAT16, np.float16)])
def test_frames_hold_the_present_numbers_only(codec: int, dtype: type) -> None:
    plan = partition(MODEL, num_servers=1)
    vector = np.arange(64, dtype=dtype)
    shards = present_shards(plan, 0, [True, False, True, False])
    versions = {0: 5, 1: 6}
    push = OutgoingPush(
        PushRequest(sequence=3, codec=codec),
        shards,
        [vector],
        base_versions=versions,
        newest_base_versions=versions,
    )

    frames = [split(frame) for frame in push._frames(shards)]

    headers = [PushRequest.FromString(header) for header, _ in frames]
    assert [(h.shard_id, h.base_version, h.sequence) for h in headers] == [(0, 5, 3), (1, 6, 3)]
    assert [(e.offset, e.length) for e in headers[0].extents] == [(0, 10), (20, 12)]
    np.testing.assert_array_equal(np.frombuffer(frames[0][1], dtype), [*range(10), *range(20, 32)])
    np.testing.assert_array_equal(np.frombuffer(frames[1][1], dtype), range(32, 50))


def test_vectors_are_never_converted_silently() -> None:
    float32 = np.dtype(np.float32)
    good = np.zeros(64, np.float32)
    check_vectors([good], MODEL, float32, what="pushed gradient")

    for bad, complaint in [
        ([], "0 vectors were given for 1 parameter groups"),
        ([good[:-1]], r"group 0 is float32\[63\]; expected float32\[64\]"),
        ([good.astype(np.float64)], r"is float64\[64\]; expected float32"),
        ([np.zeros(128, np.float32)[::2]], "must be contiguous"),
    ]:
        with pytest.raises(WrongSize, match=complaint):
            check_vectors(bad, MODEL, float32, what="pushed gradient")
