"""The client in a program's life: forks, data loaders, exits with and without an exception, missing torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from client_support import gradients_like, make_client, small_model
from inspection import inspect
from pyps_client import ForkedClient, Observer
from support import AnyServer, PythonProcess, child_environment, wait_until

Start = Callable[..., AnyServer]
StartPython = Callable[..., PythonProcess]

WORKER = """
import sys
from client_support import gradients_like, make_client, small_model

client = make_client(sys.argv[1], worker_id=sys.argv[2])
client.push(gradients_like(small_model(), 0))
print("pushed", flush=True)
"""

STEADY = """
import sys
from client_support import gradients_like, make_client, small_model

client = make_client(sys.argv[1], worker_id=sys.argv[2], run_id="steady")
for step in range(1_000_000):
    client.push(gradients_like(small_model(), step))
    client.pull()
    if step == 3:
        print("training", flush=True)
"""

LOADER = """
import sys
import numpy as np, torch
from client_support import make_client

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((3,), float(index))

torch.set_num_threads(1)
client = make_client(sys.argv[1], tensors={"w": np.zeros(3, np.float32)})
for epoch in range(2):
    loader = torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=2, multiprocessing_context="fork")
    for batch in loader:
        client.push({"w": batch.sum(0).numpy()})
        client.pull()
print("steps", client.global_step, flush=True)
"""


def test_a_forked_child_is_told_what_to_do_and_the_parent_goes_on(start_server: Start) -> None:
    server = start_server()
    with make_client(server.data) as client:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            # Nothing of pytest may run in the child.
            try:
                client.push(gradients_like(small_model(), 0))
                os.write(writer, b"no error")
            except ForkedClient as error:
                client.close()
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        message = os.read(reader, 4096).decode()
        os.close(reader)

        assert f"before process {child} was forked" in message
        assert "Make a client in the child, or start the child with spawn" in message
        assert client.push(gradients_like(small_model(), 0))


def test_no_step_of_the_others_waits_for_a_worker_that_was_killed(
    start_server: Start, start_python: StartPython
) -> None:
    """Dean et al. 2012, section 4.1: the other replicas go on when one fails, long before its lease ends."""
    server = start_server("--lease-seconds", "600")
    killed = start_python("-c", STEADY, server.data, "killed")
    killed.wait_for_output("training")
    with make_client(server.data, worker_id="a", run_id="steady") as first:
        killed.kill()

        with make_client(server.data, worker_id="b", run_id="steady") as second:
            for step in range(20):
                for client in (first, second):
                    client.push(gradients_like(small_model(), step))
                    client.pull()
    states = {worker.worker_id: worker.state for worker in inspect(server.control, "ListWorkers").workers}
    assert states == {"killed": "alive", "a": "finished", "b": "finished"}


def test_a_data_loader_with_forked_workers_runs_beside_a_client(start_server: Start, start_python: StartPython) -> None:
    worker = start_python("-c", LOADER, start_server("--heartbeat-seconds", "0.05").data)

    assert worker.wait(90) == 0, worker.output()
    assert "steps 16" in worker.output()


@pytest.mark.parametrize(
    ("ending", "state", "status"),
    [
        ("", "finished", 0),
        ("raise ValueError('out of data')", "failed", 1),
        ("with client: raise ValueError('out of data')", "failed", 1),
    ],
)
def test_a_worker_leaves_at_its_programs_end_and_says_how(
    start_server: Start, start_python: StartPython, ending: str, state: str, status: int
) -> None:
    server = start_server()
    worker = start_python("-c", f"{WORKER}\n{ending}\n", server.data, "short-lived")

    assert worker.wait(60) == status, worker.output()
    wait_until(lambda: "worker left" in server.output(), 10, "the leave in the server's log")
    line = next(line for line in server.output().splitlines() if "worker left" in line)
    assert "short-lived" in line
    assert state in line
    if status:
        assert "ValueError: out of data" in line


def test_a_worker_whose_server_is_gone_still_ends_soon(
    start_server_process: Start, start_python: StartPython, tmp_path: Path
) -> None:
    server, flag = start_server_process(), tmp_path / "gone"
    until_gone = f"import pathlib, time\nwhile not pathlib.Path({str(flag)!r}).exists(): time.sleep(0.02)"
    worker = start_python("-c", f"{WORKER}\n{until_gone}", server.data, "w")
    worker.wait_for_output("pushed")
    server.kill()
    flag.touch()

    assert worker.wait(20) == 0, worker.output()


def test_an_observer_reads_without_counting_as_a_worker(start_server: Start) -> None:
    server = start_server()
    with make_client(server.data) as client, Observer(server.data) as observer:
        client.push(gradients_like(small_model(), 0))
        expected = client.pull()
        snapshot = observer.snapshot()

        assert list(snapshot) == list(expected)
        for name, tensor in expected.items():
            assert (snapshot[name] == tensor).all()
            assert snapshot[name].shape == tensor.shape
        assert observer.global_step == 1
        assert observer.run_id == client.session.run_id
        receipts = client.push(gradients_like(small_model(), 1))
        assert {receipt.num_workers for receipt in receipts} == {1}
        assert observer.snapshot()["embed"][0, 0] != snapshot["embed"][0, 0]


def test_without_torch_the_optimizer_says_what_to_install_and_the_rest_works() -> None:
    code = """
import sys
sys.modules["torch"] = None
import pyps_client
pyps_client.Client, pyps_client.Observer
try:
    pyps_client.RemoteOptimizer
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True, check=True
    )

    assert 'pip install "pyps-client[torch]"' in done.stdout
