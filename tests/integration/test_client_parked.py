"""Waits for other workers: disturbed by losses, restarts, pauses, other protocols, closing, and by nobody coming."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_support import Clock, CuttingProxy, addresses, gradients_like, make_client, small_model, start_servers
from pyps_client import Client, RunFinished, WaitTimedOut
from pyps_wire import inspector_pb2 as pb
from pyps_wire.common_pb2 import OUTCOME_APPLIED, OUTCOME_PENDING, REASON_STALE
from support import ServerThread, inspect, wait_until

RATE = 0.05
# A worker that is to be stopped: a process, which tells of each step.
WORKER = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_client_parked import Worker
Worker(sys.argv[1], 1, 0, tell=lambda step: print("step", step, flush=True)).train()
"""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    executor = ThreadPoolExecutor(6)
    yield executor
    # After a failure they train until their servers are gone.
    executor.shutdown(wait=False, cancel_futures=True)


def client_of(address: str, worker_id: str, **options: Any) -> Client:
    return make_client(
        address, worker_id=worker_id, run_id="shared", optimizer=("sgd", {"learning_rate": RATE}), **options
    )


def step(client: Client, seed: int = 0) -> None:
    client.pull()
    client.push(gradients_like(small_model(), seed), examples=1)


class Worker:
    """Worker number W, which takes so many steps (0: without end), or ends with the run."""

    def __init__(self, servers: str, number: int, steps: int, tell: Callable[[int], object] = lambda step: None):
        self.num_steps = 0
        self.steps_under: Counter[str] = Counter()
        self._servers, self._number, self._steps, self._tell = servers, number, steps, tell

    def train(self) -> Worker:
        with client_of(self._servers, f"worker-{self._number}", wait_seconds=100) as client:
            try:
                while not self._steps or self.num_steps < self._steps:
                    step(client, 100 * self._number + self.num_steps)
                    self.steps_under[client.session.terms.protocol] += 1
                    self.num_steps += 1
                    self._tell(self.num_steps)
                client.pull()
            except RunFinished:
                pass
        return self


def end_of(training: Sequence[Future[Worker]], servers: Sequence[ServerThread]) -> None:
    for server in servers:
        inspect(server.control, "Stop")
    for future in training:
        future.result(60)


def bring_to_the_wait(protocol: str, quick: Client, slow: Client) -> None:
    """Takes both to where one would wait for the other, which may compute and has not pushed."""
    if protocol == "hardsync":
        # A barrier knows a worker from its first push.
        for client in (quick, slow, quick):
            step(client)
    slow.pull()
    if protocol != "serial":
        step(quick)


def park(
    pool: ThreadPoolExecutor, server: ServerThread, quick: Client, slow: Client, protocol: str = "hardsync"
) -> Future[Any]:
    """Lets one pull on a thread, where it has to wait for the other; returns once the server tells of the wait."""
    bring_to_the_wait(protocol, quick, slow)
    pulling = pool.submit(quick.pull)
    wait_until(lambda: pulling.done() or inspect(server.control, "GetStatus").waiting_for, what="the wait")
    assert not pulling.done(), pulling.result()
    return pulling


def test_a_lost_connection_does_not_end_the_wait_for_a_round(start_server, pool):
    server = start_server("--protocol", "hardsync")
    proxy = CuttingProxy(server.data)
    with client_of(proxy.address, "quick") as quick, client_of(server.data, "slow") as slow:
        pulling = park(pool, server, quick, slow)

        proxy.cut()
        step(slow)

        assert pulling.result(30).keys() == small_model().keys()
        assert (proxy.num_cuts, quick.global_step) == (1, slow.global_step)
    proxy.close()


def test_a_lost_connection_neither_stops_nor_doubles_turns(start_server, pool):
    """A question that nobody hears gives up its place; asked again, it is after those that came in between."""
    server = start_server("--protocol", "serial")
    proxy = CuttingProxy(server.data)

    def go_on(client: Client) -> set[tuple[int, int]]:
        seen = set()
        for seed in range(4):
            seen |= {
                (receipt.outcome, receipt.staleness) for receipt in client.push(gradients_like(small_model(), seed))
            }
            client.pull()
        client.close()
        return seen

    with client_of(server.data, "first") as first, client_of(proxy.address, "second") as second:
        pulling = park(pool, server, second, first, "serial")

        proxy.cut()

        first_goes = pool.submit(go_on, first)
        assert pulling.result(30).keys() == small_model().keys()
        assert go_on(second) == first_goes.result(30) == {(OUTCOME_APPLIED, 0)}
        assert proxy.num_cuts == 1
    proxy.close()


@pytest.mark.parametrize("protocol", ["hardsync", "serial", "ssp:s=0"])
def test_a_long_wait_calls_again_and_logs_the_other_workers(start_server, pool, monkeypatch, caplog, protocol):
    monkeypatch.setattr("pyps_client.pull.PARK_SECONDS", 0.2)
    server = start_server("--protocol", protocol)
    with client_of(server.data, "quick") as quick, client_of(server.data, "slow") as slow:
        bring_to_the_wait(protocol, quick, slow)
        waiting = pool.submit(quick.pull)

        def told() -> list[str]:
            return [message for message in caplog.messages if "waiting for other workers" in message]

        wait_until(lambda: len(told()) >= 2, what="two lines on the wait")
        assert "slow" in told()[0], told()
        slow.push(gradients_like(small_model(), 1), examples=1)
        handed_on = pool.submit(slow.pull)
        assert waiting.result(30).keys() == small_model().keys()
        quick.close()
        handed_on.result(30)


def test_the_wait_ends_at_the_launchs_deadline_with_the_names(start_server):
    server = start_server("--protocol", "serial")
    with client_of(server.data, "first") as first, client_of(server.data, "second", wait_seconds=0.5) as second:
        first.pull()

        with pytest.raises(WaitTimedOut, match=r"Waited . s for other workers: .*second.*first.*PYPS_WAIT_SECONDS"):
            second.pull()

        first.close()
        assert second.pull().keys() == small_model().keys()


@pytest.mark.parametrize("protocol", ["hardsync", "serial"])
def test_closing_ends_a_wait_for_others(start_server, pool, protocol):
    server = start_server("--protocol", protocol)
    with client_of(server.data, "slow") as slow, client_of(server.data, "quick") as quick:
        pulling = park(pool, server, quick, slow, protocol)

        quick.close()

        with pytest.raises(RunFinished, match="closed"):
            pulling.result(30)


@pytest.mark.parametrize("protocol", ["hardsync", "serial"])
def test_a_finished_run_ends_its_workers_waits(start_server, pool, protocol):
    server = start_server("--protocol", protocol)
    with client_of(server.data, "slow") as slow, client_of(server.data, "quick") as quick:
        pulling = park(pool, server, quick, slow, protocol)

        inspect(server.control, "Stop")

        assert pulling.result(30).keys() == small_model().keys()
        with pytest.raises(RunFinished):
            for _ in range(2):
                quick.push(gradients_like(small_model(), 3))
        assert quick.pull().keys() == small_model().keys()


def test_a_restart_ends_the_waits_of_the_epoch(start_server, pool, tmp_path):
    flags = ("--protocol", "hardsync", "--checkpoint-dir", str(tmp_path / "checkpoints"))
    server = start_server(*flags)
    with client_of(server.data, "quick") as quick, client_of(server.data, "slow") as slow:
        pulling = park(pool, server, quick, slow)

        server.stop()
        start_server(*flags, "--resume", "--port", server.data.rsplit(":", 1)[1])

        pulling.result(60)
        assert quick.session.held_versions.epochs == (1,)
        slow.pull()
        for client in (slow, quick):
            client.push(gradients_like(small_model(), 5), examples=1)
        np.testing.assert_array_equal(quick.pull()["embed"], slow.pull()["embed"])


def test_two_workers_never_wait_for_each_other_at_two_shards(start_server, pool):
    """Each is late at one shard and early at the other, as when both join while a round of the others ends."""
    server = start_server("--protocol", "hardsync")
    with client_of(server.data, "a", wait_seconds=20) as first, client_of(server.data, "b", wait_seconds=20) as second:
        for client in (first, second, first):
            step(client)
        vector = np.ones(5002, np.float32)
        for late_at, client in enumerate((first, second)):
            client.pull()
            base = client.session.held_versions
            base[late_at] -= 1
            receipts = client.session.push([vector], base_versions=base)
            assert receipts[late_at].reason == REASON_STALE
            assert receipts[1 - late_at].outcome == OUTCOME_PENDING

        def go_on(client: Client) -> None:
            for number in range(5):
                step(client, seed=number)
            client.close()

        for done in [pool.submit(go_on, client) for client in (first, second)]:
            done.result(60)
        assert first.refused["STALE"] == second.refused["STALE"] == 1


def test_unequal_numbers_of_steps_hang_nobody(start_server, pool):
    steps = [2, 5, 9]
    for protocol in ["hardsync", "backup:b=1", "ssp:s=0", "serial", "softsync:n=1", "asgd"]:
        server = start_server("--protocol", protocol, "--expected-workers", "3")
        workers = [Worker(server.data, number, count) for number, count in enumerate(steps)]
        training = [pool.submit(worker.train) for worker in workers]

        assert [future.result(120).num_steps for future in training] == steps, protocol


def states(server: ServerThread) -> dict[str, str]:
    return {worker.worker_id: worker.state for worker in inspect(server.control, "ListWorkers").workers}


def test_a_paused_worker_comes_back(start_server, start_python, pool):
    clock = Clock()
    flags = ("--lease-seconds", "10", "--heartbeat-seconds", "0.3", "--stall-seconds", "300", "--expected-workers", "2")
    servers = {
        protocol: start_server("--protocol", protocol, *flags, clock=clock) for protocol in ("hardsync", "serial")
    }
    steady = {protocol: Worker(server.data, 0, 0) for protocol, server in servers.items()}
    training = [pool.submit(worker.train) for worker in steady.values()]
    paused = {protocol: start_python("-c", WORKER, server.data) for protocol, server in servers.items()}
    for process in paused.values():
        process.wait_for_output("step 3")
        process.signal(signal.SIGSTOP)

    clock.pass_until(
        lambda: all(states(server)["worker-1"] == "expired" for server in servers.values()),
        *servers.values(),
        living=("worker-0",),
    )
    for protocol, server in servers.items():
        known = steady[protocol].num_steps
        wait_until(lambda p=protocol, k=known: steady[p].num_steps >= k + 3, 100, f"further steps under {protocol}")
        before = paused[protocol].output().count("step")
        paused[protocol].signal(signal.SIGCONT)
        wait_until(
            lambda p=protocol, b=before: paused[p].output().count("step") > b + 5, 100, f"steps under {protocol}"
        )
        assert states(server) == {"worker-0": "alive", "worker-1": "alive"}
        wait_until(
            lambda s=server: all(worker.counts for worker in inspect(s.control, "ListWorkers").workers),
            60,
            "both to count",
        )
    end_of(training, list(servers.values()))


def test_a_protocol_that_changes_while_workers_wait_hangs_nobody(start_server, pool):
    servers = start_servers(start_server, 2, "--heartbeat-seconds", "0.2", "--expected-workers", "3")
    workers = [Worker(addresses(servers), number, 0) for number in range(3)]
    training = [pool.submit(worker.train) for worker in workers]
    wait_until(lambda: all(worker.num_steps >= 3 for worker in workers), what="first steps")
    for protocol in ["hardsync", "ssp:s=1", "backup:b=1", "serial", "softsync:n=1", "hardsync", "async"]:
        before = [worker.steps_under[protocol] for worker in workers]
        for server in servers:
            inspect(server.control, "Configure", pb.ConfigureRequest(protocol=protocol))
        for worker, known in zip(workers, before, strict=True):
            wait_until(
                lambda worker=worker, known=known, protocol=protocol: worker.steps_under[protocol] > known + 3,
                100,
                f"steps of every worker under {protocol}",
            )
    end_of(training, servers)
