import pytest
import torch

from pyps_client.torch.layout import Layout, Range, plan
from pyps_wire.errors import InvalidArgument
from pyps_wire.partition import Model, Tensor


def groups(*parameters: torch.Tensor) -> list[dict]:
    return [{"params": list(parameters)}]


class Holder(torch.nn.Module):
    def __init__(self, *parameters: torch.nn.Parameter) -> None:
        super().__init__()
        for index, parameter in enumerate(parameters):
            self.register_parameter(f"p{index}", parameter)


def test_tensors_lie_end_to_end_in_the_optimizers_order_by_group():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    layout = plan(model, [{"params": list(model[1].parameters())}, {"params": list(model[0].parameters())}])
    assert [(t.name, t.shape, t.group) for t in layout.model.tensors] == [
        ("1.weight", (1, 2), 0),
        ("1.bias", (1,), 0),
        ("0.weight", (2, 3), 1),
        ("0.bias", (2,), 1),
    ]
    assert layout.model.offsets == (0, 2, 0, 6)
    assert layout.model.group_sizes == (3, 8)


def test_one_block_a_group_and_device_with_a_batch_a_dtype():
    model = Holder(
        torch.nn.Parameter(torch.zeros(2)),
        torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
        torch.nn.Parameter(torch.zeros(4)),
    )
    (block,) = plan(model, groups(*model.parameters())).blocks
    assert block.batches == ((0, 2), (1,))
    assert block.ranges == (Range(0, 0, 9),)


def test_parameters_that_share_memory_are_refused_with_both_names():
    storage = torch.zeros(8)
    model = Holder(torch.nn.Parameter(storage[:5]), torch.nn.Parameter(storage[4:]))
    with pytest.raises(InvalidArgument, match=r"'p0' and 'p1' are different Parameter objects that share memory"):
        plan(model, groups(*model.parameters()))


def test_what_cannot_live_on_a_server_is_refused_with_its_name():
    for tensor, words in (
        (torch.zeros(2, device="meta"), "meta device"),
        (torch.zeros(2, dtype=torch.complex64), "complex"),
        (torch.zeros(2, dtype=torch.int32), "torch.int32"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.zeros(1).expand(3), "share memory"),
    ):
        parameter = torch.nn.Parameter(tensor, requires_grad=tensor.dtype != torch.int32)
        model = Holder(torch.nn.Parameter(torch.zeros(1)), parameter)
        with pytest.raises(InvalidArgument, match=f"Parameter 1 of group 0, 'p1' .*{words}"):
            plan(model, groups(*model.parameters()))
    with torch.inference_mode():
        model = torch.nn.Linear(2, 2)
    with pytest.raises(InvalidArgument, match=r"'weight' .* was made under torch.inference_mode\(\)"):
        plan(model, groups(*model.parameters()))


def test_groups_that_are_not_of_this_model_or_not_of_a_shape_yet_are_refused():
    model, lazy = torch.nn.Linear(2, 2), torch.nn.LazyLinear(2)
    strange = torch.nn.Parameter(torch.zeros(7))
    for module, param_groups, words in (
        (model, groups(model.weight, strange), r"Parameter 1 of group 0 \(shape \(7,\)\) is not a parameter"),
        (model, [*groups(*model.parameters()), {"params": []}], "Parameter group 1 is empty"),
        (lazy, groups(*lazy.parameters()), "has no shape yet: run one batch"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            plan(module, param_groups)


def test_tensors_of_a_group_on_two_devices_lie_in_two_blocks_that_know_their_ranges():
    devices = ["cpu", "meta", "meta", "cpu", "meta"]
    parameters = tuple(torch.zeros(size, device=device) for size, device in enumerate(devices, start=1))
    model = Model(tuple(Tensor(f"p{size}", (size,)) for size in range(1, 6)))
    here, there = Layout(model, parameters, names={}, first_buffer=5).blocks
    assert (here.device.type, here.ranges, here.length) == ("cpu", (Range(0, 0, 1), Range(1, 6, 4)), 5)
    assert (there.device.type, there.ranges) == ("meta", (Range(0, 1, 5), Range(5, 10, 5)))
    assert there.offsets == {1: 0, 2: 2, 4: 5}
