"""Servers that end without their last checkpoint: workers send again what no checkpoint holds, each push once."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from client_support import gradients_like, make_client, small_model
from pyps.storage.folder import newest
from pyps_client import Client, Launch, LocalTraining
from pyps_client.push import Plan
from pyps_wire.common_pb2 import OUTCOME_APPLIED, REASON_EPOCH
from support import ServerThread, checksums, status_of, wait_until
from training import backward, batches, mlp, parameters_of, remote

Batch = tuple[torch.Tensor, torch.Tensor]
ADAM = ("adam", {"learning_rate": 0.05})


def steps(client: Client, count: int, *, first: int = 0, examples: int = 0, pulls: bool = True) -> None:
    for number in range(first, first + count):
        (client.exchange if pulls else client.push)(gradients_like(small_model(), number), examples)


@pytest.mark.parametrize(
    ("transport", "protocol"),
    [("shm", "hardsync"), ("tcp", "async"), ("grpc", "hardsync"), ("grpc", "asgd"), ("grpc", "softsync:n=1")],
)
def test_one_worker_ends_with_the_bits_of_a_run_without_crashes(start_server, crashing, transport, protocol):
    flags = ("--protocol", protocol, "--schedule", "step:every=5,factor=0.5")
    unbroken = start_server(*flags)
    with make_client(unbroken.data, optimizer=ADAM) as client:
        steps(client, 3)
        # Else each gradient is staler than the one before.
        steps(client, 3, first=3, pulls=protocol == "hardsync")
        client.pull()
        steps(client, 14, first=6)

    doomed = crashing(*flags)
    with make_client(doomed.server.data, optimizer=ADAM, transport=transport) as client:
        steps(client, 3)
        doomed.save()
        steps(client, 3, first=3, pulls=protocol == "hardsync")
        client.pull()
        steps(client, 1, first=6)
        # Twice from the same checkpoint, then from one that holds pushes that were sent again.
        doomed.crash()
        steps(client, 4, first=7)
        doomed.crash()
        steps(client, 4, first=11)
        doomed.save()
        steps(client, 2, first=15)
        doomed.crash()
        steps(client, 3, first=17)
        assert client.refused == {}
        assert checksums(doomed.server.control) == checksums(unbroken.control)
        assert status_of(doomed.server).epoch == 3


class Pair:
    """Two workers that train in rounds, each on a thread of its own."""

    def __init__(self, server: ServerThread, pool: ThreadPoolExecutor):
        self.clients = {name: make_client(server.data, optimizer=ADAM, worker_id=name) for name in "ab"}
        self._pool = pool

    def begin(self, name: str, count: int, *, first: int) -> Future[None]:
        seed = 100 * "ab".index(name)
        return self._pool.submit(steps, self.clients[name], count, first=seed + first, examples=1 + seed)

    def rounds(self, count: int, *, first: int) -> None:
        for trained in [self.begin(name, count, first=first) for name in self.clients]:
            trained.result(60)


@contextmanager
def two_workers(server: ServerThread) -> Iterator[Pair]:
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        pair = Pair(server, pool)
        for client in pair.clients.values():
            stack.enter_context(client)
        yield pair


@pytest.mark.parametrize("saves", ["between", "within"])
def test_two_workers_make_the_rounds_again_that_a_crash_undid(start_server, crashing, saves):
    flags = ("--protocol", "hardsync")
    unbroken = start_server(*flags, "--expected-workers", "2")
    with two_workers(unbroken) as pair:
        pair.rounds(12, first=0)

    doomed = crashing(*flags, "--expected-workers", "2")
    with two_workers(doomed.server) as pair:
        pair.rounds(3, first=0)
        if saves == "between":
            doomed.save()
        pair.rounds(3, first=3)
        # One worker waits in a round for the other.
        alone = pair.begin("a", 1, first=6)
        wait_until(lambda: status_of(doomed.server).pending_gradients, what="half a round")
        if saves == "within":
            doomed.save()
        # Nobody says how many workers there are: the server knows who made its last round.
        doomed.crash(*flags)
        pair.begin("b", 1, first=6).result(60)
        alone.result(60)
        pair.rounds(2, first=7)
        doomed.crash(*flags)
        pair.rounds(3, first=9)
        assert [client.refused for client in pair.clients.values()] == [{}, {}]
        assert checksums(doomed.server.control) == checksums(unbroken.control)


def whole(model: torch.nn.Module, batch: Batch, meanwhile: Callable[[], object]) -> None:
    backward(model, batch)
    meanwhile()


def within(model: torch.nn.Module, batch: Batch, meanwhile: Callable[[], object]) -> None:
    """Let a crash come when some shards are sent, and others are not computed."""
    model.zero_grad()
    hidden = model[1](model[0](batch[0]))
    hidden.register_hook(lambda gradient: meanwhile())
    torch.nn.functional.cross_entropy(model[2:](hidden), batch[1]).backward()


def clipped(model: torch.nn.Module, batch: Batch, meanwhile: Callable[[], object]) -> None:
    within(model, batch, meanwhile)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)


@pytest.mark.parametrize(
    ("compute", "options"),
    [
        (whole, {"transport": "tcp", "gradient_codec": "int8", "parameter_codec": "delta"}),
        (whole, {"transport": "shm", "gradient_codec": "bfloat16"}),
        (whole, {"transport": "grpc", "gradient_codec": "topk:ratio=0.1"}),
        (within, {"transport": "grpc", "overlap": "backward", "rescales_gradients": False}),
        (clipped, {"transport": "tcp", "overlap": "backward", "rescales_gradients": True, "gradient_codec": "int4"}),
    ],
)
def test_torch_trains_as_without_crashes(start_server, crashing, compute, options):
    def trained(server: ServerThread, events: Sequence[Callable[[], object]]) -> np.ndarray:
        model = mlp()
        with remote(model, server, shard_size=256, **options) as optimizer:
            for batch, meanwhile in zip(batches(len(events)), events, strict=True):
                compute(model, batch, meanwhile)
                optimizer.step()
            assert optimizer._steps.session.refused == {}
            return parameters_of(model)

    def nothing() -> None:
        pass

    doomed, unbroken = crashing("--protocol", "hardsync"), start_server("--protocol", "hardsync")
    events = [nothing] * 4 + [doomed.save, nothing, nothing, doomed.crash, nothing, doomed.crash, nothing]
    found, wanted = trained(doomed.server, events), trained(unbroken, [nothing] * len(events))
    np.testing.assert_array_equal(found, wanted)
    assert checksums(doomed.server.control) == checksums(unbroken.control)


def overlapped(model: torch.nn.Module, server: ServerThread) -> Any:
    return remote(model, server, overlap="step")


def local(model: torch.nn.Module, server: ServerThread) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return LocalTraining(model, inner, launch=Launch(server.data), outer="average", sync_every=2, overlap="step")


@pytest.mark.parametrize("made", [overlapped, local])
def test_pushes_that_go_beside_the_computation_count_once(crashing, made):
    doomed, model = crashing("--staleness", "none"), mlp()
    with made(model, doomed.server) as optimizer:
        for number, batch in enumerate(batches(24)):
            if number == 6:
                doomed.save()
            if number in (10, 14, 19):
                # While a push is under way, or waits for the next step to be taken note of.
                doomed.crash()
            backward(model, batch)
            optimizer.step()
        optimizer.close()
        [receipt] = optimizer.receipts
    assert [version for version, _ in checksums(doomed.server.control).values()] == [receipt.sequence]
    # What ends while a push is under way goes in the next one: a slow machine makes few.
    assert receipt.sequence > 3


def test_a_worker_forgets_what_a_checkpoint_holds_and_says_where_it_keeps_too_little(crashing, caplog):
    doomed = crashing("--staleness", "none")
    ones = {"w": np.ones(4000, np.float32)}
    sgd = ("sgd", {"learning_rate": 1.0})
    caplog.set_level(logging.INFO)
    with make_client(doomed.server.data, tensors=ones, optimizer=sgd, resend_bytes_max=100_000) as client:
        kept = client.session._kept[0]

        def push(count: int) -> None:
            for _ in range(count):
                client.push(ones)

        push(4)
        assert kept.num_bytes > 4 * 16_000
        doomed.save()
        push(1)
        assert 16_000 < kept.num_bytes < 2 * 16_000
        # The sixth has no room: what came before is of no use alone.
        push(6)
        assert "take more than 100,000 bytes" in caplog.text and kept.num_bytes == 0
        doomed.crash()
        # The push under way is sent again in any case.
        push(1)
        assert "did not keep its pushes up to version 11" in caplog.text
        # Of 12 acknowledged pushes 7 are lost.
        assert (client.pull()["w"] == 1 - 5).all()
        assert "keeps all" not in caplog.text
        push(6)
        doomed.save()
        push(1)
        doomed.save()
        push(1)
        assert "keeps all pushes again" in caplog.text and caplog.text.count("take more") == 2
        doomed.crash()
        assert (client.pull()["w"] == 1 - 13).all()


@pytest.mark.parametrize("protocol", ["async", "hardsync"])
def test_a_worker_that_leaves_takes_nothing_along_that_no_checkpoint_holds(start_server, tmp_path, protocol):
    flags = ("--checkpoint-dir", str(tmp_path), "--checkpoint-seconds", "1000", "--protocol", protocol)
    server = start_server(*flags)

    def workers() -> set[str]:
        saved = newest(tmp_path)
        states = saved.load().shards.values() if saved else ()
        return {entry.worker_id for state in states for entry in state.ledger.entries}

    with make_client(server.data, worker_id="stays"):
        wait_until(lambda: newest(tmp_path) is not None, what="the first checkpoint")
        # Under hardsync it waits for the other's, so that no version tells of it.
        with make_client(server.data, worker_id="leaves") as client:
            client.push(gradients_like(small_model(), 0))
        wait_until(lambda: workers() == {"leaves"}, what="a checkpoint with its push")


def test_servers_that_say_so_let_pushes_be_lost(crashing):
    doomed = crashing("--durability", "none")
    with make_client(doomed.server.data) as client:
        doomed.save()
        steps(client, 2)
        doomed.crash()
        receipts = client.push(gradients_like(small_model(), 2))
        assert {receipt.reason for receipt in receipts} == {REASON_EPOCH}
        # The client has pulled by itself, and goes on.
        assert not client.session.pull_needed and client.session.held_versions.epochs == (1,) and not client.refused
        assert {version for version, _ in checksums(doomed.server.control).values()} == {0}
        steps(client, 1)
        doomed.crash()
        refused = client.session.exchange(Plan([client._gradient], [client._parameters]))
        assert {receipt.reason for receipt in refused} == {REASON_EPOCH} and client.session.pull_needed
        client.pull()
        assert {receipt.outcome for receipt in client.push(gradients_like(small_model(), 3))} == {OUTCOME_APPLIED}
