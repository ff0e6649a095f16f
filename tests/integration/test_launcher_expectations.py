"""How many workers servers expect once a replica has ended for good, and whether it is said to have joined."""

import pytest

from pyps.cli.run import Expectations
from replicas import CUT
from support import inspect
from wire_worker import WireWorker


@pytest.fixture
def servers(start_server):
    return [start_server("--run-id", "run-1", "--expected-workers", "2", "--protocol", "hardsync") for _ in range(2)]


def lower(servers, key=""):
    return Expectations(2).lower("replica-0", [server.control for server in servers], key=key)


def missing(servers):
    return [inspect(server.control, "GetStatus").workers_missing for server in servers]


def test_a_replica_that_one_server_saw_did_join(servers):
    with WireWorker(servers[0].data, "replica-0/0", model=CUT, num_servers=2) as process:
        process.hello(replica="replica-0", parts=[0])

        assert not lower(servers, key=process.sender.secret.decode())

    # The server that saw the replica got its Leave; the other one expects one worker fewer.
    assert missing(servers) == [1, 1]
    assert {info.state for info in inspect(servers[0].control, "ListWorkers").workers} == {"failed"}


def test_a_replica_that_no_server_saw_never_joined(servers):
    assert lower(servers)

    assert missing(servers) == [1, 1]


def test_a_server_that_began_again_expects_nobody_who_had_ended_before(servers):
    expectations = Expectations(2)
    for index, server in enumerate(servers):
        expectations.lower(f"replica-{index}", [server.control], key="")

    assert missing(servers) == [1, 0]


def test_a_server_that_does_not_answer_is_left_out(servers):
    servers[0].stop()
    assert lower(servers)

    servers[1].stop()
    assert not lower(servers)
