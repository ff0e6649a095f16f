"""The environment of a worker, the ports that the launcher finds, and the lines of servers that it shows."""

import io
import logging
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from pyps import logs
from pyps.cli.run import PrefixedOutput
from pyps.launcher import job
from pyps.launcher.environment import START_SECONDS, Group, visible_gpus, worker_environment
from support import ROOT

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-11111111-2222-3333-4444-555555555555)
  MIG 1g.18gb Device 0: (UUID: MIG-66666666-7777-8888-9999-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-21111111-2222-3333-4444-555555555555)
"""


def environment_of(
    index: int = 0, count: int = 4, gpus: tuple[str, ...] = (), group: Group | None = None, **inherited: str
) -> dict[str, str]:
    return worker_environment(
        inherited,
        index=index,
        count=count,
        data_addresses=["127.0.0.1:1", "127.0.0.1:2"],
        control_addresses=["127.0.0.1:3", "127.0.0.1:4"],
        run_id="run-1",
        gpus=gpus,
        group=group,
    )


def test_a_worker_gets_its_servers_run_and_place_and_no_variable_of_torch_distributed():
    environment = environment_of(index=2)

    assert {name: value for name, value in environment.items() if re.match("PYPS|RANK|WORLD|LOCAL|MASTER", name)} == {
        "PYPS_SERVERS": "127.0.0.1:1,127.0.0.1:2",
        "PYPS_CONTROL": "127.0.0.1:3,127.0.0.1:4",
        "PYPS_RUN_ID": "run-1",
        "PYPS_WORKER_ID": "worker-2",
        "PYPS_WORKER_INDEX": "2",
        "PYPS_WORKER_COUNT": "4",
        "PYPS_WORKER_KEY": "",
        "PYPS_PROCESS_HOOKS": "1",
    }
    assert environment_of(PYPS_PROCESS_HOOKS="0")["PYPS_PROCESS_HOOKS"] == "0"


def test_a_process_of_a_replica_finds_the_others_as_under_torchrun():
    environment = environment_of(index=1, count=2, group=Group(rank=2, size=3, master_port=23456), RANK="7")

    assert {
        "PYPS_WORKER_ID": "replica-1",
        "PYPS_WORKER_INDEX": "1",
        "PYPS_WORKER_COUNT": "2",
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "23456",
        "GLOO_SOCKET_IFNAME": "lo",
    }.items() <= environment.items()


def test_a_group_of_one_process_is_a_worker_alone_in_torch_distributed():
    environment = environment_of(index=3, group=Group(rank=0, size=1, master_port=23456))

    assert {"PYPS_WORKER_ID": "worker-3", "RANK": "0", "WORLD_SIZE": "1"}.items() <= environment.items()


def test_workers_take_gpus_in_turn_and_a_replica_sees_those_of_all_its_processes():
    def seen(index: int, gpus: tuple[str, ...]) -> set[str]:
        groups = [Group(rank, 2, 1) for rank in range(2)]
        return {environment_of(index=index, gpus=gpus, group=group)["CUDA_VISIBLE_DEVICES"] for group in groups}

    workers = [environment_of(index=index, gpus=("0", "3"))["CUDA_VISIBLE_DEVICES"] for index in range(3)]
    assert workers == ["0", "3", "0"]
    assert "CUDA_VISIBLE_DEVICES" not in environment_of()
    assert [seen(index, ("0", "3", "5", "6")) for index in range(2)] == [{"0,3"}, {"5,6"}]
    assert [seen(index, ("0", "3", "5")) for index in range(2)] == [{"0,3"}, {"5,0"}]
    # Named twice it would be no GPU at all.
    assert seen(1, ("4",)) == {"4"}


def test_workers_and_processes_of_replicas_share_the_cores_unless_a_number_is_set():
    cores = len(os.sched_getaffinity(0))
    group = Group(rank=0, size=cores, master_port=1)

    assert environment_of(count=1)["OMP_NUM_THREADS"] == str(cores)
    assert environment_of(count=1, group=Group(0, 1, 1))["OMP_NUM_THREADS"] == str(cores)
    assert environment_of(count=100 * cores)["OMP_NUM_THREADS"] == "1"
    for count in (1, 2):
        assert environment_of(count=count, group=group)["OMP_NUM_THREADS"] == "1"
    assert environment_of(OMP_NUM_THREADS="7")["OMP_NUM_THREADS"] == "7"


def test_gpus_are_those_inherited_or_those_that_nvidia_smi_lists(tmp_path):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-abc"}) == ("2", "GPU-abc")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert visible_gpus({"PATH": str(tmp_path)}) == ()
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n", encoding="utf-8")
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert visible_gpus({"PATH": path}) == ("0", "1")
    assert visible_gpus({"PATH": path, "CUDA_VISIBLE_DEVICES": "1"}) == ("1",)


def test_python_means_the_launcher_s_own_unless_an_environment_is_active():
    folder = str(Path(sys.executable).parent)

    assert environment_of(PATH="/usr/bin")["PATH"] == f"{folder}{os.pathsep}/usr/bin"
    assert environment_of(PATH="/usr/bin", VIRTUAL_ENV="/venv")["PATH"] == "/usr/bin"


def test_a_port_lies_below_those_that_the_system_gives_away():
    first_ephemeral = int(job.EPHEMERAL_RANGE.read_text(encoding="utf-8").split()[0])
    if first_ephemeral <= job.PORT_MIN:
        pytest.skip("this machine gives nearly all its ports away")

    assert all(job.PORT_MIN <= job.free_port() < first_ephemeral for _ in range(20))


def test_a_port_that_is_in_use_or_given_is_not_given_again_and_without_room_any_is(tmp_path, monkeypatch):
    system_range = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(job, "EPHEMERAL_RANGE", system_range)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(job, "PORT_MIN", port)
        # Room for one port alone.
        system_range.write_text(f"{port + 1}\t60999\n", encoding="utf-8")

        assert job.free_port() != port

    assert job.free_port() == port
    assert job.free_port(but={port}) != port
    for text in ("", "1024\t65535\n"):
        system_range.write_text(text, encoding="utf-8")
        socket.create_server(("127.0.0.1", job.free_port())).close()


def shown_of(name: str, lines: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    show = PrefixedOutput(width=len(name)).line
    for line in lines:
        show(name, line)
    return [line.removeprefix(f"{name} | ") for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_warnings_and_errors_are_shown_alone(log_format, capsys):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter() if log_format == "json" else logs.TextFormatter())
    logger = logging.Logger("a server's")
    logger.addHandler(handler)
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(level, "the event of level %d", level)
    lines = stream.getvalue().splitlines()

    assert shown_of("server-0", lines, capsys) == lines[2:]
    assert shown_of("worker-0", lines, capsys) == lines


def test_the_start_block_is_routine_and_a_traceback_is_not(capsys):
    block = ["pyps 0.1.0 parameter server", "  kernels  avx2, 2 threads", "  data     127.0.0.1:7610"]
    error = ["Traceback (most recent call last):", '  File "x.py", line 1, in x', "ValueError: x"]

    assert shown_of("server-0", [*block, *error], capsys) == error
    assert shown_of("server-1", ["  a line of a server whose block comes later"], capsys)


def test_servers_may_read_a_large_checkpoint_as_long_wherever_they_start():
    pods = (ROOT / "deploy" / "kubernetes" / "common" / "pods.yaml").read_text(encoding="utf-8")
    [(period, failures)] = re.findall(r"startupProbe: .*periodSeconds: (\d+),.*failureThreshold: (\d+)", pods)

    assert int(period) * int(failures) == START_SECONDS
