"""The ways of gradients and parameters: shared memory, an open gRPC stream, and what comes when one of them ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_support import CuttingProxy, Reference, addresses, gradients_like, make_client, small_model, start_servers
from inspection import inspect
from pyps_client import BadRequest, ForkedClient, RunFinished, open_stream
from pyps_wire.codecs import decode, encode
from pyps_wire.common_pb2 import (
    CODEC_BFLOAT16,
    CODEC_FLOAT16,
    OUTCOME_APPLIED,
    REASON_EPOCH,
    REASON_NOT_FINITE,
)
from support import AnyServer, wait_until

Start = Callable[..., AnyServer]

# Several shards, and frames large enough for more than one of HTTP/2's.
LARGE = {"w": np.asarray(np.random.default_rng(0).standard_normal(400_000), np.float32)}


@pytest.fixture(params=["shm", "grpc", "grpc without the direct stream"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "grpc without the direct stream":
        monkeypatch.setattr(open_stream, "cygrpc", None)
    return str(request.param).split()[0]


@pytest.fixture
def proxy_to() -> Iterator[Callable[[str], CuttingProxy]]:
    made: list[CuttingProxy] = []

    def make(target: str) -> CuttingProxy:
        made.append(CuttingProxy(target))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


def exchanged(client: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """A client's session, and the vectors that it lent."""
    return client.session, client._gradient, client._parameters


@pytest.mark.parametrize(("num_servers", "protocol"), [(1, "async"), (2, "async"), (1, "asgd:mutex=whole")])
def test_exchanges_are_what_pushes_and_pulls_are(
    start_server: Start, transport: str, num_servers: int, protocol: str
) -> None:
    tensors = small_model()
    reference = Reference(tensors, "adagrad")
    servers = start_servers(start_server, num_servers, "--protocol", protocol)
    with make_client(addresses(servers), transport=transport) as client:
        assert client.session.transport == transport
        assert client.session.checks_first == (transport == "shm" and num_servers == 1)
        for step in range(4):
            gradients = gradients_like(tensors, step)
            if step == 2:
                del gradients["layer"]
            reference.step(gradients)
            reference.check(client.exchange(gradients))
        assert client.global_step == 4
        assert not client.session.pull_needed
        for step in range(4, 6):
            gradients = gradients_like(tensors, step)
            receipts = client.push(gradients)
            assert {(receipt.outcome, receipt.staleness) for receipt in receipts} == {(OUTCOME_APPLIED, 0)}
            reference.step(gradients)
            reference.check(client.pull())


def test_the_same_gradients_in_vectors_that_nobody_lent_go_by_grpc(start_server: Start) -> None:
    reference = Reference(LARGE, "adagrad")
    with make_client(start_server().data, tensors=LARGE, shard_size=50_000) as client:
        session, _, _ = exchanged(client)
        assert session.transport == "shm"
        mine = np.empty(400_000, np.float32)
        for step in range(3):
            gradients = gradients_like(LARGE, step)
            session.exchange([gradients["w"]], [mine])
            reference.step(gradients)
            reference.check({"w": mine})


@pytest.mark.parametrize(("codec", "number"), [("float16", CODEC_FLOAT16), ("bfloat16", CODEC_BFLOAT16)])
def test_parameters_and_gradients_of_two_bytes(start_server: Start, transport: str, codec: str, number: int) -> None:
    def rounded(values: np.ndarray) -> np.ndarray:
        return decode(encode(values, number), number).reshape(values.shape)

    tensors = small_model()
    reference = Reference(tensors, "adagrad")
    with make_client(start_server().data, transport=transport, codec=codec, pull_codec=codec) as client:
        for step in range(3):
            gradients = gradients_like(tensors, step)
            reference.step({name: rounded(gradient) for name, gradient in gradients.items()})
            pulled = client.exchange(gradients) if step else client.push(gradients) and client.pull()
            for name, expected in reference.parameters.items():
                np.testing.assert_array_equal(pulled[name], rounded(expected), err_msg=name)
        # Evaluation sees what the servers hold, whatever travels to workers.
        reference.check(client.snapshot())


def test_a_round_that_waits_for_others_brings_parameters_with_the_pull(start_server: Start, transport: str) -> None:
    tensors = small_model()
    server = start_server("--protocol", "hardsync", "--expected-workers", "2", "--stall-seconds", "120")
    with ThreadPoolExecutor(2) as pool:

        def work(name: str) -> dict[str, np.ndarray]:
            with make_client(server.data, worker_id=name, run_id="mine", transport=transport) as client:
                for step in range(5):
                    pulled = client.exchange(gradients_like(tensors, step))
                assert client.refused == {}
                return pulled

        first, second = pool.map(work, ["a", "b"])
    reference = Reference(tensors, "adagrad")
    for step in range(5):
        reference.step(gradients_like(tensors, step))
    reference.check(first)
    reference.check(second)


def test_an_exchange_cut_midway_goes_on_with_what_had_no_answer(
    start_server: Start, proxy_to: Callable[[str], CuttingProxy]
) -> None:
    reference = Reference(LARGE, "adagrad")
    proxy = proxy_to(start_server().data)
    with make_client(proxy.address, tensors=LARGE, shard_size=50_000, transport="grpc") as client:
        for step in range(4):
            gradients = gradients_like(LARGE, step)
            proxy.cut_after(300_000 + 400_000 * step)
            reference.step(gradients)
            reference.check(client.exchange(gradients))
            assert set(client.session.held_versions.values()) == {step + 1}
    assert proxy.num_cuts == 4


def test_an_exchange_whose_answers_were_lost_is_not_applied_again_and_brings_its_parameters(
    start_server: Start, proxy_to: Callable[[str], CuttingProxy]
) -> None:
    tensors = small_model()
    reference = Reference(tensors, "adagrad")
    server = start_server()
    proxy = proxy_to(server.data)
    with make_client(proxy.address, transport="grpc") as client, ThreadPoolExecutor(1) as pool:
        client.exchange(gradients_like(tensors, 0))
        proxy.hold_replies()
        exchanging = pool.submit(client.exchange, gradients_like(tensors, 1))
        wait_until(
            lambda: all(shard.version == 2 for shard in inspect(server.control, "ListShards").shards), 20, "the push"
        )
        proxy.cut()
        for step in range(2):
            reference.step(gradients_like(tensors, step))
        reference.check(exchanging.result(30))


def test_a_paused_server_costs_a_deadline_and_the_exchange_counts_once(
    start_server_process: Start, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = small_model()
    reference = Reference(tensors, "adagrad")
    server = start_server_process()
    monkeypatch.setattr("pyps_client.connection.CALL_SECONDS", 0.5)
    monkeypatch.setattr("pyps_client.watchdog.NAP_SECONDS", 0.5)
    with make_client(server.data, transport=transport) as client, ThreadPoolExecutor(1) as pool:
        gradients = gradients_like(tensors, 0)
        client.exchange(gradients)
        reference.step(gradients)
        connection = client.session._servers.connections[0]
        lost_from = connection.link or connection.channel
        server.signal(signal.SIGSTOP)
        exchanging = pool.submit(client.exchange, gradients)
        reference.step(gradients)
        # What did not answer in time is given up, and then nobody is there.
        wait_until(lambda: (connection.link or connection._channel) is not lost_from, 20, "the loss")
        server.signal(signal.SIGCONT)
        reference.check(exchanging.result(30))
        wait_until(lambda: client.session.transport == transport, 20, "the way as before")


def test_a_server_killed_amid_rounds_takes_over_the_same_memory(start_server_process: Start, tmp_path: Path) -> None:
    checkpoints = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    server = start_server_process(*checkpoints)
    client = make_client(server.data, tensors=LARGE, shard_size=50_000, transport="shm")
    session, gradient, parameters = exchanged(client)
    for step in range(3):
        client.exchange(gradients_like(LARGE, step))
    at_checkpoint = client.pull()["w"]
    port = server.data.rsplit(":", 1)[1]
    server.terminate()
    server = start_server_process(*checkpoints, "--resume", "--port", port)
    np.testing.assert_array_equal(client.pull()["w"], at_checkpoint)

    gradient[:] = 0.01
    with ThreadPoolExecutor(1) as pool:

        def train() -> set[int]:
            """Rounds without a pause until one was refused, as its base version belongs to an earlier life."""
            reasons: set[int] = set()
            while REASON_EPOCH not in reasons:
                receipts = session.exchange([gradient], [parameters])
                reasons = {receipt.reason for receipt in receipts}
            return reasons

        training = pool.submit(train)
        wait_until(lambda: client.global_step > 20, 20, "rounds under way")
        server.kill()
        start_server_process(*checkpoints, "--resume", "--port", port)
        assert training.result(60) == {REASON_EPOCH}

    assert session.pull_needed
    assert session.transport == "shm"
    session.pull([parameters])
    np.testing.assert_array_equal(parameters, at_checkpoint)
    reference_step = session.exchange([gradient], [parameters])
    assert {receipt.outcome for receipt in reference_step} == {OUTCOME_APPLIED}
    assert (parameters != at_checkpoint).all()
    assert client._gradient is gradient
    client.close()


def test_one_nan_refuses_the_whole_push_where_it_is_checked_first(start_server: Start) -> None:
    with make_client(start_server().data, tensors=LARGE, shard_size=50_000) as client:
        session, gradient, parameters = exchanged(client)
        assert session.checks_first
        before = parameters.copy()
        gradient[:] = 1.0
        gradient[399_999] = np.nan
        receipts = session.exchange([gradient], [parameters])

        assert {receipt.reason for receipt in receipts} == {REASON_NOT_FINITE}
        np.testing.assert_array_equal(parameters, before)


def test_a_forked_child_keeps_its_hands_off_the_memory_and_the_socket(start_server: Start) -> None:
    tensors = small_model()
    reference = Reference(tensors, "adagrad")
    with make_client(start_server().data, transport="shm") as client:
        session, gradient, parameters = exchanged(client)
        held = parameters.copy()
        descriptor = session._servers.connections[0].link._socket.fileno()
        child = os.fork()
        if child == 0:
            # Nothing of pytest may run in the child.
            try:
                try:
                    os.fstat(descriptor)
                    os._exit(3)
                except OSError:
                    parameters[:] = 0.0
                    gradient[:] = np.nan
                try:
                    session.exchange([gradient], [parameters])
                except ForkedClient:
                    client.close()
                    os._exit(0)
            finally:
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

        np.testing.assert_array_equal(parameters, held)
        assert session.transport == "shm"
        gradients = gradients_like(tensors, 0)
        reference.step(gradients)
        reference.check(client.exchange(gradients))


def test_closing_ends_a_pull_that_is_held_and_a_push_meanwhile_takes_the_other_way(
    start_server: Start, transport: str
) -> None:
    server = start_server("--protocol", "async")
    client = make_client(server.data, transport=transport)
    session, gradient, parameters = exchanged(client)
    with ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(session.pull, [parameters], min_versions={0: 99}, wait_seconds=600)
        wait_until(lambda: inspect(server.control, "GetStatus").waiting_for, 20, "the pull to be held")
        receipts = session.push([gradient])
        assert {receipt.outcome for receipt in receipts} == {OUTCOME_APPLIED}
        client.close()
        with pytest.raises(RunFinished, match="closed"):
            pulling.result(20)


def test_vectors_are_lent_once_and_so_many(start_server: Start) -> None:
    with (
        make_client(start_server().data) as client,
        pytest.raises(BadRequest, match="has lent its vectors already"),
    ):
        client.session.lend()
