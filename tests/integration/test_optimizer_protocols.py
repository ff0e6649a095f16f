"""Every protocol with torch workers: alone, bit for bit as without servers; several processes, each to its end."""

import re

import numpy as np
import pytest
import torch

from inspection import inspect
from pyps_client import RemoteOptimizer
from pyps_client.torch.translate import translate
from pyps_wire import inspector_pb2 as pb
from support import ServerProcess, wait_until
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


def configure(server: ServerProcess, protocol: str) -> None:
    inspect(server.control, "Configure", pb.ConfigureRequest(protocol=protocol))


def step(optimizer: RemoteOptimizer, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    backward(model, batch)
    optimizer.step(examples=16)


def test_a_worker_that_overlaps_waits_while_a_barrier_is_in_force_and_loses_nothing(start_server, caplog) -> None:
    """It joins under the barrier, overlaps under async, and goes back behind the next barrier."""
    caplog.set_level("INFO")
    server = start_server("--protocol", "hardsync", "--heartbeat-seconds", "0.1")
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with RemoteOptimizer(model, sgd, server.data, overlap="step") as optimizer:
        session = optimizer._session
        for protocol in ("hardsync", "async", "backup:b=0"):
            if protocol != "hardsync":
                configure(server, protocol)
                wait_until(lambda protocol=protocol: session.protocol == protocol, what="word of the change")
            optimizer._downpour.flush()
            before = status(server).version_max
            # The first gradient after overlapped steps was computed on older parameters.
            refused = sum(session.refused.values())
            for count, batch in enumerate(batches(8)):
                step(optimizer, model, batch)
                if protocol == "backup:b=0" and count == 0:
                    refused = sum(session.refused.values())
            optimizer._downpour.flush()
            assert sum(session.refused.values()) == refused, session.refused
            if protocol == "hardsync":
                assert status(server).version_max == before + 8
    said = [message for message in caplog.messages if "takes gradients of the present version only" in message]
    assert ["hardsync" in said[0], "backup:b=0" in said[1], len(said)] == [True, True, 2]


def test_workers_follow_the_accumulation_of_a_protocol_that_is_set_while_they_train(start_server, caplog) -> None:
    server = start_server("--heartbeat-seconds", "0.1")
    models = [mlp(), mlp()]
    follower, stubborn = (
        RemoteOptimizer(
            model, torch.optim.SGD(model.parameters(), lr=0.01), server.data, run_id="sums", worker_id=name, **stated
        )
        for model, (name, stated) in zip(models, {"follower": {}, "stubborn": {"push_every": 2}}.items(), strict=True)
    )
    with follower, stubborn:
        for protocol, wanted, updates in (("async", 0, 8), ("asgd:accumulate=4", 4, 2), ("async", 0, 8)):
            configure(server, protocol)
            for optimizer, model, expected in ((follower, models[0], updates), (stubborn, models[1], 4)):
                session = optimizer._session
                wait_until(lambda session=session, wanted=wanted: session.accumulate == wanted, what="word of it")
                before = status(server).version_max
                for batch in batches(8):
                    step(optimizer, model, batch)
                assert status(server).version_max - before == expected
    assert status(server).examples == 2 * 3 * 8 * 16
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.startswith("push_every is 2 here, but asgd") for message in warnings] == [True]


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
