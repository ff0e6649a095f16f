"""Workers without torch under every protocol: processes that pull, compute and push, on one to three servers.

The loop of a worker is the same for all protocols: what has to be waited for, the client waits for by itself.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from client_support import Array, addresses, gradients_like, make_client, small_model, start_servers
from inspection import inspect
from pyps_client import Client, Observer, WaitTimedOut
from pyps_wire import inspector_pb2 as pb
from pyps_wire.common_pb2 import OUTCOME_APPLIED, OUTCOME_PENDING, OUTCOME_REJECTED, REASON_REPEATED
from support import PythonProcess, ServerProcess, wait_until

Start = Callable[..., ServerProcess]
StartPython = Callable[..., PythonProcess]

RATE = 0.05
NUM_WORKERS = 3
STEPS = 6

# A worker's loop: worker W's gradient of step s is that of seed 100 W + s. Ends after so many steps (0: never), or
# with the run. Its last line is what it saw, in JSON.
WORKER = """
import json, sys
from client_support import gradients_like, make_client, small_model
from pyps_client import RunFinished
from pyps_wire.common_pb2 import OUTCOME_REJECTED

servers, worker, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = small_model()
seen = {"steps": 0, "staleness": 0, "protocols": [], "workers": 0}
with make_client(
    servers, worker_id=f"worker-{worker}", run_id="shared", optimizer=("sgd", {"learning_rate": 0.05}), wait_seconds=40
) as client:
    print("joined", flush=True)
    try:
        while not steps or seen["steps"] < steps:
            client.pull()
            receipts = client.push(gradients_like(model, 100 * worker + seen["steps"]), examples=1)
            taken = [receipt for receipt in receipts if receipt.outcome != OUTCOME_REJECTED]
            seen["staleness"] = max([seen["staleness"], *(receipt.staleness for receipt in taken)])
            seen["workers"] = max([seen["workers"], *(receipt.num_workers for receipt in receipts)])
            seen["steps"] += 1
            if client.session.protocol not in seen["protocols"]:
                seen["protocols"].append(client.session.protocol)
            print("step", seen["steps"], "under", client.session.protocol, flush=True)
        client.pull()
    except RunFinished:
        pass
    print(json.dumps(seen | {"refused": client.refused, "shards": len(receipts)}), flush=True)
"""


def start_worker(start_python: StartPython, servers: str, worker: int, steps: int) -> PythonProcess:
    """Starts worker number `worker`."""
    return start_python("-c", WORKER, servers, str(worker), str(steps))


def report_of(process: PythonProcess, deadline_seconds: float = 60.0) -> dict[str, Any]:
    """What a worker saw, once it has ended well."""
    assert process.wait(deadline_seconds) == 0, process.output()
    report: dict[str, Any] = json.loads(process.output().splitlines()[-1])
    return report


def snapshot(servers: list[ServerProcess]) -> tuple[Mapping[str, Array], int]:
    """The parameters of all servers, and their largest version."""
    with Observer(addresses(servers)) as observer:
        return observer.snapshot(), observer.global_step


def versions(servers: list[ServerProcess]) -> set[int]:
    """Versions of all shards."""
    return {shard.version for server in servers for shard in inspect(server.control, "ListShards").shards}


def assert_moved_by(servers: list[ServerProcess], share: float, num_workers: int = NUM_WORKERS) -> None:
    """Plain SGD without staleness weights: the parameters moved by the rate times the share of all gradients."""
    model, (pulled, _) = small_model(), snapshot(servers)
    gradients = [gradients_like(model, 100 * worker + step) for worker in range(num_workers) for step in range(STEPS)]
    for name, first in model.items():
        moved = share * RATE * np.sum([gradient[name] for gradient in gradients], axis=0, dtype=np.float64)
        np.testing.assert_allclose(pulled[name], first - moved, rtol=0, atol=1e-5, err_msg=name)


def train(
    start_server_process: Start, start_python: StartPython, num_servers: int, *flags: str
) -> tuple[list[ServerProcess], list[dict[str, Any]]]:
    """Lets three workers take their steps; returns the servers and what the workers saw."""
    common = ("--staleness", "none", "--expected-workers", f"{NUM_WORKERS}", *flags)
    servers = start_servers(start_server_process, num_servers, *common)
    workers = [start_worker(start_python, addresses(servers), index, STEPS) for index in range(NUM_WORKERS)]
    return servers, [report_of(worker) for worker in workers]


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_hardsync_takes_every_gradient_at_its_own_version(
    start_server_process: Start, start_python: StartPython, num_servers: int
) -> None:
    servers, reports = train(start_server_process, start_python, num_servers, "--protocol", "hardsync")

    assert [report["refused"] for report in reports] == [{}] * NUM_WORKERS
    assert {report["staleness"] for report in reports} == {0}
    assert versions(servers) == {STEPS}
    assert_moved_by(servers, share=1 / NUM_WORKERS)


@pytest.mark.parametrize(("num_servers", "protocol"), [(2, "async"), (1, "asgd"), (1, "asgd:mutex=shard")])
def test_every_push_is_an_update(
    start_server_process: Start, start_python: StartPython, num_servers: int, protocol: str
) -> None:
    servers, reports = train(start_server_process, start_python, num_servers, "--protocol", protocol)

    assert [report["refused"] for report in reports] == [{}] * NUM_WORKERS
    assert versions(servers) == {STEPS * NUM_WORKERS}
    assert_moved_by(servers, share=1.0)


def test_softsync_makes_an_update_of_every_third_gradient(
    start_server_process: Start, start_python: StartPython
) -> None:
    servers, reports = train(start_server_process, start_python, 2, "--protocol", "softsync:n=1")

    assert [report["refused"] for report in reports] == [{}] * NUM_WORKERS
    # Invariant S3, with whatever c a shard had while workers came and went.
    assert all(0 < version <= STEPS * NUM_WORKERS for version in versions(servers))


@pytest.mark.parametrize(("num_servers", "protocol"), [(3, "ssp:s=1"), (2, "ssp:s=0"), (1, "ssp:s=0,strict_bsp=true")])
def test_ssp_adds_up_all_gradients(
    start_server_process: Start, start_python: StartPython, num_servers: int, protocol: str
) -> None:
    servers, reports = train(start_server_process, start_python, num_servers, "--protocol", protocol)

    assert [report["refused"] for report in reports] == [{}] * NUM_WORKERS
    assert_moved_by(servers, share=1.0)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_serial_lets_one_compute_at_a_time_on_all_servers(
    start_server_process: Start, start_python: StartPython, num_servers: int
) -> None:
    servers, reports = train(start_server_process, start_python, num_servers, "--protocol", "serial")

    assert {report["staleness"] for report in reports} == {0}
    assert versions(servers) == {STEPS * NUM_WORKERS}
    assert_moved_by(servers, share=1.0)


def test_backup_workers_drop_what_came_late_and_count_it(
    start_server_process: Start, start_python: StartPython
) -> None:
    servers, reports = train(start_server_process, start_python, 2, "--protocol", "backup:b=1")

    refused = [count for report in reports for count in report["refused"].items()]
    assert {name for name, _ in refused} <= {"DROPPED"}
    assert {report["staleness"] for report in reports} == {0}
    pushed = NUM_WORKERS * STEPS * reports[0]["shards"]
    dropped = sum(count for _, count in refused)
    shards = [shard for server in servers for shard in inspect(server.control, "ListShards").shards]
    # Chen et al. 2016: dropped work is never applied. Those that remain at the end may make rounds of one.
    assert sum(shard.version for shard in shards) <= pushed - dropped


@pytest.mark.parametrize("protocol", ["hardsync", "backup:b=1", "ssp:s=0", "serial", "softsync:n=1", "asgd"])
def test_unequal_numbers_of_steps_hang_nobody(
    start_server_process: Start, start_python: StartPython, protocol: str
) -> None:
    server = start_server_process("--protocol", protocol, "--expected-workers", f"{NUM_WORKERS}")
    steps = [2, 5, 9]
    workers = [start_worker(start_python, server.data, index, count) for index, count in enumerate(steps)]

    assert [report_of(worker)["steps"] for worker in workers] == steps


@pytest.mark.parametrize("protocol", ["hardsync", "ssp:s=0", "serial"])
def test_a_worker_killed_inside_a_barrier_holds_up_the_others_for_a_lease_and_is_named(
    start_server_process: Start, start_python: StartPython, protocol: str
) -> None:
    flags = ("--lease-seconds", "2", "--heartbeat-seconds", "0.3", "--expected-workers", f"{NUM_WORKERS}")
    servers = start_servers(start_server_process, 2, "--protocol", protocol, *flags)
    workers = [start_worker(start_python, addresses(servers), index, 0) for index in range(NUM_WORKERS)]
    for worker in workers:
        worker.wait_for_output("step 5 ")

    workers[1].kill()

    reached = [steps_of(workers[index]) for index in (0, 2)]
    for index, before in zip((0, 2), reached, strict=True):
        # More than the step that was under way: the barrier goes on without the dead worker.
        wait_until(lambda index=index, before=before: steps_of(workers[index]) > before + 5, 20, "further steps")
    for server in servers:
        # A turn that was only waited for falls with the connection, before the lease.
        wait_until(lambda server=server: "lease ran out" in server.output(), 20, "the end of the lease")
        line = next(line for line in server.output().splitlines() if "lease ran out" in line)
        assert "worker-1" in line
        inspect(server.control, "Stop")
    for index in (0, 2):
        report_of(workers[index])


def test_a_late_joiner_counts_from_its_first_push(start_server_process: Start, start_python: StartPython) -> None:
    server = start_server_process("--protocol", "hardsync", "--stop-after", "updates=300", "--staleness", "none")
    first = [start_worker(start_python, server.data, index, 0) for index in range(2)]
    for worker in first:
        worker.wait_for_output("step 5 ")

    late = report_of(start_worker(start_python, server.data, 2, 20))

    assert late["workers"] == 3
    # Its first gradient may come when the round that it was computed for is over; after that the round waits for it.
    assert late["refused"].get("STALE", 0) <= 2 * late["shards"]
    for worker in first:
        report_of(worker)


def test_a_protocol_that_changes_while_workers_wait_hangs_nobody(
    start_server_process: Start, start_python: StartPython
) -> None:
    servers = start_servers(
        start_server_process, 2, "--heartbeat-seconds", "0.2", "--expected-workers", f"{NUM_WORKERS}"
    )
    workers = [start_worker(start_python, addresses(servers), index, 0) for index in range(NUM_WORKERS)]
    for worker in workers:
        worker.wait_for_output("step 1 ")
    for protocol in ["hardsync", "ssp:s=1", "backup:b=1", "serial", "softsync:n=1", "hardsync", "async"]:
        for server in servers:
            inspect(server.control, "Configure", pb.ConfigureRequest(protocol=protocol))
        for worker in workers:
            known = worker.output().count(f"under {protocol}\n")
            wait_until(
                lambda worker=worker, known=known, protocol=protocol: (
                    worker.output().count(f"under {protocol}\n") > known + 5
                ),
                30,
                f"steps of every worker under {protocol}",
            )
    for server in servers:
        inspect(server.control, "Stop")

    for worker in workers:
        report_of(worker)


@pytest.mark.parametrize("protocol", ["hardsync", "serial"])
def test_a_paused_worker_stops_counting_and_comes_back(
    start_server_process: Start, start_python: StartPython, protocol: str
) -> None:
    flags = ("--lease-seconds", "1.5", "--heartbeat-seconds", "0.3", "--expected-workers", "2")
    server = start_server_process("--protocol", protocol, *flags)
    steady, paused = (start_worker(start_python, server.data, index, 0) for index in range(2))
    for worker in (steady, paused):
        worker.wait_for_output("step 3 ")

    paused.signal(signal.SIGSTOP)
    server.wait_for_output("lease ran out")
    before = steps_of(steady)
    wait_until(lambda: steps_of(steady) > before + 5, 20, "steps of the other")
    paused.signal(signal.SIGCONT)

    before = steps_of(paused)
    wait_until(lambda: steps_of(paused) > before + 5, 20, "steps of the worker that came back")
    inspect(server.control, "Stop")
    assert report_of(paused)["workers"] == 2
    report_of(steady)


def test_a_round_that_waits_in_vain_ends_with_the_names_of_those_waited_for(start_server_process: Start) -> None:
    server = start_server_process("--protocol", "hardsync", "--stall-seconds", "300")
    model = small_model()
    with client_of(server, "quick", wait_seconds=60) as quick, client_of(server, "slow", wait_seconds=60) as slow:
        let_both_count(quick, slow)
        quick.push(gradients_like(model, 1))

        with pytest.raises(WaitTimedOut, match=r"Waited . s for other workers.*slow.*PYPS_WAIT_SECONDS"):
            quick.session.pull([np.zeros(5002, np.float32)], wait_seconds=0.3)


def test_a_second_gradient_for_one_round_is_refused_counted_and_told_of(
    start_server_process: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server_process("--protocol", "hardsync")
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


def test_a_push_of_nothing_completes_a_round_and_moves_no_number(start_server_process: Start) -> None:
    server = start_server_process("--protocol", "hardsync")
    with client_of(server, "a") as client:
        receipts = client.push({})

        assert {receipt.version_after for receipt in receipts} == {1}
        for name, tensor in small_model().items():
            np.testing.assert_array_equal(client.pull()[name], tensor)


def test_a_tensor_without_a_gradient_does_not_hold_up_the_round_of_its_shard(start_server_process: Start) -> None:
    server = start_server_process("--protocol", "hardsync")
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


def steps_of(worker: PythonProcess) -> int:
    """Steps that a worker has told of."""
    return worker.output().count("\nstep ")


def client_of(server: ServerProcess, worker_id: str, **options: Any) -> Client:
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
