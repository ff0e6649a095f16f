"""Ctrl-C amid a step: once it has raised, nobody writes into the worker's parameters, and the next step goes on."""

import ctypes
import itertools
import operator
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client_support import addresses, gradients_like, make_client, small_model, start_servers
from pyps_client.transport.shared_memory import SharedMemoryLink
from pyps_client.transport.threads import Future, Threads
from pyps_wire.common_pb2 import OUTCOME_APPLIED
from pyps_wire.local_pb2 import LocalRequest
from support import ServerProcess, inspect, wait_until
from training import batches, joined, mlp


def stop(server: ServerProcess) -> None:
    server.signal(signal.SIGSTOP)
    wait_until(
        lambda: Path(f"/proc/{server.pid}/stat").read_text(encoding="utf-8").split()[2] == "T", 20, "the server's stop"
    )


def version_of(server: ServerProcess) -> int:
    return int(inspect(server.control, "GetStatus").version_min)


def test_parameters_stay_as_they_are_once_ctrl_c_has_left_an_exchange(start_server_process):
    servers = start_servers(start_server_process, 2)
    for transport, slow in itertools.product(("shm", "tcp", "grpc"), (0, 1)):
        interrupt_an_exchange(servers, transport, slow)


def interrupt_an_exchange(servers: list[ServerProcess], transport: str, slow: int) -> None:
    """Ctrl-C where one of two servers does not answer."""
    tensors = small_model()
    with (
        make_client(addresses(servers), transport=transport, run_id="mine") as client,
        make_client(addresses(servers), transport=transport, run_id="mine", worker_id="other") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        client.pull()
        client.exchange(gradients_like(tensors, 0))
        version = version_of(servers[1 - slow])
        parameters = client._parameters
        stop(servers[slow])

        def interrupt() -> None:
            wait_until(lambda: version_of(servers[1 - slow]) == version + 1, 20, "the other server's part")
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

        np.testing.assert_array_equal(parameters, left, err_msg=f"by {transport}, server {slow} slow")
        receipts = client.push(gradients_like(tensors, 2))
        assert {receipt.outcome for receipt in receipts} == {OUTCOME_APPLIED}, (transport, slow)
        pulled = client.exchange(gradients_like(tensors, 3))
        for name, tensor in client.snapshot().items():
            np.testing.assert_array_equal(pulled[name], tensor, err_msg=f"{name} by {transport}, server {slow} slow")
        assert client.session.transport == transport


INTERRUPTED = """
import sys
import numpy as np
from pyps_client import Client, Launch

tensors = {"w": np.zeros(200_000, np.float32)}
launch = Launch(sys.argv[1], worker_id="w", transport=sys.argv[2])
client = Client(tensors, ("sgd", {"learning_rate": 1.0}), launch=launch)
client.exchange({"w": np.ones(200_000, np.float32)})
print("training", flush=True)
while True:
    client.exchange({"w": np.ones(200_000, np.float32)})
"""


@pytest.mark.parametrize("stopped", [True, False])
def test_ctrl_c_ends_an_exchange(start_server_process, start_python, stopped):
    """Whether it waits for a server that does not answer, or is amid busy rounds."""
    for way in ("shm", "tcp", "grpc"):
        server = start_server_process()
        process = start_python("-c", INTERRUPTED, server.data, way)
        process.wait_for_output("training")
        if stopped:
            stop(server)
        process.signal(signal.SIGINT)
        wait_until(lambda process=process: "KeyboardInterrupt" in process.output(), 60, f"the traceback, {way}")
        if stopped:
            server.signal(signal.SIGCONT)

        assert process.wait() == -signal.SIGINT, way
        assert "KeyError" not in process.output()
        (worker,) = inspect(server.control, "ListWorkers").workers
        assert (worker.state, worker.message) == ("failed", "KeyboardInterrupt: ")
        server.kill()


class Press:
    """One Ctrl-C that comes after the interpreter's last look for one, and before the main thread waits."""

    def __init__(self) -> None:
        self._left = [partial(ctypes.CDLL(None)["raise"], signal.SIGINT)]

    def before(self, wait: Callable[..., Any], *arguments: Any) -> Any:
        if not self._left or threading.current_thread() is not threading.main_thread():
            return wait(*arguments)
        # Not a byte code between the two calls.
        _, result = map(operator.call, (self._left.pop(), partial(wait, *arguments)))
        return result


class PressedSocket(socket.socket):
    press: Press

    def recv(self, *arguments: Any) -> bytes:
        received: bytes = self.press.before(super().recv, *arguments)
        return received


class PressedLock:
    def __init__(self, press: Press) -> None:
        self._press, self._lock = press, threading.Lock()
        self._lock.acquire()
        self.release = self._lock.release

    def acquire(self, *, timeout: float) -> bool:
        acquired: bool = self._press.before(self._lock.acquire, True, timeout)
        return acquired


def test_ctrl_c_just_before_the_wait_for_a_reply_is_seen_amid_the_wait():
    near, far = socket.socketpair()
    pressed = PressedSocket(fileno=near.detach())
    pressed.press = Press()
    link = SharedMemoryLink(pressed, name="server 0")
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        link.request(LocalRequest(), timeout_seconds=100)
    assert time.monotonic() - began < 50
    far.close()


def test_ctrl_c_just_before_the_wait_for_a_thread_is_seen_amid_the_wait():
    threads, release = Threads(), threading.Event()
    future = Future(lambda: release.wait(100))
    threads.start(future)
    future._under_way = PressedLock(Press())  # type: ignore[assignment]
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    assert time.monotonic() - began < 50
    release.set()
    threads.close()


@pytest.mark.parametrize("overlap", ["backward", "step"])
def test_an_exchange_whose_start_ctrl_c_interrupts_is_over_before_the_next_begins(start_server, overlap):
    """Two at a time sent each other's numbers, and one of them waited for a receipt until its deadline."""
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with joined(model, sgd, start_server().data, overlap=overlap, transport="grpc") as optimizer:
        mode, started = optimizer.stepper.overlap, []

        def train() -> None:
            [(x, y)] = batches(1)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        def start(job: Future[Any]) -> None:
            """Let the job run once somebody waits for it."""
            waited_for, run, wait = threading.Event(), job._job, job.wait
            job._job = lambda: waited_for.wait(60) and run()
            job.wait = lambda *seconds: waited_for.set() or wait(*seconds)
            started.append(job)
            del mode._threads.start
            mode._threads.start(job)
            raise KeyboardInterrupt

        mode._threads.start = start
        with pytest.raises(KeyboardInterrupt):
            train()
        train()
        mode.wait()
        assert started[0].done()
