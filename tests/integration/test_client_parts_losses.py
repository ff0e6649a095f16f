"""Several processes as one worker lose a server or one of themselves, and come back.

The processes are threads here, with a session and connections of their own each; the servers are real.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from client_parts import (
    QUICK,
    assert_equal,
    error_of,
    moved,
    ones,
    pulled,
    session_of,
    snapshot,
    zeros_of,
)
from client_support import addresses, start_servers
from cut_model import vectors_of
from peer_threads import Meeting, ThreadPeers, on_all
from pyps.launcher.ports import free_port
from pyps_client import Session, Superseded, lost_replica
from pyps_wire.errors import ReplicaLost
from support import ServerThread, wait_until

Start = Callable[..., ServerThread]


@pytest.fixture(autouse=True)
def nobody_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of a lost replica end by themselves: the process, which is pytest's, is not to be ended for them."""
    monkeypatch.setattr(lost_replica, "GRACE_SECONDS", 3600.0)


def test_a_server_comes_back_from_its_checkpoint_and_both_processes_go_on(start_server: Start, tmp_path: Path) -> None:
    ports = [free_port(), free_port()]

    def start(index: int, *flags: str) -> ServerThread:
        folder = str(tmp_path / f"server-{index}")
        return start_server("--port", str(ports[index]), "--checkpoint-dir", folder, *QUICK, *flags)

    servers = [start(0), start(1)]
    told = addresses(servers)

    def restart() -> None:
        for index in (0, 1):
            servers[index].stop()
            start(index, "--resume")

    def work(peers: ThreadPeers) -> None:
        with session_of(told, peers) as session:
            parameters = pulled(session)
            session.exchange(ones(session), parameters)
            peers.gather("before")
            if peers.index == 0:
                restart()
            peers.gather("after")
            # The first push after a restore may be refused as one of another epoch; then all processes pull.
            for _ in range(10):
                receipts = session.exchange(ones(session), parameters)
                taken = peers.total([float(all(receipt.version_after == 2 for receipt in receipts))])[0]
                if session.pull_needed:
                    session.pull(parameters)
                if taken == 2:
                    break
            np.testing.assert_allclose(parameters[0], vectors_of(moved(-2.0))[peers.index], rtol=1e-6, atol=1e-6)

    on_all(Meeting("r", 2), work)
    assert_equal(snapshot(told), moved(-2.0))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_whose_sibling_failed_learns_of_it_by_its_next_call(start_server: Start, failing: int) -> None:
    """Process 1 pushes and pulls on server 1 alone, which knows nothing of process 0: its heartbeat brings the news."""
    servers = start_servers(start_server, 2, *QUICK)
    told = addresses(servers)
    meeting = Meeting("r", 2)

    def work(peers: ThreadPeers) -> str:
        session = session_of(told, peers)
        session.connect()
        parameters = pulled(session)
        peers.gather("joined")
        if peers.index == failing:
            session.close("failed", "out of memory")
            return ""

        def lost() -> bool:
            try:
                session.pull(parameters, wait_seconds=0)
            except ReplicaLost:
                return True
            return False

        wait_until(lost, what="the news of the lost process")
        error = error_of(lambda: session.push(ones(session)))
        session.close("failed", str(error))
        return str(error)

    said = on_all(meeting, work)[1 - failing]
    assert f"'r/{failing}'" in said and "out of memory" in said
    # The other replica's way is free.
    with session_of(told) as session:
        assert len(session.exchange(ones(session), pulled(session))) == 5


def test_a_later_life_of_a_replica_takes_over_as_a_whole(start_server: Start) -> None:
    servers = start_servers(start_server, 2, *QUICK)
    told = addresses(servers)
    old = on_all(Meeting("r", 2), lambda peers: session_of(told, peers).__enter__())

    def work(peers: ThreadPeers) -> int:
        with session_of(told, peers) as session:
            parameters = pulled(session)
            # Of one part or the other: a later life of one process is one of all.
            wait_until(lambda: is_out(old[peers.index]), what="the end of the older life")
            peers.gather("alone")
            return len(session.exchange(ones(session), parameters))

    try:
        assert on_all(Meeting("r", 2), work) == [3, 2]
    finally:
        for session in old:
            session.close("failed")
    assert_equal(snapshot(told), moved(-1.0))


def is_out(session: Session) -> bool:
    """Whether a session has learned that it is of a life that is over."""
    try:
        session.pull(zeros_of(session), wait_seconds=0)
    except (Superseded, ReplicaLost):
        return True
    return False
