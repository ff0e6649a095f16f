"""Ctrl-C amid a step: once it has raised, nobody writes into the worker's parameters, and the next step goes on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from client_support import addresses, gradients_like, make_client, small_model, start_servers
from inspection import inspect
from pyps_wire.common_pb2 import OUTCOME_APPLIED
from support import PythonProcess, ServerProcess, wait_until

Start = Callable[..., ServerProcess]
PRESSES_MAX = 3


def stop(server: ServerProcess) -> None:
    """Stops the whole process, which then answers nothing."""
    server.signal(signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{server.pid}/stat").read_text().split()[2] == "T", 20, "the server's stop")


def version_of(server: ServerProcess) -> int:
    return int(inspect(server.control, "GetStatus").version_min)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("slow", [0, 1])
def test_parameters_stay_as_they_are_once_ctrl_c_has_left_an_exchange(
    start_server_process: Start, transport: str, slow: int
) -> None:
    servers = start_servers(start_server_process, 2)
    tensors = small_model()
    with (
        make_client(addresses(servers), transport=transport, run_id="mine") as client,
        make_client(addresses(servers), transport=transport, run_id="mine", worker_id="other") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        client.exchange(gradients_like(tensors, 0))
        parameters = client._parameters
        stop(servers[slow])

        def interrupt() -> None:
            wait_until(lambda: version_of(servers[1 - slow]) == 2, 20, "the other server's part of the exchange")
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.exchange(gradients_like(tensors, 1))
        interrupting.result(20)
        left = parameters.copy()
        servers[slow].signal(signal.SIGCONT)
        # What the server had in its hands before is done once it has answered others again and again.
        for step in range(3):
            other.exchange(gradients_like(tensors, step))

        np.testing.assert_array_equal(parameters, left)
        receipts = client.push(gradients_like(tensors, 2))
        assert {receipt.outcome for receipt in receipts} == {OUTCOME_APPLIED}
        pulled = client.exchange(gradients_like(tensors, 3))
        for name, tensor in client.snapshot().items():
            np.testing.assert_array_equal(pulled[name], tensor, err_msg=name)
        assert client.session.transport == transport


INTERRUPTED = """
import sys
import numpy as np
from pyps_client import Client, open_stream

if sys.argv[3] == "queued":
    open_stream.cygrpc = None
tensors = {"w": np.zeros(200_000, np.float32)}
client = Client(tensors, ("sgd", {"learning_rate": 1.0}), servers=sys.argv[1], worker_id="w", transport=sys.argv[2])
client.exchange({"w": np.ones(200_000, np.float32)})
print("training", flush=True)
while True:
    client.exchange({"w": np.ones(200_000, np.float32)})
"""


def press_ctrl_c(process: PythonProcess) -> None:
    """Interrupts a script, again where nothing came of it, as a user would.

    Once, on a busy machine, nothing did within 20 s; why is not known.
    """
    for _ in range(PRESSES_MAX - 1):
        process.signal(signal.SIGINT)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: "KeyboardInterrupt" in process.output(), 10, "the traceback")
            return
    process.signal(signal.SIGINT)
    wait_until(lambda: "KeyboardInterrupt" in process.output(), 20, "the traceback")


@pytest.mark.parametrize(("way", "stream"), [("shm", ""), ("grpc", "direct"), ("grpc", "queued")])
@pytest.mark.parametrize("stopped", [True, False])
def test_ctrl_c_amid_an_exchange_ends_the_script_as_anywhere_else(
    start_server_process: Start, start_python: Callable[..., PythonProcess], way: str, stream: str, stopped: bool
) -> None:
    """Whether it waits for a server that does not answer, or is amid busy rounds."""
    server = start_server_process()
    process = start_python("-c", INTERRUPTED, server.data, way, stream)
    process.wait_for_output("training")
    if stopped:
        server.signal(signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{server.pid}/stat").read_text().split()[2] == "T", 20, "the server's stop")
    press_ctrl_c(process)
    if stopped:
        server.signal(signal.SIGCONT)

    assert process.wait() == -signal.SIGINT
    assert "KeyError" not in process.output()
    (worker,) = inspect(server.control, "ListWorkers").workers
    assert (worker.state, worker.message) == ("failed", "KeyboardInterrupt: ")
