"""`pyps sandblaster`: a whole Sandblaster job on this machine, servers, coordinator and workers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from pyps.cli.coordination import flags
from pyps.cli.coordination.link import PROTOCOL
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
# What follows the worker's program is the worker's, --flags too, with and without a -- before it.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


def sandblaster(
    command: Annotated[
        list[str], typer.Argument(help="What each worker runs: a script, or any program.", show_default=False)
    ],
    servers: LocalServers = 1,
    workers: Annotated[int, typer.Option(help="Workers to start.", min=1, max=WORKERS_MAX)] = 1,
    iterations: flags.Iterations = flags.DEFAULTS.iterations_max,
    history: flags.History = flags.DEFAULTS.history,
    line_search: flags.LineSearch = flags.DEFAULTS.line_search,
    portions: Annotated[
        int,
        typer.Option(
            help=f"Portions that the data set is cut into; 0: {PORTIONS_PER_WORKER} a worker. {flags.PORTIONS_HELP}",
            min=0,
            max=flags.PORTIONS_MAX,
        ),
    ] = 0,
    fold: flags.FoldText = "portion",
    copies: flags.Copies = 2,
    tolerance: flags.Tolerance = flags.DEFAULTS.gradient_tolerance,
    loss_tolerance: flags.LossTolerance = flags.DEFAULTS.loss_tolerance,
    save_every: flags.SaveEvery = 0,
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
) -> None:
    """Train by Sandblaster L-BFGS on this machine: servers, a coordinator, and workers that run one script.

    The script calls pyps_client.sandblaster with its model, a loss and its data set; it has no loop. A worker that
    dies costs only time, while there is another; a coordinator that is killed is started again and goes on. The exit
    status is 0 only if the coordinator and all workers finished with 0.
    """
    coordination = flags.coordination_settings(
        iterations=iterations,
        history=history,
        line_search=line_search,
        portions=portions or PORTIONS_PER_WORKER * workers,
        fold=fold,
        copies=copies,
        tolerance=tolerance,
        loss_tolerance=loss_tolerance,
        save_every=save_every,
    )
    job = JobSettings(
        command=worker_command(command),
        num_servers=servers,
        num_workers=workers,
        run_id=run_id,
        resume=resume,
        coordinator_flags=flags.spelled_coordination(coordination),
    )
    settings = {"protocol": PROTOCOL, "max_vector_bytes": "" if max_vector_bytes is None else str(max_vector_bytes)}
    run_locally(job, settings, Folders(checkpoint_dir), config, expected_workers=workers, stay=stay, verbose=verbose)


def worker_command(command: list[str]) -> tuple[str, ...]:
    """The command; a Python script that is named alone is run by the Python of the workers' environment."""
    program = command[0]
    if program.endswith(".py") and shutil.which(program) is None:
        if not Path(program).is_file():
            raise ConfigError(
                f"there is no script {program}: name the workers' script, as in `pyps sandblaster train.py`"
            )
        return ("python", *command)
    return tuple(command)
