"""Flat buffers of parameters on a GPU: conversion there, pinned memory, streams in order."""

import numpy as np
import pytest
import torch

from client_support import RecordingSession, lent_for, values_of
from pyps_client.torch.gradients import Gradients
from pyps_client.torch.parameters import Parameters
from pyps_client.vectors import values_at
from pyps_wire.codecs import INT4
from pyps_wire.partition import ShardRange
from training import flat, layout_of, started_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def network(*, spread: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).cuda()
    if spread:
        model[1].cpu()
    return model


def random_gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [torch.randn_like(parameter) for parameter in model.parameters()]


def on_host(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.from_numpy(flat([tensor.cpu() for tensor in tensors]))


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("codec", ["float32", "float16", "bfloat16"])
def test_gradients_arrive_on_the_host_as_converted_on_the_device(codec, spread):
    model = network(spread=spread)
    layout = layout_of(model)
    buffer = Gradients(layout, lent_for(layout, codec=codec).gradients[0])
    first, second = random_gradients(model), random_gradients(model)
    buffer.add(first, versions={0: 1})
    buffer.add(second, versions={0: 1})
    assert buffer.seal()
    buffer.ready()
    expected = (on_host(first) + on_host(second)).to(getattr(torch, codec))
    bits = torch.int32 if codec == "float32" else torch.int16
    assert np.array_equal(buffer.vectors[0].view(expected.view(bits).numpy().dtype), expected.view(bits).numpy())


@pytest.mark.parametrize("spread", [False, True])
def test_gradients_that_their_device_encodes_stay_on_it_where_it_has_all_of_a_group(spread):
    model = network(spread=spread)
    layout, gradients = layout_of(model), random_gradients(model)
    buffer = Gradients(layout, lent_for(layout).gradients[0], codec=INT4)
    buffer.add(gradients, versions={0: 1})
    assert buffer.seal()
    buffer.ready()
    sealed = buffer.sealed[0]
    assert isinstance(sealed, np.ndarray) == buffer.vectors[0].any() == spread
    assert np.array_equal(values_at(sealed, ((0, sealed.size),)), on_host(gradients).numpy())


@pytest.mark.parametrize("spread", [False, True])
def test_parameters_go_to_the_device_and_back(spread):
    model = network(spread=spread)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    layout = layout_of(model)
    buffer = Parameters(layout, lent_for(layout).parameters)
    for value in (1.0, 2.0):
        buffer.wait_until_free()
        buffer.vectors[0][:] = np.arange(len(buffer.vectors[0])) * value
        buffer.write()
    assert torch.equal(on_host(list(model.parameters())), torch.arange(3 * 65 * 64.0) * 2)
    assert np.array_equal(values_of(layout)[0], np.arange(3 * 65 * 64) * 2)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


@pytest.mark.parametrize("spread", [False, True])
def test_shards_are_copied_to_the_device_while_others_arrive(spread):
    model = network(spread=spread)
    layout = layout_of(model)
    buffer = Parameters(layout, lent_for(layout).parameters)
    length = len(buffer.vectors[0])
    for number in range(20):
        buffer.wait_until_free()
        buffer.vectors[0][:] = np.arange(length) + number
        for begin in range(0, length // 2, 1000):
            buffer.land(ShardRange(begin, 0, begin, 1000))
        buffer.write()
        assert torch.equal(on_host(list(model.parameters())), torch.arange(length, dtype=torch.float32) + number)


@pytest.mark.parametrize("overlap", ["off", "step"])
def test_a_gpu_worker_pushes_all_it_computes(overlap):
    model = network()
    session = RecordingSession(values_of(layout_of(model)), rate=0.01)
    worker = started_steps(session, model, overlap=overlap)
    total = torch.zeros(3 * 65 * 64, dtype=torch.float64)
    for _ in range(20):
        model.zero_grad()
        model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        total += on_host(gradients)
        worker.step(gradients)
    worker.flush()
    worker.close()
    pushed = np.sum([pushed.vectors[0].astype(np.float64) for pushed in session.pushes], axis=0)
    np.testing.assert_allclose(pushed, total.numpy(), atol=1e-5)


def test_a_nan_on_the_device_is_not_sent():
    model = network()
    session = RecordingSession(values_of(layout_of(model)))
    worker = started_steps(session, model)
    gradients = random_gradients(model)
    gradients[-1][-1] = float("nan")
    worker.step(gradients)
    assert session.pushes == []


def test_vectors_are_pinned_while_the_worker_is_open():
    model = network()
    session = RecordingSession(values_of(layout_of(model)), rate=0.01)
    worker = started_steps(session, model)
    lent = [*worker.parameters.vectors, *worker.gradients.vectors]
    assert all(torch.from_numpy(vector).is_pinned() for vector in lent)
    worker.step(random_gradients(model))
    worker.close()
    assert not any(torch.from_numpy(vector).is_pinned() for vector in lent)
    assert np.array_equal(values_of(layout_of(model))[0], session.parameters[0])


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("codec", ["float16", "bfloat16"])
def test_parameters_cross_the_bus_as_they_travelled_and_are_converted_on_the_device(codec, spread):
    model = network(spread=spread)
    session = RecordingSession(values_of(layout_of(model)), rate=0.01, pull_codec=codec)
    worker = started_steps(session, model)
    for _ in range(3):
        worker.step(random_gradients(model))
    expected = torch.from_numpy(session.parameters[0]).to(getattr(torch, codec)).float()
    assert torch.equal(on_host(list(model.parameters())), expected)
    worker.close()


def test_gradients_stay_on_the_device_when_made_zero_in_place():
    model = network()
    session = RecordingSession(values_of(layout_of(model)), rate=0.01)
    worker = started_steps(session, model)
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    worker.before_clearing(in_place=True)
    assert all(parameter.grad.is_cuda for parameter in model.parameters())
    worker.close()
