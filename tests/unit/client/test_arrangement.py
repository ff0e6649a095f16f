"""Parts made of what the processes of a replica hold, runs joined under another cut, and refusals in words."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyps_client.replica.arrangement import Claim, arrange
from pyps_wire.errors import InvalidArgument, ModelMismatch
from pyps_wire.partition import DEFAULT_SHARD_SIZE, Model, Tensor, partition


def claim(name, shape, index, *, whole=None, offset=None, holders=None, group=0):
    return Claim(
        name, group, shape, whole or shape, offset or (0,) * len(shape), frozenset(holders or ()) | frozenset({index})
    )


def rows(name, shape, count, *, group=0):
    """Each process's block of a tensor that is cut by rows as evenly as torch cuts."""
    height = math.ceil(shape[0] / count)
    return [
        claim(
            name,
            (max(0, min(height, shape[0] - index * height)), *shape[1:]),
            index,
            whole=shape,
            offset=(min(shape[0], index * height), *(0,) * (len(shape) - 1)),
            group=group,
        )
        for index in range(count)
    ]


def copies(name, shape, count, *, group=0):
    return [claim(name, shape, index, holders=range(count), group=group) for index in range(count)]


def arranged(claims, **options):
    options = {"shard_size": DEFAULT_SHARD_SIZE, **options}
    return [arrange(claims, index, **options) for index in range(len(claims))]


def check(claims, arrangements):
    """Every number of the model is trained by one process, which finds it in its memory; copies reach all holders."""
    whole = {}
    for mine in claims:
        for of in mine:
            size = math.prod(of.whole_shape)
            whole.setdefault(of.name, np.arange(size).reshape(of.whole_shape) + 1000 * len(whole))
    local = [[np.full(of.shape, -1) for of in mine] for mine in claims]
    model = arrangements[0].model
    plan = partition(model, num_servers=2)
    for index, arrangement in enumerate(arrangements):
        assert (arrangement.model, arrangement.param_groups) == (model, arrangements[0].param_groups)
        own = plan.of_parts(arrangement.parts).model
        assert tuple(held.tensor for held in arrangement.held) == own.tensors
        assert len(arrangement.own_param_groups) == own.num_groups
        for tensor, position, place in arrangement.held:
            mine = claims[index][position]
            assert mine.name == tensor.name
            assert mine.param_group == arrangement.own_param_groups[tensor.group]
            begins = tensor.offset or (0,) * len(tensor.shape)
            block = tuple(slice(b, b + n) for b, n in zip(begins, tensor.shape, strict=True))
            assert local[index][position][place].shape == tensor.shape
            assert (local[index][position][place] == -1).all()
            local[index][position][place] = whole[tensor.name][block]
    assert sorted(part for a in arrangements for part in a.parts) == list(range(model.num_parts))
    assert sum(size for a in arrangements for size in (held.tensor.size for held in a.held)) == model.num_parameters
    for of_owner in zip(*(a.copies for a in arrangements), strict=True):
        assert len({(copy.owner, copy.sizes) for copy in of_owner}) == 1
        owner = of_owner[0].owner
        for index, copy in enumerate(of_owner):
            for size, given_, taken in zip(copy.sizes, of_owner[owner].held, copy.held, strict=True):
                if taken is not None:
                    numbers = local[owner][given_.claim][given_.place]
                    assert numbers.size == size
                    assert (numbers >= 0).all()
                    local[index][taken.claim][taken.place] = numbers
    for mine, numbers in zip(claims, local, strict=True):
        for of, values in zip(mine, numbers, strict=True):
            begin = tuple(slice(b, b + n) for b, n in zip(of.offset, of.shape, strict=True))
            np.testing.assert_array_equal(values, whole[of.name][begin])


@st.composite
def replicas(draw):
    """Claims of 1 to 4 processes: tensors cut along random axes at random borders, of one process, or of several."""
    count = draw(st.integers(1, 4))
    claims = [[claim(f"own{index}", (draw(st.integers(1, 9)),), index)] for index in range(count)]
    for number in range(draw(st.integers(0, 5))):
        name, group = f"t{number}", draw(st.integers(0, 2))
        shape = tuple(draw(st.lists(st.integers(count, 9), min_size=1, max_size=3)))
        kind = draw(st.sampled_from(["cut", "whole", "copies"]))
        if kind == "cut":
            axis = draw(st.integers(0, len(shape) - 1))
            cuts = draw(st.permutations(range(1, shape[axis])))[: count - 1]
            borders = [0, *sorted(cuts), shape[axis]]
            for index, (begin, end) in enumerate(itertools.pairwise(borders)):
                offset = tuple(begin if a == axis else 0 for a in range(len(shape)))
                local = tuple(end - begin if a == axis else size for a, size in enumerate(shape))
                claims[index].append(claim(name, local, index, whole=shape, offset=offset, group=group))
        else:
            wanted = 1 if kind == "whole" else draw(st.integers(1, count))
            holders = draw(st.permutations(range(count)))[:wanted]
            for index in holders:
                claims[index].append(claim(name, shape, index, holders=holders, group=group))
    return [draw(st.permutations(of_process)) for of_process in claims]


@given(replicas())
@settings(max_examples=100, deadline=None)
def test_the_parts_are_the_model_and_each_number_is_found_where_it_lies(claims):
    arrangements = arranged(claims)
    assert [a.parts for a in arrangements] == [(index,) for index in range(len(claims))]
    check(claims, arrangements)


@given(replicas())
@settings(max_examples=60, deadline=None)
def test_a_run_is_joined_as_it_is_cut_by_the_same_processes_and_by_one(claims):
    run = arranged(claims)[0].model
    same = arranged(claims, run=run)
    assert same[0].model == run
    check(claims, same)
    names = {of.name: of for mine in claims for of in mine}
    alone = [[claim(of.name, of.whole_shape, 0, group=of.param_group) for of in names.values()]]
    (arrangement,) = arranged(alone, run=run)
    check(alone, [arrangement])
    assert arrangement.parts == tuple(range(len(claims)))
    assert arrangement.copies == ()


def test_groups_go_by_part_and_parameter_group_and_empty_ones_are_left_out():
    claims = [[claim("a", (2,), 0, group=1), claim("b", (3,), 0)], [claim("c", (4,), 1, group=1)]]
    first, second = arranged(claims)
    assert first.param_groups == (0, 1, 1)
    assert [(t.name, t.group, t.part) for t in first.model.tensors] == [("b", 0, 0), ("a", 1, 0), ("c", 2, 1)]
    assert (first.own_param_groups, second.own_param_groups) == ((0, 1), (1,))
    assert second.held[0].tensor.group == 0


def test_a_process_may_hold_nothing_of_a_tensor_that_has_fewer_rows_than_there_are_processes():
    claims = [[of, claim(f"x{index}", (1,), index)] for index, of in enumerate(rows("w", (3, 2), 4))]
    arrangements = arranged(claims)
    check(claims, arrangements)
    assert [[held.tensor.name for held in a.held] for a in arrangements] == [
        *([["w", f"x{index}"] for index in range(3)]),
        ["x3"],
    ]
    run = arrangements[0].model
    check(claims, arranged(claims, run=run))


def test_a_tensor_of_several_goes_to_the_one_that_has_least():
    norm, head = copies("norm", (5,), 2), copies("head", (7,), 2)
    claims = [[claim("big", (6,), 0), norm[0], head[0]], [claim("small", (2,), 1), norm[1], head[1]]]
    first, second = arranged(claims)
    assert [held.tensor.name for held in first.held] == ["big", "head"]
    assert [held.tensor.name for held in second.held] == ["small", "norm"]
    assert [(copy.owner, copy.sizes) for copy in first.copies] == [(0, (7,)), (1, (5,))]


def test_a_scalar_that_all_hold_is_copied():
    scale = copies("scale", (), 2)
    claims = [[claim("a", (2,), 0), scale[0]], [claim("b", (3,), 1), scale[1]]]
    check(claims, arranged(claims))


def test_halves_of_what_both_hold_may_be_trained_by_either():
    run = arranged([[of] for of in rows("w", (6, 2), 2)])[0].model
    claims = [[of] for of in copies("w", (6, 2), 2)]
    arrangements = arranged(claims, run=run)
    assert [a.parts for a in arrangements] == [(0,), (1,)]
    check(claims, arrangements)


def test_a_run_of_four_parts_is_joined_by_fewer():
    shape = (8, 2)
    run = arranged([[of] for of in rows("w", shape, 4)])[0].model
    for count in (1, 2):
        claims = [[of] for of in rows("w", shape, count)]
        arrangements = arranged(claims, run=run)
        assert [len(a.parts) for a in arrangements] == [4 // count] * count
        check(claims, arrangements)


def test_a_part_goes_where_alone_it_fits():
    run = Model((Tensor("norm", (9,), 0), Tensor("a", (2,), 1, part=1)))
    norm = copies("norm", (9,), 2)
    claims = [[norm[0], claim("a", (2,), 0)], [norm[1]]]
    assert [a.parts for a in arranged(claims, run=run)] == [(1,), (0,)]


IN_2_PARTS = arranged([[of] for of in rows("w", (8, 2), 2)])[0].model


OTHER_RUNS = [
    (
        IN_2_PARTS,
        [[of] for of in rows("w", (8, 2), 4)],
        "The run's model is split into 2 parts, and part 0 lies in no process of this replica as a whole, such as the "
        "numbers [0:4, 0:2] of tensor 'w'; the replica has 4 processes. Start 2 processes that split it in the same",
    ),
    (
        Model((Tensor("w", (8, 2)),)),
        [[of] for of in rows("w", (8, 2), 4)],
        "The run's model is not split, and part 0 lies in no process of this replica as a whole, such as the numbers "
        "[0:8, 0:2] of tensor 'w'; the replica has 4 processes. Start one process that holds the whole model.",
    ),
    (
        Model((Tensor("w", (8, 2)),)),
        [[of] for of in copies("w", (8, 2), 2)],
        "The run's model is not split; process 1 of this replica would train none.",
    ),
    (IN_2_PARTS, [[claim("w", (8, 3), 0)]], "'w' has shape (8, 3) in this model, but (8, 2) in the run's"),
    (IN_2_PARTS, [[claim("w", (8, 2), 0), claim("x", (1,), 0)]], "Tensor 'x' of this model is not in the run's"),
    (
        Model((*IN_2_PARTS.tensors, Tensor("y", (1,), 1, part=1))),
        [[claim("w", (8, 2), 0)]],
        "No process of this replica has tensor 'y' of the run's model.",
    ),
    (
        Model((Tensor("a", (2,), 0), Tensor("b", (2,), 0), Tensor("c", (2,), 1, part=1))),
        [[claim("a", (2,), 0), claim("b", (2,), 0, group=1), claim("c", (2,), 0)]],
        "Tensors 'a' and 'b' are in one parameter group of the run's model, but in groups 0 and 1 here.",
    ),
]


def test_another_model_than_the_runs_is_refused_in_words_by_all():
    for run, claims, words in OTHER_RUNS:
        for index in range(len(claims)):
            with pytest.raises(ModelMismatch, match=re.escape(words)):
                arrange(claims, index, run=run, shard_size=DEFAULT_SHARD_SIZE)


NO_MODELS = [
    (
        [[claim("0.weight", (2,), 0)], [claim("0.weight", (2,), 1)]],
        "(part 0 is what process 0 holds): part 0 and part 1 both claim numbers of tensor '0.weight': all of [0:2]. "
        "Different tensors, as of the stages of a pipeline, need different names. Declare copies by",
    ),
    (
        [[claim("w", (3,), 0, whole=(4,))], [claim("w", (2,), 1, whole=(4,), offset=(2,))]],
        "part 0 and part 1 both claim numbers of tensor 'w': [0:3] and [2:4].",
    ),
    (
        [[claim("w", (2,), 0)], [claim("w", (3,), 1)]],
        "tensor 'w' has shape (2,) in part 0, but (3,) in part 1.",
    ),
    (
        [[of] for of in rows("w", (8, 2), 4)][:2],
        "parts of tensor 'w' of shape (8, 2) are missing: there are only [0:2, 0:2], [2:4, 0:2], 8 of its 16 numbers.",
    ),
    (
        [[claim("w", (0, 2), 0, whole=(3, 2), offset=(3, 0)), claim("x", (1,), 0)]],
        "parts of tensor 'w' are missing: there are only empty blocks.",
    ),
    ([[of] for of in rows("w", (3, 2), 4)], "Process 3 of the replica has nothing to train"),
    ([[claim("w", (2,), 0)], []], "Process 1 of the replica has nothing to train"),
    (
        [[claim("w", (2,), 0, holders=[0, 1])], [claim("w", (2,), 1, holders=[0, 1], group=1)]],
        "Tensor 'w' is in parameter group 0 of process 0's optimizer, but in group 1 of process 1's",
    ),
    ([[claim("w", (2,), 0), claim("w", (3,), 0)]], "Two tensors of process 0 of the replica have one name"),
]


def test_claims_that_are_no_model_are_refused_in_words_by_all():
    for claims, words in NO_MODELS:
        for index in range(len(claims)):
            with pytest.raises(InvalidArgument, match=re.escape(words)):
                arrange(claims, index, shard_size=DEFAULT_SHARD_SIZE)
