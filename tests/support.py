"""Real servers and processes for tests, on free ports and never left behind.

Tests say `from support import ...`. Servers come from the fixture `start_server`, which runs them in the test's own
process and ends them; one that is to be killed, signalled or looked at from outside comes from `start_server_process`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import io
import itertools
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from unittest import mock

import grpc

from pyps import _kernels, logs
from pyps.cli.main import app
from pyps.config import ServerConfig, flag_name, resolve
from pyps.launcher.job import free_port
from pyps.service.report import Addresses
from pyps.service.server import Server
from pyps_wire import inspector_pb2 as pb
from pyps_wire.contract import INSPECTOR, stub_of

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent

# Far longer than any wait takes on a loaded two-core machine.
DEADLINE_SECONDS = 60.0


def wait_until(
    predicate: Callable[[], T], deadline_seconds: float = DEADLINE_SECONDS, what: str = "the condition"
) -> T:
    """Call `predicate` until it returns something true, and return that; fail after the deadline."""
    deadline = time.monotonic() + deadline_seconds
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what} did not come true within {deadline_seconds:g} s")
        time.sleep(0.02)


def child_environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Our environment without PYPS_ settings but for the hooks that `pyps run` gives its workers, with this checkout
    importable, then `extra` (None removes).
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYPS_")}
    paths = [str(ROOT), str(ROOT / "client"), str(ROOT / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["PYTHONUNBUFFERED"] = environment["PYPS_PROCESS_HOOKS"] = "1"
    environment.setdefault("OMP_NUM_THREADS", "1")
    for name, value in (extra or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


_given_ports: set[int] = set()


def server_port() -> int:
    """A port below those that the system gives away: still free when a server that was killed comes back to it.

    Each process that runs tests takes others.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while (port := free_port(but=_given_ports)) % 8 != worker % 8:
        continue
    _given_ports.add(port)
    return port


class Forker:
    """The process of tests/forker.py: it forks children that have torch and pyps already. One a process of pytest's."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = str(ROOT / "tests" / "forker.py")
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, script, str(fd)], pass_fds=[fd], stdin=subprocess.DEVNULL, env=child_environment()
            )
        self._ids = itertools.count()
        self._jobs: dict[int, ForkedChild] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, arguments: Sequence[str], *, env: Mapping[str, str], cwd: str | None, output: str) -> ForkedChild:
        job_id = next(self._ids)
        job = {"id": job_id, "arguments": arguments, "env": env, "cwd": cwd, "output": output}
        child = self._jobs[job_id] = ForkedChild(arguments)
        self._connection.send(json.dumps(job).encode())
        child.pid_known.result(DEADLINE_SECONDS)
        return child

    def _listen(self) -> None:
        while message := self._connection.recv(1 << 16):
            news = json.loads(message)
            if "pid" in news:
                self._jobs[news["id"]].pid_known.set_result(news["pid"])
            else:
                self._jobs.pop(news["id"]).ended.set_result(news["status"])
        for child in self._jobs.values():
            if not child.pid_known.done():
                child.pid_known.set_exception(AssertionError("tests/forker.py ended; pytest's output says why"))
            # Its children end with it.
            child.ended.set_result(-signal.SIGKILL)

    @property
    def running(self) -> bool:
        return self._process.poll() is None


class ForkedChild:
    """A child of the forker's, with as much of subprocess.Popen as tests use."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self.pid_known: Future[int] = Future()
        self.ended: Future[int] = Future()

    @property
    def pid(self) -> int:
        return self.pid_known.result()

    def poll(self) -> int | None:
        return self.ended.result() if self.ended.done() else None

    def wait(self, timeout: float) -> int:
        try:
            return self.ended.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(list(self._arguments), timeout) from None

    def send_signal(self, number: int) -> None:
        if not self.ended.done():
            # It may end in this moment.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_forkers: list[Forker] = []


def forker() -> Forker:
    """Return the forker of this process; start another if it has died."""
    if not _forkers or not _forkers[-1].running:
        _forkers.append(Forker())
    return _forkers[-1]


# What is read when Python or a library starts, so that a fork would come too late for it.
_READ_AT_START = ("PYTHON", "OMP_", "MALLOC_", "GLIBC_", "LD_", "OPENBLAS_")


class PythonProcess:
    """A Python process whose output goes to a file; killed when the context ends.

    `PythonProcess("worker.py", "--steps", "5")` runs a script, `PythonProcess("-c", code)` a text,
    `PythonProcess("-m", "pyps", "status")` a module. It is a fork of a process that has imported torch and pyps;
    `fresh=True` starts a new Python, where what an import does, or how much memory it takes, is the subject.
    """

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str | None] | None = None,
        cwd: str | Path | None = None,
        fresh: bool = False,
    ):
        self._folder = tempfile.TemporaryDirectory(prefix="pyps-test-")
        self.folder = Path(self._folder.name)
        self._output_path = self.folder / "output.txt"
        self.arguments = [sys.executable, *arguments]
        self._process: subprocess.Popen[bytes] | ForkedChild
        environment = child_environment(env)
        options = arguments[0].startswith("-") and arguments[0] not in ("-c", "-m")
        with self._output_path.open("wb") as output:
            if fresh or options or any(name.startswith(_READ_AT_START) for name in env or {}):
                self._process = subprocess.Popen(
                    self.arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=cwd,
                )
            else:
                folder = None if cwd is None else str(cwd)
                path = str(self._output_path)
                self._process = forker().start(arguments, env=environment, cwd=folder, output=path)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Return the exit status, None while the process runs; the negative signal number if it was killed."""
        return self._process.poll()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def output(self) -> str:
        return self._output_path.read_text(errors="replace", encoding="utf-8")

    def wait(self, deadline_seconds: float = 120.0) -> int:
        try:
            return self._process.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            message = f"{self.arguments} still runs after {deadline_seconds:g} s; its output:\n{self.output()}"
            raise AssertionError(message) from None

    def wait_for_output(self, text: str, deadline_seconds: float = DEADLINE_SECONDS) -> str:
        """Wait until `text` is in the output; return the output."""

        def seen() -> bool:
            return text in self.output() or not self.running

        wait_until(seen, deadline_seconds, f"{text!r} in the output of {self.arguments}")
        output = self.output()
        assert text in output, f"{self.arguments} ended without printing {text!r}; its output:\n{output}"
        return output

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def terminate(self, deadline_seconds: float = DEADLINE_SECONDS) -> int:
        if self.running:
            self.signal(signal.SIGTERM)
        return self.wait(deadline_seconds)

    def kill(self) -> int:
        if self.running:
            self._process.kill()
        return self.wait(DEADLINE_SECONDS)

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()

    def __enter__(self) -> PythonProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(f"--- output of {self.arguments}:\n{self.output()}")
        self.close()


class Addressed:
    """A server's addresses, "127.0.0.1:port" each."""

    addresses: Addresses

    @property
    def data(self) -> str:
        return self.addresses.data

    @property
    def control(self) -> str:
        return self.addresses.control

    @property
    def metrics(self) -> str:
        return self.addresses.metrics


class ServerProcess(Addressed, PythonProcess):
    """A running `pyps serve` on free ports, ready when the constructor returns; flags win over free ports."""

    def __init__(
        self,
        *flags: str,
        env: Mapping[str, str | None] | None = None,
        cwd: str | Path | None = None,
        wait: bool = True,
        fresh: bool = False,
    ):
        self._ready_folder = tempfile.TemporaryDirectory(prefix="pyps-ready-")
        self._ready_path = Path(self._ready_folder.name) / "ready.json"
        ports = ("--port", str(server_port()), "--control-port", "0", "--metrics-port", "0", "--lane-port", "0")
        ready = ("--ready-file", str(self._ready_path))
        super().__init__("-m", "pyps", "serve", *ports, *ready, *flags, env=env, cwd=cwd, fresh=fresh)
        self.ready: dict[str, Any] = {}
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.close()
                raise

    def wait_ready(self, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        wait_until(lambda: self._ready_path.exists() or not self.running, deadline_seconds, "the server's ready file")
        if not self._ready_path.exists():
            raise AssertionError(f"the server ended with {self.returncode}; its output:\n{self.output()}")
        self.ready = json.loads(self._ready_path.read_text(encoding="utf-8"))
        self.addresses = Addresses(self.ready["data"], self.ready["control"], self.ready["metrics"])

    def close(self) -> None:
        super().close()
        self._ready_folder.cleanup()

    def __enter__(self) -> ServerProcess:
        return self


class ServerThread(Addressed):
    """A server in this process, ready when the constructor returns.

    It takes the flags and variables of `pyps serve`. All such servers share one event loop on a thread of its own.
    """

    def __init__(
        self, *flags: str, env: Mapping[str, str | None] | None = None, clock: Callable[[], float] = time.monotonic
    ):
        """`clock` is the server's: it may run ahead, to end a lease at once."""
        self._clock = clock
        environment = {name: value for name, value in (env or {}).items() if value is not None}
        self._log = io.StringIO()
        self._handler = logging.StreamHandler(self._log)
        self._handler.setFormatter(logs.TextFormatter())
        ports = {"port": str(server_port()), "control_port": "0", "metrics_port": "0", "lane_port": "0"}
        settings = ports | parse_flags(flags)
        toml = settings.pop("config", None)
        self._config = resolve(
            settings, environment, Path(toml) if toml else None, warn=logs.get("pyps.config").warning
        )
        logger = logging.getLogger("pyps")
        logger.setLevel(logging.INFO)
        logger.addHandler(self._handler)
        self._ready: Future[Addresses] = Future()
        self._server: Server | None = None
        self._ended = asyncio.run_coroutine_threadsafe(self._serve(), server_loop())
        self._ended.add_done_callback(self._give_up)
        try:
            self.addresses = self._ready.result(DEADLINE_SECONDS)
        except BaseException:
            self.stop()
            raise

    async def _serve(self) -> int:
        self._server = Server(self._config, instruction_set=_kernels.isa(), clock=self._clock)
        return await self._server.run(signals=False, on_ready=self._ready.set_result)

    def _give_up(self, ended: Future[int]) -> None:
        if not self._ready.done():
            self._ready.set_exception(ended.exception() or AssertionError("the server ended before it served"))

    @property
    def running(self) -> bool:
        return not self._ended.done()

    def wait_for_look(self) -> None:
        """Wait until the server has checked once more whether it stood still."""
        now = self._clock()
        standstill = self._server._standstill
        wait_until(lambda: standstill._looked_at >= now, what="a look at the server's clock")

    def output(self) -> str:
        return self._log.getvalue()

    def wait_for_output(self, text: str, deadline_seconds: float = DEADLINE_SECONDS) -> str:
        """Wait until `text` has been logged; return the whole log."""
        wait_until(lambda: text in self.output(), deadline_seconds, f"{text!r} in the server's log:\n{self.output()}")
        return self.output()

    def wait(self, deadline_seconds: float = 120.0) -> int:
        return self._ended.result(deadline_seconds)

    def stop(self, deadline_seconds: float = DEADLINE_SECONDS) -> int | None:
        """End the server as SIGTERM would; return the exit status, None if it never served."""
        if self._server is not None and self.running:
            server_loop().call_soon_threadsafe(self._server.stop, "the test ends")
        try:
            return self._ended.result(deadline_seconds) if self._server is not None else None
        finally:
            logger = logging.getLogger("pyps")
            logger.removeHandler(self._handler)
            if not logger.handlers:
                logger.setLevel(logging.NOTSET)


AnyServer = ServerThread | ServerProcess
# What the fixtures `start_server`, `start_server_process` and `start_python` give.
Start = Callable[..., AnyServer]
StartPython = Callable[..., PythonProcess]


def parse_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Return the flags of `pyps serve` as fields: --run-id a, --run-id=a, --resume, --no-resume."""
    fields = {flag_name(field.name): field.name for field in dataclasses.fields(ServerConfig)} | {"--config": "config"}
    switches = {flag_name(field.name) for field in dataclasses.fields(ServerConfig) if field.type in (bool, "bool")}
    settings: dict[str, Any] = {}
    left = iter(flags)
    for flag in left:
        name, given, value = flag.partition("=")
        if name in switches or name.replace("--no-", "--", 1) in switches:
            settings[fields[name.replace("--no-", "--", 1)]] = not name.startswith("--no-")
        else:
            settings[fields[name]] = value if given else next(left)
    return settings


@functools.cache
def server_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all servers in this process, which runs on its own thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="servers", daemon=True).start()
    return loop


def replace_file(path: Path, text: str) -> None:
    """Replace a file by a text, as a renewed secret would be: readers find either whole."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


# What a server says on its control port.


@contextmanager
def connected(address: str) -> Iterator[grpc.Channel]:
    """Yield a channel to that address, with its own connection."""
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=options) as channel:
        yield channel


def inspect(address: str, method: str, request: Any = None) -> Any:
    """Call Inspector through its generated stub, by default with an empty request."""
    request = request if request is not None else getattr(pb, f"{method}Request")()
    with connected(address) as channel:
        return getattr(stub_of(INSPECTOR, channel), method)(request, timeout=DEADLINE_SECONDS)


def checksums(address: str) -> dict[int, tuple[int, str]]:
    shards = inspect(address, "ListShards").shards
    return {shard.shard_id: (shard.version, shard.checksum) for shard in shards}


def shell(*arguments: str, status: int = 0, **environment: str) -> str:
    """Runs a `pyps` command in this process: what it printed, once it has ended with that status.

    Not `pyps bench` and what else changes its process, which ignores Ctrl-C at its end.
    """
    output, ended = io.StringIO(), 0
    with mock.patch.dict(os.environ, environment), redirect_stdout(output), redirect_stderr(output):
        try:
            app(list(arguments), prog_name="pyps")
        except SystemExit as ending:
            ended = ending.code or 0
    assert ended == status, output.getvalue()
    assert "Traceback" not in output.getvalue(), output.getvalue()
    return output.getvalue()


def status_of(server: AnyServer) -> pb.Status:
    status: pb.Status = inspect(server.control, "GetStatus")
    return status


def memory_in_flight(server: AnyServer) -> int:
    return int(inspect(server.control, "GetMemory").in_flight_bytes)


def configure(server: AnyServer, **fields: object) -> pb.ConfigureReply:
    return inspect(server.control, "Configure", pb.ConfigureRequest(**fields))  # type: ignore[arg-type]


def events_of(server: AnyServer, kind: str) -> list[str]:
    events = inspect(server.control, "ListEvents", pb.ListEventsRequest(limit=1000)).events
    return [event.message for event in events if event.kind == kind]


def wait_for_event(server: AnyServer, kind: str, text: str = "", deadline_seconds: float = DEADLINE_SECONDS) -> str:
    """Wait for the first event of that kind with that text, and return its message."""

    def found() -> str:
        return next((message for message in events_of(server, kind) if text in message), "")

    return wait_until(found, deadline_seconds, f"an event {kind!r} with {text!r}")


def workers_of(address: str) -> dict[str, pb.WorkerInfo]:
    return {worker.worker_id: worker for worker in inspect(address, "ListWorkers").workers}


def compensated_sum(values: Iterable[float]) -> float:
    """What sum() returns from Python 3.12 on: floats are added with the error of rounding made good."""
    numbers = list(values)
    return math.fsum(numbers) if any(isinstance(number, float) for number in numbers) else sum(numbers)
