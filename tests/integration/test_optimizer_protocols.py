"""Every protocol with torch workers: alone, bit for bit as without servers; several together, each to its end."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from client_support import addresses
from pyps_client import RemoteOptimizer
from pyps_client.torch.rules import translate
from support import ServerThread, configure, status_of, wait_until, workers_of
from training import SerialRule, backward, batches, gradients_of, joined, mlp, parameters_of

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
TOGETHER = ["async", "softsync:n=2", "hardsync", "backup:b=1", "ssp:s=2", "serial", "asgd:mutex=whole,accumulate=2"]
NUM_WORKERS = 3


def test_a_worker_alone_trains_as_the_rule_by_itself_bit_for_bit(start_server):
    """U6 of the specification, and promise 5 of the design."""
    for protocol in ALONE:
        servers = [start_server("--protocol", protocol) for _ in range(2)]
        model = mlp()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        serial = SerialRule(translate(sgd), parameters_of(model))
        with joined(model, sgd, addresses(servers)) as optimizer:
            for batch in batches(20):
                backward(model, batch)
                serial.step(gradients_of(model), 0.1)
                optimizer.examples_in_batch = 16
                optimizer.step()
                np.testing.assert_array_equal(parameters_of(model), serial.parameters, err_msg=protocol)
            assert {receipt.staleness for receipt in optimizer.receipts} == {0}, protocol


def test_three_workers_train_under_each_protocol_and_leave_as_finished(start_server):
    (batch,) = batches(1)

    def train(server: ServerThread, worker_id: str) -> float:
        model = mlp()
        adagrad = torch.optim.Adagrad(model.parameters(), lr=0.03)
        with joined(model, adagrad, server.data, run_id="together", worker_id=worker_id) as optimizer:
            for _ in range(20):
                backward(model, batch)
                optimizer.examples_in_batch = 16
                optimizer.step()
            trained = mlp()
            trained.load_state_dict(optimizer.snapshot())
        return float(torch.nn.functional.cross_entropy(trained(batch[0]), batch[1]).detach())

    first = float(backward(mlp(), batch))
    for protocol in TOGETHER:
        server = start_server("--protocol", protocol, "--expected-workers", str(NUM_WORKERS))
        with ThreadPoolExecutor(NUM_WORKERS) as pool:
            losses = list(pool.map(lambda name, server=server: train(server, name), "abc", timeout=120))
        assert max(losses) < first / 2, (protocol, losses)
        assert {worker.state for worker in workers_of(server.control).values()} == {"finished"}, protocol
        assert status_of(server).workers_alive == 0, protocol


def step(optimizer: RemoteOptimizer, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    backward(model, batch)
    optimizer.examples_in_batch = 16
    optimizer.step()


def test_a_worker_that_overlaps_waits_while_a_barrier_is_in_force_and_loses_nothing(start_server, caplog):
    """It joins under the barrier, overlaps under async, and goes back behind the next barrier."""
    caplog.set_level("INFO")
    server = start_server("--protocol", "hardsync", "--heartbeat-seconds", "0.1")
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with joined(model, sgd, server.data, overlap="step") as optimizer:
        session = optimizer.stepper.session
        for protocol in ("hardsync", "async", "backup:b=0"):
            if protocol != "hardsync":
                configure(server, protocol=protocol)
                wait_until(lambda protocol=protocol: session.terms.protocol == protocol, what="word of the change")
            optimizer._steps.flush()
            before = status_of(server).version_max
            # The first gradient after overlapped steps was computed on older parameters.
            refused = sum(session.refused.values())
            for number, batch in enumerate(batches(8)):
                step(optimizer, model, batch)
                if protocol == "backup:b=0" and number == 0:
                    refused = sum(session.refused.values())
            optimizer._steps.flush()
            assert sum(session.refused.values()) == refused, session.refused
            if protocol == "hardsync":
                assert status_of(server).version_max == before + 8
    said = [message for message in caplog.messages if "takes gradients of the present version only" in message]
    assert ["hardsync" in said[0], "backup:b=0" in said[1], len(said)] == [True, True, 2]
