"""Models as users have them, through real servers: shared buffers, frozen parameters, half precision, compiled modules,
gradient scaling, clipping and accumulation."""

import copy
import itertools
import logging
import re

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_state_dict
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from pyps_client import Launch, RemoteOptimizer
from pyps_wire.errors import InvalidArgument, ServerUnavailable
from support import server_port, status_of, workers_of
from training import backward, batches, flat, gradients_of, joined, mlp, parameters_of, remote, train


def normed(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
    )


def test_averaged_statistics_are_those_of_a_worker_alone_and_come_with_the_snapshot(start_server):
    server = start_server()
    model, twin = normed(), normed()
    local = torch.optim.SGD(twin.parameters(), lr=0.1)
    with remote(model, server, buffers="average") as optimizer:
        train(batches(20), (model, optimizer), (twin, local))
        evaluated = normed(seed=1)
        evaluated.load_state_dict(optimizer.snapshot())
    for name, expected in twin.state_dict().items():
        np.testing.assert_allclose(evaluated.state_dict()[name], expected, rtol=2e-5, atol=1e-6, err_msg=name)
    # A later worker starts from them, though it saw no data.
    later = normed(seed=2)
    with remote(later, server, run_id=optimizer.run_id, worker_id="later", buffers="average"):
        np.testing.assert_allclose(later[1].running_var, twin[1].running_var, rtol=2e-5)


def test_the_first_workers_statistics_are_those_that_others_follow(start_server, monkeypatch):
    server = start_server()
    optimizers = []
    models = [normed(), normed()]
    for index, model in enumerate(models):
        monkeypatch.setenv("PYPS_WORKER_INDEX", str(index))
        # With a learning rate of 0 only statistics move.
        optimizers.append(remote(model, server, lr=0.0, run_id="r", buffers="first"))
    twin = normed()
    for of_first, of_second in zip(batches(8, seed=1), batches(8, seed=2), strict=True):
        twin(of_first[0])
        for model, optimizer, batch in zip(models, optimizers, (of_first, of_second), strict=True):
            backward(model, batch)
            optimizer.step()
    np.testing.assert_allclose(models[0][1].running_mean, twin[1].running_mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(models[1][1].running_mean, optimizers[0].snapshot()["1.running_mean"])
    for optimizer in optimizers:
        optimizer.close()


def test_what_is_not_shared_is_named_at_joining(start_server, caplog):
    model = normed()
    model[0].requires_grad_(False)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with joined(model, sgd, start_server().data) as optimizer:
        snapshot = optimizer.snapshot()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "buffers (1.running_mean and 1 more) are not shared: each worker keeps its own, and pyps export does not "
        "contain them (buffers='average' shares them)",
        "parameters (0.weight and 1 more) are not shared: each worker keeps its own, and pyps export does not contain "
        "them (give the optimizer all parameters, frozen ones too, to share them)",
    ]
    normed(seed=1).load_state_dict(snapshot)
    assert torch.equal(snapshot["0.weight"], model[0].weight)


def test_half_precision_models_have_float32_masters_on_the_servers(start_server):
    for dtype in (torch.float16, torch.bfloat16):
        model = torch.nn.Linear(32, 10).to(dtype)
        masters = flat(list(model.parameters()))
        with remote(model, start_server(), lr=0.0001) as optimizer:
            for _ in range(50):
                optimizer.zero_grad()
                model(torch.ones(4, 32, dtype=dtype)).float().mean().backward()
                masters = masters - np.float32(0.0001) * gradients_of(model)
                optimizer.step()
            snapshot = optimizer.snapshot()
        # Many steps, each too small for the model's type, add up.
        np.testing.assert_array_equal(flat(list(snapshot.values())), masters, err_msg=str(dtype))
        assert model.weight.dtype == dtype
        np.testing.assert_array_equal(parameters_of(model), torch.from_numpy(masters).to(dtype).float())


def test_a_step_that_the_gradient_scaler_skips_pushes_nothing(start_server):
    server = start_server()
    model, twin = mlp(), mlp()
    local = torch.optim.SGD(twin.parameters(), lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4) for _ in range(2)]
    with remote(model, server) as optimizer:
        pairs = ((model, optimizer, scalers[0]), (twin, local, scalers[1]))
        for step, (inputs, classes) in enumerate(batches(12)):
            for module, its, scaler in pairs:
                its.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = functional.cross_entropy(module(inputs), classes)
                scaler.scale(loss * (float("inf") if step in (3, 7) else 1.0)).backward()
                scaler.unscale_(its)
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                scaler.step(its)
                scaler.update()
        assert status_of(server).version_max == 10
        assert optimizer.skipped == 0
    assert scalers[0].get_scale() == scalers[1].get_scale()
    np.testing.assert_allclose(parameters_of(model), parameters_of(twin), atol=2e-3)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.extended)])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_compiled_and_plain_workers_share_a_run_by_the_original_names(start_server, backend):
    server = start_server()
    plain, original = normed(), normed(seed=1)
    compiled = torch.compile(original, backend=backend)
    with (
        remote(plain, server, run_id="r", worker_id="plain", buffers="average"),
        remote(compiled, server, run_id="r", worker_id="compiled", buffers="average") as optimizer,
    ):
        np.testing.assert_array_equal(parameters_of(original), parameters_of(plain))
        twin = copy.deepcopy(original)
        batch = next(batches(1))
        backward(twin, batch)
        backward(compiled, batch)
        optimizer.step()
        expected = parameters_of(twin) - np.float32(0.1) * gradients_of(twin)
        np.testing.assert_allclose(parameters_of(original), expected, atol=1e-6)
        snapshot = optimizer.snapshot()
        assert list(snapshot) == list(plain.state_dict())
        plain.load_state_dict(snapshot)


def test_two_nets_of_one_shape_in_one_run_are_warned_of_and_copies_of_one_are_not(start_server, caplog):
    server = start_server()

    def net(last: torch.nn.Module) -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(4, 4), last)

    encoder, copy, decoder = (net(last) for last in (torch.nn.ReLU(), torch.nn.ReLU(), torch.nn.Sigmoid()))
    with remote(encoder, server, worker_id="a", run_id="r"), caplog.at_level(logging.WARNING):
        with remote(torch.compile(copy, backend="eager"), server, worker_id="b", run_id="r"):
            pass
        assert "they train one set of parameters" not in caplog.text
        with remote(decoder, server, worker_id="c", run_id="r"):
            pass
    [warning] = [text for text in caplog.messages if "they train one set of" in text]
    model = r"Sequential \(\w{8}\)"
    assert re.match(rf"this worker's model is {model}, that of run r was {model} where", warning)


def test_parameters_that_are_loaded_after_joining_are_refused(start_server):
    saved = mlp(seed=1).state_dict()

    def assign(model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.data = saved[name].clone()

    def fill(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.fill_(1)

    words = r"Parameters \(0\.weight and 5 more\) were written after RemoteOptimizer had joined"
    server = start_server()
    for load in (lambda model: model.load_state_dict(saved), assign, fill):
        for how in ({}, {"overlap": "step"}, {"parameter_codec": "bfloat16"}):
            model = mlp()
            with remote(model, server, run_id="r", worker_id="w", **how) as optimizer:
                load(model)
                backward(model, next(batches(1)))
                with pytest.raises(InvalidArgument, match=words):
                    optimizer.step()
    for move in (lambda model: model.share_memory(), lambda model: model.to(torch.bfloat16)):
        model = mlp()
        with remote(model, server, run_id="r", worker_id="w") as optimizer:
            move(model)
            optimizer.step()


WRITES = {
    "in place": lambda parameter: parameter.clamp_(-0.01, 0.01),
    "by .data": lambda parameter: parameter.data.clamp_(-0.01, 0.01),
    "as another .data": lambda parameter: setattr(parameter, "data", parameter.detach().clamp(-0.01, 0.01)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("how", [{}, {"overlap": "step"}, {"overlap": "backward"}, {"parameter_codec": "bfloat16"}])
def test_a_clamp_between_steps_warns_once_and_the_servers_values_replace_it(start_server, caplog, write, how):
    model, server = mlp(), start_server()
    with remote(model, server, **how) as optimizer:
        for batch in batches(3):
            backward(model, batch)
            optimizer.step()
            with torch.no_grad():
                WRITES[write](model[2].weight)
        optimizer.step()
        if not how:
            np.testing.assert_array_equal(model[2].weight.detach(), optimizer.snapshot()["2.weight"])
    warnings = [text for text in caplog.messages if "were written between two steps" in text]
    assert len(warnings) == 1
    assert "(2.weight)" in warnings[0]


@pytest.mark.parametrize("overlap", ["off", "step"])
def test_who_puts_values_back_or_moves_the_model_is_not_warned(start_server, caplog, overlap):
    model = mlp()
    with remote(model, start_server(), overlap=overlap) as optimizer:
        for number, batch in enumerate(batches(4)):
            backward(model, batch)
            optimizer.step()
            kept = [parameter.data.clone() for parameter in model.parameters()]
            for parameter, values in zip(model.parameters(), kept, strict=True):
                if number == 1:
                    parameter.data.zero_()
                    parameter.data.copy_(values)
                elif number == 2:
                    parameter.data = values
    assert "were written" not in caplog.text


@pytest.mark.parametrize("loads", ["torch", "checkpoint"])
def test_model_and_optimizer_are_made_first_and_loaded_then(start_server, loads, caplog):
    source = mlp(seed=1)
    with remote(source, start_server(), lr=0.2) as optimizer:
        train(batches(1), (source, optimizer))
        saved = {"model": source.state_dict(), "optimizer": copy.deepcopy(optimizer.state_dict())}

    model, server = mlp(seed=2), start_server()
    with RemoteOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), server.data) as optimizer:
        if loads == "torch":
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        else:
            of_optimizer = get_optimizer_state_dict(model, optimizer)
            of_optimizer["param_groups"][0]["lr"] = 0.2
            set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=of_optimizer)
        assert status_of(server).num_shards == 0, "nobody has joined"
        optimizer.zero_grad()
        for name, values in optimizer.snapshot().items():
            torch.testing.assert_close(values, saved["model"][name])
        train(batches(1), (model, optimizer))
        assert optimizer.receipts[0].rate == pytest.approx(0.2)
    assert "were written" not in caplog.text


def test_a_worker_joins_at_its_first_zero_grad_forward_pass_or_step(start_server, caplog):
    server, batch = start_server(), next(batches(1))
    first = mlp(seed=1)
    with remote(first, server, run_id="r", worker_id="first"):
        for number, begin in enumerate(("zero_grad", "forward", "part", "step")):
            model = mlp(seed=2)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            launch = Launch(server.data, run_id="r", worker_id=f"later-{number}")
            with RemoteOptimizer(model, sgd, launch=launch) as optimizer:
                twin = copy.deepcopy(model)
                twin(batch[0])
                assert f"later-{number}" not in workers_of(server.control)
                if begin == "zero_grad":
                    optimizer.zero_grad()
                elif begin == "forward":
                    model(batch[0])
                elif begin == "part":
                    # As Lightning's modules do, which clear their gradients after it.
                    loss = functional.cross_entropy(model[2](model[1](model[0](batch[0]))), batch[1])
                    optimizer.zero_grad()
                    loss.backward()
                else:
                    model[0].weight.grad = torch.ones_like(model[0].weight)
                    optimizer.step()
                np.testing.assert_array_equal(parameters_of(model), parameters_of(first))
                assert not any(part._forward_pre_hooks for part in model.modules())
                assert status_of(server).version_max == 0
    # Its gradients were of other parameters than the run's.
    assert caplog.text.count("the worker joined at its first step: that minibatch") == 1


def test_a_worker_that_could_not_join_tries_again(start_server):
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    port = server_port()
    with RemoteOptimizer(model, sgd, launch=Launch(f"127.0.0.1:{port}", start_wait_seconds=0)) as optimizer:
        for _ in range(2):
            with pytest.raises(ServerUnavailable):
                optimizer.join()
        start_server("--port", str(port))
        optimizer.zero_grad()
        assert optimizer.run_id
    unused = RemoteOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), "127.0.0.1:1")
    unused.close()
    with pytest.raises(InvalidArgument, match="was closed"):
        unused.join()


@pytest.mark.parametrize("init_sync", [False, True])
def test_distributed_data_parallel_that_is_made_last_is_refused_at_the_first_step(start_server, init_sync):
    model = mlp()
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with remote(model, start_server()) as optimizer:
            backward(model, next(batches(1)))
            wrapped = torch.nn.parallel.DistributedDataParallel(model, init_sync=init_sync)
            with pytest.raises(
                InvalidArgument, match="The model is a DistributedDataParallel, whose 2 processes average"
            ):
                optimizer.step()
            assert optimizer.global_step == 0
            del wrapped
    finally:
        torch.distributed.destroy_process_group()


def test_replaced_parameters_are_refused_and_a_removed_layer_is_not(start_server):
    saved = mlp(seed=1).state_dict()

    def new_layer(model: torch.nn.Sequential) -> None:
        model[2] = torch.nn.Linear(model[2].in_features, model[2].out_features)

    words = r"Parameters \(%s\) are no longer the model's: others were put in their place"
    ways = (
        (lambda model: model.load_state_dict(saved, assign=True), r"0\.weight and 5 more"),
        (new_layer, r"2\.weight and 1 more"),
        (lambda model: torch.nn.utils.parametrizations.weight_norm(model[0]), r"0\.weight"),
    )
    server = start_server()
    for steps_before, (replace, names) in itertools.product((0, 2), ways):
        model = mlp()
        with remote(model, server, run_id="r", worker_id="w") as optimizer:
            train(batches(steps_before), (model, optimizer))
            replace(model)
            for _ in range(2):
                with pytest.raises(InvalidArgument, match=words % names):
                    optimizer.step()

    model = mlp()
    model.register_module("aside", torch.nn.Linear(2, 2))
    with remote(model, start_server()) as optimizer:
        del model.aside
        for _ in range(2):
            optimizer.step()


def test_what_writes_parameters_by_its_own_design_is_no_matter(start_server, caplog):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4, max_norm=0.1), torch.nn.Linear(4, 2))
    server = start_server()
    # A later worker's own parameters give way to the run's, and steps of its own between pulls are its own.
    for worker_id in ("first", "later"):
        with remote(model, server, run_id="r", worker_id=worker_id, pull_every=2, overlap="step") as optimizer:
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.tensor([1, 2])).sum().backward()
                optimizer.step()
    assert not [record for record in caplog.records if "written" in record.getMessage()]


def test_torchs_defaults_change_nothing_and_a_float64_model_warns_of_float32(start_server, caplog):
    model, twin = mlp(), mlp()
    local = torch.optim.SGD(twin.parameters(), lr=0.1)
    data = list(batches(3))
    torch.set_default_dtype(torch.float64)
    # As a GPU would be: nothing made there without being asked could be read.
    torch.set_default_device("meta")
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            with remote(model.to(dtype), start_server(), gradient_codec="bfloat16") as optimizer:
                for inputs, classes in data:
                    backward(model, (inputs.to(dtype), classes))
                    optimizer.step()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    warnings = [text for text in caplog.messages if "float64" in text]
    assert warnings == [
        "0.weight and 5 more are float64, but servers hold and update float32: the model's numbers are float32's after "
        "each pull."
    ]
    for batch in 3 * data:
        backward(twin, batch)
        local.step()
    np.testing.assert_allclose(parameters_of(model), parameters_of(twin), atol=5e-3)


def test_a_worker_whose_gradient_is_sparse_still_leaves_the_run(start_server):
    server = start_server()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4, sparse=True), torch.nn.Linear(4, 2))
    optimizer = remote(model, server, worker_id="sparse")
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(InvalidArgument, match="make the layer with sparse=False"), optimizer:
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert workers_of(server.control)["sparse"].state == "failed"
