"""The settings of a job, and its workers' environment: the variables that pyps_client reads by default."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyps.config import ServerConfig, flag_name, resolve
from pyps.units import counted
from pyps_client import Launch, leave

# How long servers may take to serve: they read a large checkpoint before.
START_SECONDS = 600.0


@dataclass(frozen=True)
class JobSettings:
    """The settings of a job."""

    # What each worker runs.
    command: tuple[str, ...]
    num_servers: int = 1
    # Workers of the run; with parts each of them is a replica of so many processes.
    num_workers: int = 1
    # Processes in each replica, which find each other through torch.distributed; None for plain workers.
    num_parts: int | None = None
    # How often a worker that failed, or a replica that lost a process, is started again.
    restarts_max: int = 0
    # The run's name; one is made where none is given.
    run_id: str = ""
    # The servers continue a checkpoint, whose run they hold then.
    resume: bool = False
    # Whether the servers offer lanes, at free ports.
    lanes: bool = True
    # Flags that every server gets, and one list more for each of them.
    server_flags: tuple[str, ...] = ()
    each_server_flags: tuple[tuple[str, ...], ...] = ()
    # Flags of `pyps coordinate`; None for a job without a coordinator.
    coordinator_flags: tuple[str, ...] | None = None
    # What somebody may do once the server of that name has died, in a sentence.
    after_a_death: Callable[[str], str] = lambda name: ""
    # How long a server may take to serve, and workers and servers to end after they were asked to.
    start_seconds: float = START_SECONDS
    worker_stop_seconds: float = 10.0
    server_stop_seconds: float = 30.0
    # How long the other processes of a replica that lost one may take to see it for themselves.
    replica_end_seconds: float = 10.0
    # How long they may go on after one of them that finished, before somebody is told.
    replica_early_seconds: float = 60.0
    # How long a coordinator may outlive the workers: it tells how the run ended.
    coordinator_end_seconds: float = 15.0

    @property
    def num_processes(self) -> int:
        """Processes in each worker, 1 in a plain one."""
        return self.num_parts or 1

    def workers_in_words(self) -> str:
        """How many workers, as "3 workers" or "2 replicas of 2 processes"."""
        words = counted(self.num_workers, workers_noun(self.num_processes))
        return f"{words} of {self.num_processes} processes" if self.num_processes > 1 else words

    def process_name(self, index: int, rank: int) -> str:
        """What a process of a worker is called on the terminal: "worker-0", or "replica-0.1" among several."""
        name = worker_name(index, self.num_processes)
        return f"{name}.{rank}" if self.num_processes > 1 else name


def workers_noun(num_processes: int) -> str:
    """What a worker of so many processes is called."""
    return "replica" if num_processes > 1 else "worker"


def worker_name(index: int, num_processes: int) -> str:
    """The name of a worker in the run: "worker-0", or "replica-0" where it consists of several processes."""
    return f"{workers_noun(num_processes)}-{index}"


NVIDIA_SMI_SECONDS = 20.0


@dataclass(frozen=True)
class Group:
    """The place of a process among those of its worker."""

    # Its own number among them, and how many they are.
    rank: int
    size: int
    # Where they meet, a port of this machine.
    master_port: int


def worker_environment(
    inherited: Mapping[str, str],
    *,
    index: int,
    count: int,
    data_addresses: Sequence[str],
    control_addresses: Sequence[str],
    run_id: str,
    key: str = "",
    gpus: Sequence[str] = (),
    group: Group | None = None,
) -> dict[str, str]:
    """The environment of worker `index` of `count`: the inherited one, where its servers are, and its key.

    With a group, that of one of its processes: where the others are too.
    """
    environment = dict(inherited)
    num_parts = group.size if group else 1
    environment |= {
        "PYPS_SERVERS": ",".join(data_addresses),
        "PYPS_CONTROL": ",".join(control_addresses),
        "PYPS_RUN_ID": run_id,
        "PYPS_WORKER_INDEX": str(index),
        "PYPS_WORKER_COUNT": str(count),
        "PYPS_WORKER_ID": worker_name(index, num_parts),
        "PYPS_WORKER_KEY": key,
    }
    if group:
        environment["PYPS_PARTS"] = str(group.size)
        # What torch.distributed reads, as torchrun would set it where nothing but this group runs.
        environment |= {
            "RANK": str(group.rank),
            "LOCAL_RANK": str(group.rank),
            "WORLD_SIZE": str(group.size),
            "LOCAL_WORLD_SIZE": str(group.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(group.master_port),
        }
        # By itself gloo listens where the machine's name points to, beyond this machine.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Its exception hook says an error in one sentence, and its end sends Leave.
    environment.setdefault(leave.VARIABLE, "1")
    # Lines appear when they are printed, not when a pipe's buffer is full.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    # Processes that each take all cores for their arithmetic slow each other down.
    cores = len(os.sched_getaffinity(0)) // (count * num_parts)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
    if gpus:
        # Handed out in turn: that of process k is cuda:k. Each is named once where a worker has more processes.
        own = dict.fromkeys(gpus[(index * num_parts + rank) % len(gpus)] for rank in range(num_parts))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return environment | own_path(inherited)


def own_path(inherited: Mapping[str, str]) -> dict[str, str]:
    """The PATH by which `.venv/bin/pyps run -- python script.py` means that environment's python.

    Empty where another environment is active, which goes before.
    """
    if {"VIRTUAL_ENV", "CONDA_PREFIX"} & inherited.keys():
        return {}
    return {"PATH": os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)])}


def check_job(
    settings: Mapping[str, Any], config: Path | None = None, *, num_servers: int, num_workers: int
) -> ServerConfig:
    """Return the configuration of every server of a job, before anything is started.

    Args:
        settings: Settings of the servers by their names; empty ones are left out.
        config: A TOML file with more.
        num_servers: The job's servers.
        num_workers: The job's workers.

    Raises:
        PypsError: For what every server, every worker, or the run once it has all its servers would refuse.
    """
    given = {name: value for name, value in settings.items() if value not in ("", None)}
    # A launcher takes free ports whatever the environment says; each server warns by itself of what it ignores.
    ports = {"port": "0", "control_port": "0", "metrics_port": "0"}
    resolved = resolve(given | ports, os.environ, config, warn=lambda line: None)
    resolved.behaviour.aggregation.check_servers(num_servers)
    check_workers(num_workers)
    return resolved


def check_workers(num_workers: int) -> None:
    """Raise ConfigError or BadRequest for variables that all workers of a job would refuse."""
    environment = worker_environment(
        os.environ,
        index=0,
        count=num_workers,
        data_addresses=["127.0.0.1:1"],
        control_addresses=["127.0.0.1:2"],
        run_id="",
    )
    Launch.from_environment(environment=environment)


def spelled(settings: Mapping[str, str | bool | None], config: Path | None = None) -> tuple[str, ...]:
    """Return the flags of `pyps serve` for settings by their names; empty ones are left out."""
    flags: list[str] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            flags.append(flag_name(name) if value else flag_name(f"no_{name}"))
        elif value:
            flags += [flag_name(name), value]
    return (*flags, *(("--config", str(config)) if config else ()))


def visible_gpus(inherited: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs to hand out: those of an inherited CUDA_VISIBLE_DEVICES, else all that nvidia-smi lists."""
    if "CUDA_VISIBLE_DEVICES" in inherited:
        return tuple(name.strip() for name in inherited["CUDA_VISIBLE_DEVICES"].split(",") if name.strip())
    program = shutil.which("nvidia-smi", path=inherited.get("PATH"))
    if program is None:
        return ()
    command = [program, "-L"]
    try:
        listing = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    # "GPU 0: NVIDIA H200 (UUID: ...)" gives "0".
    return tuple(re.findall(r"^GPU (\w+)", listing.stdout, re.MULTILINE))
