"""overlap="backward": shards leave while the backward pass computes, and what cannot be so is refused in words."""

import time

import numpy as np
import pytest
import torch

from client_support import CuttingProxy, addresses
from pyps_client import RemoteOptimizer
from pyps_client.early_shards import EarlyShards
from pyps_client.replica.group import Group
from pyps_wire.errors import InvalidArgument, ServerUnavailable
from support import inspect, status_of, wait_until, workers_of
from training import backward, batches, gradients_of, joined, mlp, parameters_of, train


class Unused(torch.nn.Sequential):
    """`mlp` with a layer that gets no gradient, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__(*mlp())
        self.unused, self.frozen = torch.nn.Linear(40, 40), torch.nn.Linear(8, 8).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in list(self)[:5]:
            inputs = layer(inputs)
        return inputs


def remote(model: torch.nn.Module, servers: str, **options) -> RemoteOptimizer:
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    how = {"overlap": "backward", "transport": "grpc", "shard_size": 256, "rescales_gradients": False} | options
    return joined(model, adam, servers, **how)


def loss_of(model: torch.nn.Module, batch=None) -> torch.Tensor:
    inputs, classes = batch or next(batches(1))
    return torch.nn.functional.cross_entropy(model(inputs), classes)


def backward_around(model: torch.nn.Sequential, hook) -> None:
    """Computes a minibatch's gradients, and calls the hook between the last layers' and the first layer's."""

    def add_hook(_module: torch.nn.Module, _inputs: object, hidden: torch.Tensor) -> None:
        hidden.register_hook(hook)

    with model[1].register_forward_hook(add_hook):
        loss = loss_of(model)
    loss.backward()


# Over these a shard leaves by itself.
over_messages = pytest.mark.parametrize("transport", ["grpc", "tcp"])


@pytest.mark.parametrize(
    ("transport", "protocol", "num_servers", "codec"),
    [
        ("grpc", "async", 1, "float32"),
        ("grpc", "hardsync", 2, "bfloat16"),
        ("tcp", "async", 2, "float32"),
        ("tcp", "hardsync", 1, "bfloat16"),
        ("shm", "async", 2, "float32"),
        ("shm", "hardsync", 1, "float32"),
    ],
)
def test_it_trains_to_the_bits_of_a_worker_that_waits(start_server, transport, protocol, num_servers, codec):
    trained = []
    for overlap in ("off", "backward"):
        torch.manual_seed(0)
        model = Unused()
        servers = addresses([start_server("--protocol", protocol) for _ in range(num_servers)])
        with remote(model, servers, overlap=overlap, gradient_codec=codec, transport=transport) as optimizer:
            assert optimizer.transport == transport
            for number, batch in enumerate(batches(8)):
                optimizer.zero_grad(set_to_none=number % 2 == 0)

                def closure(model=model, batch=batch) -> None:
                    loss_of(model, batch).backward()

                if number % 4 == 3:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
        trained.append(parameters_of(model))
    np.testing.assert_array_equal(trained[1], trained[0])


@over_messages
def test_shards_go_amid_the_backward_pass_and_the_model_changes_in_step(start_server, transport):
    server, model = start_server(), mlp()
    with remote(model, server.data, transport=transport) as optimizer:
        before = parameters_of(model)
        seen: list[int] = []

        def look(_: torch.Tensor) -> None:
            # The last layers' gradients are complete, and the first layer's are not computed yet.
            wait_until(lambda: status_of(server).version_max == 1, what="the last layers' update")
            seen.append(status_of(server).tally.bytes_in)
            np.testing.assert_array_equal(parameters_of(model), before)

        backward_around(model, look)
        np.testing.assert_array_equal(parameters_of(model), before)
        optimizer.step()
        assert 0 < seen[0] < status_of(server).tally.bytes_in
        assert (parameters_of(model) != before).all()
        assert {receipt.version_after for receipt in optimizer.receipts} == {1}


@over_messages
def test_a_push_cut_amid_the_backward_pass_is_applied_once(start_server, proxies, monkeypatch, transport):
    monkeypatch.setattr("pyps_client.transport.tcp.OPEN_SECONDS", 1000.0)
    trained = []
    for cuts in (False, True):
        server, model = start_server(), mlp()
        before = CuttingProxy(server.data)
        with remote(model, before.address, transport=transport) as optimizer:
            proxy = before if transport == "grpc" else list(proxies.values())[-1]

            def cut(_: torch.Tensor, server=server, proxy=proxy) -> None:
                # Applied, and nobody knows.
                wait_until(lambda: status_of(server).version_max == 1, what="the last layers' update")
                proxy.cut()
                wait_until(lambda: status_of(server).tally.pushes_duplicate > 0, 30, "what was lost, sent anew")

            if cuts:
                proxy.hold_replies()
            backward_around(model, cut if cuts else lambda _: None)
            optimizer.step()
            assert {receipt.version_after for receipt in optimizer.receipts} == {1}
            assert any(receipt.duplicate for receipt in optimizer.receipts) == cuts
        before.close()
        trained.append(parameters_of(model))
    np.testing.assert_array_equal(trained[1], trained[0])


@over_messages
def test_a_slow_backward_pass_is_no_lost_link(start_server, monkeypatch, caplog, transport):
    seconds = 0.3
    server, model = start_server(), mlp()
    with remote(model, server.data, transport=transport) as optimizer:
        monkeypatch.setattr("pyps_client.push.call_seconds", lambda _: seconds)

        def dawdle(_: torch.Tensor) -> None:
            wait_until(lambda: status_of(server).version_max == 1, what="the last layers' update")
            late = time.monotonic() + 2 * seconds
            wait_until(lambda: time.monotonic() > late, what="the deadline of what has left")

        backward_around(model, dawdle)
        # A busy machine may take longer for what is not looked at here.
        monkeypatch.undo()
        optimizer.step()
        assert {receipt.version_after for receipt in optimizer.receipts} == {1}
        assert not any(receipt.duplicate for receipt in optimizer.receipts)
    assert "lost" not in caplog.text


@over_messages
def test_a_backward_pass_that_fails_ends_the_push_where_it_was(start_server, transport):
    server, model = start_server(), mlp()
    before = parameters_of(model)

    def fail(_: torch.Tensor) -> None:
        wait_until(lambda: status_of(server).version_max == 1, what="the last layers' update")
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"), remote(model, server.data, transport=transport):
        backward_around(model, fail)
    np.testing.assert_array_equal(parameters_of(model), before)
    versions = [shard.version for shard in inspect(server.control, "ListShards").shards]
    assert (versions[0], versions[-1]) == (0, 1), "the first layer's gradients were never computed"
    [worker] = workers_of(server.control).values()
    assert (worker.state, worker.message) == ("failed", "RuntimeError: out of luck")


@over_messages
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_ends_a_broken_pass_whose_shards_count_once(start_server, caplog, transport, set_to_none):
    server, model = start_server("--staleness", "none"), mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    how = {"overlap": "backward", "rescales_gradients": False, "transport": transport, "shard_size": 256}
    with joined(model, sgd, server.data, **how) as optimizer:
        expected, num_first = parameters_of(model), sum(each.numel() for each in model[0].parameters())
        # A shard that the first layer has part of does not leave.
        starts = [shard.offset for shard in optimizer.stepper.session.partition.shards]
        start = min(each for each in starts if each >= num_first)
        num_left = sum(each >= start for each in starts)

        def fail(_: torch.Tensor) -> None:
            wait_until(lambda: status_of(server).tally.pushes_applied == num_left, what="what can leave")
            raise RuntimeError("out of luck")

        for number, (inputs, classes) in enumerate(batches(4)):
            optimizer.zero_grad(set_to_none=set_to_none)
            hidden = model[1](model[0](inputs))
            loss = torch.nn.functional.cross_entropy(model[4](model[3](model[2](hidden))), classes)
            if number == 0:
                hidden.register_hook(fail)
                gradients = torch.autograd.grad(loss, list(model[2:].parameters()), retain_graph=True)
                with pytest.raises(RuntimeError, match="out of luck"):
                    loss.backward()
                left = np.concatenate([each.flatten() for each in gradients])[start - num_first :]
                expected[start:] -= np.float32(0.1) * left
                continue
            loss.backward()
            expected -= np.float32(0.1) * gradients_of(model)
            optimizer.step()
            np.testing.assert_array_equal(parameters_of(model), expected)
    assert caplog.text.count(f"broken off, or no step() followed it: {num_left} of {len(starts)} shards were sent") == 1


@over_messages
def test_zero_grad_raises_what_kept_a_pass_that_broke_off_from_its_server(start_server, caplog, transport):
    server, model = start_server(), mlp()
    with remote(model, server.data, transport=transport, loss_wait_seconds=0.2) as optimizer:
        train(batches(1), (model, optimizer))
        optimizer.zero_grad()
        server.stop()
        early: list[EarlyShards] = []

        def fail(_: torch.Tensor) -> None:
            early.append(optimizer._steps.overlap._early)
            wait_until(lambda: early[0].sent, what="a shard that has left")
            raise RuntimeError("out of luck")

        with pytest.raises(RuntimeError, match="out of luck"):
            backward_around(model, fail)
        with pytest.raises(ServerUnavailable, match=r"Waited .* for server 0"):
            optimizer.zero_grad()
        optimizer.zero_grad()
    assert "were sent" not in caplog.text


def scaled(model: torch.nn.Module, _: RemoteOptimizer) -> None:
    backward(model, next(batches(1)))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def twice(model: torch.nn.Module, _: RemoteOptimizer) -> None:
    for batch in batches(2):
        loss_of(model, batch).backward()


def unscaled(model: torch.nn.Module, optimizer: RemoteOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)


def within_a_closure_too(model: torch.nn.Module, optimizer: RemoteOptimizer) -> None:
    backward(model, next(batches(1)))
    optimizer.step(lambda: loss_of(model).backward())


def at_another_rate(model: torch.nn.Module, optimizer: RemoteOptimizer) -> None:
    backward(model, next(batches(1)))
    optimizer.param_groups[0]["lr"] = 0.5


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (scaled, r"gradients were changed between backward\(\) and step\(\).*pass rescales_gradients=True"),
        (unscaled, r"gradients were changed between backward\(\) and step\(\)"),
        (twice, r"A second gradient of '.*' was computed before step\(\)"),
        (within_a_closure_too, r"A second gradient of '.*' was computed before step\(\)"),
        (at_another_rate, r"learning rate .* changed between backward\(\) and step\(\)"),
    ],
)
def test_gradients_that_differ_from_the_sent_ones_are_refused_and_training_can_go_on(start_server, compute, words):
    model = mlp()
    with remote(model, start_server().data) as optimizer:
        for _ in range(2):
            with pytest.raises(InvalidArgument, match=words):
                compute(model, optimizer)
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.01
            if compute in (twice, within_a_closure_too):
                with pytest.raises(InvalidArgument, match="changed between"):
                    optimizer.step()
            train(batches(1), (model, optimizer))


def test_the_number_of_examples_must_be_set_before_the_backward_pass(start_server):
    model = mlp()
    with remote(model, start_server().data) as optimizer:
        backward(model, next(batches(1)))
        optimizer.examples_in_batch = 16
        with pytest.raises(InvalidArgument, match="examples_in_batch was set after backward"):
            optimizer.step()
        train(batches(1), (model, optimizer))


@pytest.mark.parametrize(
    ("flags", "options", "words"),
    [
        ((), {"push_every": 2}, "push_every is 2"),
        ((), {"pull_every": 3}, "pull_every is 3"),
        ((), {"buffers": "average"}, "buffers='average' takes a push as a whole"),
        ((), {"replica": Group()}, "a replica's processes take a push as a whole"),
        (("--clip-norm", "1"), {}, "servers clip each push by its norm"),
    ],
)
def test_what_it_cannot_go_with_is_refused(start_server, flags, options, words):
    with pytest.raises(InvalidArgument, match=words):
        remote(mlp(), start_server(*flags).data, **options)


def test_a_push_that_must_stay_whole_is_sent_in_its_step_and_the_log_says_why(start_server, caplog):
    caplog.set_level("INFO", logger="pyps_client")
    for flags, transport, words in (
        (("--protocol", "serial"), "grpc", "serial grants steps one by one"),
        (("--protocol", "asgd"), "grpc", "asgd takes a push as a whole"),
        ((), "shm", "takes a push as one"),
    ):
        server, model = start_server(*flags), mlp()
        with remote(model, server.data, transport=transport) as optimizer:
            backward(model, next(batches(1)))
            assert status_of(server).version_max == 0
            optimizer.step()
            assert status_of(server).version_max == 1
        assert words in caplog.text
        caplog.clear()


def test_nothing_is_sent_after_a_nan_and_shards_sent_before_count(start_server, caplog):
    server, model = start_server(), mlp()
    with remote(model, server.data) as optimizer:
        before = parameters_of(model)
        # From the loss on: nothing leaves.
        (loss_of(model) * float("nan")).backward()
        optimizer.step()
        np.testing.assert_array_equal(parameters_of(model), before)
        assert (optimizer.skipped, status_of(server).version_max) == (1, 0)

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            wait_until(lambda: status_of(server).version_max == 1, what="the last layers' update")
            return gradient * float("nan")

        optimizer.zero_grad()
        backward_around(model, spoil)
        optimizer.step()
        after = parameters_of(model)
        assert np.isfinite(after).all() and optimizer.skipped == 2
        first = sum(parameter.numel() for parameter in model[0].parameters())
        np.testing.assert_array_equal(after[: first // 2], before[: first // 2])
        assert (after[-10:] != before[-10:]).all()
        assert "were sent before a gradient was found that is not finite, and count" in caplog.text
        train(batches(1), (model, optimizer))
        assert (parameters_of(model)[:10] != before[:10]).all()


def test_a_closed_optimizer_leaves_the_model_alone_even_amid_a_push(start_server):
    server, model = start_server(), mlp()
    optimizer = remote(model, server.data)
    backward(model, next(batches(1)))
    optimizer.close()
    before = status_of(server).tally.bytes_in
    for _ in range(2):
        backward(model, next(batches(1)))
    assert status_of(server).tally.bytes_in == before
