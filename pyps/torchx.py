"""A TorchX component of two roles, servers and workers: `torchx run "$(python -m pyps.torchx):train" --script FILE`.

TorchX reads annotations of types, not of strings, and knows Optional and Dict by these names.
"""

import secrets
import shlex
from pathlib import Path
from typing import Dict, List, Optional  # noqa: UP035 - the names that TorchX knows

from torchx import specs
from torchx.specs import macros

from pyps_wire.contract import DATA_PORT

# Ports of each server, as several may share a machine: data, control, metrics, lane, and spare ones.
PORTS = 10
# The variable of rank 0 has server 0's host; with another number for its 0 it has another server's, if machines differ.
# TorchX needs two dollars for one of the shell.
_SERVERS = (
    "zero={rank0}; servers=; for i in {indices}; do name=$${{zero/_0/_$$i}}; "
    "servers+=,$${{!name:-localhost}}:$$(({port} + {ports} * i)); done; export PYPS_SERVERS=$${{servers#,}}"
)


def train(
    *script_args: str,
    script: str,
    servers: int = 1,
    workers: int = 1,
    name: str = "pyps",
    image: str = "pyps",
    run_id: str = macros.app_id,
    host: str = "127.0.0.1",
    port: int = DATA_PORT,
    checkpoint_dir: str = "",
    max_restarts: int = 0,
    max_retries: int = 0,
    idle_seconds: float = 300.0,
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,
    h: Optional[str] = None,  # noqa: UP045
) -> specs.AppDef:
    """Train a script by several workers, each a process, on parameters that servers hold.

    Args:
        script_args: arguments of the script
        script: the worker's script, whose RemoteOptimizer names no servers
        servers: how many servers hold the parameters
        workers: how many workers train
        name: the job's name
        image: image with pyps, pyps-client and the script; local_cwd and slurm ignore it
        run_id: the run's name; name an earlier job's to resume its checkpoints
        host: address that servers listen on; beyond this machine they need TLS and a token in env
        port: the first server's data port; the next servers have later ones
        checkpoint_dir: folder on a disk that all machines share, where servers keep the run and find it again
        max_restarts: how often a failed worker is restarted while the others go on
        max_retries: how often the scheduler restarts the whole job, if it can
        idle_seconds: how long a server without any worker waits before it ends
        env: variables of all processes; PYPS_ ones are settings of servers (PYPS_PROTOCOL) and workers
        mounts: mounts of all containers, as in dist.ddp
        cpu: processors of each server and worker
        gpu: GPUs of each worker
        memMB: memory of each server and worker in MB
        h: a registered named resource for workers, instead of cpu, gpu and memMB
    """
    for option, number, least in (
        ("servers", servers, 1),
        ("workers", workers, 1),
        ("port", port, 1),
        ("max_restarts", max_restarts, 0),
        ("idle_seconds", idle_seconds, 1),
    ):
        if number < least:
            raise ValueError(f"--{option} is {number}; expected {least} or more")
    serve = ["pyps", "serve", "--host", host, "--run-id", run_id, "--expected-workers", str(workers)]
    # Between two lives of the only worker there is none.
    serve += ["--exit-when", f"{'finished' if max_restarts else 'gone'},idle={idle_seconds}"]
    if checkpoint_dir:
        serve += ["--checkpoint-dir", f"{checkpoint_dir}/server-{macros.replica_id}", "--resume"]
    first = f"$$(({port} + {PORTS} * {macros.replica_id}"
    flags = ("port", "control-port", "metrics-port", "lane-port")
    ports = " ".join(f"--{flag} {first} + {offset}))" for offset, flag in enumerate(flags))
    again = ["torchrun", "--standalone", "--nproc-per-node", "1", "--max-restarts", str(max_restarts)]
    work = [*(again if max_restarts else ["python"]), script, *script_args]
    found = _SERVERS.format(rank0=macros.rank0_env, indices=" ".join(map(str, range(servers))), port=port, ports=PORTS)
    place = {
        "PYPS_RUN_ID": run_id,
        "PYPS_WORKER_ID": f"worker-{macros.replica_id}",
        "PYPS_WORKER_INDEX": macros.replica_id,
        "PYPS_WORKER_COUNT": str(workers),
        # With it a restarted worker replaces the one that died at once.
        "PYPS_WORKER_KEY": f"{secrets.token_hex(16)}-{macros.replica_id}",
        "PYPS_PROCESS_HOOKS": "1",
    }
    common = {"image": image, "entrypoint": "bash", "max_retries": max_retries}
    return specs.AppDef(
        name=name,
        roles=[
            # First, since schedulers publish the hosts of the first role.
            specs.Role(
                name="server",
                args=["-c", f"exec {shlex.join(serve)} {ports}"],
                env=dict(env or {}),
                num_replicas=servers,
                port_map={"data": port},
                resource=specs.resource(cpu=cpu, memMB=memMB),
                mounts=specs.parse_mounts(mounts or []),
                **common,
            ),
            specs.Role(
                name="worker",
                args=["-c", f"{found}; exec {shlex.join(work)}"],
                env={**place, **(env or {})},
                num_replicas=workers,
                resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
                mounts=specs.parse_mounts(mounts or []),
                **common,
            ),
        ],
    )


if __name__ == "__main__":
    print(Path(__file__).resolve())
