"""Every torch optimizer that the servers have a rule for, and torch's schedulers: one worker through real servers takes
the steps of the rule by itself, bit for bit, and those of torch to 1e-6."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from client_support import addresses
from pyps_client import Launch, LocalTraining, RemoteOptimizer
from pyps_client.torch.rules import translate
from pyps_wire.errors import ScheduleOwned, SettingsChanged
from support import status_of
from training import SerialRule, backward, batches, gradients_of, joined, mlp, parameters_of, train

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.001),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.001),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, weight_decay=0.001),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, alpha=0.9, weight_decay=0.001),
    "adam": lambda p: torch.optim.Adam(p, lr=0.001, weight_decay=0.001),
    # Torch rounds 1 - lr * weight_decay to float32, each step anew; these two it need not round.
    "adamw": lambda p: torch.optim.AdamW(p, lr=2**-10, weight_decay=2**-3),
}

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 10, gamma=0.7),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 100),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=101, cycle_momentum=False),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=20), lr_scheduler.ExponentialLR(o, 0.95)], [20]
    ),
}


def assert_close(mine: torch.nn.Module, torchs: torch.nn.Module, name: str = "") -> None:
    difference = np.linalg.norm(parameters_of(mine) - parameters_of(torchs))
    assert difference <= 1e-6 * np.linalg.norm(parameters_of(torchs)), name


def test_one_worker_equals_the_rule_alone_bit_for_bit_and_torch_to_1e_6(start_server):
    for name, make in OPTIMIZERS.items():
        servers = [start_server() for _ in range(2)]
        model, twin = mlp(), mlp()
        remote, local = make(model.parameters()), make(twin.parameters())
        serial = SerialRule(translate(remote), parameters_of(model))
        with joined(model, remote, addresses(servers)) as optimizer:
            for batch in batches(50):
                backward(model, batch)
                serial.step(gradients_of(model), serial.hyperparameters["learning_rate"])
                # The same gradients: an adaptive rule's own would amplify the last bit of each step.
                for parameter, its in zip(model.parameters(), twin.parameters(), strict=True):
                    its.grad = parameter.grad.clone()
                optimizer.step()
                local.step()
            np.testing.assert_array_equal(parameters_of(model), serial.parameters, err_msg=name)
            assert optimizer.global_step == 50
        assert_close(model, twin, name)


def test_a_scheduler_moves_the_servers_rate_as_it_moves_torchs(start_server):
    cases = [(name, "on ours") for name in SCHEDULERS]
    cases += [("warm-up", "on the torch optimizer before"), ("one-cycle", "on the torch optimizer after")]
    for name, made in cases:
        model, twin = mlp(), mlp()
        remote, local = OPTIMIZERS["momentum"](model.parameters()), OPTIMIZERS["momentum"](twin.parameters())
        local_scheduler = SCHEDULERS[name](local)
        before = SCHEDULERS[name](remote) if made == "on the torch optimizer before" else None
        serial = SerialRule(translate(remote), parameters_of(model))
        with joined(model, remote, start_server().data) as optimizer:
            scheduler = before or SCHEDULERS[name](optimizer if made == "on ours" else remote)
            for batch in batches(50):
                backward(model, batch)
                serial.step(gradients_of(model), local.param_groups[0]["lr"])
                optimizer.step()
                scheduler.step()
                backward(twin, batch)
                local.step()
                local_scheduler.step()
            np.testing.assert_array_equal(parameters_of(model), serial.parameters, err_msg=f"{name} {made}")
        assert_close(model, twin, name)


def own_momentum(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """A user's own schedule, which is 0 for a while."""

    def of_step(step: int) -> float:
        optimizer.param_groups[0]["momentum"] = max(0.0, 0.9 * math.cos(step / 4))
        return 1.0

    return lr_scheduler.LambdaLR(optimizer, of_step)


def train_alike(num_batches: int, *trainings: tuple[torch.nn.Module, Any, lr_scheduler.LRScheduler]) -> None:
    """Trains all by the gradients of the first, whose rounding would else part them."""
    first = trainings[0][0]
    for batch in batches(num_batches):
        backward(first, batch)
        for module, optimizer, scheduler in trainings:
            for parameter, its in zip(first.parameters(), module.parameters(), strict=True):
                its.grad = parameter.grad if module is first else parameter.grad.clone()
            optimizer.step()
            scheduler.step()


def test_a_scheduler_moves_the_servers_momentum_as_it_moves_torchs(start_server):
    def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=31)

    def cyclic(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.CyclicLR(optimizer, 0.001, 0.01, step_size_up=7)

    for name, schedule, protocol, transport, before in (
        ("momentum", one_cycle, "async", "shm", False),
        ("momentum", one_cycle, "hardsync", "grpc", True),
        ("adamw", one_cycle, "async", "grpc", True),
        ("adamw", one_cycle, "hardsync", "shm", False),
        ("nesterov", cyclic, "async", "shm", True),
        ("adam", cyclic, "async", "shm", False),
        ("dampening", own_momentum, "async", "shm", False),
        ("nesterov", own_momentum, "async", "shm", False),
        # Torch's schedulers give it a momentum.
        ("sgd", one_cycle, "async", "shm", True),
    ):
        model, twin = mlp(), mlp()
        remote, local = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
        local_scheduler = schedule(local)
        early = schedule(remote) if before else None
        server = start_server("--protocol", protocol)
        with joined(model, remote, server.data, transport=transport) as optimizer:
            scheduler = early or schedule(optimizer)
            train_alike(30, (model, optimizer, scheduler), (twin, local, local_scheduler))
        assert_close(model, twin, f"{name} {schedule.__name__} {protocol} {transport}")


def test_a_worker_that_does_not_own_the_schedule_goes_by_its_own_before_the_owner_pushes(start_server):
    for name, transport in (("momentum", "shm"), ("adamw", "grpc")):

        def optimizer_of(module: torch.nn.Module, name: str = name) -> torch.optim.Optimizer:
            optimizer = OPTIMIZERS[name](module.parameters())
            # Means nothing in torch under OneCycleLR.
            optimizer.param_groups[0]["lr"] = 1.0
            return optimizer

        def schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
            return lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=31)

        model, twin = mlp(), mlp()
        local = optimizer_of(twin)
        local_scheduler = schedule(local)
        server = start_server("--protocol", "async")
        with joined(
            model,
            optimizer_of(model),
            server.data,
            run_id="r",
            worker_id="w1",
            owns_schedule=False,
            transport=transport,
        ) as optimizer:
            scheduler = schedule(optimizer)
            train_alike(10, (model, optimizer, scheduler), (twin, local, local_scheduler))
            assert_close(model, twin, f"{name} {transport}")
            owned = mlp()
            with joined(owned, optimizer_of(owned), server.data, run_id="r", worker_id="w0") as owner:
                owners_schedule = schedule(owner)
                [batch] = batches(1)
                backward(owned, batch)
                owner.step()
                backward(model, batch)
                optimizer.step()
                assert optimizer.receipts[0].rate == pytest.approx(owners_schedule.get_last_lr()[0])
                assert status_of(server).schedule_owner == "w0"


def test_each_group_has_its_own_schedule(start_server):
    server = start_server()
    model, twin = mlp(), mlp()

    def adam(module: torch.nn.Sequential) -> torch.optim.Optimizer:
        groups = [{"params": module[4].parameters(), "lr": 0.01}, {"params": module[:4].parameters()}]
        return torch.optim.Adam(groups, lr=0.001)

    def scheduler_of(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1.0])

    local = adam(twin)
    local_scheduler = scheduler_of(local)
    with joined(model, adam(model), server.data) as optimizer:
        scheduler = scheduler_of(optimizer)
        for batch in batches(30):
            for module, its, moved in ((model, optimizer, scheduler), (twin, local, local_scheduler)):
                backward(module, batch)
                its.step()
                moved.step()
        assert [receipt.rate for receipt in optimizer.receipts] == pytest.approx([0.01 * 0.9**29, 0.001])
    assert_close(model, twin)


def test_with_backward_overlap_only_accepted_settings_reach_the_servers(start_server):
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.001)
    with joined(model, sgd, start_server().data, overlap="backward", transport="grpc") as optimizer:
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0].update(lr=9.0, weight_decay=1.0)
        with pytest.raises(SettingsChanged, match="weight_decay"):
            optimizer.load_state_dict(saved)
        train(batches(1), (model, optimizer))
        assert optimizer.receipts[0].rate == pytest.approx(0.001)
        # A change is refused before the backward pass sends anything, and a replaced list is read.
        optimizer.param_groups[0]["weight_decay"] = 1.0
        with pytest.raises(SettingsChanged, match="weight_decay"):
            backward(model, next(batches(1)))
        assert optimizer.global_step == 1
        optimizer.zero_grad()
        optimizer.param_groups = [{**optimizer.param_groups[0], "weight_decay": 0.0, "lr": 0.002}]
        train(batches(1), (model, optimizer))
        assert optimizer.receipts[0].rate == pytest.approx(0.002)


def test_a_second_owner_of_the_schedule_is_refused_and_may_leave_it_to_the_first(start_server):
    server = start_server()

    def worker(name: str, **options) -> tuple[torch.nn.Module, RemoteOptimizer]:
        model = mlp()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = joined(model, sgd, server.data, run_id="r", worker_id=name, **options)
        lr_scheduler.ConstantLR(optimizer, factor=0.5)
        return model, optimizer

    def step(model: torch.nn.Module, optimizer: RemoteOptimizer) -> None:
        train(batches(1), (model, optimizer))

    first, second = worker("a"), worker("b")
    step(*first)
    with pytest.raises(ScheduleOwned, match="'a'"):
        step(*second)
    second[1].close("failed")
    follower = worker("c", owns_schedule=False)
    step(*follower)
    assert follower[1].receipts[0].rate == pytest.approx(0.05)
    for _, optimizer in (first, follower):
        optimizer.close()


def test_a_rule_that_torch_does_not_have_is_the_outer_one_of_local_training(start_server):
    ends = []
    for outer in ("nesterov", "delayed_nesterov:n=1,lookahead=0", "delayed_nesterov:n=2"):
        model = mlp()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        launch = Launch(servers=start_server().data)
        with LocalTraining(model, inner, sync_every=2, outer=outer, launch=launch) as optimizer:
            for batch in batches(8):
                backward(model, batch)
                optimizer.step()
        ends.append(parameters_of(model))
    assert np.array_equal(ends[0], ends[1]) and not np.array_equal(ends[0], ends[2])
