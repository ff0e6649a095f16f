"""Fixtures for all tests: real servers on free ports, killed at teardown."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import certified
from client_support import CuttingProxy
from pyps_client import lease
from pyps_client.transport.tcp import TcpLane
from pyps_wire.parameter_server_pb2 import LaneOffer
from support import PythonProcess, ServerProcess, ServerThread, Start, inspect

# A busy machine must not fail a property by its clock. CI tries the same cases each time; elsewhere they are others.
settings.register_profile("pyps", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.load_profile("pyps")
# Tests talk over loopback only; a proxy of the machine must not stand between.
for _name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "GRPC_PROXY"):
    os.environ.pop(_name, None)
# Settings of the shell that runs the tests must not reach the code under test.
for _name in [name for name in os.environ if name.startswith("PYPS_")]:
    os.environ.pop(_name)
# As where the client's messages are asked for.
logging.getLogger("pyps.client").setLevel(logging.INFO)
# A shell lets what it starts in its background ignore Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the long tests first: what is shared out last is then short, and all processes end together."""
    items.sort(key=lambda item: item.nodeid.startswith(("unit/", "tests/unit/")))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certified.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def start_server() -> Iterator[Callable[..., ServerThread]]:
    """Starts servers in this process: `start_server("--run-id", "a", env={...})`, ready when it returns."""
    with contextlib.ExitStack() as started:

        def start(*flags: str, **options: Any) -> ServerThread:
            server = ServerThread(*flags, **options)
            started.callback(server.stop)
            # pytest shows captured output of failed tests only, so this costs a passing test nothing.
            started.callback(lambda: print(f"--- log of the server on {server.data}:\n{server.output()}"))
            return server

        yield start


@pytest.fixture
def start_server_process() -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers as processes of their own, for tests that kill, signal or command one."""
    with contextlib.ExitStack() as started:

        def start(*flags: str, **options: Any) -> ServerProcess:
            server = ServerProcess(*flags, **options)
            started.callback(server.close)
            started.callback(lambda: print(f"--- output of {server.arguments}:\n{server.output()}"))
            return server

        yield start


@pytest.fixture
def start_python() -> Iterator[Callable[..., PythonProcess]]:
    with contextlib.ExitStack() as started:

        def start(*arguments: str, **options: Any) -> PythonProcess:
            process = PythonProcess(*arguments, **options)
            started.callback(process.close)
            started.callback(lambda: print(f"--- output of {process.arguments}:\n{process.output()}"))
            return process

        yield start


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, CuttingProxy]]:
    """What stands before each server's lane, by its port; gRPC goes straight."""
    made: dict[int, CuttingProxy] = {}
    offered = TcpLane.offered

    def through(lane: TcpLane, offer: LaneOffer) -> None:
        proxy = made.setdefault(offer.port, CuttingProxy(f"127.0.0.1:{offer.port}"))
        offered(lane, LaneOffer(port=int(proxy.address.rpartition(":")[2]), ticket=offer.ticket))

    monkeypatch.setattr(TcpLane, "offered", through)
    yield made
    for proxy in made.values():
        proxy.close()


@pytest.fixture
def nobody_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of a lost replica end by themselves: the process, which is pytest's, is not to be ended for them."""
    monkeypatch.setattr(lease, "GRACE_SECONDS", 3600.0)


class Crashing:
    """A server that loses, when it crashes, what it had not saved: its later checkpoints are removed."""

    def __init__(self, start: Start, folder: Path, *flags: str):
        self._start, self._flags = start, flags
        self._folder, self._folder_flag = folder, ("--checkpoint-dir", str(folder))
        self._saved: set[Path] = set()
        self.server: ServerThread = start(*self._folder_flag, *flags)

    def save(self) -> None:
        inspect(self.server.control, "SaveCheckpoint")
        self._saved = set(self._folder.glob("checkpoint-*.json"))

    def crash(self, *flags: str) -> None:
        """Crash and come back, with other flags if they are given."""
        self.server.stop()
        for checkpoint in set(self._folder.glob("checkpoint-*.json")) - self._saved:
            checkpoint.unlink()
        port = self.server.data.rpartition(":")[2]
        self.server = self._start(*self._folder_flag, *(flags or self._flags), "--resume", "--port", port)


@pytest.fixture
def crashing(start_server: Start, tmp_path: Path) -> Iterator[Callable[..., Crashing]]:
    made: list[Crashing] = []

    def make(*flags: str) -> Crashing:
        made.append(Crashing(start_server, tmp_path / f"server-{len(made)}", *flags))
        return made[-1]

    yield make
