"""`pyps sandblaster`: a whole Sandblaster job on this machine, servers, coordinator and workers."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pyps.cli.coordination import flags
from pyps.cli.coordination.link import PROTOCOL
from pyps.cli.run import (
    SERVERS_MAX,
    STOP_SPARE_SECONDS,
    WORKERS_MAX,
    Expectations,
    Kept,
    PrefixedOutput,
    attention_only,
    check_servers_flags,
    folder_flags,
    run_job,
    spelled,
)
from pyps.config import ConfigError
from pyps.launcher import Job, JobSettings
from pyps.launcher.environment import check_worker_variables
from pyps.launcher.process import COORDINATOR

# So that a fast worker gets more of them than a slow one.
PORTIONS_PER_WORKER = 10
# What follows the worker's program is the worker's, --flags too, with and without a -- before it.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


def sandblaster(
    command: Annotated[
        list[str], typer.Argument(help="What each worker runs: a script, or any program.", show_default=False)
    ],
    servers: Annotated[int, typer.Option(help="Servers to start.", min=1, max=SERVERS_MAX)] = 1,
    workers: Annotated[int, typer.Option(help="Workers to start.", min=1, max=WORKERS_MAX)] = 1,
    iterations: flags.Iterations = flags.DEFAULTS.iterations_max,
    history: flags.History = flags.DEFAULTS.history,
    line_search: flags.LineSearch = flags.DEFAULTS.line_search,
    vector_free: flags.VectorFree = False,
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
    run_id: Annotated[str, typer.Option(help="The run's name; empty makes one.")] = "",
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints, one inside it per server.", envvar="PYPS_CHECKPOINT_DIR"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the newest checkpoint.")] = False,
    max_vector_bytes: Annotated[
        int | None,
        typer.Option(help="Bytes that each server may spend on vectors and staged gradients.", show_default=False),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with more settings of the servers.")] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Serve on after the workers' end, until Ctrl-C.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show all lines of the servers, not only warnings and errors.")
    ] = False,
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
        vector_free=vector_free,
        portions=portions or PORTIONS_PER_WORKER * workers,
        fold=fold,
        copies=copies,
        tolerance=tolerance,
        loss_tolerance=loss_tolerance,
        save_every=save_every,
    )
    server_flags = {
        "protocol": PROTOCOL,
        "max_vector_bytes": "" if max_vector_bytes is None else str(max_vector_bytes),
        "expected_workers": str(workers),
    }
    folder = "" if checkpoint_dir is None else str(checkpoint_dir)
    told = check_servers_flags({**server_flags, "checkpoint_dir": folder}, config, num_servers=servers)
    kept = Kept.of(told, checkpoint_dir, num_servers=servers)
    if resume and not kept.folders:
        raise ConfigError("--resume needs a folder to resume from: give --checkpoint-dir too")
    if resume:
        kept.check_servers()
    check_worker_variables(os.environ, count=workers)
    settings = JobSettings(
        command=worker_command(command),
        num_servers=servers,
        num_workers=workers,
        run_id=run_id,
        resume=resume,
        lanes=told.lane_port != "off",
        server_flags=spelled(server_flags, config),
        each_server_flags=tuple(
            folder_flags(f"server-{index}", checkpoint_dir=checkpoint_dir, resume=resume, update_log=None)
            for index in range(servers)
        ),
        coordinator_flags=flags.spelled_coordination(coordination),
        after_a_death=partial(kept.after_a_death, resumed=resume),
        server_stop_seconds=told.drain_seconds + STOP_SPARE_SECONDS,
    )
    expectations = Expectations(workers)
    output = PrefixedOutput(width=max(len(COORDINATOR), len(f"worker-{workers - 1}")))
    job = Job(
        settings,
        on_line=output.line if verbose else attention_only(output),
        announce=output.announce,
        without=lambda worker_id: expectations.lower(
            worker_id, [server.control for server in job.addresses], key=job.key_of(worker_id)
        ),
    )
    raise typer.Exit(run_job(job, output, stay=stay, kept=kept))


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
