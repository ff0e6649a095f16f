"""Model parallelism: Dean et al., Large Scale Distributed Deep Networks (NIPS 2012), section 3.

The invariants P1 to P4 of the algorithm notes, section 2.6, of the networks of experiments/model_parallel.py, small.
Between real processes they are in tests/integration.
"""

import numpy as np
import pytest
import torch

from experiments.model_parallel_machines import Cut, Dense, Local, Send, gradients, joined, steps
from pyps_wire.partition import Model, Tensor, partition

DENSE = Dense(widths=(20, 16, 12, 30), minibatch=4)
LOCAL = Local(side=24, channels=2, maps_per_node=2, layers=3, window=5, minibatch=4)
NETWORKS = pytest.mark.parametrize("network", [DENSE, LOCAL], ids=["dense", "local"])
PARTS = 6


@NETWORKS
@pytest.mark.parametrize(("dtype", "deviation_max"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_a_network_cut_by_nodes_has_the_gradients_of_the_whole_one(network, dtype, deviation_max):
    whole, cut = Cut.of_nodes(network, 1), Cut.of_nodes(network, PARTS)

    pairs = zip(joined(whole, gradients(whole, dtype)), joined(cut, gradients(cut, dtype)), strict=True)
    deviations = [float(torch.linalg.norm(cut - whole) / torch.linalg.norm(whole)) for whole, cut in pairs]

    # Sums in another order: where nothing differed, the network would not have been cut.
    assert 0 < max(deviations) <= deviation_max


@NETWORKS
def test_a_network_cut_by_layers_has_the_bits_of_the_whole_one(network):
    whole, cut = Cut.of_nodes(network, 1), Cut.of_layers(network, 3)

    for alone, together in zip(joined(whole, gradients(whole)), joined(cut, gradients(cut)), strict=True):
        assert torch.equal(together, alone)


@NETWORKS
def test_each_part_gets_what_it_reads_once_and_nothing_else(network):
    cut = Cut.of_nodes(network, PARTS)
    numbers = 0

    for layer in range(1, network.num_layers):
        for part in range(PARTS):
            counts = np.zeros(network.grid(layer), int)
            for holder, box in cut.crossing(layer, part).items():
                where = tuple(slice(*side) for side in box)
                counts[where] += 1
                numbers += (holder != part) * counts[where].size * int(np.prod(network.maps(layer)))
            wanted = np.zeros_like(counts)
            wanted[tuple(slice(*side) for side in network.reads(layer + 1, cut.own[layer][part]))] = 1
            assert (counts == wanted).all()

    sent = [step for plan in steps(cut) for step in plan if isinstance(step, Send)]
    for direction in ("up", "down"):
        of_direction = [step.num_bytes for step in sent if step.tag != "softmax" and step.tag[1] == direction]
        assert sum(of_direction) == 4 * network.minibatch * numbers


@NETWORKS
def test_each_part_contacts_the_shards_of_its_own_blocks_and_no_other(network):
    cut = Cut.of_nodes(network, PARTS)
    tensors = []
    for part, blocks in enumerate(gradients(cut)):
        for layer, own, values in blocks:
            offset = tuple(side.start or 0 for side in network.place(own))
            shape = network.weights(layer, network.whole(layer))
            offset += (0,) * (len(shape) - len(offset))
            tensors.append(Tensor(f"layer {layer}", tuple(values.shape), part, shape, offset, part))
    whole = partition(Model(tuple(tensors)), num_servers=4)

    contacted = [{shard.shard_id for shard in whole.of_parts([part]).shards} for part in range(PARTS)]

    for part in range(PARTS):
        holders = {
            shard.shard_id
            for shard in whole.shards
            if any(tensors[piece.tensor_index].part == part for piece in whole.pieces(shard.shard_id))
        }
        assert contacted[part] == holders
    assert sum(map(len, contacted)) == len(whole.shards)
