"""Workers that share a data set in portions, over real servers: each example once an epoch, whatever dies.

Dean et al. 2012, section 4.1; D9 of the algorithm notes.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from client_support import SGD, addresses, start_servers
from inspection import inspect
from pyps_client import Client
from pyps_client.data import Portions
from pyps_wire.errors import BadRequest
from pyps_wire.work_pb2 import GetWorkRequest, WorkProgress
from support import ROOT, PythonProcess, ServerProcess, wait_until

StartServer = Callable[..., ServerProcess]
StartPython = Callable[..., PythonProcess]

# A worker that is killed is missed soon, also on a busy machine not before.
IMPATIENT = ("--heartbeat-seconds", "0.5", "--lease-seconds", "5")
EXAMPLES = 400


def start_worker(start_python: StartPython, servers: list[ServerProcess] | str, name: str, *flags: str):
    where = servers if isinstance(servers, str) else addresses(servers)
    settings = {"PYPS_SERVERS": where, "PYPS_WORKER_ID": name, "PYPS_RUN_ID": "portions"}
    return start_python(str(ROOT / "tests" / "portion_worker.py"), *flags, env=settings)


def work(server: ServerProcess) -> WorkProgress:
    return inspect(server.control, "GetWork", GetWorkRequest(deliveries=True))


def delivered(progress: WorkProgress) -> dict[int, list[int]]:
    """The places of the data set that were delivered, by epoch; each as often as it was."""
    places: dict[int, list[int]] = {}
    for delivery in progress.deliveries:
        portion = delivery.portion
        places.setdefault(getattr(delivery, "pass"), []).extend(range(portion.start, portion.stop))
    return {epoch: sorted(of_epoch) for epoch, of_epoch in places.items()}


def ended_well(workers: list[PythonProcess]) -> None:
    for worker in workers:
        assert worker.wait() == 0, worker.output()
        assert "Traceback" not in worker.output(), worker.output()


def counts(worker: PythonProcess) -> list[int]:
    return [int(count) for count in re.findall(r"epoch \d+ over, (\d+) examples", worker.output())]


@pytest.mark.parametrize(
    "flags",
    [
        ("--loader-processes", "2", "--overlap", "step", "--push-every", "4"),
        ("--no-shuffle", "--push-every", "4"),
        ("--overlap", "step"),
    ],
)
def test_two_workers_train_on_each_example_once_an_epoch(start_server_process, start_python, flags) -> None:
    servers = start_servers(start_server_process, 2)
    workers = [start_worker(start_python, servers, name, *flags) for name in "ab"]
    ended_well(workers)
    assert delivered(work(servers[0])) == {epoch: list(range(EXAMPLES)) for epoch in range(2)}
    together = [sum(pair) for pair in zip(*(counts(worker) for worker in workers), strict=True)]
    assert together == [EXAMPLES, EXAMPLES]


def test_the_portions_of_a_killed_worker_go_to_the_others_and_training_goes_on(
    start_server_process, start_python, tmp_path: Path
) -> None:
    """D9: kill -9 at mid-epoch, and every example of the epoch is delivered exactly once."""
    [server] = start_servers(start_server_process, 1, *IMPATIENT)
    epochs, go = 6, tmp_path / "go"
    pace = ("--portion-batches", "5", "--step-seconds", "0.05", "--push-every", "2")
    flags = ("--epochs", str(epochs), *pace, "--release", str(go))
    workers = [start_worker(start_python, [server], name, *flags) for name in "abcd"]
    for worker in workers:
        worker.wait_for_output("epoch 0 over")
    go.touch()

    def holds_one() -> bool:
        progress = work(server)
        of_d = [worker for worker in progress.workers if worker.worker_id == "d"]
        return 1 <= getattr(progress, "pass") < epochs - 1 and any(worker.done and worker.running for worker in of_d)

    wait_until(holds_one)
    # What it holds then stays with it until it is missed.
    workers[3].signal(signal.SIGSTOP)
    before = work(server)
    workers[3].kill()

    ended_well(workers[:3])
    progress = work(server)
    assert delivered(progress) == {epoch: list(range(EXAMPLES)) for epoch in range(epochs)}
    assert progress.lost >= sum(worker.running for worker in before.workers if worker.worker_id == "d")
    lasts = [delivery.worker_id for delivery in progress.deliveries if getattr(delivery, "pass") == epochs - 1]
    assert "d" not in lasts


def test_faster_workers_get_more_portions(start_server_process, start_python, tmp_path: Path) -> None:
    [server] = start_servers(start_server_process, 1)
    go = tmp_path / "go"
    flags = ("--epochs", "2", "--portion-batches", "2", "--release", str(go))
    fast = start_worker(start_python, [server], "fast", *flags, "--step-seconds", "0.05")
    fast.wait_for_output("epoch 0 over")
    slow = start_worker(start_python, [server], "slow", *flags, "--step-seconds", "0.5")
    slow.wait_for_output("epoch 0 over")
    go.touch()
    ended_well([slow, fast])
    progress = work(server)
    by_worker = Counter(delivery.worker_id for delivery in progress.deliveries if getattr(delivery, "pass") == 1)
    assert by_worker["fast"] > 2 * by_worker["slow"] > 0
    assert delivered(progress) == {epoch: list(range(EXAMPLES)) for epoch in range(2)}


def test_a_worker_that_joins_late_and_one_that_comes_back_take_their_parts(
    start_server_process, start_python, tmp_path: Path
) -> None:
    [server] = start_servers(start_server_process, 1, *IMPATIENT)
    flags = ("--epochs", "4", "--portion-batches", "2")
    first = start_worker(start_python, [server], "a", *flags, "--release", str(tmp_path / "go"))
    first.wait_for_output("epoch 0 over")
    late = start_worker(start_python, [server], "b", *flags, "--step-seconds", "0.2")
    late.wait_for_output("epoch 0 over, 0 examples here")
    wait_until(lambda: any(worker.worker_id == "b" and worker.done for worker in work(server).workers))
    late.kill()
    (tmp_path / "go").touch()
    again = start_worker(start_python, [server], "b", *flags)
    ended_well([first, again])
    assert delivered(work(server)) == {epoch: list(range(EXAMPLES)) for epoch in range(4)}
    assert len(counts(again)) == 4


def test_an_epoch_is_completed_by_a_server_that_came_back_from_its_checkpoint(
    start_server_process, start_python, tmp_path: Path
) -> None:
    folder = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-seconds", "0.3")
    server = start_server_process(*folder)
    flags = ("--epochs", "3", "--portion-batches", "2", "--step-seconds", "0.02")
    workers = [start_worker(start_python, [server], name, *flags) for name in "ab"]
    wait_until(lambda: getattr(work(server), "pass") == 1 and work(server).done > 5)
    wait_until(lambda: any((tmp_path / "checkpoints").iterdir()))
    server.kill()
    back = start_server_process(*folder, "--resume", "--port", server.data.rpartition(":")[2])
    ended_well(workers)
    progress = work(back)
    assert delivered(progress) == {epoch: list(range(EXAMPLES)) for epoch in range(3)}
    assert progress.passes_done == 3


def test_a_run_that_ends_amid_an_epoch_ends_its_workers(start_server_process, start_python) -> None:
    [server] = start_servers(start_server_process, 1, "--stop-after", "updates=150")
    flags = ("--epochs", "50", "--portion-batches", "4")
    workers = [start_worker(start_python, [server], name, *flags) for name in "ab"]
    ended_well(workers)
    assert {len(worker.output().split("final loss")) for worker in workers} == {2}
    losses = {re.search(r"final loss (\S+)", worker.output())[1] for worker in workers}
    # Both end with the run's last parameters.
    assert len(losses) == 1


@pytest.mark.parametrize("protocol", ["hardsync", "ssp:s=1", "serial", "softsync:n=1", "backup:b=1"])
def test_nobody_waits_for_ever_where_workers_wait_for_each_others_steps(
    start_server_process, start_python, protocol
) -> None:
    """A worker without a portion must not hold up a round, or the clock, that another needs to end its own."""
    [server] = start_servers(start_server_process, 1, "--protocol", protocol, "--expected-workers", "2")
    flags = ("--examples", "52", "--portion-batches", "3")
    workers = [start_worker(start_python, [server], name, *flags) for name in "ab"]
    ended_well(workers)
    assert delivered(work(server)) == {epoch: list(range(52)) for epoch in range(2)}


def test_a_portion_is_one_update_where_the_protocol_sums_minibatches(start_server_process, start_python) -> None:
    """Zhang et al. 2013, A3 and A4: each example once an epoch, ceil(N / (K b(e))) updates of them."""
    [server] = start_servers(start_server_process, 1, "--protocol", "asgd:accumulate=4")
    workers = [start_worker(start_python, [server], name, "--examples", "150", "--epochs", "3") for name in "ab"]
    ended_well(workers)
    assert delivered(work(server)) == {epoch: list(range(150)) for epoch in range(3)}
    assert inspect(server.control, "GetStatus").version_max == 3 * 10


def test_a_client_without_torch_draws_its_indices(start_server_process) -> None:
    [server] = start_servers(start_server_process, 1)
    with Client({"w": np.zeros(3, np.float32)}, SGD, servers=server.data) as client:
        portions = Portions(range(50), client, batch_size=4, portion_batches=3)
        for _ in range(2):
            seen: list[int] = []
            for indices in portions.epoch():
                client.pull()
                client.push({"w": np.ones(3, np.float32)})
                seen += indices
            assert sorted(seen) == list(range(50))
    assert delivered(work(server)) == {epoch: list(range(50)) for epoch in range(2)}
    assert inspect(server.control, "GetStatus").examples == 100


def test_workers_that_differ_hear_in_what(start_server_process) -> None:
    [server] = start_servers(start_server_process, 1)
    with Client({"w": np.zeros(3, np.float32)}, SGD, servers=server.data, worker_id="a") as client:
        Portions(range(50), client, batch_size=4)
        with pytest.raises(BadRequest, match="num_examples 51 of the data set, but the run's has 50"):
            Portions(range(51), client, batch_size=4)
