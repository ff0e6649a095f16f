"""`pyps sandblaster`: a whole Sandblaster job on this machine, servers, coordinator and workers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from pyps.cli.coordination.link import PROTOCOL
from pyps.cli.coordination.settings import PORTIONS_HELP, PORTIONS_MAX, CoordinationSettings, with_coordination
from pyps.cli.run import (
    WORKERS_MAX,
    CheckpointDir,
    ConfigFile,
    Folders,
    LocalServers,
    Resume,
    RunId,
    Stay,
    Verbose,
    run_locally,
)
from pyps.config import ConfigError
from pyps.launcher import JobSettings

# So that a fast worker gets more of them than a slow one.
PORTIONS_PER_WORKER = 10
# Flags after the worker's program are the program's, with and without a -- before it.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


@with_coordination
def sandblaster(
    command: Annotated[
        list[str], typer.Argument(help="What each worker runs: a script, or any program.", show_default=False)
    ],
    servers: LocalServers = 1,
    workers: Annotated[int, typer.Option(help="Workers to start.", min=1, max=WORKERS_MAX)] = 1,
    portions: Annotated[
        int,
        typer.Option(
            help=f"Portions of the data set; 0: {PORTIONS_PER_WORKER} a worker. {PORTIONS_HELP}",
            min=0,
            max=PORTIONS_MAX,
        ),
    ] = 0,
    run_id: RunId = "",
    checkpoint_dir: CheckpointDir = None,
    resume: Resume = False,
    max_vector_bytes: Annotated[
        int | None,
        typer.Option(help="Bytes that each server may spend on vectors and staged gradients.", show_default=False),
    ] = None,
    config: ConfigFile = None,
    stay: Stay = False,
    verbose: Verbose = False,
    **coordination: Any,
) -> None:
    """Train by Sandblaster L-BFGS on this machine: servers, a coordinator, and workers that run one script.

    The script calls pyps_client.sandblaster with its model, a loss and its data set; it has no loop. A worker that
    dies costs only time, if there is another; a killed coordinator is started again and continues. The exit status is 0
    only if the coordinator and all workers finished with 0.
    """
    coordinator = CoordinationSettings(portions=portions or PORTIONS_PER_WORKER * workers, **coordination)
    job = JobSettings(
        command=worker_command(command),
        num_servers=servers,
        num_workers=workers,
        run_id=run_id,
        resume=resume,
        coordinator_flags=coordinator.as_flags(),
    )
    settings = {"protocol": PROTOCOL, "max_vector_bytes": "" if max_vector_bytes is None else str(max_vector_bytes)}
    run_locally(job, settings, Folders(checkpoint_dir), config, expected_workers=workers, stay=stay, verbose=verbose)


def worker_command(command: list[str]) -> tuple[str, ...]:
    """Return the command, with the Python of the workers' environment before a script that is no program."""
    program = command[0]
    if program.endswith(".py") and shutil.which(program) is None:
        if not Path(program).is_file():
            raise ConfigError(
                f"there is no script {program}: name the workers' script, as in `pyps sandblaster train.py`"
            )
        return ("python", *command)
    return tuple(command)
