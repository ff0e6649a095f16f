"""`pyps slurm`: a batch script for a job of servers and workers under Slurm, printed or submitted."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from pyps.cli.run import CONTEXT_SETTINGS as CONTEXT_SETTINGS
from pyps.cli.run import SERVERS_MAX, ConfigFile, Kept, WorkerCommand
from pyps.cli.serve import OF_A_JOB, with_settings
from pyps.config import ConfigError
from pyps.launcher.environment import check_job, own_path, spelled

WORKERS_MAX = 10_000
# A link to deploy/slurm/train.sbatch.
_PLAIN = Path(__file__).with_name("train.sbatch")
# Options of sbatch that the script sets: for all nodes, and for the servers' nodes.
_OWN = {
    **dict.fromkeys(("--ntasks", "-n"), "--workers says how many workers there are, and --servers how many servers"),
    **dict.fromkeys(("--job-name", "-J"), "--run-id names the job"),
}
_OWN_OF_SERVERS = _OWN | dict.fromkeys(
    ("--nodes", "-N", "--ntasks-per-node"), "--servers says how many there are, each on a node"
)


@with_settings(*OF_A_JOB, "checkpoint_seconds", "init_from")
def slurm(
    command: WorkerCommand,
    servers: Annotated[int, typer.Option(help="Servers, each on a node of its own.", min=1, max=SERVERS_MAX)] = 2,
    workers: Annotated[int, typer.Option(help="Workers, each a task.", min=1, max=WORKERS_MAX)] = 1,
    standby: Annotated[
        bool, typer.Option("--standby", help="Give each server a standby, on a node of its own, for when it dies.")
    ] = False,
    run_id: Annotated[str, typer.Option(help="The name of the run, and of the job.")] = "pyps",
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder that all nodes see, for checkpoints, the servers' logs, and keys while the job runs; "
            "by default runs/ and the run's name.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the newest checkpoint in the folder.")] = False,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTIONS", help="Options of sbatch for all nodes, as '--partition=long --time=9:00:00'."),
    ] = None,
    server_sbatch: Annotated[
        list[str] | None, typer.Option(metavar="OPTIONS", help="The same for the servers' nodes alone.")
    ] = None,
    worker_sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTIONS", help="The same for the workers', as '--gpus-per-task=1 --cpus-per-task=8'."),
    ] = None,
    config: ConfigFile = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print the script instead of submitting it.")] = False,
    **settings: str | bool | None,
) -> None:
    """Submit a job to Slurm: servers and workers on nodes of their own, until the workers are done.

    Its exit status is the workers'. scancel, preemption, the time limit and the loss of a server's node leave
    checkpoints in the folder. A job that Slurm requeues continues from them, a new one with --resume.
    """
    folder = folder or Path("runs", run_id)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", run_id):
        raise ConfigError(f"--run-id is {run_id!r}; expected letters, digits, . _ and -, as it names the job too")
    check_job({**settings, "expected_workers": str(workers)}, config, num_servers=servers, num_workers=workers)
    for_all = _lines("--sbatch", sbatch, refused=_OWN)
    chosen = _CHOSEN.format(
        run_id=run_id,
        servers=servers,
        nodes=2 * servers if standby else servers,
        workers=workers,
        server_sbatch=for_all + _lines("--server-sbatch", server_sbatch, refused=_OWN_OF_SERVERS),
        worker_sbatch=for_all + _lines("--worker-sbatch", worker_sbatch, refused=_OWN),
        folder=shlex.quote(str(folder)),
        resume="--resume" if resume else "",
        server_flags=shlex.join(spelled(settings, config)),
        worker=shlex.join(command),
    )
    _, line, below = _PLAIN.read_text(encoding="utf-8").partition("# -----")
    script = chosen + line + below
    if only_print:
        typer.echo(script, nl=False)
        return
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"--folder is {folder}, but {nearest} is a file: name another")
    kept = Kept(folder, servers)
    if resume:
        if not kept.fit_servers():
            # An earlier job may still write some.
            typer.echo(f"There is nothing to resume in {folder} yet: without a checkpoint a new run begins.", err=True)
    elif kept.newest():
        raise ConfigError(f"{folder} holds a run already: continue it with --resume, or name another --folder")
    # Jobs inherit the PATH.
    environment = os.environ | own_path(os.environ)
    try:
        # It prints the job's number.
        status = subprocess.run(["sbatch"], input=script, text=True, env=environment, check=False).returncode
    except FileNotFoundError:
        raise ConfigError(
            "sbatch is not on the PATH: submit on a machine of the cluster, or take the script by --print"
        ) from None
    raise typer.Exit(status)


def _lines(flag: str, given: Sequence[str] | None, *, refused: Mapping[str, str]) -> str:
    """Return the script's lines for options of sbatch; refuse options that the script sets."""
    for text in given or ():
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"{flag} is {text!r}, which no shell could read: {error}") from None
        if "\n" in text or not words or not words[0].startswith("-"):
            raise ConfigError(f"{flag} is {text!r}; expected options of sbatch's, as '--partition=long --mem=16G'")
        for word in words:
            name = word[:2] if re.match(r"-\w", word) else word.partition("=")[0]
            if name in refused:
                raise ConfigError(f"{flag} is {text!r}, but {refused[name]}: leave out {name}")
    return "".join(f"#SBATCH {text}\n" for text in given or ())


# The choices at the top of deploy/slurm/train.sbatch; the rest is the same in all scripts.
_CHOSEN = """\
#!/bin/bash
# A job of servers and workers, as `pyps slurm --print` writes it. Choose here, above the line.
#SBATCH --job-name={run_id} --requeue --open-mode=append
#SBATCH --no-kill --nodes={nodes} --ntasks-per-node=1
{server_sbatch}#SBATCH hetjob
#SBATCH --no-kill --ntasks={workers}
{worker_sbatch}
export PYPS_RUN_ID={run_id}
# Seen by all nodes: checkpoints, logs, and keys while the job runs.
folder={folder}
# --resume continues what is there; a requeued job does by itself.
resume={resume}
# On the nodes beyond so many each server has a standby.
num_servers={servers}
server_flags=({server_flags})
worker=({worker})
"""
