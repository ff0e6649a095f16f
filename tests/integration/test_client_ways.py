"""Which way gradients and parameters take to a server: what it offers, what can be reached, and lost links."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from client_support import Reference, addresses, gradients_like, make_client, small_model
from pyps_client import ServerUnavailable
from pyps_wire.common_pb2 import (
    OUTCOME_APPLIED,
    REASON_NOT_FINITE,
)
from support import ServerThread

Start = Callable[..., ServerThread]

# Several shards.
LARGE = {"w": np.asarray(np.random.default_rng(0).standard_normal(400_000), np.float32)}


def test_without_an_offer_gradients_go_by_grpc_and_one_line_says_so(
    start_server: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server("--local-socket", "off")
    with caplog.at_level("INFO"), make_client(server.data) as client:
        assert client.session.transport == "grpc"
        client.exchange(gradients_like(small_model(), 0))
    assert caplog.text.count("by gRPC: it offers no shared memory") == 1

    with pytest.raises(ServerUnavailable, match=r"transport is 'shm'.*server 0 .*it offers no shared memory.*'auto'"):
        make_client(server.data, transport="shm", run_id=client.session.run_id)


def test_a_socket_that_cannot_be_reached_means_grpc(start_server: Start, tmp_path: Path) -> None:
    """As in a container that has the server's port, but not its folder."""
    folder = tmp_path / "sockets"
    folder.mkdir()
    server = start_server("--local-socket", str(folder))
    with make_client(server.data) as client:
        assert client.session.transport == "shm"
    (path,) = folder.glob("*.sock")
    path.unlink()
    with make_client(server.data, worker_id="later", run_id=client.session.run_id) as client:
        assert client.session.transport == "grpc"
        assert client.exchange(gradients_like(small_model(), 0))


def test_one_server_here_and_one_elsewhere_are_served_each_its_way(start_server: Start) -> None:
    tensors = small_model()
    reference = Reference(tensors, "adagrad")
    servers = [start_server(), start_server("--local-socket", "off")]
    with make_client(addresses(servers)) as client:
        assert client.session.transport == "mixed"
        assert not client.session.checks_first
        for step in range(3):
            gradients = gradients_like(tensors, step)
            reference.step(gradients)
            reference.check(client.exchange(gradients))


def test_a_server_that_stops_sharing_is_served_by_grpc_from_then_on(
    start_server: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    server = start_server(*checkpoints)
    with make_client(server.data) as client:
        assert client.session.transport == "shm"
        client.exchange(gradients_like(small_model(), 0))
        server.stop()
        port = server.data.rsplit(":", 1)[1]
        start_server(*checkpoints, "--resume", "--port", port, "--local-socket", "off")
        client.pull()
        assert client.session.transport == "grpc"
        client.exchange(gradients_like(small_model(), 1))
        assert client.session.held_versions.epochs == (1,)
        assert client.refused == {}


@pytest.mark.parametrize("transport", ["shm", "auto"])
def test_a_link_that_is_lost_between_rounds_is_opened_again(start_server: Start, transport: str) -> None:
    tensors = small_model()
    reference = Reference(tensors, "adagrad")
    with make_client(start_server().data, transport=transport) as client:
        link = client.session._servers.connections[0].link
        for step in range(4):
            link.close()
            assert client.session.checks_first
            gradients = gradients_like(tensors, step)
            reference.step(gradients)
            # The second time a push meets it, and then a pull.
            reference.check(client.exchange(gradients) if step != 1 else client.push(gradients) and client.pull())
            assert client.session.transport == "shm"
            link, lost = client.session._servers.connections[0].link, link
            assert link is not lost
            link.close()
            reference.check(client.pull())
            link = client.session._servers.connections[0].link


def start_with_socket(start_server: Start, folder: Path) -> tuple[ServerThread, Path]:
    """A server and the path of its local socket, without which no link can be opened again."""
    folder.mkdir()
    server = start_server("--local-socket", str(folder))
    (path,) = folder.glob("*.sock")
    return server, path


def test_what_was_left_to_the_server_to_look_through_is_looked_through_here_where_the_link_is_lost(
    start_server: Start, tmp_path: Path
) -> None:
    """By gRPC the server would refuse the shard with NaN and apply the others."""
    server, path = start_with_socket(start_server, tmp_path / "sockets")
    with make_client(server.data, tensors=LARGE, shard_size=50_000) as client:
        session, gradient, parameters = client.session, client._gradient, client._parameters
        before = parameters.copy()
        gradient[:] = 1.0
        gradient[399_999] = np.inf
        assert session.checks_first
        path.unlink()
        session._servers.connections[0].link.close()
        receipts = session.exchange([gradient], [parameters])

        assert [receipt.reason for receipt in receipts] == [REASON_NOT_FINITE] * session.partition.num_shards
        assert (session.transport, session.checks_first) == ("grpc", False)
        np.testing.assert_array_equal(parameters, before)
        np.testing.assert_array_equal(client.snapshot()["w"], before)
        gradient[399_999] = 1.0
        receipts = session.exchange([gradient], [parameters])
        assert {receipt.outcome for receipt in receipts} == {OUTCOME_APPLIED}
        assert (parameters != before).all()


def test_a_worker_that_insists_on_shared_memory_ends_rather_than_go_on_without(
    start_server: Start, tmp_path: Path
) -> None:
    server, path = start_with_socket(start_server, tmp_path / "sockets")
    client = make_client(server.data, transport="shm")
    path.unlink()
    client.session._servers.connections[0].link.close()
    for _ in range(2):
        with pytest.raises(ServerUnavailable, match=r"transport is 'shm', but no memory can be shared.*'auto'"):
            client.exchange(gradients_like(small_model(), 0))
    client.close("failed")
