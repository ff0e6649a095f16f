"""RemoteOptimizer in memory that a session lends, over each transport and real servers."""

import copy
import os

import numpy as np
import pytest
import torch

from pyps_client import RemoteOptimizer
from pyps_wire.errors import BadRequest, NotFinite
from training import addresses, backward, batches, gradients_of, mlp, parameters_of, status

TRANSPORTS = ["grpc", "shm"]


def remote(model: torch.nn.Module, servers: str, *, lr: float = 0.1, **options) -> RemoteOptimizer:
    return RemoteOptimizer(model, torch.optim.SGD(model.parameters(), lr=lr), servers, **options)


def backward_in_place(model: torch.nn.Module, optimizer: RemoteOptimizer, batch) -> None:
    """As `backward`, with gradients that are made zero rather than None."""
    optimizer.zero_grad(set_to_none=False)
    torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_way_gives_the_formulas_bits(start_server, transport, num_servers) -> None:
    """Plain SGD in numpy: p - rate * g, in float32."""
    servers = [start_server() for _ in range(num_servers)]
    model = mlp()
    expected = parameters_of(model)
    with remote(model, addresses(servers), transport=transport) as optimizer:
        assert optimizer.transport == transport
        for number, batch in enumerate(batches(30)):
            if number % 3 == 0:
                backward(model, batch)
            else:
                backward_in_place(model, optimizer, batch)
            expected = expected - np.float32(0.1) * gradients_of(model)
            optimizer.step()
            np.testing.assert_array_equal(parameters_of(model), expected)
        assert optimizer.global_step == 30
        held = {name: tensor.tolist() for name, tensor in optimizer.snapshot().items()}
    assert held == {name: parameter.tolist() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {"push_every": 2, "pull_every": 3, "local_learning_rate": 0.05},
        {"push_every": 3, "read_my_writes": True},
        {"gradient_dtype": "bfloat16"},
        {"gradient_dtype": "float16", "parameter_dtype": "bfloat16"},
        {"parameter_dtype": "float16"},
    ],
)
def test_every_way_trains_alike_whatever_is_asked_for(start_server, options) -> None:
    trained = []
    for way in TRANSPORTS:
        model = mlp()
        with remote(model, start_server("--staleness", "none").data, transport=way, **options) as optimizer:
            for batch in batches(12):
                backward_in_place(model, optimizer, batch)
                optimizer.step()
        trained.append(parameters_of(model))
    np.testing.assert_array_equal(*trained)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_travel_in_half_the_bytes_and_are_float32_on_the_servers(start_server, transport, dtype) -> None:
    server = start_server()
    model = mlp()
    masters = parameters_of(model)
    with remote(model, server.data, transport=transport, parameter_dtype=dtype) as optimizer:
        joined = status(server)
        for batch in batches(5):
            backward(model, batch)
            masters = masters - np.float32(0.1) * gradients_of(model)
            optimizer.step()
            rounded = torch.from_numpy(masters).to(getattr(torch, dtype)).float().numpy()
            np.testing.assert_array_equal(parameters_of(model), rounded)
        if transport == "grpc":
            assert status(server).bytes_out - joined.bytes_out == 5 * 2 * len(masters)
        snapshot = optimizer.snapshot()
    np.testing.assert_array_equal(np.concatenate([tensor.flatten() for tensor in snapshot.values()]), masters)


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("overlap", ["off", "step"])
def test_over_grpc_halves_leave_and_reach_the_models_own_float32(start_server, overlap, num_servers) -> None:
    servers = [start_server() for _ in range(num_servers)]
    model = mlp()
    halves = {"gradient_dtype": "bfloat16", "parameter_dtype": "float16", "overlap": overlap, "transport": "grpc"}
    with remote(model, addresses(servers), **halves) as optimizer:
        for batch in batches(6):
            backward_in_place(model, optimizer, batch)
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        weight = model[0].weight
        # Without overlap there is no other copy of the model, nor of its gradient.
        in_place = overlap == "off"
        assert (weight.data_ptr() == optimizer._downpour._parameters.vectors[0].ctypes.data) == in_place
        assert (weight.grad.data_ptr() == optimizer._downpour._gradients.vectors[0].ctypes.data) == in_place
        if in_place:
            assert torch.equal(weight, weight.half().float())
    assert model[0].weight.isfinite().all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parameters_change_in_the_workers_own_steps_only(start_server, transport) -> None:
    server = start_server()
    models = [mlp(), mlp(seed=1)]
    with (
        remote(models[0], server.data, run_id="r", worker_id="a", transport=transport) as first,
        remote(models[1], server.data, run_id="r", worker_id="b", transport=transport) as second,
    ):
        before = parameters_of(models[0])
        for batch in batches(5):
            backward(models[1], batch)
            second.step()
            np.testing.assert_array_equal(parameters_of(models[0]), before)
        backward(models[0], next(batches(1)))
        first.step()
        expected = parameters_of(models[1]) - np.float32(0.1 / 5) * gradients_of(models[0])
        np.testing.assert_allclose(parameters_of(models[0]), expected, atol=1e-6)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_nan_changes_nothing_on_the_servers_and_ten_end_the_worker(start_server, transport, caplog) -> None:
    server = start_server()
    model = mlp()
    with remote(model, server.data, transport=transport) as optimizer:

        def step(factor: float) -> None:
            backward(model, next(batches(1)))
            model[2].bias.grad[7] *= factor
            optimizer.step()

        step(1.0)
        before = parameters_of(model)
        for _ in range(3):
            step(float("nan"))
        np.testing.assert_array_equal(parameters_of(model), before)
        assert (optimizer.skipped, status(server).version_max) == (3, 1)
        assert "the gradient of 2.bias[7] is nan: this push is skipped (3 in a row" in caplog.text
        step(1.0)
        assert status(server).version_max == 2
        for _ in range(9):
            step(float("inf"))
        with pytest.raises(NotFinite, match=r"gradient of 2\.bias\[7\] is -?inf; 10 gradients in a row"):
            step(float("inf"))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_closed_optimizer_leaves_an_ordinary_model(start_server, transport, tmp_path) -> None:
    server = start_server()
    model = mlp()
    with remote(model, server.data, transport=transport) as optimizer:
        for batch in batches(3):
            backward_in_place(model, optimizer, batch)
            optimizer.step()
        during = copy.deepcopy(model)
        torch.save(model.state_dict(), tmp_path / "model.pt")
    trained = parameters_of(model)
    np.testing.assert_array_equal(parameters_of(during), trained)
    loaded = mlp(seed=3)
    loaded.load_state_dict(torch.load(tmp_path / "model.pt"))
    np.testing.assert_array_equal(parameters_of(loaded), trained)
    del optimizer
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, next(batches(1)))
    expected = trained - np.float32(0.1) * gradients_of(model)
    local.step()
    np.testing.assert_allclose(parameters_of(model), expected, atol=1e-7)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_same_model_may_join_again_after_closing(start_server, transport) -> None:
    server = start_server()
    model = mlp()
    expected = parameters_of(model)
    for _ in range(2):
        with remote(model, server.data, run_id="r", worker_id="w", transport=transport) as optimizer:
            for batch in batches(2):
                backward_in_place(model, optimizer, batch)
                expected = expected - np.float32(0.1) * gradients_of(model)
                optimizer.step()
            np.testing.assert_array_equal(parameters_of(model), expected)


class Watching(torch.utils.data.Dataset):
    """Examples that say what the model was when their process saw it: a fingerprint of its parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, float]:
        return os.getpid(), float(parameters_of(self.model).astype(np.float64).sum())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_loaders_processes_keep_the_model_that_they_were_forked_with(start_server, transport) -> None:
    server = start_server()
    model = mlp()
    with remote(model, server.data, transport=transport) as optimizer:
        for _ in range(2):
            now = float(parameters_of(model).astype(np.float64).sum())
            loader = torch.utils.data.DataLoader(
                Watching(model), batch_size=2, num_workers=2, multiprocessing_context="fork"
            )
            seen = []
            for processes, sums in loader:
                seen += zip(processes.tolist(), sums.tolist(), strict=True)
                backward_in_place(model, optimizer, next(batches(1)))
                optimizer.step()
            assert len({process for process, _ in seen}) == 2
            assert {total for _, total in seen} == {now}
        assert optimizer.global_step == 24


def test_an_unknown_type_or_transport_is_refused_by_name() -> None:
    model = mlp()
    for options, message in (
        ({"gradient_dtype": "int8"}, "'int8'; choose one of float32, float16, bfloat16"),
        ({"parameter_dtype": "int8"}, "'int8'; choose one of float32, float16, bfloat16"),
        ({"transport": "rdma"}, "transport is 'rdma'; expected one of auto, shm, grpc"),
    ):
        with pytest.raises(BadRequest, match=message):
            remote(model, "127.0.0.1:1", **options)


def test_steps_are_seen_by_hooks_and_by_torchs_profiler(start_server) -> None:
    server = start_server()
    model = mlp()
    with remote(model, server.data) as optimizer:
        calls: list[str] = []
        hooks = [
            optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
            optimizer.register_step_post_hook(lambda *_: calls.append("after")),
        ]
        backward(model, next(batches(1)))
        optimizer.step()
        assert calls == ["before", "after"]
        for hook in hooks:
            hook.remove()
        with torch.autograd.profiler.profile() as profile:
            optimizer.step()
        assert "Optimizer.step#RemoteOptimizer.step" in [event.key for event in profile.key_averages()]
        assert calls == ["before", "after"]
