"""How a worker's end in the middle of a wait, by a signal or by an error of its own, reaches the others: at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from client_support import gradients_like, make_client, small_model
from support import PythonProcess, ServerThread, wait_until
from training import workers

Start = Callable[..., ServerThread]
StartPython = Callable[..., PythonProcess]

# What a wait for the lease would last; nobody may wait for it.
LEASE_SECONDS = 60.0
FLAGS = ("--run-id", "shared", "--expected-workers", "2", "--lease-seconds", str(LEASE_SECONDS))

WORKER = """
import sys
from client_support import gradients_like, make_client, small_model

client = make_client(sys.argv[1], worker_id="ends", run_id="shared")
for step in range(1000):
    client.push(gradients_like(small_model(), step), examples=1)
    print("pushed", step, flush=True)
    client.pull()
    if step == int(sys.argv[2]):
        raise ValueError("out of data")
"""

OVERLAPPED = """
import sys, torch
from pyps_client import RemoteOptimizer

torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = RemoteOptimizer(model, sgd, sys.argv[1], worker_id="ends", run_id="shared", overlap="step")
print("joined", flush=True)
while True:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("protocol", ["hardsync", "serial"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_a_worker_that_is_ended_while_it_waits_takes_leave_and_the_others_go_on(
    start_server: Start, start_python: StartPython, protocol: str, number: int, status: int
) -> None:
    server = start_server("--protocol", protocol, *FLAGS)
    ended = start_python("-c", WORKER, server.data, "-1")
    with make_client(server.data, worker_id="stays", run_id="shared") as client:
        client.push(gradients_like(small_model(), 0), examples=1)
        client.pull()
        # It waits for the next round, or for its turn, which this worker holds up.
        wait_until(lambda: workers(server)["ends"].waits_for, what="the other's wait")

        ended.signal(number)

        assert ended.wait(20) == status, ended.output()
        assert go_on(client) < LEASE_SECONDS / 3
    assert workers(server)["ends"].state == "failed"
    assert workers(server)["ends"].message in ("KeyboardInterrupt: ", "Terminated: SIGTERM")


def test_a_worker_that_fails_while_the_others_wait_lets_them_go_on(
    start_server: Start, start_python: StartPython
) -> None:
    server = start_server("--protocol", "hardsync", *FLAGS)
    failed = start_python("-c", WORKER, server.data, "1")
    with make_client(server.data, worker_id="stays", run_id="shared") as client:
        # Of the third round on it is alone.
        assert go_on(client, rounds=4) < LEASE_SECONDS / 3
    assert failed.wait() == 1
    assert "ValueError: out of data" in workers(server)["ends"].message


def test_an_optimizer_with_threads_ends_by_sigterm_while_they_wait(
    start_server: Start, start_python: StartPython
) -> None:
    server = start_server("--protocol", "hardsync", *FLAGS)
    ended = start_python("-c", OVERLAPPED, server.data)
    ended.wait_for_output("joined")
    wait_until(lambda: workers(server)["ends"].pushes_pending, what="its first push")

    ended.signal(signal.SIGTERM)

    assert ended.wait(20) == 143, ended.output()
    assert "Traceback" not in ended.output()
    assert workers(server)["ends"].state == "failed"


def test_a_forked_child_ends_by_sigterm_as_it_would_without_a_client(
    start_server: Start, start_python: StartPython
) -> None:
    server = start_server()
    code = (
        "import os, signal, sys\n"
        "from client_support import make_client\n"
        "client = make_client(sys.argv[1], worker_id='parent')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os._exit(9)\n"
        "print('child ended with', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
    )
    process = start_python("-c", code, server.data)
    assert process.wait() == 0, process.output()
    assert "child ended with -15" in process.output()
    assert workers(server)["parent"].state == "finished"


def go_on(client, rounds: int = 2) -> float:
    """Seconds that so many more rounds take."""
    began = time.monotonic()
    for seed in range(rounds):
        client.push(gradients_like(small_model(), seed), examples=1)
        client.pull()
    return time.monotonic() - began
