"""`pyps set` and what `pyps status` shows of it, against real servers, as a user types them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from client_support import addresses, gradients_like, make_client, small_model, start_servers
from inspection import inspect
from support import PythonProcess, ServerThread
from wire_worker import WireWorker

Start = Callable[..., ServerThread]
Shell = Callable[..., str]


@pytest.fixture
def shell(start_python: Callable[..., PythonProcess]) -> Shell:
    """Runs a `pyps` command to its end and gives its output, on one line."""

    def run(*arguments: str, status: int = 0, **environment: str) -> str:
        process = start_python("-m", "pyps", *arguments, env=environment)
        assert process.wait() == status, process.output()
        assert "Traceback" not in process.output()
        return process.output()

    return run


def controls(servers: list[ServerThread]) -> str:
    return ",".join(server.control for server in servers)


def test_set_changes_all_servers_named_and_says_what_is_in_force(start_server: Start, shell: Shell) -> None:
    servers = start_servers(start_server, 2)
    changes = ("--protocol", "1-softsync", "--staleness", "none", "--learning-rate", "0.01")
    with make_client(addresses(servers)) as client:
        client.push(gradients_like(small_model(), seed=1))
        output = shell("set", *changes, "--schedule", "step:every=10,factor=0.5", PYPS_CONTROL=controls(servers))
        client.push(gradients_like(small_model(), seed=2))
    in_force = "softsync:n=1, staleness none, learning rate 0.01, schedule step:every=10,factor=0.5."
    assert output.splitlines() == [f"{server.control}: {in_force}" for server in servers]
    shown = shell("status", "--servers", controls(servers))
    assert shown.count("softsync:n=1, none, adagrad") == 2
    assert "step:every=10,factor=0.5" in shown and "0.01" in shown
    assert shown.count("settings changed") == 2
    told = json.loads(shell("status", "--json", "--events", "1000", "--servers", controls(servers)))
    for server in told["servers"]:
        assert [event["kind"] for event in server["events"]].count("configured") == 1
        assert server["status"]["learningRates"][0]["base"] == 0.01
    assert shell("status", "--events", "0", "--servers", controls(servers)).count("settings changed") == 0


def test_set_tells_what_became_of_gradients_that_waited(start_server: Start, shell: Shell) -> None:
    server = start_server("--protocol", "hardsync", "--expected-workers", "2")
    with WireWorker(server.data) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
        waiting = shell("status", "--servers", server.control)
        output = shell("set", "--protocol", "async", "--servers", server.control)
    assert "1: a; 1 still to come" in waiting and "waiting gradients" in waiting
    assert "async, staleness divide, learning rate 1; 1 gradient that waited became 1 update." in output


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "nothing was named to set: give --protocol, --staleness, --learning-rate, --schedule or"),
        (("--staleness", "sometimes"), 1, "'sometimes' is unknown; expected one of"),
        (("--protocol", "softsync:n=0"), 1, "softsync"),
        (("--learning-rate", "nan"), 1, "learning_rate is nan"),
        (("--learning-rate", "fast"), 2, "Invalid value for '--learning-rate'"),
    ],
)
def test_what_cannot_be_set_is_one_sentence(
    start_server: Start, shell: Shell, arguments: tuple[str, ...], status: int, message: str
) -> None:
    server = start_server()
    with WireWorker(server.data) as worker:
        worker.join()
        assert message in shell("set", "--servers", server.control, *arguments, status=status)
        assert inspect(server.control, "GetStatus").staleness == "divide"


def test_set_without_a_run_is_one_sentence(start_server: Start, shell: Shell) -> None:
    refused = shell("set", "--protocol", "async", "--servers", start_server().control, status=1)
    assert "this server holds no run yet: start its workers first" in refused


def test_set_on_some_of_the_servers_changes_nothing_unless_it_is_meant(start_server: Start, shell: Shell) -> None:
    servers = start_servers(start_server, 2)
    change = ("set", "--protocol", "softsync:n=1", "--servers", servers[0].control)
    with make_client(addresses(servers)) as client:
        client.push(gradients_like(small_model(), seed=1))
        refused = shell(*change, status=1)
        untouched = inspect(servers[0].control, "GetStatus").protocol
        shell(*change, "--partial")
        changed = inspect(servers[0].control, "GetStatus").protocol
    assert "nothing was set, as the run has 2 servers: server 1 of 2 was not asked" in refused
    assert (untouched, changed) == ("async", "softsync:n=1")


def test_set_after_the_workers_warns_for_those_known_and_after_the_run_is_refused(
    start_server: Start, shell: Shell
) -> None:
    server = start_server()
    with WireWorker(server.data) as worker:
        worker.join()
        worker.push(worker.push_request(1.0))
        worker.leave()
    change = ("set", "--protocol", "backup:b=9", "--servers", server.control)
    assert "warns: backup:b=9 with 1 worker leaves nobody to wait for" in shell(*change)
    events = [event.message for event in inspect(server.control, "ListEvents").events if event.kind == "configured"]
    assert events == ["settings changed: protocol backup:b=9"]
    shell("stop", "--servers", server.control)
    assert "the run has finished: nothing in it can be set any more" in shell(*change, status=1)


def test_status_tells_whom_a_round_waits_for(start_server: Start, shell: Shell) -> None:
    server = start_server("--protocol", "hardsync")
    with WireWorker(server.data, "quick") as quick, WireWorker(server.data, "slow") as slow:
        for worker in (quick, slow):
            worker.join()
        version = quick.push(quick.push_request(1.0))[0].version_after
        # From here on both count.
        slow.push(slow.push_request(1.0, base_version=version))
        quick.push(quick.push_request(1.0, base_version=version))
        quick.push(quick.push_request(1.0, base_version=version + 1))
        shard = inspect(server.control, "ListShards").shards[0]
        assert list(shard.waiting_for) == ["slow"]
        shown = shell("status", "--servers", server.control)
    assert "2: quick, slow" in shown
    assert f"{server.control} its round waits for the gradients of slow" in shown
    assert "worker joined" in shown
