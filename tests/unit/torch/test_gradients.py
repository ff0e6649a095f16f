"""Gradients in the vectors that are pushed: absent tensors, sums, wire types, and gradients computed right there."""

import numpy as np
import pytest
import torch

from client_support import lent_for
from pyps_client.torch.gradients import LARGE_BYTES, Gradients
from pyps_wire.codecs import BFLOAT16, FLOAT16
from training import layout_of

VERSIONS = {0: 7}


def gradient_buffer(model: torch.nn.Module, codec: str = "float32") -> Gradients:
    layout = layout_of(model)
    return Gradients(layout, lent_for(layout, codec=codec).gradients[0])


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


class Interrupted(list[torch.Tensor]):
    """Gradients amid whose adding Ctrl-C comes."""

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if index == 1:
            raise KeyboardInterrupt
        return super().__getitem__(index)


def test_what_was_half_added_does_not_come_back_with_the_next_minibatch():
    buffer = gradient_buffer(linear())
    buffer.add([torch.full((2, 3), 5.0), torch.full((2,), 5.0)], versions={0: 2})
    buffer.clear()
    with pytest.raises(KeyboardInterrupt):
        buffer.add(Interrupted([torch.ones(2, 3), torch.ones(2)]), versions={0: 3})
    buffer.add([torch.ones(2, 3), torch.ones(2)], versions={0: 4})
    assert buffer.seal()
    assert buffer.vectors[0].tolist() == [1] * 8
    assert (buffer.minibatch_count, buffer.base_versions) == (1, {0: 4})


def test_a_tensor_is_present_when_one_minibatch_had_its_gradient_until_the_buffer_is_cleared():
    buffer = gradient_buffer(linear())
    buffer.add([torch.ones(2, 3), None], versions=VERSIONS, example_count=8)
    buffer.add([torch.ones(2, 3), torch.ones(2)], versions=VERSIONS)
    assert buffer.seal()
    assert buffer.present == [True, True]
    assert buffer.vectors[0].tolist() == [2] * 6 + [1] * 2
    buffer.clear()
    buffer.add([torch.ones(2, 3), None], versions=VERSIONS)
    assert buffer.seal()
    assert buffer.present == [True, False]
    assert buffer.vectors[0][:6].tolist() == [1] * 6
    assert (buffer.minibatch_count, buffer.example_count) == (1, 0)


@pytest.mark.parametrize(("codec", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_the_wire_type_is_rounded_to_from_the_float32_sum(codec, dtype):
    gradients = [torch.randn(2, 3), torch.randn(2)]
    buffer = gradient_buffer(linear(), codec)
    for _ in range(3):
        buffer.add(gradients, versions=VERSIONS)
    assert buffer.seal()
    summed = torch.cat([gradient.flatten() for gradient in gradients])
    expected = (summed + summed + summed).to(dtype)
    assert buffer.vectors[0].dtype == (np.float16 if codec == "float16" else np.uint16)
    assert buffer.vectors[0].view(np.uint16).tolist() == expected.view(torch.int16).numpy().view(np.uint16).tolist()


def test_bfloat16_parameters_gather_their_gradients_in_float32():
    buffer = gradient_buffer(linear().to(torch.bfloat16))
    for value in (256.0, 1.0):
        ones = torch.full((2, 3), value, dtype=torch.bfloat16)
        buffer.add([ones, None], versions=VERSIONS)
    buffer.seal()
    assert buffer.vectors[0][:6].tolist() == [257] * 6


def test_a_gradient_that_was_replaced_since_is_copied_and_none_is_handed_out_where_there_was_none():
    model = torch.nn.Linear(2, 2)
    buffer = gradient_buffer(model)
    model.weight.grad = torch.zeros(2, 2)
    buffer.hand_out()
    assert model.bias.grad is None
    model.weight.grad.copy_(torch.arange(4.0).view(2, 2))
    # Elsewhere, or transposed in its place.
    for replaced in (torch.full((2, 2), 5.0), model.weight.grad.t().clone(), model.weight.grad.t()):
        expected = replaced.flatten().tolist()
        buffer.add([replaced, None], versions=VERSIONS)
        assert buffer.vectors[0][:4].tolist() == expected
        buffer.clear()
        buffer.hand_out()
        model.weight.grad.copy_(torch.arange(4.0).view(2, 2))


def test_other_views_of_handed_out_memory_are_sent_with_their_own_numbers():
    model = torch.nn.ParameterList([torch.zeros(2, 2), torch.zeros(2, 2)])
    for name, view in {
        "exchanged": lambda a, b: (b, a),
        "exchanged and turned": lambda a, b: (b.t(), a.t()),
        "overlapping": lambda a, b: (a.as_strided((2, 2), (1, 1)), b),
        "moved and overlapping": lambda a, b: (a.as_strided((2, 2), (1, 1), a.storage_offset() + 1), b),
        "expanded": lambda a, b: (a[:1].expand(2, 2), b),
        "with its sign in a bit": lambda a, b: (torch._neg_view(a), b),
    }.items():
        buffer = gradient_buffer(model)
        for index, parameter in enumerate(model):
            parameter.grad = torch.zeros(2, 2)
            buffer.hand_out()
            parameter.grad.copy_(torch.arange(4.0).view(2, 2) + 10 * index)
        gradients = view(*(parameter.grad for parameter in model))
        expected = [number for gradient in gradients for number in gradient.flatten().tolist()]
        buffer.add(list(gradients), versions=VERSIONS)
        assert buffer.vectors[0].tolist()[:8] == expected, name


def test_gradients_of_another_type_or_format_stay_where_they_are():
    for model, codec in (
        (torch.nn.Linear(3, 2).to(torch.bfloat16), "float32"),
        (torch.nn.Linear(3, 2).double(), "float32"),
        (torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last), "float32"),
        (linear(), "float16"),
        (linear(), "bfloat16"),
    ):
        buffer = gradient_buffer(model, codec)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        before = model.weight.grad
        buffer.hand_out()
        assert model.weight.grad is before


@pytest.mark.parametrize("codec", ["float32", "float16", "bfloat16"])
def test_one_pass_over_memory_checks_a_minibatch_and_its_push(codec, monkeypatch):
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
    if codec != "float16":
        # Finite, though too large for a quick look.
        buffer.clear()
        buffer.add([torch.full((2, 3), 1e30), torch.ones(2)], versions=VERSIONS)
        assert buffer.are_finite() and buffer.seal()


@pytest.mark.parametrize(("codec", "large"), [(FLOAT16, 65520.0), (BFLOAT16, 3.3961776e38)])
def test_what_is_converted_on_its_way_gathers_in_place_and_must_fit_all_the_same(codec, large):
    model = linear()
    layout = layout_of(model)
    buffer = Gradients(layout, lent_for(layout).gradients[0], codec=codec)
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


def test_memory_of_large_gradients_is_given_back_once_and_that_of_small_ones_never(monkeypatch):
    calls = []
    monkeypatch.setattr("pyps_client.torch.gradients.give_back_free_memory", lambda: calls.append(1) or True)
    for size, expected in ((1000, 0), (LARGE_BYTES // 4 + 1, 1)):
        model = torch.nn.Linear(size, 1, bias=False)
        buffer = gradient_buffer(model)
        for _ in range(3):
            model.weight.grad = torch.zeros_like(model.weight)
            buffer.hand_out()
            assert model.weight.grad.data_ptr() == buffer.vectors[0].ctypes.data
        assert len(calls) == expected
