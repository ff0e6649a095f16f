"""Workers that share a data set in portions, over real servers: each example once an epoch, whatever dies.

Dean et al. 2012, section 4.1; D9 of the algorithm notes.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from client_support import SGD, addresses, start_servers
from pyps_client import Client, Launch
from pyps_client.data import Portions
from pyps_wire.errors import InvalidArgument
from pyps_wire.work_pb2 import GetWorkRequest, WorkProgress
from support import AnyServer, inspect, server_port, shell, wait_until
from training import train_on_portions

EXAMPLES = 400


def train_together(*servers: AnyServer, **options: Any) -> list[tuple[list[int], float]]:
    """Trains with two workers, as threads; for each, its examples by epoch and its last loss."""
    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(train_on_portions, addresses(servers), name, **options) for name in "ab"]
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


def test_two_workers_train_on_each_example_once_an_epoch(start_server):
    servers = start_servers(start_server, 2)
    counts = [of_worker for of_worker, _ in train_together(*servers, overlap="step", push_every=4)]
    assert delivered(work(servers[0])) == {epoch: list(range(EXAMPLES)) for epoch in range(2)}
    # An iteration may have some of the next epoch, and the last has none beyond.
    assert sum(map(sum, counts)) == 2 * EXAMPLES


def test_a_worker_begins_the_next_epoch_while_another_has_the_last_portion(start_server):
    server, tensors = start_server(), {"w": np.zeros(3, np.float32)}
    with (
        Client(tensors, SGD, launch=Launch(server.data, worker_id="slow")) as slow,
        Client(tensors, SGD, launch=Launch(server.data, worker_id="quick")) as quick,
    ):
        portions = {
            client: Portions(range(40), client, batch_size=4, portion_batches=5, epochs=2) for client in (slow, quick)
        }
        held = portions[slow].epoch()
        next(held)
        for number, _ in enumerate(portions[quick].epoch(), start=1):
            quick.push({"w": np.ones(3, np.float32)})
            if number == 5 + 5 + 1:
                progress = work(server)
                assert (progress.num_portions, progress.done, progress.ahead, progress.passes_done) == (2, 1, 1, 0)
                assert "1 done of later passes" in shell("status", "--servers", server.control)
                for _ in range(5):
                    slow.push({"w": np.ones(3, np.float32)})
                    next(held, None)
        assert delivered(work(server)) == {epoch: list(range(40)) for epoch in range(2)}
        assert [list(of_worker.epoch()) for of_worker in portions.values()] == [[], []]


def test_a_restored_server_completes_the_epoch(start_server_process, tmp_path):
    folder = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-seconds", "0.3")
    flags = (*folder, "--port", str(server_port()))
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


def test_nobody_waits_for_ever_where_workers_wait_for_each_others_steps(start_server):
    """A worker without a portion must not hold up a round, or the clock, that another needs to end its own."""
    for protocol in ("hardsync", "ssp:s=1", "serial", "softsync:n=1", "backup:b=1"):
        server = start_server("--protocol", protocol, "--expected-workers", "2")
        train_together(server, examples=52, portion_batches=3)
        assert delivered(work(server)) == {epoch: list(range(52)) for epoch in range(2)}, protocol


def test_a_client_without_torch_draws_its_indices(start_server):
    server = start_server()
    with Client({"w": np.zeros(3, np.float32)}, SGD, launch=Launch(server.data, worker_id="a")) as client:
        portions = Portions(range(50), client, batch_size=4, portion_batches=3)
        for _ in range(2):
            seen: list[int] = []
            for indices in portions.epoch():
                client.pull()
                client.push({"w": np.ones(3, np.float32)})
                seen += indices
            assert sorted(seen) == list(range(50))
        with pytest.raises(InvalidArgument, match="num_examples 51 of the data set, but the run's has 50"):
            Portions(range(51), client, batch_size=4)
    assert delivered(work(server)) == {epoch: list(range(50)) for epoch in range(2)}
    assert inspect(server.control, "GetStatus").examples == 100
