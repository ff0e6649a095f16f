"""overlap="backward" under loops that clip, scale and accumulate gradients: the result is that of overlap="off"."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from client_support import CuttingProxy, addresses
from pyps.service import pushing
from pyps.storage.replay import log_paths, replay
from pyps_client.early_shards import EarlyShards
from pyps_client.torch.backward import Backward
from support import status_of, wait_until
from training import batches, joined, mlp, parameters_of

seeding = threading.Lock()
Loop = Callable[[torch.nn.Module, torch.optim.Optimizer], None]
# Over these a shard leaves by itself.
over_messages = pytest.mark.parametrize("transport", ["grpc", "tcp"])


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def clipped(model, optimizer) -> None:
    """Clip most steps, and some not."""
    for number, batch in enumerate(batches(6)):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0 if number == 3 else 0.25)
        optimizer.step()


def unclipped(model, optimizer) -> None:
    for batch in batches(6):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def scaled(model, optimizer, *, clips: bool = False) -> None:
    """Train by GradScaler; the first scale is larger than float16 holds, and one step is skipped for an infinity."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    for number, batch in enumerate(batches(8)):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, batch))
        (loss * torch.inf if number == 4 else loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        scaler.step(optimizer)
        scaler.update()


def scaled_and_clipped(model, optimizer) -> None:
    scaled(model, optimizer, clips=True)


def scaled_now_and_then(model, optimizer) -> None:
    for number, batch in enumerate(batches(9)):
        factor = 2.0**16 if number % 3 == 1 else 1.0
        optimizer.zero_grad()
        (loss_of(model, batch) * factor).backward()
        for parameter in model.parameters():
            parameter.grad /= factor
        optimizer.step()


def accumulated(model, optimizer) -> None:
    """Sum several minibatches in a step, at the end fewer."""
    data = batches(40)
    for count in (1, 2, 2, 1, 4, 4, 4, 3, 4, 1, 1, 1):
        model.zero_grad()
        for _ in range(count):
            (loss_of(model, next(data)) / count).backward()
        if count == 4:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


def clipped_by_value(model, optimizer) -> None:
    for batch in batches(4):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()


def trained_by(loop: Loop, servers: str, *, overlap: str, lr: float = 0.01, **options) -> np.ndarray:
    # All threads draw from one generator.
    with seeding:
        torch.manual_seed(0)
        model = (
            mlp()
            if options.get("shard_size", 0) < 10_000
            else torch.nn.Sequential(
                torch.nn.Linear(32, 1024),
                torch.nn.Tanh(),
                torch.nn.Linear(1024, 256),
                torch.nn.Tanh(),
                torch.nn.Linear(256, 10),
            )
        )
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    with joined(
        model, sgd, servers, **{"overlap": overlap, "shard_size": 256, "rescales_gradients": True} | options
    ) as optimizer:
        loop(model, optimizer)
    return parameters_of(model)


def num_held(optimizer) -> int:
    """How many messages of the present push the servers hold."""
    return optimizer._steps.overlap._early.num_answered


def backward_around(model: torch.nn.Sequential, batch, hook: Callable[[torch.Tensor], object]) -> None:
    """Compute a minibatch's gradients, and call the hook between the last layers' and the first layer's."""
    hidden = model[1](model[0](batch[0]))
    hidden.register_hook(hook)
    loss_of(model[2:], (hidden, batch[1])).backward()


@pytest.mark.parametrize(
    ("loop", "flags", "num_servers", "options", "atol"),
    [
        (clipped, (), 1, {"transport": "grpc"}, 1e-6),
        (clipped, ("--protocol", "hardsync"), 2, {"transport": "tcp", "gradient_codec": "int8"}, 1e-3),
        (clipped, ("--clip-norm", "0.2"), 2, {"transport": "grpc"}, 1e-6),
        (unclipped, ("--clip-norm", "0.2"), 2, {"transport": "tcp", "gradient_codec": "int8"}, 0),
        (scaled, (), 2, {"transport": "grpc"}, 0),
        (scaled, ("--protocol", "hardsync"), 1, {"transport": "tcp", "gradient_codec": "bfloat16"}, 0),
        (scaled, (), 1, {"transport": "tcp", "gradient_codec": "float16"}, 1e-5),
        (scaled_and_clipped, (), 1, {"transport": "tcp"}, 1e-6),
        # Messages that threads of a lane receive.
        (scaled, (), 1, {"transport": "tcp", "shard_size": 50_000}, 0),
        (scaled, ("--protocol", "hardsync"), 1, {"transport": "tcp", "parameter_codec": "int8"}, 0),
        (accumulated, ("--protocol", "hardsync"), 2, {"transport": "tcp"}, 1e-6),
        (accumulated, (), 1, {"transport": "grpc", "gradient_codec": "int8"}, 1e-3),
        (clipped_by_value, (), 1, {"transport": "grpc", "gradient_codec": "int8"}, 0),
        (scaled_now_and_then, ("--protocol", "hardsync"), 1, {"transport": "grpc", "gradient_codec": "int4"}, 1e-2),
    ],
)
def test_loops_train_as_without_overlap(start_server, loop, flags, num_servers, options, atol):
    trained = []
    for overlap in ("off", "backward"):
        servers = addresses([start_server(*flags) for _ in range(num_servers)])
        trained.append(trained_by(loop, servers, overlap=overlap, **options))
    np.testing.assert_allclose(trained[1], trained[0], rtol=0, atol=atol)


def test_workers_of_a_round_clip_and_accumulate_each_in_its_way(start_server):
    trained = []
    for overlap in ("off", "backward"):
        server, found = start_server("--protocol", "hardsync", "--expected-workers", "2"), []

        def work(loop: Loop, worker: int, server=server, overlap=overlap, found=found) -> None:
            found.append(
                trained_by(
                    loop, server.data, overlap=overlap, transport="tcp", worker_id=f"{worker}", rescales_gradients=None
                )
            )

        def halves(model, optimizer) -> None:
            data = batches(12)
            for _ in range(6):
                optimizer.zero_grad()
                for _ in range(2):
                    loss_of(model, next(data)).backward()
                optimizer.step()

        threads = [threading.Thread(target=work, args=each) for each in ((clipped, 0), (halves, 1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        np.testing.assert_array_equal(*found)
        trained.append(found[0])
    np.testing.assert_allclose(trained[1], trained[0], rtol=0, atol=1e-6)


@over_messages
def test_servers_hold_what_leaves_until_the_step_and_forget_a_pass_without_one(start_server, caplog, transport):
    server, model = start_server(), mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    how = {"overlap": "backward", "rescales_gradients": True, "transport": transport, "shard_size": 256}
    with joined(model, sgd, server.data, **how) as optimizer:
        before, data = parameters_of(model), list(batches(3))

        def look(_: torch.Tensor) -> None:
            wait_until(lambda: num_held(optimizer) > 5, what="the last layers' shards")

        backward_around(model, data[0], look)
        assert status_of(server).version_max == 0
        optimizer.zero_grad()
        backward_around(model, data[1], look)
        np.testing.assert_array_equal(parameters_of(model), before)
        optimizer.step()
        gradient = np.concatenate([each.grad.flatten() for each in model.parameters()])
        np.testing.assert_array_equal(parameters_of(model), before - np.float32(0.1) * gradient)
        assert {receipt.version_after for receipt in optimizer.receipts} == {1}

        before = parameters_of(model)
        optimizer.zero_grad()
        backward_around(model, data[2], lambda gradient: look(gradient) or gradient * torch.nan)
        optimizer.step()
        np.testing.assert_array_equal(parameters_of(model), before)
        assert optimizer.skipped == 1
    assert "count" not in caplog.text


@over_messages
@pytest.mark.parametrize("what", ["cut", "given up"])
def test_what_a_server_does_not_hold_any_more_is_sent_again(start_server, proxies, monkeypatch, transport, what):
    monkeypatch.setattr("pyps_client.transport.tcp.OPEN_SECONDS", 1000.0)
    server, model = start_server(), mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    before = CuttingProxy(server.data)
    how = {"overlap": "backward", "rescales_gradients": True, "transport": transport, "shard_size": 256}
    gone, discard = threading.Event(), pushing.Pushes.discard

    def noted(pushes: pushing.Pushes) -> None:
        had = bool(pushes.held)
        discard(pushes)
        if had:
            gone.set()

    monkeypatch.setattr(pushing.Pushes, "discard", noted)
    if what == "given up":
        monkeypatch.setattr(pushing, "HOLD_SECONDS", 0.01)
    with joined(model, sgd, before.address, **how) as optimizer:
        proxy = before if transport == "grpc" else list(proxies.values())[-1]
        expected, [batch] = parameters_of(model), batches(1)

        def lose(_: torch.Tensor) -> None:
            wait_until(lambda: num_held(optimizer) > 0, what="a shard that is held")
            if what == "cut":
                proxy.cut()
            assert gone.wait(30)

        backward_around(model, batch, lose)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1000.0)
        expected -= np.float32(0.1) * np.concatenate([each.grad.flatten() for each in model.parameters()])
        optimizer.step()
        np.testing.assert_array_equal(parameters_of(model), expected)
        assert {receipt.version_after for receipt in optimizer.receipts} == {1}
    before.close()


@pytest.mark.parametrize("protocol", ["async", "hardsync"])
def test_the_first_steps_show_whether_a_loop_changes_gradients(start_server, monkeypatch, protocol):
    sealed, seal = [], EarlyShards.seal
    monkeypatch.setattr(EarlyShards, "seal", lambda early, **end: sealed.append(early.held) or seal(early, **end))
    for loop, expected in (
        (clipped, [True] * (1 if protocol == "async" else 6)),
        (unclipped, [True] * 3 + [False] * 3),
    ):
        trained = [
            trained_by(
                loop,
                start_server("--protocol", protocol).data,
                overlap=overlap,
                transport="grpc",
                rescales_gradients=None,
            )
            for overlap in ("off", "backward")
        ]
        np.testing.assert_allclose(trained[1], trained[0], rtol=0, atol=1e-6)
        assert sealed == expected
        sealed.clear()


@over_messages
def test_a_server_without_room_for_all_holds_some(start_server, monkeypatch, transport):
    noted, note = set(), pushing._Note.__init__

    def spy(self: pushing._Note, *arguments, held: bool, **options) -> None:
        noted.add(held)
        note(self, *arguments, held=held, **options)

    def clipped_late(model, optimizer) -> None:
        """Let a server answer more shards of the last layers than it holds before the first layer's is there."""
        optimizer.join()
        holds = isinstance(optimizer.stepper.overlap, Backward)

        def look(_: torch.Tensor) -> None:
            wait_until(lambda: not holds or noted == {True, False}, what="a shard that is not held")

        for batch in batches(3):
            optimizer.zero_grad()
            backward_around(model, batch, look)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()

    monkeypatch.setattr(pushing._Note, "__init__", spy)
    how = {"transport": transport, "shard_size": 24_576}
    trained = [
        trained_by(clipped_late, start_server(*flags).data, overlap=overlap, **how)
        for overlap, flags in (("off", ()), ("backward", ("--max-in-flight-bytes", str(2**20))))
    ]
    np.testing.assert_allclose(trained[1], trained[0], rtol=0, atol=1e-6)
    assert noted == {True, False}


def test_a_scale_is_in_the_log_and_replayed_to_the_bit(start_server, tmp_path):
    server = start_server("--update-log", str(tmp_path), "--log-gradients")
    trained_by(clipped, server.data, overlap="backward", transport="grpc")
    assert server.stop() == 0
    for path in log_paths(tmp_path):
        assert b'"scale": 0.' in path.read_bytes()
        replayed = replay(path)
        assert (replayed.difference, replayed.updates) == ("", 6)


def test_other_changes_cost_the_overlap_and_are_told_once(start_server, caplog):
    trained_by(clipped_by_value, start_server().data, overlap="backward", transport="grpc")
    assert caplog.text.count("gradients were changed between backward() and step(), and not all by one factor") == 1
