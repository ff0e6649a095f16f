"""pyps_wire.partition of a model that is cut into parts: blocks, affinity of shards, sub-partitions, refusals."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyps_client.client import split_tensors
from pyps_wire.blocks import check_whole
from pyps_wire.errors import BadRequest
from pyps_wire.partition import Model, Tensor, first_difference, partition


def columns(name, shape, num_parts, *, first_group=0, groups_of_part=1):
    """A matrix cut by columns as evenly as torch cuts: one block a part, in a group of each part."""
    width = math.ceil(shape[1] / num_parts)
    return [
        Tensor(
            name,
            (shape[0], min(width, shape[1] - p * width)),
            first_group + p * groups_of_part,
            shape,
            (0, p * width),
            p,
        )
        for p in range(num_parts)
    ]


def cut_model(num_parts, *, shape=(512, 2048), shard_size=16_384):
    """Two matrices, one cut by columns, one by rows, and a bias of part 0 alone."""
    tensors = []
    borders = [part * shape[0] // num_parts for part in range(num_parts + 1)]
    for part in range(num_parts):
        tensors.append(columns("up", shape, num_parts)[part])
        tensors.append(
            Tensor("down", (borders[part + 1] - borders[part], shape[1]), part, shape, (borders[part], 0), part)
        )
        if part == 0:
            tensors.append(Tensor("bias", (shape[1],), 0))
    return Model(tuple(tensors), shard_size)


@given(st.integers(2, 8), st.integers(1, 6), st.sampled_from([16_384, 131_072, 1_047_552]))
@settings(max_examples=40)
def test_every_shard_is_of_one_part_and_every_part_has_its_own(num_parts, num_servers, shard_size):
    model = cut_model(num_parts, shard_size=shard_size)
    plan = partition(model, num_servers=num_servers)
    seen = set()
    for part in range(num_parts):
        own = plan.of_parts([part])
        ids = {shard.shard_id for shard in own.shards}
        assert ids == {s.shard_id for s in plan.shards if plan.part_of(s.shard_id) == part}
        assert not ids & seen
        seen |= ids
        assert sum(shard.length for shard in own.shards) == own.model.num_parameters
        assert {t.part for t in own.model.tensors} == {part}
        # As few shards as their length allows, rounded up to as many for each server that the part lies on.
        cut = min(shard_size, 262_144)
        assert len(ids) <= sum(math.ceil(size / cut) + num_servers for size in own.model.group_sizes)
    assert seen == {shard.shard_id for shard in plan.shards}


@given(st.integers(2, 8), st.integers(1, 6))
@settings(max_examples=40)
def test_a_part_lies_on_as_few_servers_as_even_loads_allow(num_parts, num_servers):
    plan = partition(cut_model(num_parts), num_servers=num_servers)
    loads = [sum(shard.length for shard in plan.of_server(i)) for i in range(num_servers)]
    longest = max(shard.length for shard in plan.shards)
    assert max(loads) - min(loads) <= 2 * longest
    for part in range(num_parts):
        servers = {shard.server_index for shard in plan.of_parts([part]).shards}
        assert len(servers) <= math.ceil(num_servers / num_parts) + 1
        assert servers == set(range(min(servers), max(servers) + 1))


def test_two_parts_share_the_servers_out():
    for num_servers, servers in ((2, [{0}, {1}]), (4, [{0, 1}, {2, 3}]), (8, [{0, 1, 2, 3}, {4, 5, 6, 7}])):
        plan = partition(cut_model(2), num_servers=num_servers)
        assert [{s.server_index for s in plan.of_parts([p]).shards} for p in (0, 1)] == servers


def test_a_sub_partition_finds_its_shards_by_the_wholes_numbers():
    plan = partition(cut_model(3, shape=(300, 900)), num_servers=2)
    own = plan.of_parts([1, 2])
    for shard in own.shards:
        whole = plan.shard(shard.shard_id)
        assert (whole.offset, whole.length, whole.server_index) == (shard.offset, shard.length, shard.server_index)
        mine = [(own.model.tensors[p.tensor_index].key, p.tensor_offset, p.length) for p in own.pieces(shard.shard_id)]
        theirs = [
            (plan.model.tensors[p.tensor_index].key, p.tensor_offset, p.length) for p in plan.pieces(shard.shard_id)
        ]
        assert mine == theirs
    foreign = plan.of_parts([0]).shards[0].shard_id
    with pytest.raises(BadRequest, match=f"no shard {foreign}"):
        own.shard(foreign)


def test_parts_that_are_not_there_are_refused():
    plan = partition(cut_model(3, shape=(300, 900)), num_servers=1)
    for parts in ([], [3], [-1]):
        with pytest.raises(BadRequest, match="no part"):
            pytest.fail(f"{plan.of_parts(parts)} of {parts}")


def test_blocks_are_joined_under_the_original_name():
    model = cut_model(3, shape=(6, 12), shard_size=16)
    whole = {name: np.arange(72, dtype=np.float32).reshape(6, 12) + i for i, name in enumerate(("up", "down"))}
    whole["bias"] = np.arange(12, dtype=np.float32)
    vectors = [[] for _ in range(model.num_groups)]
    for t in model.tensors:
        block = whole[t.name]
        if t.whole_shape:
            block = block[tuple(slice(o, o + n) for o, n in zip(t.offset, t.shape, strict=True))]
        vectors[t.group].append(block.ravel())
    joined = split_tensors(model, [np.concatenate(parts) for parts in vectors])
    assert joined.keys() == whole.keys()
    for name, values in whole.items():
        np.testing.assert_array_equal(joined[name], values)


def test_the_model_travels_with_its_blocks():
    model = cut_model(4)
    assert Model.from_proto(model.to_proto()) == model
    assert partition(model, num_servers=2).fingerprint != partition(cut_model(2), num_servers=2).fingerprint


def test_a_model_that_is_not_cut_keeps_its_fingerprint():
    model = Model((Tensor("weight", (64, 10)), Tensor("bias", (10,))))
    assert partition(model, num_servers=2).fingerprint == "a9b780c778c736a2b491605abe8582c5"


def test_two_cuts_are_told_apart_in_words():
    assert first_difference(cut_model(2), cut_model(4)) == (
        "tensor 'up' has shape (512, 1024) in this model, but (512, 512) in the other model"
    )
    mine = Model((Tensor("w", (2, 4), 0, (4, 4), (0, 0)), Tensor("w", (2, 4), 1, (4, 4), (2, 0), 1)))
    theirs = Model((Tensor("w", (2, 4), 0, (4, 4), (2, 0)), Tensor("w", (2, 4), 1, (4, 4), (0, 0), 1)))
    assert "block [0:2, 0:4] of (4, 4) in part 0" in first_difference(mine, theirs)


def test_what_is_no_whole_model_is_refused_in_words():
    for second, words in [
        (Tensor("w", (4, 2), 1, (4, 4), (0, 1), 1), r"part 0 and part 1 both claim .*'w'.*0:2.*1:3"),
        (Tensor("w", (4, 1), 1, (4, 4), (0, 2), 1), r"parts of tensor 'w'.*missing.*12 of its 16"),
        (None, r"missing.*8 of its 16"),
        (Tensor("w", (4, 2), 1, (4, 5), (0, 2), 1), r"shape \(4, 4\) in part 0, but \(4, 5\)"),
        (Tensor("w", (4, 4), 1), r"two tensors are named 'w'"),
        (Tensor("w", (4, 2), 0, (4, 4), (0, 2), 1), r"'w' is of part 1, its group 0 of part 0"),
        (Tensor("w", (4, 2), 1, (4, 4), (0, 2), 2), r"3 parts, but nothing of part 1"),
    ]:
        tensors = (Tensor("w", (4, 2), 0, (4, 4), (0, 0), 0), *([second] if second else []))
        with pytest.raises(BadRequest, match=words):
            pytest.fail(f"{partition(Model(tensors), num_servers=1)} is made; expected a refusal: {words}")
    for block, words in [
        (((4, 0), 1, (4, 4), (0, 4), 1), r"empty.*more parts than"),
        (((4, 3), 1, (4, 4), (0, 2), 1), r"reaches beyond"),
        (((4,), 1, (4, 4), (0, 2), 1), r"1 sizes and 2 offsets"),
        (((4, 2), 0, (), (), 5000), r"part 5000"),
    ]:
        with pytest.raises(BadRequest, match=words):
            pytest.fail(f"{Tensor('w', *block)} is made; expected a refusal: {words}")


@given(st.integers(2, 8), st.integers(1, 16), st.sampled_from([(64, 256), (512, 2048), (1000, 3000)]))
@settings(max_examples=60)
def test_no_server_is_idle_where_there_are_numbers_for_all_and_server_0_never(num_parts, num_servers, shape):
    plan = partition(cut_model(num_parts, shape=shape), num_servers=num_servers)
    loads = [sum(shard.length for shard in plan.of_server(i)) for i in range(num_servers)]
    assert loads[0] > 0
    if sum(loads) >= 4096 * num_parts * num_servers:
        assert min(loads) > 0


def boxes(rows, columns, shape):
    """A matrix cut into a grid of boxes, each a part."""
    height, width = shape[0] // rows, shape[1] // columns
    return [
        Tensor("w", (height, width), r * columns + c, shape, (r * height, c * width), r * columns + c)
        for r in range(rows)
        for c in range(columns)
    ]


def test_a_tensor_in_many_blocks_is_looked_through_for_overlaps():
    for num_rows, num_columns in ((1, 1000), (1000, 1), (30, 30)):
        tensors = boxes(num_rows, num_columns, (num_rows * 2, num_columns * 2))
        check_whole(tensors)
        # Blocks that share numbers are found wherever they stand.
        moved = replace(tensors[-1], offset=tensors[len(tensors) // 2].offset)
        with pytest.raises(BadRequest, match="both claim"):
            check_whole([*tensors[:-1], moved])
