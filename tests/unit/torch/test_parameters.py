"""Pulled parameters on their way into a model: copied, or lying in the vectors themselves."""

import copy
import os
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from client_support import lent_for, values_of
from pyps_client.torch.layout import Layout, plan
from pyps_client.torch.parameters import Parameters, initial_values
from pyps_wire.partition import ShardRange, partition
from training import layout_of


def layout_elsewhere(model: torch.nn.Module) -> Layout:
    """As on a device: "meta" has no numbers, but takes every copy."""
    layout = layout_of(model)
    return replace(layout, parameters=tuple(tensor.to("meta") for tensor in layout.parameters))


def parameter_buffer(model: torch.nn.Module, codec: str = "float32", **options: bool) -> Parameters:
    layout = layout_of(model)
    return Parameters(layout, lent_for(layout, pull_codec=codec).parameters, **options)


def aliased(model: torch.nn.Module, **options: bool) -> Parameters:
    """A buffer whose first parameters, 0, 1, 2 and so on, are in the model."""
    buffer = parameter_buffer(model, alias=True, **options)
    fill(buffer)
    return buffer


def fill(buffer: Parameters, start: int = 0) -> None:
    for vector in buffer.vectors:
        vector[:] = np.arange(start, start + len(vector))
    buffer.write()


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


class CopiesFromHost(TorchDispatchMode):
    """Notes where what comes from the host is written to in a device's buffer: element, and how many from there."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default and args[0].is_meta and not args[1].is_meta:
            self.ranges.append((args[0].storage_offset(), args[0].numel()))
        return function(*args, **(kwargs or {}))


def values(model: torch.nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.detach().float().flatten().tolist()]


def lies_in(vector: np.ndarray, tensor: torch.Tensor) -> bool:
    return 0 <= tensor.data_ptr() - vector.ctypes.data < vector.nbytes


def test_writing_keeps_the_parameters_memory_format_place_and_requires_grad():
    model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    model.bias.requires_grad_(False)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    buffer = parameter_buffer(model)
    buffer.vectors[0][:] = np.arange(52)
    buffer.write()
    assert model.weight.flatten().tolist() == list(range(48))
    assert model.bias.tolist() == [48, 49, 50, 51]
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert model.weight.requires_grad
    assert not model.bias.requires_grad
    assert model.weight.is_leaf


def test_what_travels_in_half_precision_is_converted_exactly():
    for codec, dtype in product(["float16", "bfloat16"], [torch.float32, torch.bfloat16, torch.float64]):
        model = linear().to(dtype)
        buffer = parameter_buffer(model, codec, alias=True)
        sent = torch.randn(8).to(getattr(torch, codec))
        buffer.vectors[0].view(np.int16)[:] = sent.view(torch.int16).numpy()
        buffer.write()
        assert torch.equal(torch.cat([model.weight.flatten(), model.bias]), sent.to(dtype)), (codec, dtype)
        assert not lies_in(buffer.vectors[0], model.weight)


def test_parameters_lie_in_the_vectors_so_that_a_pull_moves_nothing():
    model = linear()
    model.bias.requires_grad_(False)
    buffer = aliased(model)
    assert values(model) == list(range(8))
    assert all(lies_in(buffer.vectors[0], parameter) for parameter in model.parameters())
    assert model.weight.requires_grad and model.weight.is_leaf and not model.bias.requires_grad
    before = model.weight.data_ptr()
    fill(buffer, start=10)
    assert values(model) == list(range(10, 18))
    assert model.weight.data_ptr() == before


def test_parameters_of_another_type_or_format_are_copied():
    for model in (
        torch.nn.Linear(3, 2).to(torch.bfloat16),
        torch.nn.Linear(3, 2).to(torch.float16),
        torch.nn.Linear(3, 2).double(),
        torch.nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last),
    ):
        place = model.weight.data_ptr()
        buffer = aliased(model)
        assert model.weight.data_ptr() == place
        fill(buffer, start=2)
        assert model.weight.flatten()[:4].tolist() == [2, 3, 4, 5]


def test_a_parameter_whose_memory_somebody_else_holds_stays_there_and_both_follow():
    model = linear()
    theirs = model.weight.detach()
    array = model.bias.detach().numpy()
    buffer = aliased(model)
    fill(buffer, start=5)
    assert theirs.flatten().tolist() == list(range(5, 11))
    assert array.tolist() == [11, 12]


def test_parameters_side_by_side_in_one_storage_stay_there():
    flat = torch.zeros(8)
    model = linear()
    model.weight.data, model.bias.data = flat[:6].view(2, 3), flat[6:]
    del flat
    place = model.weight.data_ptr()
    fill(aliased(model), start=1)
    assert model.weight.data_ptr() == place
    assert model.bias.data_ptr() == place + 24


def test_a_model_that_is_moved_later_still_gets_what_is_pulled():
    moves = (
        lambda model: model.share_memory(),
        lambda model: model.to(torch.float64),
        lambda model: setattr(model.weight, "data", torch.zeros(2, 3)),
        lambda model: model.load_state_dict({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}),
    )
    for move in moves:
        model = linear()
        buffer = aliased(model)
        move(model)
        fill(buffer, start=4)
        assert values(model) == list(range(4, 12))


def test_a_parameter_that_was_moved_before_a_fork_still_gets_what_is_pulled():
    model = linear()
    buffer = aliased(model, private=False)
    model.weight.data = torch.zeros(2, 3)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    fill(buffer, start=4)
    assert values(model) == list(range(4, 12))


@pytest.mark.parametrize("alias", [False, True])
def test_a_pull_between_forward_and_backward_is_noticed_by_autograd(alias):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    buffer = parameter_buffer(model, alias=alias)
    fill(buffer)
    loss = model(torch.ones(1, 2)).sum()
    fill(buffer, start=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_copied_model_has_memory_of_its_own():
    model = linear()
    buffer = aliased(model)
    twin = copy.deepcopy(model)
    fill(buffer, start=5)
    assert values(twin) == list(range(8))
    twin.weight.data.fill_(0.0)
    assert buffer.vectors[0].tolist() == list(range(5, 13))


def test_a_layer_saves_without_the_others_memory_and_loads_as_ever(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(3, 2))
    aliased(model)
    torch.save(model[1].state_dict(), tmp_path / "layer.pt")
    assert (tmp_path / "layer.pt").stat().st_size < 10_000
    layer = linear()
    layer.load_state_dict(torch.load(tmp_path / "layer.pt"))
    assert torch.equal(layer.weight, model[1].weight)


def test_initial_values_are_made_a_shard_at_a_time_and_are_those_of_the_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last),
        torch.nn.Linear(7, 11).to(torch.bfloat16),
        torch.nn.BatchNorm1d(13).double(),
    )
    groups = [{"params": [*model[0].parameters(), *model[1].parameters()]}, {"params": list(model[2].parameters())}]
    layout = plan(model, groups, shard_size=32, with_buffers=True)
    whole, of_shard = values_of(layout), initial_values(layout)
    shards = partition(layout.model, num_servers=2).shards
    assert len(shards) > 8
    for shard in shards:
        values = of_shard(shard)
        assert values.dtype == np.float32 and values.size == shard.length
        np.testing.assert_array_equal(values, whole[shard.group][shard.offset : shard.offset + shard.length])


@pytest.mark.parametrize("landed", [(), (1,), (2, 0), (0, 1, 2, 3)])
def test_a_shard_goes_to_the_device_once_as_it_lands_or_with_the_rest(landed):
    layout = layout_elsewhere(torch.nn.Linear(9, 10))
    shards = [ShardRange(number, 0, 30 * number, length) for number, length in enumerate((30, 30, 30, 10))]
    buffer = Parameters(layout, lent_for(layout).parameters)
    # What landed in one pull says nothing of the next.
    for numbers in (landed, ()):
        with CopiesFromHost() as early:
            for number in numbers:
                buffer.land(shards[number])
        assert early.ranges == [(shards[number].offset, shards[number].length) for number in numbers]
        with CopiesFromHost() as late:
            buffer.write()
        covered = [element for begin, length in early.ranges + late.ranges for element in range(begin, begin + length)]
        assert sorted(covered) == list(range(100))


def test_a_vector_that_was_read_again_is_copied_to_the_device_whole():
    layout = layout_elsewhere(torch.nn.Linear(9, 10))
    buffer = Parameters(layout, lent_for(layout).parameters)
    buffer.land(ShardRange(1, 0, 30, 30))
    buffer.separate()
    with CopiesFromHost() as copies:
        buffer.write()
    assert copies.ranges == [(0, 100)]
