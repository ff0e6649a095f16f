"""What a push carries beside gradients, and what the servers' settings make of it: rates, norms, kinds, batch sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from client_support import addresses, gradients_like, make_client, small_model, start_servers
from inspection import inspect
from pyps_client import Client, ScheduleOwned
from pyps_wire.common_pb2 import OUTCOME_APPLIED, PAYLOAD_KIND_DELTA
from support import AnyServer, ServerProcess

Start = Callable[..., AnyServer]
RATE = 0.05
VECTOR = np.concatenate([gradient.reshape(-1) for gradient in gradients_like(small_model(), 0).values()])


def client_of(server: ServerProcess, worker_id: str) -> Client:
    """A client of the shared run under plain SGD."""
    return make_client(server.data, worker_id=worker_id, run_id="shared", optimizer=("sgd", {"learning_rate": RATE}))


def test_the_servers_schedule_tells_the_size_of_the_next_minibatch(start_server: Start) -> None:
    server = start_server("--batch-growth", "start=8,maximum=32,every=1", "--epoch-examples", "10")
    sizes = []
    with client_of(server, "a") as client:
        for step in range(6):
            sizes.append(client.batch_size)
            client.push(gradients_like(small_model(), step), examples=5)

    assert sizes == [8, 8, 16, 16, 32, 32]


def test_a_server_that_clips_is_told_the_norm_of_the_whole_push(start_server: Start) -> None:
    """Split over two servers, a gradient is scaled by its whole norm: as if it were on one."""
    servers = start_servers(start_server, 2, "--clip-norm", "1")
    model = small_model()
    gradients = gradients_like(model, 0)
    norm = np.sqrt(sum(np.sum(np.square(gradient, dtype=np.float64)) for gradient in gradients.values()))
    with make_client(addresses(servers), optimizer=("sgd", {"learning_rate": RATE})) as client:
        client.push(gradients)
        pulled = client.pull()

    for name, first in model.items():
        np.testing.assert_allclose(pulled[name], first - RATE / norm * gradients[name], rtol=0, atol=1e-6)


def test_the_owner_of_the_schedule_changes_the_rate_with_its_push(start_server: Start) -> None:
    server = start_server("--staleness", "none")
    with client_of(server, "owner") as client:
        answers = [
            client.session.push([VECTOR]),
            client.session.push([VECTOR], learning_rates={0: 0.01}),
            client.session.push([VECTOR]),
        ]

    assert [{receipt.rate for receipt in receipts} for receipts in answers] == [{RATE}, {0.01}, {0.01}]


def test_the_owner_tells_a_restored_server_its_rate_again(start_server_process: Start, tmp_path: Path) -> None:
    flags = ("--staleness", "none", "--checkpoint-dir", str(tmp_path), "--checkpoint-seconds", "1000")
    server = start_server_process(*flags)
    with client_of(server, "owner") as client:
        client.push(gradients_like(small_model(), 0))
        inspect(server.control, "SaveCheckpoint")
        client.session.push([VECTOR], learning_rates={0: 0.01})
        # What came after the checkpoint is lost, the rate too.
        server.kill()
        start_server_process(*flags, "--resume", "--port", server.data.rsplit(":", 1)[1])
        client.push(gradients_like(small_model(), 1))

        receipts = client.push(gradients_like(small_model(), 2))

    assert {(receipt.outcome, receipt.rate) for receipt in receipts} == {(OUTCOME_APPLIED, 0.01)}


def test_a_second_owner_of_the_schedule_is_refused_by_name(start_server: Start) -> None:
    server = start_server()
    with client_of(server, "owner") as owner, client_of(server, "other") as other:
        owner.session.push([VECTOR], learning_rates={0: 0.01})

        with pytest.raises(ScheduleOwned, match=r"'other' sent a learning rate, but worker 'owner' owns the schedule"):
            other.session.push([VECTOR], learning_rates={0: 0.02})


def test_a_delta_moves_the_parameters_by_itself_whatever_the_rate(start_server: Start) -> None:
    server = start_server("--staleness", "none")
    with client_of(server, "a") as client:
        before = np.concatenate([tensor.reshape(-1) for tensor in client.pull().values()])

        receipts = client.session.push([VECTOR], kinds=[PAYLOAD_KIND_DELTA])

        assert {receipt.outcome for receipt in receipts} == {OUTCOME_APPLIED}
        after = np.concatenate([tensor.reshape(-1) for tensor in client.pull().values()])
        np.testing.assert_array_equal(after, before + VECTOR)
