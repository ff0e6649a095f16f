"""`pyps save`: writes checkpoints now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyps.cli.control import SAVE_TIMEOUT_SECONDS, TOKEN_HELP, Servers, call_each
from pyps_wire import inspector_pb2 as pb


def save(
    servers: Servers = "127.0.0.1:7611",
    token_file: Annotated[Path | None, typer.Option(help=TOKEN_HELP, envvar="PYPS_TOKEN_FILE")] = None,
) -> None:
    """Make servers write a checkpoint now, each into its --checkpoint-dir.

    Works on the servers' own machine only.
    """
    request = pb.SaveCheckpointRequest()
    replies = call_each(servers, token_file, "SaveCheckpoint", request, timeout_seconds=SAVE_TIMEOUT_SECONDS)
    for address, reply in replies:
        typer.echo(f"{address} wrote {reply.path}: {reply.bytes:,} bytes in {reply.seconds:.2f} s.")
