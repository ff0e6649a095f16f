"""Replicas for tests: processes that a test forks, on servers of its own, told what `pyps run --parts` would tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from pyps.launcher.environment import Group, worker_environment
from pyps.launcher.ports import free_port
from pyps_wire import inspector_pb2 as pb
from support import AnyServer, PythonProcess, inspect, wait_until, workers_of

Start = Callable[..., PythonProcess]
SCRIPT = str(Path(__file__).resolve().parent / "replica_script.py")
DEADLINE = 120.0
RUN_ID = "job"
# What a forked process is told; anything else would have it start anew (support.PythonProcess).
TOLD = re.compile(r"PYPS_|RANK|WORLD_SIZE|LOCAL_|MASTER_|GLOO_")


class ReplicaJob:
    """Replicas of `parts` processes each, all begun."""

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
        # By replica and process.
        self.processes: dict[tuple[int, int], PythonProcess] = {}
        for index in range(replicas):
            port = free_port()
            for rank in range(parts):
                told = worker_environment(
                    {},
                    index=index,
                    count=replicas,
                    data_addresses=[server.data for server in servers],
                    control_addresses=self.addresses,
                    run_id=RUN_ID,
                    group=Group(rank, parts, port),
                )
                environment = {name: value for name, value in told.items() if TOLD.match(name)}
                self.processes[index, rank] = start_python(script, *arguments, env=environment)

    def ended_well(self) -> list[str]:
        """Waits for all ends, of which each must be a good one, and returns what was said."""
        for process in self.processes.values():
            assert process.wait(DEADLINE) == 0, process.output()
        return [process.output() for process in self.processes.values()]


def serve(
    start_server: Callable[..., AnyServer], count: int, *flags: str, replicas: int = 1, checkpoints: Path | None = None
) -> list[AnyServer]:
    """Starts the servers of a job, with a folder for the checkpoints of each where there is one for all."""
    own = [("--checkpoint-dir", str(checkpoints / f"server-{i}")) if checkpoints else () for i in range(count)]
    fixed = ("--run-id", RUN_ID, "--expected-workers", str(replicas))
    return [start_server(*fixed, *of_server, *flags) for of_server in own]


def shards_of(addresses: list[str]) -> list[pb.ShardInfo]:
    """The shards of all servers."""
    return [shard for address in addresses for shard in inspect(address, "ListShards").shards]


def wait_for_pushes(job: ReplicaJob, names: set[str]) -> None:
    """Waits until each of these processes has pushed."""

    def all_have_pushed() -> bool:
        return names <= {name for a in job.addresses for name, w in workers_of(a).items() if w.pushes_applied}

    wait_until(all_have_pushed, DEADLINE, f"a push of each of {sorted(names)}")
