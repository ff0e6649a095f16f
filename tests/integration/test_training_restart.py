"""A real training whose servers all end midway and come back from their checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from inspection import inspect
from support import ROOT, PythonProcess, ServerProcess

StartServer = Callable[..., ServerProcess]
StartPython = Callable[..., PythonProcess]

NUM_WORKERS = 2


def test_workers_train_on_by_themselves_after_sigterm_and_resume_of_all_servers(
    start_server_process: StartServer, start_python: StartPython, tmp_path: Path
) -> None:
    folders = [("--checkpoint-dir", str(tmp_path / f"server-{index}")) for index in range(2)]
    servers = [start_server_process(*folder) for folder in folders]
    addresses = [server.data for server in servers]
    workers = [start_digits(start_python, addresses, index) for index in range(NUM_WORKERS)]
    for worker in workers:
        worker.wait_for_output("epoch   0", 60)

    for server in servers:
        assert server.terminate() == 0
        assert "checkpoint written" in server.output()
    resumed = [
        start_server_process(*folder, "--resume", "--port", address.rpartition(":")[2])
        for folder, address in zip(folders, addresses, strict=True)
    ]

    for worker in workers:
        assert worker.wait(90) == 0, worker.output()
        assert re.search(r"held-out accuracy 0\.9[5-9]", worker.output()), worker.output()
    for server in resumed:
        status = inspect(server.control, "GetStatus")
        assert (status.run_id, status.epoch, status.workers_alive) == ("digits", 1, 0)
        # Counted since the restart.
        assert status.version_max > status.updates > 0


def start_digits(start_python: StartPython, servers: list[str], index: int) -> PythonProcess:
    """One worker of the digits example, as a person starts it."""
    settings = {
        "PYPS_SERVERS": ",".join(servers),
        "PYPS_RUN_ID": "digits",
        "PYPS_WORKER_INDEX": str(index),
        "PYPS_WORKER_COUNT": str(NUM_WORKERS),
    }
    return start_python(str(ROOT / "examples" / "digits.py"), "--epochs", "40", env=settings)
