"""`pyps ray`: servers, and workers that run a script, on a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pyps.cli.control import INTERRUPTED, fail
from pyps.cli.run import CONTEXT_SETTINGS as CONTEXT_SETTINGS
from pyps.cli.run import RunId, WorkerCommand
from pyps.cli.serve import KEPT, OF_A_JOB, with_settings
from pyps.config import ConfigError
from pyps.launcher.job import JobError
from pyps.launcher.process import ChildProcess
from pyps_wire.errors import PypsError

_BUNDLE = "What Ray keeps for each {}, as CPU=4,GPU=1."


@with_settings(*OF_A_JOB, *KEPT, "checkpoint_seconds", "init_from", "insecure")
def ray(
    command: WorkerCommand,
    servers: Annotated[int, typer.Option(help="Servers to start.", min=1)] = 1,
    workers: Annotated[int, typer.Option(help="Workers to start.", min=1)] = 1,
    resources: Annotated[str, typer.Option(help=_BUNDLE.format("worker"))] = "CPU=1",
    server_resources: Annotated[str, typer.Option(help=_BUNDLE.format("server"))] = "CPU=1",
    max_restarts: Annotated[int, typer.Option(help="How often Ray starts a failed worker again.", min=-1)] = 3,
    run_id: RunId = "",
    standby: Annotated[bool, typer.Option("--standby", help="Give each server a standby, for when it dies.")] = False,
    **settings: Any,
) -> None:
    """Start servers and workers on a Ray cluster and end with them.

    Each worker finds its servers, its run and its place in PYPS_ variables, which pyps_client reads by default. Set any
    other setting of `pyps serve` by its PYPS_ variable, which `pyps serve --help` names. Ray restarts workers as often
    as --max-restarts says, and servers from their checkpoints, if all nodes see --checkpoint-dir. The exit status is 0
    only if every worker finished with 0.
    """
    try:
        import pyps.ray as launcher
    except ImportError as error:
        raise ConfigError(str(error)) from None
    logging.basicConfig(format="pyps: %(message)s")
    launcher.logger.setLevel(logging.INFO)
    try:
        results = launcher.run(
            Command(tuple(command), str(Path.cwd())),
            servers=servers,
            workers=workers,
            resources=_bundle("--resources", resources),
            server_resources=_bundle("--server-resources", server_resources),
            max_restarts=max_restarts,
            run_id=run_id,
            standby=standby,
            **settings,
        )
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if isinstance(error, PypsError):
            raise
        # A worker's error comes with its trace; the last line names it.
        fail(str(error).strip().rpartition("\n")[2])
    raise typer.Exit(0 if None not in results else 1)


@dataclass(frozen=True)
class Command:
    """The function of each worker: run a program, in a folder if the node has it, and fail with it."""

    command: tuple[str, ...]
    folder: str

    def __call__(self) -> int:
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        ended = threading.Event()
        try:
            child = ChildProcess(
                self.command[0],
                self.command,
                environment=os.environ,
                on_line=lambda name, line: print(line, flush=True),
                on_end=lambda child: ended.set(),
            )
        except OSError as error:
            raise JobError(
                f"{self.command[0]!r} cannot be started on {socket.gethostname()}: {error.strerror}"
            ) from None
        ended.wait()
        if child.returncode:
            print(f"{self.command[0]} {child.how_it_ended()}", flush=True)
            os._exit(1)
        return 0


def _bundle(flag: str, text: str) -> dict[str, float]:
    bundle = {}
    for part in text.split(","):
        resource, _, amount = part.partition("=")
        try:
            bundle[resource.strip()] = float(amount)
        except ValueError:
            raise ConfigError(f"{flag} is {text!r}; expected names and numbers, as CPU=4,GPU=1") from None
    return bundle
