"""`pyps bench` against real servers: it measures, leaves nothing behind, and never touches what is somebody's."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from client_support import addresses, gradients_like, make_client, small_model, start_servers
from inspection import inspect
from pyps.cli.rounds import OPTIMIZER
from pyps_wire import common_pb2 as common
from pyps_wire.partition import Model, Tensor
from support import PythonProcess, ServerProcess, child_environment, wait_until
from wire_worker import WireWorker

Start = Callable[..., ServerProcess]
StartPython = Callable[..., PythonProcess]

QUICK = ("--parameters", "70000", "--seconds", "0.1")


def run_bench(start_python: StartPython, servers: str, *flags: str, status: int = 0) -> str:
    """The output of `pyps bench` on these servers."""
    process = start_python("-m", "pyps", "bench", "--servers", servers, *QUICK, *flags)
    assert process.wait() == status, process.output()
    assert "Traceback" not in process.output()
    return process.output()


def json_of(output: str) -> list[dict[str, Any]]:
    """What stands between the lines of progress and what is said last."""
    measured: list[dict[str, Any]]
    measured, _ = json.JSONDecoder().raw_decode(output[output.index("[\n") :])
    return measured


def state_of(server: ServerProcess) -> tuple[int, str]:
    status = inspect(server.control, "GetStatus")
    return status.state, status.run_id


def test_bench_measures_each_way_and_leaves_the_servers_empty(
    start_server_process: Start, start_python: StartPython, tmp_path: Path
) -> None:
    flags = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--exit-when-done", "--checkpoint-seconds", "0.2")
    servers = [start_server_process(*flags[:1], f"{flags[1]}-{index}", *flags[2:]) for index in range(2)]

    measured = json_of(run_bench(start_python, addresses(servers), "--json"))

    ways = {(line["transport"], line["codec"]) for line in measured}
    assert ways == {("shm", "float32"), ("grpc", "float32"), ("grpc", "bfloat16")}
    for line in measured:
        assert line["parameters"] == 70000 and line["rounds"] >= 3
        assert line["rounds_per_second"] > 0 and 0 < line["p50_seconds"] <= line["p99_seconds"]
        size = {"float32": 4, "bfloat16": 2}[line["codec"]]
        assert line["bytes_per_second_each_way"] == pytest.approx(line["rounds_per_second"] * 70000 * size)
    assert {state_of(server) for server in servers} == {(common.RUN_STATE_EMPTY, "")}
    assert not list(tmp_path.glob("*/checkpoint-*")), "nothing of a measurement is kept"
    # The next job finds servers as they were.
    table = run_bench(start_python, ",".join(server.control for server in servers))
    assert "gRPC" in table and "bfloat16" in table
    with make_client(addresses(servers), run_id="mine") as client:
        client.push(gradients_like(small_model(), seed=1))
    for server in servers:
        assert server.wait() == 0


def test_bench_refuses_a_server_that_holds_a_run_and_leaves_it_alone(
    start_server_process: Start, start_python: StartPython
) -> None:
    servers = start_servers(start_server_process, 2)
    with make_client(servers[0].data, run_id="mine") as client:
        client.push(gradients_like(small_model(), seed=1))
        before = inspect(servers[0].control, "ListShards")
        refused = run_bench(start_python, f"{servers[1].data},{servers[0].data}", status=1)
        assert inspect(servers[0].control, "ListShards") == before
        assert {worker.worker_id for worker in inspect(servers[0].control, "ListWorkers").workers} == {"worker"}
    assert f"{servers[0].data} holds run 'mine', which must not be disturbed" in refused
    assert state_of(servers[1]) == (common.RUN_STATE_EMPTY, "")


def test_bench_refuses_a_server_that_waits_for_a_job(start_server_process: Start, start_python: StartPython) -> None:
    server = start_server_process("--run-id", "digits")
    assert f"{server.data} waits for run 'digits'" in run_bench(start_python, server.data, status=1)


def test_a_measurement_that_was_killed_is_forgotten(start_server_process: Start, start_python: StartPython) -> None:
    server = start_server_process("--lease-seconds", "1", "--heartbeat-seconds", "0.3")
    endless = start_python("-m", "pyps", "bench", "--servers", server.data, "--parameters", "1000", "--seconds", "600")
    wait_until(lambda: inspect(server.control, "GetStatus").updates > 0, what="the first round")
    endless.kill()
    wait_until(lambda: state_of(server) == (common.RUN_STATE_EMPTY, ""), what="an empty server")


def test_each_stage_is_a_line_where_nobody_watches(start_server_process: Start, start_python: StartPython) -> None:
    output = run_bench(start_python, start_server_process().data)
    stages = [line for line in output.splitlines() if line.endswith(" ...")]
    assert stages == [
        "1 of 3: 70,000 parameters, auto, float32 ...",
        "2 of 3: 70,000 parameters, grpc, float32 ...",
        "3 of 3: 70,000 parameters, grpc, bfloat16 ...",
    ]


def test_a_terminal_shows_how_far_it_is(start_server_process: Start) -> None:
    server = start_server_process()
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "pyps", "bench", "--servers", server.data, "--parameters", "1000"]
    environment = child_environment({"TERM": "xterm", "COLUMNS": "120"})
    with subprocess.Popen([*command, "--seconds", "1.5"], stdout=PIPE, stderr=end, env=environment) as process:
        os.close(end)
        shown = b"".join(iter(lambda: read_of(terminal), b"")).decode()
        assert process.stdout is not None
        table = process.stdout.read().decode()
    os.close(terminal)
    assert process.returncode == 0, shown
    assert "1 of 3: 1,000 parameters, auto, float32" in shown
    assert re.search(r"[\d,]+ rounds, p50 [\d.,]+ ms", shown)
    assert "bfloat16" in table and "p50 ms" in table and "of 3" not in table


def read_of(terminal: int) -> bytes:
    """What comes next; nothing once the last process has closed the terminal."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_ctrl_c_ends_with_what_was_measured(
    start_server_process: Start, start_python: StartPython, flags: tuple[str, ...]
) -> None:
    server = start_server_process()
    endless = start_python(
        *("-m", "pyps", "bench", "--servers", server.data, "--parameters", "1000", "--seconds", "600", *flags)
    )
    wait_until(lambda: inspect(server.control, "GetStatus").updates > 10, what="some rounds")
    endless.signal(signal.SIGINT)
    assert endless.wait() == 130
    output = endless.output()
    assert "pyps: interrupted; what follows is what was measured so far" in output
    assert "Traceback" not in output and "Aborted" not in output
    if flags:
        [line] = json_of(output)
        assert line["rounds"] > 5 and line["transport"] == "shm" and line["p50_seconds"] > 0
    else:
        assert "shared memory" in output and "p50 ms" in output
    assert state_of(server) == (common.RUN_STATE_EMPTY, "")


@contextmanager
def holding(server: ServerProcess) -> Iterator[None]:
    """Keeps the server from forgetting the run of a measurement, by a worker of its own in it."""
    status = inspect(server.control, "GetStatus")
    model = Model((Tensor("bench", (1000,)),))
    with WireWorker(server.data, run_id=status.run_id, model=model, optimizer=OPTIMIZER) as worker:
        worker.hello()
        yield


def wait_for_updates(server: ServerProcess) -> None:
    wait_until(lambda: inspect(server.control, "GetStatus").updates > 10, what="some rounds")


def wait_for_the_benchs_end(server: ServerProcess) -> None:
    """Waits until none but the one who holds the run is left in it."""
    wait_until(lambda: inspect(server.control, "GetStatus").workers_alive == 1, what="the bench's end")


def test_ctrl_c_while_servers_forget_leaves_what_was_measured(
    start_server_process: Start, start_python: StartPython
) -> None:
    server = start_server_process("--lease-seconds", "100")
    process = start_python(
        *("-m", "pyps", "bench", "--servers", server.data, "--parameters", "1000", "--seconds", "1", "--json")
    )
    wait_for_updates(server)
    with holding(server):
        process.wait_for_output("3 of 3")
        wait_for_the_benchs_end(server)
        process.signal(signal.SIGINT)
        assert process.wait() == 130
    output = process.output()
    assert "pyps: interrupted; what follows is what was measured so far" in output
    assert "Traceback" not in output and "Aborted" not in output
    assert [line["codec"] for line in json_of(output)] == ["float32", "float32", "bfloat16"]


def test_a_second_ctrl_c_leaves_what_was_measured(start_server_process: Start, start_python: StartPython) -> None:
    server = start_server_process("--lease-seconds", "100")
    process = start_python("-m", "pyps", "bench", "--servers", server.data, "--parameters", "1000", "--seconds", "600")
    wait_for_updates(server)
    with holding(server):
        process.signal(signal.SIGINT)
        wait_for_the_benchs_end(server)
        process.signal(signal.SIGINT)
        assert process.wait() == 130
    output = process.output()
    assert "pyps: interrupted; what follows is what was measured so far" in output
    assert "Traceback" not in output and "Aborted" not in output
    assert "shared memory" in output and "p50 ms" in output


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_an_error_leaves_what_was_measured(
    start_server_process: Start, start_python: StartPython, flags: tuple[str, ...]
) -> None:
    server = start_server_process()
    process = start_python(
        *("-m", "pyps", "bench", "--servers", server.data, "--parameters", "1000", "--seconds", "3", *flags)
    )
    process.wait_for_output("3 of 3")
    server.kill()
    assert process.wait() == 1
    output = process.output()
    assert "Traceback" not in output and "interrupted" not in output
    if flags:
        ways = [(line["transport"], line["codec"]) for line in json_of(output)]
        assert ways[:2] == [("shm", "float32"), ("grpc", "float32")]
    else:
        assert "shared memory" in output and "gRPC" in output
    error = output.splitlines()[-1]
    assert error.startswith("pyps: Waited 10 s") and server.data in error


@pytest.mark.parametrize("protocol", ["hardsync", "serial", "ssp:s=1", "asgd:mutex=whole", "softsync:n=1"])
def test_bench_goes_by_the_protocol_of_the_servers(
    start_server_process: Start, start_python: StartPython, protocol: str
) -> None:
    server = start_server_process("--protocol", protocol)
    assert "bfloat16" in run_bench(start_python, server.data)


def test_a_run_that_people_named_is_never_taken_for_a_measurement(start_server_process: Start) -> None:
    server = start_server_process()
    with make_client(server.data, run_id="pyps-bench-mine") as client:
        client.push(gradients_like(small_model(), seed=1))
    wait_until(lambda: not inspect(server.control, "GetStatus").workers_alive, what="the worker's end")
    assert "pyps-bench-mine" in server.output()
    with make_client(server.data, run_id="pyps-bench-mine") as client:
        assert client.global_step == 1
