"""What a worker process is told: the environment variables that pyps_client reads by default."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pyps.config import ConfigError, unknown_variables
from pyps_client import Launch

NVIDIA_SMI_SECONDS = 20.0
# A variable so like a setting is a slip of the pen; others may be the worker's own.
SLIP_LIKENESS = 0.85


def worker_environment(
    inherited: Mapping[str, str],
    *,
    index: int,
    count: int,
    data_addresses: Sequence[str],
    control_addresses: Sequence[str],
    run_id: str,
    gpus: Sequence[str] = (),
) -> dict[str, str]:
    """The environment of worker `index` of `count`: the inherited one and where its servers are."""
    environment = dict(inherited)
    environment |= {
        "PYPS_SERVERS": ",".join(data_addresses),
        "PYPS_CONTROL": ",".join(control_addresses),
        "PYPS_RUN_ID": run_id,
        "PYPS_WORKER_INDEX": str(index),
        "PYPS_WORKER_COUNT": str(count),
        "PYPS_WORKER_ID": f"worker-{index}",
    }
    # Lines appear when they are printed, not when a pipe's buffer is full.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    # Workers that each take all cores for their arithmetic slow each other down.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[index % len(gpus)]
        environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if not {"VIRTUAL_ENV", "CONDA_PREFIX"} & inherited.keys():
        # `.venv/bin/pyps run -- python script.py` means that environment's python.
        folder = str(Path(sys.executable).parent)
        environment["PATH"] = os.pathsep.join([folder, inherited.get("PATH", os.defpath)])
    return environment


def check_worker_variables(inherited: Mapping[str, str], *, count: int) -> None:
    """Refuses variables that all of `count` workers would refuse, or that nobody would read for a slip in the name.

    Raises ConfigError or BadRequest, before anything is started.
    """
    for name, near in unknown_variables(inherited, likeness=SLIP_LIKENESS):
        if near:
            raise ConfigError(f"{name} in the environment is no setting: did you mean {near}? Unset {name}")
    places = {"data_addresses": ["127.0.0.1:1"], "control_addresses": ["127.0.0.1:2"]}
    environment = worker_environment(inherited, index=0, count=count, run_id="", **places)
    Launch.from_environment(environment=environment)


def visible_gpus(inherited: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs to hand out: those of an inherited CUDA_VISIBLE_DEVICES, else all that nvidia-smi lists."""
    if "CUDA_VISIBLE_DEVICES" in inherited:
        return tuple(name.strip() for name in inherited["CUDA_VISIBLE_DEVICES"].split(",") if name.strip())
    program = shutil.which("nvidia-smi", path=inherited.get("PATH"))
    if program is None:
        return ()
    try:
        listing = subprocess.run(
            [program, "-L"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if listing.returncode != 0:
        return ()
    return gpu_indices(listing.stdout)


def gpu_indices(listing: str) -> tuple[str, ...]:
    """The indices in the output of `nvidia-smi -L`: "GPU 0: NVIDIA H200 (UUID: ...)" gives "0"."""
    lines = [line for line in listing.splitlines() if line.startswith("GPU ")]
    return tuple(line.removeprefix("GPU ").split(":")[0].strip() for line in lines)
