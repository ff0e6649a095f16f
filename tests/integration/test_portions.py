"""Workers that share a data set in portions, over real servers: each example once an epoch, whatever dies.

Dean et al. 2012, section 4.1; D9 of the algorithm notes.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_support import SGD, addresses, start_servers
from inspection import inspect
from portion_worker import train
from pyps.launcher.ports import free_port
from pyps_client import Client
from pyps_client.data import Portions
from pyps_wire.errors import BadRequest
from pyps_wire.work_pb2 import GetWorkRequest, WorkProgress
from support import ROOT, AnyServer, PythonProcess, ServerProcess, ServerThread, wait_until

StartServer = Callable[..., ServerThread]
StartPython = Callable[..., PythonProcess]

EXAMPLES = 400


def start_worker(start_python: StartPython, servers: list[Any], name: str, *flags: str) -> PythonProcess:
    settings = {"PYPS_SERVERS": addresses(servers), "PYPS_WORKER_ID": name, "PYPS_RUN_ID": "portions"}
    return start_python(str(ROOT / "tests" / "portion_worker.py"), *flags, env=settings)


def train_together(server: AnyServer, **options: Any) -> list[tuple[list[int], float]]:
    """Trains with two workers, as threads; for each, its examples by epoch and its last loss."""
    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(train, server.data, name, **options) for name in "ab"]
        return [worker.result(120) for worker in workers]


def work(server: AnyServer) -> WorkProgress:
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


def test_two_workers_train_on_each_example_once_an_epoch(start_server: StartServer, start_python: StartPython) -> None:
    servers = start_servers(start_server, 2)
    flags = ("--loader-processes", "2", "--overlap", "step", "--push-every", "4")
    workers = [start_worker(start_python, servers, name, *flags) for name in "ab"]
    ended_well(workers)
    assert delivered(work(servers[0])) == {epoch: list(range(EXAMPLES)) for epoch in range(2)}
    counts = [re.findall(r"epoch \d+ over, (\d+) examples", worker.output()) for worker in workers]
    assert [int(a) + int(b) for a, b in zip(*counts, strict=True)] == [EXAMPLES, EXAMPLES]


@pytest.mark.extended
def test_the_portions_of_a_killed_worker_go_to_the_others_and_it_may_come_back(
    start_server: StartServer, start_python: StartPython, tmp_path: Path
) -> None:
    """D9: kill -9 at mid-epoch, and every example of the epoch is delivered exactly once."""
    server = start_server("--heartbeat-seconds", "0.5", "--lease-seconds", "10")
    epochs, go = 5, tmp_path / "go"
    pace = ("--portion-batches", "5", "--step-seconds", "0.05", "--push-every", "2")
    flags = ("--epochs", str(epochs), *pace, "--release", str(go))
    workers = [start_worker(start_python, [server], name, *flags) for name in "abc"]
    for worker in workers:
        worker.wait_for_output("epoch 0 over")
    go.touch()

    def holds_one() -> bool:
        progress = work(server)
        of_c = [worker for worker in progress.workers if worker.worker_id == "c"]
        return 1 <= getattr(progress, "pass") < epochs - 2 and any(worker.done and worker.running for worker in of_c)

    wait_until(holds_one)
    # What it holds then stays with it until it is missed.
    workers[2].signal(signal.SIGSTOP)
    before = work(server)
    workers[2].kill()
    wait_until(lambda: getattr(work(server), "pass") > getattr(before, "pass"), what="the end of the others' epoch")
    again = start_worker(start_python, [server], "c", *flags)

    ended_well([*workers[:2], again])
    progress = work(server)
    assert delivered(progress) == {epoch: list(range(EXAMPLES)) for epoch in range(epochs)}
    assert progress.lost >= sum(worker.running for worker in before.workers if worker.worker_id == "c") > 0


def test_an_epoch_is_completed_by_a_server_that_came_back_from_its_checkpoint(
    start_server_process: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    folder = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-seconds", "0.3")
    flags = (*folder, "--port", str(free_port()))
    server = start_server_process(*flags)
    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(train_together, server, examples=200, epochs=3, portion_batches=2, step_seconds=0.03)
        wait_until(lambda: getattr(work(server), "pass") == 1 and work(server).done > 2)
        wait_until(lambda: any((tmp_path / "checkpoints").iterdir()))
        server.kill()
        back = start_server_process(*flags, "--resume")
        trained.result(120)
    progress = work(back)
    assert delivered(progress) == {epoch: list(range(200)) for epoch in range(3)}
    assert progress.passes_done == 3


def test_a_run_that_ends_amid_an_epoch_ends_its_workers(start_server: StartServer) -> None:
    server = start_server("--stop-after", "updates=150")
    (of_a, loss_of_a), (of_b, loss_of_b) = train_together(server, epochs=50, portion_batches=4)
    assert max(len(of_a), len(of_b)) < 50
    # Both end with the run's last parameters.
    assert loss_of_a == loss_of_b


def test_nobody_waits_for_ever_where_workers_wait_for_each_others_steps(start_server: StartServer) -> None:
    """A worker without a portion must not hold up a round, or the clock, that another needs to end its own."""
    for protocol in ("hardsync", "ssp:s=1", "serial", "softsync:n=1", "backup:b=1"):
        server = start_server("--protocol", protocol, "--expected-workers", "2")
        train_together(server, examples=52, portion_batches=3)
        assert delivered(work(server)) == {epoch: list(range(52)) for epoch in range(2)}, protocol


def test_a_client_without_torch_draws_its_indices(start_server: StartServer) -> None:
    server = start_server()
    with Client({"w": np.zeros(3, np.float32)}, SGD, servers=server.data, worker_id="a") as client:
        portions = Portions(range(50), client, batch_size=4, portion_batches=3)
        for _ in range(2):
            seen: list[int] = []
            for indices in portions.epoch():
                client.pull()
                client.push({"w": np.ones(3, np.float32)})
                seen += indices
            assert sorted(seen) == list(range(50))
        with pytest.raises(BadRequest, match="num_examples 51 of the data set, but the run's has 50"):
            Portions(range(51), client, batch_size=4)
    assert delivered(work(server)) == {epoch: list(range(50)) for epoch in range(2)}
    assert inspect(server.control, "GetStatus").examples == 100
