"""Lost connections and restarted servers: workers go on, or say why not."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from client_support import (
    Clock,
    CuttingProxy,
    addresses,
    gradients_like,
    make_client,
    small_model,
    start_servers,
)
from pyps_client import RunFinished, ServerUnavailable, StateLost
from pyps_client.push import GroupRate
from pyps_wire.common_pb2 import OUTCOME_APPLIED
from support import inspect, wait_until

MakeProxy = Callable[[str], CuttingProxy]


@pytest.fixture
def make_proxy() -> Iterator[MakeProxy]:
    made: list[CuttingProxy] = []

    def make(target: str) -> CuttingProxy:
        made.append(CuttingProxy(target))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_server_that_came_back_empty_is_named_with_the_choices(start_server_process, lost):
    servers = start_servers(start_server_process, 2)
    client = make_client(addresses(servers), run_id="mine")
    client.push(gradients_like(small_model(), 0))
    client.pull()
    servers[lost].kill()
    start_server_process("--port", servers[lost].data.rsplit(":", 1)[1])

    with pytest.raises(StateLost, match=rf"server {lost} .*lost its part of run 'mine'.*--resume.*pyps reset"):
        client.push(gradients_like(small_model(), 1))
    client.close("failed")


def test_the_owner_sends_its_rate_again_to_a_restored_server(start_server_process, tmp_path):
    flags = ("--staleness", "none", "--checkpoint-dir", str(tmp_path), "--checkpoint-seconds", "1000")
    server = start_server_process(*flags)
    vector = np.concatenate([gradient.reshape(-1) for gradient in gradients_like(small_model(), 0).values()])
    with make_client(server.data) as client:
        client.session.push([vector])
        inspect(server.control, "SaveCheckpoint")
        client.session.push([vector], learning_rates={0: GroupRate(0.01)})
        server.kill()
        start_server_process(*flags, "--resume", "--port", server.data.rsplit(":", 1)[1])
        client.push(gradients_like(small_model(), 1))

        receipts = client.push(gradients_like(small_model(), 2))

    assert {(receipt.outcome, receipt.rate) for receipt in receipts} == {(OUTCOME_APPLIED, 0.01)}


def test_a_lost_server_is_awaited_then_named(start_server_process, caplog):
    server = start_server_process()
    client = make_client(server.data, loss_wait_seconds=4)
    server.kill()

    with pytest.raises(ServerUnavailable, match=rf"Waited \d+ s for server 0 \({server.data}\).*loss_wait_seconds"):
        client.push(gradients_like(small_model(), 0))

    assert f"waiting for server 0 ({server.data}): connection refused" in caplog.text
    client.close("failed")


def test_a_gradient_slower_than_the_lease_keeps_the_membership(start_server, make_proxy):
    """Over a slow link heartbeats pass beside the gradient, not behind it, with the worker's figures."""
    clock = Clock()
    server = start_server("--lease-seconds", "10", "--heartbeat-seconds", "0.1", clock=clock)
    proxy = make_proxy(server.data)
    tensors = {"w": np.zeros(40_000, np.float32)}
    with make_client(proxy.address, tensors=tensors, transport="grpc") as client, ThreadPoolExecutor(1) as pool:
        proxy.bytes_per_second = 25_000.0
        client.report(loss=0.5)
        began = clock()
        pushing = pool.submit(client.push, {"w": np.ones(40_000, np.float32)})
        clock.pass_until(pushing.done, server, living=["worker"])

        assert {receipt.outcome for receipt in pushing.result()} == {OUTCOME_APPLIED}
        assert clock() - began > 12
        (worker,) = inspect(server.control, "ListWorkers").workers
        assert (worker.state, dict(worker.scalars)) == ("alive", {"loss": 0.5})
    assert "lease ran out" not in server.output()


def test_workers_learn_of_the_runs_end_and_can_still_pull(start_server):
    server = start_server("--stop-after", "updates=2", "--heartbeat-seconds", "0.1")
    with make_client(server.data, worker_id="a") as a, make_client(server.data, worker_id="b") as b:
        for step in range(2):
            a.push(gradients_like(small_model(), step))
        wait_until(lambda: b.finished, 20, "the stop in a heartbeat")

        with pytest.raises(RunFinished, match="is finished"):
            b.push(gradients_like(small_model(), 3))
        a.pull()
        np.testing.assert_array_equal(b.pull()["embed"], a.pull()["embed"])


def test_proxy_variables_are_ignored_without_use_proxy(start_server, monkeypatch):
    server = start_server()
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with make_client(server.data) as client:
        assert client.push(gradients_like(small_model(), 0))

    with pytest.raises(ServerUnavailable):
        make_client(server.data, use_proxy=True, start_wait_seconds=0.3)


def test_a_server_without_memory_to_spare_makes_workers_wait_not_fail(start_server):
    tensors = {"w": np.zeros(800_000, np.float32)}
    server = start_server("--max-in-flight-bytes", "1100000")
    with ThreadPoolExecutor(6) as pool:

        def work(worker: int) -> int:
            own = {"tensors": tensors, "shard_size": 200_000, "worker_id": f"w{worker}"}
            with make_client(server.data, run_id="mine", transport="grpc", **own) as client:
                client.push(gradients_like(tensors, worker))
                client.pull()
                return client.global_step

        assert max(pool.map(work, range(6))) == 6
