"""pyps_wire.partition: properties of every cut, models in parts, and the words for two models that differ."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyps_wire.common_pb2 import ModelSpec, TensorSpec
from pyps_wire.errors import InvalidArgument
from pyps_wire.parameter_server_pb2 import HelloReply
from pyps_wire.partition import (
    ALIGNMENT,
    DEFAULT_SHARD_SIZE,
    SHARDS_MAX,
    Model,
    Partition,
    Tensor,
    check_whole,
    first_difference,
    partition,
    place,
)

shapes = st.one_of(
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.integers(0, 200_000).map(lambda n: (n,)),
    st.sampled_from([(), (0,), (3, 0, 2), (512, 1024), (1_048_576,), (4096, 1031)]),
)
num_servers_up_to_5 = st.integers(1, 5)


@st.composite
def models(draw):
    tensors, group = [], 0
    for index, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=8))):
        group += bool(index) and draw(st.booleans())
        tensors.append(Tensor(f"tensor.{index}", shape, group))
    tensors.append(Tensor("bias", (), group))
    return Model(tuple(tensors), draw(st.sampled_from([1024, 16_384, DEFAULT_SHARD_SIZE])))


def loads(plan):
    return [sum(s.length for s in plan.of_server(i)) for i in range(plan.num_servers)]


@given(models(), num_servers_up_to_5)
def test_every_parameter_lies_in_one_shard_of_one_server_evenly_and_aligned(model, num_servers):
    plan = partition(model, num_servers=num_servers)
    assert [shard.shard_id for shard in plan.shards] == list(range(plan.num_shards))
    assert [s.group for s in plan.shards] == sorted(s.group for s in plan.shards)
    ends = [0] * model.num_groups
    for shard in plan.shards:
        assert shard.offset == ends[shard.group]
        assert shard.offset % ALIGNMENT == 0
        assert 0 < shard.length <= model.shard_size
        ends[shard.group] += shard.length
    assert tuple(ends) == model.group_sizes
    for group in range(model.num_groups):
        lengths = [shard.length for shard in plan.shards if shard.group == group]
        assert not lengths or max(lengths) - min(lengths) < 2 * ALIGNMENT

    assert max(loads(plan)) - min(loads(plan)) <= max(shard.length for shard in plan.shards)
    held = [(shard.shard_id, index) for index in range(num_servers) for shard in plan.of_server(index)]
    assert sorted(held) == [(shard.shard_id, plan.server_of(shard.shard_id)) for shard in plan.shards]


@given(models(), num_servers_up_to_5)
def test_the_pieces_of_all_shards_are_the_tensors_in_order(model, num_servers):
    plan = partition(model, num_servers=num_servers)
    ends = [0] * len(model.tensors)
    order = []
    for shard in plan.shards:
        filled = 0
        for piece in plan.pieces(shard.shard_id):
            assert piece.length > 0
            assert piece.shard_offset == filled
            assert piece.tensor_offset == ends[piece.tensor_index]
            assert model.tensors[piece.tensor_index].group == shard.group
            filled += piece.length
            ends[piece.tensor_index] += piece.length
            order.append(piece.tensor_index)
        assert filled == shard.length
    assert ends == [tensor.size for tensor in model.tensors]
    assert order == sorted(order)


def test_a_default_shard_and_its_header_fit_grpcs_default_message_limit():
    assert DEFAULT_SHARD_SIZE * 4 + 1024 <= 4 * 1024 * 1024
    assert DEFAULT_SHARD_SIZE % ALIGNMENT == 0


def test_groups_share_the_number_of_shards_that_a_server_is_to_have():
    plan = partition(Model((Tensor("weight", (8_000_000,)), Tensor("bias", (10_000,), 1))), num_servers=2)
    assert [shard.group for shard in plan.shards] == [0] * 8 + [1] * 2


def test_a_model_of_one_parameter_leaves_the_other_servers_empty():
    plan = partition(Model((Tensor("bias", ()),)), num_servers=3)
    assert loads(plan) == [1, 0, 0]
    assert plan.of_server(1) == ()
    assert plan.pieces(0)[0].length == 1


def test_a_model_is_sliced_as_finely_as_servers_can_use():
    for size, num_servers, num_shards in [
        (1023, 1, 1),
        (2047, 2, 1),  # Too small to be spread.
        (2048, 2, 2),
        (262_144, 1, 1),  # Too small to be cut for parallelism.
        (262_145, 1, 2),
        (1_000_000, 1, 4),
        (2_000_000, 1, 4),
        (1_048_576, 2, 4),
        (2_097_152, 2, 8),
        (3 * DEFAULT_SHARD_SIZE, 1, 4),
        (9 * DEFAULT_SHARD_SIZE, 2, 10),  # Rounded up to a multiple of the servers.
        (25_600_000, 1, 25),
        (25_600_000, 2, 26),
    ]:
        plan = partition(Model((Tensor("weight", (size,)),)), num_servers=num_servers)
        assert plan.num_shards == num_shards, (size, num_servers)


@settings(max_examples=20)
@given(st.integers(1, 100_000), num_servers_up_to_5)
def test_the_smallest_shard_size_makes_no_empty_shard(size, num_servers):
    plan = partition(Model((Tensor("weight", (size,)),), shard_size=ALIGNMENT), num_servers=num_servers)
    assert plan.num_shards == math.ceil(size / ALIGNMENT)


BASE = Model((Tensor("fc.weight", (10, 64)), Tensor("fc.bias", (10,)), Tensor("scale", (), 1)))


def changed(index, **fields):
    tensors = list(BASE.tensors)
    tensors[index] = replace(tensors[index], **fields)
    return Model(tuple(tensors), BASE.shard_size)


DIFFERENT = [
    (changed(0, shape=(10, 32)), r"tensor 'fc.weight' has shape \(10, 64\) in the run, but \(10, 32\) in mine"),
    (changed(0, shape=(64, 10)), r"\(10, 64\) in the run, but \(64, 10\)"),
    (changed(1, name="bias"), r"tensor 1 is 'fc.bias' of shape \(10,\) in the run, but 'bias' of shape \(10,\)"),
    (changed(1, group=1), "'fc.bias' is of group 0 in the run, but of group 1 in mine"),
    (Model(BASE.tensors[:2]), "the run has 3 tensors, but mine has 2; the first that only the run has is 'scale'"),
    (Model((*BASE.tensors, Tensor("new", (2,), 1))), "the first that only mine has is 'new' of shape"),
]


def test_models_that_differ_have_other_fingerprints_and_the_difference_reads_well():
    for other, text in DIFFERENT:
        assert partition(BASE, num_servers=2).fingerprint != partition(other, num_servers=2).fingerprint, text
        difference = first_difference(BASE, other, mine_name="the run", theirs_name="mine")
        assert re.search(text, difference or ""), (text, difference)


def test_the_fingerprint_is_of_model_and_slices_and_not_of_the_placement():
    plan = partition(Model((Tensor("a", (5000,)), Tensor("b", (7,), 1)), shard_size=2048), num_servers=2)
    ranges = [(s.group, s.offset, s.length, plan.server_of(s.shard_id)) for s in plan.shards]
    assert ranges == [(0, 0, 1248, 1), (0, 1248, 1248, 1), (0, 2496, 1248, 0), (0, 3744, 1256, 0), (1, 0, 7, 1)]
    elsewhere = replace(plan, servers=place(plan.model, plan.shards, num_servers=3), num_servers=3)
    assert [elsewhere.server_of(s.shard_id) for s in plan.shards] == [1, 2, 1, 0, 2]
    assert elsewhere.fingerprint == plan.fingerprint
    otherwise = Partition.of_tables(plan.model, [2496, 2504, 7], servers=[0, 1, 0], num_servers=2)
    assert otherwise.fingerprint != plan.fingerprint
    # Another digest needs another number in its text "pyps slices 1": releases then refuse each other.
    assert partition(BASE, num_servers=2).fingerprint == "f409a06ff4755ffa729d1189b2b2c6b2"


@settings(max_examples=30)
@given(models(), num_servers_up_to_5)
def test_the_model_and_the_two_tables_give_the_partition_at_the_other_end(model, num_servers):
    plan = partition(model, num_servers=num_servers)
    reply = HelloReply.FromString(plan.described)
    travelled = Model.from_proto(reply.model)
    theirs = Partition.of_tables(travelled, reply.shard_lengths, servers=reply.placement, num_servers=num_servers)
    assert theirs == plan
    assert theirs.fingerprint == reply.fingerprint == plan.fingerprint
    assert first_difference(model, travelled) is None


def test_tables_that_do_not_slice_the_model_are_refused_in_words():
    model = Model((Tensor("a", (100,)), Tensor("b", (7,), 1)))
    for lengths, servers, text in [
        ([100, 7, 16], [0, 0, 0], "3 shards and the servers of 3 are named, the model has 2 shards"),
        ([100, 7], [0], "2 shards and the servers of 1 are named, the model has 2 shards"),
        ([100], [0], "shard 1 has 0 parameters, and 7 are left of group 1"),
        ([96, 16, 7], [0] * 3, "shard 1 has 16 parameters, and 4 are left of group 0"),
        ([20, 80, 7], [0] * 3, "shard 0 has 20 parameters, .* at multiples of 16"),
        ([100, 7], [0, 2], "a shard is placed on server 2; there are 2, from 0"),
        ([16] * (SHARDS_MAX + 1), [], "131073 shards; expected 131072 at most"),
    ]:
        with pytest.raises(InvalidArgument, match=text):
            pytest.fail(f"{Partition.of_tables(model, lengths, servers=servers, num_servers=2)} is made")


def test_impossible_models_and_indices_are_refused_in_words():
    a, plan = Tensor("a", ()), partition(BASE, num_servers=1)
    for make, text in [
        (lambda: Model(()), "no parameters"),
        (lambda: Model((Tensor("empty", (0, 3)),)), "no parameters"),
        (lambda: Model((a, a)), "two tensors are named 'a'"),
        (lambda: Model((Tensor("a", (), 1),)), "groups count up from 0"),
        (lambda: Model((a, Tensor("b", (), 2))), "'b' of group 2 follows group 0"),
        (lambda: Model((a, Tensor("b", (), 1), Tensor("c", ()))), "ordered by group"),
        (lambda: Tensor("a", (3, -1)), "negative"),
        (lambda: Tensor("a", (1,) * 65), "at most 64"),
        (lambda: Tensor("", (1,)), "no name"),
        (lambda: Model((a,), shard_size=0), "shard_size is 0"),
        (lambda: Model((a,), shard_size=100), "multiple of 16"),
        (lambda: partition(BASE, num_servers=0), "num_servers is 0"),
        (lambda: partition(Model((Tensor("a", (2**40,)),), 16), num_servers=1), "raise shard_size"),
        (lambda: plan.shard(2), "no shard 2; the model has 2"),
        (lambda: plan.pieces(-1), "no shard -1"),
        (lambda: plan.of_server(1), "no server 1"),
    ]:
        with pytest.raises(InvalidArgument, match=text):
            pytest.fail(f"{make()} is made; expected a refusal: {text}")


# Models that are cut into parts: blocks, affinity of shards, sub-partitions, refusals.


def cut_model(num_parts, *, shape=(512, 2048), shard_size=16_384):
    tensors = []
    rows, columns = ([part * size // num_parts for part in range(num_parts + 1)] for size in shape)
    for part in range(num_parts):
        width, height = columns[part + 1] - columns[part], rows[part + 1] - rows[part]
        tensors.append(Tensor("up", (shape[0], width), part, shape, (0, columns[part]), part))
        tensors.append(Tensor("down", (height, shape[1]), part, shape, (rows[part], 0), part))
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
    longest = max(shard.length for shard in plan.shards)
    assert max(loads(plan)) - min(loads(plan)) <= 2 * longest
    for part in range(num_parts):
        servers = {plan.server_of(shard.shard_id) for shard in plan.of_parts([part]).shards}
        assert len(servers) <= math.ceil(num_servers / num_parts) + 1
        assert servers == set(range(min(servers), max(servers) + 1))


@given(st.integers(2, 8), st.integers(1, 16), st.sampled_from([(64, 256), (512, 2048), (1000, 3000)]))
@settings(max_examples=60)
def test_no_server_is_idle_where_there_are_numbers_for_all_and_server_0_never(num_parts, num_servers, shape):
    plan = partition(cut_model(num_parts, shape=shape), num_servers=num_servers)
    assert loads(plan)[0] > 0
    if sum(loads(plan)) >= 4096 * num_parts * num_servers:
        assert min(loads(plan)) > 0


def test_a_sub_partition_finds_its_shards_by_the_wholes_numbers():
    plan = partition(cut_model(3, shape=(300, 900)), num_servers=2)
    own = plan.of_parts([1, 2])
    for shard in own.shards:
        whole = plan.shard(shard.shard_id)
        assert (whole.offset, whole.length) == (shard.offset, shard.length)
        assert own.server_of(shard.shard_id) == plan.server_of(shard.shard_id)
        mine, theirs = (
            [(replace(of.model.tensors[p.tensor_index], group=0), p.tensor_offset, p.length) for p in pieces]
            for of, pieces in ((own, own.pieces(shard.shard_id)), (plan, plan.pieces(shard.shard_id)))
        )
        assert mine == theirs
    foreign = plan.of_parts([0]).shards[0].shard_id
    with pytest.raises(InvalidArgument, match=f"no shard {foreign}"):
        own.shard(foreign)


def test_parts_that_are_not_there_are_refused():
    plan = partition(cut_model(3, shape=(300, 900)), num_servers=1)
    for parts in ([], [3], [-1]):
        with pytest.raises(InvalidArgument, match="no part"):
            pytest.fail(f"{plan.of_parts(parts)} of {parts}")


def test_the_model_travels_with_its_blocks():
    model = cut_model(4)
    assert Model.from_proto(model.to_proto()) == model
    assert partition(model, num_servers=2).fingerprint != partition(cut_model(2), num_servers=2).fingerprint


@pytest.mark.parametrize("field", ["shape", "whole_shape", "offset"])
def test_a_tensor_of_many_thousand_sizes_is_refused_in_few_words(field):
    spec = TensorSpec(name="x", **{field: [1] * 100_000})
    with pytest.raises(InvalidArgument) as refusal:
        Model.from_proto(ModelSpec(tensors=[spec]))
    assert len(str(refusal.value)) < 1000


def test_two_splits_into_parts_differ_in_words():
    assert first_difference(cut_model(2), cut_model(4)) == (
        "tensor 'up' has shape (512, 1024) in this model, but (512, 512) in the other model"
    )
    mine = Model((Tensor("w", (2, 4), 0, (4, 4), (0, 0)), Tensor("w", (2, 4), 1, (4, 4), (2, 0), 1)))
    theirs = Model((Tensor("w", (2, 4), 0, (4, 4), (2, 0)), Tensor("w", (2, 4), 1, (4, 4), (0, 0), 1)))
    assert "block [0:2, 0:4] of (4, 4) in part 0" in first_difference(mine, theirs)


def test_a_model_that_is_not_whole_is_refused_in_words():
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
        with pytest.raises(InvalidArgument, match=words):
            pytest.fail(f"{partition(Model(tensors), num_servers=1)} is made; expected a refusal: {words}")
    for block, words in [
        (((4, 0), 1, (4, 4), (0, 4), 1), r"empty.*more parts than"),
        (((4, 3), 1, (4, 4), (0, 2), 1), r"reaches beyond"),
        (((4,), 1, (4, 4), (0, 2), 1), r"1 sizes and 2 offsets"),
        (((4, 2), 0, (), (), 5000), r"part 5000"),
    ]:
        with pytest.raises(InvalidArgument, match=words):
            pytest.fail(f"{Tensor('w', *block)} is made; expected a refusal: {words}")


def boxes(rows, columns, shape):
    """A matrix cut into a grid of boxes, each a part."""
    height, width = shape[0] // rows, shape[1] // columns
    return [
        Tensor("w", (height, width), r * columns + c, shape, (r * height, c * width), r * columns + c)
        for r in range(rows)
        for c in range(columns)
    ]


def test_overlaps_among_many_blocks_are_found():
    for num_rows, num_columns in ((1, 1000), (1000, 1), (30, 30)):
        tensors = boxes(num_rows, num_columns, (num_rows * 2, num_columns * 2))
        check_whole(tensors)
        # Blocks that share numbers are found wherever they stand.
        moved = replace(tensors[-1], offset=tensors[len(tensors) // 2].offset)
        with pytest.raises(InvalidArgument, match="both claim"):
            check_whole([*tensors[:-1], moved])
