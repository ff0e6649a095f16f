"""`pyps bench` against real servers: it measures, leaves them empty, and refuses servers that are in use."""

import json
import signal
from typing import Any

import pytest

from client_support import addresses, gradients_like, make_client, small_model, start_servers
from pyps.cli.bench import OPTIMIZER
from pyps_wire import common_pb2 as common
from pyps_wire.codecs import codec_of
from pyps_wire.partition import Model, Tensor
from support import AnyServer, PythonProcess, StartPython, inspect, wait_until
from wire_worker import QUICK_LEASES, WireWorker

# One thousand parameters, for so many seconds a line.
BENCH = ("-m", "pyps", "bench", "--parameters", "1000", "--seconds")
QUICK = ("--parameters", "70000", "--seconds", "0.1")


def run_bench(start_python: StartPython, servers: str, *flags: str, status: int = 0) -> str:
    process = start_python("-m", "pyps", "bench", "--servers", servers, *QUICK, *flags)
    assert process.wait() == status, process.output()
    assert "Traceback" not in process.output()
    return process.output()


def json_of(output: str) -> list[dict[str, Any]]:
    """Return the JSON list after the lines of progress."""
    measured: list[dict[str, Any]]
    measured, _ = json.JSONDecoder().raw_decode(output[output.index("[\n") :])
    return measured


def state_of(server: AnyServer) -> tuple[int, str]:
    status = inspect(server.control, "GetStatus")
    return status.state, status.run_id


def test_bench_leaves_the_servers_empty(start_server, start_python, tmp_path):
    flags = ("--exit-when", "gone", "--checkpoint-seconds", "0.2", "--checkpoint-dir")
    servers = [start_server(*flags, str(tmp_path / f"checkpoints-{index}")) for index in range(2)]

    output = run_bench(start_python, addresses(servers), "--json", "--codec", "int8", "--codec", "onebit")

    stages = [line for line in output.splitlines() if line.endswith(" ...")]
    assert stages == [
        "1 of 5: 70,000 parameters, auto, float32 ...",
        "2 of 5: 70,000 parameters, grpc, float32 ...",
        "3 of 5: 70,000 parameters, grpc, bfloat16 ...",
        "4 of 5: 70,000 parameters, grpc, int8 ...",
        "5 of 5: 70,000 parameters, grpc, onebit ...",
    ]
    measured = json_of(output)
    assert {(line["transport"], line["codec"]) for line in measured} == {
        ("shm", "float32"),
        ("grpc", "float32"),
        ("grpc", "bfloat16"),
        ("grpc", "int8"),
        ("grpc", "onebit"),
    }
    for line in measured:
        assert line["parameters"] == 70000 and line["rounds"] >= 3
        assert line["rounds_per_second"] > 0 and 0 < line["p50_seconds"] <= line["p99_seconds"]
        size = codec_of(line["codec"]).max_bytes(70000)
        assert line["bytes_per_second_each_way"] == pytest.approx(line["rounds_per_second"] * size)
    assert {state_of(server) for server in servers} == {(common.RUN_STATE_EMPTY, "")}
    assert not list(tmp_path.glob("*/checkpoint-*")), "nothing of a measurement is kept"
    with make_client(addresses(servers), run_id="mine") as client:
        client.push(gradients_like(small_model(), seed=1))
    for server in servers:
        assert server.wait() == 0


def test_bench_lists_the_codecs_that_gradients_go_in(start_python):
    # In a process: the command ignores Ctrl-C when it ends.
    output = run_bench(start_python, "127.0.0.1:1", "--codec", "delta", status=1)
    assert "the flag --codec is 'delta'; expected one of float32, " in " ".join(output.split())


def test_bench_refuses_servers_that_are_in_use(start_server, start_python):
    servers = start_servers(start_server, 2)
    promised = start_server("--run-id", "digits")
    assert f"{promised.data} waits for run 'digits'" in run_bench(start_python, promised.data, status=1)
    with make_client(servers[0].data, run_id="mine") as client:
        client.push(gradients_like(small_model(), seed=1))
        before = inspect(servers[0].control, "ListShards")
        refused = run_bench(start_python, f"{servers[1].data},{servers[0].data}", status=1)
        assert inspect(servers[0].control, "ListShards") == before
        assert {worker.worker_id for worker in inspect(servers[0].control, "ListWorkers").workers} == {"worker"}
    assert f"{servers[0].data} holds run 'mine', which must not be disturbed" in refused
    assert state_of(servers[1]) == (common.RUN_STATE_EMPTY, "")


@pytest.mark.extended
def test_a_measurement_that_was_killed_is_forgotten(start_server, start_python):
    server = start_server(*QUICK_LEASES)
    endless = start_python(*BENCH, "600", "--servers", server.data)
    wait_for_updates(server)
    endless.kill()
    wait_until(lambda: state_of(server) == (common.RUN_STATE_EMPTY, ""), what="an empty server")


@pytest.mark.extended
def test_ctrl_c_ends_with_what_was_measured(start_server, start_python):
    server = start_server()
    endless = start_python(*BENCH, "600", "--servers", server.data, "--json")
    wait_for_updates(server)
    endless.signal(signal.SIGINT)
    [line] = json_of(interrupted(endless))
    assert line["rounds"] > 5 and line["transport"] == "shm" and line["p50_seconds"] > 0
    assert state_of(server) == (common.RUN_STATE_EMPTY, "")


def interrupted(process: PythonProcess) -> str:
    assert process.wait() == 130
    output = process.output()
    assert "pyps: interrupted; what follows is what was measured so far" in output
    assert "Traceback" not in output and "Aborted" not in output
    return output


def wait_for_updates(server: AnyServer) -> None:
    wait_until(lambda: inspect(server.control, "GetStatus").tally.updates > 10, what="some rounds")


@pytest.mark.extended
def test_a_second_ctrl_c_leaves_what_was_measured(start_server, start_python):
    server = start_server("--lease-seconds", "100")
    process = start_python(*BENCH, "600", "--servers", server.data)
    wait_for_updates(server)
    # With another worker in it the server does not forget the run.
    run_id, model = inspect(server.control, "GetStatus").run_id, Model((Tensor("bench", (1000,)),))
    with WireWorker(server.data, run_id=run_id, model=model, optimizer=OPTIMIZER) as worker:
        worker.hello()
        process.signal(signal.SIGINT)
        wait_until(lambda: inspect(server.control, "GetStatus").workers_alive == 1, what="the bench's end")
        process.signal(signal.SIGINT)
        output = interrupted(process)
    assert "shared memory" in output and "p50 ms" in output


@pytest.mark.extended
def test_an_error_leaves_what_was_measured(start_server_process, start_python):
    server = start_server_process()
    process = start_python(*BENCH, "3", "--servers", server.data, "--json")
    process.wait_for_output("3 of 3")
    server.kill()
    assert process.wait() == 1
    output = process.output()
    assert "Traceback" not in output and "interrupted" not in output
    error = output.splitlines()[-1]
    assert error.startswith("pyps: Waited 10 s") and server.data in error
    setups = [(line["transport"], line["codec"]) for line in json_of(output)]
    assert setups[:2] == [("shm", "float32"), ("grpc", "float32")]


@pytest.mark.extended
def test_bench_goes_by_the_protocol_of_the_servers(start_server, start_python):
    for protocol in ("hardsync", "serial", "ssp:s=1", "asgd:mutex=whole", "softsync:n=1"):
        table = run_bench(start_python, start_server("--protocol", protocol).data)
        assert "gRPC" in table and "bfloat16" in table, protocol


def test_a_run_that_people_named_is_never_taken_for_a_measurement(start_server):
    server = start_server()
    with make_client(server.data, run_id="pyps-bench-mine") as client:
        client.push(gradients_like(small_model(), seed=1))
    wait_until(lambda: not inspect(server.control, "GetStatus").workers_alive, what="the worker's end")
    assert "pyps-bench-mine" in server.output()
    with make_client(server.data, run_id="pyps-bench-mine") as client:
        assert client.global_step == 1
