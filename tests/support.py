"""Real processes for tests: servers and worker scripts, started on free ports and never left behind.

Tests say `from support import ...`; servers come from the fixture `start_server`, which ends them too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent

# A loaded two-core machine starts a server in a few seconds; this is for the worst day.
START_SECONDS = 60.0


def wait_until(predicate: Callable[[], T], deadline_seconds: float = 60.0, what: str = "the condition") -> T:
    """Calls `predicate` until it returns something true and returns that; fails after the deadline."""
    deadline = time.monotonic() + deadline_seconds
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what} did not come true within {deadline_seconds:g} s")
        time.sleep(0.02)


def child_environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Our environment without PYPS_ settings, with this checkout importable, then `extra` (None removes)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYPS_")}
    paths = [str(ROOT), str(ROOT / "client"), str(ROOT / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("OMP_NUM_THREADS", "1")
    for name, value in (extra or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


class PythonProcess:
    """A Python process whose output goes to a file; killed when the context ends.

    `PythonProcess("worker.py", "--steps", "5")` runs a script, `PythonProcess("-c", code)` a text,
    `PythonProcess("-m", "pyps", "status")` a module.
    """

    def __init__(self, *arguments: str, env: Mapping[str, str | None] | None = None, cwd: str | Path | None = None):
        self._folder = tempfile.TemporaryDirectory(prefix="pyps-test-")
        self.folder = Path(self._folder.name)
        self._output_path = self.folder / "output.txt"
        self.arguments = [sys.executable, *arguments]
        with self._output_path.open("wb") as output:
            self._process = subprocess.Popen(
                self.arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(env),
                cwd=cwd,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, None while the process runs; the negative signal number of a killed one."""
        return self._process.poll()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def output(self) -> str:
        """Everything written so far, stdout and stderr in order."""
        return self._output_path.read_text(errors="replace")

    def wait(self, deadline_seconds: float = 120.0) -> int:
        """Waits for the end and returns the exit status; fails after the deadline, showing the output."""
        try:
            return self._process.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            message = f"{self.arguments} still runs after {deadline_seconds:g} s; its output:\n{self.output()}"
            raise AssertionError(message) from None

    def wait_for_output(self, text: str, deadline_seconds: float = 60.0) -> str:
        """Waits until `text` stands in the output and returns the output."""

        def seen() -> bool:
            return text in self.output() or not self.running

        wait_until(seen, deadline_seconds, f"{text!r} in the output of {self.arguments}")
        output = self.output()
        assert text in output, f"{self.arguments} ended without printing {text!r}; its output:\n{output}"
        return output

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def terminate(self, deadline_seconds: float = 60.0) -> int:
        """Sends SIGTERM, waits for the end, returns the exit status."""
        if self.running:
            self.signal(signal.SIGTERM)
        return self.wait(deadline_seconds)

    def kill(self) -> int:
        """Sends SIGKILL (as `kill -9`) and returns the exit status."""
        if self.running:
            self._process.kill()
        return self.wait(20.0)

    def close(self) -> None:
        """Kills the process if it still runs and removes its files."""
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


class ServerProcess(PythonProcess):
    """A running `pyps serve` on free ports, ready when the constructor returns.

    `data`, `control` and `metrics` are its addresses ("127.0.0.1:port"); flags win over free ports.
    """

    def __init__(
        self,
        *flags: str,
        env: Mapping[str, str | None] | None = None,
        cwd: str | Path | None = None,
        wait: bool = True,
    ):
        self._ready_folder = tempfile.TemporaryDirectory(prefix="pyps-ready-")
        self._ready_path = Path(self._ready_folder.name) / "ready.json"
        ports = ("--port", "0", "--control-port", "0", "--metrics-port", "0")
        super().__init__("-m", "pyps", "serve", *ports, "--ready-file", str(self._ready_path), *flags, env=env, cwd=cwd)
        self.ready: dict[str, Any] = {}
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.close()
                raise

    def wait_ready(self, deadline_seconds: float = START_SECONDS) -> None:
        """Waits until the server serves; fails with its output when it ends instead."""
        wait_until(lambda: self._ready_path.exists() or not self.running, deadline_seconds, "the server's ready file")
        if not self._ready_path.exists():
            raise AssertionError(f"the server ended with {self.returncode}; its output:\n{self.output()}")
        self.ready = json.loads(self._ready_path.read_text())

    @property
    def data(self) -> str:
        return str(self.ready["data"])

    @property
    def control(self) -> str:
        return str(self.ready["control"])

    @property
    def metrics(self) -> str:
        return str(self.ready["metrics"])

    def close(self) -> None:
        super().close()
        self._ready_folder.cleanup()

    def __enter__(self) -> ServerProcess:
        return self
