"""Replicas for tests: processes that a test forks, on servers of its own, told what `pyps run --parts` would tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from inspection import inspect
from pyps.launcher.environment import Group, worker_environment
from pyps.launcher.ports import free_port
from pyps_wire import inspector_pb2 as pb
from support import AnyServer, PythonProcess, wait_until

Start = Callable[..., PythonProcess]
SCRIPT = str(Path(__file__).resolve().parent / "replica_script.py")
DEADLINE = 120.0
RUN_ID = "job"
# What a forked process is told; anything else would have it start anew (support.PythonProcess).
TOLD = re.compile(r"PYPS_|RANK|WORLD_SIZE|LOCAL_|MASTER_|GLOO_")


class ReplicaJob:
    """Replicas of `parts` processes each, all begun; `start` begins one once more."""

    def __init__(
        self,
        start_python: Start,
        servers: Sequence[AnyServer],
        *arguments: str,
        script: str = SCRIPT,
        replicas: int = 1,
        parts: int = 2,
    ) -> None:
        self.servers = servers
        self.addresses = [server.control for server in servers]
        # All lives, by replica and process.
        self.processes: dict[tuple[int, int], list[PythonProcess]] = {}
        self._start_python, self._command = start_python, (script, *arguments)
        self._replicas, self._parts = replicas, parts
        for index in range(replicas):
            self.start(index)

    def start(self, index: int) -> None:
        """Starts the processes of a replica."""
        port = free_port()
        for rank in range(self._parts):
            told = worker_environment(
                {},
                index=index,
                count=self._replicas,
                data_addresses=[server.data for server in self.servers],
                control_addresses=self.addresses,
                run_id=RUN_ID,
                group=Group(rank, self._parts, port),
            )
            environment = {name: value for name, value in told.items() if TOLD.match(name)}
            process = self._start_python(*self._command, env=environment)
            self.processes.setdefault((index, rank), []).append(process)

    def outputs(self) -> list[str]:
        """What the latest life of each process said."""
        return [lives[-1].output() for _, lives in sorted(self.processes.items())]

    def wait_for_output(self, text: str) -> None:
        """Waits until every process has said so in its latest life."""
        for lives in self.processes.values():
            lives[-1].wait_for_output(text, DEADLINE)

    def ended_well(self) -> list[str]:
        """Waits for all ends, of which each must be a good one, and returns what was said."""
        for lives in self.processes.values():
            assert lives[-1].wait(DEADLINE) == 0, lives[-1].output()
        return self.outputs()


def serve(
    start_server: Callable[..., AnyServer], count: int, *flags: str, replicas: int = 1, checkpoints: Path | None = None
) -> list[AnyServer]:
    """Starts the servers of a job, with a folder for the checkpoints of each where there is one for all."""
    own = [("--checkpoint-dir", str(checkpoints / f"server-{i}")) if checkpoints else () for i in range(count)]
    fixed = ("--run-id", RUN_ID, "--expected-workers", str(replicas))
    return [start_server(*fixed, *of_server, *flags) for of_server in own]


def workers_of(address: str) -> dict[str, pb.WorkerInfo]:
    """The processes that the server knows, by their names in the run."""
    return {worker.worker_id: worker for worker in inspect(address, "ListWorkers").workers}


def shards_of(addresses: list[str]) -> list[pb.ShardInfo]:
    """The shards of all servers."""
    return [shard for address in addresses for shard in inspect(address, "ListShards").shards]


def wait_for_pushes(job: ReplicaJob, names: set[str]) -> None:
    """Waits until each of these processes has pushed."""

    def all_have_pushed() -> bool:
        return names <= {name for a in job.addresses for name, w in workers_of(a).items() if w.pushes_applied}

    wait_until(all_have_pushed, DEADLINE, f"a push of each of {sorted(names)}")
