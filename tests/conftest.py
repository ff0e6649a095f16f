"""Fixtures for all tests: real servers on free ports, killed at teardown."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import settings

from support import PythonProcess, ServerProcess, ServerThread

# A busy machine must not fail a property by its clock. CI tries the same cases each time; elsewhere they are others.
settings.register_profile("pyps", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.load_profile("pyps")
# Tests talk over loopback only; a proxy of the machine must not stand between.
for _name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "GRPC_PROXY"):
    os.environ.pop(_name, None)
# Settings of the shell that runs the tests must not reach the code under test.
for _name in [name for name in os.environ if name.startswith("PYPS_")]:
    os.environ.pop(_name)
# A shell lets what it starts in its background ignore Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def start_server() -> Iterator[Callable[..., ServerThread]]:
    """Starts servers in this process: `start_server("--run-id", "a", env={...})`, ready when it returns."""
    started: list[ServerThread] = []

    def start(*flags: str, **options: Any) -> ServerThread:
        started.append(ServerThread(*flags, **options))
        return started[-1]

    yield start
    for server in started:
        # pytest shows captured output of failed tests only, so this costs a passing test nothing.
        print(f"--- log of the server on {server.data}:\n{server.output()}")
        server.stop()


@pytest.fixture
def start_server_process() -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers as processes of their own, for tests that kill, signal or command one."""
    started: list[ServerProcess] = []

    def start(
        *flags: str, env: Mapping[str, str | None] | None = None, wait: bool = True, fresh: bool = False
    ) -> ServerProcess:
        started.append(ServerProcess(*flags, env=env, wait=wait, fresh=fresh))
        return started[-1]

    yield start
    for server in started:
        print(f"--- output of the server on {server.ready.get('data')}:\n{server.output()}")
        server.close()


@pytest.fixture
def start_python() -> Iterator[Callable[..., PythonProcess]]:
    """Starts Python processes: `start_python("-c", code, env={...}) -> PythonProcess`."""
    started: list[PythonProcess] = []

    def start(*arguments: str, env: Mapping[str, str | None] | None = None, fresh: bool = False) -> PythonProcess:
        process = PythonProcess(*arguments, env=env, fresh=fresh)
        started.append(process)
        return process

    yield start
    for process in started:
        print(f"--- output of {process.arguments}:\n{process.output()}")
        process.close()
