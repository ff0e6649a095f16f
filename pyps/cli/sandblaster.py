"""`pyps sandblaster`: a whole Sandblaster job on this machine, servers, coordinator and workers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from pyps.cli.coordination.link import PROTOCOL
from pyps.cli.coordination.settings import PORTIONS_HELP, PORTIONS_MAX, CoordinationSettings, with_coordination
from pyps.cli.run import CONTEXT_SETTINGS as CONTEXT_SETTINGS
from pyps.cli.run import ConfigFile, LocalServers, LocalWorkers, Parts, RunId, Stay, Verbose, run_locally
from pyps.cli.serve import KEPT, with_settings
from pyps.config import ConfigError
from pyps.launcher import JobSettings

# So that a fast worker gets more of them than a slow one.
PORTIONS_PER_WORKER = 10
_OF_SERVERS = (*KEPT, "max_vector_bytes")


@with_settings(*_OF_SERVERS)
@with_coordination
def sandblaster(
    command: Annotated[
        list[str], typer.Argument(help="What each worker runs: a script, or any program.", show_default=False)
    ],
    servers: LocalServers = 1,
    workers: LocalWorkers = 1,
    parts: Parts = None,
    portions: Annotated[
        int,
        typer.Option(
            help=f"Portions of the data set; 0: {PORTIONS_PER_WORKER} a worker. {PORTIONS_HELP}",
            min=0,
            max=PORTIONS_MAX,
        ),
    ] = 0,
    run_id: RunId = "",
    config: ConfigFile = None,
    stay: Stay = False,
    verbose: Verbose = False,
    **settings: Any,
) -> None:
    """Train by Sandblaster L-BFGS on this machine: servers, a coordinator, and workers that run one script.

    The script calls pyps_client.sandblaster with its model, a loss and its data set; it has no loop. A worker that
    dies costs only time, if there is another; a killed coordinator is started again and continues. The exit status is 0
    only if the coordinator and all workers finished with 0. --parts is as for `pyps run`.
    """
    of_servers = {"protocol": PROTOCOL} | {name: settings.pop(name) for name in _OF_SERVERS}
    coordinator = CoordinationSettings(portions=portions or PORTIONS_PER_WORKER * workers, **settings)
    job = JobSettings(
        command=worker_command(command),
        num_servers=servers,
        num_workers=workers,
        num_parts=parts,
        run_id=run_id,
        coordinator_flags=coordinator.as_flags(),
    )
    run_locally(job, of_servers, config, expected_workers=workers, stay=stay, verbose=verbose)


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
