"""A Sandblaster job of real processes for tests: servers, workers that run one script, coordinators."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from client_support import addresses, start_servers
from pyps_wire.work_pb2 import GetWorkRequest
from support import ROOT, AnyServer, PythonProcess, ServerProcess, inspect, wait_until

SCRIPT = ROOT / "tests" / "sandblaster_script.py"
FLAGS = ("--protocol", "sandblaster", "--run-id", "blast")
# Enough for many iterations of a small model on a machine that is busy with others.
END_SECONDS = 120.0


class Coordinated:
    """The processes of one job; those that start them end them too."""

    def __init__(
        self,
        start_server: Callable[..., AnyServer],
        start_python: Callable[..., PythonProcess],
        *,
        servers: int = 2,
        server_flags: Sequence[str] = (),
        checkpoints: Path | None = None,
    ) -> None:
        """`checkpoints`: a folder for those of all servers, which `revive` needs, as it needs servers that can die."""
        self._start_server = start_server
        self._start_python = start_python
        self._checkpoints = checkpoints
        if checkpoints is None:
            self.servers = start_servers(start_server, servers, *FLAGS, *server_flags)
        else:
            self.servers = [
                start_server(*FLAGS, *server_flags, "--checkpoint-dir", self._folder(server))
                for server in range(servers)
            ]
        self.addresses = addresses(self.servers)
        self.workers: list[PythonProcess] = []

    def hire(self, count: int = 1, *arguments: str) -> PythonProcess:
        """Starts workers and returns the last of them."""
        for _ in range(count):
            worker_id = f"worker-{len(self.workers)}"
            own = {"PYPS_SERVERS": self.addresses, "PYPS_RUN_ID": "blast", "PYPS_WORKER_ID": worker_id}
            self.workers.append(self._start_python(str(SCRIPT), *arguments, env=own))
        return self.workers[-1]

    def coordinate(self, *flags: str, env: Mapping[str, str | None] | None = None) -> PythonProcess:
        """Starts a coordinator that tells what it does as JSON."""
        command = ("-m", "pyps", "coordinate", "--servers", self.addresses, "--run-id", "blast", "--json")
        return self._start_python(*command, *flags, env={"PYPS_START_WAIT_SECONDS": "60", **(env or {})})

    def revive(self, server: int) -> None:
        """Kills a server and starts it again, from its newest checkpoint and at its old address."""
        killed = self.servers[server]
        assert isinstance(killed, ServerProcess)
        killed.kill()
        port = killed.data.rpartition(":")[2]
        self.servers[server] = self._start_server(
            *("--protocol", "sandblaster", "--port", port, "--checkpoint-dir", self._folder(server), "--resume")
        )

    def work(self) -> Any:
        """Where the work stands, as server 0 says."""
        return inspect(self.servers[0].control, "GetWork", GetWorkRequest())

    def wait_for_data(self) -> None:
        """Waits until a worker has opened the data set."""
        wait_until(lambda: self.work().HasField("data"), END_SECONDS, "a data set's opening")

    def bits(self) -> str:
        """The bits of the parameters with which all workers ended that are still there, the same for all."""
        found = set()
        for worker in self.workers:
            if worker.returncode == -9:
                continue
            assert worker.wait(END_SECONDS) == 0, worker.output()
            match = re.search(r"^bits (\w+)$", worker.output(), re.M)
            assert match is not None, worker.output()
            found.add(match[1])
        assert len(found) == 1
        return found.pop()

    def _folder(self, server: int) -> str:
        assert self._checkpoints is not None, "a job whose servers come back keeps checkpoints"
        return str(self._checkpoints / f"server-{server}")


def figures(coordinator: PythonProcess) -> list[dict[str, Any]]:
    """What a coordinator told of its iterations so far."""
    return [line for line in _lines(coordinator) if "iteration" in line]


def summary(coordinator: PythonProcess) -> dict[str, Any]:
    """How a coordinator ended, which must have gone well."""
    assert coordinator.wait(END_SECONDS) == 0, coordinator.output()
    return next(line["summary"] for line in _lines(coordinator) if "summary" in line)


def planned_bytes(coordinator: PythonProcess) -> int:
    """What vectors and staged gradients take on all servers at most, as a coordinator told when it attached."""
    planned: int = next(line["attached"]["planned_bytes"] for line in _lines(coordinator) if "attached" in line)
    return planned


def _lines(coordinator: PythonProcess) -> list[dict[str, Any]]:
    complete = coordinator.output().rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines() if line.startswith("{")]
