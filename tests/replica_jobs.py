"""Jobs of replicas for tests: `pyps run` with tests/replica_script.py, and what their servers say of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from inspection import inspect
from pyps_wire import inspector_pb2 as pb
from support import PythonProcess

Start = Callable[..., PythonProcess]
SCRIPT = str(Path(__file__).resolve().parent / "replica_script.py")
# Every process loads torch and its distributed part; on a busy machine that takes its time.
DEADLINE = 300.0


def run(start_python: Start, *flags: str, script: tuple[str, ...] = ()) -> PythonProcess:
    """Starts a job whose processes run the script."""
    return start_python("-m", "pyps", "run", *flags, "--", "python", SCRIPT, *script)


def control_addresses(job: PythonProcess) -> list[str]:
    """Where the job's servers are asked, by their index, once they serve."""
    text = job.wait_for_output("pyps status --servers", DEADLINE)
    found = re.search(r"pyps status --servers (\S+)", text)
    assert found
    return found[1].split(",")


def workers_of(address: str) -> dict[str, pb.WorkerInfo]:
    """The processes that the server knows, by their names in the run."""
    return {worker.worker_id: worker for worker in inspect(address, "ListWorkers").workers}


def shards_of(addresses: list[str]) -> list[pb.ShardInfo]:
    """The shards of all servers."""
    return [shard for address in addresses for shard in inspect(address, "ListShards").shards]
