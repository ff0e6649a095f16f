"""Model parallelism: Dean et al., Large Scale Distributed Deep Networks (NIPS 2012), section 3.

The invariants P1 to P5 of the algorithm notes, section 2.6, on the networks of experiments/model_parallel.py. P6, and
P1 and P3 between real processes, are in tests/integration.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.model_parallel_dense import Dense
from experiments.model_parallel_machines import (
    Block,
    Floats,
    Minibatch,
    Receive,
    Send,
    Stopwatch,
    compute,
    join,
    repeated_crossings,
)
from experiments.model_parallel_patches import Patches, rectangles
from experiments.model_parallel_shards import contacts_are_own, push

# Relative to the norm of a tensor's gradient. The invariant says 1e-6, which is float32's.
DEVIATION_MAX = 1e-12

PARTS_MAX = 6
widths = st.lists(st.integers(PARTS_MAX, 17), min_size=2, max_size=5).map(tuple)
dense_nets = st.builds(Dense, widths, minibatch=st.integers(1, 5), dtype=st.just(np.float64), seed=st.integers(0, 1000))
local_nets = st.builds(
    Patches,
    image=st.tuples(st.integers(6, 10), st.integers(6, 10)),
    maps=st.integers(1, 3),
    num_layers=st.integers(1, 3),
    window=st.sampled_from([1, 3, 5]),
    minibatch=st.integers(1, 3),
    dtype=st.just(np.float64),
    seed=st.integers(0, 1000),
)
nets = st.one_of(dense_nets, local_nets)
num_parts = st.integers(1, PARTS_MAX)
quickly = settings(max_examples=25, deadline=None)


def run(net: Dense | Patches, parts: int) -> Minibatch:
    return compute(net.parts(parts), Stopwatch())


def assert_same(gradients: dict[str, Floats], wanted: dict[str, Floats]) -> None:
    assert gradients.keys() == wanted.keys()
    for name, tensor in wanted.items():
        deviation = np.linalg.norm(gradients[name] - tensor)
        assert deviation <= DEVIATION_MAX * np.linalg.norm(tensor), name


# P1: the gradient is that of the network in one piece.


def test_the_dense_network_in_one_piece_has_torchs_gradients() -> None:
    net = Dense((7, 6, 5, 9), minibatch=4, dtype=np.float64)
    tensors = [torch.tensor(array, requires_grad=True) for pair in net.parameters for array in pair]
    inputs, labels = map(torch.tensor, net.examples)

    states = inputs
    for matrix, bias in _pairs(tensors[:-2]):
        states = torch.sigmoid(states @ matrix + bias)
    torch.nn.functional.cross_entropy(states @ tensors[-2] + tensors[-1], labels).backward()

    names = [f"layer {index} {kind}" for index in (1, 2, 3) for kind in ("matrix", "bias")]
    assert_same(join(run(net, 1).gradients), {name: t.grad.numpy() for name, t in zip(names, tensors, strict=True)})


def test_the_local_network_in_one_piece_has_torchs_gradients() -> None:
    net = Patches(image=(6, 7), maps=2, num_layers=3, window=3, minibatch=4, dtype=np.float64)
    tensors = [torch.tensor(array, requires_grad=True) for pair in net.parameters for array in pair]
    states, targets = (torch.tensor(array).permute(2, 3, 0, 1) for array in net.examples)

    for weights, bias in _pairs(tensors):
        windows = torch.nn.functional.unfold(states, net.window, padding=net.reach)
        # unfold has a window's values map by map, the network place by place.
        windows = windows.reshape(len(states), states.shape[1], net.window**2, -1).transpose(1, 2).flatten(1, 2)
        flat = weights.reshape(-1, *weights.shape[2:])
        sums = torch.einsum("bkp,pkm->bmp", windows, flat) + bias.reshape(-1, net.maps).T
        states = torch.sigmoid(sums).reshape(len(states), net.maps, *net.image)
    (((states - targets) ** 2).sum() / 2 / net.minibatch).backward()

    names = [f"layer {index} {kind}" for index in (1, 2, 3) for kind in ("weights", "bias")]
    assert_same(join(run(net, 1).gradients), {name: t.grad.numpy() for name, t in zip(names, tensors, strict=True)})


def _pairs(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


@given(net=nets, parts=num_parts)
@quickly
def test_parts_compute_the_gradient_of_the_whole(net: Dense | Patches, parts: int) -> None:
    assert_same(join(run(net, parts).gradients), join(run(net, 1).gradients))


@given(net=dense_nets, stages=st.integers(1, 4), dtype=st.sampled_from([np.float32, np.float64]))
@quickly
def test_stages_have_the_bits_of_the_whole(net: Dense, stages: int, dtype: type) -> None:
    net = replace(net, dtype=dtype)

    staged = join(compute(net.stages(min(stages, net.num_layers)), Stopwatch()).gradients)

    whole = join(run(net, 1).gradients)
    assert staged.keys() == whole.keys()
    assert all(np.array_equal(staged[name], whole[name]) for name in whole)


# P2: a node's state crosses to a part once, however many edges it has there, and its gradient back once.


@given(net=nets, parts=num_parts)
@quickly
def test_no_node_crosses_to_a_part_twice_in_a_direction(net: Dense | Patches, parts: int) -> None:
    crossings = run(net, parts).crossings

    assert repeated_crossings(crossings, net.layer_shapes(parts)) == 0
    assert all(crossing.source != crossing.destination for crossing in crossings)
    up, down = (
        {(c.layer, str(c.nodes), *ends(c)) for c in crossings if c.direction == direction and c.layer != "softmax"}
        for direction, ends in (
            ("up", lambda c: (c.source, c.destination)),
            ("down", lambda c: (c.destination, c.source)),
        )
    )
    assert up == down, "each state that went up comes back as a gradient"


@given(net=local_nets, parts=num_parts)
@quickly
def test_of_a_patch_only_those_nodes_cross_that_another_parts_windows_reach(net: Patches, parts: int) -> None:
    own = rectangles(net.image, parts)
    part_of = {
        place: part
        for part, sides in enumerate(own)
        for place in itertools.product(*(range(s.start, s.stop) for s in sides))
    }
    wanted = set()
    for (row, column), (down, right) in itertools.product(
        part_of, itertools.product(range(-net.reach, net.reach + 1), repeat=2)
    ):
        reader = part_of.get((row + down, column + right))
        if reader is not None and reader != part_of[row, column]:
            wanted.add((row, column, reader))

    crossed = {
        (row, column, crossing.destination)
        for crossing in run(net, parts).crossings
        if (crossing.layer, crossing.direction) == ("layer 1", "up")
        for row in range(crossing.nodes[0].start, crossing.nodes[0].stop)
        for column in range(crossing.nodes[1].start, crossing.nodes[1].stop)
    }

    assert crossed == (wanted if net.num_layers > 1 else set())


def test_a_node_that_crosses_twice_is_counted() -> None:
    net = Dense((6, 6, 6), minibatch=1)
    crossings = run(net, 3).crossings
    twice = next(c for c in crossings if c.layer == "layer 1" and c.direction == "down")

    assert repeated_crossings([*crossings, twice], net.layer_shapes(3)) == 2, "both nodes of the message"


# P3: a part contacts the shards of its blocks and no other.


@given(net=nets, parts=num_parts, servers=st.integers(1, 5))
@quickly
def test_a_part_contacts_the_shards_of_its_blocks_alone(net: Dense | Patches, parts: int, servers: int) -> None:
    minibatch = run(net, parts)

    pushes = push(minibatch.gradients, servers)

    contacted = Counter(contact.shard_id for contact in pushes.contacts)
    assert contacted == {shard.shard_id: 1 for shard in pushes.partition.shards}
    assert all(pushes.contacted(part) == pushes.owned(part) for part in range(parts))
    assert contacts_are_own(pushes)
    held, whole = pushes.gradients(), join(minibatch.gradients)
    assert all(np.array_equal(held[name], whole[name]) for name in whole)


def test_a_contact_with_anothers_shard_is_seen() -> None:
    pushes = push(run(Dense((6, 6, 6), minibatch=1), 3).gradients, 2)
    strayed = replace(pushes.contacts[0], part=1)

    assert not contacts_are_own(replace(pushes, contacts=[*pushes.contacts, strayed]))
    assert not contacts_are_own(replace(pushes, contacts=[strayed, *pushes.contacts[1:]]))
    assert not contacts_are_own(replace(pushes, contacts=pushes.contacts[1:]))


# P4: the parts' parameters are the model, each once.


@given(net=nets, parts=num_parts)
@quickly
def test_the_parts_together_are_the_model(net: Dense | Patches, parts: int) -> None:
    gradients = run(net, parts).gradients

    assert len(gradients) == parts
    assert all(block.values.size for blocks in gradients for block in blocks)
    assert sum(block.values.size for blocks in gradients for block in blocks) == net.num_parameters
    assert sum(tensor.size for tensor in join(gradients).values()) == net.num_parameters


# P5: a minibatch is complete only when all parts are done.


def test_a_minibatch_does_not_end_before_its_last_part() -> None:
    def part(index: int):
        if index:
            yield Send(0, "layer", "up", (slice(index, index + 1),), np.ones(1))
        else:
            for source in (1, 2):
                yield Receive(source, "layer", "up")
        return [Block("w", (index,), (3,), np.ones(1))]

    assert len(join(compute([part(index) for index in range(3)], Stopwatch()).gradients)["w"]) == 3
    with pytest.raises(RuntimeError, match="waits for a message that nobody sends"):
        compute([part(0), part(1)], Stopwatch())
