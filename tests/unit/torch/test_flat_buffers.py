"""Gradients and parameters through flat buffers: absent tensors, memory formats, dtypes, wire types."""

import numpy as np
import pytest
import torch

from pyps_client.torch.flat_buffers import GradientBuffer, ParameterBuffer, all_finite
from pyps_client.torch.layout import Layout, plan
from pyps_wire.errors import BadRequest

VERSIONS = {0: 7}


def layout_of(model: torch.nn.Module) -> Layout:
    return plan(model, [{"params": list(model.parameters())}])


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def test_a_gradient_lies_in_the_vector_where_its_tensor_does() -> None:
    buffer = GradientBuffer(layout_of(linear()), "float32")
    buffer.add([torch.arange(6.0).view(2, 3), torch.tensor([6.0, 7.0])], versions=VERSIONS)
    assert buffer.seal()
    assert buffer.vectors[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_minibatches_add_up_and_are_counted() -> None:
    buffer = GradientBuffer(layout_of(linear()), "float32")
    buffer.add([torch.ones(2, 3), torch.ones(2)], versions={0: 3}, example_count=8)
    buffer.add([torch.ones(2, 3) * 2, torch.ones(2) * 3], versions={0: 5}, example_count=4)
    assert buffer.seal()
    assert buffer.vectors[0].tolist() == [3] * 6 + [4] * 2
    assert (buffer.minibatch_count, buffer.example_count) == (2, 12)
    assert (buffer.base_versions, buffer.newest_base_versions) == ({0: 3}, {0: 5})


def test_a_tensor_without_a_gradient_is_absent() -> None:
    buffer = GradientBuffer(layout_of(linear()), "float32")
    buffer.add([None, torch.ones(2)], versions=VERSIONS)
    assert buffer.present == [False, True]


def test_a_tensor_is_present_when_one_of_the_minibatches_had_its_gradient() -> None:
    buffer = GradientBuffer(layout_of(linear()), "float32")
    buffer.add([torch.ones(2, 3), None], versions=VERSIONS)
    buffer.add([torch.ones(2, 3), torch.ones(2)], versions=VERSIONS)
    buffer.seal()
    assert buffer.present == [True, True]
    assert buffer.vectors[0].tolist() == [2] * 6 + [1] * 2


def test_a_cleared_buffer_forgets_what_it_held() -> None:
    buffer = GradientBuffer(layout_of(linear()), "float32")
    buffer.add([torch.ones(2, 3), torch.ones(2)], versions=VERSIONS, example_count=8)
    buffer.clear()
    buffer.add([torch.ones(2, 3), None], versions=VERSIONS)
    buffer.seal()
    assert buffer.present == [True, False]
    assert buffer.vectors[0][:6].tolist() == [1] * 6
    assert (buffer.minibatch_count, buffer.example_count) == (1, 0)


@pytest.mark.parametrize(("codec", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_the_wire_type_is_rounded_to_from_the_float32_sum(codec, dtype) -> None:
    gradients = [torch.randn(2, 3), torch.randn(2)]
    buffer = GradientBuffer(layout_of(linear()), codec)
    for _ in range(3):
        buffer.add(gradients, versions=VERSIONS)
    assert buffer.seal()
    summed = torch.cat([gradient.flatten() for gradient in gradients])
    expected = (summed + summed + summed).to(dtype)
    assert buffer.vectors[0].dtype == (np.float16 if codec == "float16" else np.uint16)
    assert buffer.vectors[0].view(np.uint16).tolist() == expected.view(torch.int16).numpy().view(np.uint16).tolist()


def test_an_unknown_wire_type_is_refused() -> None:
    with pytest.raises(BadRequest, match="'int8'; expected one of float32, float16, bfloat16"):
        GradientBuffer(layout_of(linear()), "int8")


def test_an_overflow_on_the_wire_is_noticed_and_leaves_nothing_behind() -> None:
    buffer = GradientBuffer(layout_of(linear()), "float16")
    buffer.add([torch.full((2, 3), 1e6), torch.ones(2)], versions=VERSIONS)
    assert not buffer.seal()
    buffer.clear(overflowed=True)
    buffer.add([None, torch.ones(2)], versions=VERSIONS)
    assert buffer.seal()


def test_an_overflow_of_the_sum_is_noticed() -> None:
    buffer = GradientBuffer(layout_of(linear()), "float32")
    for _ in range(2):
        buffer.add([torch.full((2, 3), 3e38), torch.ones(2)], versions=VERSIONS)
    assert not buffer.seal()


def test_bfloat16_parameters_gather_their_gradients_in_float32() -> None:
    buffer = GradientBuffer(layout_of(linear().to(torch.bfloat16)), "float32")
    for value in (256.0, 1.0):
        ones = torch.full((2, 3), value, dtype=torch.bfloat16)
        buffer.add([ones, None], versions=VERSIONS)
    buffer.seal()
    assert buffer.vectors[0][:6].tolist() == [257] * 6


def test_channels_last_tensors_travel_in_logical_order() -> None:
    model = torch.nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)
    gradient = torch.arange(48.0).view(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    buffer = GradientBuffer(layout_of(model), "float32")
    buffer.add([gradient], versions=VERSIONS)
    buffer.seal()
    assert buffer.vectors[0].tolist() == list(range(48))


def test_writing_keeps_the_parameters_memory_format_place_and_requires_grad() -> None:
    model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    model.bias.requires_grad_(False)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    buffer = ParameterBuffer(layout_of(model))
    buffer.vectors[0][:] = np.arange(52)
    buffer.write()
    assert model.weight.flatten().tolist() == list(range(48))
    assert model.bias.tolist() == [48, 49, 50, 51]
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert model.weight.requires_grad
    assert not model.bias.requires_grad
    assert model.weight.is_leaf


def test_a_write_between_forward_and_backward_is_noticed_by_autograd() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    buffer = ParameterBuffer(layout_of(model))
    loss = model(torch.ones(1, 2)).sum()
    buffer.write()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_reading_gives_the_models_own_values_in_float32() -> None:
    model = linear().to(torch.bfloat16)
    (vector,) = ParameterBuffer(layout_of(model)).read()
    assert vector.dtype == np.float32
    assert vector.tolist() == [*model.weight.flatten().tolist(), *model.bias.tolist()]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_is_found_in_the_last_place(bad) -> None:
    values = torch.zeros(1000)
    values[-1] = bad
    assert not all_finite([torch.zeros(3), values])


def test_finite_values_with_an_overflowing_sum_are_finite() -> None:
    assert all_finite([torch.full((10,), 3e38)])
