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
from pyps_client import BadRequest, ForkedClient, RunFinished, ServerUnavailable, open_stream
from pyps_wire.codecs import decode, encode
from pyps_wire.common_pb2 import (
    CODEC_BFLOAT16,
    CODEC_FLOAT16,
    OUTCOME_APPLIED,
    REASON_EPOCH,
    REASON_NOT_FINITE,
)
from support import PythonProcess, ServerProcess, wait_until

Start = Callable[..., ServerProcess]

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


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("protocol", ["async", "asgd:mutex=whole"])
def test_exchanges_are_what_pushes_and_pulls_are(
    start_server: Start, transport: str, num_servers: int, protocol: str
) -> None:
    if num_servers == 2 and protocol != "async":
        pytest.skip("one mutex for the model takes one server")
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
    start_server: Start, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = small_model()
    reference = Reference(tensors, "adagrad")
    server = start_server()
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


def test_a_server_killed_amid_rounds_takes_over_the_same_memory(start_server: Start, tmp_path: Path) -> None:
    checkpoints = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    server = start_server(*checkpoints)
    client = make_client(server.data, tensors=LARGE, shard_size=50_000, transport="shm")
    session, gradient, parameters = exchanged(client)
    for step in range(3):
        client.exchange(gradients_like(LARGE, step))
    at_checkpoint = client.pull()["w"]
    port = server.data.rsplit(":", 1)[1]
    server.terminate()
    server = start_server(*checkpoints, "--resume", "--port", port)
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
        start_server(*checkpoints, "--resume", "--port", port)
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


def test_without_an_offer_gradients_go_by_grpc_and_one_line_says_so(
    start_server: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server("--local-socket", "off")
    with caplog.at_level("INFO"), make_client(server.data) as client:
        assert client.session.transport == "grpc"
        client.exchange(gradients_like(small_model(), 0))
    assert caplog.text.count("by gRPC: it offers no shared memory") == 1

    with pytest.raises(ServerUnavailable, match=r"transport is 'shm'.*server 0 .*it offers no shared memory.*'auto'"):
        make_client(server.data, transport="shm", run_id=client.session.run_id)


def test_a_socket_that_cannot_be_reached_means_grpc(start_server: Start, tmp_path: Path) -> None:
    """As in a container that has the server's port, but not its folder."""
    folder = tmp_path / "sockets"
    folder.mkdir()
    server = start_server("--local-socket", str(folder))
    with make_client(server.data) as client:
        assert client.session.transport == "shm"
    (path,) = folder.glob("*.sock")
    path.unlink()
    with make_client(server.data, worker_id="later", run_id=client.session.run_id) as client:
        assert client.session.transport == "grpc"
        assert client.exchange(gradients_like(small_model(), 0))


def test_one_server_here_and_one_elsewhere_are_served_each_its_way(start_server: Start) -> None:
    tensors = small_model()
    reference = Reference(tensors, "adagrad")
    servers = [start_server(), start_server("--local-socket", "off")]
    with make_client(addresses(servers)) as client:
        assert client.session.transport == "mixed"
        assert not client.session.checks_first
        for step in range(3):
            gradients = gradients_like(tensors, step)
            reference.step(gradients)
            reference.check(client.exchange(gradients))


def test_a_server_that_stops_sharing_is_served_by_grpc_from_then_on(
    start_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    server = start_server(*checkpoints)
    with make_client(server.data) as client:
        assert client.session.transport == "shm"
        client.exchange(gradients_like(small_model(), 0))
        server.terminate()
        port = server.data.rsplit(":", 1)[1]
        start_server(*checkpoints, "--resume", "--port", port, "--local-socket", "off")
        client.pull()
        assert client.session.transport == "grpc"
        client.exchange(gradients_like(small_model(), 1))
        assert client.session.held_versions.epochs == (1,)
        assert client.refused == {}


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


@pytest.mark.parametrize("transport", ["shm", "auto"])
def test_a_link_that_is_lost_between_rounds_is_opened_again(start_server: Start, transport: str) -> None:
    tensors = small_model()
    reference = Reference(tensors, "adagrad")
    with make_client(start_server().data, transport=transport) as client:
        link = client.session._servers.connections[0].link
        for step in range(4):
            link.close()
            assert client.session.checks_first
            gradients = gradients_like(tensors, step)
            reference.step(gradients)
            # The second time a push meets it, and then a pull.
            reference.check(client.exchange(gradients) if step != 1 else client.push(gradients) and client.pull())
            assert client.session.transport == "shm"
            link, lost = client.session._servers.connections[0].link, link
            assert link is not lost
            link.close()
            reference.check(client.pull())
            link = client.session._servers.connections[0].link


def start_with_socket(start_server: Start, folder: Path) -> tuple[ServerProcess, Path]:
    """A server and the path of its local socket, without which no link can be opened again."""
    folder.mkdir()
    server = start_server("--local-socket", str(folder))
    (path,) = folder.glob("*.sock")
    return server, path


def test_what_was_left_to_the_server_to_look_through_is_looked_through_here_where_the_link_is_lost(
    start_server: Start, tmp_path: Path
) -> None:
    """By gRPC the server would refuse the shard with NaN and apply the others."""
    server, path = start_with_socket(start_server, tmp_path / "sockets")
    with make_client(server.data, tensors=LARGE, shard_size=50_000) as client:
        session, gradient, parameters = exchanged(client)
        before = parameters.copy()
        gradient[:] = 1.0
        gradient[399_999] = np.inf
        assert session.checks_first
        path.unlink()
        session._servers.connections[0].link.close()
        receipts = session.exchange([gradient], [parameters])

        assert [receipt.reason for receipt in receipts] == [REASON_NOT_FINITE] * session.partition.num_shards
        assert (session.transport, session.checks_first) == ("grpc", False)
        np.testing.assert_array_equal(parameters, before)
        np.testing.assert_array_equal(client.snapshot()["w"], before)
        gradient[399_999] = 1.0
        receipts = session.exchange([gradient], [parameters])
        assert {receipt.outcome for receipt in receipts} == {OUTCOME_APPLIED}
        assert (parameters != before).all()


def test_a_worker_that_insists_on_shared_memory_ends_rather_than_go_on_without(
    start_server: Start, tmp_path: Path
) -> None:
    server, path = start_with_socket(start_server, tmp_path / "sockets")
    client = make_client(server.data, transport="shm")
    path.unlink()
    client.session._servers.connections[0].link.close()
    for _ in range(2):
        with pytest.raises(ServerUnavailable, match=r"transport is 'shm', but no memory can be shared.*'auto'"):
            client.exchange(gradients_like(small_model(), 0))
    client.close("failed")


INTERRUPTED = """
import sys
import numpy as np
from pyps_client import Client, open_stream

if sys.argv[3] == "queued":
    open_stream.cygrpc = None
tensors = {"w": np.zeros(200_000, np.float32)}
client = Client(tensors, ("sgd", {"learning_rate": 1.0}), servers=sys.argv[1], worker_id="w", transport=sys.argv[2])
client.exchange({"w": np.ones(200_000, np.float32)})
print("training", flush=True)
while True:
    client.exchange({"w": np.ones(200_000, np.float32)})
"""


@pytest.mark.parametrize(("way", "stream"), [("shm", ""), ("grpc", "direct"), ("grpc", "queued")])
@pytest.mark.parametrize("stopped", [True, False])
def test_ctrl_c_amid_an_exchange_ends_the_script_as_anywhere_else(
    start_server: Start, start_python: Callable[..., PythonProcess], way: str, stream: str, stopped: bool
) -> None:
    """Whether it waits for a server that does not answer, or is amid busy rounds."""
    server = start_server()
    process = start_python("-c", INTERRUPTED, server.data, way, stream)
    process.wait_for_output("training")
    if stopped:
        server.signal(signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{server.pid}/stat").read_text().split()[2] == "T", 20, "the server's stop")
    process.signal(signal.SIGINT)
    wait_until(lambda: "KeyboardInterrupt" in process.output(), 20, "the traceback")
    if stopped:
        server.signal(signal.SIGCONT)

    assert process.wait() == -signal.SIGINT
    assert "KeyError" not in process.output()
    (worker,) = inspect(server.control, "ListWorkers").workers
    assert (worker.state, worker.message) == ("failed", "KeyboardInterrupt: ")


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
    with make_client(start_server().data) as client, pytest.raises(BadRequest, match="has lent its vectors already"):
        client.session.lend()
