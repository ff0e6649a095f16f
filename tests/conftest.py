"""Fixtures for all tests: real servers on free ports, killed at teardown."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping

import pytest
from hypothesis import settings

from support import PythonProcess, ServerProcess

# A busy machine must not fail a property by its clock.
settings.register_profile("pyps", deadline=None)
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
def start_server(request: pytest.FixtureRequest) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers: `start_server("--run-id", "a", env={...}) -> ServerProcess`, ready to be called."""
    started: list[ServerProcess] = []

    def start(*flags: str, env: Mapping[str, str | None] | None = None, wait: bool = True) -> ServerProcess:
        server = ServerProcess(*flags, env=env, wait=wait)
        started.append(server)
        return server

    yield start
    for server in started:
        # pytest shows captured output of failed tests only, so this costs a passing test nothing.
        print(f"--- output of the server on {server.ready.get('data')}:\n{server.output()}")
        server.close()


@pytest.fixture
def start_python() -> Iterator[Callable[..., PythonProcess]]:
    """Starts Python processes: `start_python("-c", code, env={...}) -> PythonProcess`."""
    started: list[PythonProcess] = []

    def start(*arguments: str, env: Mapping[str, str | None] | None = None) -> PythonProcess:
        process = PythonProcess(*arguments, env=env)
        started.append(process)
        return process

    yield start
    for process in started:
        print(f"--- output of {process.arguments}:\n{process.output()}")
        process.close()
