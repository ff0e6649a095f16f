"""How workers come into a run: the first initialises it, others join, strangers are refused in one sentence."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial

import numpy as np
import pytest

from client_support import (
    Clock,
    CuttingProxy,
    Reference,
    addresses,
    gradients_like,
    make_client,
    small_model,
    start_servers,
)
from pyps_client import (
    Client,
    Launch,
    LimitExceeded,
    ModelMismatch,
    NotAuthenticated,
    Observer,
    ProtocolMismatch,
    RunMismatch,
    ServerUnavailable,
    Superseded,
    UnsupportedOptimizer,
    WaitTimedOut,
)
from pyps_client.credentials import Credentials
from pyps_client.join import Initialization, InitializeLease
from pyps_client.lease import Lease
from pyps_client.transport.connection import Connection
from pyps_client.transport.grpc import GrpcChannel, open_channel
from pyps_wire.parameter_server_pb2 import HelloReply
from pyps_wire.partition import partition
from support import inspect, replace_file, server_port, wait_until, workers_of

# How long an initialiser may be silent is bounded by the lease.
SHORT_LEASE = ("--lease-seconds", "6", "--heartbeat-seconds", "0.3")

# A process that is elected, sends server 1 its part, then stands still before server 0 gets its own.
HALF_AN_INITIALISER = """
import sys, time
from client_support import make_client, small_model
from pyps_client.transport.grpc import GrpcChannel
from pyps_client.transport.connection import Connection
from pyps_client.join import Initialization

send_to = Initialization.send_to

def half(self, connection, channel):
    if connection.index == 0:
        print("halfway", flush=True)
        time.sleep(600)
    send_to(self, connection, channel)

Initialization.send_to = half
make_client(sys.argv[1], tensors=small_model(seed=1), worker_id="first")
"""


def test_racing_workers_initialise_once_see_the_same_bits_and_may_push_at_once(start_server):
    """Each has parameters of its own, and none a run's name."""
    servers = addresses(start_servers(start_server, 2))
    meeting, pulled = threading.Barrier(4), threading.Barrier(4)

    def work(worker: int) -> tuple[dict[str, np.ndarray], str]:
        meeting.wait(20)
        with make_client(servers, tensors=small_model(seed=worker), worker_id=f"w{worker}") as client:
            first = client.pull()
            pulled.wait(30)
            client.push(gradients_like(small_model(), worker))
            return first, client.session.run_id

    with ThreadPoolExecutor(4) as pool:
        pulls, run_ids = zip(*pool.map(work, range(4)), strict=True)

    assert sum(np.array_equal(pulls[0]["embed"], small_model(seed=worker)["embed"]) for worker in range(4)) == 1
    for other in pulls[1:]:
        for name, tensor in pulls[0].items():
            np.testing.assert_array_equal(other[name], tensor)
    assert len(set(run_ids)) == 1
    assert re.fullmatch("run-[0-9a-f]{8}", run_ids[0])


def test_another_worker_replaces_a_killed_initialiser(start_server, start_python):
    clock = Clock()
    started = [start_server("--lease-seconds", "10", clock=clock) for _ in range(2)]
    servers = addresses(started)
    first = start_python("-c", HALF_AN_INITIALISER, servers)
    first.wait_for_output("halfway")
    first.kill()

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(make_client, servers, tensors=small_model(seed=2), worker_id="second")
        clock.pass_until(joining.done, *started)
        with joining.result() as client:
            Reference(small_model(seed=2)).check(client.pull())


def test_an_outrun_initialiser_joins_the_others_run(start_server, monkeypatch):
    clock = Clock()
    started = start_servers(start_server, 2, *SHORT_LEASE, clock=clock)
    servers = addresses(started)
    send_to = Initialization.send_to
    others: list[object] = []

    def outrun(self: Initialization, connection: Connection, channel: GrpcChannel) -> None:
        if not others and connection.index == 0:
            others.append(None)
            # Its lease, which nobody renews, runs out; the election falls to another.
            monkeypatch.setattr(Initialization, "send_to", send_to)
            joining = partial(make_client, servers, tensors=small_model(seed=5), worker_id="worker-b")
            others.append(clock.during(joining, *started))
        send_to(self, connection, channel)

    monkeypatch.setattr(Initialization, "send_to", outrun)
    monkeypatch.setattr("pyps_client.join.InitializeLease._keep", lambda self: None)
    with make_client(servers, tensors=small_model(seed=4), worker_id="worker-a") as client:
        Reference(small_model(seed=5)).check(client.pull())
    others[1].close()  # type: ignore[attr-defined]


def test_an_elected_worker_renews_its_lease_before_it_ends():
    renewed = threading.Semaphore(0)

    def hello() -> HelloReply:
        renewed.release()
        return HelloReply(initialize=True, term=3)

    with InitializeLease(3, 0.3, hello) as lease:
        assert all(renewed.acquire(timeout=3.0) for _ in range(2))
        lease.check()


def test_a_worker_may_come_before_its_servers(start_server):
    port = server_port()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(make_client, f"127.0.0.1:{port}")
        start_server("--port", str(port))

        with early.result(60) as client:
            assert client.push(gradients_like(small_model(), 0))


def test_a_server_that_never_comes_is_named_with_the_seconds_waited():
    port = server_port()
    with pytest.raises(
        ServerUnavailable,
        match=rf"Waited \d+ s for server 0 \(127.0.0.1:{port}\): connection refused, nothing listens there. "
        r"Check that `pyps serve` runs there.*Raise start_wait_seconds \(PYPS_START_WAIT_SECONDS\)",
    ):
        make_client(f"127.0.0.1:{port}", start_wait_seconds=0.3)


def test_a_host_that_cannot_be_resolved_is_reported():
    with pytest.raises(ServerUnavailable, match="the host name cannot be resolved"):
        make_client("no-such-host.invalid:7610", start_wait_seconds=0.3)


def test_a_run_that_no_worker_initialises_is_reported(start_server):
    with pytest.raises(WaitTimedOut, match=r"for the first parameters on server 0 .*no worker has finished"):
        Observer(launch=Launch(start_server().data, start_wait_seconds=0.3))


def test_the_control_port_is_recognised(start_server):
    with pytest.raises(ProtocolMismatch, match=r"is no pyps data port.*by default 7610"):
        make_client(start_server().control)


def test_a_worker_that_does_not_fit_is_refused_with_the_difference(start_server):
    server = start_server()
    with make_client(server.data, run_id="mine") as client:
        client.push(gradients_like(small_model(), 0))
        for options, error, words in (
            (
                {"tensors": small_model() | {"layer": np.zeros((40, 59), np.float32)}},
                ModelMismatch,
                "layer.*40, 5?[90]",
            ),
            ({"run_id": ""}, RunMismatch, "holds run 'mine' at version 1.*names no run.*PYPS_RUN_ID=mine"),
            ({"optimizer": ("adagrad", {"momentum": 0.9})}, UnsupportedOptimizer, "momentum"),
        ):
            with pytest.raises(error, match=f"(?s){words}") as refused:
                make_client(server.data, **({"run_id": "mine", "worker_id": "second"} | options))
            assert server.data in str(refused.value)
    assert "Traceback" not in server.output()


def test_a_worker_takes_the_runs_slices_over_whatever_it_would_have_made(start_server):
    """A stock worker may slice and place as it likes: nobody computes tables from the number of servers."""
    servers = start_servers(start_server, 2)
    with make_client(addresses(servers), run_id="mine", shard_size=512) as first:
        first.push(gradients_like(small_model(), 0))
        plan = first.session.partition
        with make_client(addresses(servers), run_id="mine", worker_id="second", shard_size=4096) as second:
            assert second.session.partition == plan != partition(second.session.model, num_servers=2)
            second.push(gradients_like(small_model(), 1))
            mine, theirs = first.pull(), second.pull()
        with Observer(launch=Launch(addresses(servers), run_id="mine")) as observer:
            seen = observer.snapshot()
        with pytest.raises(ModelMismatch, match=r"list of servers has 2, .* caller's list has 1"):
            Observer(launch=Launch(servers[0].data, run_id="mine"))
    for name, values in mine.items():
        np.testing.assert_array_equal(values, theirs[name])
        np.testing.assert_array_equal(values, seen[name])


def test_a_missing_and_a_wrong_token_are_refused(start_server, tmp_path):
    token = tmp_path / "token"
    token.write_text("correct-horse\n", encoding="utf-8")
    server = start_server("--token-file", str(token))

    with pytest.raises(NotAuthenticated, match="wants a token: set PYPS_TOKEN_FILE"):
        make_client(server.data)
    with pytest.raises(NotAuthenticated, match="token is not this server's"):
        make_client(server.data, token="battery-staple")
    with make_client(server.data, token_file=token) as client:
        client.push(gradients_like(small_model(), 0))


def test_a_token_is_renewed_while_a_worker_trains(start_server, tmp_path):
    token = tmp_path / "token"
    token.write_text("the-former-token\n", encoding="utf-8")
    server = start_server("--token-file", str(token), "--heartbeat-seconds", "0.05")

    def gets_in(token: str) -> bool:
        with suppress(NotAuthenticated), make_client(server.data, token=token, run_id="r", worker_id="another"):
            return True
        return False

    with (
        closing(CuttingProxy(server.data)) as proxy,
        make_client(proxy.address, token_file=token, run_id="r", transport="grpc") as client,
    ):
        replace_file(token, "short")
        assert gets_in("the-former-token")
        assert "the token stays as it was" in server.output()
        for tokens, taken in (
            ("another-token\nthe-former-token\n", ["the-former-token", "another-token"]),
            ("another-token\n", ["another-token"]),
        ):
            replace_file(token, tokens)
            assert [each for each in ("the-former-token", "another-token") if gets_in(each)] == taken
            for _ in range(2):
                client.push(gradients_like(small_model(), 0))
                # The next push needs a connection of its own.
                proxy.cut()


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_a_leave_uses_the_newest_token(start_server, tmp_path, caplog, transport):
    token = tmp_path / "token"
    token.write_text("the-former-token\n", encoding="utf-8")
    server = start_server("--token-file", str(token))
    with make_client(server.data, token_file=token, run_id="r", transport=transport) as client:
        client.push(gradients_like(small_model(), 0))
        replace_file(token, "another-token")
    assert "worker left" in server.output() and "leave" not in caplog.text

    with make_client(server.data, token="another-token", run_id="r", transport=transport) as client:
        replace_file(token, "a-third-token")
    assert "does not take this worker's leave, and waits for its lease: the token is not" in caplog.text


def test_a_token_that_goes_to_another_machine_in_the_clear_is_said(caplog):
    for address, token, told in (
        ("127.0.0.1:7610", "a-token", 0),
        ("[::1]:7610", "a-token", 0),
        ("localhost:7610", "a-token", 0),
        ("192.0.2.1:7610", "", 0),
        ("192.0.2.1:7610", "a-token", 1),
        ("192.0.2.1:7610", "a-token", 1),
        ("elsewhere.example:7610", "a-token", 2),
    ):
        open_channel(address, Credentials(token=token), []).close()
        assert caplog.text.count("in the clear, and to whoever answers there: set tls_ca") == told, address


def test_a_worker_whose_token_is_removed_logs_it_once_and_trains_on(start_server, tmp_path, monkeypatch, caplog):
    refusals: list[Exception] = []
    monkeypatch.setattr(Lease, "_refused", lambda _, error: refusals.append(error))
    token = tmp_path / "token"
    token.write_text("the-former-token\n", encoding="utf-8")
    server = start_server("--token-file", str(token), "--heartbeat-seconds", "0.05")
    with make_client(server.data, token="the-former-token", transport="grpc") as client:
        client.exchange(gradients_like(small_model(), 0))
        replace_file(token, "another-token")
        wait_until(lambda: len(refusals) >= 3, what="heartbeats that are refused")
        client.exchange(gradients_like(small_model(), 1))
    assert caplog.text.count("refuses this worker's calls from now on: the token is not this server's") == 1


def test_a_newer_process_of_the_same_name_takes_over(start_server):
    server = start_server()
    older = make_client(server.data, run_id="mine")
    with make_client(server.data, run_id="mine") as newer:
        with pytest.raises(Superseded, match="worker"):
            older.push(gradients_like(small_model(), 0))
        newer.push(gradients_like(small_model(), 0))
    older.close()


@pytest.mark.parametrize("shard_size", [20_000, 200_000])
@pytest.mark.parametrize("narrow", [0, 1])
def test_a_model_beyond_the_message_limit_is_refused_first(start_server, shard_size, narrow):
    """Whether the server would have said so itself, or gRPC, in words of its own."""
    servers = [start_server(*(("--max-message-bytes", "65536") if index == narrow else ())) for index in range(2)]
    big = {"w": np.zeros(2 * shard_size, np.float32)}

    with pytest.raises(
        LimitExceeded,
        match=rf"^server {narrow} .* takes messages of 65536 bytes, a shard of this model needs "
        rf"{4 * shard_size + 4096}: raise its --max-message-bytes, or lower the model's shard_size \({shard_size}\)\.$",
    ):
        make_client(addresses(servers), tensors=big, shard_size=shard_size)

    for server in servers:
        status = inspect(server.control, "GetStatus")
        assert (status.run_id, status.num_shards) == ("", 0)
        assert status.tally.bytes_in < 10_000


def test_worker_0_founds_the_run_though_others_came_before_who_are_told_what_replaced_their_own(start_server, caplog):
    started = start_servers(start_server, 2)
    servers = addresses(started)
    caplog.set_level("INFO", "pyps.client")

    def join(index: int) -> Client:
        return make_client(
            servers, tensors=small_model(seed=index % 2), worker_id=f"worker-{index}", worker_index=index
        )

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(join, index) for index in (1, 2)]
        wait_until(lambda: len(workers_of(started[0].control)) == 2, what="two workers that wait")
        clients = [join(0), *(other.result(60) for other in others)]
    for client in clients:
        with client:
            Reference(small_model(seed=0)).check(client.pull())
    told = [record for record in caplog.records if "differ" in record.getMessage()]
    assert [record.getMessage() for record in told] == [
        f"this worker's own parameters differ from those of run {clients[0].session.run_id}, begun by worker-0, "
        "which replace them"
    ], "worker 2 has equal ones"


def test_another_worker_founds_the_run_where_worker_0_does_not_come(start_server, caplog):
    server = start_server()
    with make_client(server.data, worker_id="worker-3", worker_index=3, start_wait_seconds=8) as client:
        Reference(small_model()).check(client.pull())
    assert "worker 0 sent no parameters (it has not come, or ended): the run begins with those of wo" in caplog.text
    with make_client(server.data, tensors=small_model(seed=1), worker_id="worker-0", worker_index=0):
        [told] = [record for record in caplog.records if "differ" in record.getMessage()]
    assert (told.levelname, told.args) == ("WARNING", (client.session.run_id, "begun by worker-3"))
