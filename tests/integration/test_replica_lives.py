"""How replicas live and end: heartbeats from the first Hello on, a leave wherever it was answered."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from client_support import Clock, addresses, start_servers
from pyps_client import Launch, PypsError, ServerUnavailable, Session
from pyps_client.join import Handshake
from pyps_client.transport.connection import Connection
from pyps_wire.errors import ReplicaLost
from pyps_wire.partition import partition
from replicas import CUT, SGD, Meeting, ThreadPeers, on_all, session_of
from support import ROOT, AnyServer, PythonProcess, StartPython, server_port, wait_until, workers_of

NAME = "replica-0"
Values = list[npt.NDArray[np.float32]]

QUICK = ("--heartbeat-seconds", "0.1")
# A lease that is soon over, and yet longer than a busy machine lets anybody be silent.
SHORT = ("--heartbeat-seconds", "0.2", "--lease-seconds", "10")


def push(session: Session) -> int:
    """Pushes ones and returns how many shards took them."""
    parameters = [np.zeros(size, np.float32) for size in session.model.group_sizes]
    session.pull(parameters)
    return sum(receipt.version_after > 0 for receipt in session.push([np.ones_like(each) for each in parameters]))


def left_with(server: AnyServer, worker_id: str) -> str:
    """What a worker said as it left in failure; empty while it has not."""
    worker = workers_of(server.control).get(worker_id)
    return worker.message if worker is not None and worker.state == "failed" else ""


def greet(server: AnyServer, name: str, *, servers: str, run_id: str) -> Callable[[], bool]:
    launch = Launch(servers=tuple(servers.split(",")), worker_id=name, run_id=run_id)
    handshake = Handshake(launch, partition=partition(CUT, num_servers=2), optimizer=SGD)
    with contextlib.closing(Connection(0, launch=launch)) as connection:
        handshake.hello(connection, connection.channel, 10.0)
    return lambda: name not in workers_of(server.control)


@pytest.fixture
def start_pair(start_python: StartPython, tmp_path: Path) -> Iterator[Callable[[str, str], list[PythonProcess]]]:
    """Starts the two processes of replica_process.py's scenario "founding"; ends those that have stopped themselves."""
    started: list[PythonProcess] = []

    def start(servers: str, scenario: str) -> list[PythonProcess]:
        script, store = str(ROOT / "tests" / "replica_process.py"), str(tmp_path / "store")
        started.extend(start_python(script, "founding", str(rank), "2", store, servers, scenario) for rank in (0, 1))
        return started

    yield start
    for process in started:
        if process.running:
            os.kill(process.pid, signal.SIGKILL)


def test_a_process_that_stops_while_its_replica_founds_a_run_costs_its_lease_and_another_founds_it(
    start_server, start_pair
):
    servers = start_servers(start_server, 2, *SHORT)
    told = addresses(servers)
    leader, stopped = start_pair(told, "founding")
    stopped.wait_for_output("stops")
    leader.wait_for_output("elected")

    with session_of(told) as session:
        assert push(session) == 5
    assert leader.wait() == 1
    assert f"'{NAME}/1'" in leader.output(), leader.output()
    assert "Traceback" not in leader.output()


def test_sigterm_in_hung_collective(start_server, start_pair):
    servers = start_servers(start_server, 2)
    hangs, stopped = start_pair(addresses(servers), "joined")
    stopped.wait_for_output("joined")
    hangs.wait_for_output("joined")
    wait_until(
        lambda: Path(f"/proc/{stopped.pid}/stat").read_text(encoding="utf-8").split()[2] == "T", what="the other's stop"
    )

    hangs.signal(signal.SIGTERM)

    assert hangs.wait() == 128 + signal.SIGTERM
    for server in servers:
        if f"{NAME}/0" in workers_of(server.control):
            assert left_with(server, f"{NAME}/0") == "Terminated: SIGTERM"


@pytest.mark.usefixtures("nobody_hangs")
def test_replicas_join_though_a_server_comes_later_than_their_lease_lasts(start_server):
    port = server_port()
    clock = Clock()
    first = start_server(*SHORT, clock=clock)
    told = f"{first.data},127.0.0.1:{port}"

    def work(peers: ThreadPeers) -> str:
        with session_of(told, peers, run_id="late") as session:
            return session.run_id

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(on_all, Meeting("r", 2), work)
        wait_until(lambda: workers_of(first.control).keys() >= {"r/0", "r/1"}, what="both at server 0")
        forgotten = greet(first, "silent", servers=told, run_id="late")
        clock.pass_until(forgotten, first, living=["r/0", "r/1"])
        assert {workers_of(first.control)[name].state for name in ("r/0", "r/1")} == {"alive"}
        start_server("--port", str(port), *SHORT)
        assert joining.result() == ["late", "late"]


@pytest.mark.extended
def test_one_server_that_stands_still_costs_no_lease_on_another(start_server_process):
    servers = start_servers(start_server_process, 2, *SHORT)
    told = addresses(servers)
    with session_of(told) as session:
        push(session)
        servers[1].signal(signal.SIGSTOP)
        try:
            forgotten = greet(servers[0], "silent", servers=told, run_id=session.run_id)
            wait_until(forgotten, what="the end of a silent worker's lease")
            assert workers_of(servers[0].control)["plain"].state == "alive"
            assert "worker=plain silent_seconds" not in servers[0].output()
        finally:
            servers[1].signal(signal.SIGCONT)


def test_a_worker_that_fails_to_join_leaves_where_it_was_greeted(start_server):
    server = start_server()
    told = f"{server.data},127.0.0.1:{server_port()}"
    with pytest.raises(ServerUnavailable):
        session_of(told, start_wait_seconds=0.5).connect()
    assert "ServerUnavailable" in left_with(server, "plain")


@pytest.mark.usefixtures("nobody_hangs")
@pytest.mark.parametrize("failing", [0, 1])
def test_failed_first_parameters_end_the_replica_and_free_the_turn(start_server, failing):
    told = addresses(start_servers(start_server, 2))

    def fail() -> Values:
        raise OSError("no such file: weights")

    def work(peers: ThreadPeers) -> Exception:
        session = session_of(told, peers, initial=fail if peers.index == failing else None)
        with pytest.raises((OSError, PypsError)) as caught:
            session.connect()
        return caught.value

    errors = on_all(Meeting("r", 2), work)
    assert (type(errors[failing]), str(errors[failing])) == (OSError, "no such file: weights")
    assert type(errors[1 - failing]) is ReplicaLost
    assert f"process {failing} of r failed (OSError: no such file: weights)" in str(errors[1 - failing])
    with session_of(told) as session:
        assert push(session) == 5


@pytest.mark.usefixtures("nobody_hangs")
def test_a_survivor_leaves_all_servers_as_soon_as_it_learns_of_the_loss(start_server):
    """Its main thread is away all the while, as amid a collective call."""
    servers = start_servers(start_server, 2, *QUICK)
    told = addresses(servers)
    sessions = on_all(Meeting("r", 2), lambda peers: session_of(told, peers).__enter__())
    try:
        sessions[1].close("failed", "out of memory")
        for server in servers:
            if "r/0" in workers_of(server.control):
                said = wait_until(lambda server=server: left_with(server, "r/0"), what="the survivor's leave")
                assert said.startswith("ReplicaLost: ") and "out of memory" in said
    finally:
        sessions[0].close("failed")


@pytest.mark.usefixtures("nobody_hangs")
def test_processes_that_meet_without_a_push_agree_on_the_runs_end(start_server):
    servers = start_servers(start_server, 2, "--stop-after", "updates=1", *QUICK)
    told = addresses(servers)

    def work(peers: ThreadPeers) -> int:
        with session_of(told, peers) as session:
            if peers.index == 0:
                with session_of(told) as other:
                    push(other)
            for meetings in range(1_000_000):
                session.meet()
                ended = peers.all_gather(session.finished)
                assert len(set(ended)) == 1
                if ended[0]:
                    return meetings
        raise AssertionError("the end of the run did not come")

    assert len(set(on_all(Meeting("r", 2), work))) == 1
