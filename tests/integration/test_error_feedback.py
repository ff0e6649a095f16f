"""Error feedback from the worker to the servers: parameters and residuals right to the bit, whatever befalls a push."""

import io
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from client_support import CuttingProxy, addresses, make_client, start_servers
from pyps.core.arrays import Floats
from pyps_client import Client, Observer
from pyps_client.torch import gradients
from pyps_client.torch.device_codecs import DeviceVector
from pyps_wire.codecs import codec_of
from pyps_wire.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_PENDING,
    REASON_DROPPED,
    REASON_NOT_FINITE,
    REASON_REPEATED,
    REASON_STALE,
    Receipt,
)
from support import configure, wait_until
from training import backward, batches, mlp, parameters_of, remote

SIZE = 2500
RANDOM = np.random.default_rng(29)
FIRST = RANDOM.standard_normal(SIZE).astype(np.float32)
# Under each a payload has from 1,300 to 2,600 bytes.
CODECS = ["int8", "topk:ratio=0.3", "topk2bit:ratio=0.5", "threshold:tau=0.2"]


def gradient() -> Floats:
    """Return multiples of 1/64, whose sums are exact, of many magnitudes."""
    return (np.rint(RANDOM.standard_normal(SIZE) * 2.0 ** RANDOM.integers(3, 12, SIZE)) / 64).astype(np.float32)


class Mirror:
    """A worker that pushes in few bits, and what numpy says of its residuals."""

    def __init__(self, address: str, worker_id: str = "worker", codec: str = "int8", **options: Any) -> None:
        options = {"tensors": {"w": FIRST}, "optimizer": ("sgd", {"learning_rate": 0.5}), "shard_size": 4096} | options
        self.client: Client = make_client(address, worker_id=worker_id, gradient_codec=codec, run_id="r", **options)
        self.codec = codec_of(codec)
        self.owed = np.zeros(SIZE, np.float32)

    def push(self, values: Floats) -> tuple[Receipt, Floats]:
        """Push; return the receipt, and the numbers that the server got."""
        wanted = values + np.float32(self.codec.feedback) * self.owed
        sent = self.codec.decode(self.codec.encode(wanted), SIZE)
        [receipt] = self.client.push({"w": values})
        if receipt.outcome in (OUTCOME_APPLIED, OUTCOME_PENDING):
            self.owed = wanted - sent
        elif receipt.reason == REASON_DROPPED:
            # What was wanted, rounded as the worker rounds it beside a level of other numbers.
            self.owed = wanted - sent + sent
        np.testing.assert_array_equal(self.residual, self.owed)
        return receipt, sent

    @property
    def residual(self) -> Floats:
        saved = self.client.session.residuals()
        return np.zeros(SIZE, np.float32) if saved is None else saved["shards"][0]["values"]


@pytest.mark.parametrize("codec", CODECS)
def test_a_gradient_refused_as_repeated_or_stale_is_lost_and_what_was_owed_stays(start_server, codec):
    server = start_server("--protocol", "hardsync:merge=all", "--expected-workers", "2")
    a, b, held = *(Mirror(server.data, name, codec) for name in "ab"), FIRST.copy()
    with a.client, b.client:
        for _ in range(3):
            (first, of_a), (again, _) = a.push(gradient()), a.push(gradient())
            (second, of_b), (late, _) = b.push(gradient()), a.push(gradient())
            assert (first.outcome, second.outcome) == (OUTCOME_PENDING, OUTCOME_APPLIED)
            assert (again.reason, late.reason) == (REASON_REPEATED, REASON_STALE)
            held -= np.float32(0.5) * (np.float32(0.5) * of_a + np.float32(0.5) * of_b)
            for worker in (a, b):
                np.testing.assert_array_equal(worker.client.pull()["w"], held)


@pytest.mark.parametrize("codec", CODECS)
def test_a_gradient_that_backup_dropped_goes_with_the_next(start_server, codec):
    server = start_server("--protocol", "backup:b=1,merge=all", "--expected-workers", "2")
    a, b, held = *(Mirror(server.data, name, codec) for name in "ab"), FIRST.copy()
    with a.client, b.client:
        (_, of_a), (_, of_b) = a.push(gradient()), b.push(gradient())
        held -= np.float32(0.5) * (np.float32(0.5) * of_a + np.float32(0.5) * of_b)
        for first, second in ((a, b), (a, b), (b, a)):
            first.client.pull(), second.client.pull()
            (applied, sent), (dropped, _) = first.push(gradient()), second.push(gradient())
            assert (applied.outcome, dropped.reason) == (OUTCOME_APPLIED, REASON_DROPPED)
            held -= np.float32(0.5) * sent
        np.testing.assert_array_equal(a.client.pull()["w"], held)


@pytest.mark.parametrize("codec", CODECS)
def test_a_push_refused_for_load_is_sent_again_with_the_same_bytes(start_server, codec):
    # Less room than two gradients that wait take, encoded or as float32.
    flags = ("--protocol", "hardsync", "--expected-workers", "3", "--staleness", "none")
    server = start_server(*flags, "--max-pending-bytes", "2600")
    workers, held = [Mirror(server.data, name, codec) for name in "ab"], FIRST.copy()
    with workers[0].client, workers[1].client, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(worker.push, gradient()) for worker in workers]
        outages = [worker.client.session._servers.connections[0].outage for worker in workers]
        wait_until(lambda: any(outage.lost for outage in outages), what="a push refused for load")
        configure(server, protocol="async")
        sent = [pushed.result(60)[1] for pushed in waiting]
        for worker in workers:
            worker.client.pull()
            sent.append(worker.push(gradient())[1])
        for numbers in sent:
            held -= np.float32(0.5) * numbers
        np.testing.assert_allclose(workers[0].client.pull()["w"], held, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
@pytest.mark.parametrize("codec", CODECS)
def test_workers_whose_links_are_cut_lose_only_what_was_refused(start_server, proxies, transport, codec):
    """What was sent is in the parameters once and the rest still owed, to the bit: few digits make its sums exact."""
    server, first = start_server("--staleness", "drop:spread=3"), gradient()
    before = [CuttingProxy(server.data) for _ in "ab"]
    options = {"tensors": {"w": first}, "transport": transport}
    workers = [Mirror(proxy.address, name, codec, **options) for proxy, name in zip(before, "ab", strict=True)]
    if transport == "tcp":
        before = 2 * list(proxies.values())[-1:]
    pushed, step = [[gradient() for _ in range(20)] for _ in workers], Barrier(2, timeout=60)

    def train(index: int) -> Floats:
        taken = np.zeros(SIZE, np.float32)
        for number, values in enumerate(pushed[index]):
            if number % 5 == index:
                before[index].cut_after(1000, of_replies=number % 2 == 0)
            # Neither is ever absent for two rounds.
            step.wait()
            receipt, sent = workers[index].push(values)
            taken += sent if receipt.outcome == OUTCOME_APPLIED else 0
            if number % 3 == 2:
                workers[index].client.pull()
        return taken

    with workers[0].client, workers[1].client, ThreadPoolExecutor(2) as pool:
        taken = sum(pool.map(train, range(2), timeout=120))
        refused = [worker.client.refused.get("STALE", 0) for worker in workers]
        assert sum(refused) and all(each < 20 for each in refused) and sum(proxy.num_cuts for proxy in before) > 1
        np.testing.assert_array_equal(workers[0].client.snapshot()["w"], first - np.float32(0.5) * taken)


def test_servers_clip_and_refuse_by_the_decoded_numbers(start_server):
    server = start_server("--clip-norm", "100", "--staleness", "none")
    worker, values = Mirror(server.data), np.full(SIZE, 0.4, np.float32)
    # Beside these the others are lost, and go with a later push.
    values[::32] = 127.0
    with worker.client:
        held = FIRST.copy()
        for _ in range(4):
            _, sent = worker.push(values)
            held -= np.float32(0.5 * 100 / np.linalg.norm(sent.astype(np.float64))) * sent
            np.testing.assert_allclose(worker.client.pull()["w"], held, rtol=1e-6)
        # It is finite here, and its scale times 64 is not.
        refused, _ = worker.push(np.full(SIZE, np.finfo(np.float32).max))
        assert refused.reason == REASON_NOT_FINITE
        np.testing.assert_array_equal(worker.client.pull()["w"], worker.client.snapshot()["w"])


@pytest.mark.parametrize(
    ("flags", "updates_per_round", "absences"),
    [
        (("--protocol", "async"), 0, ((4, True), (5, False), (1, True))),
        (("--warmup", "updates=1,protocol=hardsync"), 0, ((4, True), (5, False), (1, True))),
        # The first one begins amid an update, the second one does not.
        (("--protocol", "softsync:n=1"), 1, ((5, True), (5, False), (1, True))),
    ],
)
def test_what_is_owed_is_cleared_after_an_absence_of_more_than_two_rounds(
    start_server, flags, updates_per_round, absences
):
    server = start_server(*flags, "--staleness", "none", "--expected-workers", "2", "--heartbeat-seconds", "0.1")
    a, b = Mirror(server.data, "a"), Mirror(server.data, "b")
    view = a.client.session.view
    with a.client, b.client:
        b.push(gradient())
        for num_others, kept in absences:
            a.client.pull()
            a.push(gradient())
            for _ in range(num_others):
                b.push(gradient())
            a.client.pull()
            wait_until(lambda: view.state.terms.updates_per_round == updates_per_round, what="a heartbeat")
            a.owed *= kept
            a.push(gradient())


def test_residuals_are_in_the_state_dict(start_server):
    server, options = start_server("--staleness", "none"), {"gradient_codec": "int8", "transport": "grpc"}

    def residual_of(optimizer: Any) -> torch.Tensor:
        saved = optimizer.state_dict().get("pyps_residuals")
        return torch.zeros(1) if saved is None else saved["shards"][0]["values"]

    for overlap in ("off", "step", "backward"):
        model, run = mlp(), {"run_id": "r", "overlap": overlap, "worker_id": overlap, **options}
        with remote(model, server, **run) as optimizer:
            for batch in batches(3):
                backward(model, batch)
                optimizer.step()
            owed, file = residual_of(optimizer), io.BytesIO()
            torch.save(optimizer.state_dict(), file)
        assert owed.any()
        file.seek(0)
        state = torch.load(file, weights_only=True)
        with remote(mlp(), server, **run) as optimizer:
            assert not residual_of(optimizer).any()
            optimizer.load_state_dict(state)
            assert torch.equal(residual_of(optimizer), owed)
        with remote(mlp(), start_server(), **options) as of_another_run:
            of_another_run.load_state_dict(state)
            assert not residual_of(of_another_run).any()


@pytest.mark.parametrize("overlap", ["off", "step", "backward"])
@pytest.mark.parametrize("codec", ["int8", "int4", "onebit"])
def test_gradients_that_are_encoded_where_they_lie_train_to_the_bits_of_those_encoded_on_the_host(
    start_server, monkeypatch, codec, overlap
):
    """A CPU plays the GPU. Some steps have no gradient for a layer, and a second life goes on from a state dict."""

    def train(optimizer: Any, model: torch.nn.Sequential) -> None:
        for number, batch in enumerate(batches(6)):
            model[3].requires_grad_(number % 3 != 1)
            backward(model, batch)
            if number % 3 == 2:
                # A push that has begun in the backward pass is then sent anew, whole.
                model[1].weight.grad *= 2
            optimizer.step()

    clips = () if overlap == "backward" else ("--clip-norm", "1")
    found = []
    for encoding_devices in (set(), {"cpu"}):
        monkeypatch.setattr(gradients, "DEVICE_TYPES", encoding_devices)
        servers = start_servers(start_server, 2, "--protocol", "hardsync", "--expected-workers", "1", *clips)
        run = {"run_id": "r", "worker_id": "w", "overlap": overlap, "gradient_codec": codec, "shard_size": 1024}
        run["buffers"] = "local" if overlap == "backward" else "average"
        model, later = (torch.nn.Sequential(torch.nn.BatchNorm1d(32), *mlp()) for _ in range(2))
        with remote(model, addresses(servers), **run) as first:
            train(first, model)
            state = first.state_dict()
            buffer, residuals = first._steps.gradients, first._steps.session._encoder.residuals.values()
            train(first, model)
            is_device = any(isinstance(each.values, DeviceVector) for each in residuals)
            assert is_device == bool(encoding_devices)
            assert not is_device or overlap == "backward" or not buffer.vectors[0].any(), "float32 came to the host"
        with remote(later, addresses(servers), **run) as second:
            second.load_state_dict(state)
            train(second, later)
            saved = second.state_dict()["pyps_residuals"]["shards"].values()
            found.append(np.concatenate([parameters_of(later), *(shard["values"].numpy() for shard in saved)]))
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("overlap", ["off", "step", "backward"])
@pytest.mark.parametrize("protocol", ["hardsync", "softsync:n=2", "async"])
def test_training_in_int8_comes_to_the_loss_of_float32(start_server, protocol, overlap):
    """With batch norm, whose statistics travel as float32 beside the gradients where a push may be whole."""
    buffers = "local" if overlap == "backward" else "average"
    inputs, classes = next(batches(1, size=256))

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(inputs), classes)

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 10))

    def train(address: str, codec: str, index: int) -> None:
        own = model()
        run = {"run_id": "r", "worker_id": str(index), "gradient_codec": codec, "transport": "grpc"}
        with remote(own, address, lr=0.3, overlap=overlap, buffers=buffers, **run) as optimizer:
            for _ in range(50):
                own.zero_grad()
                loss_of(own).backward()
                optimizer.step()

    losses = []
    for codec in ("float32", "int8"):
        server = start_server("--protocol", protocol, "--expected-workers", "2", "--staleness", "none")
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda index, at=server.data, codec=codec: train(at, codec, index), range(2), timeout=120))
        trained = model()
        with Observer(server.data) as observer:
            values = {name: torch.from_numpy(value) for name, value in observer.snapshot().items()}
        assert not trained.load_state_dict(values, strict=False).unexpected_keys
        losses.append(float(loss_of(trained).detach()))
    assert losses[1] < 1.01 * losses[0] and losses[0] < 0.9 * float(loss_of(model()).detach()), losses
