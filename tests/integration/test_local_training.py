"""LocalTraining through real servers: equal to what it stands for, alone and together; refused where it cannot be."""

import copy
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from pyps_client import LocalTraining, RemoteOptimizer, leave
from pyps_client.data import Portions
from pyps_client.launch import Launch
from pyps_client.torch.local_training import AUTO_STEPS
from pyps_wire.errors import InvalidArgument, SettingsChanged
from support import status_of, wait_for_event
from training import backward, batches, mlp, parameters_of, train

HARDSYNC = ("--protocol", "hardsync", "--expected-workers", "2")


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def on_threads(run, *, of=mlp) -> list:
    """The results of a function of a worker's index and model, for two workers; models are seeded one by one."""
    models = [of(), of()]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2), models))


def local(model, server, worker_id="a", *, inner=adamw, **settings) -> LocalTraining:
    names = settings.keys() & Launch.__dataclass_fields__.keys()
    launch = Launch(server.data, run_id="r", worker_id=worker_id, **{name: settings.pop(name) for name in names})
    return LocalTraining(model, inner(model), launch=launch, **{"outer": "average", "sync_every": 4, **settings})


@pytest.mark.parametrize("overlap", ["off", "step"])
@pytest.mark.parametrize("transport", ["auto", "grpc", "tcp"])
def test_a_worker_alone_at_rate_1_trains_as_torch_does(start_server, overlap, transport):
    model, twin = mlp(), mlp()
    plain = adamw(twin)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 3)
    with local(model, start_server(), overlap=overlap, transport=transport) as optimizer:
        same_schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        for batch in batches(18):
            for trained, steps, rates in ((model, optimizer, same_schedule), (twin, plain, schedule)):
                backward(trained, batch)
                torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
                steps.step()
                rates.step()
        optimizer.sync()
        assert (optimizer.steps, optimizer.global_step) == (18, 5)
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        np.testing.assert_allclose(parameters_of(model), parameters_of(twin), atol=2.4e-7)


def test_two_workers_with_a_push_a_step_are_data_parallel_sgd(start_server):
    server = start_server(*HARDSYNC)
    halves = [list(batches(12, seed=seed)) for seed in (1, 2)]
    twin = mlp()
    plain = sgd(twin)
    for both in zip(*halves, strict=True):
        backward(twin, tuple(map(torch.cat, zip(*both, strict=True))))
        plain.step()

    def run(index: int, model: torch.nn.Module) -> np.ndarray:
        with local(model, server, f"w{index}", inner=sgd, sync_every=1) as optimizer:
            train(halves[index], (model, optimizer))
        return parameters_of(model)

    for trained in on_threads(run):
        np.testing.assert_allclose(trained, parameters_of(twin), atol=1e-6)


@pytest.mark.parametrize("overlap", ["off", "step"])
def test_a_round_an_epoch_averages_models_that_were_trained_apart(start_server, overlap):
    """Parameter averaging, the baseline of the sources; under hardsync an exchange may overlap the next steps."""
    server = start_server(*HARDSYNC)
    halves = [list(batches(6, seed=seed)) for seed in (1, 2)]
    apart = [mlp(), mlp()]
    for model, half in zip(apart, halves, strict=True):
        train(half, (model, adamw(model)))
    mean = np.mean([parameters_of(model) for model in apart], axis=0)

    def run(index: int, model: torch.nn.Module) -> np.ndarray:
        with local(model, server, f"w{index}", sync_every=len(halves[0]), overlap=overlap) as optimizer:
            optimizer.examples_in_batch = 16
            train(halves[index], (model, optimizer))
            optimizer.sync()
            (receipt,) = {(each.reason, each.staleness) for each in optimizer.receipts}
            assert receipt == (0, 0)
            return parameters_of(model)

    for trained in on_threads(run):
        np.testing.assert_allclose(trained, mean, atol=1e-6)
    assert status_of(server).version_max == 1


def test_two_rounds_of_two_workers_under_nesterov_equal_two_torch_optimizers(start_server):
    """DiLoCo (Douillard et al. 2023, algorithm 1), with the outer optimizer on the servers."""
    server = start_server(*HARDSYNC, "--optimizer", "nesterov:learning_rate=0.7,momentum=0.9")
    data = [list(batches(8, seed=seed)) for seed in (1, 2)]
    held, workers = mlp(), [mlp(), mlp()]
    inner = [adamw(worker) for worker in workers]
    outer = torch.optim.SGD(held.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for first in (0, 4):
        for worker, optimizer, batch in zip(workers, inner, data, strict=True):
            worker.load_state_dict(held.state_dict())
            train(batch[first : first + 4], (worker, optimizer))
        for parameter, *of_workers in zip(held.parameters(), *(each.parameters() for each in workers), strict=True):
            parameter.grad = sum((parameter - each).detach() for each in of_workers) / 2
        outer.step()

    def run(index: int, model: torch.nn.Module) -> np.ndarray:
        with local(model, server, f"w{index}", outer="") as optimizer:
            train(data[index], (model, optimizer))
        return parameters_of(model)

    for trained in on_threads(run):
        np.testing.assert_allclose(trained, parameters_of(held), atol=1e-6)


def test_close_pushes_the_steps_of_a_round_that_has_begun_and_a_failure_does_not(start_server):
    server = start_server()
    model = mlp()
    with local(model, server) as optimizer:
        optimizer.examples_in_batch = 16
        train(batches(6), (model, optimizer))
    last = parameters_of(model)
    other = mlp(1)
    with pytest.raises(ZeroDivisionError), local(other, server, "b") as optimizer:
        optimizer.zero_grad()
        np.testing.assert_allclose(parameters_of(other), last, atol=2.4e-7)
        train(batches(3), (other, optimizer))
        raise ZeroDivisionError
    assert status_of(server).version_max == 2


@pytest.mark.parametrize("overlap", ["off", "step"])
def test_a_freed_optimizer_pushes_the_steps_of_its_round_and_leaves(start_server, overlap):
    server = start_server()
    model = mlp()
    optimizer = local(model, server, overlap=overlap)
    train(batches(6), (model, optimizer))
    last = parameters_of(model)
    del optimizer
    gc.collect()
    leave.wait_for_leaving()
    assert status_of(server).workers_alive == 0
    with local(model, server, "b"):
        model(next(batches(1))[0])
        np.testing.assert_allclose(parameters_of(model), last, atol=2.4e-7)
    assert status_of(server).version_max == 2


def test_portions_are_delivered_once_the_servers_have_their_rounds(start_server):
    server = start_server(*HARDSYNC)

    def run(index: int, model: torch.nn.Module) -> list[int]:
        with local(model, server, f"w{index}", sync_every=3) as optimizer:
            portions = Portions(range(160), optimizer, batch_size=8, portion_batches=2)
            trained: list[int] = []
            for indices in portions.epoch():
                trained += indices
                train(batches(1, size=8), (model, optimizer))
            return trained

    first, second = on_threads(run)
    assert sorted(first + second) == list(range(160))


def test_what_a_codec_leaves_out_goes_with_the_state_dict(start_server):
    server = start_server()
    model, twin = mlp(), mlp()
    plain = adamw(twin)
    with local(model, server, transport="grpc", gradient_codec="int8", sync_every=2) as optimizer:
        train(batches(8), (model, optimizer), (twin, plain))
        state = copy.deepcopy(optimizer.state_dict())
        owed = state["pyps_round"]["remote"]["pyps_residuals"]["shards"][0]["values"]
        np.testing.assert_allclose(parameters_of(model), parameters_of(twin), atol=0.01)
    with local(model, server, transport="grpc", gradient_codec="int8", sync_every=2) as optimizer:
        optimizer.load_state_dict(state)
        state = optimizer.state_dict()
        assert state["pyps_round"]["remote"]["pyps_update"] == 4
    with local(model, server, transport="grpc", gradient_codec="int8", sync_every=2) as optimizer:
        optimizer.load_state_dict(state)
        optimizer.join()
        kept = optimizer.state_dict()["pyps_round"]["remote"]["pyps_residuals"]["shards"][0]["values"]
        assert owed.any() and torch.equal(kept, owed)
        train(batches(8), (model, optimizer))
        assert optimizer.global_step == 8


@pytest.mark.parametrize("overlap", ["off", "step"])
def test_four_bits_both_ways_leave_two_workers_with_one_model_near_that_of_float32(start_server, overlap):
    ends = {}
    for codec in ("float32", "int4"):
        server = start_server(*HARDSYNC)

        def run(index: int, model: torch.nn.Module, server=server, codec=codec) -> np.ndarray:
            codecs = {"gradient_codec": codec, "parameter_codec": codec, "transport": "grpc"}
            with local(model, server, f"w{index}", overlap=overlap, **codecs) as optimizer:
                train(batches(40, seed=index), (model, optimizer))
                optimizer.sync()
                return parameters_of(model)

        first, second = on_threads(run)
        np.testing.assert_allclose(first, second, atol=2.4e-7)
        ends[codec] = first
    distance = np.linalg.norm(ends["int4"] - ends["float32"])
    assert distance < 0.2 * np.linalg.norm(ends["float32"] - parameters_of(mlp())), distance


def test_a_grad_scaler_skips_steps_and_hooks_are_called_as_on_the_inner_optimizer(start_server):
    model, twin = mlp(), mlp()
    plain = adamw(twin)
    with local(model, start_server(), sync_every=2) as optimizer:
        called = []
        optimizer.register_step_pre_hook(lambda *_: called.append("outside"))
        pairs = [(model, optimizer, torch.amp.GradScaler("cpu")), (twin, plain, torch.amp.GradScaler("cpu"))]
        for number, (inputs, classes) in enumerate(batches(5)):
            for module, steps, scaler in pairs:
                steps.zero_grad()
                loss = torch.nn.functional.cross_entropy(module(inputs), classes)
                scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
                scaler.unscale_(steps)
                scaler.step(steps)
                scaler.update()
        assert (optimizer.steps, len(called), optimizer.global_step) == (4, 4, 2)
        np.testing.assert_allclose(parameters_of(model), parameters_of(twin), atol=2.4e-7)


def test_a_state_dict_holds_the_inner_state_and_the_position_in_the_round(start_server):
    server = start_server()
    model = mlp()
    with local(model, server) as optimizer:
        train(batches(6), (model, optimizer))
        state = copy.deepcopy(optimizer.state_dict())
    later = mlp(1)
    with local(later, server, "b") as optimizer:
        optimizer.load_state_dict(state)
        assert optimizer.state[later[0].weight]["step"] == 6
        train(batches(2), (later, optimizer))
        assert optimizer.global_step == 3
        optimizer.load_state_dict(adamw(later).state_dict())
        assert not optimizer.state


def test_a_state_dict_of_other_rounds_keeps_sync_every_and_a_malformed_one_changes_nothing():
    def remote() -> LocalTraining:
        model = torch.nn.Linear(1, 1)
        return LocalTraining(model, sgd(model), "localhost:1", sync_every=4)

    optimizer, state = remote(), remote().state_dict()
    for changed in ({"sync_every": 0}, {"sync_every": "x"}, {"steps_left": -5}, {"steps_left": 10**9},
                    {"steps_left": None}, {"remote": None}, {"remote": {}}):  # fmt: skip
        broken = state | {"pyps_round": state["pyps_round"] | changed}
        with pytest.raises(
            InvalidArgument, match=r"The state dict's pyps_round is \{.*\}; expected sync_every, the steps"
        ):
            optimizer.load_state_dict(broken)
    with pytest.raises(InvalidArgument, match="pyps_round is 3; expected"):
        optimizer.load_state_dict(state | {"pyps_round": 3})
    for left, expected in ((7, 4), (3, 3)):
        round_ = state["pyps_round"] | {"sync_every": 8, "steps_left": left}
        optimizer.load_state_dict(state | {"pyps_round": round_})
        assert (optimizer.sync_every, optimizer.state_dict()["pyps_round"]["steps_left"]) == (4, expected)


def test_inner_schedules_may_count_the_examples_of_the_whole_run(start_server):
    server = start_server(*HARDSYNC)

    def run(index: int, model: torch.nn.Module) -> list[float]:
        with local(model, server, f"w{index}", inner=sgd, sync_every=2) as optimizer:
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 / (1 + optimizer.run_examples))
            rates = []
            for batch in batches(6, size=8):
                optimizer.examples_in_batch = 8
                train([batch], (model, optimizer))
                schedule.step()
                rates.append(optimizer.param_groups[0]["lr"])
            # The newest receipt of one worker was written before the round was complete.
            assert optimizer.run_examples in (64, 96)
        return rates

    for rates in on_threads(run):
        assert rates[0] == 0.1 and rates[-1] <= 0.1 / 64
    with local(mlp(), server, "later", outer="") as optimizer:
        assert optimizer.run_examples == 96


def test_shared_buffers_are_averaged_with_the_rounds(start_server):
    server = start_server(*HARDSYNC, "--optimizer", "sgd:learning_rate=1")
    (inputs,) = (torch.randn(64, 8, generator=torch.Generator().manual_seed(3)),)

    def run(index: int, model: torch.nn.Module) -> torch.Tensor:
        with local(model, server, f"w{index}", inner=sgd, outer="", buffers="average", sync_every=2) as optimizer:
            for half in inputs.chunk(2):
                optimizer.zero_grad()
                model(half + index).square().mean().backward()
                optimizer.step()
            optimizer.sync()
            return model[1].running_mean.clone()

    first, second = on_threads(run, of=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)))
    assert torch.equal(first, second) and first.abs().sum() > 0


def test_the_end_of_the_run_leaves_its_last_parameters_in_the_model(start_server, caplog):
    server = start_server("--stop-after", "updates=2")
    model = mlp()
    with local(model, server) as optimizer:
        trained = 0
        for batch in optimizer.until_finished(batches(40)):
            train([batch], (model, optimizer))
            trained += 1
        assert trained < 13
        last = optimizer.snapshot()
        assert all(torch.equal(last[name], value) for name, value in model.state_dict().items())
        train(batches(1), (model, optimizer))
        assert all(torch.equal(last[name], value) for name, value in model.state_dict().items())
    assert "is over: steps do nothing any more" in caplog.text


DOOMED = """
import signal, sys, torch
from pyps_client import LocalTraining
from pyps_client.launch import Launch
from training import batches, mlp, train
model = mlp()
inner = torch.optim.AdamW(model.parameters(), lr=0.01)
launch = Launch(sys.argv[1], run_id="r", worker_id="doomed")
optimizer = LocalTraining(model, inner, launch=launch, outer="average", sync_every=4)
train(batches(6), (model, optimizer))
print("going", flush=True)
signal.pause()
"""


def test_a_worker_killed_within_a_round_loses_its_steps_alone_and_the_other_goes_on(start_server, start_python):
    server = start_server(*HARDSYNC, "--lease-seconds", "2", "--heartbeat-seconds", "0.2")
    model = mlp()
    with local(model, server) as optimizer:
        with ThreadPoolExecutor(1) as pool:
            doomed = pool.submit(start_python, "-c", DOOMED, server.data).result()
            train(batches(4), (model, optimizer))
            doomed.wait_for_output("going")
            doomed.kill()
            train(batches(8), (model, optimizer))
        wait_for_event(server, "expired", "doomed")
        assert optimizer.global_step == 3
        assert all(receipt.reason == 0 for receipt in optimizer.receipts)


def test_a_worker_three_times_as_fast_takes_three_times_as_many_steps(start_server):
    server = start_server(*HARDSYNC)
    last = torch.zeros(2)

    def run(index: int, model: torch.nn.Module) -> int:
        with local(model, server, f"w{index}", inner=sgd, sync_every="auto") as optimizer:
            while optimizer.global_step < 9:
                optimizer.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
                # A slow machine: nothing else is waited for.
                time.sleep(0.004 if index == 0 else 0.012)
                optimizer.step()
            last[index] = optimizer.sync_every
        return optimizer.sync_every

    fast, slow = on_threads(run, of=lambda: torch.nn.Linear(4, 1))
    assert slow <= AUTO_STEPS + 4
    assert 2 * AUTO_STEPS < fast < 5 * AUTO_STEPS


def test_what_cannot_be_trained_locally_is_refused_in_a_sentence(monkeypatch):
    model = mlp()
    for inner, settings, message in (
        (adamw(model), {"sync_every": 0}, "sync_every is 0; expected a number of steps, 1 or more, or 'auto'"),
        (adamw(model), {"sync_every": "often"}, "sync_every is 'often'; expected"),
        (adamw(model), {"overlap": "backward"}, "overlap is 'backward'; expected 'off' or 'step'"),
        (adamw(model), {"outer": "nesterov:rate"}, "outer is 'nesterov:rate'; expected one of adagrad, .*such as nest"),
        (adamw(model), {"outer": "diloco"}, "outer is 'diloco'; expected one of .*average, .*nesterov"),
        (adamw(model), {"buffers": "mine"}, "buffers is 'mine'; expected one of local"),
        (torch.optim.AdamW, {}, "optimizer is a type; expected a torch optimizer that trains on this worker"),
        (RemoteOptimizer(model, sgd(model), "127.0.0.1:1"), {}, "optimizer is a RemoteOptimizer; expected a torch"),
        (adamw(mlp(1)), {}, "is not a parameter of the model"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            LocalTraining(model, inner, "127.0.0.1:1", **settings)
    optimizer = LocalTraining(model, adamw(model), "127.0.0.1:1")
    with pytest.raises(InvalidArgument, match="no copy"):
        copy.deepcopy(optimizer)
    with pytest.raises(SettingsChanged, match="cannot be added to a LocalTraining"):
        optimizer.add_param_group({"params": []})
    optimizer.close()
    with pytest.raises(InvalidArgument, match="was closed"):
        optimizer.step()
    monkeypatch.setenv("PYPS_PARTS", "2")
    with pytest.raises(InvalidArgument, match=r"LocalTraining needs the whole model .* one of the 2 parts"):
        LocalTraining(model, adamw(model), "127.0.0.1:1")


def test_servers_without_a_rule_average_and_those_with_one_keep_it(start_server):
    rules = {"": {"learning_rate": 1.0}, "nesterov:learning_rate=0.7": {"learning_rate": 0.7, "momentum": 0.9}}
    for flag, settings in rules.items():
        server = start_server("--optimizer", flag) if flag else start_server()
        model = mlp()
        with local(model, server, outer="") as optimizer:
            train(batches(8), (model, optimizer))
        status = status_of(server)
        assert status.optimizer.rule == (flag.partition(":")[0] or "sgd")
        assert dict(status.optimizer.groups[0].hyperparameters).items() >= settings.items()
        assert [rate.current for rate in status.learning_rates] == [settings["learning_rate"]] * len(
            status.learning_rates
        )
