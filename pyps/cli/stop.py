"""`pyps stop`: ends a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyps.cli.control import TIMEOUT_SECONDS, TOKEN_HELP, Servers, call_each
from pyps_wire import inspector_pb2 as pb


def stop(
    servers: Servers = "127.0.0.1:7611",
    token_file: Annotated[Path | None, typer.Option(help=TOKEN_HELP, envvar="PYPS_TOKEN_FILE")] = None,
) -> None:
    """Finish the run: workers are told to end, the servers refuse pushes and go on answering pulls.

    Works on the servers' own machine only.
    """
    request = pb.StopRequest()
    for address, _ in call_each(servers, token_file, "Stop", request, timeout_seconds=TIMEOUT_SECONDS):
        typer.echo(f"{address} has finished its run.")
