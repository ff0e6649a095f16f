"""What servers are told of a replica that ended for good, and whether people hear that it never joined."""

from pyps.cli.run import Expectations
from pyps_wire import inspector_pb2 as pb
from replicas import CUT
from support import ServerThread, Start, inspect
from wire_worker import WireWorker

NUM_SERVERS = 2


def start_servers(start_server: Start) -> list[ServerThread]:
    flags = ("--run-id", "run-1", "--expected-workers", "2", "--protocol", "hardsync")
    return [start_server(*flags) for _ in range(NUM_SERVERS)]


def missing(server: ServerThread) -> int:
    reply: pb.Status = inspect(server.control, "GetStatus")
    return reply.workers_missing


def test_a_replica_that_one_server_saw_did_join(start_server):
    servers = start_servers(start_server)
    expectations = Expectations(2)
    process = WireWorker(servers[0].data, "replica-0/0", model=CUT, num_servers=NUM_SERVERS)
    with process:
        process.hello(replica="replica-0", parts=[0])

        key = process.sender.secret.decode()
        assert not expectations.lower("replica-0", [server.control for server in servers], key=key)

    # The one that saw it was told that it is gone, the other one to expect one fewer.
    assert [missing(server) for server in servers] == [1, 1]
    assert {info.state for info in inspect(servers[0].control, "ListWorkers").workers} == {"failed"}


def test_a_replica_that_no_server_saw_never_joined(start_server):
    servers = start_servers(start_server)
    expectations = Expectations(2)
    addresses = [server.control for server in servers]

    assert expectations.lower("replica-0", addresses, key="")

    assert [missing(server) for server in servers] == [1, 1]


def test_servers_that_are_gone_have_nothing_to_say_of_it(start_server):
    servers = start_servers(start_server)
    addresses = [server.control for server in servers]
    servers[0].stop()

    assert Expectations(2).lower("replica-0", addresses, key="")

    servers[1].stop()
    assert not Expectations(2).lower("replica-0", addresses, key="")
