"""The settings of a job, and the variables of its workers, which pyps_client reads by default."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyps.config import ServerConfig, flag_name, resolve
from pyps.units import counted
from pyps_client import Launch, leave

# How long servers may take until they serve: they may have to read a large checkpoint first.
START_SECONDS = 600.0


@dataclass(frozen=True)
class JobSettings:
    """The settings of a job.

    Args:
        command: What each worker runs.
        num_parts: Processes of each worker, which torch.distributed connects; None for plain workers.
        restarts_max: How often a failed worker is restarted, with all its processes.
        run_id: The run's name; "" makes one.
        server_flags: Flags of every server.
        config: The configuration of the servers, as `check_job` returns it.
        coordinator_flags: Flags of `pyps coordinate`; None for a job without a coordinator.
        standby: Whether each server has a standby.
        newest_checkpoint: Returns where the newest checkpoint of the server of that name is; None without one.
        after_a_death: Returns advice, in a sentence, once the server of that name has died.
        worker_stop_seconds: How long workers may take to end after SIGTERM.
        replica_end_seconds: How long the other processes of a replica that lost one may take to end.
        replica_early_seconds: How long after the first process of a replica finished the others are announced.
    """

    command: tuple[str, ...]
    num_servers: int = 1
    num_workers: int = 1
    num_parts: int | None = None
    restarts_max: int = 0
    run_id: str = ""
    server_flags: tuple[str, ...] = ()
    config: ServerConfig = field(default_factory=ServerConfig)
    coordinator_flags: tuple[str, ...] | None = None
    standby: bool = False
    newest_checkpoint: Callable[[str], Path | None] = lambda name: None
    after_a_death: Callable[[str], str] = lambda name: ""
    worker_stop_seconds: float = 10.0
    replica_end_seconds: float = 10.0
    replica_early_seconds: float = 60.0

    @property
    def num_processes(self) -> int:
        return self.num_parts or 1

    def workers_in_words(self) -> str:
        """Return "3 workers" or "2 replicas of 2 processes"."""
        words = counted(self.num_workers, workers_noun(self.num_processes))
        return f"{words} of {self.num_processes} processes" if self.num_processes > 1 else words

    def process_name(self, index: int, rank: int) -> str:
        """Return the name of a process: "worker-0", or "replica-0.1" among several."""
        name = worker_name(index, self.num_processes)
        return f"{name}.{rank}" if self.num_processes > 1 else name


def workers_noun(num_processes: int) -> str:
    return "replica" if num_processes > 1 else "worker"


def worker_name(index: int, num_processes: int) -> str:
    """Return the name of a worker in the run: "worker-0" or "replica-0"."""
    return f"{workers_noun(num_processes)}-{index}"


@dataclass(frozen=True)
class Group:
    """The place of a process in its worker, and the port where the worker's processes meet."""

    rank: int
    size: int
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
    """Return the environment of worker `index` of `count`, or of one of its processes if there is a group.

    `key` is the worker's secret, the same in all of its lives; `gpus` are given to the processes in turn.
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
        # The variables of torch.distributed are those that torchrun sets.
        environment |= {
            "PYPS_PARTS": str(group.size),
            "RANK": str(group.rank),
            "LOCAL_RANK": str(group.rank),
            "WORLD_SIZE": str(group.size),
            "LOCAL_WORLD_SIZE": str(group.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(group.master_port),
        }
        # gloo's default is reachable from other machines.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # pyps_client then prints an exception as one sentence, and sends Leave at the end.
    environment.setdefault(leave.VARIABLE, "1")
    environment.setdefault("PYTHONUNBUFFERED", "1")
    # Processes that each use all cores slow each other down.
    cores = max(1, len(os.sched_getaffinity(0)) // (count * num_parts))
    environment.setdefault("OMP_NUM_THREADS", str(cores))
    if gpus:
        # Process k finds its GPU as cuda:k.
        own = dict.fromkeys(gpus[(index * num_parts + rank) % len(gpus)] for rank in range(num_parts))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return environment | own_path(inherited)


def own_path(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the PATH with this environment's python first, unless another environment is active."""
    if {"VIRTUAL_ENV", "CONDA_PREFIX"} & inherited.keys():
        return {}
    return {"PATH": os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)])}


def own_flags(config: ServerConfig, server: str, ready_file: Path | None) -> tuple[str, ...]:
    """Return the flags of one server: free ports, its ready file, and its folders inside the job's."""
    ports = {"port": "0", "control_port": "0", "metrics_port": "0"}
    ports["lane_port"] = "off" if config.lane_port == "off" else "0"
    folders = {name: getattr(config, name) for name in ("checkpoint_dir", "update_log")}
    own = {name: str(folder / server) for name, folder in folders.items() if folder}
    return spelled({**ports, "ready_file": str(ready_file or ""), **own})


def check_job(
    settings: Mapping[str, Any], config: Path | None = None, *, num_servers: int, num_workers: int
) -> ServerConfig:
    """Return the configuration of every server of a job, from settings by their names and a TOML file.

    Raises:
        PypsError: A server, a worker, or the run with all its servers would refuse a setting.
    """
    given = {name: value for name, value in settings.items() if value not in ("", None)}
    # A job's servers take free ports whatever the environment says. Each server logs by itself what it ignores.
    ports = {"port": "0", "control_port": "0", "metrics_port": "0"}
    resolved = resolve(given | ports, os.environ, config, warn=lambda line: None)
    resolved.behaviour.aggregation.check_servers(num_servers)
    address = ["127.0.0.1:1"]
    environment = worker_environment(
        os.environ, index=0, count=num_workers, data_addresses=address, control_addresses=address, run_id=""
    )
    Launch(environment=environment)
    return resolved


def spelled(settings: Mapping[str, str | bool | None], config: Path | None = None) -> tuple[str, ...]:
    """Return the flags of `pyps serve` for settings by their names; empty ones are left out."""
    flags: list[str] = []
    for name, value in {**settings, "config": str(config or "")}.items():
        if isinstance(value, bool):
            flags.append(flag_name(name) if value else flag_name(f"no_{name}"))
        elif value:
            flags += [flag_name(name), value]
    return tuple(flags)


def visible_gpus(inherited: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs of an inherited CUDA_VISIBLE_DEVICES, else all that nvidia-smi lists."""
    if "CUDA_VISIBLE_DEVICES" in inherited:
        return tuple(name.strip() for name in inherited["CUDA_VISIBLE_DEVICES"].split(",") if name.strip())
    program = shutil.which("nvidia-smi", path=inherited.get("PATH"))
    if program is None:
        return ()
    try:
        listing = subprocess.check_output(
            [program, "-L"], text=True, timeout=20, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    # "GPU 0: NVIDIA H200 (UUID: ...)" gives "0".
    return tuple(re.findall(r"^GPU (\w+)", listing, re.MULTILINE))
