"""Gradients in the vectors that are pushed: absent tensors, sums, wire types, and gradients computed right there."""

import numpy as np
import pytest
import torch

from pyps_client.torch.gradient_buffer import LARGE_BYTES, GradientBuffer
from pyps_client.torch.layout import Layout, plan
from pyps_wire.common_pb2 import CODEC_BFLOAT16, CODEC_FLOAT16
from recording_session import lent_for

VERSIONS = {0: 7}


def layout_of(model: torch.nn.Module) -> Layout:
    return plan(model, [{"params": list(model.parameters())}])


def gradient_buffer(model: torch.nn.Module, codec: str = "float32") -> GradientBuffer:
    layout = layout_of(model)
    return GradientBuffer(layout, lent_for(layout, codec=codec).gradients[0])


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def test_minibatches_add_up_and_are_counted() -> None:
    buffer = gradient_buffer(linear())
    buffer.add([torch.ones(2, 3), torch.ones(2)], versions={0: 3}, example_count=8)
    buffer.add([torch.ones(2, 3) * 2, torch.ones(2) * 3], versions={0: 5}, example_count=4)
    assert buffer.seal()
    assert buffer.vectors[0].tolist() == [3] * 6 + [4] * 2
    assert (buffer.minibatch_count, buffer.example_count) == (2, 12)
    assert (buffer.base_versions, buffer.newest_base_versions) == ({0: 3}, {0: 5})


class Interrupted(list[torch.Tensor]):
    """Gradients amid whose adding Ctrl-C comes."""

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if index == 1:
            raise KeyboardInterrupt
        return super().__getitem__(index)


def test_what_was_half_added_does_not_come_back_with_the_next_minibatch() -> None:
    buffer = gradient_buffer(linear())
    with pytest.raises(KeyboardInterrupt):
        buffer.add(Interrupted([torch.ones(2, 3), torch.ones(2)]), versions={0: 3})
    buffer.add([torch.ones(2, 3), torch.ones(2)], versions={0: 4})
    assert buffer.seal()
    assert buffer.vectors[0].tolist() == [1] * 8
    assert (buffer.minibatch_count, buffer.base_versions) == (1, {0: 4})


def test_a_tensor_is_present_when_one_of_the_minibatches_had_its_gradient() -> None:
    buffer = gradient_buffer(linear())
    buffer.add([torch.ones(2, 3), None], versions=VERSIONS)
    buffer.add([torch.ones(2, 3), torch.ones(2)], versions=VERSIONS)
    buffer.seal()
    assert buffer.present == [True, True]
    assert buffer.vectors[0].tolist() == [2] * 6 + [1] * 2


def test_a_cleared_buffer_forgets_what_it_held() -> None:
    buffer = gradient_buffer(linear())
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
    buffer = gradient_buffer(linear(), codec)
    for _ in range(3):
        buffer.add(gradients, versions=VERSIONS)
    assert buffer.seal()
    summed = torch.cat([gradient.flatten() for gradient in gradients])
    expected = (summed + summed + summed).to(dtype)
    assert buffer.vectors[0].dtype == (np.float16 if codec == "float16" else np.uint16)
    assert buffer.vectors[0].view(np.uint16).tolist() == expected.view(torch.int16).numpy().view(np.uint16).tolist()


def test_an_overflow_on_the_wire_is_noticed_and_leaves_nothing_behind() -> None:
    buffer = gradient_buffer(linear(), "float16")
    buffer.add([torch.full((2, 3), 1e6), torch.ones(2)], versions=VERSIONS)
    assert not buffer.seal()
    buffer.clear()
    buffer.add([None, torch.ones(2)], versions=VERSIONS)
    assert buffer.seal()


def test_an_overflow_of_the_sum_is_noticed() -> None:
    buffer = gradient_buffer(linear())
    for _ in range(2):
        buffer.add([torch.full((2, 3), 3e38), torch.ones(2)], versions=VERSIONS)
    assert not buffer.seal()


def test_bfloat16_parameters_gather_their_gradients_in_float32() -> None:
    buffer = gradient_buffer(linear().to(torch.bfloat16))
    for value in (256.0, 1.0):
        ones = torch.full((2, 3), value, dtype=torch.bfloat16)
        buffer.add([ones, None], versions=VERSIONS)
    buffer.seal()
    assert buffer.vectors[0][:6].tolist() == [257] * 6


def test_channels_last_tensors_travel_in_logical_order() -> None:
    model = torch.nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)
    gradient = torch.arange(48.0).view(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    buffer = gradient_buffer(model)
    buffer.add([gradient], versions=VERSIONS)
    buffer.seal()
    assert buffer.vectors[0].tolist() == list(range(48))


def test_where_there_was_no_gradient_none_is_handed_out() -> None:
    model = linear()
    model.weight.grad = torch.ones(2, 3)
    gradient_buffer(model).hand_out()
    assert model.weight.grad is not None
    assert model.bias.grad is None


def test_what_is_computed_in_a_handed_out_gradient_lies_in_the_vector_without_a_copy() -> None:
    model = linear()
    buffer = gradient_buffer(model)
    model(torch.ones(1, 3)).sum().backward()
    buffer.hand_out()
    model.zero_grad(set_to_none=False)
    model(torch.arange(3.0).view(1, 3)).sum().backward()
    assert buffer.vectors[0].tolist() == [0, 1, 2, 0, 1, 2, 1, 1]
    buffer.add([parameter.grad for parameter in model.parameters()], versions=VERSIONS)
    assert buffer.seal()
    assert buffer.vectors[0].tolist() == [0, 1, 2, 0, 1, 2, 1, 1]
    assert buffer.present == [True, True]


def test_a_gradient_that_was_replaced_since_is_copied() -> None:
    model = linear()
    buffer = gradient_buffer(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    buffer.hand_out()
    model.weight.grad = torch.full((2, 3), 5.0)
    buffer.add([parameter.grad for parameter in model.parameters()], versions=VERSIONS)
    assert buffer.vectors[0].tolist() == [5] * 6 + [0] * 2


def test_a_gradient_that_was_transposed_in_its_place_is_copied() -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    buffer = gradient_buffer(model)
    model.weight.grad = torch.zeros(2, 2)
    buffer.hand_out()
    model.weight.grad.copy_(torch.arange(4.0).view(2, 2))
    buffer.add([model.weight.grad.t().clone()], versions=VERSIONS)
    assert buffer.vectors[0].tolist() == [0, 2, 1, 3]


def test_what_has_gathered_stays_when_gradients_are_taken_back_or_handed_out() -> None:
    for call in (GradientBuffer.take_back, GradientBuffer.hand_out):
        model = linear()
        buffer = gradient_buffer(model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        buffer.hand_out()
        for parameter in model.parameters():
            parameter.grad.fill_(2.0)
        buffer.add([parameter.grad for parameter in model.parameters()], versions=VERSIONS)
        call(buffer)
        assert model.bias.grad.tolist() == [2, 2]
        model.zero_grad(set_to_none=False)
        assert buffer.vectors[0].tolist() == [2] * 8


@pytest.mark.parametrize(
    "model",
    [
        torch.nn.Linear(3, 2).to(torch.bfloat16),
        torch.nn.Linear(3, 2).double(),
        torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last),
    ],
)
def test_gradients_of_another_type_or_format_stay_where_they_are(model) -> None:
    buffer = gradient_buffer(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = model.weight.grad
    buffer.hand_out()
    assert model.weight.grad is before


@pytest.mark.parametrize("codec", ["float16", "bfloat16"])
def test_no_gradient_is_handed_out_where_the_wire_has_another_type(codec) -> None:
    model = linear()
    buffer = gradient_buffer(model, codec)
    model.weight.grad = before = torch.zeros(2, 3)
    buffer.hand_out()
    assert model.weight.grad is before


def test_a_gradient_saves_without_the_others_memory(tmp_path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(2, 2))
    buffer = gradient_buffer(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    buffer.hand_out()
    torch.save(model[1].weight.grad, tmp_path / "gradient.pt")
    assert (tmp_path / "gradient.pt").stat().st_size < 10_000


@pytest.mark.parametrize("codec", ["float32", "float16", "bfloat16"])
def test_one_look_answers_both_questions_and_the_next_minibatch_asks_anew(codec, monkeypatch) -> None:
    looked = []
    dot = torch.dot
    monkeypatch.setattr(torch, "dot", lambda *pair: looked.append(pair[0].numel()) or dot(*pair))
    buffer = gradient_buffer(linear(), codec)
    gradients = [torch.ones(2, 3), torch.ones(2)]
    buffer.add(gradients, versions=VERSIONS)
    assert buffer.are_finite() and buffer.seal()
    assert looked == [8]
    buffer.add([torch.full((2, 3), 3e38), torch.ones(2)], versions=VERSIONS)
    buffer.add([torch.full((2, 3), 3e38), torch.ones(2)], versions=VERSIONS)
    assert not buffer.seal()


def test_what_is_finite_but_too_large_for_a_quick_look_is_sent() -> None:
    buffer = gradient_buffer(linear(), "bfloat16")
    buffer.add([torch.full((2, 3), 1e30), torch.ones(2)], versions=VERSIONS)
    assert buffer.are_finite() and buffer.seal()


@pytest.mark.parametrize(("codec", "large"), [(CODEC_FLOAT16, 65520.0), (CODEC_BFLOAT16, 3.3961776e38)])
def test_what_is_converted_on_its_way_gathers_in_place_and_must_fit_all_the_same(codec, large) -> None:
    model = linear()
    layout = layout_of(model)
    buffer = GradientBuffer(layout, lent_for(layout).gradients[0], codec=codec)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    buffer.hand_out()
    for parameter in model.parameters():
        parameter.grad.fill_(2.0)
    assert buffer.vectors[0].tolist() == [2] * 8
    buffer.add([parameter.grad for parameter in model.parameters()], versions=VERSIONS)
    assert buffer.are_finite() and buffer.seal()
    buffer.clear()
    model.bias.grad[1] = large
    buffer.add([parameter.grad for parameter in model.parameters()], versions=VERSIONS)
    assert buffer.are_finite() and not buffer.seal()


def test_memory_of_large_gradients_is_given_back_once_and_that_of_small_ones_never(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr("pyps_client.torch.gradient_buffer.give_back_free_memory", lambda: calls.append(1) or True)
    for size, expected in ((1000, 0), (LARGE_BYTES // 4 + 1, 1)):
        model = torch.nn.Linear(size, 1, bias=False)
        buffer = gradient_buffer(model)
        for _ in range(3):
            model.weight.grad = torch.zeros_like(model.weight)
            buffer.hand_out()
            assert model.weight.grad.data_ptr() == buffer.vectors[0].ctypes.data
        assert len(calls) == expected
