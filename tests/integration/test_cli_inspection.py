"""`pyps status`, `export`, `save`, `stop` and `reset` against real servers, as a user types them."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from client_support import addresses, gradients_like, make_client, small_model, start_servers
from inspection import inspect
from pyps.launcher.ports import free_port
from pyps_client import Launch, Session
from pyps_wire import common_pb2 as common
from pyps_wire.common_pb2 import GroupSettings, OptimizerSettings
from pyps_wire.partition import Model, Tensor
from support import PythonProcess, ServerProcess, wait_until

Start = Callable[..., ServerProcess]
StartPython = Callable[..., PythonProcess]


class Shell:
    """Runs `pyps` commands to their end."""

    def __init__(self, start_python: StartPython):
        self._start = start_python

    def run(self, *arguments: str, status: int = 0) -> str:
        """The output of a command that ends with that status, and never with a traceback."""
        process = self._start("-m", "pyps", *arguments)
        assert process.wait() == status, process.output()
        assert "Traceback" not in process.output()
        return process.output()


@pytest.fixture
def shell(start_python: StartPython) -> Shell:
    return Shell(start_python)


def controls(servers: list[ServerProcess]) -> str:
    return ",".join(server.control for server in servers)


def train(servers: list[ServerProcess], steps: int = 3) -> dict[str, np.ndarray]:
    """Trains a little and returns the parameters that a worker ends with."""
    with make_client(addresses(servers), worker_id="[red]worker[/red]") as client:
        for step in range(steps):
            client.push(gradients_like(small_model(), seed=step), examples=10)
        return client.pull()


def test_status_shows_servers_workers_and_shards(start_server_process: Start, shell: Shell) -> None:
    servers = start_servers(start_server_process, 2)
    train(servers)
    output = shell.run("status", "--servers", controls(servers))
    for server in servers:
        assert server.control in output
    # A worker's own words are shown as they are, not as markup.
    assert "[red]worker[/red]" in output
    assert "finished" in output and "async, divide, adagrad" in output
    assert "KiB" in output and "not asked" not in output
    for server in servers:
        for shard in inspect(server.control, "ListShards").shards:
            assert shard.checksum in output


def test_status_says_what_is_missing_from_what_it_shows(start_server_process: Start, shell: Shell) -> None:
    servers = start_servers(start_server_process, 2)
    empty = shell.run("status", "--servers", controls(servers))
    assert f"no run yet: a worker starts it (PYPS_SERVERS={addresses(servers)})" in empty
    assert "CRC-32" not in empty and "silent for" not in empty
    with make_client(addresses(servers)) as client:
        client.push(gradients_like(small_model(), seed=1))
        half = shell.run("status", "--servers", servers[0].control)
    assert "server 1 of 2 was not asked: name all with --servers" in half
    assert "not counted" in half and "no run yet" not in half


def test_status_as_json_is_what_grpcurl_would_say(start_server_process: Start, shell: Shell) -> None:
    servers = start_servers(start_server_process, 2)
    train(servers)
    answer = json.loads(shell.run("status", "--json", "--servers", controls(servers)))
    first, second = answer["servers"]
    assert (first["address"], second["address"]) == (servers[0].control, servers[1].control)
    assert first["status"]["state"] == "RUN_STATE_READY"
    assert first["status"]["versionMax"] == "3"
    assert first["workers"][0]["state"] == "finished"
    assert len(first["shards"]) == first["status"]["numShards"]


def test_a_server_that_is_not_there_is_one_sentence(start_server_process: Start, shell: Shell) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    output = shell.run("status", "--servers", nobody, status=1)
    assert output.strip().splitlines() == [
        f"pyps: no server answers on {nobody}: check the address and that the server runs"
    ]
    there = start_server_process()
    output = shell.run("status", "--servers", f"{there.control},{nobody}", status=1)
    assert there.control in output and f"no server answers on {nobody}" in output
    answer = json.loads(shell.run("status", "--json", "--servers", nobody, status=1).partition("\npyps:")[0])
    assert "no server answers" in answer["servers"][0]["error"]


@pytest.mark.parametrize(
    ("servers", "message"),
    [("", "No servers were named"), ("a b", "'a b:7611' is malformed"), ("a:99999", "port 99999; expected 1 to 65535")],
)
def test_an_address_that_is_none_is_one_sentence(shell: Shell, servers: str, message: str) -> None:
    assert message in shell.run("status", "--servers", servers, status=2)


def test_either_port_of_a_server_does_for_every_command(
    start_server_process: Start, shell: Shell, tmp_path: Path
) -> None:
    servers = start_servers(start_server_process, 2)
    train(servers)
    mixed = f"{servers[0].data},{servers[1].control}"
    answer = json.loads(shell.run("status", "--json", "--servers", mixed))
    assert [server["address"] for server in answer["servers"]] == [server.control for server in servers]
    script = tmp_path / "score.py"
    script.write_text("def evaluate(parameters): return len(parameters)\n")
    assert "5,002 parameters" in shell.run("export", str(tmp_path / "file"), "--servers", mixed)
    assert "update 3  score 4" in shell.run("eval", str(script), "--once", "--servers", controls(servers))
    assert shell.run("health", "--servers", mixed).count("SERVING") == 2
    assert shell.run("stop", "--servers", addresses(servers)).count("has finished its run") == 2


def test_a_port_that_is_no_server_s_is_one_sentence(start_server_process: Start, shell: Shell) -> None:
    with futures.ThreadPoolExecutor(1) as executor:
        stranger = grpc.server(executor)
        port = stranger.add_insecure_port("127.0.0.1:0")
        stranger.start()
        output = shell.run("status", "--servers", f"127.0.0.1:{port}", status=1)
        stranger.stop(None)
    assert f"127.0.0.1:{port} speaks gRPC but is no port of a pyps server" in output


def test_a_token_is_asked_for_and_taken(start_server_process: Start, shell: Shell, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("correct horse\n")
    server = start_server_process("--token-file", str(token))
    assert "wants a token" in shell.run("status", "--servers", server.control, status=1)
    assert server.control in shell.run("status", "--servers", server.control, "--token-file", str(token))
    refused = shell.run("status", "--servers", server.control, "--token-file", str(tmp_path / "none"), status=2)
    assert "none cannot be read: No such file or directory" in " ".join(refused.split())


def test_export_gives_plain_pytorch_the_tensors_under_their_names(
    start_server_process: Start, shell: Shell, tmp_path: Path
) -> None:
    servers = [
        start_server_process("--checkpoint-dir", str(tmp_path / f"server-{index}"), wait=False) for index in range(2)
    ]
    for server in servers:
        server.wait_ready()
    expected = train(servers)
    live, saved = tmp_path / "live.safetensors", tmp_path / "saved.safetensors"
    shell.run("export", str(live), "--servers", addresses(servers))
    wrote = shell.run("save", "--servers", controls(servers))
    assert wrote.count("checkpoint-0000000") == 2
    folders = [argument for index in range(2) for argument in ("--checkpoint", str(tmp_path / f"server-{index}"))]
    assert "5,002 parameters" in shell.run("export", str(saved), *folders)
    whole = tmp_path / "whole.safetensors"
    shell.run("export", str(whole), "--checkpoint", str(tmp_path))
    for file in (live, saved, whole):
        tensors = load_file(file)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
            name: array.shape for name, array in expected.items()
        }
        for name, tensor in tensors.items():
            assert tensor.dtype is torch.float32
            np.testing.assert_array_equal(tensor.numpy(), expected[name])

    half = shell.run("export", str(tmp_path / "half"), *folders[:2], status=1)
    assert "missing here: those of server 1. Give --checkpoint once for each server" in half
    assert not (tmp_path / "half").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--servers", ""), 1, "No servers were named"),
        (("--checkpoint", "/nonexistent"), 1, "there is no folder /nonexistent"),
        (("--checkpoint", "."), 1, "there is no whole checkpoint in ."),
    ],
)
def test_export_says_what_it_needs(
    shell: Shell, tmp_path: Path, arguments: tuple[str, ...], status: int, message: str
) -> None:
    assert message in shell.run("export", str(tmp_path / "file"), *arguments, status=status)


def test_export_and_eval_tell_of_a_run_that_no_worker_has_begun(
    start_server_process: Start, shell: Shell, tmp_path: Path
) -> None:
    script = tmp_path / "score.py"
    script.write_text("def evaluate(parameters): return 0.0\n")
    where = ("--servers", start_server_process().data, "--wait-seconds", "0.5")
    for output in (
        shell.run("export", str(tmp_path / "file"), *where, status=1),
        shell.run("eval", str(script), *where, status=2),
    ):
        assert "no worker has initialised the run yet" in output
        assert "start_wait_seconds" not in output


def test_export_asks_the_server_of_this_machine_unless_told_otherwise(shell: Shell) -> None:
    assert "default: 127.0.0.1:7610]" in " ".join(shell.run("export", "--help").split())


def test_export_of_servers_that_are_not_there_ends_in_time(shell: Shell, tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    output = shell.run("export", str(tmp_path / "file"), "--servers", nobody, "--wait-seconds", "0.5", status=1)
    assert nobody in output


def test_stop_and_reset_end_and_forget_a_run(start_server_process: Start, shell: Shell) -> None:
    servers = start_servers(start_server_process, 2)
    assert "holds no run" in shell.run("stop", "--servers", controls(servers), status=1)
    with make_client(addresses(servers), run_id="mine") as client:
        client.push(gradients_like(small_model(), seed=1))
        shell.run("stop", "--servers", controls(servers))
        assert {inspect(server.control, "GetStatus").state for server in servers} == {common.RUN_STATE_FINISHED}
    refused = shell.run("reset", "another", "--servers", controls(servers), status=1)
    assert refused.count("not run 'another': name the run to reset") == 2
    assert shell.run("reset", "mine", "--servers", controls(servers)).count("has forgotten run 'mine'") == 2
    assert {inspect(server.control, "GetStatus").state for server in servers} == {common.RUN_STATE_EMPTY}


def test_saving_without_a_folder_is_one_sentence(start_server_process: Start, shell: Shell) -> None:
    server = start_server_process()
    assert "start it with --checkpoint-dir" in shell.run("save", "--servers", server.control, status=1)


def test_replay_says_where_there_is_nothing_to_replay(shell: Shell, tmp_path: Path) -> None:
    assert f"there is no update log in {tmp_path}" in shell.run("replay", str(tmp_path), status=1)


def test_status_tells_how_each_worker_talks_to_its_servers(start_server_process: Start, shell: Shell) -> None:
    servers = [start_server_process(wait=False), start_server_process("--local-socket", "off", wait=False)]
    for server in servers:
        server.wait_ready()
    with session(servers, "near") as near, session(servers, "far", transport="grpc") as far:
        assert (near.lend() and near.transport, far.lend() and far.transport) == ("mixed", "grpc")
        answers = json.loads(shell.run("status", "--json", "--servers", addresses(servers)))["servers"]
        table = shell.run("status", "--servers", addresses(servers))
        shared = [inspect(server.control, "GetMemory").shared_bytes for server in servers]
    # Gradients and parameters of the whole model: the segment is one for all servers.
    assert shared[0] >= 2 * 4 * 2048 and shared[1] == 0
    told = [{worker["workerId"]: worker["transport"] for worker in answer["workers"]} for answer in answers]
    assert told == [{"near": "shm", "far": "grpc"}, {"near": "grpc", "far": "grpc"}]
    rows = {line.split()[1]: line for line in table.splitlines() if " alive" in line and "workers" not in line}
    assert "shared memory, gRPC" in rows["near"]
    assert "shared memory" not in rows["far"] and "gRPC" in rows["far"]
    assert transports(servers[0]) == {"near": "shm", "far": "grpc"}, "those who left, as they were"
    with session(servers, "near", transport="grpc"):
        assert transports(servers[0])["near"] == "grpc", "its next life"


SHARING_WORKER = """
import signal, sys, numpy
from pyps_client import Client

tensors = {"t": numpy.zeros(2048, numpy.float32)}
client = Client(tensors, servers=sys.argv[1], worker_id="w", run_id="r", transport="shm")
client.exchange({"t": numpy.ones(2048, numpy.float32)})
print("exchanged", flush=True)
signal.pause()
"""


def test_status_tells_how_a_killed_worker_talked(start_server_process: Start, start_python: StartPython) -> None:
    server = start_server_process("--lease-seconds", "2", "--heartbeat-seconds", "0.5")
    worker = start_python("-c", SHARING_WORKER, server.data)
    worker.wait_for_output("exchanged", 60)
    assert transports(server) == {"w": "shm"}
    worker.kill()
    wait_until(lambda: not inspect(server.control, "GetMemory").shared_bytes, what="the end of its memory")
    assert transports(server) == {"w": "shm"}, "while its lease lasts"
    wait_until(lambda: not inspect(server.control, "GetStatus").workers_alive, what="the end of its lease")
    assert transports(server) == {"w": "shm"}


def transports(server: ServerProcess) -> dict[str, str]:
    """How each worker that the server lists talks to it."""
    return {worker.worker_id: worker.transport for worker in inspect(server.control, "ListWorkers").workers}


def session(servers: list[ServerProcess], worker_id: str, **options: str) -> Session:
    """A worker's session, with a shard on each of two servers."""
    model = Model((Tensor("t", (2048,)),), shard_size=1024)
    launch = Launch(servers=tuple(addresses(servers).split(",")), worker_id=worker_id, start_wait_seconds=30, **options)
    optimizer = OptimizerSettings(rule="sgd", groups=[GroupSettings(hyperparameters={"learning_rate": 1.0})])
    return Session(model, optimizer, launch=launch, initial=lambda: [np.zeros(2048, np.float32)])
