"""Links cut in the middle of a shared-memory round: the worker has its memory to itself from its next word on."""

import contextlib
import time

import numpy as np
import pytest

from pyps_wire.partition import Model, Tensor
from support import wait_until
from wire_worker import LocalSocket, LocalWorker, local_worker, maps_of

# Large enough for a round to be met in its midst.
MODEL = Model((Tensor("x", (2_000_000,)),), shard_size=250_000)
LARGE = Model((Tensor("x", (12_000_000,)),), shard_size=500_000)
PROTOCOLS = ("async", "asgd:mutex=whole")


def wait_for_the_first_update(worker: LocalWorker, before: float) -> None:
    """Returns as soon as the request under way has written a parameter; `before`: what it was."""
    first = worker.parameters[0]
    deadline = time.monotonic() + 60
    while first[0] == before:
        assert time.monotonic() < deadline, "no update was made"


def wait_for_nothing(worker: LocalWorker, before: float) -> None:
    """Cuts the link at once."""


@pytest.mark.parametrize("model", [MODEL, pytest.param(LARGE, marks=pytest.mark.extended)], ids=["small", "large"])
def test_a_cut_request_leaves_the_memory_alone_once_its_worker_is_back(start_server_process, model):
    for protocol in PROTOCOLS:
        for come_back in (LocalWorker.attach, LocalWorker.hello):
            for until in (wait_for_the_first_update, wait_for_nothing):
                cut_requests(start_server_process, model, protocol, come_back=come_back, until=until)


def cut_requests(start_server_process, model, protocol, *, come_back, until):
    server = start_server_process("--staleness", "none", "--protocol", protocol)
    with local_worker(server.data, model=model) as worker:
        mine, at_start = worker.parameters[0], {shard.shard_id: 0.0 for shard in worker.plan.shards}
        for _ in range(5 if model is MODEL else 3):
            worker.gradients[0][0][:] = 1.0
            before = float(mine[0])
            worker.link.send(worker.exchange_request())
            until(worker, before)
            worker.detach()
            come_back(worker)
            held = mine.copy()
            # The caller has given the round up, and goes on to the next gradient.
            worker.gradients[0][0][:] = 1000.0
            steps = set()
            for shard in worker.pull():
                values = np.frombuffer(shard.payload, np.float32)
                assert values.min() == values.max()
                steps.add(values[0] - at_start[shard.shard_id])
                at_start[shard.shard_id] = values[0]
            # Each shard had the push as it was sent, or nothing of it; the whole model all of it, or nothing.
            assert steps and steps <= {0.0, -1.0}
            assert protocol == "async" or len(steps) == 1
            assert until is wait_for_nothing or -1.0 in steps
            np.testing.assert_array_equal(mine, held)
            if worker.link is None:
                worker.attach()
            worker.pull_here()
        worker.gradients[0][0][:] = 0.0
        worker.exchange()
        assert "bug" not in server.output()
    server.kill()


def test_a_caller_that_hangs_up_while_it_attaches_leaves_nothing(start_server_process):
    server = start_server_process()
    with LocalWorker(server.data, model=MODEL) as worker:
        worker.join()
        for _ in range(30):
            link = LocalSocket(worker.offer.address)
            link.send(worker.attach_request(), worker.descriptor)
            link.close()
        with contextlib.closing(worker.attach()):
            worker.pull_here()
        wait_until(lambda: maps_of(server.pid) == [], 20, "the memory unmapped")
        for word in ("bug", "Traceback", "never retrieved"):
            assert word not in server.output()
