"""Shared memory through the life of its server: where it listens, how it ends, and what a run's end means for it."""

import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyps.config import ConfigError
from pyps_wire import inspector_pb2
from pyps_wire.errors import NotInitialized, ServerUnavailable
from pyps_wire.partition import Model, Tensor
from support import inspect, server_loop, status_of, wait_until
from wire_worker import descriptors_of, local_worker, maps_of

LARGE = Model((Tensor("x", (8_000_000,)),))


def test_a_socket_in_a_folder_is_for_its_user_alone_and_goes_with_its_server(start_server, tmp_path):
    server = start_server("--local-socket", str(tmp_path))
    with local_worker(server.data) as worker:
        [path] = tmp_path.iterdir()
        assert worker.offer.address == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert worker.exchange()[0].version == 1
    assert server.stop() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_killed_servers_socket_is_removed_by_the_next_one_and_a_living_ones_stays(start_server_process, tmp_path):
    killed = start_server_process("--local-socket", str(tmp_path))
    [stale] = tmp_path.iterdir()
    killed.kill()
    assert stale.exists()
    living = start_server_process("--local-socket", str(tmp_path))
    start_server_process("--local-socket", str(tmp_path))
    assert not stale.exists()
    assert len(list(tmp_path.iterdir())) == 2
    with local_worker(living.data) as worker:
        assert worker.exchange()[0].version == 1


def test_a_folder_that_cannot_be_used_is_said_at_the_start(start_server, tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    for folder, words in (
        (tmp_path / "absent", "which is no folder to write in"),
        (long, "name a folder with a shorter path"),
    ):
        with pytest.raises(ConfigError, match=words):
            start_server("--local-socket", str(folder))


def test_a_server_that_ends_refuses_rounds_and_leaves_every_shard_at_one_version(start_server):
    server = start_server()
    with local_worker(server.data, model=LARGE) as worker:
        worker.gradients[0][0][:] = 1.0
        versions = []

        def train() -> None:
            while True:
                try:
                    versions.append(worker.exchange()[0].version)
                except (ServerUnavailable, EOFError, OSError):
                    return

        thread = threading.Thread(target=train)
        thread.start()
        wait_until(lambda: len(versions) > 2, 30, "some rounds")
        assert server.stop() == 0
        thread.join(20)
        assert not thread.is_alive()
        # Each shard had the round that was refused in full or not at all, and the memory is still the worker's own.
        for shard in worker.plan.shards:
            values = worker.parameters[0][shard.offset : shard.offset + shard.length]
            assert values.min() == values.max()
            assert -values[0] in (versions[-1], versions[-1] + 1)
        assert "bug" not in server.output()


def test_a_parked_pull_ends_with_its_server_and_with_its_run(start_server):
    for reset in (False, True):
        server = start_server()
        with local_worker(server.data) as worker, ThreadPoolExecutor(1) as pool:
            worker.link.send(worker.pull_request({0: 5}, wait_seconds=100))
            wait_until(lambda server=server: list(status_of(server).waiting_for), 60, "the parked pull")
            if reset:
                inspect(server.control, "Reset", inspector_pb2.ResetRequest(run_id="run-1"))
                assert worker.link.receive().failure.name == "NotInitialized"
                assert worker.link.is_closed_by_the_server
            else:
                stopped = pool.submit(server.stop)
                assert worker.link.receive().failure.name == "ServerUnavailable"
                assert stopped.result(60) == 0


def test_a_reset_run_ends_its_connections_and_the_next_run_takes_new_ones(start_server_process):
    server = start_server_process()
    with local_worker(server.data) as worker:
        worker.exchange()
        inspect(server.control, "Reset", inspector_pb2.ResetRequest(run_id="run-1"))
        with pytest.raises(NotInitialized, match="reset since this memory was attached"):
            worker.exchange()
        assert worker.link.is_closed_by_the_server
        wait_until(lambda: maps_of(server.pid) == [], 60, "the memory unmapped")
        worker.versions.clear()
        worker.begin()
        worker.gradients[0][0][:] = 1.0
        assert worker.exchange()[0].version == 1
        assert worker.parameters[0][0] == -1.0


def test_a_later_process_of_a_workers_name_takes_its_place(start_server_process):
    server = start_server_process()
    with local_worker(server.data, "a") as earlier, local_worker(server.data, "a") as later:
        assert earlier.link.is_closed_by_the_server
        assert later.exchange()[0].version == 1
        wait_until(lambda: len(maps_of(server.pid)) == 1, 60, "one mapping left")


def test_a_vanished_waiter_leaves_nothing_behind(start_server_process):
    server = start_server_process()
    before = len(descriptors_of(server.pid))
    for further in (False, True):
        with local_worker(server.data) as worker:
            worker.link.send(worker.pull_request({0: 5}, wait_seconds=600))
            wait_until(lambda: list(status_of(server).waiting_for), 60, "the parked pull")
            if further:
                # Not read before the pull is answered, so that the end behind it is not read either.
                worker.link.send(worker.exchange_request())
        wait_until(lambda: not list(status_of(server).waiting_for), 60, "the end of the wait")
        wait_until(lambda: not maps_of(server.pid), 60, "the end of the memory")
        wait_until(lambda: len(descriptors_of(server.pid)) <= before, 60, "the end of the socket")
    assert "bug" not in server.output()


def test_a_request_whose_caller_has_gone_before_it_is_read_is_not_begun(start_server):
    """Its memory may be in other use already, and nobody waits for parameters there."""
    server = start_server()
    with local_worker(server.data) as worker:
        held, go_on = threading.Event(), threading.Event()
        server_loop().call_soon_threadsafe(lambda: (held.set(), go_on.wait(60)))
        assert held.wait(60)
        worker.link.send(worker.exchange_request())
        worker.detach()
        go_on.set()
        wait_until(lambda: not inspect(server.control, "GetMemory").shared_bytes, 60, "the end of the connection")
        assert status_of(server).tally.pushes_applied == 0
        assert not worker.parameters[0].any()
