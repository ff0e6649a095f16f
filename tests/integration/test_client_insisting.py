"""Workers that insist on shared memory (transport="shm") where there is none: refused without a trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from client_support import addresses, gradients_like, make_client, small_model
from inspection import inspect
from pyps_wire import common_pb2 as common
from pyps_wire.errors import ServerUnavailable
from support import ServerThread

Start = Callable[..., ServerThread]


def assert_untouched(servers: list[ServerThread]) -> None:
    """No server has heard of a worker or a run."""
    for server in servers:
        status = inspect(server.control, "GetStatus")
        assert (status.state, status.run_id) == (common.RUN_STATE_EMPTY, "")
        assert not inspect(server.control, "ListWorkers").workers


@pytest.mark.parametrize("sharing", [(False,), (False, True), (True, False)])
def test_a_worker_is_refused_before_any_server_hears_of_it(start_server: Start, sharing: tuple[bool, ...]) -> None:
    servers = [start_server(*(() if shares else ("--local-socket", "off"))) for shares in sharing]
    place = sharing.index(False)
    with pytest.raises(ServerUnavailable, match=rf"transport is 'shm'.*server {place} .*it offers no shared memory"):
        make_client(addresses(servers), transport="shm", shard_size=16)
    assert_untouched(servers)
    # Nobody has to wait for the end of a turn that was given to the one refused.
    with make_client(addresses(servers), shard_size=16, start_wait_seconds=8.0) as client:
        assert client.exchange(gradients_like(small_model(), 0))


def test_a_socket_out_of_reach_refuses_the_worker_as_early(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--local-socket", str(tmp_path))
    (path,) = tmp_path.glob("*.sock")
    path.unlink()
    with pytest.raises(ServerUnavailable, match=r"transport is 'shm'.*: No such file or directory\. Run worker and"):
        make_client(server.data, transport="shm")
    assert_untouched([server])


def test_a_worker_refused_by_a_run_leaves_no_trace_in_it(start_server: Start) -> None:
    server = start_server("--local-socket", "off")
    with make_client(server.data, run_id="mine") as client:
        client.exchange(gradients_like(small_model(), 0))
        with pytest.raises(ServerUnavailable, match="it offers no shared memory"):
            make_client(server.data, run_id="mine", worker_id="insisting", transport="shm")
        assert [worker.worker_id for worker in inspect(server.control, "ListWorkers").workers] == ["worker"]


def test_where_memory_can_be_shared_it_is(start_server: Start) -> None:
    servers = [start_server(), start_server()]
    with make_client(addresses(servers), transport="shm", shard_size=16) as client:
        assert client.session.transport == "shm"
