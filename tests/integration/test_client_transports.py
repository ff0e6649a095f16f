"""The transports of gradients and parameters: shared memory, the lane and gRPC, and the end of one."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_support import ADAGRAD, Reference, addresses, gradients_like, make_client, small_model, start_servers
from pyps.core.arrays import Floats
from pyps_client import ForkedClient, InvalidArgument, RunFinished, ServerUnavailable
from pyps_client.launch import Launch
from pyps_client.push import Plan
from pyps_client.retry import RetryPolicy
from pyps_client.transport import named
from pyps_client.worker import Worker
from pyps_wire import common_pb2 as common
from pyps_wire.common_pb2 import OUTCOME_APPLIED, REASON_NOT_FINITE
from pyps_wire.partition import Model, ShardRange, Tensor
from support import DEADLINE_SECONDS, AnyServer, Start, inspect, wait_until

# Several shards, and frames large enough for more than one of HTTP/2's.
LARGE = {"w": np.asarray(np.random.default_rng(0).standard_normal(400_000), np.float32)}


@pytest.fixture(params=["shm", "tcp", "grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def lending(address: str, **options: Any) -> Iterator[tuple[Worker, Floats, Floats]]:
    """A session of the large model with the vectors that it lent, for its gradient and with its parameters."""
    model = Model((Tensor("w", LARGE["w"].shape),), shard_size=50_000)
    rule, hyperparameters = ADAGRAD
    settings = common.OptimizerSettings(rule=rule, groups=[common.GroupSettings(hyperparameters=hyperparameters)])
    launch = Launch(servers=(address,), worker_id="worker", loss_wait_seconds=30, **options)
    with Worker(model, settings, launch=launch, initial=lambda: [LARGE["w"]]) as session:
        lent = session.lend()
        [[gradient]], [parameters] = lent.gradients, lent.parameters
        session.pull([parameters])
        yield session, gradient, parameters


def links() -> list[int]:
    found = []
    for entry in list(Path("/proc/self/fd").iterdir()):
        if entry.is_socket():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as end:
                name = os.fsdecode(end.getpeername()) if end.family == socket.AF_UNIX else ""
                if "pyps-" in name:
                    found.append(int(entry.name))
    return found


def cut_link() -> None:
    """Cuts the one link that there is, as neither end expects it."""
    [descriptor] = links()
    with socket.socket(fileno=os.dup(descriptor)) as end:
        end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(("num_servers", "protocol"), [(1, "async"), (2, "async"), (1, "asgd:mutex=whole")])
def test_exchanges_equal_pushes_and_pulls(start_server, transport, num_servers, protocol):
    tensors = small_model()
    reference = Reference(tensors)
    servers = start_servers(start_server, num_servers, "--protocol", protocol)
    with make_client(addresses(servers), transport=transport) as client:
        assert client.session.transport == transport
        assert client.session.checks_first == (named(transport).shares and num_servers == 1)
        for step in range(4):
            gradients = gradients_like(tensors, step)
            if step == 2:
                del gradients["layer"]
            reference.step(gradients)
            reference.check(client.exchange(gradients))
        assert client.global_step == 4
        assert not client.session.pull_needed
        for step in range(4, 6):
            gradients = gradients_like(tensors, step)
            receipts = client.push(gradients)
            assert {(receipt.outcome, receipt.staleness) for receipt in receipts} == {(OUTCOME_APPLIED, 0)}
            reference.step(gradients)
            reference.check(client.pull())


def test_the_same_gradients_in_vectors_that_nobody_lent_go_by_grpc(start_server):
    reference = Reference(LARGE)
    with make_client(start_server().data, tensors=LARGE, shard_size=50_000) as client:
        session = client.session
        assert session.transport == "shm"
        mine = np.empty(400_000, np.float32)
        for step in range(3):
            gradients = gradients_like(LARGE, step)
            session.exchange(Plan([gradients["w"]], [mine]))
            reference.step(gradients)
            reference.check({"w": mine})


def test_a_paused_server_costs_a_deadline_and_the_exchange_counts_once(
    start_server_process, transport, monkeypatch, caplog
):
    """A stopped process keeps its connections open: only deadlines tell."""
    tensors = small_model()
    reference = Reference(tensors)
    server = start_server_process()
    monkeypatch.setattr("pyps_client.transport.connection.CALL_SECONDS", 0.5)
    quick_to_tell = partial(RetryPolicy, report_first_seconds=0, call_seconds_max=0.5)
    monkeypatch.setattr("pyps_client.transport.connection.RetryPolicy", quick_to_tell)
    with make_client(server.data, transport=transport) as client, ThreadPoolExecutor(1) as pool:
        gradients = gradients_like(tensors, 0)
        client.exchange(gradients)
        reference.step(gradients)
        server.signal(signal.SIGSTOP)
        exchanging = pool.submit(client.exchange, gradients)
        reference.step(gradients)
        # What did not answer in time is given up, and then nobody is there.
        wait_until(lambda: "no answer within the call's deadline" in caplog.text, what="the line that tells")
        server.signal(signal.SIGCONT)
        reference.check(exchanging.result(DEADLINE_SECONDS))
        wait_until(lambda: client.session.transport == transport, what="the way as before")


def test_a_forked_child_keeps_its_hands_off_the_memory_and_the_socket(start_server):
    reference = Reference(LARGE)
    with lending(start_server().data, transport="shm") as (session, gradient, parameters):
        held = parameters.copy()
        [descriptor] = links()
        child = os.fork()
        if child == 0:
            # Nothing of pytest may run in the child.
            try:
                try:
                    os.fstat(descriptor)
                    os._exit(3)
                except OSError:
                    parameters[:] = 0.0
                    gradient[:] = np.nan
                try:
                    session.exchange(Plan([gradient], [parameters]))
                except ForkedClient as error:
                    session.close()
                    assert f"before process {os.getpid()} was forked" in str(error)
                    assert "Make a client in the child, or start the child with spawn" in str(error)
                    os._exit(0)
            finally:
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

        np.testing.assert_array_equal(parameters, held)
        assert session.transport == "shm"
        gradients = gradients_like(LARGE, 0)
        reference.step(gradients)
        gradient[:] = gradients["w"]
        session.exchange(Plan([gradient], [parameters]))
        reference.check({"w": parameters})


def test_closing_ends_a_held_pull_and_pushes_use_another_transport_meanwhile(start_server, transport):
    server = start_server("--protocol", "async")
    with lending(server.data, transport=transport) as (session, gradient, parameters), ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(session.pull, [parameters], min_versions={0: 99}, wait_seconds=600)
        wait_until(lambda: inspect(server.control, "GetStatus").waiting_for, what="the pull to be held")
        receipts = session.push([gradient])
        assert {receipt.outcome for receipt in receipts} == {OUTCOME_APPLIED}
        session.close()
        with pytest.raises(RunFinished, match="closed"):
            pulling.result(DEADLINE_SECONDS)


def test_a_worker_slow_to_share_is_greeted_again(start_server, monkeypatch):
    monkeypatch.setattr("pyps.service.listener.TICKET_SECONDS", 0.0)
    server = start_server()
    settings = common.OptimizerSettings(rule="sgd", groups=[common.GroupSettings(hyperparameters={"learning_rate": 1})])
    launch = Launch(servers=(server.data,), worker_id="worker", transport="shm")
    with Worker(Model((Tensor("w", (3,)),)), settings, launch=launch, initial=lambda: [np.zeros(3, np.float32)]) as own:
        monkeypatch.undo()
        monkeypatch.setattr("pyps_client.transport.sharing.TICKET_SECONDS", 0.0)
        own.lend()
        assert own.transport == "shm"


def test_vectors_are_lent_once_and_so_many(start_server):
    with (
        make_client(start_server().data) as client,
        pytest.raises(InvalidArgument, match="has lent its vectors already"),
    ):
        client.session.lend()


def start_with_socket(start_server: Start, folder: Path) -> tuple[AnyServer, Path]:
    folder.mkdir()
    server = start_server("--local-socket", str(folder))
    (path,) = folder.glob("*.sock")
    return server, path


def assert_untouched(servers: list[AnyServer]) -> None:
    for server in servers:
        status = inspect(server.control, "GetStatus")
        assert (status.state, status.run_id) == (common.RUN_STATE_EMPTY, "")
        assert not inspect(server.control, "ListWorkers").workers


@pytest.mark.parametrize(
    ("lane", "way", "words"), [("0", "tcp", "a lane: "), ("off", "grpc", "gRPC: it offers no lane; ")]
)
def test_without_shared_memory_the_next_transport_is_used(start_server, caplog, lane, way, words):
    server = start_server("--local-socket", "off", "--lane-port", lane)
    with caplog.at_level("INFO"), make_client(server.data, run_id="mine") as client:
        client.exchange(gradients_like(small_model(), 0))
        assert client.session.transport == way
        [worker] = inspect(server.control, "ListWorkers").workers
        assert worker.transport == way
        assert caplog.text.count("to and from server 0") == 1
        assert f"by {words}no memory is shared (it offers no shared memory)" in caplog.text
        with pytest.raises(ServerUnavailable, match="it offers no shared memory"):
            make_client(server.data, run_id="mine", worker_id="insisting", transport="shm")
        assert [worker.worker_id for worker in inspect(server.control, "ListWorkers").workers] == ["worker"]


@pytest.mark.parametrize("sharing", [(False,), (False, True), (True, False)])
def test_a_worker_is_refused_before_any_server_hears_of_it(start_server, sharing):
    servers = [start_server(*(() if shares else ("--local-socket", "off"))) for shares in sharing]
    place = sharing.index(False)
    words = rf"transport is 'shm'.*server {place} .*it offers no shared memory.*'auto'"
    with pytest.raises(ServerUnavailable, match=words):
        make_client(addresses(servers), transport="shm", shard_size=16)
    assert_untouched(servers)
    # Nobody has to wait for the end of a turn that was given to the one refused.
    with make_client(addresses(servers), shard_size=16, start_wait_seconds=8.0) as client:
        assert client.exchange(gradients_like(small_model(), 0))


def test_an_unreachable_socket_means_a_lane_or_an_error(start_server, tmp_path):
    """As in a container that has the server's port, but not its folder."""
    server, path = start_with_socket(start_server, tmp_path / "sockets")
    path.unlink()
    with pytest.raises(ServerUnavailable, match=r"transport is 'shm'.*: No such file or directory\. Run worker and"):
        make_client(server.data, transport="shm")
    assert_untouched([server])
    with make_client(server.data) as client:
        assert client.session.transport == "tcp"
        assert client.exchange(gradients_like(small_model(), 0))


def test_a_server_here_and_one_elsewhere_use_a_transport_each(start_server):
    tensors = small_model()
    reference = Reference(tensors)
    servers = [start_server(), start_server("--local-socket", "off")]
    with make_client(addresses(servers)) as client:
        assert client.session.transport == "mixed"
        assert not client.session.checks_first
        for step in range(3):
            gradients = gradients_like(tensors, step)
            reference.step(gradients)
            reference.check(client.exchange(gradients))


def test_a_server_that_stops_sharing_gets_a_lane(start_server, tmp_path, caplog):
    checkpoints = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    server = start_server(*checkpoints)
    with make_client(server.data) as client:
        client.exchange(gradients_like(small_model(), 0))
        [connection] = client.session._servers.connections
        assert (client.session.transport, connection.lane) == ("shm", None)
        server.stop()
        port = server.data.rsplit(":", 1)[1]
        start_server(*checkpoints, "--resume", "--port", port, "--local-socket", "off")
        client.pull()
        assert client.session.transport == "tcp"
        client.exchange(gradients_like(small_model(), 1))
        assert client.session.held_versions.epochs == (1,)
        assert client.refused == {}


@pytest.mark.parametrize("transport", ["shm", "auto"])
def test_a_link_that_is_lost_between_rounds_is_opened_again(start_server, transport):
    tensors = small_model()
    reference = Reference(tensors)
    with make_client(start_server().data, transport=transport) as client:
        for step in range(4):
            cut_link()
            assert client.session.checks_first
            gradients = gradients_like(tensors, step)
            reference.step(gradients)
            # The second time a push meets it, and then a pull.
            reference.check(client.exchange(gradients) if step != 1 else client.push(gradients) and client.pull())
            assert client.session.transport == "shm"
            cut_link()
            reference.check(client.pull())


def test_a_worker_scans_for_nan_itself_once_its_link_is_lost(start_server, tmp_path):
    """By a lane the server would refuse the shard with NaN and apply the others."""
    server, path = start_with_socket(start_server, tmp_path / "sockets")
    with lending(server.data) as (session, gradient, parameters):
        before = parameters.copy()
        gradient[:] = 1.0
        gradient[399_999] = np.inf
        assert session.checks_first
        path.unlink()
        cut_link()
        receipts = session.exchange(Plan([gradient], [parameters]))

        assert [receipt.reason for receipt in receipts] == [REASON_NOT_FINITE] * session.partition.num_shards
        assert (session.transport, session.checks_first) == ("tcp", False)
        np.testing.assert_array_equal(parameters, before)
        served = np.empty_like(parameters)
        session.snapshot([served])
        np.testing.assert_array_equal(served, before)
        gradient[399_999] = 1.0
        receipts = session.exchange(Plan([gradient], [parameters]))
        assert {receipt.outcome for receipt in receipts} == {OUTCOME_APPLIED}
        assert (parameters != before).all()


def test_insisting_on_shared_memory_ends_the_worker_without_it(start_server, tmp_path):
    server, path = start_with_socket(start_server, tmp_path / "sockets")
    client = make_client(server.data, transport="shm")
    path.unlink()
    cut_link()
    for _ in range(2):
        with pytest.raises(ServerUnavailable, match=r"transport is 'shm', but no memory can be shared.*'auto'"):
            client.exchange(gradients_like(small_model(), 0))
    client.close("failed")


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_each_shard_of_a_message_is_reported_once_it_is_written(start_server, transport):
    with lending(start_server().data, transport=transport) as (session, gradient, parameters):
        landed: dict[int, Floats] = {}

        def land(shard: ShardRange) -> None:
            assert shard.offset not in landed
            landed[shard.offset] = parameters[shard.offset : shard.offset + shard.length].copy()

        session.tell_landed(land)
        for bring in (
            lambda: session.exchange(Plan([gradient], [parameters], lent_index=0)),
            lambda: session.push([gradient]) and session.pull([parameters]),
        ):
            landed.clear()
            gradient[:] = 1.0
            before = parameters.copy()
            bring()
            assert np.array_equal(np.concatenate([landed[offset] for offset in sorted(landed)]), parameters)
            assert not np.array_equal(before, parameters)
