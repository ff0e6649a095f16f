"""Workers without torch under every protocol: they pull, compute and push, on one to three servers.

The loop of a worker is the same for all protocols: what has to be waited for, the client waits for by itself.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_support import Array, Clock, addresses, gradients_like, make_client, small_model, start_servers
from inspection import inspect
from pyps_client import Client, Observer, RunFinished, WaitTimedOut
from pyps_wire import inspector_pb2 as pb
from pyps_wire.common_pb2 import OUTCOME_APPLIED, OUTCOME_PENDING, OUTCOME_REJECTED, REASON_REPEATED
from support import PythonProcess, ServerThread, wait_until

Start = Callable[..., ServerThread]
StartPython = Callable[..., PythonProcess]

RATE = 0.05
NUM_WORKERS = 3
STEPS = 6
# What a dead worker is waited for; by the servers' clock, which a test sets forward.
LEASE = ("--lease-seconds", "10", "--heartbeat-seconds", "0.3", "--stall-seconds", "300")

# A worker that is to be killed or stopped: a process, which tells of each step.
WORKER = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_client_protocols import Worker
Worker(sys.argv[1], int(sys.argv[2]), 0, tell=lambda step: print("step", step, flush=True)).train()
"""


class Worker:
    """Worker number W, whose gradient of step s is that of seed 100 W + s."""

    def __init__(
        self,
        servers: str,
        number: int,
        steps: int,
        *,
        before_leaving: Callable[[], object] = lambda: None,
        tell: Callable[[int], object] = lambda step: None,
    ) -> None:
        """Ends after so many steps (0: never), or with the run."""
        self.num_steps = 0
        self.staleness_max = 0
        self.num_workers_max = 0
        self.num_shards = 0
        self.steps_under: Counter[str] = Counter()
        self.refused: dict[str, int] = {}
        self._servers, self._number, self._steps = servers, number, steps
        self._before_leaving, self._tell = before_leaving, tell

    def train(self) -> Worker:
        model = small_model()
        sgd = ("sgd", {"learning_rate": RATE})
        name = f"worker-{self._number}"
        with make_client(self._servers, worker_id=name, run_id="shared", optimizer=sgd, wait_seconds=100) as client:
            try:
                while not self._steps or self.num_steps < self._steps:
                    client.pull()
                    gradients = gradients_like(model, 100 * self._number + self.num_steps)
                    receipts = client.push(gradients, examples=1)
                    taken = [receipt for receipt in receipts if receipt.outcome != OUTCOME_REJECTED]
                    self.staleness_max = max([self.staleness_max, *(receipt.staleness for receipt in taken)])
                    self.num_workers_max = max([self.num_workers_max, *(receipt.num_workers for receipt in receipts)])
                    self.num_shards = len(receipts)
                    self.steps_under[client.session.protocol] += 1
                    self.num_steps += 1
                    self._tell(self.num_steps)
                self._before_leaving()
                client.pull()
            except RunFinished:
                pass
            self.refused = client.refused
        return self


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    executor = ThreadPoolExecutor(3 * NUM_WORKERS)
    yield executor
    # After a failure they train until their servers are gone.
    executor.shutdown(wait=False, cancel_futures=True)


def begin(pool: ThreadPoolExecutor, workers: Sequence[Worker]) -> list[Future[Worker]]:
    return [pool.submit(worker.train) for worker in workers]


def stop_run(servers: Sequence[ServerThread]) -> None:
    for server in servers:
        inspect(server.control, "Stop")


def goes_on(worker: Worker, steps: int = 3) -> None:
    """Waits for so many more steps."""
    before = worker.num_steps
    wait_until(lambda: worker.num_steps >= before + steps, 100, "further steps")


def states(server: ServerThread) -> dict[str, str]:
    return {worker.worker_id: worker.state for worker in inspect(server.control, "ListWorkers").workers}


def snapshot(servers: Sequence[ServerThread]) -> Mapping[str, Array]:
    with Observer(addresses(servers)) as observer:
        return observer.snapshot()


def versions(servers: Sequence[ServerThread]) -> list[int]:
    """Versions of all shards."""
    return [shard.version for server in servers for shard in inspect(server.control, "ListShards").shards]


def assert_moved_by(servers: Sequence[ServerThread], share: float, case: str) -> None:
    """Plain SGD without staleness weights: the parameters moved by the rate times the share of all gradients."""
    model, pulled = small_model(), snapshot(servers)
    gradients = [gradients_like(model, 100 * worker + step) for worker in range(NUM_WORKERS) for step in range(STEPS)]
    for name, first in model.items():
        moved = share * RATE * np.sum([gradient[name] for gradient in gradients], axis=0, dtype=np.float64)
        np.testing.assert_allclose(pulled[name], first - moved, rtol=0, atol=1e-5, err_msg=f"{case}: {name}")


def trained(
    start_server: Start, pool: ThreadPoolExecutor, num_servers: int, protocol: str
) -> tuple[list[ServerThread], list[Worker]]:
    """Servers and workers, once three workers have taken their steps. None leaves before all have."""
    flags = ("--staleness", "none", "--expected-workers", f"{NUM_WORKERS}", "--protocol", protocol)
    servers = start_servers(start_server, num_servers, *flags)
    all_done = threading.Barrier(NUM_WORKERS)
    # Who stays under serial holds its turn.
    stays = protocol != "serial"
    workers = [
        Worker(addresses(servers), number, STEPS, before_leaving=lambda: stays and all_done.wait(100))
        for number in range(NUM_WORKERS)
    ]
    return servers, [training.result(120) for training in begin(pool, workers)]


def test_each_protocol_makes_of_three_workers_pushes_what_it_is_there_for(
    start_server: Start, pool: ThreadPoolExecutor
) -> None:
    pushes = STEPS * NUM_WORKERS
    # How many updates each shard has, the share of every gradient in them, and whether none may be stale.
    for num_servers, protocol, updates, share, fresh in [
        (3, "hardsync", STEPS, 1 / NUM_WORKERS, True),
        (2, "async", pushes, 1.0, False),
        (1, "asgd", pushes, 1.0, False),
        (1, "asgd:mutex=shard", pushes, 1.0, False),
        # c = 3 gradients an update, whoever they are of.
        (2, "softsync:n=1", pushes // NUM_WORKERS, 1 / NUM_WORKERS, False),
        (3, "ssp:s=1", pushes, 1.0, False),
        (2, "ssp:s=0", pushes, 1.0, False),
        (1, "ssp:s=0,strict_bsp=true", None, 1.0, False),
        (3, "serial", pushes, 1.0, True),
    ]:
        servers, workers = trained(start_server, pool, num_servers, protocol)

        assert [worker.refused for worker in workers] == [{}] * NUM_WORKERS, protocol
        assert updates is None or set(versions(servers)) == {updates}, (protocol, versions(servers))
        assert not fresh or {worker.staleness_max for worker in workers} == {0}, protocol
        assert_moved_by(servers, share, protocol)


def test_backup_workers_drop_what_came_late_and_count_it(start_server: Start, pool: ThreadPoolExecutor) -> None:
    """Chen et al. 2016: a round is of the first two of three; dropped work is never applied."""
    servers, workers = trained(start_server, pool, 2, "backup:b=1")

    assert all(set(worker.refused) <= {"DROPPED"} for worker in workers)
    assert {worker.staleness_max for worker in workers} == {0}
    num_shards = workers[0].num_shards
    dropped = sum(sum(worker.refused.values()) for worker in workers)
    taken = NUM_WORKERS * STEPS * num_shards - dropped
    # Two gradients an update; of the last round one may have come.
    assert 0 <= taken - 2 * sum(versions(servers)) <= num_shards


def test_unequal_numbers_of_steps_hang_nobody(start_server: Start, pool: ThreadPoolExecutor) -> None:
    steps = [2, 5, 9]
    for protocol in ["hardsync", "backup:b=1", "ssp:s=0", "serial", "softsync:n=1", "asgd"]:
        server = start_server("--protocol", protocol, "--expected-workers", f"{NUM_WORKERS}")
        workers = [Worker(server.data, number, count) for number, count in enumerate(steps)]

        assert [training.result(120).num_steps for training in begin(pool, workers)] == steps, protocol


def test_a_worker_killed_inside_a_barrier_holds_up_the_others_for_a_lease_and_is_named(
    start_server: Start, start_python: StartPython, pool: ThreadPoolExecutor
) -> None:
    clock = Clock()
    flags = (*LEASE, "--expected-workers", f"{NUM_WORKERS}")
    runs = {
        protocol: start_servers(lambda *given: start_server(*given, clock=clock), 2, "--protocol", protocol, *flags)
        for protocol in ("hardsync", "ssp:s=0", "serial")
    }
    survivors = {run: [Worker(addresses(servers), number, 0) for number in (0, 2)] for run, servers in runs.items()}
    training = [begin(pool, workers) for workers in survivors.values()]
    killed = {run: start_python("-c", WORKER, addresses(servers), "1") for run, servers in runs.items()}
    for process in killed.values():
        process.wait_for_output("step 5")

    for process in killed.values():
        process.kill()

    everybody = [server for servers in runs.values() for server in servers]
    # A turn that was only waited for falls with the connection; all the rest with the lease.
    clock.pass_until(
        lambda: all(states(server)["worker-1"] == "expired" for server in everybody),
        *everybody,
        living=("worker-0", "worker-2"),
    )
    for server in everybody:
        assert states(server) == {"worker-0": "alive", "worker-1": "expired", "worker-2": "alive"}
    for workers in survivors.values():
        for worker in workers:
            goes_on(worker)
    assert any("lease ran out" in line and "worker-1" in line for line in everybody[0].output().splitlines())
    stop_run(everybody)
    for run in training:
        for future in run:
            future.result(60)


def test_a_paused_worker_stops_counting_and_comes_back(
    start_server: Start, start_python: StartPython, pool: ThreadPoolExecutor
) -> None:
    clock = Clock()
    flags = (*LEASE, "--expected-workers", "2")
    servers = {
        protocol: start_server("--protocol", protocol, *flags, clock=clock) for protocol in ("hardsync", "serial")
    }
    steady = {protocol: Worker(server.data, 0, 0) for protocol, server in servers.items()}
    training = begin(pool, list(steady.values()))
    paused = {protocol: start_python("-c", WORKER, server.data, "1") for protocol, server in servers.items()}
    for process in paused.values():
        process.wait_for_output("step 3")
        process.signal(signal.SIGSTOP)

    clock.pass_until(
        lambda: all(states(server)["worker-1"] == "expired" for server in servers.values()),
        *servers.values(),
        living=("worker-0",),
    )
    for protocol, server in servers.items():
        goes_on(steady[protocol])
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
    stop_run(list(servers.values()))
    for future in training:
        future.result(60)


def test_a_late_joiner_counts_from_its_first_push(start_server: Start, pool: ThreadPoolExecutor) -> None:
    server = start_server("--protocol", "hardsync", "--staleness", "none")
    first = [Worker(server.data, number, 0) for number in range(2)]
    training = begin(pool, first)
    for worker in first:
        goes_on(worker)

    late = Worker(server.data, 2, 20).train()

    assert late.num_workers_max == 3
    # Its first gradient may come when the round that it was computed for is over; after that the round waits for it.
    assert late.refused.get("STALE", 0) <= 2 * late.num_shards
    stop_run([server])
    for future in training:
        future.result(60)


def test_a_protocol_that_changes_while_workers_wait_hangs_nobody(start_server: Start, pool: ThreadPoolExecutor) -> None:
    servers = start_servers(start_server, 2, "--heartbeat-seconds", "0.2", "--expected-workers", f"{NUM_WORKERS}")
    workers = [Worker(addresses(servers), number, 0) for number in range(NUM_WORKERS)]
    training = begin(pool, workers)
    for worker in workers:
        goes_on(worker)
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
    stop_run(servers)
    for future in training:
        future.result(60)


def test_a_round_that_waits_in_vain_ends_with_the_names_of_those_waited_for(start_server: Start) -> None:
    server = start_server("--protocol", "hardsync", "--stall-seconds", "300")
    model = small_model()
    with client_of(server, "quick", wait_seconds=60) as quick, client_of(server, "slow", wait_seconds=60) as slow:
        let_both_count(quick, slow)
        quick.push(gradients_like(model, 1))

        with pytest.raises(WaitTimedOut, match=r"Waited . s for other workers.*slow.*PYPS_WAIT_SECONDS"):
            quick.session.pull([np.zeros(5002, np.float32)], wait_seconds=0.3)


def test_a_second_gradient_for_one_round_is_refused_counted_and_told_of(
    start_server: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server("--protocol", "hardsync")
    model = small_model()
    with client_of(server, "quick") as quick, client_of(server, "slow") as slow:
        let_both_count(quick, slow)
        quick.push(gradients_like(model, 1))

        receipts = quick.push(gradients_like(model, 2))

        assert {(receipt.outcome, receipt.reason) for receipt in receipts} == {(OUTCOME_REJECTED, REASON_REPEATED)}
        assert quick.refused == {"REPEATED": len(receipts)}
        assert sum("was not taken" in message for message in caplog.messages) == 1
        assert quick.session.pull_needed
        assert quick.snapshot().keys() == model.keys()
        slow.push(gradients_like(model, 3))
        quick.pull()
        assert not quick.session.pull_needed


def test_a_push_of_nothing_completes_a_round_and_moves_no_number(start_server: Start) -> None:
    server = start_server("--protocol", "hardsync")
    with client_of(server, "a") as client:
        receipts = client.push({})

        assert {receipt.version_after for receipt in receipts} == {1}
        for name, tensor in small_model().items():
            np.testing.assert_array_equal(client.pull()[name], tensor)


def test_a_tensor_without_a_gradient_does_not_hold_up_the_round_of_its_shard(start_server: Start) -> None:
    server = start_server("--protocol", "hardsync")
    model = small_model()
    part = {"embed": gradients_like(model, 0)["embed"]}
    with client_of(server, "whole") as whole, client_of(server, "part") as other:
        let_both_count(whole, other)
        before = whole.pull()

        pending = whole.push(gradients_like(model, 0))
        completed = other.push(part)

        assert {receipt.outcome for receipt in pending} == {OUTCOME_PENDING}
        assert {receipt.outcome for receipt in completed} == {OUTCOME_APPLIED}
        # Absent is not zero, but in a mean over all workers of the round it adds nothing.
        for name, tensor in whole.pull().items():
            share = 1.0 if name in part else 0.5
            expected = before[name] - RATE * share * gradients_like(model, 0)[name]
            np.testing.assert_allclose(tensor, expected, rtol=0, atol=1e-6)


def client_of(server: ServerThread, worker_id: str, **options: Any) -> Client:
    """A client of the shared run under plain SGD."""
    return make_client(
        server.data, worker_id=worker_id, run_id="shared", optimizer=("sgd", {"learning_rate": RATE}), **options
    )


def let_both_count(first: Client, second: Client) -> None:
    """Makes rounds wait for both: a barrier knows a worker from its first push. No round is begun afterwards."""
    for client in (first, second, first):
        client.pull()
        receipts = client.push(gradients_like(small_model(), 0))
    assert {receipt.num_workers for receipt in receipts} == {2}
    assert {receipt.outcome for receipt in receipts} == {OUTCOME_APPLIED}
    first.pull()
    second.pull()
