"""GET of ASGD over gRPC: a portion of the data and a snapshot of the parameters in one call, of one moment.

Zhang, Zhang, You, Zheng, Xu (ICASSP 2013); the invariants A2, A3 and A4 of the algorithm notes, section 2.2.
"""

from functools import partial

import numpy as np
import pytest
import torch

from client_support import SGD, addresses
from pyps_client import Client, Launch
from pyps_client.data import Portions
from pyps_client.data.queue import RemoteQueue
from pyps_wire.contract import PARAMETER_SERVER, stub_of
from pyps_wire.parameter_server_pb2 import PullRequest
from pyps_wire.work_pb2 import DataSpec, GetWorkRequest, LeaseReply, LeaseRequest
from shards import run_together
from support import ServerThread, connected, inspect
from training import joined
from wire_worker import refusal_of

# Several shards, so that a snapshot could be torn.
TENSORS = {f"tensor-{i}": np.zeros(100, np.float32) for i in range(5)}
DATA = DataSpec(name="train", num_examples=300, portion_examples=10, batch_size=10)
EPOCHS = 2


def client(server: ServerThread, name: str) -> Client:
    return Client(TENSORS, SGD, launch=Launch(addresses([server]), shard_size=96, run_id="get", worker_id=name))


def delivered(server: ServerThread) -> dict[int, list[int]]:
    """The examples that were delivered, by epoch; each as often as it was."""
    places: dict[int, list[int]] = {}
    for delivery in inspect(server.control, "GetWork", GetWorkRequest(deliveries=True)).deliveries:
        portion = delivery.portion
        places.setdefault(getattr(delivery, "pass"), []).extend(range(portion.start, portion.stop))
    return {epoch: sorted(of_epoch) for epoch, of_epoch in places.items()}


def test_four_clients_get_each_portion_once_with_parameters_of_one_moment(start_server):
    """A2 and A3: what comes is a state of the whole model, and no portion is given out twice."""
    server = start_server("--protocol", "asgd", "--staleness", "none")
    clients = [client(server, name) for name in "abcd"]
    gradients = {name: np.ones(values.size, np.float32) for name, values in TENSORS.items()}
    got: list[tuple[str, int, frozenset[int], frozenset[float]]] = []

    def work(worker: Client) -> None:
        session = worker.session
        queue = RemoteQueue(session)
        queue.open(DATA)
        vectors = [np.zeros(500, np.float32)]
        for epoch in range(EPOCHS):
            while True:
                reply = queue.lease(pass_number=epoch, call=session.with_parameters(vectors))
                if reply.outcome == LeaseReply.OUTCOME_PASS_DONE:
                    break
                assert reply.outcome == LeaseReply.OUTCOME_LEASED
                lease_id = reply.portion.lease_id
                versions = frozenset(session.held_versions.values())
                got.append((session.launch.worker_id, lease_id, versions, frozenset(vectors[0].tolist())))
                worker.push(gradients, examples=10)
                assert queue.deliver([lease_id], example_count=10).accepted

    run_together([partial(work, worker) for worker in clients])
    for worker in clients:
        worker.close()

    assert len({lease_id for _, lease_id, _, _ in got}) == len(got) == EPOCHS * 30
    assert delivered(server) == {epoch: list(range(300)) for epoch in range(EPOCHS)}
    learning_rate = SGD[1]["learning_rate"]
    for _, _, versions, values in got:
        [version], [value] = versions, values
        assert value == pytest.approx(-learning_rate * version, rel=1e-4)


def test_what_a_worker_computes_on_is_of_the_moment_in_which_its_portion_was_given_out(start_server):
    server = start_server("--protocol", "asgd")
    dataset = torch.utils.data.TensorDataset(torch.randn(12, 4))
    models = [torch.nn.Linear(4, 1, bias=False) for _ in range(2)]
    optimizers = [
        joined(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            servers=addresses([server]),
            run_id="get",
            worker_id=f"worker-{index}",
        )
        for index, model in enumerate(models)
    ]
    draws = [iter(Portions(dataset, optimizer, batch_size=1, portion_batches=1)) for optimizer in optimizers]

    def step(index: int) -> None:
        batch = next(draws[index])
        optimizers[index].zero_grad()
        models[index](dataset.tensors[0][batch]).sum().backward()
        optimizers[index].step()

    step(0)
    step(1)
    held = models[0].weight.detach().clone()
    next(draws[0])

    assert not torch.equal(held, models[0].weight)
    assert torch.equal(optimizers[0].snapshot()["weight"], models[0].weight)
    for optimizer in optimizers:
        optimizer.close()


def test_a_portion_for_another_than_the_caller_is_refused(start_server):
    server = start_server("--protocol", "asgd")
    with client(server, "a") as worker:
        RemoteQueue(worker.session).open(DATA)
        sender, other = worker.session.sender, type(worker.session.sender)()
        other.CopyFrom(sender)
        other.worker_id = "b"
        request = PullRequest(sender=sender, role=1, portion=LeaseRequest(sender=other))
        with connected(server.data) as channel:
            refused = refusal_of(list, stub_of(PARAMETER_SERVER, channel).Pull(request, timeout=30))
        assert refused[1] == "InvalidArgument"
        assert "'a' pulls and wants a portion as 'b': ask as the worker that pulls" in refused[2]
