"""RemoteOptimizer in memory that a session lends, over each transport and real servers."""

import copy
import os

import numpy as np
import pytest
import torch

from certified import served, shown
from client_support import addresses
from pyps_client import RemoteOptimizer
from pyps_client.pull import Receiver
from pyps_client.transport import Incoming
from pyps_wire import inspector_pb2 as pb
from pyps_wire.errors import NotFinite, ServerUnavailable
from support import inspect, status_of
from training import backward, batches, gradients_of, mlp, parameters_of, remote, train

TRANSPORTS = ["grpc", "tcp", "shm"]


def backward_in_place(model: torch.nn.Module, optimizer: RemoteOptimizer, batch) -> None:
    """As `backward`, with gradients that are made zero rather than None."""
    optimizer.zero_grad(set_to_none=False)
    torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def test_an_optimizer_trains_over_mutual_tls_with_a_token(start_server, made, tmp_path):
    token = tmp_path / "token"
    token.write_text("correct-horse\n", encoding="utf-8")
    server = start_server(*served(made / "sound", mutual=True), "--token-file", str(token))
    model, own = mlp(), shown(made / "sound", mutual=True)
    # It joins over gRPC and trains on the lane.
    with remote(model, server, transport="tcp", token_file=token, **own) as optimizer:
        train(batches(1), (model, optimizer))
        assert (optimizer.transport, optimizer.global_step) == ("tcp", 1)


OPTIONS = [
    {},
    {"push_every": 2, "pull_every": 3, "local_learning_rate": 0.05},
    {"push_every": 3},
    {"gradient_codec": "float16", "parameter_codec": "bfloat16"},
]


def test_models_train_alike_over_each_transport_with_any_settings(start_server):
    for options in OPTIONS:
        trained = []
        for way in TRANSPORTS:
            model = mlp()
            with remote(model, start_server("--staleness", "none").data, transport=way, **options) as optimizer:
                assert optimizer.transport == way
                for number, batch in enumerate(batches(12)):
                    if number % 3 == 0:
                        backward(model, batch)
                    else:
                        backward_in_place(model, optimizer, batch)
                    optimizer.step()
            trained.append(parameters_of(model))
        for other in trained[1:]:
            np.testing.assert_array_equal(other, trained[0], err_msg=str(options))


def test_halves_travel_in_half_the_bytes_and_parameters_are_float32_on_the_servers(start_server):
    server = start_server()
    for way, gradient_codec, parameter_codec in (
        ("grpc", "float16", "bfloat16"),
        ("grpc", "bfloat16", "float16"),
        ("grpc", "float32", "float16"),
        ("shm", "bfloat16", "float16"),
        ("shm", "float16", "float32"),
    ):
        model = mlp()
        masters = parameters_of(model)
        codecs = {"gradient_codec": gradient_codec, "parameter_codec": parameter_codec}
        with remote(model, server.data, run_id="halves", transport=way, **codecs) as optimizer:
            joined = status_of(server)
            for batch in batches(5):
                backward(model, batch)
                masters = masters - np.float32(0.1) * rounded(gradients_of(model), gradient_codec)
                optimizer.step()
                np.testing.assert_array_equal(parameters_of(model), rounded(masters, parameter_codec), err_msg=way)
            snapshot = optimizer.snapshot()
            trained = status_of(server)
        np.testing.assert_array_equal(np.concatenate([tensor.flatten() for tensor in snapshot.values()]), masters)
        if way == "grpc":
            size = {"float32": 4, "float16": 2, "bfloat16": 2}
            assert trained.tally.bytes_in - joined.tally.bytes_in == 5 * size[gradient_codec] * len(masters)
            pulled = 5 * size[parameter_codec] * len(masters) + 4 * len(masters)
            assert trained.tally.bytes_out - joined.tally.bytes_out == pulled
        inspect(server.control, "Reset", pb.ResetRequest(run_id="halves"))


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()


def test_over_grpc_halves_are_converted_from_and_to_the_models_own_float32(start_server):
    for overlap, num_servers in (("off", 1), ("off", 2), ("step", 1)):
        model = mlp()
        halves = {"gradient_codec": "bfloat16", "parameter_codec": "float16", "overlap": overlap, "transport": "grpc"}
        with remote(model, addresses([start_server() for _ in range(num_servers)]), **halves) as optimizer:
            for batch in batches(6):
                backward_in_place(model, optimizer, batch)
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            weight = model[0].weight
            # Without overlap there is no other copy of the model, nor of its gradient.
            in_place = overlap == "off"
            assert (weight.data_ptr() == optimizer._steps.parameters.vectors[0].ctypes.data) == in_place
            assert (weight.grad.data_ptr() == optimizer._steps.gradients.vectors[0].ctypes.data) == in_place
            if in_place:
                assert torch.equal(weight, weight.half().float())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parameters_change_in_the_workers_own_steps_only(start_server, transport):
    server = start_server()
    models = [mlp(), mlp(seed=1)]
    with (
        remote(models[0], server.data, run_id="r", worker_id="a", transport=transport) as first,
        remote(models[1], server.data, run_id="r", worker_id="b", transport=transport) as second,
    ):
        before = parameters_of(models[0])
        # The second worker began with the run's, not its own.
        np.testing.assert_array_equal(parameters_of(models[1]), before)
        for batch in batches(5):
            backward(models[1], batch)
            second.step()
            np.testing.assert_array_equal(parameters_of(models[0]), before)
        backward(models[0], next(batches(1)))
        first.step()
        expected = parameters_of(models[1]) - np.float32(0.1 / 5) * gradients_of(models[0])
        np.testing.assert_allclose(parameters_of(models[0]), expected, atol=1e-6)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_nan_changes_nothing_on_the_servers_and_ten_end_the_worker(start_server, transport, caplog):
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
        assert (optimizer.skipped, status_of(server).version_max) == (3, 1)
        assert "the gradient of 2.bias[7] is nan: this push is skipped (3 in a row" in caplog.text
        step(1.0)
        assert status_of(server).version_max == 2
        for _ in range(9):
            step(float("inf"))
        with pytest.raises(NotFinite, match=r"gradient of 2\.bias\[7\] is -?inf; 10 gradients in a row"):
            step(float("inf"))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_closed_optimizer_leaves_an_ordinary_model_that_may_join_again(start_server, transport):
    server = start_server()
    model = mlp()
    expected = parameters_of(model)
    for _ in range(2):
        with remote(model, server.data, run_id="r", worker_id="w", transport=transport) as optimizer:
            for batch in batches(2):
                backward_in_place(model, optimizer, batch)
                expected = expected - np.float32(0.1) * gradients_of(model)
                optimizer.step()
            during = copy.deepcopy(model)
        for either in (model, during):
            np.testing.assert_array_equal(parameters_of(either), expected)
    del optimizer
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, next(batches(1)))
    expected = expected - np.float32(0.1) * gradients_of(model)
    local.step()
    np.testing.assert_allclose(parameters_of(model), expected, atol=1e-7)


class Watching(torch.utils.data.Dataset):
    """Examples that say what the model was when their process saw it: a fingerprint of its parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, float]:
        return os.getpid(), float(parameters_of(self.model).astype(np.float64).sum())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_loaders_processes_keep_the_model_that_they_were_forked_with(start_server, transport):
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


def test_steps_are_seen_by_hooks_and_by_torchs_profiler(start_server):
    server = start_server()
    model = mlp()
    with remote(model, server.data) as optimizer:
        calls: list[str] = []
        hooks = [
            optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
            optimizer.register_step_post_hook(lambda *_: calls.append("after")),
        ]
        train(batches(1), (model, optimizer))
        assert calls == ["before", "after"]
        for hook in hooks:
            hook.remove()
        with torch.autograd.profiler.profile() as profile:
            optimizer.step()
        assert "Optimizer.step#RemoteOptimizer.step" in [event.key for event in profile.key_averages()]
        assert calls == ["before", "after"]


@pytest.mark.parametrize(("protocol", "overlap"), [("async", "off"), ("serial", "off"), ("async", "backward")])
def test_gradients_on_a_partial_shard_are_left_out(start_server, monkeypatch, caplog, protocol, overlap):
    server, model, receive_whole = start_server("--protocol", protocol), mlp(), Receiver.write

    def receive_some(receiver, shard_id, codec_number, payload) -> None:
        def torn(into: memoryview) -> None:
            payload.receive(into)
            into[: payload.nbytes // 2] = b"\xff" * (payload.nbytes // 2)
            raise ServerUnavailable("amid a shard")

        receive_whole(receiver, shard_id, codec_number, Incoming(payload.nbytes, torn))

    with remote(model, server.data, transport="tcp", overlap=overlap) as optimizer:
        masters = parameters_of(model)
        for number, batch in enumerate(batches(5)):
            if number == 1:
                with monkeypatch.context() as patch, pytest.raises(ServerUnavailable, match="amid a shard"):
                    patch.setattr(Receiver, "write", receive_some)
                    backward(model, batch)
                    masters = masters - np.float32(0.1) * gradients_of(model)
                    optimizer.step()
                assert np.isnan(parameters_of(model)).any()
                continue
            backward(model, batch)
            if number != 2:
                masters = masters - np.float32(0.1) * gradients_of(model)
            optimizer.step()
            np.testing.assert_array_equal(parameters_of(model), masters)
        assert status_of(server).version_max == 4
    assert caplog.text.count("the minibatch computed on them is left out") == 1
