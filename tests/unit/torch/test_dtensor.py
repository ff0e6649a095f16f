"""What a worker of one process claims, and what a Replica refuses before it speaks to anybody."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from pyps_client.replica.arrangement import arrange
from pyps_client.replica.dtensor import claims_of
from pyps_client.replica.group import ALONE
from pyps_client.replica.processes import Block, Replica
from pyps_client.torch.layout import plan
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import Model, Tensor


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_replica_all_is_held_as_a_whole():
    linear = torch.nn.Linear(3, 2)
    claimed = claims_of([[("weight", linear.weight)], [("bias", linear.bias)]], ALONE)
    assert [(c.name, c.param_group, c.shape, c.whole_shape, c.offset, c.holders) for c in claimed.claims] == [
        ("weight", 0, (2, 3), (2, 3), (0, 0), {0}),
        ("bias", 1, (2,), (2,), (0,), {0}),
    ]
    assert claimed.local[0] is linear.weight
    linear(torch.ones(3)).sum().backward()
    weight, bias = claimed.gradients()
    assert weight is linear.weight.grad
    assert bias is linear.bias.grad


def test_a_replica_of_one_process_is_a_plain_worker(world_of_one):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    replica = Replica(blocks={"block": Block((0,), (3,))}, replicated=["norm"])
    cut = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    named = [("cut", torch.nn.Parameter(cut)), ("block", torch.ones(3)), ("norm", torch.ones(2))]
    claimed = claims_of([named], replica)
    arrangement = arrange(replica.all_gather(claimed.claims), replica.index, shard_size=1024)
    assert arrangement.model == Model((Tensor("cut", (4, 2)), Tensor("block", (3,)), Tensor("norm", (2,))), 1024)
    assert arrangement.copies == ()
    assert (replica.index, replica.count, replica.broadcast("word"), replica.all_reduce([0.5])) == (0, 1, "word", [0.5])


def test_a_dtensor_without_a_replica_is_refused_in_one_sentence(world_of_one):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    up = torch.nn.Linear(2, 2, bias=False)
    up.weight = torch.nn.Parameter(distribute_tensor(torch.zeros(2, 2), init_device_mesh("cpu", (1,)), [Shard(0)]))
    with pytest.raises(InvalidArgument, match=r"'up.weight' is a DTensor.*give RemoteOptimizer replica=Replica\(\)"):
        plan(torch.nn.ModuleDict({"up": up}), [{"params": [up.weight]}])


def test_a_replica_that_cannot_be_is_refused(world_of_one):
    with pytest.raises(
        InvalidArgument, match=r"Process 0 of torch\.distributed is not in the group, whose processes are \[\]"
    ):
        Replica(dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(
        InvalidArgument, match=r"replicated is 'norm'; give a list of names, as in replicated=\['norm'\]"
    ):
        Replica(replicated="norm")


def test_a_replica_needs_a_process_group():
    with pytest.raises(InvalidArgument, match=r"call torch\.distributed\.init_process_group\(\) before it"):
        Replica()
