"""Every protocol with torch workers: alone, bit for bit as without servers; several processes, each to its end."""

import re

import numpy as np
import pytest
import torch

from pyps_client import RemoteOptimizer
from pyps_client.torch.translate import translate
from pyps_wire.errors import BadRequest
from support import wait_until
from training import SerialRule, addresses, backward, batches, gradients_of, mlp, parameters_of, status, workers

PROTOCOLS = [
    ("async", "divide"),
    ("softsync:n=2", "divide"),
    ("hardsync", "divide"),
    ("backup:b=1", "divide"),
    ("ssp:s=2", "none"),
    ("serial", "none"),
    ("asgd:mutex=whole,accumulate=2", "divide"),
]
NUM_WORKERS = 3


ALONE = [
    "async",
    "softsync:n=1",
    "hardsync",
    "backup:b=0",
    "ssp:s=0",
    "ssp:s=0,strict_bsp=true",
    "serial",
    "asgd:mutex=shard",
]


@pytest.mark.parametrize("protocol", ALONE)
def test_a_worker_alone_trains_as_the_rule_by_itself_bit_for_bit(start_server, protocol) -> None:
    """U6 of the specification, and promise 5 of the design."""
    servers = [start_server("--protocol", protocol) for _ in range(2)]
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    serial = SerialRule(translate(sgd), parameters_of(model))
    with RemoteOptimizer(model, sgd, addresses(servers)) as optimizer:
        for batch in batches(20):
            backward(model, batch)
            serial.step(gradients_of(model), 0.1)
            optimizer.step(examples=16)
            np.testing.assert_array_equal(parameters_of(model), serial.parameters)
        assert {receipt.staleness for receipt in optimizer.receipts} == {0}


def test_a_worker_that_computes_ahead_is_refused_by_a_barrier(start_server) -> None:
    server = start_server("--protocol", "hardsync")
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BadRequest, match=r"overlap is 'step'.*present version only.*pass overlap='off'"):
        RemoteOptimizer(model, sgd, server.data, overlap="step")
    wait_until(lambda: status(server).workers_alive == 0, what="the worker's leave")


def test_another_sum_than_the_protocols_is_refused(start_server) -> None:
    server = start_server("--protocol", "asgd:accumulate=4")
    model = mlp()
    with pytest.raises(BadRequest, match="push_every is 2, but the run's protocol wants 4 minibatches in a push"):
        RemoteOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), server.data, push_every=2)


@pytest.mark.parametrize(("protocol", "staleness"), PROTOCOLS)
def test_three_workers_train_the_digits(start_server, start_python, protocol, staleness) -> None:
    flags = ("--run-id", "digits", "--expected-workers", str(NUM_WORKERS))
    server = start_server("--protocol", protocol, "--staleness", staleness, *flags)
    processes = [
        start_python(
            *("examples/digits.py", "--optimizer", "adagrad", "--epochs", "6"),
            env={
                "PYPS_SERVERS": server.data,
                "PYPS_RUN_ID": "digits",
                "PYPS_WORKER_INDEX": str(index),
                "PYPS_WORKER_COUNT": str(NUM_WORKERS),
                "OMP_NUM_THREADS": "1",
            },
        )
        for index in range(NUM_WORKERS)
    ]
    for process in processes:
        assert process.wait(120) == 0, process.output()
    # The last to leave has seen all updates.
    best = max(float(re.search(r"accuracy ([0-9.]+)", process.output())[1]) for process in processes)
    assert best >= 0.9
    wait_until(lambda: status(server).workers_alive == 0, what="the workers' leave")
    assert {worker.state for worker in workers(server).values()} == {"finished"}
