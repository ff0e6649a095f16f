"""`pyps reset`: makes servers forget a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyps.cli.control import TIMEOUT_SECONDS, TOKEN_HELP, Servers, call_each
from pyps_wire import inspector_pb2 as pb


def reset(
    run_id: Annotated[str, typer.Argument(help="The run to forget: its name, as `pyps status` gives it.")],
    servers: Servers = "127.0.0.1:7611",
    token_file: Annotated[Path | None, typer.Option(help=TOKEN_HELP, envvar="PYPS_TOKEN_FILE")] = None,
) -> None:
    """Make servers forget a run, its parameters included.

    Its checkpoints stay on the servers' disks, renamed to forgotten-..., so that --resume does not bring it back.
    Works on the servers' own machine only. The run must be named, so that nothing is forgotten by accident.
    """
    request = pb.ResetRequest(run_id=run_id)
    for address, _ in call_each(servers, token_file, "Reset", request, timeout_seconds=TIMEOUT_SECONDS):
        typer.echo(f"{address} has forgotten run {run_id!r} and is empty.")
